"""Pauses and sleep: nothing runs, nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.weights import SLEEPING_PARTS, Layout, NamedTensors, SleepingPart
from genrt.errors import EngineFailed, EngineUnsupported, InvalidRequest
from genrt.lm import AsyncLM
from tests.inside import engine_of
from tests.scripted import Gate, ScriptedEngine

MODEL, OTHER = NGram.random(5, order=1, seed=1), NGram.random(5, order=1, seed=2)


class SleepyWeights:
    """The weights of an exact engine, whose memory is given back for as long as it sleeps."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self.levels: list[int] = []
        self.asleep: frozenset[SleepingPart] = frozenset()
        self.wakes = True

    def layout(self) -> Layout:
        found: Layout = self._own.layout()
        return found

    def checkpoint(self) -> list[Path]:
        return []

    def begin(self) -> None:
        assert "weights" not in self.asleep
        self._own.begin()

    def load(self, tensors: NamedTensors) -> None:
        assert "weights" not in self.asleep
        self._own.load(tensors)

    def finish(self) -> None:
        self._own.finish()

    def check_sleep(self) -> None:
        pass

    def sleep(self, level: int) -> int:
        self.levels.append(level)
        self.asleep = SLEEPING_PARTS
        return 1000

    def wake_up(self, parts: frozenset[SleepingPart]) -> None:
        assert parts <= self.asleep
        if not self.wakes:
            raise EngineFailed("there is no memory any more")
        self.asleep -= parts


class SleepyEngine(ExactEngine):
    def __init__(self) -> None:
        super().__init__(MODEL)
        self.weights: Any = SleepyWeights(self.weights)

    def step(self) -> Any:
        assert not self.weights.asleep
        return super().step()


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(engine=SleepyEngine) as runtime:
        yield runtime


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_questions_asked_in_a_pause_wait_until_it_is_over(lm: AsyncLM) -> None:
    await lm.next_token_logprobs([1])
    await lm.pause()
    steps = lm.statistics().engine.steps
    asked = [asyncio.ensure_future(lm.next_token_logprobs([n])) for n in (1, 2)]
    late = asyncio.ensure_future(lm.draw([3], timeout=0.0))
    await turns()
    assert not any(each.done() for each in asked)
    with pytest.raises(genrt.TimedOut):
        await late
    assert (await lm.batch_next_token_logprobs([])).shape == (0, 5)  # nothing waits for nothing
    assert lm.statistics().engine.steps == steps
    lm.resume()
    for n, each in enumerate(asked, 1):
        assert torch.allclose(await each, MODEL.row([n]), atol=1e-6)


@pytest.mark.parametrize("pending", ["finish", "restart"])
async def test_what_was_asked_before_a_pause_ends_or_waits(pending: Any) -> None:
    gate = Gate()
    engine = ScriptedEngine(steps=lambda _: 3, gate=gate)
    async with genrt.load(engine=lambda: engine) as lm:
        asked = asyncio.ensure_future(lm.next_token_logprobs([1]))
        await asyncio.to_thread(gate.wait_until_held)
        pause = asyncio.ensure_future(lm.pause(pending=pending))
        await turns()
        assert not pause.done()
        gate.open()
        await pause
        await turns()
        assert asked.done() == (pending == "finish")
        assert not engine.in_progress
        lm.resume()
        await asked


@pytest.mark.parametrize("asked", ["wait", "raise"])
async def test_a_stream_goes_on_after_a_pause_from_where_it_was(lm: AsyncLM, asked: Any) -> None:
    expected = await lm.generate([1], max_tokens=200, seed=1, ignore_eos=True)
    async with lm.stream([1], max_tokens=200, seed=1, ignore_eos=True) as stream:
        tokens = [*(await anext(stream)).token_ids]
        for _ in range(3):
            await lm.pause(pending="restart", asked=asked)
            steps = lm.statistics().engine.steps
            assert stream.completion is None
            await turns()
            assert lm.statistics().engine.steps == steps
            lm.resume()
        async for delta in stream:
            assert delta.start == len(tokens)
            tokens += delta.token_ids
    assert tuple(tokens) == expected.token_ids


async def test_calls_that_make_no_sense_are_refused(lm: AsyncLM) -> None:
    lm.resume()  # nothing is paused
    await lm.wake_up()  # nothing sleeps
    for options in ({"pending": "later"}, {"asked": "drop"}, {"asked": None}):
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            await lm.pause(**options)
    for level in (0, 3, "1", None, True):
        with pytest.raises(InvalidRequest, match="level"):
            await lm.sleep(level)  # type: ignore[arg-type]
    await lm.pause()
    with pytest.raises(InvalidRequest, match="paused already"):
        await lm.pause()


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_sleeps_in_a_pause_and_wakes_with_its_weights(
    lm: AsyncLM, level: int
) -> None:
    await lm.update_weights({"table": OTHER.table})
    weights: Any = engine_of(lm).weights
    assert await lm.sleep(level) == 1000
    assert weights.levels == [level]
    asked = asyncio.ensure_future(lm.next_token_logprobs([1]))
    with pytest.raises(InvalidRequest, match="sleeps"):
        lm.resume()
    with pytest.raises(InvalidRequest, match="sleeps"):
        await lm.sleep()
    with pytest.raises(InvalidRequest, match="sleeps"):
        await lm.update_weights({"table": OTHER.table})
    await turns()
    assert not asked.done()
    await lm.wake_up()
    assert not weights.asleep
    assert torch.allclose(await asked, OTHER.row([1]), atol=1e-6)


@pytest.mark.parametrize("level", [1, 2])
async def test_weights_wake_first_and_are_replaced_before_the_rest_wakes(
    lm: AsyncLM, level: int
) -> None:
    weights: Any = engine_of(lm).weights
    before = await lm.next_token_logprobs([1])
    await lm.sleep(level)
    asked = asyncio.ensure_future(lm.next_token_logprobs([1]))
    assert not await lm.wake_up(["weights"])
    assert not await lm.wake_up(["weights"])  # again
    assert weights.asleep == {"kv_cache"}
    assert await lm.update_weights({"table": OTHER.table}) == 1
    with pytest.raises(InvalidRequest, match="sleeps"):
        lm.resume()
    with pytest.raises(InvalidRequest, match="sleeps"):
        await lm.sleep()
    await turns()
    assert not asked.done()
    assert await lm.wake_up(["kv_cache"])
    assert torch.allclose(await asked, OTHER.row([1]), atol=1e-6)
    assert not torch.allclose(before, OTHER.row([1]))


async def test_the_cache_may_wake_first_and_weights_wait_for_theirs(lm: AsyncLM) -> None:
    await lm.sleep()
    assert not await lm.wake_up(["kv_cache"])
    with pytest.raises(InvalidRequest, match="sleeps"):
        await lm.update_weights({"table": OTHER.table})
    for tags in ("weights", ["weight"], [1], 3, [["weights"]]):
        with pytest.raises(InvalidRequest, match="tags"):
            await lm.wake_up(tags)  # type: ignore[arg-type]
    assert not await lm.wake_up([])
    assert await lm.wake_up()
    await lm.next_token_logprobs([1])


async def test_a_sleep_in_a_pause_keeps_to_what_the_pause_says(lm: AsyncLM) -> None:
    await lm.pause(asked="raise")
    await lm.sleep()
    with pytest.raises(EngineFailed, match="paused"):
        await lm.next_token_logprobs([1])
    await lm.wake_up()
    await lm.next_token_logprobs([1])


async def test_an_engine_without_memory_to_give_back_says_so() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        with pytest.raises(EngineUnsupported, match="ExactEngine"):
            await lm.sleep()
        await lm.next_token_logprobs([1])
        lm.reset_prefix_cache()
        await lm.next_token_logprobs([2])
