"""The one thread that owns an engine: opens it, turns the batcher's crank, runs calls between turns.

Rules:
    The engine is opened, used and closed on this thread and nowhere else.
    Between turns the thread sleeps until it is woken; it never polls.
    When the thread ends, for whatever reason, every waiter has been told.
    A runtime may be collected, and so closed, by any thread at any moment, this one included in the
    middle of a turn: then ``close`` takes no lock and waits for nobody.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from genrt.answers import AnsweringEngine
from genrt.batcher import Batcher
from genrt.cache import RowCache
from genrt.engine import Engine, EngineStatistics
from genrt.errors import Closed, EngineFailed, GenrtError

__all__ = ["EngineThread"]

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for the step in progress before it leaves the thread to end by itself."""


class EngineThread:
    """An engine on a thread of its own, and the batcher that feeds it.

    Args:
        open_engine: makes the engine; called on the thread.
        cache, max_batch_size, max_wait_seconds: see ``Batcher``.

    ``opened`` resolves to the engine, or to the error that opening it raised.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        cache: RowCache,
        *,
        max_batch_size: int | None = None,
        max_wait_seconds: float = 0.0,
    ) -> None:
        self.opened: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self._open_engine = open_engine
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._max_wait_seconds = max_wait_seconds
        self._batcher: Batcher | None = None
        self._answering: AnsweringEngine | None = None
        self._calls: collections.deque[
            tuple[concurrent.futures.Future[Any], Callable[[Engine], Any]]
        ] = collections.deque()
        self._calls_lock = threading.Lock()
        self._ended: GenrtError | None = None
        # Not an Event, whose lock a finalizer could find held by its own thread.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = False
        self._process = os.getpid()
        self.opened.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        self._thread = threading.Thread(target=self._run, name="genrt-engine", daemon=True)
        self._thread.start()

    @property
    def batcher(self) -> Batcher:
        """The batcher, once ``opened`` has resolved to an engine."""
        self._check_process()
        if self._batcher is None:
            raise Closed("the engine is not open")
        return self._batcher

    def statistics(self) -> EngineStatistics:
        """The engine's counters, with what was read from its rows; once ``opened`` has resolved."""
        if self._answering is None:
            raise Closed("the engine is not open")
        return self._answering.statistics()

    def call(self, function: Callable[[Engine], T]) -> concurrent.futures.Future[T]:
        """Have ``function(engine)`` run on the thread between two turns.

        The future can be cancelled until the function starts; it gets ``Closed``, or why the engine
        can't go on, when the thread ends before that.

        Raises:
            Closed: in a forked child, where there is no such thread.
        """
        self._check_process()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._calls_lock:
            if self._ended is not None:
                future.set_exception(self._ended.fresh())
                return future
            self._calls.append((future, function))
        self._wake()
        return future

    def close(self, *, wait: bool = True) -> None:
        """End every waiter with ``Closed`` at once, and the thread after the step in progress.

        Idempotent, from any thread. With ``wait``, returns when the engine is closed, or after
        ``CLOSE_SECONDS`` when a step takes longer; the thread then closes it when the step ends."""
        if os.getpid() != self._process:
            return
        self._closing = True
        self._wake()
        if threading.current_thread() is self._thread:
            return  # to the turn in progress, after which it tells everyone and ends
        if self._batcher is not None:
            self._batcher.close()
        if wait:
            self._thread.join(CLOSE_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, in this process, and has not been told to end."""
        return self._thread.is_alive() and not self._closing

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise Closed(
                "this runtime belongs to the process that loaded it; a forked child must load its own"
            )

    def _wake(self) -> None:
        if self._signals.empty():  # one that is still there will be seen, and after it this state
            self._signals.put(None)

    def _run(self) -> None:
        atexit.register(self.close)  # an interpreter that exits in the middle of loading may crash
        try:
            engine = self._open_engine()
        except BaseException as error:
            self._end_calls(_closed())
            self.opened.set_exception(error)
            return
        finally:
            atexit.unregister(self.close)  # from here on, whoever holds the runtime closes it
        self._answering = answering = AnsweringEngine(engine, self._cache)
        self._batcher = batcher = Batcher(
            self._cache,
            max_batch_size=self._max_batch_size,
            max_wait_seconds=self._max_wait_seconds,
            wake=self._wake,
        )
        self.opened.set_result(engine)
        reason: GenrtError = _closed()
        try:
            self._serve(engine, answering, batcher)
        except BaseException as error:
            reason = EngineFailed(
                f"the engine can't go on and was closed: {type(error).__name__}: {error}"
            )
            reason.__cause__ = error
        finally:
            batcher.close(reason)
            self._end_calls(reason)
            answering.close()

    def _serve(self, engine: Engine, answering: AnsweringEngine, batcher: Batcher) -> None:
        while not self._closing:
            while self._calls:
                future, function = self._calls.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        result = function(engine)
                    except BaseException as error:
                        future.set_exception(error)
                        if not isinstance(error, Exception):
                            raise
                    else:
                        future.set_result(result)
            seconds = batcher.seconds_until_due()
            if seconds == 0.0:
                batcher.turn(answering)
            elif not self._calls and not self._closing:
                longest = threading.TIMEOUT_MAX if seconds is None else seconds
                with contextlib.suppress(queue.Empty):
                    self._signals.get(timeout=min(longest, threading.TIMEOUT_MAX))

    def _end_calls(self, reason: GenrtError) -> None:
        with self._calls_lock:
            self._ended = reason
        while self._calls:
            future, _ = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason.fresh())


def _closed() -> Closed:
    return Closed("the runtime was closed; load it again to ask more")
