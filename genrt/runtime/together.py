"""Concurrent work of which nothing is left behind."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at once and return their results in order. The first error is raised; by then,
    or once cancelled, none goes on."""
    tasks = [asyncio.ensure_future(part) for part in work]
    async with Ending(tasks):
        return await asyncio.gather(*tasks)


class Ending:
    """A context manager by which tasks end with what awaits them: after an error, or a cancellation, none
    goes on."""

    def __init__(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        self._tasks = tasks

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if (
            kind is None or kind is GeneratorExit
        ):  # dropped with its loop, which runs nothing any more
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


Keep: TypeAlias = Callable[[int, Any], None]
"""Takes the number of a text and the answer about it."""

_Calls: TypeAlias = Iterator[tuple[int, Callable[[], Any]]]


class Asked:
    """A user's function of one argument, asked about many at once.

    A plain function is called in a thread, for one argument after the other; a coroutine function, or one
    that turns out to return what has to be awaited, on the running loop. On each loop no more than
    ``max_concurrent`` calls or threads are under way.
    """

    def __init__(self, function: Callable[[Any], Any], max_concurrent: int) -> None:
        self._function = function
        # An object with an ``async def __call__`` is a coroutine function in all but name.
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self._max_concurrent = max_concurrent
        self._limits: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    async def about(self, arguments: dict[int, Any], keep: Keep) -> None:
        """Ask about arguments, and give ``keep`` each answer with its argument's number as it arrives.

        The first error of the function or of ``keep`` is raised. After an error or a cancellation no call
        goes on, except a plain one under way, which ends by itself.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            limit = self._limits.get(loop)
            if limit is None:
                limit = self._limits[loop] = asyncio.Semaphore(self._max_concurrent)
        calls: _Calls = ((i, partial(self._function, each)) for i, each in arguments.items())
        if not self._is_async:
            stop = threading.Event()
            async with limit:
                try:
                    left = await asyncio.to_thread(self._call, calls, keep, stop)
                finally:
                    stop.set()
            if isinstance(left, BaseException):
                raise left
            if left is None:
                return
            number, answer = left
            calls = chain([(number, lambda: answer)], calls)
        workers = min(self._max_concurrent, len(arguments))
        await together([self._await(calls, keep, limit) for _ in range(workers)])

    def _call(
        self, calls: _Calls, keep: Keep, stop: threading.Event
    ) -> BaseException | tuple[int, Any] | None:
        """Make the calls one by one, up to one whose answer has to be awaited, which is returned."""
        for number, call in calls:
            if stop.is_set():
                break
            # An exception is handed over as a value: a future can't hold StopIteration.
            try:
                answer = call()
                if inspect.isawaitable(answer):
                    self._is_async = True
                    return number, answer
                keep(number, answer)
            except BaseException as error:
                return _noted(error, call)
        return None

    async def _await(self, calls: _Calls, keep: Keep, limit: asyncio.Semaphore) -> None:
        """Take calls from the shared ones and await their answers, until none is left."""
        for number, call in calls:
            async with limit:
                try:
                    answer = call()
                    keep(number, await answer if inspect.isawaitable(answer) else answer)
                except Exception as error:
                    _noted(error, call)
                    raise


def _noted(error: BaseException, call: Callable[[], Any]) -> BaseException:
    """Return an error of the function with what it was asked about in a note."""
    if isinstance(call, partial):
        error.add_note(f"the function was asked about {call.args[-1]!r:.300}")
    return error
