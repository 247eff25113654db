"""Populations on an engine that runs steps ahead, as engines on GPUs do: sequences that share a row are
forked before they are asked for, so that their draws are computed whichever of them go on."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.lm import AsyncLM
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import (
    COUNT,
    OPTIONS,
    halved,
    held,
    run_always_ahead,
    running_ahead,
    same,
    two_runtimes,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def runtimes(llama: Path) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    with two_runtimes(llama) as both:
        yield both


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    run_always_ahead(monkeypatch)


@pytest.mark.parametrize("contexts", ["one", "many"])
async def test_steps_after_resampling_have_run_before_anybody_asks(
    runtimes: tuple[AsyncLM, AsyncLM], contexts: str
) -> None:
    lm, quiet = runtimes
    rng, prompt = random.Random(3), [5, 6, 7]
    many = [[n, *prompt] for n in range(COUNT)]
    with lm.population(prompt, COUNT) if contexts == "one" else lm.population(many) as population:
        for step in range(32):
            if step == 16:
                before = lm.statistics().engine
            await same(population, quiet, seed=100 * step)
            population.resample(halved(rng))
    after = lm.statistics().engine
    assert after.speculated - before.speculated >= 15
    assert after.steps - before.steps == 16
    assert held(lm) == (0, 0), "closing gives the forks back too"


async def test_sequences_that_are_equal_at_first_run_ahead_from_the_third_step_on(
    runtimes: tuple[AsyncLM, AsyncLM],
) -> None:
    """Under masks that leave little choice, as structures do; resampled in every step."""
    lm, quiet = runtimes
    rng, masks = random.Random(6), torch.zeros(COUNT, lm.vocab_size, dtype=torch.bool)
    masks[:, [3, 4]] = True
    before = lm.statistics().engine
    with lm.population([9, 8, 7], COUNT) as population:
        for step in range(12):
            found, wanted = await asyncio.gather(
                population.draw(masks=masks, seed=step),
                drawn_apart(quiet, [*population], masks=masks, seed=step),
            )
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            population.append(found.token_ids)
            population.resample(halved(rng))
    assert lm.statistics().engine.speculated - before.speculated >= 9
    assert held(lm) == (0, 0)


async def test_rare_resampling_stops_no_step_ahead(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    lm, quiet = runtimes
    rng = random.Random(4)
    with lm.population([[n, 1, 2] for n in range(COUNT)]) as population:
        for step in range(30):
            if step == 6:
                before = lm.statistics().engine.speculated
            await same(population, quiet, seed=100 * step)
            if step % 7 == 3:
                population.resample(halved(rng))
    assert lm.statistics().engine.speculated - before >= 23


async def test_sequences_that_end_stop_no_step_ahead(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    """Of those that are left, every one has been run."""
    lm, quiet = runtimes
    with lm.population([[n, 3, 4] for n in range(COUNT)]) as population:
        for step in range(4):
            await same(population, quiet, seed=100 * step)
        before = lm.statistics().engine.speculated
        for step in range(COUNT):
            where = [number >= step for number in range(COUNT)]
            found = await population.draw(where=where, seed=9 + 100 * step)
            wanted = await drawn_apart(quiet, list(population), seed=9 + 100 * step)
            assert found.token_ids[step:].tolist() == wanted.token_ids[step:].tolist()
            population.append(found.token_ids)
    assert lm.statistics().engine.speculated - before >= COUNT - 1


async def test_others_that_are_closed_stop_no_step_ahead(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    """What they gave back is asked about again, with what was kept of it."""
    lm, quiet = runtimes
    others = [lm.population([[n, 8, k] for n in range(2)]) for k in range(6)]
    for other in others:
        other.append((await other.draw(seed=0)).token_ids)
        other.append((await other.draw(seed=1)).token_ids)
    with lm.population([[n, 5, 4] for n in range(COUNT)]) as population:
        for step in range(8):
            await same(population, quiet, seed=100 * step)
        before, kept = lm.statistics().engine.speculated, [list(other) for other in others]
        for step, other in enumerate(others):
            other.close()
            await same(population, quiet, seed=7 + 100 * step)
        assert lm.statistics().engine.speculated - before == len(others)
        again = lm.population([context for contexts in kept for context in contexts])
        await same(again, quiet, seed=3)
        again.close()
    assert held(lm) == (0, 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_becomes_of_a_step_ahead_draws_are_right(
    runtimes: tuple[AsyncLM, AsyncLM], seed: int
) -> None:
    """Other tokens than were drawn, resampling, cuts, splits and joins, other populations and questions
    in between, some of a forked sequence, draws that are given up."""
    lm, quiet = runtimes
    rng = random.Random(seed)
    population, other = lm.population([1, 2, 3, seed], COUNT), lm.population([4, seed], 3)
    for step in range(50):
        beside: list[Any] = []
        if rng.random() < 0.15:
            beside.append(lm.next_token_logprobs(rng.choice([*population])))
        if rng.random() < 0.1:
            beside.append(other.draw(seed=step))
        elif rng.random() < 0.1:  # and new ones in its place
            other.close()
            other = lm.population([4, seed, step], 3)
        if rng.random() < 0.1:
            given_up = asyncio.ensure_future(population.draw())
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            given_up.cancel()
        await asyncio.gather(same(population, quiet, seed=rng.randrange(10**6)), *beside)
        chance = rng.random()
        if chance < 0.5:
            population.resample(halved(rng))
        elif chance < 0.6:
            population.resample([rng.randrange(COUNT) for _ in range(COUNT)])
        elif chance < 0.65:
            population.cut([max(4, int(n) - rng.randrange(3)) for n in population.lengths])
        elif chance < 0.75:
            drawn = population.token_ids[range(COUNT), population.lengths - 1].tolist()
            population.cut([int(n) - 1 for n in population.lengths])
            population.append([rng.choice([token, 7]) for token in drawn])
            if rng.random() < 0.7:
                population.resample(halved(rng))
        elif chance < 0.85:
            first, second = population.split([COUNT // 2, COUNT - COUNT // 2])
            population = second.join(first)
        if int(population.lengths.max()) > 100:
            population.cut(20)
    engine: Any = lm._thread.engine
    assert lm._thread.call(lambda _: len(engine._in_progress)).result() == 0
    assert lm.statistics().engine.speculated > 0
    population.close()
    other.close()
    del population, other, first, second
    gc.collect()


@pytest.mark.usefixtures("always")
async def test_a_request_that_went_on_with_another_population_is_not_taken_for_what_it_was(
    runtimes: tuple[AsyncLM, AsyncLM],
) -> None:
    """Two copies share their requests; one goes on, the other is joined with it."""
    lm, quiet = runtimes
    population = lm.population([[n, 8, 9] for n in range(COUNT)])
    for step in range(3):
        await same(population, quiet, seed=100 * step)
    left = population.take(range(COUNT // 2))
    right = population.take([0, 1, 2, *range(COUNT // 2, COUNT)])
    await same(left, quiet, seed=1)
    joined = right.join(left)
    for step in range(3):
        await same(joined, quiet, seed=200 + 100 * step)


@pytest.mark.usefixtures("always")
async def test_forks_are_evicted_like_every_sequence(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    lm, quiet = runtimes
    rng = random.Random(7)
    with lm.population([[n, 8, 9] for n in range(COUNT)]) as population:
        for step in range(12):
            await same(population, quiet, seed=100 * step)
            population.resample(halved(rng))
            if step % 4 == 3:
                crowd = [[rng.randrange(300) for _ in range(40)] for _ in range(60)]
                await lm.batch_next_token_logprobs(crowd)


async def test_forks_are_forgotten_with_all_residents(runtimes: tuple[AsyncLM, AsyncLM]) -> None:
    lm, quiet = runtimes
    rng = random.Random(8)
    population = lm.population([[n, 8, 9] for n in range(COUNT)])
    for step in range(8):
        await same(population, quiet, seed=100 * step)
        population.resample(halved(rng))
    engine: Any = lm._thread.engine
    lm._thread.call(lambda _: engine.forget_residents()).result()
    assert held(lm) == (0, 0)
    await same(population, quiet, seed=5)
    population.close()


@pytest.mark.usefixtures("always")
async def test_adapters_keep_their_steps_ahead_apart(llama: Path, loras: tuple[Path, Path]) -> None:
    """Two adapters and the base model in turns and together; one is replaced under its population."""
    options = OPTIONS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    rng = random.Random(2)
    with running_ahead():
        lm = genrt.load(str(llama), engine_options=options, cache_bytes=0)
    with lm, genrt.load(str(llama), engine_options=options, cache_bytes=0) as quiet:
        for each in (lm, quiet):
            for name, path in zip("ab", loras, strict=True):
                await each.add_adapter(name, path)
        names: list[str | None] = [None, "a", "b"]
        at_first = held(lm)  # of the rows by which adapters are tested
        populations = {name: lm.population([4, 5, 6], COUNT, adapter=name) for name in names}
        for step in range(24):
            if step == 12:
                for each in (lm, quiet):
                    await each.add_adapter("a", loras[1])
            asked = names if step % 6 == 5 else [names[step // 3 % 3]]
            several = [populations[adapter] for adapter in asked]
            for population in several:
                population.resample(halved(rng))
            found = await asyncio.gather(*(each.draw(seed=step) for each in several))
            for adapter, population, draws in zip(asked, several, found, strict=True):
                wanted = await drawn_apart(quiet, [*population], seed=step, adapter=adapter)
                assert draws.token_ids.tolist() == wanted.token_ids.tolist()
                population.append(draws.token_ids)
        assert lm.statistics().engine.speculated > 0
        for population in populations.values():
            population.close()
        assert held(lm) == at_first


async def test_whoever_asks_a_device_that_waits_is_told_before_the_next_step_is_prepared(
    runtimes: tuple[AsyncLM, AsyncLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, quiet = runtimes
    engine: Any = lm._thread.engine
    steps = engine._open.steps
    prepare_next, is_told, in_time = steps.prepare_next, threading.Event(), []

    def late(forks: Any = None) -> None:
        in_time.append(is_told.wait(20))
        prepare_next(forks)

    with lm.population([[n, 3, 5] for n in range(COUNT)]) as population:
        await same(population, quiet, seed=0)  # in vLLM's own step
        monkeypatch.setattr(engine._populations.early_delivery, "is_due", lambda _: True)
        monkeypatch.setattr(steps, "prepare_next", late)
        for step in range(1, 5):
            found = await population.draw(seed=100 * step)
            is_told.set()
            wanted = await drawn_apart(quiet, [*population], seed=100 * step)
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            population.append(found.token_ids)
            assert lm._thread.call(lambda _: [*in_time]).result() == [True] * step
            is_told.clear()
    assert held(lm) == (0, 0)
