"""Sequences with a common beginning stay resident as long as what they don't share fits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from genrt.engines.vllm.scheduler import most_blocks, needed_blocks
from genrt.lm import AsyncLM
from tests.engines.vllm.small import BLOCK as SIZE
from tests.engines.vllm.small import Oracle, expect_rows, tokens

pytestmark = pytest.mark.vllm

FAMILY = 8
"""Contexts of 144 tokens, 128 of them common: 4 blocks for all, and one or two for each."""


def family(seed: int) -> list[list[int]]:
    return [tokens(128, seed=seed) + tokens(16, seed=100 * seed + n) for n in range(FAMILY)]


async def asked(lm: AsyncLM, contexts: list[list[int]], oracle: Oracle) -> None:
    rows = await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    expect_rows(oracle, contexts, rows)


@pytest.mark.promise(number=4)
async def test_contexts_that_begin_alike_all_stay_resident(tight: AsyncLM, oracle: Oracle) -> None:
    """Their lengths alone are twice the memory."""
    lm, contexts, began = tight, family(1), tight.statistics().engine
    await asked(lm, contexts[:1], oracle)
    await asked(lm, contexts[1:], oracle)
    engine = lm.statistics().engine
    assert (engine.resident, engine.evicted) == (FAMILY, began.evicted)
    with lm.population(contexts) as population:
        population.append([5] * FAMILY)
        draws = await population.draw(masks=[[3]] * FAMILY)
    assert draws.token_ids.tolist() == [3] * FAMILY
    after = lm.statistics().engine
    assert after.extended - engine.extended == FAMILY
    assert after.computed_tokens - engine.computed_tokens == FAMILY


async def test_families_in_turns_evict_one_another_and_stay_right(
    tight: AsyncLM, oracle: Oracle
) -> None:
    """What the evicted alone held of a beginning is free, and counted for those who begin with it."""
    lm, families, began = tight, [family(n) for n in range(4)], tight.statistics().engine
    for turn in range(2):
        for number in (0, 1, 2, 0, 3):
            contexts = [[*each, turn] for each in families[number][turn:]]
            await asked(lm, contexts, oracle)
    assert lm.statistics().engine.evicted - began.evicted > FAMILY
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
        **{"running": [], "requests": {}} | fields,
        block_size=SIZE,
        max_num_scheduled_tokens=tokens,
        kv_cache_manager=manager,
    )


DONOR = request(8 * SIZE, name="donor", computed=3 * SIZE)
LONG = request(8 * SIZE)
RUNNING = [request(10 * SIZE, computed=4 * SIZE), request(SIZE + 3, computed=SIZE + 2)]


@pytest.mark.parametrize(
    ("fields", "waiting", "donor", "needed"),
    [
        # Shared blocks that nobody holds are taken from the pool.
        ({}, [request(8 * SIZE + 1)], None, 10),
        ({"held": 4}, [request(8 * SIZE + 1)], None, 6),
        ({"held": 4, "free": 2}, [request(8 * SIZE + 1)], None, 6),
        ({"free": 6}, [request(8 * SIZE + 1)], None, 10),
        # Only what a step has tokens for is counted; with six cached blocks that is a quarter.
        ({"tokens": 8 * SIZE + 1}, [LONG] * 5, None, 20),
        ({"tokens": 8 * SIZE}, [LONG] * 5, None, 10),
        ({"tokens": 8 * SIZE, "held": 6}, [LONG] * 5, None, 4 * 4),
        # Running requests take the rest of their prompts first.
        ({"running": RUNNING}, [], None, 7 + 1),
        ({"running": RUNNING, "tokens": 2}, [request(SIZE)], None, 8),
        ({"running": RUNNING, "tokens": 3}, [request(SIZE)], None, 8 + 3),
        # A donor gives no more than it has computed.
        ({"requests": {"donor": DONOR}}, [LONG], "donor", 10 - 3),
        ({"requests": {"donor": DONOR}}, [LONG], "gone", 10),
    ],
)
def test_the_blocks_that_waiting_requests_need(
    fields: dict[str, Any], waiting: list[Any], donor: str | None, needed: int
) -> None:
    one, donors = scheduler(**fields), {} if donor is None else {"new": (donor, 7 * SIZE)}
    assert needed_blocks(one, waiting, donors) == needed
    assert most_blocks(one, waiting) >= (0 if one.running else needed)
