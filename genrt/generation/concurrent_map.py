"""A coroutine function applied to the items of a source, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from genrt.runtime.ask import MAX_UNAWAITED

T = TypeVar("T")

Source: TypeAlias = Iterable[Any] | AsyncIterable[Any]


class ConcurrentMap(Generic[T]):
    """Runs a task ``function(number, item)`` for each item of a source, on the running loop. Results wait
    until they are taken; none is lost.

    Args:
        concurrency: the maximum number of running items.
        max_ahead: the maximum number of items that are read but not taken.
        in_order: whether results are taken in the order of the items, and not of completion.
    """

    def __init__(
        self,
        source: Source,
        function: Callable[[int, Any], Coroutine[Any, Any, T]],
        *,
        concurrency: int,
        max_ahead: int,
        in_order: bool = False,
    ) -> None:
        self._function = function
        self._concurrency = concurrency
        self._max_ahead = max_ahead
        self._in_order = in_order
        self._running: set[asyncio.Task[T]] = set()
        self._finished: OrderedDict[int, asyncio.Task[T]] = OrderedDict()
        self._taken = self._taken_without_waiting = 0
        self._closing = False
        self._room, self._progress = asyncio.Event(), asyncio.Event()
        self._items = aiter(source) if isinstance(source, AsyncIterable) else _async_iter(source)
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._progress.set())

    def _has_room(self) -> bool:
        running = len(self._running)
        return running < self._concurrency and running + len(self._finished) < self._max_ahead

    async def _read(self) -> None:
        """Start a task for each item. All items that fit are started at once: one flush takes them."""
        number = 0
        while True:
            while not self._has_room():
                self._room.clear()
                await self._room.wait()
            try:
                item = await anext(self._items)
            except StopAsyncIteration:
                return
            task = asyncio.create_task(self._function(number, item))
            self._running.add(task)
            task.add_done_callback(lambda task, number=number: self._finish(number, task))  # type: ignore[misc]
            number += 1

    def _finish(self, number: int, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        if not (self._closing and task.cancelled()):
            self._finished[number] = task
        if not task.cancelled():
            task.exception()  # marks it as retrieved: asyncio reports all others
        self._room.set()
        self._progress.set()

    async def take(self) -> tuple[int, T] | None:
        """Wait for the next result. Return it with the number of its item, or ``None`` after the last.

        The loop runs other tasks after every ``MAX_UNAWAITED`` results that needed no wait. Cancelling
        loses no result: the next call returns it.

        Raises the error of the item, or of the source after the results of all items before it.
        """
        if self._taken_without_waiting >= MAX_UNAWAITED:
            self._taken_without_waiting = 0
            await asyncio.sleep(0)
        while True:
            if (found := self._take_finished()) is not None:
                self._taken_without_waiting += 1
                return found
            if self._reader.done() and not self._running:
                self._reader.result()
                return None
            self._taken_without_waiting = 0
            self._progress.clear()
            await self._progress.wait()
            await asyncio.sleep(0)  # the reader starts the next items first

    def _take_finished(self) -> tuple[int, T] | None:
        number = self._taken if self._in_order else next(iter(self._finished), -1)
        task = self._finished.pop(number, None)
        if task is None:
            return None
        self._taken += 1
        if self._has_room():
            self._room.set()
        return number, task.result()

    def drain(self) -> Iterator[tuple[int, T]]:
        """Take the results that are ready, in the order of completion. Errors are skipped."""
        while self._finished:
            number, task = self._finished.popitem(last=False)
            if not task.cancelled() and task.exception() is None:
                yield number, task.result()

    async def close(self) -> None:
        """Cancel the running items, wait for their end, and close an asynchronous source."""
        self._closing = True
        tasks = [self._reader, *self._running]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            if (close := getattr(self._items, "aclose", None)) is not None:
                await close()


async def _async_iter(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
