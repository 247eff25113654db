"""Crowds on vLLM itself: hardly any memory, a second runtime in the process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from genrt.errors import Closed
from genrt.lm import AsyncLM
from tests.engines.vllm import small
from tests.engines.vllm.small import (
    BLOCK,
    TIGHT_BLOCKS,
    TOLERANCE,
    Oracle,
    contexts_of,
    expect_rows,
    preemptions,
    runner_of,
)
from tests.inside import engine_of
from tests.scripted import PATIENCE_SECONDS, Gate

pytestmark = pytest.mark.vllm


def load(model: Path) -> AsyncLM:
    return small.load(model, blocks=TIGHT_BLOCKS, max_num_seqs=8)


# -- hardly any memory ----------------------------------------------------------------------------


@pytest.mark.promise(number=4)
async def test_rows_are_right_where_a_fraction_of_the_sequences_fit(
    tight: AsyncLM, oracle: Oracle
) -> None:
    """A hundred contexts and the samples beside them need hundreds of blocks; there are 24."""
    asked = contexts_of(100, 290, seed=1)
    held = [tight.context(each) for each in asked[:20]]
    before = tight.statistics()
    with preemptions(tight) as preempted:
        samples = asyncio.create_task(
            tight.batch_sample([[n, 5] for n in range(12)], max_tokens=120, temperature=0.0)
        )
        rows, drawn, own = await asyncio.gather(
            asyncio.gather(*map(tight.next_token_logprobs, asked)),
            tight.batch_draw(asked[:50], masks=[[3]] * 50),
            asyncio.gather(*(each.draw(mask=[3]) for each in held)),
        )
        for each, (token_id, *_) in zip(held, own, strict=True):
            each.append(token_id)
        later = await asyncio.gather(*(each.logprobs() for each in held))
        greedy = await samples
    assert sum(-(-len(context) // BLOCK) for context in asked) > 15 * TIGHT_BLOCKS
    expect_rows(oracle, asked, rows)
    expect_rows(oracle, [[*each, 3] for each in asked[:20]], later)
    assert drawn.token_ids.tolist() == [3] * 50
    for number, sample in enumerate(greedy):
        row = oracle([number, 5, *sample[:-1]])
        assert float(row.max() - row[sample[-1]]) < TOLERANCE
    after = tight.statistics()
    assert preempted
    assert after.engine.evicted > before.engine.evicted
    assert (after.batcher.queued, after.batcher.in_flight) == (0, 0)
    assert after.batcher.failed == before.batcher.failed


# -- two runtimes ---------------------------------------------------------------------------------


def ask(lm: AsyncLM, asked: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The rows of these contexts, asked at once on a loop of their own."""

    async def together() -> list[torch.Tensor]:
        return await asyncio.gather(*map(lm.next_token_logprobs, asked))

    return asyncio.run(together())


def tensors_of(lm: AsyncLM) -> list[weakref.ref[torch.Tensor]]:
    """vLLM's weights and KV cache."""
    runner = runner_of(lm)
    return [weakref.ref(each) for each in (*runner.model.parameters(), *runner.kv_caches)]


def have_another(tight: AsyncLM, llama: Path, oracle: Oracle) -> list[weakref.ref[torch.Tensor]]:
    """Load, ask and close another runtime; return its tensors. What is asked of it meanwhile ends."""
    mine, theirs = contexts_of(20, 100, seed=4), contexts_of(20, 100, seed=5)
    gate = Gate()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        loading = pool.submit(load, llama)
        rounds = [ask(tight, mine)]
        while not loading.done():
            rounds.append(ask(tight, mine))
        for rows in rounds:
            expect_rows(oracle, mine, rows)
        other = loading.result()
        both = [pool.submit(ask, tight, mine), pool.submit(ask, other, theirs)]
        expect_rows(oracle, mine, both[0].result(PATIENCE_SECONDS))
        expect_rows(oracle, theirs, both[1].result(PATIENCE_SECONDS))
        held = tensors_of(other)
        assert len(held) > 10
        assert all(reference() is not None for reference in held)

        engine: Any = engine_of(other)
        step = engine.step

        def slow() -> Any:
            gate.go_through()
            return step()

        engine.step = slow
        lost = pool.submit(ask, other, theirs)
        gate.wait_until_held()
        closing = pool.submit(other.close)
        assert isinstance(lost.exception(PATIENCE_SECONDS), Closed)
        expect_rows(oracle, theirs, ask(tight, theirs))
        gate.open()
        closing.result(PATIENCE_SECONDS)
        expect_rows(oracle, mine, ask(tight, mine))
    return held


@pytest.mark.promise(number=23)
def test_a_runtime_is_right_while_another_loads_works_and_is_closed(
    tight: AsyncLM, llama: Path, oracle: Oracle
) -> None:
    """The other's weights and blocks are free then."""
    held = have_another(tight, llama, oracle)
    gc.collect()
    assert [reference() for reference in held if reference() is not None] == []
    assert all(reference() is not None for reference in tensors_of(tight))
