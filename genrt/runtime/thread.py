"""The engine's thread: opens an engine, runs calls and the batcher's turns, replaces it, closes it.

``EngineThread.round`` does one round. A thread calls it, or a simulation; rounds never wait.

Rules:
    The caller of ``round`` is the engine's thread. The engine is opened, used and closed there alone.
    When the last round is over, for any reason, every waiter has been resolved.
    The thread sleeps until it is woken; it never polls. A thread whose batcher is closed ends.
    A runtime may be collected by any thread at any moment, even one that holds a lock of ours:
    ``abandon``, which is called then, takes no lock and does not wait.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
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
from genrt.runtime.batcher import Batcher, Hold
from genrt.runtime.cache import RowCache
from genrt.runtime.lifecycle import Lifecycle

__all__ = ["COMPUTES", "EngineThread", "LoopThread"]

T = TypeVar("T")

COMPUTES = object()
"""The owner of calls that may run a forward."""

CLOSE_SECONDS = 5.0
"""How long ``close`` waits for the step in progress before it leaves the thread to end by itself."""

RESTART_SECONDS = 60.0
"""How long ``restart`` waits for the engine before: closing one takes seconds on a busy machine, and what
waits here would only ask again."""

EXIT_SECONDS = 60.0
"""How long an interpreter that exits waits for the thread, which opens an engine, steps or closes
it: a process may crash if its interpreter goes while a thread is anywhere in native code."""


class LoopThread(threading.Thread):
    """Calls ``round`` again and again. An interpreter that exits closes it, and waits for it a while.

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
        """Go round until the last round is over."""
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
        restarts: whether another engine, with the same adapters, replaces one that died and gets its
            requests; once more only if something was answered since.
        hang_up: ends a step that waits for an engine elsewhere; takes no lock.
        make_batcher, make_thread: make these two; for simulations.

    Attributes:
        opened: resolves in the first round: to the engine, or to the error that opening it raised.
        adapters, weights, prefixes: every engine gets these.
        nonce: no other runtime has it, in any process.
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
        # Written by rounds, and kept when they are over.
        self._answering: AnsweringEngine | None = None
        self._calls: deque[_Call] = deque()
        self._deferred: deque[_Call] = deque()  # while another owner's calls run exclusively
        self._calls_lock = threading.Lock()  # so that no call is added once the last has ended
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
        """Make the next round a first one. The round before it, if there was one, was the last."""
        self.opened: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.opened.set_running_or_notify_cancel()  # so that no caller that waits for it can cancel it
        self._is_closing = False
        self._answered = -1  # less than any count: the first engine that dies may be replaced
        with self._calls_lock:
            self._ended: GenrtError | None = None

    # -- for other threads --------------------------------------------------------------------

    @property
    def batcher(self) -> Batcher:
        """The batcher, through which the engine is asked.

        Raises:
            Closed: in a forked child, where there is no such thread.
        """
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
        """The engine with its reads, once ``opened`` has resolved to one; after a restart another one.

        Raises:
            Closed: there was none yet.
        """
        if self._answering is None:
            raise Closed("the engine is not open")
        return self._answering

    @property
    def engine(self) -> Engine:
        """The engine; raises as ``answering``."""
        return self.answering.engine

    @property
    def capabilities(self) -> Capabilities:
        """The optional parts of the engine; raises as ``answering``."""
        return self.answering.capabilities

    @property
    def max_weight(self) -> int:
        """How much one request may weigh: it fits a flush, the engine's memory and a step."""
        fits = min(self._max_batch_size, self._batcher.most_in_flight)
        return min(fits, self.engine.max_batch_size)

    def statistics(self) -> EngineStatistics:
        """Return the counters of the engine and of its reads."""
        return self.answering.statistics()

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        """Return the state and the counters of each replica, if the engine has replicas."""
        answering = self.answering
        return answering.full.replicas() if answering.capabilities.has_replicas else ()

    @property
    def alive(self) -> bool:
        """True while the thread runs, in this process, and is not closing."""
        return self._thread.is_alive() and not self._is_closing

    def call(
        self, function: Callable[[AnsweringEngine], T], owner: object = None
    ) -> concurrent.futures.Future[T]:
        """Have ``function(engine)`` run on the thread between two turns; from any thread. While calls of
        an owner run exclusively, all others wait. The owner ``COMPUTES`` never is exclusive, and its
        calls also wait while a part of the engine's memory sleeps.

        The future can be cancelled until the function starts; it gets ``Closed``, or the engine's error,
        when the thread ends before that.

        Raises:
            Closed: in a forked child, where there is no such thread.
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
        """Have a function run as ``call`` does, unless the thread ends first. Takes no lock, so that
        coroutines may call it while they are collected. Does nothing in a forked child."""
        if os.getpid() == self._process:
            self._calls.append((concurrent.futures.Future(), function, owner))
            self._wake()

    def release(self, prefix: LogprobsRequest | None) -> None:
        """Keep a prefix no more, or with ``None`` any: this engine soon, and later ones.

        Raises:
            Closed: in a forked child.
        """
        for each in list(self.prefixes) if prefix is None else [prefix]:
            self.prefixes.pop(each, None)
            self.call(lambda answering, each=each: answering.release(each))  # type: ignore[misc]

    def give_back(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the engine forget soon the sequences of these questions of populations; takes no lock, so
        finalizers may call it.

        Raises:
            Closed: in a forked child.
        """
        _ = self.batcher
        self._given_back.append(asked)
        self._wake()

    def belong_to(self, owner: object) -> None:
        """Have the thread end when its owner is garbage, unless it is closed before. At exit, the thread
        sees to itself."""
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
        self._is_closing = True
        if threading.current_thread() is thread:
            return  # to the turn in progress, after which it closes the batcher and ends
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
        """Have the thread close itself after the step in progress, and return at once."""
        if os.getpid() == self._process:
            self._is_closing = True
            self._hang_up()
            self._wake()

    def restart(self) -> concurrent.futures.Future[Engine]:
        """Close the engine, if that has not happened, and open another one with the same adapters;
        waiters get ``Closed``. Returns ``opened``, which the caller waits for.

        Raises:
            EngineFailed: the engine did not end its step within ``RESTART_SECONDS``.
            Closed: in a forked child.
        """
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
        """Have a round begin soon; from any thread, taking no lock."""
        self._thread.wake()
        answering = self._answering
        if answering is not None and answering.capabilities.has_replicas:
            answering.full.interrupt()

    # -- rounds: the engine's thread ----------------------------------------------------------

    def round(self) -> float | None:
        """Open the engine, the first time; then run the calls that wait and a turn that is due; replace
        an engine that died; or end.

        Returns the seconds without anything to do, unless the batcher wakes or a call comes: from 0.0 to
        infinity. ``None`` says that this round was the last.
        """
        if not self.opened.done():
            return self._first_round()
        answering = self.answering
        try:
            if not (self._is_closing or self._batcher.is_closed):
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
        """Open an engine, with the weights of the one before, the adapters of it that this one takes, and
        its prefixes. It sleeps if that one did."""
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
        """Run the calls that wait, and a turn if one is due; return the seconds without work."""
        lifecycle = self._lifecycle
        while self._given_back and lifecycle.owner is None:
            answering.give_back(self._given_back.popleft())
        for _ in range(len(self._calls)):  # and not those that come meanwhile: others wait
            call = self._calls.popleft()
            owner = call[2]
            is_others = lifecycle.owner is not None and owner is not lifecycle.owner
            if is_others or (owner is COMPUTES and lifecycle.memory != "awake"):
                self._deferred.append(call)
            else:
                self._run(answering, call)
        seconds = self._batcher.serve(answering)
        if seconds and (self._is_closing or self._batcher.is_closed or self._calls):
            return 0.0  # a call closed this, or lets others run: it could not wake its own thread
        if answering.capabilities.has_replicas:
            return min(seconds, answering.full.tend())
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

    def run_exclusively(self, owner: object | None, hold: Hold | None = None) -> None:
        """Run only this owner's calls from now on; with ``None``, all that wait. The owner's hold falls
        if the engine is replaced. For the engine's thread."""
        self._lifecycle.run_exclusively(owner, hold)
        if owner is not None:
            self._answered = -1  # if the engine dies of that, no question killed it
        else:
            self._call_deferred()

    def _call_deferred(self) -> None:
        self._calls.extendleft(reversed(self._deferred))
        self._deferred.clear()

    def _may_restart(self) -> bool:
        """Return whether another engine may be opened: something was answered since this one was, or a
        question that kills engines would have them opened for ever."""
        before, self._answered = self._answered, self._batcher.statistics().answered
        is_over = self._is_closing or self._batcher.is_closed
        return self.restarts and not is_over and self._answered != before

    def _restart(self, dead: AnsweringEngine) -> float | None:
        """Open another engine, and send it the requests of the dead one."""
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
        """End every waiter and call with this error, the later ones too."""
        self._close_batcher(reason)
        with self._calls_lock:
            self._ended = reason
        self.run_exclusively(None)
        while self._calls:
            future, *_ = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason.fresh())


_Call = tuple[concurrent.futures.Future[Any], Callable[[AnsweringEngine], Any], object]
"""A call: its future, its function and its owner."""


def _died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the engine can't go on and was closed: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
