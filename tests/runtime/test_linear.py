"""The batcher's work, counted in lines of Python: eight times as many questions take eight times as many.

Everything here happens under the batcher's lock, or in an event loop, which others wait for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import genrt
from genrt.engines.protocol import Finished
from genrt.errors import EngineFailed
from genrt.questions.arguments import Adapter
from genrt.questions.draws import draw_request
from genrt.questions.reads import ReadRequest, TopTokens
from genrt.questions.rows import Limits, LogprobsRequest
from genrt.runtime.batcher import Waiter
from tests.scripted import ByHand, ScriptedEngine, logprobs, passes, population_of, sample

PACKAGE = Path(genrt.__file__).parent
COUNTED = {
    str(PACKAGE / f"{name}.py")
    for name in (
        *("runtime/ask", "runtime/batcher", "runtime/cache"),
        *("questions/rows", "questions/draws"),
    )
}
FEW, MANY = 100, 800
SLACK = 1.25

Work = Callable[[int], Coroutine[Any, Any, None]]


class Lines:
    """Counts the lines that this thread comes to in what is counted."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in COUNTED else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.count += event == "line"
        return self._line


async def finished(hand: ByHand, *tasks: asyncio.Task[Any]) -> None:
    """Turn until all is answered, however many turns that takes."""
    await passes()
    while hand.batcher.seconds_until_due() is not None:
        hand.turn()
    await asyncio.gather(*tasks, return_exceptions=True)


async def one_is_sent_at_a_time(count: int) -> None:
    hand = ByHand(max_batch_size=1)
    await finished(hand, *[hand.ask(logprobs(number, 1)) for number in range(count)])


async def one_leaves_at_a_time(count: int) -> None:
    class Idle(ScriptedEngine):
        def step(self) -> list[Finished]:
            return []

    hand = ByHand(Idle(), max_batch_size=count // 2)
    tasks = [hand.ask(logprobs(number, 1)) for number in range(count)]
    await passes()
    hand.turn()
    for task in tasks:
        task.cancel()
        await passes(2)
        hand.turn()


async def one_enters_at_a_time(count: int) -> None:
    hand = ByHand(max_queued_requests=1)
    await finished(hand, *[hand.ask(logprobs(number, 1)) for number in range(count)])


async def many_wait_behind_a_large_one(count: int) -> None:
    hand = ByHand(ScriptedEngine(steps=lambda r: count), max_queued_bytes=4, max_batch_size=1)
    hand.ask(logprobs(1)), hand.ask(logprobs(2))
    await passes()
    hand.turn()
    large = hand.ask(*[logprobs(number, 1) for number in range(count)])
    for number in range(count):
        left = hand.ask(logprobs(number, 2))
        await passes(2)
        left.cancel()
        await passes(2)
    large.cancel()


async def many_clients_give_up(count: int) -> None:
    hand = ByHand(max_queued_requests=1)
    hand.ask(logprobs(0))
    await passes()
    loops = [asyncio.new_event_loop() for _ in range(count)]
    waiters = [Waiter([logprobs(1)], loop, loop.create_future()) for loop in loops]
    for waiter in waiters:
        assert hand.batcher.join(waiter) is None
    assert hand.batcher.statistics().waiting == count
    for waiter in reversed(waiters):
        hand.batcher.cancel(waiter)
    assert hand.batcher.statistics().waiting == 0
    for loop in loops:
        loop.close()


async def an_adapter_is_retired_and_still_bound(count: int) -> None:
    adapter = Adapter("a", 1)
    bound = LogprobsRequest([1], adapter)
    hand = ByHand(
        ScriptedEngine(steps=lambda request: count if request == bound else 1), max_batch_size=1
    )
    hand.load(adapter)
    tasks = [hand.ask(bound), *[hand.ask(logprobs(number, 1)) for number in range(count)]]
    await passes()
    hand.batcher.retire(adapter)
    await finished(hand, *tasks)
    assert hand.engine.removed == [adapter]


async def every_step_fails(count: int) -> None:
    errors = {number: EngineFailed("no") for number in range(1, count + 1)}
    hand = ByHand(ScriptedEngine(fail_at=errors), max_batch_size=1)
    await finished(hand, *[hand.ask(logprobs(number, 1)) for number in range(count)])
    assert hand.batcher.statistics().failed == count


async def one_sample_is_in_flight_all_the_time(count: int) -> None:
    long = sample(1, seed=1)
    hand = ByHand(ScriptedEngine(steps=lambda request: count if request == long else 1))
    task = hand.ask(long)
    others = [hand.ask(logprobs(number, 1)) for number in range(count)]
    await finished(hand, task, *others)


async def greedy_draws_under_many_masks(count: int) -> None:
    hand, limits = ByHand(), Limits(count, 64)
    draws = [
        draw_request(limits, [1], None, number, [number], 0.0, None) for number in range(count)
    ]
    await hand.queued(*draws)


async def seeded_draws_under_many_masks(count: int) -> None:
    hand, limits = ByHand(), Limits(count, 64)
    draws = [draw_request(limits, [1], None, number, [number], 1.0, 5) for number in range(count)]
    await hand.queued(*draws)


async def reads_of_one_row(count: int) -> None:
    hand = ByHand()
    reads = [ReadRequest(logprobs(1), TopTokens(1 + number)) for number in range(count)]
    await hand.queued(*reads)


async def populations_are_sent_one_at_a_time(count: int) -> None:
    hand = ByHand(max_batch_size=1)
    rows = [[logprobs(number, 1), logprobs(number, 2)] for number in range(count)]
    asked = [hand.ask(population_of(*pair)) for pair in rows]
    await finished(hand, *asked)


async def equal_questions(count: int) -> None:
    hand = ByHand()
    await finished(hand, *[hand.ask(logprobs(1)) for _ in range(count)])


WORK: list[Work] = [
    one_is_sent_at_a_time,
    one_leaves_at_a_time,
    one_enters_at_a_time,
    many_wait_behind_a_large_one,
    many_clients_give_up,
    an_adapter_is_retired_and_still_bound,
    every_step_fails,
    one_sample_is_in_flight_all_the_time,
    greedy_draws_under_many_masks,
    seeded_draws_under_many_masks,
    reads_of_one_row,
    populations_are_sent_one_at_a_time,
    equal_questions,
]


@pytest.mark.promise(number=5)
@pytest.mark.promise(number=31)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
async def test_work_grows_as_what_is_asked(work: Work) -> None:
    counts = []
    for count in (FEW, MANY):
        with Lines() as lines:
            await work(count)
        counts.append(lines.count)
    assert counts[1] <= SLACK * MANY / FEW * counts[0], counts


def test_lines_are_counted() -> None:
    """The count sees a second look at everything."""
    batcher = ByHand().batcher
    with Lines() as lines:
        for _ in range(FEW):
            assert batcher.is_drained
    assert lines.count == FEW
