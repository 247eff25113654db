"""``run_simulated``: users' own samplers, on every order of events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.errors import EngineDied, EngineFailed
from genrt.lm import AsyncLM
from genrt.testing import Faults, run_simulated

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


def test_a_sampler_gets_the_same_in_every_order() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        expected = asyncio.run(particles(lm))
    for seed in range(10):
        assert run_simulated(particles, seed=seed, model=MODEL) == expected


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


def test_texts_and_streams_are_those_of_the_model() -> None:
    async def texts(lm: AsyncLM) -> list[Any]:
        found: list[Any] = [await lm.generate([1], max_tokens=5, seed=2)]
        stream = lm.stream([1], max_tokens=5, seed=2)
        found.append("".join([delta.text async for delta in stream]))
        with lm.population([1], 3) as population:
            for step in range(3):
                population.append((await population.draw(seed=10 * step)).token_ids)
            return [found[0].text, found[1], [*population], await lm.score([1], [2, 3])]

    with genrt.load(MODEL, engine="exact") as lm:
        expected = asyncio.run(texts(lm))
    assert expected[0] == expected[1]
    for seed in range(5):
        assert str(run_simulated(texts, seed=seed, model=MODEL)) == str(expected)


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


async def waiting(lm: AsyncLM) -> None:
    await asyncio.Event().wait()


async def leaving(lm: AsyncLM) -> None:
    leaving.task = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[attr-defined]


async def forgetful(lm: AsyncLM) -> None:
    await asyncio.wait([asyncio.ensure_future(lm.next_token_logprobs([1]))])


async def blocking(lm: AsyncLM) -> None:
    lm.batch_next_token_logprobs_sync([[1, 2], [2]])


async def wrong(lm: AsyncLM) -> None:
    await lm.next_token_logprobs([99])


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (waiting, AssertionError, "^seed 7: nothing can happen any more, and the sampler"),
        (leaving, AssertionError, "^seed 7: the sampler has ended and left"),
        (forgetful, AssertionError, "was never retrieved"),
        (blocking, genrt.InvalidRequest, "await the question"),
        (wrong, genrt.InvalidRequest, "99"),
    ],
)
def test_a_wrong_sampler_is_found(sampler: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_simulated(sampler, seed=7, faults=Faults(step=float(sampler is forgetful)))
