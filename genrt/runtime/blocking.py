"""Coroutines run to their end from where nothing can be awaited."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from genrt.runtime.ask import twin_of

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

SIGNAL_SECONDS = 0.05
"""How often to look whether the calling task was cancelled."""


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what the coroutine returns, or raise what it raises.

    It runs on an event loop of its own, in a thread of its own, in a copy of the caller's context. So
    this may be called from a script, from any thread, and where an event loop is running, which stands
    still meanwhile. An interrupt cancels the coroutine and is raised once that has ended. Where a loop is
    running, an interrupt may arrive as the cancellation of the calling task, as with ``asyncio.run``: the
    effect is the same.
    """
    run = _Run(coroutine)
    try:
        threading.Thread(target=run, name="genrt").start()
        _wait(run.ended)
    except BaseException:
        run.cancel()
        raise
    return run.outcome.result()


def blocking_twin(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return a method that blocks until this one has ended, as ``blocking`` does."""

    @twin_of(method, interrupted="It runs in another thread; an interrupt cancels it.")
    def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return blocking(method(self, *args, **kwargs))

    return twin


class _Run(Generic[T]):
    """A coroutine, to be run by one thread and cancelled by another, in any order.

    ``claimed`` is taken by whichever comes first: the thread that runs it, or a cancellation after which
    none will. The running thread sets ``stop`` before it looks at ``cancelled``; the other one sets
    ``cancelled`` before it looks at ``stop``. So at least one of them sees the other.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine
        self.context = contextvars.copy_context()
        self.outcome: Future[T] = Future()
        self.ended = threading.Event()
        self.claimed = threading.Lock()
        self.cancelled = False
        self.stop: Callable[[], object] = lambda: None

    def __call__(self) -> None:
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

    async def _main(self) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self.stop = lambda: loop.call_soon_threadsafe(task.cancel) if task else None
        if self.cancelled:
            self.coroutine.close()
            raise asyncio.CancelledError
        return await self.coroutine

    def cancel(self) -> None:
        """Cancel the run, and wait until it has ended."""
        self.cancelled = True
        if self.claimed.acquire(blocking=False):
            self.coroutine.close()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            self.stop()
        self.ended.wait()


def _wait(ended: threading.Event) -> None:
    """Wait until it is set. Raises CancelledError if the task that waits is cancelled meanwhile."""
    try:
        waiting = asyncio.current_task()
    except RuntimeError:
        waiting = None
    if waiting is None:
        ended.wait()
        return
    # A signal handler cancels the task, but that wakes nobody while its loop stands still.
    before = waiting.cancelling()
    while not ended.wait(SIGNAL_SECONDS):
        if waiting.cancelling() > before:
            raise asyncio.CancelledError
