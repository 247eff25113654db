"""The one thread that owns an engine: opens it, turns the batcher's crank, runs calls between turns.

An engine that died is closed, and everyone is told why; or, if the runtime is to restart by itself,
another one is opened in its place, with the same adapters, and what was in flight is sent to that one.

Rules:
    The engine is opened, used and closed on this thread and nowhere else.
    Between turns the thread sleeps until it is woken; it never polls.
    When the thread ends, for whatever reason, every waiter has been told.
    A thread whose batcher is closed ends, whoever closed that.
    A runtime may be collected by any thread at any moment, also while that thread holds a lock of ours:
    ``abandon``, which is called then, takes none and waits for nobody.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from genrt.engines.adapters import Adapters
from genrt.engines.protocol import Engine, EngineStatistics
from genrt.errors import WAS_CLOSED, Closed, EngineDied, EngineFailed, GenrtError
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache

__all__ = ["EngineThread", "aside"]

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for the step in progress before it leaves the thread to end by itself."""

EXIT_SECONDS = 60.0
"""How long an interpreter that exits waits for an engine that is being opened: it may crash if it goes on
while the thread is anywhere in native code. For one that is open, it waits ``CLOSE_SECONDS``."""


class EngineThread:
    """An engine on a thread of its own, and the batcher that feeds it.

    Args:
        open_engine: makes the engine; called on the thread.
        cache, max_batch_size, max_wait_seconds, max_queued_requests, max_queued_bytes: see ``Batcher``.
        restarts: whether another engine is opened in place of one that died; once more only if something
            was answered since.

    ``opened`` resolves to the engine, or to the error that opening it raised; ``adapters`` are those that
    every engine is given.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        cache: RowCache,
        *,
        max_batch_size: int | None = None,
        max_wait_seconds: float = 0.0,
        max_queued_requests: int = sys.maxsize,
        max_queued_bytes: int = sys.maxsize,
        restarts: bool = False,
    ) -> None:
        self._open_engine = open_engine
        self._cache = cache
        self._restarts = restarts
        self._batcher = Batcher(
            cache,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            max_queued_requests=max_queued_requests,
            max_queued_bytes=max_queued_bytes,
            wake=self._wake,
        )
        self._answering: AnsweringEngine | None = None
        self.adapters = Adapters()
        self._calls: collections.deque[
            tuple[concurrent.futures.Future[Any], Callable[[Engine], Any]]
        ] = collections.deque()
        self._calls_lock = threading.Lock()
        self._ended: GenrtError | None = None
        # Not an Event, whose lock a finalizer could find held by its own thread.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = False
        self._is_opening = False
        self._process = os.getpid()
        self._restart_lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self.opened: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.opened.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        self._thread = threading.Thread(target=self._run, name="genrt-engine", daemon=True)
        self._thread.start()

    @property
    def batcher(self) -> Batcher:
        """What the engine is asked through.

        Raises:
            Closed: in a forked child, where there is no such thread.
        """
        self._check_process()
        return self._batcher

    @property
    def engine(self) -> Engine:
        """The engine, once ``opened`` has resolved to one; after a restart another one."""
        return self._open_one().engine

    def statistics(self) -> EngineStatistics:
        """The engine's counters, with what was read from its rows; once ``opened`` has resolved."""
        return self._open_one().statistics()

    def _open_one(self) -> AnsweringEngine:
        if self._answering is None:
            raise Closed("the engine is not open")
        return self._answering

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
        ``CLOSE_SECONDS`` when a step takes longer; the thread then closes it when the step ends. Called
        by a finalizer or a signal handler in the middle of a question, it leaves all of that to the
        thread, and returns at once."""
        if os.getpid() != self._process:
            return
        self._closing = True
        if threading.current_thread() is self._thread:
            return  # to the turn in progress, after which it tells everyone and ends
        told = self._batcher.close()
        self._wake()
        if wait and told:
            self._thread.join(CLOSE_SECONDS)

    def abandon(self) -> None:
        """Have the thread do what ``close`` does, after the step in progress, and return at once."""
        if os.getpid() == self._process:
            self._closing = True
            self._wake()

    def restart(self) -> concurrent.futures.Future[Engine]:
        """Close the engine, if that has not happened, and open another one with the same adapters; who
        still waits gets ``Closed``. Returns ``opened``, which is to be waited for.

        Raises:
            EngineFailed: the engine did not end its step within ``CLOSE_SECONDS``.
            Closed: in a forked child.
        """
        self._check_process()
        with self._restart_lock:
            self.close()
            if self._thread.is_alive():
                raise EngineFailed(
                    "the engine is still in a step, or being opened: wait for that to end, then restart"
                )
            with self._calls_lock:
                self._ended = None
            self._closing = False
            self._batcher.reopen()
            self._start()
            return self.opened

    def _close_at_exit(self) -> None:
        self.close(wait=False)
        if os.getpid() == self._process:
            self._thread.join(EXIT_SECONDS if self._is_opening else CLOSE_SECONDS)

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
        try:
            self._live_and_die()
        finally:
            atexit.unregister(self._close_at_exit)

    def _live_and_die(self) -> None:
        try:
            answering = self._open()
        except BaseException as error:
            self._end(error if isinstance(error, GenrtError) else _died(error))
            self.opened.set_exception(error)
            return
        self.opened.set_result(answering.engine)
        answered = -1
        while True:
            reason = self._live(answering)
            before, answered = answered, self._batcher.statistics().answered
            if self._is_over or not self._restarts or answered == before:
                break
            with contextlib.suppress(Exception):  # it died already
                answering.close()
            try:
                answering = self._open()
            except BaseException as error:
                self._end(_died(error))
                return
            self._batcher.resume()
        self._end(reason)
        answering.close()

    @property
    def _is_over(self) -> bool:
        """Whether the thread is to end. The second is for a ``close`` that overlaps with a restart."""
        return self._closing or self._batcher.is_closed

    def _open(self) -> AnsweringEngine:
        """Open another engine, with those adapters of the one before that it takes."""
        self._is_opening = True
        atexit.register(self._close_at_exit)
        try:
            answering = AnsweringEngine(self._open_engine(), self._cache, self.adapters)
        finally:
            self._is_opening = False
            atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)  # to be called before what the engine has registered
        try:
            self._batcher.fail(answering.reload_adapters())
        except BaseException:
            answering.close()
            raise
        self._answering = answering
        return answering

    def _live(self, answering: AnsweringEngine) -> GenrtError:
        """Serve until the engine is to be closed, or has died; the reason."""
        try:
            self._serve(answering)
        except EngineDied as error:
            return error
        except BaseException as error:
            return _died(error)
        return Closed(WAS_CLOSED)

    def _serve(self, answering: AnsweringEngine) -> None:
        while not self._is_over:
            for _ in range(len(self._calls)):  # and not those that come meanwhile: others wait
                future, function = self._calls.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        result = function(answering)
                    except BaseException as error:
                        future.set_exception(error)
                        if isinstance(error, EngineDied) or not isinstance(error, Exception):
                            raise
                    else:
                        future.set_result(result)
            seconds = self._batcher.seconds_until_due()
            if seconds == 0.0:
                self._batcher.turn(answering)
            elif not self._calls and not self._is_over:
                longest = threading.TIMEOUT_MAX if seconds is None else seconds
                with contextlib.suppress(queue.Empty):
                    self._signals.get(timeout=min(longest, threading.TIMEOUT_MAX))

    def _end(self, reason: GenrtError) -> None:
        """Tell everyone who waits, and whoever asks from now on."""
        self._batcher.close(reason)
        with self._calls_lock:
            self._ended = reason
        while self._calls:
            future, _ = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason.fresh())


def _died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the engine can't go on and was closed: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died


async def aside(function: Callable[[], T]) -> T:
    """Return what the function returns, called in a thread of its own: all those of the loop's executor
    may wait for this runtime."""
    pool = concurrent.futures.ThreadPoolExecutor(1, "genrt-aside")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, function)
    finally:
        pool.shutdown(wait=False)
