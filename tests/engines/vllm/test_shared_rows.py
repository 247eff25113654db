"""Batches that ask at once after the same contexts share their rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genrt.lm import AsyncLM
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import two_runtimes

pytestmark = pytest.mark.vllm

COUNT = 8


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "ahead"])
def runtimes(llama: Path, request: pytest.FixtureRequest) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    with two_runtimes(llama, ahead=request.param, max_num_seqs=24) as both:
        yield both


def appended(contexts: list[list[int]], token_ids: list[int]) -> None:
    for context, token_id in zip(contexts, token_ids, strict=True):
        context.append(token_id)


async def test_a_batch_that_goes_on_computes_a_token_a_context(
    runtimes: tuple[AsyncLM, AsyncLM],
) -> None:
    """As lists that grow and as new ones, also after resampling."""
    lm, _ = runtimes
    rng = random.Random(3)
    contexts = [[n, *range(30)] for n in range(COUNT)]
    for step in range(12):
        before = lm.statistics().engine
        drawn = await lm.batch_draw(contexts, seed=step)
        after = lm.statistics().engine
        if step:
            different = len({*map(tuple, contexts)})
            assert after.computed_tokens - before.computed_tokens <= COUNT
            assert after.rows - before.rows in range(different, COUNT + 1)
            assert after.steps - before.steps == 1
        appended(contexts, drawn.token_ids.tolist())
        if step in (4, 8):
            contexts = [each.copy() for each in rng.choices(contexts, k=COUNT)]


async def test_those_that_ask_at_once_after_the_same_contexts_share_their_rows(
    runtimes: tuple[AsyncLM, AsyncLM],
) -> None:
    lm, quiet = runtimes
    rng = random.Random(2)
    contexts = [[rng.randrange(300) for _ in range(20)] for _ in range(COUNT)]
    for step in range(6):
        before = lm.statistics().engine
        asked = [lm.batch_draw(contexts, seed=seed) for seed in (step, 100 + step)]
        found = await asyncio.gather(*asked)
        after = lm.statistics().engine
        assert after.rows - before.rows == COUNT
        assert after.computed_tokens - before.computed_tokens == (COUNT if step else 20 * COUNT)
        for drawn, seed in zip(found, (step, 100 + step), strict=True):
            wanted = await drawn_apart(quiet, contexts, seed=seed)
            assert drawn.token_ids.tolist() == wanted.token_ids.tolist()
        appended(contexts, found[0].token_ids.tolist())


@pytest.mark.parametrize("turns", range(5))
async def test_one_that_is_given_up_takes_nothing_from_the_other(
    runtimes: tuple[AsyncLM, AsyncLM], turns: int
) -> None:
    lm, quiet = runtimes
    contexts = [[n, turns, *range(20)] for n in range(COUNT)]
    for step in range(5):
        first, second = (
            asyncio.ensure_future(lm.batch_draw(contexts, seed=seed)) for seed in (step, 100)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        (first if step % 2 else second).cancel()
        found = await asyncio.gather(first, second, return_exceptions=True)
        drawn: Any = found[1 if step % 2 else 0]
        wanted = await drawn_apart(quiet, contexts, seed=100 if step % 2 else step)
        assert drawn.token_ids.tolist() == wanted.token_ids.tolist()
        assert float((drawn.logprobs - wanted.logprobs).abs().max()) < 1e-3
        appended(contexts, drawn.token_ids.tolist())
