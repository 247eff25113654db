"""Weights in queue.py and batcher.py: a population counts as its sequences wherever requests are counted
or bounded."""

from __future__ import annotations

import concurrent.futures
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.engines.protocol import Finished
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.runtime.batcher import Waiter
from tests.answers import read_examples
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


# -- flushes ----------------------------------------------------------------------------------


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


def waiter(request: Request) -> Waiter:
    return Waiter([request], None, concurrent.futures.Future())


def test_what_there_is_no_room_for_waits_until_the_engine_is_idle() -> None:
    hand = ByHand(ScriptedEngine(steps=lambda request: 2), max_batch_size=3)
    hand.batcher.most_in_flight = 4
    for request in (A, population(5), B):
        hand.batcher.join(waiter(request))
    for _ in range(8):
        hand.turn()
    assert flushes(hand) == [1, 5, 1]
    assert len(hand.engine.stepped) == 6, "each had the engine for itself"


@settings(deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 8), min_size=1, max_size=30))
def test_flushes_are_in_order_and_as_large_as_there_is_room(most: int, weights: list[int]) -> None:
    hand = ByHand(max_batch_size=most, cache_bytes=0)
    for number, weight in enumerate(weights):
        request = logprobs(number) if weight == 1 else population(weight)
        hand.batcher.join(waiter(request))
    while hand.batcher.seconds_until_due() is not None:
        hand.turn()
    expected: list[int] = []
    for weight in weights:
        if expected and expected[-1] + weight <= most:
            expected[-1] += weight
        else:
            expected.append(weight)
    assert flushes(hand) == expected


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
