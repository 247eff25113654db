"""Several populations whose steps run ahead, and what befalls their engine meanwhile: new weights,
pauses, other loops, and a second runtime of the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.lm import AsyncLM
from genrt.populations import Population
from genrt.tokens.sampling import BatchDraw
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import (
    OPTIONS,
    all_the_same,
    held,
    run_always_ahead,
    running_ahead,
    two_runtimes,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("always")]

Runtimes = tuple[AsyncLM, AsyncLM]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    run_always_ahead(monkeypatch)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second random Llama of the same shape as ``llama``."""
    from tests.small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("other") / "model", seed=7)


@pytest.fixture(scope="module")
def runtimes(llama: Path) -> Iterator[Runtimes]:
    with two_runtimes(llama) as both:
        yield both


@pytest.fixture(scope="module")
def of_the_other(other: Path) -> Iterator[Runtimes]:
    with two_runtimes(other) as both:
        yield both


def begun(lm: AsyncLM) -> list[Population]:
    return [lm.population([[n, k, 4] for n in range(size)]) for k, size in enumerate((6, 3, 8))]


async def equal(draws: BatchDraw, population: Population, quiet: AsyncLM, seed: int) -> bool:
    wanted = await drawn_apart(quiet, [*population], seed=seed)
    same: bool = draws.token_ids.tolist() == wanted.token_ids.tolist()
    return same and float((draws.logprobs - wanted.logprobs).abs().max()) < 1e-3


async def test_after_new_weights_no_step_that_ran_ahead_is_answered(
    runtimes: Runtimes, of_the_other: Runtimes, llama: Path, other: Path
) -> None:
    lm, by = runtimes[0], [(llama, runtimes[1]), (other, of_the_other[1])]
    populations = begun(lm)
    for turn in range(4):
        path, quiet = by[turn % 2]
        version = await lm.update_weights(path)
        before = lm.statistics().engine.speculated
        for step in range(4):
            await all_the_same(populations, quiet, seed=1000 * step)
        assert lm.statistics().engine.speculated - before >= 2
        draws = await populations[0].draw()
        assert draws.weights_version == version
    await lm.update_weights(llama)
    for each in populations:
        each.close()
    assert held(lm) == (0, 0)


@pytest.mark.parametrize("pending", ["finish", "restart"])
async def test_weights_that_come_while_all_are_asked_are_those_that_the_draws_name(
    runtimes: Runtimes, of_the_other: Runtimes, llama: Path, other: Path, pending: Any
) -> None:
    lm = runtimes[0]
    populations = begun(lm)
    by: dict[int, AsyncLM] = {lm.weights_version: runtimes[1]}
    for turn in range(6):
        for step in range(2):
            await all_the_same(populations, by[lm.weights_version], seed=step)
        path, quiet = [(other, of_the_other[1]), (llama, runtimes[1])][turn % 2]
        by[lm.weights_version + 1] = quiet
        asked = [asyncio.ensure_future(each.draw(seed=turn)) for each in populations]
        for _ in range(turn):
            await asyncio.sleep(0)
        await lm.update_weights(path, pending=pending)
        for population, draws in zip(populations, await asyncio.gather(*asked), strict=True):
            assert await equal(draws, population, by[draws.weights_version], seed=turn)
            population.append(draws.token_ids)
    for each in populations:
        each.close()
    assert lm.weights_version in by
    assert held(lm) == (0, 0)


async def test_two_runtimes_that_both_run_ahead_do_not_see_each_other(
    runtimes: Runtimes, of_the_other: Runtimes
) -> None:
    both = [(lm, quiet, begun(lm)) for lm, quiet in (runtimes, of_the_other)]
    for step in range(12):
        if step == 4:
            before = [lm.statistics().engine.speculated for lm, _, _ in both]
        await asyncio.gather(*(all_the_same(each, quiet, step) for _, quiet, each in both))
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


async def test_pauses_and_loops_of_other_threads_lose_no_draw(runtimes: Runtimes) -> None:
    """Each population is asked about by another thread's loop, which ends then."""
    lm, quiet = runtimes
    populations = begun(lm)
    for step in range(8):
        if step % 3 == 2:
            await lm.pause()
        asked = [asyncio.to_thread(each.draw_sync, seed=step) for each in populations]
        found = asyncio.gather(*asked)
        if step % 3 == 2:
            lm.resume()
        for population, draws in zip(populations, await found, strict=True):
            assert await equal(draws, population, quiet, seed=step)
            population.append(draws.token_ids)
    for each in populations:
        each.close()
    assert held(lm) == (0, 0)


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
                    all_the_same(mine, quiet, seed=100 * turn + step),
                    all_the_same(theirs, quiet, seed=step),
                )
            left = [asyncio.ensure_future(each.draw()) for each in theirs]
            await asyncio.sleep(0)
        await asyncio.gather(*left, return_exceptions=True)
        await all_the_same(mine, quiet, seed=turn)
    for each in mine:
        each.close()
    assert held(lm) == (0, 0)
