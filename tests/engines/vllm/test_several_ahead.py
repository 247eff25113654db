"""Several populations at once on an engine that runs steps ahead: each step is of all of them, and the
next one runs before anybody asks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.lm import AsyncLM
from genrt.populations import Population
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import (
    OPTIONS,
    halved,
    held,
    run_always_ahead,
    running_ahead,
    two_runtimes,
)
from tests.population_walk import draw_all

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
        await draw_all(populations, quiet, seed=1000 * step)
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
        await draw_all([first, second], quiet, seed=1000 * step)
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
            await draw_all([whole], quiet, seed=step)
        parts = [*whole.split([6, 6])] if way == "split" else [whole.take([n] * 3) for n in (0, 1)]
        for step in range(6):
            for part in parts:
                part.resample([n // 2 for n in range(len(part))])
            await draw_all(parts, quiet, seed=100 * step)
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
        await draw_all(populations, quiet, seed=1000 * step)
    before = lm.statistics().engine.speculated
    for step in range(3):
        populations.pop(step % len(populations)).close()
        await draw_all(populations, quiet, seed=50 + 1000 * step)
    assert lm.statistics().engine.speculated - before == 3
    populations[0].close()
    assert held(lm) == (0, 0)


# -- two runtimes of one process ----------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second random Llama of the same shape as ``llama``."""
    from tests.small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("other") / "model", seed=7)


@pytest.fixture(scope="module")
def of_the_other(other: Path) -> Iterator[Runtimes]:
    with two_runtimes(other) as both:
        yield both


def begun(lm: AsyncLM) -> list[Population]:
    return [lm.population([[n, k, 4] for n in range(size)]) for k, size in enumerate((6, 3, 8))]


@pytest.mark.usefixtures("always")
async def test_two_runtimes_that_both_run_ahead_do_not_see_each_other(
    runtimes: Runtimes, of_the_other: Runtimes
) -> None:
    both = [(lm, quiet, begun(lm)) for lm, quiet in (runtimes, of_the_other)]
    for step in range(12):
        if step == 4:
            before = [lm.statistics().engine.speculated for lm, _, _ in both]
        await asyncio.gather(*(draw_all(each, quiet, step) for _, quiet, each in both))
        if step == 7:
            middle = [lm.statistics().engine.speculated for lm, _, _ in both]
            assert [now - then for now, then in zip(middle, before, strict=True)] == [4, 4]
            with running_ahead():
                await of_the_other[0].arestart()
    after = [lm.statistics().engine.speculated for lm, _, _ in both]
    assert after[0] - middle[0] == 4
    assert after[1] >= 2, "of an engine that is new"
    for lm, _, populations in both:
        for each in populations:
            each.close()
        assert held(lm) == (0, 0)


@pytest.mark.usefixtures("always")
async def test_a_runtime_that_is_closed_in_the_middle_leaves_the_other_as_it_was(
    llama: Path, runtimes: Runtimes
) -> None:
    lm, quiet = runtimes
    mine = begun(lm)
    for turn in range(2):
        with ExitStack() as opened:
            with running_ahead():
                second = genrt.load(str(llama), engine_options=OPTIONS, cache_bytes=0)
            opened.callback(second.close)
            theirs = begun(second)
            for step in range(3):
                await asyncio.gather(
                    draw_all(mine, quiet, seed=100 * turn + step),
                    draw_all(theirs, quiet, seed=step),
                )
            left = [asyncio.ensure_future(each.draw()) for each in theirs]
            await asyncio.sleep(0)
        await asyncio.gather(*left, return_exceptions=True)
        await draw_all(mine, quiet, seed=turn)
    for each in mine:
        each.close()
    assert held(lm) == (0, 0)
