"""An event loop without a thread, a selector or a clock of its own: whoever holds it runs one callback at
a time, and says what time it is.

Rules:
    Callbacks run in the order in which they were scheduled, as in asyncio's own loop.
    Nothing here waits. Time passes when its ``VirtualClock`` is told so.
    A closed loop refuses new callbacks, as asyncio's does, and so everything that is delivered to it.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

_Callback: TypeAlias = tuple[
    asyncio.Handle, contextvars.Context, Callable[..., object], tuple[Any, ...]
]


class VirtualClock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        """Return the time, in seconds."""
        return self.now

    def pass_until(self, moment: float) -> None:
        """Pass the time until a moment; one that is over changes nothing."""
        self.now = max(self.now, moment)


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop that is taken on by hand.

    It has callbacks, timers, futures, tasks and ``run_in_executor`` (which runs the function in a
    callback of its own); no sockets, pipes, signals or subprocesses. ``reports`` are what asyncio's
    exception handler was told: on a loop where all is well, nothing. ``before_delivery`` is called before
    a callback of another thread is taken.
    """

    def __init__(
        self, clock: VirtualClock, *, before_delivery: Callable[[], None] = lambda: None
    ) -> None:
        self._before_delivery = before_delivery
        self.reports: list[dict[str, Any]] = []
        self._clock = clock
        self._ready: deque[_Callback] = deque()
        self._timers: list[tuple[float, int, _Callback]] = []
        self._number = itertools.count()
        self._running = False
        self._closed = False

    # -- by hand ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if there is a callback to run now."""
        if self._timers:
            self._wake_timers()
        return bool(self._ready)

    @property
    def next_timer(self) -> float | None:
        """When the next timer is due."""
        while self._timers and self._timers[0][2][0].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run_one(self) -> None:
        """Run the next callback, if there is one.

        Raises:
            KeyboardInterrupt, SystemExit: out of the callback, as they come out of asyncio's loop; the
                loop can be taken on afterwards.
        """
        if not self.has_work:
            return
        handle, context, callback, args = self._ready.popleft()
        if handle.cancelled():
            return
        outside = asyncio._get_running_loop()
        self._running = True
        asyncio._set_running_loop(self)
        try:
            context.run(callback, *args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.call_exception_handler(
                {"message": f"exception in callback {callback}", "exception": error}
            )
        finally:
            asyncio._set_running_loop(outside)
            self._running = False

    def _wake_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self._clock.now:
            self._ready.append(heapq.heappop(self._timers)[2])

    # -- as asyncio asks ----------------------------------------------------------------------

    def time(self) -> float:
        return self._clock.now

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append((handle, context or contextvars.copy_context(), callback, args))
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        self._before_delivery()
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._clock.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        entry = (handle, context or contextvars.copy_context(), callback, args)
        heapq.heappush(self._timers, (when, next(self._number), entry))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # a cancelled timer is passed over when it is due

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        self._check_open()
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_soon(run)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.reports.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._running:
            raise RuntimeError("a running event loop cannot be closed")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    async def shutdown_asyncgens(self) -> None:
        pass

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")
