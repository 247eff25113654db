"""A batcher and an engine, with the ledger told of everything that passes between callers, batcher and
engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from genrt.engines.protocol import Finished
from genrt.errors import WAS_CLOSED, Closed, EngineDied, GenrtError
from genrt.questions.population_draws import PopulationDraw
from genrt.questions.request import Request
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from genrt.testing.record import Record, Violation
from tests.simulation.ledger import Ledger


class WatchedBatcher(Batcher):
    """A batcher that tells the ledger what its thread has it do, and records its ends and beginnings."""

    def __init__(self, cache: RowCache, ledger: Ledger, record: Record, **options: Any) -> None:
        super().__init__(cache, lock=cast("threading.RLock", CheckedLock(record)), **options)
        self._ledger = ledger
        self._record = record

    def held(self) -> AbstractContextManager[object]:
        """Return the batcher's lock."""
        return self.lock

    def turn(self, engine: AnsweringEngine) -> None:
        self._ledger.turning()
        try:
            super().turn(cast("AnsweringEngine", _WatchedEngine(engine, self._ledger)))
        except Violation as violation:  # else it would end as the engine's death
            self._record.violation = self._record.violation or violation
            raise
        except BaseException as error:
            self._ledger.died(error)
            raise
        self._ledger.turned()

    def _settle(self, finished: Sequence[Finished], **options: Any) -> None:
        super()._settle(finished, **options)
        self._ledger.settling()  # where all of it is sent again, nothing was cached, and none ended

    def close(self, reason: GenrtError | None = None) -> bool:
        was_closed = self.is_closed
        if not was_closed and not self.lock._is_owned():  # type: ignore[attr-defined]
            self._ledger.closed(reason or Closed(WAS_CLOSED))
        done = super().close(reason)
        if done and not was_closed:
            self._record.add("closed", self._closed)
        return done

    def reopen(self) -> None:
        self._ledger.reopened()
        self._record.add("reopened")
        super().reopen()

    def resume(self) -> None:
        self._record.add("restarted")
        super().resume()
        self._ledger.resumed()


class _WatchedEngine:
    """An engine as the batcher sees it in a turn."""

    def __init__(self, engine: AnsweringEngine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger
        self.remove_adapter = engine.remove_adapter
        self.progress = engine.progress

    def submit(self, requests: Sequence[Request]) -> list[Finished]:
        self._ledger.submitted(requests)
        try:
            ends = self._engine.submit(requests)
        except EngineDied:
            raise
        except Exception as error:
            self._ledger.submit_failed(requests, error)
            raise
        self._ledger.finished(ends)
        return ends

    def step(self, tell: Callable[[Sequence[Finished]], object]) -> list[Finished]:
        """Tell of every other population that was drawn, as an engine may, before the step is over."""
        try:
            finished = self._engine.step()
        except EngineDied:
            raise
        except Exception as error:
            self._ledger.step_failed(error)
            raise
        drawn = [each for each in finished if each.error is None and _is_drawn(each)]
        if told := drawn[::2]:
            finished = [each for each in finished if each not in told]
            self._ledger.finished(told)
            tell(told)
        self._ledger.finished(finished)
        return finished

    def cancel(self, requests: Sequence[Request]) -> None:
        self._ledger.cancelling(requests)
        self._engine.cancel(requests)


def _is_drawn(end: Finished) -> bool:
    return isinstance(end.request, PopulationDraw)


class CheckedLock:
    """A lock of the only thread there is: whoever finds it held would wait for ever."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._is_held = False

    def __enter__(self) -> None:
        if self._is_held:
            self._record.violated("the batcher's lock is taken by who holds it: a deadlock")
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False

    def _is_owned(self) -> bool:
        return self._is_held
