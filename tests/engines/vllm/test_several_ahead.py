"""Several populations at once on an engine that runs steps ahead: each step is of all of them, and the
next one runs before anybody asks."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genrt.lm import AsyncLM
from genrt.populations import Population
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import (
    all_the_same,
    halved,
    held,
    run_always_ahead,
    same,
    two_runtimes,
)

pytestmark = pytest.mark.vllm

Runtimes = tuple[AsyncLM, AsyncLM]


@pytest.fixture(scope="module")
def runtimes(llama: Path) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    with two_runtimes(llama) as both:
        yield both


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    run_always_ahead(monkeypatch)


@pytest.mark.parametrize("sizes", [[12, 12], [3, 7, 1, 12], [2] * 8])
async def test_every_step_of_several_populations_has_run_before_they_ask(
    runtimes: Runtimes, sizes: list[int]
) -> None:
    lm, quiet = runtimes
    populations = [lm.population([[n, k, 4] for n in range(size)]) for k, size in enumerate(sizes)]
    for step in range(12):
        if step == 4:
            before = lm.statistics().engine
        await all_the_same(populations, quiet, seed=1000 * step)
    after = lm.statistics().engine
    assert after.steps - before.steps == 8, "one forward a step for all"
    assert after.speculated - before.speculated == 8
    for each in populations:
        each.close()
    assert held(lm) == (0, 0)


async def test_resampling_one_or_all_of_them_stops_no_step_ahead(runtimes: Runtimes) -> None:
    """Forks are spread over the spare requests of each population."""
    lm, quiet = runtimes
    rng = random.Random(5)
    first, second = (lm.population([[n, k, 9] for n in range(12)]) for k in (1, 2))
    for step in range(24):
        if step == 8:
            before = lm.statistics().engine
        await all_the_same([first, second], quiet, seed=1000 * step)
        first.resample(halved(rng))
        if step % 3 == 0:
            second.resample(halved(rng))
    after = lm.statistics().engine
    assert after.steps - before.steps == 16
    assert after.speculated - before.speculated >= 15
    first.close()
    second.close()
    assert held(lm) == (0, 0)


@pytest.mark.parametrize("way", ["split", "taken"])
async def test_parts_of_one_population_are_not_given_the_same_spare_requests(
    runtimes: Runtimes, way: str
) -> None:
    """What the sequences of one question left may go on as those of either."""
    lm, quiet = runtimes
    for turn in range(6):
        whole = lm.population([[n, turn, 2] for n in range(12)])
        for step in range(3):
            await same(whole, quiet, seed=step)
        parts = [*whole.split([6, 6])] if way == "split" else [whole.take([n] * 3) for n in (0, 1)]
        for step in range(6):
            for part in parts:
                part.resample([n // 2 for n in range(len(part))])
            await all_the_same(parts, quiet, seed=100 * step)
        for each in (*parts, whole):
            each.close()
    assert held(lm) == (0, 0)


async def test_masks_and_temperatures_of_one_population_do_not_reach_another(
    runtimes: Runtimes,
) -> None:
    lm, quiet = runtimes
    masks = torch.zeros(5, lm.vocab_size, dtype=torch.bool)
    masks[:, [3, 4, 5]] = True
    ways: list[dict[str, Any]] = [{}, {"masks": masks}, {"temperature": 0.3}, {"temperature": 0.0}]
    populations = [lm.population([[n, k, 6] for n in range(5)]) for k in range(len(ways))]
    for step in range(10):
        rng = random.Random(step)
        rng.shuffle(ways)
        found = await asyncio.gather(
            *(each.draw(seed=step, **way) for each, way in zip(populations, ways, strict=True))
        )
        for population, draws, way in zip(populations, found, ways, strict=True):
            wanted = await drawn_apart(quiet, [*population], seed=step, **way)
            assert draws.token_ids.tolist() == wanted.token_ids.tolist()
            population.append(draws.token_ids)
    for each in populations:
        each.close()
    assert held(lm) == (0, 0)


async def test_those_that_are_left_are_answered_from_a_step_of_all(runtimes: Runtimes) -> None:
    lm, quiet = runtimes
    populations = [lm.population([[n, k, 7] for n in range(6)]) for k in range(4)]
    for step in range(6):
        await all_the_same(populations, quiet, seed=1000 * step)
    before = lm.statistics().engine.speculated
    for step in range(3):
        populations.pop(step % len(populations)).close()
        await all_the_same(populations, quiet, seed=50 + 1000 * step)
    assert lm.statistics().engine.speculated - before == 3
    populations[0].close()
    assert held(lm) == (0, 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_becomes_of_a_step_of_several_draws_are_right(
    runtimes: Runtimes, seed: int
) -> None:
    """Some ask and some don't, some are resampled, cut, joined, closed, given up or asked about by
    others; there are questions for rows in between."""
    lm, quiet = runtimes
    rng = random.Random(seed)

    def new(k: int) -> Population:
        size = rng.randrange(1, 9)
        if k % 2:
            return lm.population([4, seed, k], size)
        return lm.population([[n, k] for n in range(size)])

    populations = [new(k) for k in range(4)]
    for step in range(60):
        asked = populations if rng.random() < 0.6 else rng.sample(populations, rng.randrange(1, 4))
        beside: list[Any] = []
        if rng.random() < 0.15:
            beside.append(lm.next_token_logprobs(rng.choice([*rng.choice(populations)])))
        if rng.random() < 0.15:
            given_up = asyncio.ensure_future(rng.choice(populations).draw())
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            given_up.cancel()
        seeds = [rng.randrange(10**6) for _ in asked]
        own = [same(each, quiet, seed=s) for each, s in zip(asked, seeds, strict=True)]
        await asyncio.gather(*own, *beside)
        for place, population in enumerate(populations):
            chance, size = rng.random(), len(population)
            if chance < 0.3:
                population.resample([rng.randrange(size) for _ in range(size)])
            elif chance < 0.35:
                population.cut([max(2, int(n) - rng.randrange(3)) for n in population.lengths])
            elif chance < 0.4:
                population.close()
                populations[place] = new(10 + step)
            elif chance < 0.45 and size > 1:
                first, second = population.split([1, size - 1])
                if rng.random() < 0.5:
                    populations[place] = second.join(first)
                else:
                    populations[place], populations[(place + 1) % 4] = first, second
        for population in populations:
            if int(population.lengths.max()) > 100:
                population.cut(20)
    engine: Any = lm._thread.engine
    assert lm._thread.call(lambda _: len(engine._in_progress)).result() == 0
    assert lm.statistics().engine.speculated > 0
    for each in populations:
        each.close()
    populations.clear()
    gc.collect()
