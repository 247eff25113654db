"""The engine's thread opens an engine, runs calls and the batcher's turns, and replaces or closes it.

A thread, or a simulation, calls ``EngineThread.round`` again and again; rounds never wait.

Rules:
    The engine is opened, used and closed on this thread only.
    When the last round is over, for any reason, every waiter has been resolved.
    The thread sleeps until it is woken; it never polls. It ends when its batcher is closed.
    Any thread may collect a runtime at any moment, even while it holds a lock of ours: ``abandon``, which
    is called then, takes no lock and does not wait.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import math
import os
import queue
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from genrt.engines.adapters import Adapters
from genrt.engines.protocol import Capabilities, Engine, EngineStatistics, ReplicaStatistics
from genrt.engines.weights import KeptWeights
from genrt.errors import WAS_CLOSED, Closed, EngineDied, EngineFailed, GenrtError
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Barrier, Batcher
from genrt.runtime.cache import RowCache
from genrt.runtime.lifecycle import Lifecycle

T = TypeVar("T")

COMPUTES = object()
"""The owner of calls that may run a forward, and therefore wait while the engine sleeps."""

CLOSE_SECONDS = 5.0
"""The maximum wait of ``close`` for the step in progress; the thread then ends by itself."""

RESTART_SECONDS = 60.0
"""The maximum wait of ``restart`` for the old engine: closing takes seconds on a busy machine."""

EXIT_SECONDS = 60.0
"""The maximum wait of an exiting interpreter: a process may crash if a thread is still in native code."""


class LoopThread(threading.Thread):
    """Calls ``round`` again and again. An exiting interpreter closes it and waits for its end.

    Args:
        round: one round; returns the seconds to sleep, or ``None`` after the last round.
        close: makes the next round the last; without ``wait`` it returns at once.
    """

    def __init__(self, round: Callable[[], float | None], close: Callable[..., None]) -> None:
        super().__init__(name="genrt-engine", daemon=True)
        self._round = round
        self._close = close
        # Not an Event, whose lock a finalizer could find held by its own thread.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Run rounds until the last one is over."""
        try:
            while (seconds := self._round()) is not None:
                if seconds > 0.0:
                    with contextlib.suppress(queue.Empty):
                        self._signals.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        finally:
            atexit.unregister(self._close_at_exit)

    def wake(self) -> None:
        """End the present sleep, or the next."""
        if self._signals.empty():  # an unseen signal will be seen after this change of state
            self._signals.put(None)

    def open(self, open_engine: Callable[[], Engine]) -> Engine:
        """Return a new engine. An interpreter that exits meanwhile waits for it."""
        atexit.register(self._close_at_exit)
        try:
            engine = open_engine()
        finally:
            atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)  # to run before the engine's own functions
        return engine

    def _close_at_exit(self) -> None:
        self._close(wait=False)
        self.join(EXIT_SECONDS)


class EngineThread:
    """An engine on its own thread, and the batcher that feeds it.

    Args:
        open_engine: makes the engine; called on the thread.
        cache, max_batch_size, max_wait_seconds, max_queued_requests, max_queued_bytes: see ``Batcher``.
        restarts: whether another engine replaces a dead one and gets its requests. The next replacement
            needs an answer since the last one.
        hang_up: ends a step that waits for a remote engine; takes no lock.
        make_batcher, make_thread: for simulations.

    Attributes:
        opened: resolves in the first round, to the engine or to the error of opening it.
        adapters, weights, prefixes: the state that every engine gets.
        nonce: an id that is unique among the runtimes of all processes.
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
        make_thread: Callable[..., LoopThread] = LoopThread,
    ) -> None:
        self.adapters = Adapters()
        self.weights = KeptWeights()
        self.prefixes: dict[LogprobsRequest, None] = {}
        self.restarts = restarts
        self.nonce = secrets.token_hex(8)
        self._process = os.getpid()
        self._max_batch_size = max_batch_size or sys.maxsize
        self._restart_lock = threading.Lock()
        self._open_engine, self._hang_up, self._cache = open_engine, hang_up, cache
        self._answering: AnsweringEngine | None = None
        self._calls: deque[_Call] = deque()
        self._deferred: deque[_Call] = deque()  # while another owner's calls run exclusively
        self._calls_lock = threading.Lock()  # no call is added after the last has ended
        self._given_back: deque[Sequence[SequenceHandle]] = deque()
        self._begin()
        self._batcher = make_batcher(
            cache,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            max_queued_requests=max_queued_requests,
            max_queued_bytes=max_queued_bytes,
            wake=self._wake,
        )
        self._lifecycle = Lifecycle(self._batcher, self)
        self._finalizer: weakref.finalize[..., object] | None = None
        self._make_thread = make_thread
        self._thread = make_thread(self.round, self.close)
        self._thread.start()

    def _begin(self) -> None:
        """Make the next round a first one."""
        self.opened: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.opened.set_running_or_notify_cancel()  # a waiting caller cannot cancel it
        self._is_closing = False
        self._answered = -1  # less than any count: the first engine that dies may be replaced
        with self._calls_lock:
            self._ended: GenrtError | None = None

    # -- for other threads --------------------------------------------------------------------

    @property
    def batcher(self) -> Batcher:
        """The batcher. Raises Closed in a forked child, which has no such thread."""
        if os.getpid() != self._process:
            raise Closed(
                "this runtime belongs to the process that loaded it; a forked child must load its own"
            )
        return self._batcher

    @property
    def lifecycle(self) -> Lifecycle:
        """The state of the runtime. Raises Closed in a forked child."""
        _ = self.batcher
        return self._lifecycle

    @property
    def answering(self) -> AnsweringEngine:
        """The present engine with its reads. Raises Closed before the first one is open."""
        if self._answering is None:
            raise Closed("the engine is not open")
        return self._answering

    @property
    def engine(self) -> Engine:
        """The engine; raises as ``answering``."""
        return self.answering.engine

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities; raises as ``answering``."""
        return self.answering.capabilities

    @property
    def max_weight(self) -> int:
        """The maximum weight of one request: it fits a flush, the engine's memory and a step."""
        fits = min(self._max_batch_size, self._batcher.most_in_flight)
        return min(fits, self.engine.max_batch_size)

    def statistics(self) -> EngineStatistics:
        """Return the counters of the engine, with reads."""
        return self.answering.statistics()

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        """Return the state and the counters of each replica, if the engine has replicas."""
        answering = self.answering
        return answering.engine.replicas() if answering.capabilities.has_replicas else ()

    @property
    def alive(self) -> bool:
        """True while the thread runs, in this process, and is not closing."""
        return self._thread.is_alive() and not self._is_closing

    def call(
        self, function: Callable[[AnsweringEngine], T], owner: object = None
    ) -> concurrent.futures.Future[T]:
        """Run ``function(engine)`` on the thread between two turns; from any thread. While an owner's
        calls run exclusively, other calls wait. Calls of ``COMPUTES`` also wait while the engine sleeps.

        The future can be cancelled until the function starts. It gets ``Closed``, or the engine's error,
        if the thread ends before that. Raises Closed in a forked child.
        """
        _ = self.batcher
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._calls_lock:
            if self._ended is None:
                self._calls.append((future, function, owner))
            else:
                future.set_exception(self._ended.fresh())
        self._wake()
        return future

    def call_soon(
        self, function: Callable[[AnsweringEngine], object], owner: object = None
    ) -> None:
        """Run a function as ``call`` does, unless the thread ends first. Takes no lock, because
        coroutines call it while they are collected. Has no effect in a forked child."""
        if os.getpid() == self._process:
            self._calls.append((concurrent.futures.Future(), function, owner))
            self._wake()

    def release(self, prefix: LogprobsRequest | None) -> None:
        """Unpin a prefix, or all, in this engine soon and in later ones. Raises Closed in a
        forked child."""
        for each in list(self.prefixes) if prefix is None else [prefix]:
            self.prefixes.pop(each, None)
            self.call(lambda answering, each=each: answering.release(each))  # type: ignore[misc]

    def give_back(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the engine forget these sequences soon. Takes no lock, because finalizers call it. Raises
        Closed in a forked child."""
        _ = self.batcher
        self._given_back.append(asked)
        self._wake()

    def belong_to(self, owner: object) -> None:
        """Close the thread when its owner is garbage; at exit, ``LoopThread`` closes it."""
        self._finalizer = weakref.finalize(owner, self.abandon)
        self._finalizer.atexit = False

    def close(self, *, wait: bool = True) -> None:
        """End every waiter with ``Closed`` at once, and the thread after the step in progress.

        Idempotent, from any thread. With ``wait``, returns when the engine is closed, or after
        ``CLOSE_SECONDS``; the thread then closes it after the step. In a finalizer or a signal handler
        that interrupts a question, the thread does all of this, and the call returns at once."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if os.getpid() != self._process:
            return
        thread = self._thread  # a restart may put another one in its place meanwhile
        self._is_closing = True
        if threading.current_thread() is thread:
            return  # to the present turn; the thread then closes the batcher and ends
        is_closed = self._close_batcher(None)
        self._hang_up()  # not before: waiters get Closed, not the loss of a server
        self._wake()
        # A thread that has not started cannot be joined. It ends after its first round.
        if wait and is_closed and thread.is_alive():
            thread.join(CLOSE_SECONDS)

    def _close_batcher(self, reason: GenrtError | None) -> bool:
        is_closed = self._batcher.close(reason)
        if is_closed:
            self._lifecycle.closed(reason or Closed(WAS_CLOSED))
        return is_closed

    def abandon(self) -> None:
        """Close the thread after the step in progress; return at once."""
        if os.getpid() == self._process:
            self._is_closing = True
            self._hang_up()
            self._wake()

    def restart(self) -> concurrent.futures.Future[Engine]:
        """Close the engine, unless closed, and open another one with the same adapters; waiters get
        ``Closed``. Returns ``opened``, which the caller waits for. Raises Closed in a forked child;
        EngineFailed if the engine's step takes longer than ``RESTART_SECONDS``."""
        _ = self.batcher
        with self._restart_lock:
            before = self._thread
            self.close(wait=False)
            if before.is_alive() and before is not threading.current_thread():
                before.join(RESTART_SECONDS)
            if before.is_alive():
                raise EngineFailed(
                    "the engine is still in a step, or being opened: wait for that to end, then restart"
                )
            self._begin()
            self._thread = self._make_thread(self.round, self.close)
            self._lifecycle.reopen()
            self._batcher.reopen()
            self._thread.start()
            return self.opened

    def _wake(self) -> None:
        """Start a round soon; from any thread, without a lock."""
        self._thread.wake()
        answering = self._answering
        if answering is not None and answering.capabilities.has_replicas:
            answering.engine.interrupt()

    # -- rounds: the engine's thread ----------------------------------------------------------

    def round(self) -> float | None:
        """Open the engine in the first round; then run waiting calls and a due turn, replace a dead
        engine, or end.

        Returns the seconds until the next round, unless it is woken before: from 0.0 to infinity.
        ``None`` means that this round was the last.
        """
        if (answering := self._answering) is None or not self.opened.done():
            return self._first_round()
        try:
            if not self._is_closing and self._batcher.closed is None:
                return self._serve(answering)
            reason: GenrtError = Closed(WAS_CLOSED)
        except EngineDied as error:
            reason = error
        except BaseException as error:
            reason = _died(error)
        if self._may_restart():
            return self._restart(answering)
        self._end(reason)
        answering.close()
        return None

    def _first_round(self) -> float | None:
        try:
            answering = self._open()
        except BaseException as error:
            self._end(error if isinstance(error, GenrtError) else _died(error))
            self.opened.set_exception(error)
            return None
        self.opened.set_result(answering.engine)
        return 0.0

    def _open(self) -> AnsweringEngine:
        """Open an engine with the weights, the adapters and the prefixes of the one before, asleep if
        that one was."""
        engine = self._thread.open(self._open_engine)
        answering = AnsweringEngine(engine, self._cache, self.adapters, self.prefixes)
        self._lifecycle.replaced()
        self._call_deferred()
        try:
            self.weights.reload(engine)
            answering.reload_adapters()
            self._lifecycle.sleep_again(answering)
        except BaseException:
            answering.close()
            raise
        self._answering = answering
        return answering

    def _serve(self, answering: AnsweringEngine) -> float:
        """Run waiting calls, and a turn if one is due; return the seconds until the next round."""
        lifecycle = self._lifecycle
        while self._given_back and lifecycle.owner is None:
            answering.give_back(self._given_back.popleft())
        for _ in range(len(self._calls)):  # calls that come meanwhile wait for the next round
            call = self._calls.popleft()
            owner = call[2]
            is_others = lifecycle.owner is not None and owner is not lifecycle.owner
            if is_others or (owner is COMPUTES and lifecycle.memory != "awake"):
                self._deferred.append(call)
            else:
                self._run(answering, call)
        batcher = self._batcher
        seconds: float | None = math.inf  # texts go on after an owner's last call
        if lifecycle.owner is None or batcher.is_drained:
            seconds = batcher.seconds_until_due()
        if seconds == 0.0:
            batcher.turn(answering)
        elif self._calls or self._is_closing or batcher.closed is not None:
            return 0.0  # a call that closed this, or admits others, cannot wake its own thread
        elif seconds is None:
            seconds = math.inf
        if answering.capabilities.has_replicas:
            return min(seconds, answering.engine.tend())
        return seconds

    def _run(self, answering: AnsweringEngine, call: _Call) -> None:
        future, function, _ = call
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(answering)
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, EngineDied) or not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)

    def run_exclusively(self, owner: object | None, barrier: Barrier | None = None) -> None:
        """Run only this owner's calls from now on; with ``None``, all calls. The owner's barrier ends if
        the engine is replaced. For the engine's thread."""
        self._lifecycle.run_exclusively(owner, barrier)
        if owner is not None:
            self._answered = -1  # if the engine dies of these calls, no question killed it
        else:
            self._call_deferred()

    def _call_deferred(self) -> None:
        self._calls.extendleft(reversed(self._deferred))
        self._deferred.clear()

    def _may_restart(self) -> bool:
        """Return whether another engine may be opened: only after an answer of this one, or a deadly
        question would open engines for ever."""
        before, self._answered = self._answered, self._batcher.statistics().answered
        is_over = self._is_closing or self._batcher.closed is not None
        return self.restarts and not is_over and self._answered != before

    def _restart(self, dead: AnsweringEngine) -> float | None:
        """Open another engine for the requests of the dead one."""
        with contextlib.suppress(Exception):  # it died already
            dead.close()
        try:
            self._open()
        except BaseException as error:
            self._end(_died(error))
            return None
        self._batcher.resume()
        return 0.0

    def _end(self, reason: GenrtError) -> None:
        """End every waiter and call with this error, also later ones."""
        self._close_batcher(reason)
        with self._calls_lock:
            self._ended = reason
        self.run_exclusively(None)
        while self._calls:
            future, *_ = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason.fresh())


_Call = tuple[concurrent.futures.Future[Any], Callable[[AnsweringEngine], Any], object]
"""The future, the function and the owner of a call."""


def _died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the engine can't go on and was closed: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
