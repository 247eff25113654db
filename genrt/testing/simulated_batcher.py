"""The parts of a simulated runtime that take the place of threads: the real batcher with a record of what
passes, and the real rounds of the engine's thread, taken by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from genrt.engines.protocol import Engine
from genrt.errors import GenrtError
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.questions.samples import SampleRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from genrt.runtime.thread import Rounds
from genrt.runtime.waiters import Waiter
from genrt.testing.record import Record, Violation
from genrt.testing.simulated_model import Model
from genrt.testing.virtual_loop import VirtualClock


class SimulatedBatcher(Batcher):
    """A batcher that records what it is asked and answers, and that checks rows and samples.

    Args:
        cache: as for ``Batcher``, and so are the options.
        record: told of everything.
        model: what the answers are.
        run_blocked: returns what a coroutine returns, for a caller that blocks.
        on_turn: called at the start of each turn.
    """

    def __init__(
        self,
        cache: RowCache,
        *,
        record: Record,
        model: Model,
        run_blocked: Callable[[Coroutine[Any, Any, list[Result]]], list[Result]],
        on_turn: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(cache, observer=self, **options)
        self.unanswered: set[int] = set()
        self._record = record
        self._model = model
        self._run_blocked = run_blocked
        self._on_turn = on_turn
        self._number = itertools.count()

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Do as ``Batcher.ask`` does."""
        number = next(self._number)
        self.unanswered.add(number)
        self._record.add("asked", number, *requests)
        try:
            results = await super().ask(requests, stacked=stacked, timeout=timeout)
        except GeneratorExit:  # collected with its loop, at any moment
            raise
        except BaseException as error:
            self._record.add(type(error).__name__, number)
            raise
        finally:
            self.unanswered.discard(number)
        self._record.add("answered", number)
        if not stacked:
            for request, result in zip(requests, results, strict=True):
                self._check(request, result)
        return results

    def ask_sync(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Do as ``Batcher.ask_sync`` does: the loop that this is called on is held up, others are not."""
        return self._run_blocked(self.ask(requests, stacked=stacked, timeout=timeout))

    def turn(self, engine: AnsweringEngine) -> None:
        """Do as ``Batcher.turn`` does, and keep what was violated from ending as an engine's death."""
        self._on_turn()
        try:
            super().turn(engine)
        except Violation as violation:
            self._record.violation = self._record.violation or violation
            raise

    def close(self, reason: GenrtError | None = None) -> bool:
        """Do as ``Batcher.close`` does."""
        was_closed = self.is_closed
        done = super().close(reason)
        if done and not was_closed:
            self._record.add("closed", self._closed)
        return done

    def reopen(self) -> None:
        """Do as ``Batcher.reopen`` does."""
        self._record.add("reopened")
        super().reopen()

    def resume(self) -> None:
        """Do as ``Batcher.resume`` does."""
        self._record.add("restarted")
        super().resume()

    def registering(self, waiter: Waiter) -> None:
        """Pass over it."""

    def leaving(self, waiter: Waiter) -> None:
        """Pass over it."""

    def taken(self, flush: Sequence[Request], withdrawn: Sequence[Request]) -> None:
        """Record a turn."""
        if withdrawn:
            self._record.add("withdrawn", *withdrawn)
        if flush:
            self._record.add("taken", *flush)

    def _check(self, request: Request, result: Result) -> None:
        match request:
            case LogprobsRequest():
                row = self._model.row(request)
                is_right = isinstance(result, torch.Tensor) and torch.equal(row, result)
            case SampleRequest():
                is_right = self._model.sample(request) == result
            case _:
                return
        if not is_right:
            self._record.violated(f"{request} was answered wrongly: {result}")


class SimulatedRounds(Rounds):
    """Rounds without a thread, each taken by ``go_round``. Between them it sleeps, as the thread does,
    until it is woken or due: a wake that is forgotten is found out."""

    def __init__(self, round: Callable[[], float | None], clock: VirtualClock) -> None:
        super().__init__(round, lambda **_: None)
        self.is_at_work = self.is_turning = False
        self.alarm = math.inf
        self._clock = clock
        self._is_awake = False
        self._is_over = False

    def go_round(self) -> None:
        """Take one round."""
        self._is_awake, self.alarm, self.is_at_work = False, math.inf, True
        try:
            seconds = self._round()
        finally:
            self.is_at_work = self.is_turning = False
        if seconds is None:
            self._is_over = True
        elif seconds > 0.0:
            self.alarm = self._clock.now + seconds
        else:
            self._is_awake = True

    @property
    def is_due(self) -> bool:
        """True if it is awake, or would be by now."""
        is_free = not self._is_over and not self.is_at_work
        return is_free and (self._is_awake or self.alarm <= self._clock.now)

    # -- as a thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Open the engine, as whoever starts a thread blocks until that is done, and go to sleep."""
        self._is_awake = True
        while self._is_awake:
            self.go_round()

    def wake(self) -> None:
        """Wake: there is a round to take."""
        self._is_awake = True

    def join(self, timeout: float | None = None) -> None:
        """Take the last round, unless one is being taken, which can't be waited for."""
        if not self.is_at_work and not self._is_over:
            self.go_round()

    def is_alive(self) -> bool:
        """Return whether there are rounds to come."""
        return not self._is_over

    def open(self, open_engine: Callable[[], Engine]) -> Engine:
        """Return a new engine."""
        return open_engine()
