"""A function mapped over a source: concurrency, reading ahead, order, and closing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

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


async def test_results_come_as_they_end_or_in_order(work: Work) -> None:
    for in_order, expected in ((False, [2, 0, 1]), (True, [0, 1, 2])):
        results = ConcurrentMap(
            range(3), work.handle, concurrency=3, max_ahead=3, in_order=in_order
        )
        await passes()
        for number in (2, 0, 1):
            work.end(number)
            await passes()
        assert [await results.take() for _ in range(3)] == [(i, f"done {i}") for i in expected]
        assert await results.take() is None
        assert await results.take() is None
        await results.close()


async def test_a_source_that_raises_ends_the_map_after_what_it_yielded(work: Work) -> None:
    def items() -> Iterator[int]:
        yield from range(2)
        raise OSError("no more lines")

    results = ConcurrentMap(items(), work.handle, concurrency=5, max_ahead=5)
    await passes()
    work.end(1, 0)
    assert [await results.take(), await results.take()] == [(1, "done 1"), (0, "done 0")]
    with pytest.raises(OSError, match="no more lines"):
        await results.take()
    await results.close()
    await none_left()


async def test_what_handling_raises_is_raised_in_the_place_of_its_result(work: Work) -> None:
    results = ConcurrentMap(range(3), work.handle, concurrency=3, max_ahead=3)
    await passes()
    work.end(0)
    work.under_way[1].set_exception(OSError("one"))
    work.end(2)
    assert await results.take() == (0, "done 0")
    with pytest.raises(OSError, match="one"):
        await results.take()
    assert await results.take() == (2, "done 2")
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


async def test_an_asynchronous_source_is_read_on_and_closed(work: Work) -> None:
    asked, closed = asyncio.Event(), list[str]()

    async def items() -> AsyncIterator[int]:
        try:
            yield 0
            asked.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    results = ConcurrentMap(items(), work.handle, concurrency=5, max_ahead=5)
    await asked.wait()
    work.end(0)
    assert await results.take() == (0, "done 0")  # while the source has nothing
    await results.close()
    assert closed == ["closed"]
    await none_left()


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
