"""Random walks of a population whose questions are cancelled, timed out and overtaken by restarts, with
others asking the same engine: each draw is that of a second, quiet runtime, and nothing is left over."""

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
from tests.apart import drawn_apart
from tests.engines.vllm import ahead
from tests.engines.vllm.ahead import COUNT, all_the_same, running_ahead

pytestmark = pytest.mark.vllm

OPTIONS = ahead.OPTIONS | {"max_num_seqs": 24}
LONGEST = 90


@contextlib.contextmanager
def opened(llama: Path, way: str) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    """One that is walked on, also with steps run ahead of the question, as on a GPU; and a quiet one."""
    with (
        genrt.load(str(llama), engine_options=OPTIONS, cache_bytes=0) as quiet,
        # Also while the engine is opened again.
        running_ahead() if way == "ahead" else contextlib.nullcontext(),
        genrt.load(str(llama), engine_options=OPTIONS, cache_bytes=0) as lm,
    ):
        yield lm, quiet


@pytest.fixture(scope="module", params=["at once", "ahead"])
def runtimes(llama: Path, request: pytest.FixtureRequest) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    with opened(llama, request.param) as both:
        yield both


class Walk:
    """A population and what happens to it."""

    def __init__(self, lm: AsyncLM, seed: int) -> None:
        self.lm = lm
        self.rng = random.Random(seed)
        prompt = [self.rng.randrange(lm.vocab_size) for _ in range(20)]
        self.population = lm.population(prompt, COUNT)

    async def cancelled(self) -> None:
        """A draw is given up, anywhere on its way."""
        draw = asyncio.ensure_future(self.population.draw(seed=self.rng.randrange(99)))
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.5:  # one that has reached the engine, whose step goes on
            await self.lm.next_token_logprobs([self.rng.randrange(300)])
        draw.cancel()
        await asyncio.gather(draw, return_exceptions=True)

    async def timed_out(self) -> None:
        with contextlib.suppress(TimedOut):
            await self.population.draw(timeout=self.rng.choice([0.0, 0.0001, 0.002]))

    async def restarted(self) -> None:
        """In the middle of a draw, which fails or is answered."""
        draw = asyncio.ensure_future(self.population.draw(seed=1))
        await asyncio.sleep(0)
        await asyncio.gather(self.lm.arestart(), draw, return_exceptions=True)

    async def evicted(self) -> None:
        contexts = [[self.rng.randrange(300) for _ in range(40)] for _ in range(40)]
        await self.lm.batch_next_token_logprobs(contexts)

    async def from_another_loop(self) -> None:
        """A closed loop's population goes on in this one."""
        await asyncio.to_thread(self.population.draw_sync, seed=3)

    def change(self) -> None:
        """Another population of the same sequences, copied, cut or joined."""
        population, rng = self.population, self.rng
        if rng.random() < 0.4:
            population.resample([rng.randrange(COUNT) for _ in range(COUNT)])
        if rng.random() < 0.1:
            first, second = population.split([COUNT // 3, COUNT - COUNT // 3])
            self.population = second.join(first)
        if rng.random() < 0.05 or int(population.lengths.max()) > LONGEST:
            self.population.cut([rng.randrange(15, 40) for _ in range(COUNT)])


def left(lm: AsyncLM) -> tuple[int, int]:
    """How many vLLM requests and populations are in progress."""
    engine: Any = lm._thread.engine
    look = lambda _: (len(engine._in_progress), len(engine._populations))
    return lm._thread.call(look).result()


async def checked(population: Population, quiet: AsyncLM, beside: AsyncLM, seed: int) -> None:
    """Draw, beside a question of its last sequence and one of nobody's, and append."""
    contexts = list(population)
    found, wanted, row = await asyncio.gather(
        population.draw(seed=seed),
        drawn_apart(quiet, contexts, seed=seed),
        beside.next_token_logprobs(contexts[-1]),
    )
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert float((found.logprobs - wanted.logprobs).abs().max()) < 1e-3
    assert abs(float(row[found.token_ids[-1]]) - float(found.logprobs[-1])) < 1e-3
    population.append(found.token_ids)


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 40), *(pytest.param(seed, 150, marks=pytest.mark.proof) for seed in range(1, 4))],
)
async def test_whatever_happens_to_its_questions_draws_are_those_of_its_sequences(
    runtimes: tuple[AsyncLM, AsyncLM], seed: int, steps: int
) -> None:
    lm, quiet = runtimes
    walk = Walk(lm, seed)
    happenings = [walk.cancelled, walk.timed_out, walk.evicted, walk.from_another_loop]
    for step in range(steps):
        if step in (steps // 3, steps // 2):
            await walk.restarted()
        elif walk.rng.random() < 0.4:
            await walk.rng.choice(happenings)()
        await checked(walk.population, quiet, lm, seed=walk.rng.randrange(10**6))
        walk.change()
    assert left(lm) == (0, 0)
    statistics = lm.statistics()
    assert (statistics.batcher.queued, statistics.batcher.in_flight) == (0, 0)
    assert statistics.engine.forked > 0  # since the last restart
    assert statistics.engine.extended > 0


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(0, 40), *(pytest.param(seed, 120, marks=pytest.mark.proof) for seed in range(1, 4))],
)
async def test_whatever_happens_to_some_of_several_at_once_all_draws_are_right(
    runtimes: tuple[AsyncLM, AsyncLM], seed: int, steps: int
) -> None:
    """Three populations, whose sequences are more than a step takes: what happens to one happens while
    the others draw."""
    lm, quiet = runtimes
    walks = [Walk(lm, 10 * seed + n) for n in range(3)]
    rng = random.Random(seed)

    async def draws(several: list[Walk]) -> None:
        await all_the_same([each.population for each in several], quiet, seed=rng.randrange(10**6))

    for step in range(steps):
        if step in (steps // 3, steps // 2):
            await walks[step % 3].restarted()
        elif rng.random() < 0.3:
            walk = rng.choice(walks)
            happening = rng.choice([walk.cancelled, walk.timed_out, walk.evicted])
            await asyncio.gather(happening(), draws([each for each in walks if each is not walk]))
        await draws(walks if rng.random() < 0.8 else rng.sample(walks, 2))
        for walk in walks:
            walk.change()
    assert left(lm) == (0, 0)
    for walk in walks:
        walk.population.close()


# -- what is given back -------------------------------------------------------------------------


def held(lm: AsyncLM) -> tuple[int, int, int]:
    """How many sequences are resident, questions known by number, and blocks that are not free."""

    def look(_: object) -> tuple[int, int, int]:
        engine: Any = lm._thread.engine
        pool = engine._core.engine_core.scheduler.kv_cache_manager.block_pool
        free, known = pool.get_num_free_blocks(), engine._populations._known
        return engine.statistics().resident, len(known), pool.num_gpu_blocks - 1 - free

    return lm._thread.call(look).result()


@pytest.fixture
def empty(runtimes: tuple[AsyncLM, AsyncLM]) -> AsyncLM:
    lm = runtimes[0]
    engine: Any = lm._thread.engine
    lm._thread.call(lambda _: engine.forget_residents()).result()
    gc.collect()
    assert held(lm)[0] == 0
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
        assert held(empty) == (0, 0, 0)


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
    assert held(empty) == (0, 0, 0)


async def test_closed_in_the_middle_of_a_draw_it_gives_back_what_that_took(empty: AsyncLM) -> None:
    population = empty.population([1, 2, 3], COUNT)
    await grown(population, 3)
    draw = asyncio.ensure_future(population.draw())
    await asyncio.sleep(0)
    population.close()
    assert len((await draw).token_ids) == COUNT
    assert held(empty)[0] <= 1  # the questions before it, whose sequences went on
    assert held(empty)[1] == 0


async def test_closing_after_a_restart_and_after_the_runtime_is_quiet(
    empty: AsyncLM, llama: Path
) -> None:
    with empty.population([1, 2, 3], COUNT) as population:
        await grown(population, 3)
        await empty.arestart()
    assert held(empty) == (0, 0, 0)
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
    resident, known, _ = held(empty)
    assert resident <= 200
    assert known <= 1
