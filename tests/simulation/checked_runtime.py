"""A simulated runtime with a ledger of all questions, to which the batcher and the engine report."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from genrt.engines.protocol import Finished
from genrt.errors import WAS_CLOSED, Closed, EngineDied, GenrtError, NotFinite
from genrt.questions.completions import Completion, Delta
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Waiter
from genrt.runtime.cache import RowCache
from genrt.testing.virtual_loop import VirtualLoop
from tests.inside import adapters_of, calls_of, in_progress, kept_by
from tests.simulation.engine import Record, SimulatedEngine, Violation
from tests.simulation.ledger import Ledger, Question
from tests.simulation.runtime import (
    BusyCache,
    ObservedBatcher,
    SimulatedRuntime,
    WatchedStream,
    coroutine_of,
)


class WatchedBatcher(ObservedBatcher):
    """A batcher that tells the ledger what its thread has it do, and records its ends and beginnings."""

    def __init__(self, cache: RowCache, runtime: CheckedRuntime, **options: Any) -> None:
        self._ledger, self._record = runtime.ledger, runtime.record
        lock = cast("threading.RLock", CheckedLock(self._record))
        super().__init__(cache, runtime, lock=lock, **options)

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


class CheckedEngine(SimulatedEngine):
    """A simulated engine whose rows can be destroyed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blocks: list[Tensor] = []

    def overwrite(self) -> None:
        """Destroy the rows of all steps so far: whoever kept one and did not copy it is found out. To be
        called when nobody waits for a part of an answer any more."""
        for block in self._blocks:
            block.fill_(torch.nan)
        self._blocks.clear()

    def raised(self, error: BaseException) -> bool:
        """Return whether this is what an engine raised at some time."""
        events = [event for event in self._record.events if event[0] != "closed"]
        return any(error is part for event in events for part in event)

    def explains(self, request: Request, error: GenrtError) -> bool:
        """Return whether a request ends in this error alone: as its own, or because the engine could not
        forget it when it was cancelled before."""
        if isinstance(request, PopulationDraw):
            return any(self.explains(each, error) for each in request.rows)
        if isinstance(error, NotFinite):
            return self._is_poisoned(request)
        held = self.unforgotten.get(request.row if isinstance(request, ReadRequest) else request)
        # A later refusal, by its rows of others, may have replaced the one that it ended in.
        return held is not None and self.raised(error.__cause__ or error)

    def _block(self, rows: int) -> Tensor:
        self._blocks.append(super()._block(rows))
        return self._blocks[-1]


class CheckedStream(WatchedStream):
    """A stream that the ledger is told of."""

    runtime: CheckedRuntime
    question: Question | None = None

    async def __anext__(self) -> Delta:
        if self.question is not None:
            self.question.is_awaited = True
        try:
            return await super().__anext__()
        finally:
            if self.question is not None:
                self.question.is_awaited = False

    def began(self) -> None:
        self.question = self.runtime.ledger.streamed(self._request, self.timeout)

    def whole(self, completion: Completion) -> None:
        if self.question is not None:
            self.runtime.ledger.answered(self.question, [completion])

    def left(self, error: BaseException) -> None:
        if self.question is not None:
            self.runtime.ledger.left(self.question, error)

    def __del__(self) -> None:
        super().__del__()
        if self.question is not None:
            self.runtime.ledger.dropped(self.question)


class CheckedRuntime(SimulatedRuntime):
    """A simulated runtime with a ledger."""

    batcher: WatchedBatcher
    engine: CheckedEngine
    engine_type = CheckedEngine
    stream_type = CheckedStream

    @cached_property
    def ledger(self) -> Ledger:
        """Every question, and what must become of it."""
        return Ledger(self)

    def make_cache(self, max_bytes: int) -> RowCache:
        return _CheckedCache(max_bytes, self)

    def make_batcher(self, cache: RowCache, **options: Any) -> WatchedBatcher:
        options |= {"clock": self.clock.time}
        return WatchedBatcher(cache, self, **options)

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        question = self.ledger.asked(requests, stacked, timeout)
        try:
            results = await super().ask(question.requests, stacked=stacked, timeout=timeout)
        except BaseException as error:
            self.ledger.left(question, error)
            raise
        self.ledger.answered(question, results)
        return results

    def registering(self, waiter: Waiter) -> None:
        self.ledger.registering(waiter)

    def leaving(self, waiter: Waiter) -> None:
        self.ledger.leaving(waiter)

    def taken(self, flush: Sequence[Request], withdrawn: Sequence[Request]) -> None:
        super().taken(flush, withdrawn)
        if withdrawn:
            self.ledger.withdrawn(withdrawn)
        if flush:
            self.ledger.taken(flush)

    def close_loop(self, loop: VirtualLoop) -> None:
        """Close a loop, whatever is pending on it. What was cancelled there and can't run any more may be
        collected at any moment: it is, where that is worst, while the batcher's lock is held."""
        tasks = asyncio.all_tasks(loop)
        super().close_loop(loop)
        with self.batcher.held():
            for task in tasks:
                if task.cancelling():
                    coroutine_of(task).close()

    def forget_loop(self, loop: VirtualLoop) -> None:
        super().forget_loop(loop)
        self.ledger.loop_closed(loop)

    def check_rest(self) -> None:
        """Check that everyone was told, and everything counted, once nothing can happen any more.

        Raises:
            Violation: it is not so.
        """
        waiting = [each for each in self.ledger.unanswered() if each.loop not in self.stopped]
        if waiting:
            raise Violation(f"nothing can happen any more, but nobody told {waiting}")
        for loop in self.loops:
            self.check_reports(loop)
        self.engine.overwrite()
        self.ledger.check_counters()
        self._check_cache()

    def check_nothing_is_left(self) -> None:
        """``check_rest``, and nothing is kept for anyone, once every loop that was left alone is closed.

        Raises:
            Violation: it is not so.
        """
        self.check_rest()
        bound = set(adapters_of(self.lm).by_name.values())
        if self.thread.alive and bound != set(self.engine.adapters):
            raise Violation(f"bound are {bound}, but {list(self.engine.adapters)} are loaded")
        self.ledger.check_nothing_is_left()
        self._check_parts()

    def _check_parts(self) -> None:
        """Check that nothing is kept for who waited, and that a thread that ended closed its engine."""
        thread, batcher = self.thread, self.batcher
        if kept := in_progress(thread.answering):
            raise Violation(f"nobody waits, but the answers keep {kept}")
        settings = {"_counted", "_loops", "_max_queued", "_returning"}
        held = kept_by(batcher, settings if thread.alive else settings | {"_retired"})
        loops = vars(batcher)["_loops"].values()
        busy = [each for each in loops if each.waiters or each.gathered]
        if held or busy or batcher.streams.by_loop:
            raise Violation(f"nobody waits, but the batcher holds {held}, {busy}: {batcher}")
        if calls := calls_of(thread):
            raise Violation(f"{len(calls)} calls were never made")
        if not self.rounds.is_alive() and not self.engine.closed:
            raise Violation("the thread has ended, but the engine is open")

    def _check_cache(self) -> None:
        """Check that what is cached is right, of adapters that are loaded, and as large as it says."""
        rows = dict(self.cache._rows)
        for request, row in rows.items():
            if not torch.equal(row, self.model.answer(request)):
                raise Violation(f"the cached row of {request} is {row}")
            if request.adapter is not None and request.adapter not in self.engine.adapters:
                raise Violation(f"{request} is cached, but its adapter is gone")
        s = self.cache.statistics()
        held = sum(row.untyped_storage().nbytes() for row in rows.values())
        if not s.bytes == held <= s.max_bytes or s.rows != len(rows):
            raise Violation(f"{held} bytes are held in {len(rows)} rows, but {s}")


class _CheckedCache(BusyCache):
    """Rows by request; the ledger is told before and after some are put."""

    runtime: CheckedRuntime

    def put_all(self, rows: dict[LogprobsRequest, Tensor]) -> dict[LogprobsRequest, Exception]:
        self.runtime.ledger.settling()
        errors = super().put_all(rows)
        self.runtime.ledger.settled()
        return errors
