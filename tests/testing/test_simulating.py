"""`run_simulated` and `simulate` in users' hands: samplers of their own, on every order of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.engines.protocol import Finished
from genrt.errors import EngineDied, EngineFailed
from genrt.lm import AsyncLM
from genrt.testing import Faults, Report, run_simulated, simulate
from genrt.testing.simulated_engine import SimulatedEngine

MODEL = NGram.random(5, seed=0)


async def particles(lm: AsyncLM, *, count: int = 6, length: int = 4) -> list[list[int]]:
    """Texts that grow side by side, each with draws of its own."""

    async def particle(number: int) -> list[int]:
        tokens = [0]
        for step in range(length):
            row = await lm.next_token_logprobs(tokens)
            generator = torch.Generator().manual_seed(100 * number + step)
            tokens.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            row.zero_()
        return tokens

    return await asyncio.gather(*(particle(number) for number in range(count)))


@pytest.mark.parametrize("cache_bytes", [0, 60, 2**20])
@pytest.mark.parametrize("max_batch_size", [None, 2])
def test_a_sampler_gets_the_same_in_every_order(
    cache_bytes: int, max_batch_size: int | None
) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        expected = asyncio.run(particles(lm))
    for seed in range(10):
        found = run_simulated(
            particles,
            seed=seed,
            model=MODEL,
            cache_bytes=cache_bytes,
            max_batch_size=max_batch_size,
        )
        assert found == expected


def test_a_samplers_chance_is_the_seeds() -> None:
    async def draws(lm: AsyncLM) -> list[int]:
        return [(await lm.draw([0])).token_id for _ in range(20)]

    runs = [run_simulated(draws, seed=seed, model=MODEL) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_sampler_can_be_cancelled_at_every_moment() -> None:
    ended = cancelled = 0
    for moment in range(120):
        try:
            run_simulated(particles, seed=4, model=MODEL, cancel_after=moment)
            ended += 1
        except asyncio.CancelledError:
            cancelled += 1
    assert ended > 0
    assert cancelled > 50


def test_a_sampler_meets_every_fault() -> None:
    async def retrying(lm: AsyncLM) -> int:
        failures = 0
        for number in range(20):
            try:
                await lm.next_token_logprobs([number % 5, 1])
            except EngineFailed:
                failures += 1
        return failures

    failures = [run_simulated(retrying, seed=s, faults=Faults(step=0.3)) for s in range(10)]
    assert min(failures) >= 0
    assert max(failures) > 2
    with pytest.raises(EngineDied):
        run_simulated(particles, seed=0, faults=Faults(death=1.0))


def test_blocking_calls_work_in_a_simulation() -> None:
    async def both(lm: AsyncLM) -> bool:
        waiting = asyncio.ensure_future(lm.next_token_logprobs([1, 2]))
        blocking = lm.batch_next_token_logprobs_sync([[1, 2], [2]])
        return torch.equal(await waiting, blocking[0])

    assert all(run_simulated(both, seed=seed, model=MODEL) for seed in range(10))


def test_sleeping_takes_no_time() -> None:
    async def patient(lm: AsyncLM) -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.sleep(10_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10_000):
                await asyncio.Event().wait()
        await lm.next_token_logprobs([1])
        return loop.time() - before

    assert 20_000 <= run_simulated(patient, seed=0) < 20_001


def test_a_sampler_may_close_its_runtime() -> None:
    async def closing(lm: AsyncLM) -> None:
        waiting = asyncio.ensure_future(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        async with lm:
            pass
        with pytest.raises(genrt.Closed):
            await waiting
        with pytest.raises(genrt.Closed):
            await lm.next_token_logprobs([1])

    for seed in range(5):
        run_simulated(closing, seed=seed)


def test_a_sampler_that_waits_for_ever_is_found() -> None:
    async def waiting(lm: AsyncLM) -> None:
        await asyncio.Event().wait()

    with pytest.raises(
        AssertionError, match=r"^seed 7: nothing can happen any more, and the sampler"
    ):
        run_simulated(waiting, seed=7)


def test_a_sampler_that_leaves_a_task_behind_is_found() -> None:
    async def leaving(lm: AsyncLM) -> None:
        leaving.task = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match=r"^seed 7: the sampler has ended and left"):
        run_simulated(leaving, seed=7)


def test_a_sampler_that_forgets_an_error_is_found() -> None:
    async def forgetful(lm: AsyncLM) -> None:
        task = asyncio.ensure_future(lm.next_token_logprobs([1]))
        await asyncio.wait([task])

    with pytest.raises(AssertionError, match="was never retrieved"):
        run_simulated(forgetful, seed=0, faults=Faults(not_finite=1.0))


def test_what_a_sampler_raises_comes_out() -> None:
    async def wrong(lm: AsyncLM) -> None:
        await lm.next_token_logprobs([99])

    with pytest.raises(genrt.InvalidRequest, match="99"):
        run_simulated(wrong, seed=0)


async def rows(lm: AsyncLM) -> None:
    await lm.next_token_logprobs([1])


async def stacks(lm: AsyncLM) -> None:
    await lm.batch_next_token_logprobs([[1], [2]])


async def draws(lm: AsyncLM) -> None:
    await lm.draw([1], mask=[3])


async def tops(lm: AsyncLM) -> None:
    await lm.top_logprobs([1], 2)


async def candidates(lm: AsyncLM) -> None:
    await lm.token_logprobs([1], [0, 3])


async def blocking(lm: AsyncLM) -> None:
    lm.token_logprobs_sync([1], [0, 3])


@pytest.mark.parametrize("asking", [rows, stacks, draws, tops, candidates, blocking])
def test_a_wrong_answer_is_found(
    asking: Callable[[AsyncLM], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read from a row, or is one, that is not the question's own."""
    finished = SimulatedEngine._ends

    def mixed_up(*args: Any) -> list[Finished]:
        ends = finished(*args)
        return [Finished(end.request, cast("torch.Tensor", end.result).roll(1)) for end in ends]

    run_simulated(asking, seed=0)
    monkeypatch.setattr(SimulatedEngine, "_ends", mixed_up)
    with pytest.raises(AssertionError, match=r"^seed 0: .+ were answered wrongly"):
        run_simulated(asking, seed=0)


# -- everything at once -------------------------------------------------------------------------------


def simulate_many() -> list[Report]:
    return [simulate(seed) for seed in range(40)]


def test_the_runtime_stands_up_to_a_simulation() -> None:
    reports = simulate_many()
    assert [(report.seed, report.operations) for report in reports] == [(s, 100) for s in range(40)]
    assert simulate(3) == simulate(3)
    assert simulate(3).trace != simulate(4).trace


def test_a_simulation_has_the_faults_it_is_given() -> None:
    traces = ["\n".join(simulate(seed, faults=Faults(step=0.5)).trace) for seed in range(5)]
    assert all("step failed" in trace and "EngineFailed" in trace for trace in traces)


def test_a_simulation_finds_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genrt.runtime.batcher, "apart", list)  # callers share their rows
    with pytest.raises(AssertionError, match=r"^seed \d+: .+\nreplay with simulate\(\d+, op"):
        simulate_many()


@pytest.mark.promise(number=34)
def test_updates_under_load_are_never_seen_in_part() -> None:
    """The weights are replaced while others ask, cancel and time out, engines fail and die: every answer
    is of one version, and of none from before it was asked."""
    reports = [simulate(seed, updates=True) for seed in range(60)]
    assert sum(report.updates for report in reports) > 50
    assert simulate(3, updates=True) == simulate(3, updates=True)


@pytest.mark.proof
@pytest.mark.promise(number=34)
def test_a_thousand_updates_under_load_leave_no_stale_answer() -> None:
    done, seed = 0, 1000
    while done < 1000:
        done += simulate(seed, updates=True).updates
        seed += 1
    assert done >= 1000
