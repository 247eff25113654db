"""Sequences with a common beginning stay resident as long as what they don't share fits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.vllm.scheduler import most_blocks, needed_blocks
from genrt.lm import AsyncLM

pytestmark = pytest.mark.vllm

SIZE = 32
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": SIZE,
    "max_num_seqs": 16,
    "max_model_len": 256,
    "num_gpu_blocks_override": 44,
}
FAMILY = 12
"""Contexts of 144 tokens, 128 of them common: 4 blocks for all, and one or two for each."""

TOLERANCE = 5e-4
Oracle = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture
def lm(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine_options=OPTIONS, cache_bytes=0) as lm:
        yield lm


def family(seed: int) -> list[list[int]]:
    random_of = random.Random(seed)
    drawn = [[random_of.randrange(320) for _ in range(144)] for _ in range(FAMILY)]
    return [drawn[0][:128] + each[128:] for each in drawn]


async def asked(lm: AsyncLM, contexts: list[list[int]], oracle: Oracle) -> None:
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    for context, row in zip(contexts, rows, strict=True):
        assert float((oracle(context) - row).abs().max()) < TOLERANCE


@pytest.mark.promise(number=4)
async def test_contexts_that_begin_alike_all_stay_resident(lm: AsyncLM, oracle: Oracle) -> None:
    """Their lengths alone are twice the memory."""
    contexts = family(1)
    await asked(lm, contexts[:1], oracle)
    await asked(lm, contexts[1:], oracle)
    engine = lm.statistics().engine
    assert (engine.resident, engine.evicted) == (FAMILY, 0)
    with lm.population(contexts) as population:
        population.append([5] * FAMILY)
        draws = await population.draw(masks=[[3]] * FAMILY)
    assert draws.token_ids.tolist() == [3] * FAMILY
    after = lm.statistics().engine
    assert after.extended - engine.extended == FAMILY
    assert after.computed_tokens - engine.computed_tokens == FAMILY


async def test_families_in_turns_evict_one_another_and_stay_right(
    lm: AsyncLM, oracle: Oracle
) -> None:
    """What the evicted alone held of a beginning is free, and counted for those who begin with it."""
    families = [family(seed) for seed in range(4)]
    for turn in range(3):
        for number in (0, 1, 2, 0, 3):
            contexts = [[*each, turn] for each in families[number][turn:]]
            await asked(lm, contexts, oracle)
    assert lm.statistics().engine.evicted > FAMILY
    assert (lm.statistics().batcher.queued, lm.statistics().batcher.in_flight) == (0, 0)


# -- counting -------------------------------------------------------------------------------------


def request(tokens: int, *, name: str = "new", computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=tokens, num_computed_tokens=computed)


def scheduler(*, held: int = 0, free: int = 0, tokens: int = 8_192, **fields: Any) -> Any:
    """One whose cache knows the first blocks of every request: ``held`` by somebody, then ``free``."""
    blocks = [SimpleNamespace(ref_cnt=1)] * held + [SimpleNamespace(ref_cnt=0)] * free
    manager = SimpleNamespace(
        get_computed_blocks=lambda _: (SimpleNamespace(blocks=(blocks,)), len(blocks) * SIZE, 0)
    )
    return SimpleNamespace(
        **{"running": [], "requests": {}, "prefixes": None} | fields,
        block_size=SIZE,
        max_num_scheduled_tokens=tokens,
        kv_cache_manager=manager,
    )


@pytest.mark.parametrize(("held", "free", "needed"), [(0, 0, 10), (4, 0, 6), (4, 2, 6), (0, 6, 10)])
def test_shared_blocks_that_nobody_holds_are_taken_from_the_pool(
    held: int, free: int, needed: int
) -> None:
    waiting = [request(8 * SIZE + 1)]
    assert needed_blocks(scheduler(held=held, free=free), waiting, {}) == needed
    assert most_blocks(scheduler(held=held, free=free), waiting) == 10


def test_only_what_a_step_has_tokens_for_is_counted() -> None:
    waiting = [request(8 * SIZE) for _ in range(5)]
    assert needed_blocks(scheduler(tokens=8 * SIZE + 1), waiting, {}) == 20
    assert needed_blocks(scheduler(tokens=8 * SIZE), waiting, {}) == 10
    # With six blocks cached a request takes a quarter of its tokens.
    assert needed_blocks(scheduler(held=6, tokens=8 * SIZE), waiting, {}) == 4 * 4


def test_running_requests_take_the_rest_of_their_prompts_first() -> None:
    running = [request(10 * SIZE, computed=4 * SIZE), request(SIZE + 3, computed=SIZE + 2)]
    assert needed_blocks(scheduler(running=running), [], {}) == 7 + 1
    assert needed_blocks(scheduler(running=running, tokens=2), [request(SIZE)], {}) == 8
    assert needed_blocks(scheduler(running=running, tokens=3), [request(SIZE)], {}) == 8 + 3


def test_a_donor_gives_no_more_than_it_has_computed() -> None:
    donor = request(8 * SIZE, name="donor", computed=3 * SIZE)
    one = scheduler(requests={"donor": donor})
    waiting = [request(8 * SIZE)]
    assert needed_blocks(one, waiting, {"new": ("donor", 7 * SIZE)}) == 10 - 3
    assert needed_blocks(one, waiting, {"new": ("gone", 7 * SIZE)}) == 10


def test_kept_prefixes_are_held() -> None:
    prefixes = SimpleNamespace(shared=lambda _: 5)
    assert needed_blocks(scheduler(prefixes=prefixes), [request(8 * SIZE)], {}) == 5
    assert most_blocks(scheduler(prefixes=prefixes), [request(8 * SIZE)]) == 5
