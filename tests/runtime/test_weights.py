"""Weights in queue.py and batcher.py: a population counts as its sequences wherever requests are counted
or bounded."""

from __future__ import annotations

import threading
from collections import deque
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrt.engines.protocol import Finished
from genrt.errors import NotFinite
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.runtime.queue import Flight, Ready
from genrt.runtime.streams import Streams
from genrt.runtime.waiters import Entry
from genrt.testing.answers import read_examples
from tests.scripted import ByHand, ScriptedEngine, logprobs, passes, population_of, sample

A, B, C = (logprobs(number) for number in range(1, 4))
numbers = count(4)


def population(size: int, *, equal: bool = False) -> PopulationDraw:
    """A question about so many sequences, which nobody else asks about."""
    first = logprobs(7, next(numbers))
    others = [first if equal else logprobs(7, next(numbers)) for _ in range(size - 1)]
    return population_of(first, *others)


def flushes(hand: ByHand) -> list[int]:
    return [len(flush) for flush in hand.engine.submitted]


class Small(ScriptedEngine):
    """An engine with memory for so many sequences."""

    def __init__(self, fitting: int) -> None:
        super().__init__()
        self._fitting = fitting

    def step(self) -> list[Finished]:
        if len(self.in_progress) > self._fitting:
            self.in_progress.clear()
            raise torch.OutOfMemoryError("no room")
        return super().step()


def test_a_population_weighs_as_its_sequences_and_every_other_request_1() -> None:
    generator = torch.Generator().manual_seed(1)
    others: list[Request] = [A, sample(1)]
    others += [ReadRequest(A, wanted) for wanted in read_examples(8, generator)]
    assert {request.weight for request in others} == {1}
    assert [population(size).weight for size in (1, 5)] == [1, 5]
    assert population(5, equal=True).weight == 5


# -- counters ---------------------------------------------------------------------------------


async def test_the_draws_of_a_population_are_counted_one_by_one() -> None:
    hand = ByHand(ScriptedEngine(steps=lambda _: 2))
    task, other = hand.ask(population(4)), hand.ask(A)
    await passes()
    assert hand.batcher.statistics().queued == 5
    hand.turn()
    assert hand.batcher.statistics().in_flight == 5
    assert hand.batcher.statistics().queued == 0
    await hand.finish()
    assert len((await task)[0].token_ids) == len(await other) + 3
    s = hand.batcher.statistics()
    assert (s.questions, s.answered, s.largest_flush, s.flushes) == (5, 5, 5, 1)
    hand.check()


async def test_sequences_that_share_a_row_are_questions_each() -> None:
    hand = ByHand()
    hand.ask(population(4, equal=True))
    await hand.finish()
    s = hand.batcher.statistics()
    assert (s.questions, s.answered, s.largest_flush) == (4, 4, 4)
    assert flushes(hand) == [1]


async def test_a_population_that_is_named_twice_joins_itself() -> None:
    hand, twice = ByHand(), population(3)
    hand.ask(twice, twice)
    hand.ask(twice)
    await hand.finish()
    s = hand.batcher.statistics()
    assert (s.questions, s.deduplicated, s.answered) == (9, 6, 3)
    hand.check()


async def test_a_population_fails_as_its_sequences_and_is_cancelled_as_one_waiter() -> None:
    failing, left = population(3), population(2)
    hand = ByHand(ScriptedEngine(errors={failing.rows[1]: NotFinite("no")}))
    task, other = hand.ask(failing), hand.ask(left)
    await passes()
    other.cancel()
    await hand.finish()
    with pytest.raises(NotFinite):
        await task
    s = hand.batcher.statistics()
    assert (s.questions, s.failed, s.answered, s.cancelled) == (5, 3, 0, 1)
    assert (s.queued, s.in_flight) == (0, 0)


# -- flushes ----------------------------------------------------------------------------------


async def test_a_flush_weighs_no_more_than_max_batch_size() -> None:
    hand = ByHand(max_batch_size=3)
    for request in (population(2), A, population(2), population(2), B, population(5), C):
        hand.ask(request)
    await hand.finish()
    assert flushes(hand) == [3, 2, 3, 5, 1], "the oldest first, what is larger by itself"
    assert hand.batcher.statistics().largest_flush == 5
    hand.check()


async def test_a_population_that_fills_a_flush_waits_for_no_company() -> None:
    now = [0.0]
    hand = ByHand(max_batch_size=4, max_wait_seconds=9.0, clock=lambda: now[0])
    task = hand.ask(population(3))
    await passes()
    assert hand.batcher.seconds_until_due() == 9.0
    hand.ask(population(4))
    await passes(1)
    assert hand.batcher.seconds_until_due() == 0.0, "it is not even waited for a quiet loop"
    hand.turn()
    await passes()
    assert flushes(hand) == [3]
    assert task.done()
    assert hand.batcher.seconds_until_due() == 0.0
    hand.turn()
    assert flushes(hand) == [3, 4]


def entry(weight: int) -> Entry:
    return Entry(A if weight == 1 else population(weight), {})


def test_what_there_is_no_room_for_waits_until_the_engine_is_idle() -> None:
    ready = Ready(3, 0.0, lambda: 0.0)
    large, small = entry(5), entry(1)
    ready.add([large, small])
    assert ready.take(4, is_idle=False) == []
    assert ready.take(0, is_idle=False) == []
    assert ready.take(4, is_idle=True) == [large]
    ready.put_back([large])
    assert ready.take(5, is_idle=False) == [large], "it is only larger than a flush"
    assert ready.take(1, is_idle=False) == [small]
    assert ready.seconds_until_due() is None


Event = tuple[str, int, int]
EVENTS = st.tuples(
    st.sampled_from(["add", "add", "again", "discard", "put back", "take", "take"]),
    st.integers(1, 5),
    st.integers(0, 9),
)


@given(st.integers(1, 6), st.lists(EVENTS, max_size=40))
def test_whatever_comes_and_goes_flushes_are_as_large_as_there_is_room(
    most: int, events: list[Event]
) -> None:
    ready = Ready(most, 1.0, lambda: 0.0)
    queue: deque[Entry] = deque()
    taken: list[Entry] = []
    is_due = False
    for event, weight, number in events:
        if event == "add":
            is_due &= bool(queue)
            queue.append(entry(weight))
            ready.add([queue[-1]])
        elif event == "again" and queue:
            ready.add([queue[number % len(queue)]])
        elif event == "discard" and queue:
            gone = queue[number % len(queue)]
            queue.remove(gone)
            ready.discard(gone)
            ready.discard(gone)
        elif event == "put back" and taken:
            ready.put_back(taken)
            queue.extendleft(reversed(taken))
            taken, is_due = [], True
        elif event == "take":
            total = sum(each.request.weight for each in queue)
            wait = None if not queue else 0.0 if is_due or total >= most else 1.0
            assert ready.seconds_until_due() == wait
            is_idle = bool(weight % 2)
            taken = ready.take(number, is_idle=is_idle)
            assert [queue.popleft() for _ in taken] == taken
            sent = sum(each.request.weight for each in taken)
            assert sent <= min(most, number) or len(taken) == 1
            if wait == 0.0 and queue:
                both = sent + queue[0].request.weight
                assert both > min(most, number), "the next one had room"
                assert taken or (both > number and not is_idle), "it could have gone alone"
        assert [*ready] == [*queue]


# -- the queue's bound ------------------------------------------------------------------------


async def test_a_population_takes_as_much_room_in_the_queue_as_it_has_sequences() -> None:
    hand = ByHand(max_queued_requests=4)
    tasks = [hand.ask(request) for request in (population(3), population(2), A, B, population(9))]
    await passes()
    s = hand.batcher.statistics()
    assert (s.queued, s.waiting) == (3, 4)
    await hand.finish()
    assert flushes(hand) == [3, 4, 9], "one that is larger than the queue enters an empty one"
    for task in tasks:
        assert len(await task) == 1
    hand.check()


async def test_a_population_that_leaves_the_queue_leaves_all_its_room() -> None:
    hand = ByHand(max_queued_requests=4)
    left = hand.ask(population(4))
    await passes()
    waiting = await hand.queued(population(4))
    assert hand.batcher.statistics().waiting == 1
    left.cancel()
    await passes()
    await hand.finish()
    assert len((await waiting)[0].token_ids) == 4
    assert flushes(hand) == [4]


# -- running out of memory --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1, 6], [8, 2, 6]),  # four may be in flight, and six if they are one request
        ([6, 1, 1], [8, 6, 2]),
        ([2, 2, 2, 2], [8, 4, 4]),
        ([4, 2, 1, 1], [8, 4, 4]),
    ],
)
async def test_what_runs_out_of_memory_is_halved_by_weight(
    weights: list[int], expected: list[int]
) -> None:
    hand = ByHand(Small(6))
    singles = iter((A, B, C))
    requests: list[Request] = [
        next(singles) if weight == 1 else population(weight) for weight in weights
    ]
    tasks = [hand.ask(request) for request in requests]
    await hand.finish()
    assert flushes(hand) == expected
    for task in tasks:
        assert len(await task) == 1
    s = hand.batcher.statistics()
    assert (s.retried, s.answered, s.failed) == (8, 8, 0)
    hand.check()


def test_what_may_be_in_flight_is_halved_by_weight() -> None:
    flight = Flight(Streams(threading.RLock(), lambda: 0.0, lambda: 0.0))
    large, small = entry(7), entry(1)
    assert flight.send([large, small]) == flight.weight == 8
    flight.shrink()
    assert flight.room == 0
    flight.end(large)
    flight.end(large)
    assert (flight.weight, flight.room) == (1, 3)
    flight.bring_back(small)
    assert (flight.weight, flight.room) == (0, 4)
    flight.send([large])
    flight.clear()
    assert (flight.weight, flight.room) == (0, 4)


async def test_a_population_that_is_too_large_by_itself_leaves_room_for_a_half() -> None:
    """It fails, as only who asked can divide it; the halves then do not run out of memory together."""
    hand = ByHand(Small(4))
    whole = population(8)
    with pytest.raises(Exception, match="no room"):
        await whole_answer(hand, whole)
    for part in whole.parts(4):
        hand.ask(part)
    await hand.finish()
    assert flushes(hand) == [8, 4, 4]
    assert hand.batcher.statistics().failed == 8


async def whole_answer(hand: ByHand, request: Request) -> Any:
    task = hand.ask(request)
    await hand.finish()
    return await task
