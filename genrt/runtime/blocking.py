"""Coroutines run to their end from where nothing can be awaited."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from genrt.runtime.ask import twin_of

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

SIGNAL_SECONDS = 0.05
"""How often to look whether the calling task was cancelled."""

INTERRUPT_SECONDS = 0.5
"""How often the main thread looks whether there was an interrupt. One that comes after Python has looked,
and before the thread waits, wakes nobody."""

MOST_HANDED = 64
"""How many values of an asynchronous generator may wait for the thread that takes them."""


def blocking(coroutine: Coroutine[Any, Any, T], *, undo: Callable[[T], object] | None = None) -> T:
    """Return what the coroutine returns, or raise what it raises.

    It runs on an event loop of its own, in a thread of its own, in a copy of the caller's context. So
    this may be called from a script, from any thread, and where an event loop is running, which stands
    still meanwhile. An interrupt cancels the coroutine and is raised once that has ended. Where a loop is
    running, an interrupt may arrive as the cancellation of the calling task, as with ``asyncio.run``: the
    effect is the same. One that comes when the coroutine has returned already calls ``undo`` with its
    result, so that no caller is left with a lasting effect that it was not told of.
    """
    run = _Run(coroutine)
    try:
        run.thread.start()
        _wait(run.ended.wait)
        return run.outcome.result()
    except BaseException:
        run.cancel()
        if undo is not None and run.has_returned:
            undo(run.outcome.result())
        raise


def blocking_generator(asynchronous: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield what an asynchronous generator yields, or raise what it raises.

    It runs as ``blocking`` says, and goes on while the caller does something else, up to ``MOST_HANDED``
    values ahead. An interrupt closes it, and so does closing or dropping this generator; both wait until
    it has ended.
    """
    handing = _Handing(asynchronous)
    run = _Run(handing.hand(), daemon=True)
    unregister = atexit.unregister  # which this frame may outlive
    try:
        atexit.register(run.cancel)  # an interpreter that exits stops daemons anywhere
        run.thread.start()
        while (value := handing.take()) is not _END:
            yield value[0]
        run.join()
    except BaseException:
        run.cancel()
        raise
    finally:
        unregister(run.cancel)
    run.outcome.result()


def blocking_twin(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return a method that blocks until this one has ended, as ``blocking`` does."""

    @twin_of(method, interrupted="It runs in another thread; an interrupt cancels it.")
    def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return blocking(method(self, *args, **kwargs))

    return twin


_END: tuple[Any, ...] = ("the end",)
"""What is handed over after the last value."""


class _Handing(Generic[T]):
    """The values of an asynchronous generator, on their way from its thread to another."""

    def __init__(self, asynchronous: AsyncGenerator[T, None]) -> None:
        self._asynchronous = asynchronous
        self._handed: queue.SimpleQueue[tuple[T]] = queue.SimpleQueue()
        self._make_room: Callable[[], object] = lambda: None

    async def hand(self) -> None:
        """Put down every value, as there is room, and then the end."""
        loop, room = asyncio.get_running_loop(), asyncio.Event()
        self._make_room = lambda: loop.call_soon_threadsafe(room.set)
        try:
            async with contextlib.aclosing(self._asynchronous) as values:
                async for value in values:
                    self._handed.put((value,))
                    while self._handed.qsize() >= MOST_HANDED:
                        room.clear()
                        await room.wait()
        finally:
            self._handed.put(_END)

    def take(self) -> tuple[T]:
        """Wait for the next value and return it in a tuple, or ``_END``."""
        value = _wait(self._get)
        if self._handed.qsize() == MOST_HANDED // 2:  # so the thread wakes once for many values
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._make_room()
        return value

    def _get(self, seconds: float | None) -> tuple[T] | None:
        with contextlib.suppress(queue.Empty):
            return self._handed.get(timeout=seconds)
        return None


class _Run(Generic[T]):
    """A coroutine, to be run by one thread and cancelled by another, in any order.

    ``claimed`` is taken by whichever comes first: the thread that runs it, or a cancellation after which
    none will. The running thread sets ``stop`` before it looks at ``cancelled``; the other one sets
    ``cancelled`` before it looks at ``stop``. So at least one of them sees the other.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], daemon: bool = False) -> None:
        self.coroutine = coroutine
        self.thread = threading.Thread(target=self._run, name="genrt", daemon=daemon)
        self.context = contextvars.copy_context()
        self.outcome: Future[T] = Future()
        self.ended = threading.Event()
        self.claimed = threading.Lock()
        self.cancelled = False
        self.stop: Callable[[], object] = lambda: None

    def _run(self) -> None:
        if not self.claimed.acquire(blocking=False):
            return
        try:
            with asyncio.Runner() as runner:
                result = runner.run(self._main(), context=self.context)
            self.outcome.set_result(result)
        except BaseException as error:
            self.outcome.set_exception(error)
        finally:
            self.ended.set()

    @property
    def has_returned(self) -> bool:
        """True once the coroutine has returned; not if it was cancelled or has raised."""
        return self.outcome.done() and self.outcome.exception() is None

    async def _main(self) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self.stop = lambda: loop.call_soon_threadsafe(task.cancel) if task else None
        if self.cancelled:
            self.coroutine.close()
            raise asyncio.CancelledError
        return await self.coroutine

    def cancel(self) -> None:
        """Cancel the run, and wait until it has ended. Idempotent."""
        if self.ended.is_set() and not self.thread.is_alive():
            return  # also where the interpreter has cleared this module
        self.cancelled = True
        if self.claimed.acquire(blocking=False):
            self.coroutine.close()
            self.ended.set()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            self.stop()
        self.join()

    def join(self) -> None:
        """Wait until the run has ended and its thread is gone."""
        if threading.current_thread() is self.thread:
            return  # whoever waited for this run was collected by it, as garbage
        self.ended.wait()
        with contextlib.suppress(RuntimeError):  # it was never started
            self.thread.join()


def _wait(waited: Callable[[float | None], T | None]) -> T:
    """Call this with seconds to wait until it returns something, and return that. Raises CancelledError
    if the task that waits is cancelled meanwhile."""
    try:
        waiting = asyncio.current_task()
    except RuntimeError:
        waiting = None
    before = waiting.cancelling() if waiting else 0
    is_main = threading.current_thread() is threading.main_thread()
    seconds = SIGNAL_SECONDS if waiting else INTERRUPT_SECONDS if is_main else None
    # A signal handler cancels the task, but that wakes nobody while its loop stands still.
    while not (found := waited(seconds)):
        if waiting and waiting.cancelling() > before:
            raise asyncio.CancelledError
    return found
