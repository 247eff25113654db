"""A walk over a source of unknown length: a bounded number of its items under way at once.

Rules:
    The source is read by one task, and only while there is room: fewer than ``concurrency`` items are
    under way, and fewer than ``most_ahead`` are read and not taken.
    What ended waits, in the order in which it ended, until it is taken; nothing that ended is lost.
    After ``close`` no task of the walk is left, and an asynchronous source is closed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

from genrt.runtime.ask import MAX_UNAWAITED

T = TypeVar("T")

Source: TypeAlias = Iterable[Any] | AsyncIterable[Any]


class Walk(Generic[T]):
    """The items of a source, each handled by a task of its own, on the running loop.

    Args:
        source: yields the items; a synchronous one is read on the loop.
        handle: returns the coroutine that handles an item, given its number, from 0, and the item. What
            it raises, ``take`` raises in the place of the result.
        concurrency: how many items are under way at once.
        most_ahead: how many may be read and not taken.
        in_order: whether results are taken in the order of the items.
    """

    def __init__(
        self,
        source: Source,
        handle: Callable[[int, Any], Coroutine[Any, Any, T]],
        *,
        concurrency: int,
        most_ahead: int,
        in_order: bool = False,
    ) -> None:
        self._handle = handle
        self._concurrency = concurrency
        self._most_ahead = most_ahead
        self._in_order = in_order
        self._under_way: set[asyncio.Task[T]] = set()
        self._ended: OrderedDict[int, asyncio.Task[T]] = OrderedDict()
        self._taken = self._at_once = 0
        self._closing = False
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._items = each_of(source)
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._news.set())

    def _has_room(self) -> bool:
        under_way = len(self._under_way)
        return under_way < self._concurrency and under_way + len(self._ended) < self._most_ahead

    async def _read(self) -> None:
        """Start what the source yields, all at once that there is room for: one flush takes it."""
        number = 0
        while True:
            while not self._has_room():
                self._room.clear()
                await self._room.wait()
            try:
                item = await anext(self._items)
            except StopAsyncIteration:
                return
            task = asyncio.create_task(self._handle(number, item))
            self._under_way.add(task)
            task.add_done_callback(lambda task, number=number: self._end(number, task))  # type: ignore[misc]
            number += 1

    def _end(self, number: int, task: asyncio.Task[T]) -> None:
        self._under_way.discard(task)
        if not (self._closing and task.cancelled()):
            self._ended[number] = task
        if not task.cancelled():
            task.exception()  # whatever it is: asyncio reports those that nobody has looked at
        self._room.set()
        self._news.set()

    async def take(self) -> tuple[int, T] | None:
        """Wait for the next result and return it with its item's number; ``None`` after the last.

        The loop goes round after every ``MAX_UNAWAITED`` results that were there already.
        Cancelling loses nothing: the walk goes on, and the next call returns the result.

        Raises what handling that item raised; and what the source raised, after the results of all items
        that it yielded.
        """
        if self._at_once >= MAX_UNAWAITED:
            self._at_once = 0
            await asyncio.sleep(0)
        while True:
            if (found := self.take_ended()) is not None:
                self._at_once += 1
                return found
            if self._reader.done() and not self._under_way:
                self._reader.result()
                return None
            self._at_once = 0
            self._news.clear()
            await self._news.wait()
            await asyncio.sleep(0)  # what takes the place of all that ended is asked first

    def take_ended(self) -> tuple[int, T] | None:
        """Return the next result with its item's number if there is one already; raise as ``take``."""
        number = self._taken if self._in_order else next(iter(self._ended), -1)
        task = self._ended.pop(number, None)
        if task is None:
            return None
        self._taken += 1
        if self._has_room():
            self._room.set()
        return number, task.result()

    def rest(self) -> list[T]:
        """Return the results that are not taken, in the order in which they ended; none that raised."""
        left = self._ended.values()
        return [task.result() for task in left if not (task.cancelled() or task.exception())]

    async def close(self) -> None:
        """Cancel what is under way, wait until it has ended, and close an asynchronous source. Results of
        what had ended by itself can still be had."""
        self._closing = True
        tasks = [self._reader, *self._under_way]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            if (close := getattr(self._items, "aclose", None)) is not None:
                await close()


def each_of(source: Source) -> AsyncIterator[Any]:
    """Return an asynchronous iterator over a source of either kind."""
    if isinstance(source, AsyncIterable):
        return aiter(source)
    return _awaited(iter(source))


async def _awaited(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
