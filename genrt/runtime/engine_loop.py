"""The rounds of an engine's life: open it, run calls and turn the batcher's crank, replace it when it
dies, close it. Nothing here waits: a thread, or a simulation, calls ``round`` again and again.

Rules:
    Whoever calls ``round`` is the engine's thread. The engine is opened, used and closed in there.
    When the last round is over, for whatever reason, every waiter has been told.
    A loop whose batcher is closed ends, whoever closed that.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from genrt.engines.adapters import Adapters
from genrt.engines.protocol import Engine
from genrt.engines.weights import KeptWeights
from genrt.errors import WAS_CLOSED, Closed, EngineDied, GenrtError
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from genrt.runtime.lifecycle import Hold
from genrt.runtime.prefixes import PrefixesToKeep

__all__ = ["COMPUTES", "EngineLoop"]

COMPUTES = object()
"""The owner of calls that may run a forward."""

T = TypeVar("T")


class EngineLoop:
    """The rounds of one engine's thread, and the calls that wait for them.

    Args:
        open_engine: makes an engine.
        batcher: feeds it.
        cache: the batcher's.
        restarts: whether another engine, with the same adapters, takes the place of one that died and
            gets what that one had; once more only if something was answered since.

    ``opened`` resolves in the first round: to the engine, or to the error that opening it raised.
    ``prefixes`` are those that every engine keeps.
    ``is_closing`` has the next round be the last; any thread sets it.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        batcher: Batcher,
        cache: RowCache,
        *,
        restarts: bool,
    ) -> None:
        self.adapters = Adapters()
        self.weights = KeptWeights()
        self.prefixes = PrefixesToKeep()
        self._open_engine = open_engine
        self._batcher = batcher
        self._cache = cache
        self.restarts = restarts
        # Written by rounds, and kept when they are over.
        self._answering: AnsweringEngine | None = None
        self._calls: collections.deque[
            tuple[concurrent.futures.Future[Any], Callable[[AnsweringEngine], Any], object]
        ] = collections.deque()
        self._deferred = self._calls.copy()  # while another owner's calls run exclusively
        self._calls_lock = threading.Lock()  # so that no call is added once the last was answered
        self._given_back: collections.deque[Sequence[SequenceHandle]] = collections.deque()
        self.begin()

    def begin(self) -> None:
        """Have the next round be a first one. The round before it, if there was one, was the last."""
        self.opened: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.opened.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        self.is_closing = False
        self._answered = -1  # less than any count: the first engine that dies may be replaced
        with self._calls_lock:
            self._ended: GenrtError | None = None

    @property
    def answering(self) -> AnsweringEngine:
        """The engine, with what is read from its rows; after a restart another one.

        Raises:
            Closed: none has been opened.
        """
        if self._answering is None:
            raise Closed("the engine is not open")
        return self._answering

    def call(
        self, function: Callable[[AnsweringEngine], T], owner: object = None
    ) -> concurrent.futures.Future[T]:
        """Have a round call ``function(engine)``; from any thread. While calls of an owner run
        exclusively, all others wait. The owner ``COMPUTES`` never is exclusive, and its calls also wait
        while a part of the engine's memory sleeps."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._calls_lock:
            if self._ended is None:
                self._calls.append((future, function, owner))
            else:
                future.set_exception(self._ended.fresh())
        return future

    def call_soon(self, function: Callable[[AnsweringEngine], object], owner: object) -> None:
        """Have a round call a function, unless the last one is over. This takes no lock: finalizers call
        it."""
        self._calls.append((concurrent.futures.Future(), function, owner))

    def interrupt(self) -> None:
        """Have a step that waits for engines elsewhere return soon; from any thread, taking no lock."""
        if self._answering is not None and self._answering.replicated is not None:
            self._answering.replicated.interrupt()

    def run_exclusively(self, owner: object | None, hold: Hold | None = None) -> None:
        """Run only this owner's calls from now on; with ``None``, all that wait. The owner's hold falls
        if the engine is replaced. For a round."""
        self._batcher.lifecycle.run_exclusively(owner, hold)
        if owner is not None:
            self._answered = -1  # if it dies of that, no question did it
        else:
            self._call_deferred()

    def _call_deferred(self) -> None:
        self._calls.extendleft(reversed(self._deferred))
        self._deferred.clear()

    def release(self, prefix: LogprobsRequest | None) -> None:
        """Have this engine, and every later one, keep a prefix no more; with ``None`` all of them."""
        for each in list(self.prefixes) if prefix is None else [prefix]:
            self.prefixes.discard(each)
            self.call(lambda _, each=each: self.answering.release(each))  # type: ignore[misc]

    def give_back(self, asked: Sequence[SequenceHandle]) -> None:
        """Have this engine forget soon what populations asked about. This takes no lock: finalizers call
        it, whatever is locked."""
        self._given_back.append(asked)

    def round(self) -> float | None:
        """Open the engine, the first time; then do the calls that wait and a turn that is due; replace an
        engine that died; or end.

        Returns how many seconds there is nothing to do, unless the batcher wakes or a call comes: from
        0.0 to infinity. ``None`` says that this round was the last.
        """
        if not self.opened.done():
            return self._first_round()
        answering = self.answering
        try:
            if not self._is_over:
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

    @property
    def _is_over(self) -> bool:
        # The second is for a ``close`` that overlaps with a restart, which takes the first back.
        return self.is_closing or self._batcher.is_closed

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
        """Open an engine, with the weights of the one before, those adapters of it that this one takes,
        and its prefixes."""
        answering = AnsweringEngine(self._open_engine(), self._cache, self.adapters, self.prefixes)
        self._batcher.lifecycle.replaced()
        self._call_deferred()
        try:
            self.weights.reload(answering.engine)
            self._batcher.fail(answering.reload_adapters())
        except BaseException:
            answering.close()
            raise
        self._answering = answering
        return answering

    def _serve(self, answering: AnsweringEngine) -> float:
        """Do the calls that wait, and a turn if one is due; return how long there is nothing to do."""
        lifecycle = self._batcher.lifecycle
        while self._given_back and lifecycle.owner is None:
            answering.give_back(self._given_back.popleft())
        for _ in range(len(self._calls)):  # and not those that come meanwhile: others wait
            future, function, owner = self._calls.popleft()
            is_others = lifecycle.owner is not None and owner is not lifecycle.owner
            if is_others or (owner is COMPUTES and lifecycle.memory != "awake"):
                self._deferred.append((future, function, owner))
                continue
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
        elif self._is_over or self._calls:
            return 0.0  # a call closed this, or lets others run: nobody wakes the thread it runs on
        idle = math.inf if answering.replicated is None else answering.replicated.tend()
        return min(math.inf if seconds is None else seconds, idle)

    def _may_restart(self) -> bool:
        """Return whether another engine may be opened: something was answered since this one was, or a
        question that kills engines would have them opened for ever."""
        before, self._answered = self._answered, self._batcher.statistics().answered
        return self.restarts and not self._is_over and self._answered != before

    def _restart(self, dead: AnsweringEngine) -> float | None:
        """Open another engine, and have it sent what the dead one had."""
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
        """Tell everyone who waits, and whoever asks from now on."""
        self._batcher.close(reason)
        with self._calls_lock:
            self._ended = reason
        self.run_exclusively(None)
        while self._calls:
            future, *_ = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(reason.fresh())


def _died(error: BaseException) -> EngineDied:
    died = EngineDied(f"the engine can't go on and was closed: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
