"""An engine's thread without a thread: its rounds are taken one by one, and it sleeps until it is woken
or due."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from genrt.engines.adapters import Adapters
from genrt.engines.protocol import Engine, EngineStatistics
from genrt.errors import WAS_CLOSED, Closed, EngineDied, EngineFailed, GenrtError
from genrt.questions.values import Adapter, Request, Result
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from genrt.runtime.waiters import Entry, Waiter
from genrt.testing.ledger import Ledger
from genrt.testing.simulated_engine import SimulatedEngine
from genrt.testing.violation import Violation
from genrt.testing.virtual_loop import VirtualClock
from genrt.testing.watching import WatchedBatcher, WatchingEngine

T = TypeVar("T")


class SimulatedThread:
    """Stands for ``EngineThread``, with the same members; ``go_round`` is one round of its loop.

    Args:
        cache, max_batch_size, max_wait_seconds, max_queued_requests: see ``Batcher``.
        clock: what time it is.
        open_engine: makes an engine.
        run_blocked: what a coroutine returns, for a caller that blocks.
        restarts: whether another engine takes the place of one that died.
    """

    def __init__(
        self,
        cache: RowCache,
        clock: VirtualClock,
        open_engine: Callable[[], SimulatedEngine],
        run_blocked: Callable[[Coroutine[Any, Any, list[Result]]], list[Result]],
        *,
        max_batch_size: int | None,
        max_wait_seconds: float,
        max_queued_requests: int,
        restarts: bool,
    ) -> None:
        self.is_turning = False
        self.alarm: float | None = None
        self._clock = clock
        self._open_engine = open_engine
        self._cache = cache
        self._restarts = restarts
        self._batcher = Batcher(
            cache,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            max_queued_requests=max_queued_requests,
            wake=self._wake,
            clock=clock.time,
        )
        self._batcher._lock = cast("threading.RLock", _CheckedLock())
        self._batcher._gatherings._lock = self._batcher._lock
        self.adapters = Adapters()
        self._calls: collections.deque[
            tuple[concurrent.futures.Future[Any], Callable[[Engine], Any]]
        ] = collections.deque()
        self._answering = self._open()
        self.ledger = Ledger(self._batcher, cache, self._engine)
        self._listen()
        self._watched = WatchedBatcher(self._batcher, self.ledger, run_blocked)
        self._start()

    def _start(self) -> None:
        self.opened: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.opened.set_result(self.engine)
        self._woken = False
        self._closing = False
        self._is_at_work = False
        self._ended: GenrtError | None = None
        self._answered = -1

    def _open(self) -> AnsweringEngine:
        self._engine = self._open_engine()
        answering = AnsweringEngine(self._engine, self._cache, self.adapters)
        self._batcher.fail(answering.reload_adapters())
        return answering

    # -- as EngineThread ----------------------------------------------------------------------

    @property
    def batcher(self) -> Batcher:
        """The batcher, watched by the ledger."""
        return cast("Batcher", self._watched)

    @property
    def engine(self) -> Engine:
        """The engine; after a restart another one."""
        return self._answering.engine

    @property
    def alive(self) -> bool:
        """Whether it has not ended, nor been told to."""
        return self._ended is None and not self._closing

    def statistics(self) -> EngineStatistics:
        """The engine's counters, with what was read from its rows."""
        return self._answering.statistics()

    def call(self, function: Callable[[Engine], T]) -> concurrent.futures.Future[T]:
        """Have ``function(engine)`` run between two turns."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        if self._ended is not None:
            future.set_exception(self._ended.fresh())
            return future
        self._calls.append((future, function))
        self._wake()
        return future

    def close(self, *, wait: bool = True) -> None:
        """End every waiter at once, and the thread after the step in progress."""
        self.abandon()
        if self._batcher._lock._is_owned():  # type: ignore[attr-defined]
            return
        self.ledger.closed(Closed(WAS_CLOSED))
        self._batcher.close()
        if wait and not self._is_at_work and self._ended is None:
            self.go_round()

    def abandon(self) -> None:
        """Have the thread end every waiter and itself, after the step in progress."""
        self._closing = True
        self._wake()

    def restart(self) -> concurrent.futures.Future[Engine]:
        """Close the engine, and open another one with the same adapters.

        Raises:
            EngineFailed: a step is in progress.
        """
        self.close()
        if self._is_at_work:
            raise EngineFailed("the engine is still in a step: wait for that to end, then restart")
        self._answering = self._open()
        self.ledger.reopened(self._engine)
        self._batcher.reopen()
        self._start()
        return self.opened

    # -- taken on by hand ---------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether it is awake, or would be by now."""
        if self._ended is not None or self._is_at_work:
            return False
        return self._woken or (self.alarm is not None and self.alarm <= self._clock.now)

    def go_round(self) -> None:
        """One round: the calls, then a turn, or sleep until woken or due."""
        self._woken, self.alarm = False, None
        if self._closing:
            self._end(Closed(WAS_CLOSED))
            return
        self._is_at_work = True
        try:
            self._do_calls()
            seconds = self._batcher.seconds_until_due()
            if seconds is None:
                return
            if seconds > 0.0:
                self.alarm = self._clock.now + seconds
                return
            self._woken = True
            self._turn()
        except Violation:
            raise
        except BaseException as error:
            if not self._engine.raised(error):
                raise Violation(f"a turn ended in {error!r}, which no engine raised") from error
            self._die(error if isinstance(error, EngineDied) else _died(error))
        finally:
            self._is_at_work = self.is_turning = False

    def held(self) -> contextlib.AbstractContextManager[object]:
        """The batcher's lock."""
        return self._batcher._lock

    def check_nothing_is_left(self) -> None:
        """Nothing is kept for who waited, and a thread that has ended has closed its engine."""
        answering = self._answering
        kept = (answering._readers, answering._asked, answering._cached, answering._refused)
        if any(kept):
            raise Violation(f"nobody waits, but the answers keep {kept}")
        batcher = self._batcher
        held = (
            batcher._entries,
            batcher._gatherings,
            batcher._ready,
            batcher._flight,
            batcher._flight._withdrawn,
            batcher._admission,
            batcher._on_loops._waiters,
            batcher._bindings._bound,
            batcher._bindings if self.alive else (),
        )
        if any(held):
            raise Violation(f"nobody waits, but the batcher holds {held}: {batcher}")
        if self._calls:
            raise Violation(f"{len(self._calls)} calls were never made")
        if self._ended is not None and not self._engine.closed:
            raise Violation("the thread has ended, but the engine is open")

    def _do_calls(self) -> None:
        for _ in range(len(self._calls)):
            future, function = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = function(cast("Engine", self._answering))
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

    def _turn(self) -> None:
        self.is_turning = True
        self.ledger.turning()
        watching = WatchingEngine(self._answering, self.ledger)
        self._batcher.turn(cast("AnsweringEngine", watching))
        self.ledger.turned()

    def _listen(self) -> None:
        """Have the ledger told of what the batcher does at moments of its own."""
        batcher, ledger = self._batcher, self.ledger
        register, leave, take = batcher._register, batcher._leave, batcher._take

        def registering(waiter: Waiter) -> list[Entry]:
            ledger.registering(waiter)
            return register(waiter)

        def leaving(waiter: Waiter) -> None:
            ledger.leaving(waiter)
            leave(waiter)

        def taking() -> tuple[list[Request], list[Request], list[Adapter], list[Waiter]]:
            taken = take()
            if taken[1]:
                ledger.withdrawn(taken[1])
            if taken[0]:
                ledger.taken(taken[0])
            return taken

        batcher._take = taking  # type: ignore[method-assign]
        batcher._register = registering  # type: ignore[method-assign]
        batcher._leave = leaving  # type: ignore[method-assign]

    def _die(self, reason: GenrtError) -> None:
        """End, or go on with another engine, if something was answered by this one."""
        before, self._answered = self._answered, self._batcher.statistics().answered
        if self._closing or not self._restarts or self._answered == before:
            self._end(reason)
            return
        self._answering.close()
        self._answering = self._open()
        self._batcher.resume()
        self.ledger.restarted(self._engine)

    def _end(self, reason: GenrtError) -> None:
        self._ended = reason
        self.ledger.closed(reason)
        self._batcher.close(reason)
        while self._calls:
            future, _ = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason.fresh())
        self._answering.close()

    def _wake(self) -> None:
        self._woken = True


class _CheckedLock:
    """A lock of the only thread there is: whoever finds it held would wait for ever."""

    def __init__(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        if self._is_held:
            raise Violation("the batcher's lock is taken by who holds it: a deadlock")
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False

    def _is_owned(self) -> bool:
        return self._is_held


def _died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the engine can't go on and was closed: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
