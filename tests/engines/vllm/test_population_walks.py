"""Random walks of populations: draws are cancelled, timed out and overtaken by restarts, sequences are
resampled, changed, cut, split, joined and closed, and others ask the same engine. Each draw is a quiet
runtime's, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.errors import TimedOut
from genrt.lm import AsyncLM
from genrt.populations import Population
from tests.engines.vllm.ahead import (
    COUNT,
    OPTIONS,
    Runtimes,
    all_the_same,
    halved,
    held,
    run_always_ahead,
    two_runtimes,
    under_way,
)

pytestmark = pytest.mark.vllm

SEQUENCES = 24
LONGEST = 90


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "ahead"])
def runtimes(llama: Path, request: pytest.FixtureRequest) -> Iterator[Runtimes]:
    with two_runtimes(llama, ahead=request.param, max_num_seqs=SEQUENCES) as both:
        yield both


class Walk:
    """Populations and what happens to them."""

    def __init__(self, lm: AsyncLM, count: int, seed: int) -> None:
        self.lm = lm
        self.rng = random.Random(seed)
        self.populations = [self.new() for _ in range(count)]

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.lm.vocab_size) for _ in range(count)]

    def new(self) -> Population:
        count = self.rng.choice([1, 3, COUNT, COUNT])
        if self.rng.random() < 0.5:
            return self.lm.population(self.ids(20), count)
        return self.lm.population([[n, *self.ids(6)] for n in range(count)])

    def any(self) -> Population:
        return self.rng.choice(self.populations)

    async def cancelled(self) -> None:
        """A draw is given up, anywhere on its way."""
        draw = asyncio.ensure_future(self.any().draw(seed=self.rng.randrange(99)))
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.5:  # one that has reached the engine, whose step goes on
            await self.lm.next_token_logprobs(self.ids(1))
        draw.cancel()
        await asyncio.gather(draw, return_exceptions=True)

    async def timed_out(self) -> None:
        with contextlib.suppress(TimedOut):
            await self.any().draw(timeout=self.rng.choice([0.0, 0.0001, 0.002]))

    async def restarted(self) -> None:
        """In the middle of a draw, which fails or is answered."""
        draw = asyncio.ensure_future(self.any().draw(seed=1))
        await asyncio.sleep(0)
        await asyncio.gather(self.lm.arestart(), draw, return_exceptions=True)

    async def evicted(self) -> None:
        await self.lm.batch_next_token_logprobs([self.ids(40) for _ in range(40)])

    async def from_another_loop(self) -> None:
        """A closed loop's population goes on in this one."""
        await asyncio.to_thread(self.any().draw_sync, seed=3)

    async def asked_about(self) -> None:
        """A row of one of its sequences."""
        context = self.rng.choice([*self.any()])
        assert float((await self.lm.next_token_logprobs(context)).logsumexp(0).abs()) < 1e-3

    def change(self, place: int) -> None:
        """Another population of the same sequences, copied, cut, joined or with other last tokens."""
        population, rng = self.populations[place], self.rng
        count, chance = len(population), rng.random()
        if chance < 0.2:
            population.resample(halved(rng, count))
        elif chance < 0.4:
            population.resample([rng.randrange(count) for _ in range(count)])
        elif chance < 0.45:
            population.cut([max(5, int(n) - rng.randrange(3)) for n in population.lengths])
        elif chance < 0.55:
            drawn = population.token_ids[range(count), population.lengths - 1].tolist()
            population.cut([int(n) - 1 for n in population.lengths])
            population.append([rng.choice([token, 7]) for token in drawn])
        elif chance < 0.65 and count > 1:
            first, second = population.split([count // 3 or 1, count - (count // 3 or 1)])
            self.populations[place] = second.join(first)
        elif chance < 0.7:
            population.close()
            self.populations[place] = self.new()
        if int(self.populations[place].lengths.max()) > LONGEST:
            self.populations[place].cut(20)


@pytest.mark.parametrize(
    ("count", "seed", "steps"),
    [
        (1, 0, 40),
        (2, 1, 40),
        (4, 2, 40),
        *(pytest.param(n, n, 150, marks=pytest.mark.proof) for n in range(1, 5)),
    ],
)
@pytest.mark.parametrize("is_always", [False, True])
async def test_whatever_happens_draws_are_those_of_the_sequences(
    runtimes: Runtimes,
    count: int,
    seed: int,
    steps: int,
    is_always: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some ask and some don't; what happens to one happens while the others draw."""
    if is_always:
        run_always_ahead(monkeypatch)
    lm, quiet = runtimes
    walk = Walk(lm, count, seed)
    rng = walk.rng
    events = [walk.cancelled, walk.timed_out, walk.evicted, walk.from_another_loop]
    for step in range(steps):
        asked = walk.populations
        if rng.random() < 0.4:
            asked = rng.sample(asked, rng.randrange(1, count + 1))
        if not is_always and step in (steps // 3, steps // 2):
            await walk.restarted()
        beside = [walk.asked_about()] if rng.random() < 0.3 else []
        if rng.random() < 0.3:
            event = rng.choice(events)
            if count == 1:
                await event()
            else:
                beside.append(event())
        await asyncio.gather(all_the_same(asked, quiet, rng.randrange(10**6)), *beside)
        for place in range(count):
            walk.change(place)
    assert under_way(lm) == (0, 0)
    statistics = lm.statistics()
    assert (statistics.batcher.queued, statistics.batcher.in_flight) == (0, 0)
    assert statistics.engine.forked > 0  # since the last restart
    assert statistics.engine.extended > 0
    for each in walk.populations:
        each.close()


# -- what is given back -------------------------------------------------------------------------


def known(lm: AsyncLM) -> int:
    """The number of questions that the engine knows by number."""
    engine: Any = lm._thread.engine
    return lm._thread.call(lambda _: len(engine._populations._known)).result()


@pytest.fixture
def empty(runtimes: Runtimes) -> AsyncLM:
    lm = runtimes[0]
    engine: Any = lm._thread.engine
    lm._thread.call(lambda _: engine.forget_residents()).result()
    gc.collect()
    assert held(lm) == (0, 0)
    return lm


async def grown(population: Population, steps: int) -> None:
    for seed in range(steps):
        population.append((await population.draw(seed=100 * seed)).token_ids)


async def test_a_closed_population_gives_back_all_it_took(empty: AsyncLM) -> None:
    for steps in (1, 2, 20):
        with empty.population([1, 2, 3], COUNT) as population:
            await grown(population, steps)
            population.resample([0, 1] * (COUNT // 2))
            await population.draw()
            assert held(empty)[0] >= 1
        assert (*held(empty), known(empty)) == (0, 0, 0)


async def test_what_a_copy_goes_on_from_is_given_back_with_the_copy(empty: AsyncLM) -> None:
    with empty.population([1, 2, 3], COUNT) as population:
        await grown(population, 4)
        copy = population.take(range(4))
    before = empty.statistics().engine
    assert before.resident >= 4
    await grown(copy, 2)
    after = empty.statistics().engine
    assert after.computed_tokens - before.computed_tokens == 8
    copy.close()
    copy.close()
    assert (*held(empty), known(empty)) == (0, 0, 0)


async def test_closed_in_the_middle_of_a_draw_it_gives_back_what_that_took(empty: AsyncLM) -> None:
    population = empty.population([1, 2, 3], COUNT)
    await grown(population, 3)
    draw = asyncio.ensure_future(population.draw())
    await asyncio.sleep(0)
    population.close()
    assert len((await draw).token_ids) == COUNT
    assert held(empty)[0] <= 1  # the questions before it, whose sequences went on
    assert known(empty) == 0


async def test_closing_after_a_restart_and_after_the_runtime_is_quiet(
    empty: AsyncLM, llama: Path
) -> None:
    with empty.population([1, 2, 3], COUNT) as population:
        await grown(population, 3)
        await empty.arestart()
    assert (*held(empty), known(empty)) == (0, 0, 0)
    async with await genrt.aload(str(llama), engine_options=OPTIONS) as lm:
        late = lm.population([1, 2, 3], 4)
        await late.draw()
    late.close()


@pytest.mark.proof
async def test_ten_thousand_short_lived_populations_leave_nothing(empty: AsyncLM) -> None:
    for number in range(500):
        several = [empty.population([number % 300, number // 300, 2, n], 2) for n in range(20)]
        await asyncio.gather(*(grown(population, 1) for population in several))
        for population in several[::2]:
            population.close()
        del population, several
    gc.collect()
    assert held(empty)[0] <= 200
    assert known(empty) <= 1
