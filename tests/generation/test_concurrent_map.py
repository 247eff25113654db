"""A function mapped over a source: concurrency, reading ahead, order, and closing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from genrt.generation.concurrent_map import ConcurrentMap
from tests.scripted import passes


class Work:
    """Handles items when a test says so."""

    def __init__(self) -> None:
        self.under_way: dict[int, asyncio.Future[str]] = {}
        self.read = 0

    async def handle(self, number: int, item: object) -> str:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.under_way[number] = future
        try:
            return await future
        finally:
            del self.under_way[number]

    def items(self) -> Iterator[int]:
        for self.read in itertools.count(1):
            yield self.read

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.under_way[number].set_result(f"done {number}")


@pytest.fixture
def work() -> Work:
    return Work()


async def none_left() -> None:
    await passes()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_endless_source_is_read_as_far_as_there_is_room(work: Work) -> None:
    results = ConcurrentMap(work.items(), work.handle, concurrency=3, max_ahead=5)
    await passes()
    assert (work.read, [*work.under_way]) == (3, [0, 1, 2])
    work.end(0, 1, 2)
    await passes()
    assert (work.read, [*work.under_way]) == (5, [3, 4])  # three results wait, and no more is read
    assert await results.take() == (0, "done 0")
    await passes()
    assert (work.read, [*work.under_way]) == (6, [3, 4, 5])
    assert [await results.take(), await results.take()] == [(1, "done 1"), (2, "done 2")]
    await results.close()
    assert work.under_way == {}
    await none_left()


async def test_everything_there_is_room_for_is_started_in_one_go(work: Work) -> None:
    results = ConcurrentMap(work.items(), work.handle, concurrency=100, max_ahead=200)
    await passes(2)  # one in which it is read, one in which it starts
    assert len(work.under_way) == 100
    await results.close()


async def test_cancelling_a_take_loses_nothing(work: Work) -> None:
    results = ConcurrentMap(range(1), work.handle, concurrency=2, max_ahead=2)
    waiting = asyncio.create_task(results.take())
    await passes()
    work.end(0)
    waiting.cancel()
    await passes()
    assert waiting.cancelled()
    assert await results.take() == (0, "done 0")
    await results.close()


async def test_what_has_ended_can_be_taken_after_closing(work: Work) -> None:
    results = ConcurrentMap(range(3), work.handle, concurrency=3, max_ahead=3)
    await passes()
    work.end(1)
    await passes()
    await results.close()
    assert [*results.drain()] == [(1, "done 1")]  # the others were cancelled


async def test_closing_waits_until_all_has_ended() -> None:
    ended = set[int]()

    async def handle(number: int, item: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await passes(3)
            ended.add(number)

    results = ConcurrentMap(range(3), handle, concurrency=3, max_ahead=3)
    await passes()
    await results.close()
    assert ended == {0, 1, 2}
    await none_left()
