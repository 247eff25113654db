"""Steps run before they are asked for, on an engine that runs ahead as engines on GPUs do. No step is
missed while populations grow, are resampled or end, and each draw is a quiet runtime's."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.lm import AsyncLM
from genrt.populations import Population
from genrt.tokens.sampling import BatchDraw
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import (
    COUNT,
    Runtimes,
    all_the_same,
    halved,
    run_always_ahead,
    same,
)
from tests.engines.vllm.small import begin, decode_steps_of, held, on_engine
from tests.inside import engine_of, populations_of
from tests.population_walk import HeldContexts

pytestmark = pytest.mark.vllm


@pytest.fixture
def runtimes(ahead: Runtimes) -> Runtimes:
    begin(ahead[0], ahead=True)
    return ahead


@pytest.fixture(scope="module")
def quiet_other(other: Path) -> Iterator[AsyncLM]:
    options = {"dtype": "float32"}
    with genrt.load(
        str(other), engine="transformers", engine_options=options, cache_bytes=0
    ) as quiet:
        yield quiet


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    run_always_ahead(monkeypatch)


def begun(lm: AsyncLM, *sizes: int) -> list[Population]:
    return [lm.population([[n, k, 4] for n in range(size)]) for k, size in enumerate(sizes)]


def closed(populations: list[Population], lm: AsyncLM) -> None:
    for each in populations:
        each.close()
    assert held(lm) == (0, 0, 0)


def several(*sizes: int) -> Callable[[AsyncLM], list[Population]]:
    return lambda lm: begun(lm, *sizes)


Due = Callable[[int, int], bool]
"""Whether population ``place`` is resampled after step ``step``."""
GROWING: dict[str, tuple[Callable[[AsyncLM], list[Population]], Due, int, int, int]] = {
    "four": (several(3, 7, 1, 12), lambda *_: False, 4, 12, 8),
    "two, resampled": (several(12, 12), lambda p, step: not p or step % 3 == 0, 8, 24, 15),
    "of one prompt": (lambda lm: [lm.population([5, 6, 7], COUNT)], lambda *_: True, 16, 32, 15),
    "seldom resampled": (several(12), lambda _, step: step % 7 == 3, 6, 30, 23),
}
"""Populations, when they are resampled, the first counted step, all steps, the least that ran ahead."""


@pytest.mark.parametrize("name", GROWING)
async def test_every_step_has_run_before_it_is_asked_for(runtimes: Runtimes, name: str) -> None:
    lm, quiet = runtimes
    make, is_resampled, first, steps, least = GROWING[name]
    rng, populations = random.Random(5), make(lm)
    for step in range(steps):
        if step == first:
            before = lm.statistics().engine
        await all_the_same(populations, quiet, seed=1000 * step)
        for place, population in enumerate(populations):
            if is_resampled(place, step):
                population.resample(halved(rng, len(population)))
    after = lm.statistics().engine
    assert after.speculated - before.speculated >= least
    if name != "seldom resampled":
        assert after.steps - before.steps == steps - first, "one forward a step for all"
    closed(populations, lm)


async def test_sequences_that_end_stop_no_step_ahead(runtimes: Runtimes) -> None:
    lm, quiet = runtimes
    [population] = populations = begun(lm, COUNT)
    for step in range(4):
        await same(population, quiet, seed=100 * step)
    before = lm.statistics().engine.speculated
    for step in range(COUNT):
        where = [number >= step for number in range(COUNT)]
        found = await population.draw(where=where, seed=9 + 100 * step)
        wanted = await drawn_apart(quiet, [*population], seed=9 + 100 * step)
        assert found.token_ids[step:].tolist() == wanted.token_ids[step:].tolist()
        population.append(found.token_ids)
    assert lm.statistics().engine.speculated - before >= COUNT - 1
    closed(populations, lm)


@pytest.mark.usefixtures("always")
async def test_the_rest_of_a_step_is_answered_from_the_step_of_all(runtimes: Runtimes) -> None:
    lm, quiet = runtimes
    populations = begun(lm, *[6] * 4)
    for step in range(6):
        await all_the_same(populations, quiet, seed=1000 * step)
    before = lm.statistics().engine.speculated
    for step in range(3):
        populations.pop(step % len(populations)).close()
        await all_the_same(populations, quiet, seed=50 + 1000 * step)
    assert lm.statistics().engine.speculated - before == 3
    closed(populations, lm)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("begun", [AsyncLM.population, HeldContexts.begin])
async def test_adapters_keep_their_steps_ahead_apart(
    adaptable: AsyncLM, llama: Path, loras: tuple[Path, Path], begun: Callable[..., Any]
) -> None:
    """Two adapters and the base model in turns and together; one is replaced under its population."""
    rng, lm = random.Random(2), adaptable
    begin(lm, ahead=True)
    began = lm.statistics().engine.speculated
    options = {"dtype": "float32"}
    with genrt.load(
        str(llama), engine="transformers", engine_options=options, cache_bytes=0
    ) as quiet:
        for each in (lm, quiet):
            for name, path in zip("ab", loras, strict=True):
                await each.add_adapter(name, path)
        names: list[str | None] = [None, "a", "b"]
        populations = {name: begun(lm, [4, 5, 6], COUNT, adapter=name) for name in names}
        for step in range(12):
            if step == 6:
                for each in (lm, quiet):
                    await each.add_adapter("a", loras[1])
            asked = names if step % 6 == 5 else [names[step // 3 % 3]]
            drawn = [populations[adapter] for adapter in asked]
            for population in drawn:
                population.resample(halved(rng))
            await all_the_same(drawn, quiet, seed=step, adapters=asked)
        assert lm.statistics().engine.speculated > began
        for population in populations.values():
            population.close()
        assert held(lm) == (0, 0, 0)


async def test_a_device_that_waits_has_its_draws_delivered_before_the_next_step_is_prepared(
    runtimes: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, quiet = runtimes
    steps = decode_steps_of(lm)
    prepare_next, is_told, in_time = steps.prepare_next, threading.Event(), []

    def late(forks: Any = None) -> None:
        in_time.append(is_told.wait(20))
        prepare_next(forks)

    [population] = begun(lm, COUNT)
    await same(population, quiet, seed=0)  # in vLLM's own step
    monkeypatch.setattr(populations_of(engine_of(lm)).early_delivery, "is_due", lambda _: True)
    monkeypatch.setattr(steps, "prepare_next", late)
    for step in range(1, 5):
        found = await population.draw(seed=100 * step)
        is_told.set()
        wanted = await drawn_apart(quiet, [*population], seed=100 * step)
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        population.append(found.token_ids)
        assert on_engine(lm, lambda _: [*in_time]) == [True] * step
        is_told.clear()
    closed([population], lm)


# -- blocks ---------------------------------------------------------------------------------------


async def advanced(population: Population, quiet: AsyncLM, rng: random.Random, most: int) -> None:
    """Advance by a block of 1 to ``most`` tokens; all of ``most`` if it is negative. The answer is the
    quiet runtime's."""
    counts = [rng.randint(1, most) if most > 0 else -most for _ in population]
    block = [[rng.randrange(quiet.vocab_size) for _ in range(n)] for n in counts]
    with quiet.population([*population]) as copy:
        wanted = await copy.advance(block)
    found = await population.advance(block)
    assert torch.allclose(found, wanted, atol=1e-3)


async def test_the_next_block_is_prepared_while_the_device_computes(runtimes: Runtimes) -> None:
    (lm, quiet), rng = runtimes, random.Random(7)
    [population] = begun(lm, COUNT)
    await same(population, quiet, seed=1)
    await advanced(population, quiet, rng, -4)
    before = lm.statistics().engine
    for _ in range(6):
        await advanced(population, quiet, rng, -4)
    after = lm.statistics().engine
    assert (after.prepared - before.prepared, after.steps - before.steps) == (6, 6)
    closed([population], lm)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("start", range(4))
async def test_a_block_that_was_prepared_in_vain_changes_nothing(
    runtimes: Runtimes, start: int
) -> None:
    """Blocks of equal and of other lengths, resampled and cut sequences, draws, texts, rows, and another
    population in between."""
    (lm, quiet), rng = runtimes, random.Random(start)
    [population, other] = begun(lm, COUNT, 5)

    async def grown() -> None:
        await same(population, quiet, seed=rng.randrange(1000))

    async def text() -> None:
        await lm.generate([3, 4, rng.randrange(lm.vocab_size)], max_tokens=3, ignore_eos=True)

    async def changed(change: Callable[[], None]) -> None:
        change()

    turns: list[Callable[[], Any]] = [
        lambda: advanced(population, quiet, rng, -4),
        lambda: advanced(population, quiet, rng, -4),
        lambda: advanced(population, quiet, rng, 3),
        lambda: advanced(other, quiet, rng, -4),
        lambda: asyncio.gather(*(advanced(each, quiet, rng, -4) for each in (population, other))),
        lambda: changed(lambda: population.resample(halved(rng, COUNT))),
        lambda: changed(lambda: population.cut(int(population.lengths.min()) - rng.randrange(3))),
        lambda: lm.next_token_logprobs([5, rng.randrange(lm.vocab_size)]),
        grown,
        text,
    ]
    began = lm.statistics().engine.prepared
    for _ in range(40):
        await rng.choice(turns)()
        if max(each.lengths.max() for each in (population, other)) > lm.max_model_len - 12:
            population.close()
            other.close()
            [population, other] = begun(lm, COUNT, 5)
    assert lm.statistics().engine.prepared > began
    population.close()
    other.close()
    begin(lm, ahead=True)
    assert held(lm)[:2] == (0, 0)


# -- beside steps ahead: new weights, pauses, other loops, another runtime ------------------------


async def equal(draws: BatchDraw, population: Population, quiet: AsyncLM, seed: int) -> bool:
    wanted = await drawn_apart(quiet, [*population], seed=seed)
    same: bool = draws.token_ids.tolist() == wanted.token_ids.tolist()
    return same and float((draws.logprobs - wanted.logprobs).abs().max()) < 1e-3


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("pending", [None, "finish", "restart"])
async def test_no_step_ahead_is_answered_by_other_weights_than_its_own(
    runtimes: Runtimes, quiet_other: AsyncLM, llama: Path, other: Path, pending: Any
) -> None:
    """New weights come between questions, or while all populations are asked about."""
    lm, populations = runtimes[0], begun(runtimes[0], 6, 3, 8)
    by: dict[int, AsyncLM] = {lm.weights_version: runtimes[1]}
    for turn in range(2):
        before = lm.statistics().engine.speculated
        for step in range(3):
            await all_the_same(populations, by[lm.weights_version], seed=1000 * step)
        assert lm.statistics().engine.speculated > before
        path, quiet = [(other, quiet_other), (llama, runtimes[1])][turn % 2]
        by[lm.weights_version + 1] = quiet
        asked = [asyncio.ensure_future(each.draw(seed=turn)) for each in populations if pending]
        for _ in range(turn):
            await asyncio.sleep(0)
        version = await lm.update_weights(path, pending=pending or "finish")
        if not pending:
            assert (await populations[0].draw()).weights_version == version
            continue
        for population, draws in zip(populations, await asyncio.gather(*asked), strict=True):
            assert await equal(draws, population, by[draws.weights_version], seed=turn)
            population.append(draws.token_ids)
    closed(populations, lm)
