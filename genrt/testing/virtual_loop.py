"""An event loop without a thread, selector or clock. Its owner runs one callback at a time and sets the
time.

Rules:
    Callbacks run in the order in which they were scheduled, as in asyncio's own loop.
    The loop never waits. Time passes only when its ``VirtualClock`` is advanced.
    A closed loop refuses new callbacks, as asyncio's loop does, and so refuses deliveries.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClock:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        """Return the time in seconds."""
        return self.now

    def pass_until(self, moment: float) -> None:
        """Advance the time to a moment; a past moment changes no time."""
        self.now = max(self.now, moment)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that is advanced by hand.

    It has callbacks, timers, futures, tasks and ``run_in_executor``, which runs the function in a
    callback of its own. It has no sockets, pipes, signals or subprocesses. ``reports`` collects the calls
    of asyncio's exception handler and is empty if all is well. ``before_delivery`` is called before a
    callback of another thread is accepted.
    """

    # asyncio's private fields: the callbacks to run, a heap of timers, the thread that runs them, and the
    # hooks for asynchronous generators that start or are collected before their end.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _thread_id: int | None
    _asyncgen_firstiter_hook: Callable[[AsyncGenerator[Any, Any]], None]
    _asyncgen_finalizer_hook: Callable[[AsyncGenerator[Any, Any]], None]

    def __init__(
        self, clock: VirtualClock, *, before_delivery: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._clock = clock
        self._before_delivery = before_delivery
        self.reports: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.reports.append(context))

    # -- control by hand ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if there is a callback to run now."""
        while self._scheduled and self._scheduled[0].when() <= self._clock.now:
            self._ready.append(heapq.heappop(self._scheduled))
        return bool(self._ready)

    @property
    def next_timer(self) -> float | None:
        """The time of the next timer; ``None`` if there is no timer."""
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)
        return self._scheduled[0].when() if self._scheduled else None

    def run_one(self) -> None:
        """Run the next callback, if there is one.

        Raises:
            KeyboardInterrupt, SystemExit: raised by the callback, as in asyncio's loop; the loop can
                continue afterwards.
        """
        if not self.has_work:
            return
        handle = self._ready.popleft()
        if handle.cancelled():
            return
        outside, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        self._thread_id = threading.get_ident()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(
            firstiter=self._asyncgen_firstiter_hook, finalizer=self._asyncgen_finalizer_hook
        )
        try:
            handle._run()
        finally:
            handle.cancel()  # the traceback of an error would keep its callback, and so the task, alive
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(outside)
            self._thread_id = None

    def close(self) -> None:
        for handle in [*self._ready]:
            for each in handle._args or ():
                if isinstance(each, Coroutine):  # a generator's cleanup that is no task yet
                    each.close()
        super().close()

    # -- called by asyncio --------------------------------------------------------------------

    def time(self) -> float:
        return self._clock.now

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, **context: Any
    ) -> asyncio.Handle:
        self._before_delivery()
        return super().call_soon_threadsafe(callback, *args, **context)

    def _write_to_self(self) -> None:
        pass  # there is no selector to wake

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)
        return future
