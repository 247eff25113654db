"""A new kind of question is one file: what CONTRIBUTING.md says of adding one, done here for entropy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.lm import AsyncLM
from genrt.questions.reads import Answering, Read, ReadRequest, Wanted, parts_of
from genrt.questions.rows import row_request
from genrt.runtime.ask import blocking_question

MODEL = NGram.random(11, order=2, seed=3)


@dataclass(frozen=True, slots=True)
class Entropy(Wanted):
    """Wanted of a row: its entropy in nats; the answer is a float."""

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[float]:
        """Yield the entropies, by one copy for as many rows as are worked on at once."""
        for _, rows in parts_of(reads):
            yield from torch.special.entr(rows.exp()).sum(-1).tolist()


async def entropy(lm: AsyncLM, token_ids: Sequence[int], *, timeout: float | None = None) -> float:
    """Return the entropy of the next token, in nats."""
    request = ReadRequest(row_request(lm._limits, token_ids, None), Entropy())
    return cast("float", (await lm._ask((request,), timeout=timeout))[0])


entropy_sync = blocking_question(entropy)


async def test_it_is_batched_shared_cached_and_cancelled_as_all_others() -> None:
    with genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=16)) as lm:
        contexts = [[1], [2], [3], [1]]
        left = asyncio.create_task(entropy(lm, [4]))
        found = asyncio.gather(*(entropy(lm, each) for each in contexts), lm.draw([1], seed=1))
        await asyncio.sleep(0)
        left.cancel()
        *entropies, _ = await found
        for context, value in zip(contexts, entropies, strict=True):
            row = await lm.next_token_logprobs(context)
            assert value == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-5)
        assert left.cancelled()
        before = lm.statistics()
        assert entropy_sync(lm, [2]) == entropies[1]
        since = lm.statistics().since(before)
        assert (since.engine.rows, since.engine.reads, since.cache.hits) == (0, 1, 1)
