"""The one thread that owns an engine, as the rest of the process sees it: ask, call, close, restart.

What the thread does, round by round, is in ``engine_loop.py``.

Rules:
    Between rounds the thread sleeps until it is woken; it never polls.
    A runtime may be collected by any thread at any moment, also while that thread holds a lock of ours:
    ``abandon``, which is called then, takes none and waits for nobody.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import queue
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from genrt.engines.adapters import Adapters
from genrt.engines.protocol import Engine, EngineStatistics, ReplicaStatistics, scores_rows
from genrt.engines.weights import KeptWeights
from genrt.errors import Closed, EngineFailed
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from genrt.runtime.engine_loop import EngineLoop
from genrt.runtime.lifecycle import Hold, Lifecycle

__all__ = ["AT_ONCE_BYTES", "EngineThread", "aside", "in_background"]

T = TypeVar("T")

AT_ONCE_BYTES = 2**20
"""How much is looked at, or copied, on the event loop."""

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for the step in progress before it leaves the thread to end by itself."""

RESTART_SECONDS = 60.0
"""How long ``restart`` waits for the engine before: closing one takes seconds on a busy machine, and what
waits here would only ask again."""

EXIT_SECONDS = 60.0
"""How long an interpreter that exits waits for the thread, which opens an engine, steps or closes
it: a process may crash if its interpreter goes while a thread is anywhere in native code."""


class Rounds(threading.Thread):
    """Goes round on a thread of its own. An interpreter that exits closes it, and waits for it a while.

    Args:
        round: one round.
        close: has the last round come soon; without ``wait`` it returns at once.
    """

    def __init__(self, round: Callable[[], float | None], close: Callable[..., None]) -> None:
        super().__init__(name="genrt-engine", daemon=True)
        self._round = round
        self._close = close
        # Not an Event, whose lock a finalizer could find held by its own thread.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Take rounds until the last is over."""
        try:
            while (seconds := self._round()) is not None:
                if seconds > 0.0:
                    with contextlib.suppress(queue.Empty):
                        self._signals.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        finally:
            atexit.unregister(self._close_at_exit)

    def wake(self) -> None:
        """End the present sleep, or the next."""
        if self._signals.empty():  # one that is still there will be seen, and after it this state
            self._signals.put(None)

    def open(self, open_engine: Callable[[], Engine]) -> Engine:
        """Return a new engine. Should the interpreter exit meanwhile, it waits for that."""
        atexit.register(self._close_at_exit)
        try:
            engine = open_engine()
        finally:
            atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)  # to be called before what the engine has registered
        return engine

    def _close_at_exit(self) -> None:
        self._close(wait=False)
        self.join(EXIT_SECONDS)


class EngineThread:
    """An engine on a thread of its own, and the batcher that feeds it.

    Args:
        open_engine: makes the engine; called on the thread.
        cache, max_batch_size, max_wait_seconds, max_queued_requests, max_queued_bytes: see ``Batcher``.
        restarts: whether another engine is opened in place of one that died; see ``EngineLoop``.
        hang_up: ends a step that waits for an engine elsewhere; takes no lock.
        make_batcher, make_thread: make these two; for simulations.

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
        hang_up: Callable[[], None] = lambda: None,
        make_batcher: Callable[..., Batcher] = Batcher,
        make_thread: Callable[..., Rounds] = Rounds,
    ) -> None:
        self._process = os.getpid()
        self._max_batch_size = max_batch_size or sys.maxsize
        self._restart_lock = threading.Lock()
        self._hang_up = hang_up
        self.nonce = secrets.token_hex(8)  # no other runtime's, of no process
        self._batcher = make_batcher(
            cache,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            max_queued_requests=max_queued_requests,
            max_queued_bytes=max_queued_bytes,
            wake=self._wake,
        )
        self._loop = EngineLoop(
            lambda: self._thread.open(open_engine), self._batcher, cache, restarts=restarts
        )
        self._finalizer: weakref.finalize[..., object] | None = None
        self._make_thread = make_thread
        self._thread = make_thread(self._loop.round, self.close)
        self._thread.start()

    @property
    def batcher(self) -> Batcher:
        """The batcher, through which the engine is asked.

        Raises:
            Closed: in a forked child, where there is no such thread.
        """
        self._check_process()
        return self._batcher

    @property
    def lifecycle(self) -> Lifecycle:
        """The states of the runtime. Raises Closed in a forked child."""
        return self.batcher.lifecycle

    @property
    def adapters(self) -> Adapters:
        """The adapters that every engine is given."""
        return self._loop.adapters

    @property
    def weights(self) -> KeptWeights:
        """The weights that every engine is given."""
        return self._loop.weights

    @property
    def restarts(self) -> bool:
        """True if another engine takes the place of one that died, without being asked for."""
        return self._loop.restarts

    @property
    def weights_version(self) -> int:
        """The version of the weights that answer."""
        return self._batcher.lifecycle.weights_version

    @property
    def opened(self) -> concurrent.futures.Future[Engine]:
        """The engine to come, or the error that opening it raises."""
        return self._loop.opened

    @property
    def engine(self) -> Engine:
        """The engine, once ``opened`` has resolved to one; after a restart another one."""
        return self._loop.answering.engine

    @property
    def scores(self) -> bool:
        """True if the engine takes score requests."""
        # Asking a runtime-checkable protocol takes as long as all the rest of a question.
        return bool(getattr(self.engine, "scores", False))

    @property
    def scores_rows(self) -> bool:
        """True if it takes those of whole rows too."""
        return scores_rows(self.engine)

    @property
    def most_together(self) -> int:
        """How much one request may weigh: what fits a flush and the engine's memory, and the engine takes
        to a step."""
        fits = min(self._max_batch_size, self._batcher.most_in_flight)
        return min(fits, self.engine.max_batch_size)

    def statistics(self) -> EngineStatistics:
        """Return the counters of the engine and of its rows' reading, once ``opened`` has resolved."""
        return self._loop.answering.statistics()

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        """Return what each replica of the engine is and has done, if it has any."""
        replicated = self._loop.answering.replicated
        return () if replicated is None else replicated.replicas()

    @property
    def alive(self) -> bool:
        """True while the thread runs, in this process, and has not been told to end."""
        return self._thread.is_alive() and not self._loop.is_closing

    def call(self, function: Callable[[Engine], T]) -> concurrent.futures.Future[T]:
        """Have ``function(engine)`` run on the thread between two turns.

        The future can be cancelled until the function starts; it gets ``Closed``, or why the engine
        can't go on, when the thread ends before that.

        Raises:
            Closed: in a forked child, where there is no such thread.
        """
        self._check_process()
        return self.call_alone(lambda answering: function(answering))

    def call_alone(
        self, function: Callable[[AnsweringEngine], T], owner: object = None
    ) -> concurrent.futures.Future[T]:
        """Have a function run as ``call`` does, with the reading of rows; see ``EngineLoop.call``."""
        self._check_process()
        future = self._loop.call(function, owner)
        self._wake()
        return future

    def call_soon(
        self, function: Callable[[AnsweringEngine], object], owner: object = None
    ) -> None:
        """Have a function run as ``call_alone`` does, unless the thread ends first. Takes no lock, so
        that coroutines may call it while they are collected. Does nothing in a forked child."""
        if os.getpid() == self._process:
            self._loop.call_soon(function, owner)
            self._wake()

    def run_exclusively(self, owner: object | None, hold: Hold | None = None) -> None:
        """Run only this owner's calls, as ``EngineLoop.run_exclusively`` does. For the thread."""
        self._loop.run_exclusively(owner, hold)

    def release(self, prefix: LogprobsRequest | None) -> None:
        """Keep a prefix no more, or with ``None`` any: this engine soon, and later ones.

        Raises:
            Closed: in a forked child.
        """
        self._check_process()
        self._loop.release(prefix)
        self._wake()

    def give_back(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the engine forget soon what these questions of populations were about; takes no lock.

        Raises:
            Closed: in a forked child.
        """
        self._check_process()
        self._loop.give_back(asked)
        self._wake()

    def belong_to(self, owner: object) -> None:
        """Have the thread end when its owner is garbage, unless it is closed before. An interpreter that
        exits waits for it too, but that is for the thread to see to."""
        self._finalizer = weakref.finalize(owner, self.abandon)
        self._finalizer.atexit = False

    def close(self, *, wait: bool = True) -> None:
        """End every waiter with ``Closed`` at once, and the thread after the step in progress.

        Idempotent, from any thread. With ``wait``, returns when the engine is closed, or after
        ``CLOSE_SECONDS`` when a step takes longer; the thread then closes it when the step ends. Called
        by a finalizer or a signal handler in the middle of a question, it leaves all of that to the
        thread, and returns at once."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if os.getpid() != self._process:
            return
        thread = self._thread  # a restart may put another one in its place meanwhile
        self._loop.is_closing = True
        if threading.current_thread() is thread:
            return  # to the turn in progress, after which it tells everyone and ends
        told = self._batcher.close()
        self._hang_up()  # not before: waiters are told that this is closed, not that a server is lost
        self._wake()
        # One that has not started cannot be waited for. It ends after its first round.
        if wait and told and thread.is_alive():
            thread.join(CLOSE_SECONDS)

    def abandon(self) -> None:
        """Have the thread do what ``close`` does, after the step in progress, and return at once."""
        if os.getpid() == self._process:
            self._loop.is_closing = True
            self._hang_up()
            self._wake()

    def restart(self) -> concurrent.futures.Future[Engine]:
        """Close the engine, if that has not happened, and open another one with the same adapters; who
        still waits gets ``Closed``. Returns ``opened``, which is to be waited for.

        Raises:
            EngineFailed: the engine did not end its step within ``RESTART_SECONDS``.
            Closed: in a forked child.
        """
        self._check_process()
        with self._restart_lock:
            before = self._thread
            self.close(wait=False)
            if before.is_alive() and before is not threading.current_thread():
                before.join(RESTART_SECONDS)
            if before.is_alive():
                raise EngineFailed(
                    "the engine is still in a step, or being opened: wait for that to end, then restart"
                )
            self._loop.begin()
            self._thread = self._make_thread(self._loop.round, self.close)
            self._batcher.reopen()
            self._thread.start()
            return self.opened

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise Closed(
                "this runtime belongs to the process that loaded it; a forked child must load its own"
            )

    def _wake(self) -> None:
        self._thread.wake()
        self._loop.interrupt()


def in_background(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Return what the function returns, called in a thread of its own: all those of a loop's executor may
    wait for this runtime."""
    pool = concurrent.futures.ThreadPoolExecutor(1, "genrt-aside")
    try:
        return pool.submit(function)
    finally:
        pool.shutdown(wait=False)


async def aside(function: Callable[[], T]) -> T:
    """Return what the function returns, called ``in_background``."""
    return await asyncio.wrap_future(in_background(function))
