"""A whole runtime without threads: the real batcher, cache and answers over a simulated engine, and
whatever event loops are opened on it, all taken on by one seeded scheduler.

Rules:
    One thing happens at a time: one callback of one loop, one round of the engine's thread, or time
    passes. Which, the seed decides; so any order of these that threads could bring about can come about.
    While the engine's thread is in ``submit`` or ``step``, caches rows or delivers, loops go on: in the
    middle of the call, before and after the rows are cached, between one delivery and the next.
    The engine's thread sleeps until it is woken or a time that the batcher gave it, as the real one does:
    a wake that is forgotten is found out.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import inspect
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from genrt.answers import AnsweringEngine
from genrt.batcher import Batcher
from genrt.cache import RowCache
from genrt.engine import (
    Adapter,
    Engine,
    EngineStatistics,
    Finished,
    LogprobsRequest,
    Request,
    Result,
)
from genrt.engine_thread import EngineThread
from genrt.errors import Closed, EngineFailed, GenrtError
from genrt.lm import AsyncLM
from genrt.testing.ledger import Ledger
from genrt.testing.simulated_engine import Faults, SimulatedEngine
from genrt.testing.simulated_model import Model
from genrt.testing.violation import Violation
from genrt.testing.virtual_loop import VirtualClock, VirtualLoop

T = TypeVar("T")

IDLE_ROUNDS = 100_000
"""So many things may happen in a row without an end before a simulation counts as stuck."""


class SimulatedRuntime:
    """One runtime and the loops that ask it.

    Args:
        random: decides everything that is left open.
        model: what the answers are.
        faults: what goes wrong with the engine.
        cache_bytes, max_batch_size, max_wait_seconds: see ``genrt.load``.
    """

    def __init__(
        self,
        random: random.Random,
        model: Model,
        *,
        faults: Faults,
        cache_bytes: int,
        max_batch_size: int | None,
        max_wait_seconds: float,
    ) -> None:
        self.random = random
        self.clock = VirtualClock()
        self.loops: list[VirtualLoop] = []
        self.stopped: set[VirtualLoop] = set()
        self.on_interrupt: Callable[[VirtualLoop], None] = lambda loop: None
        self._engine_share = random.choice([0.05, 0.3, 0.7])
        self._is_meanwhile = False
        self._most_meanwhile = random.choice([0, 2, 8])
        self.engine = SimulatedEngine(
            random, model, faults, meanwhile=self._meanwhile, spend=self._spend
        )
        self.cache = _BusyCache(cache_bytes, self._meanwhile, lambda: self.ledger.settling())
        self.thread = SimulatedThread(self, max_batch_size, max_wait_seconds)
        self.ledger = self.thread.ledger
        self.lm = AsyncLM(cast("EngineThread", self.thread), self.cache, self.engine)

    # -- loops --------------------------------------------------------------------------------

    def open_loop(self) -> VirtualLoop:
        """Another event loop, taken on with the others until it is stopped or closed."""
        loop = VirtualLoop(self.clock, before_delivery=self._meanwhile)  # type: ignore[abstract]  # it has no sockets
        self.loops.append(loop)
        return loop

    def stop(self, loop: VirtualLoop) -> None:
        """Take a loop on no more, whatever is pending on it."""
        self.stopped.add(loop)

    def close_loop(self, loop: VirtualLoop) -> None:
        """Close a loop, whatever is pending on it."""
        self._check_reports(loop)
        self._discard(loop)
        self.ledger.loop_closed(loop)

    def discard(self) -> None:
        """Let go of everything, without a look at it."""
        for loop in [*self.loops]:
            self._discard(loop)
        self.lm._finalizer.detach()
        self.engine.model.close()

    def _discard(self, loop: VirtualLoop) -> None:
        for task in asyncio.all_tasks(loop):
            coroutine = cast("Coroutine[Any, Any, Any]", task.get_coro())
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # that it never ran is no mistake
        loop.close()
        self.loops.remove(loop)
        self.stopped.discard(loop)

    # -- time ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Have one thing happen; ``False`` if nothing can."""
        loops = [loop for loop in self.loops if loop.has_work and loop not in self.stopped]
        is_due = self.thread.is_due
        if is_due and (not loops or self.random.random() < self._engine_share):
            self.thread.go_round()
        elif loops:
            self._run_one(self.random.choice(loops))
        else:
            moments = [loop.next_timer for loop in self.loops if loop not in self.stopped]
            due = [moment for moment in (*moments, self.thread.alarm) if moment is not None]
            if not due:
                return False
            self.clock.pass_until(min(due))
        if self.ledger.violation is not None:
            raise self.ledger.violation
        return True

    def run_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Have things happen until this is true.

        Raises:
            Violation: nothing can happen any more, or too much has; ``what`` says what was waited for.
        """
        for _ in range(IDLE_ROUNDS):
            if is_done():
                return
            if not self.step():
                if is_done():
                    return
                raise Violation(f"nothing can happen any more, and {what}: {self.thread.batcher}")
        raise Violation(f"after {IDLE_ROUNDS} rounds still {what}: {self.thread.batcher}")

    def settle(self) -> None:
        """Have things happen until nothing can any more."""
        for _ in range(IDLE_ROUNDS):
            if not self.step():
                return
        raise Violation(f"something goes on happening after {IDLE_ROUNDS} rounds")

    def run_blocked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns, for a caller that blocks: its loop is held up meanwhile, the others
        are not."""
        held = {loop for loop in self.loops if loop.is_running()} - self.stopped
        self.stopped |= held
        loop = self.open_loop()
        try:
            task = loop.create_task(coroutine)
            self.run_until(task.done, "a thread waits for an answer")
            return task.result()
        finally:
            self.stopped -= held
            self.close_loop(loop)

    def _run_one(self, loop: VirtualLoop) -> None:
        try:
            loop.run_one()
        except KeyboardInterrupt:
            self.on_interrupt(loop)

    def _meanwhile(self) -> None:
        """In the middle of what the engine's thread does: a few callbacks."""
        if self._is_meanwhile or not self.thread.is_turning:
            return
        self._is_meanwhile = True
        try:
            for _ in range(self.random.randint(0, self._most_meanwhile)):
                loops = [loop for loop in self.loops if loop.has_work and loop not in self.stopped]
                if not loops:
                    return
                self._run_one(self.random.choice(loops))
        finally:
            self._is_meanwhile = False

    def _spend(self, seconds: float) -> None:
        self.clock.pass_until(self.clock.now + seconds)

    # -- what must hold -----------------------------------------------------------------------

    def check_rest(self) -> None:
        """Once nothing can happen any more: everyone was told, and everything counted.

        Raises:
            Violation: it is not so.
        """
        waiting = [
            question for question in self.ledger.unanswered() if question.loop not in self.stopped
        ]
        if waiting:
            raise Violation(f"nothing can happen any more, but nobody told {waiting}")
        for loop in self.loops:
            self._check_reports(loop)
        self.engine.overwrite()
        self.ledger.check_counters()
        self.ledger.check_cache()

    def check_nothing_is_left(self) -> None:
        """``check_rest``, and nothing is kept for anyone, once every loop that was left alone is closed.

        Raises:
            Violation: it is not so.
        """
        self.check_rest()
        bound = set(self.lm._adapters.values())
        if self.thread.alive and bound != set(self.engine.adapters):
            raise Violation(f"bound are {bound}, but {list(self.engine.adapters)} are loaded")
        self.ledger.check_nothing_is_left()
        self.thread.check_nothing_is_left()

    def _check_reports(self, loop: VirtualLoop) -> None:
        if loop.reports:
            raise Violation(f"an event loop's exception handler was told {loop.reports}")


class _BusyCache(RowCache):
    """Rows by request; ``meanwhile`` something happens, before and after some are put, and then their
    requests end."""

    def __init__(
        self, max_bytes: int, meanwhile: Callable[[], None], afterwards: Callable[[], None]
    ) -> None:
        super().__init__(max_bytes)
        self._meanwhile = meanwhile
        self._afterwards = afterwards

    def put_all(
        self, rows: dict[LogprobsRequest, torch.Tensor]
    ) -> dict[LogprobsRequest, Exception]:
        self._meanwhile()
        errors = super().put_all(rows)
        self._meanwhile()
        self._afterwards()
        return errors


class SimulatedThread:
    """Stands for ``EngineThread``, with the same members; ``go_round`` is one round of its loop."""

    def __init__(
        self, runtime: SimulatedRuntime, max_batch_size: int | None, max_wait_seconds: float
    ) -> None:
        engine = runtime.engine
        self.opened: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.opened.set_result(engine)
        self.alarm: float | None = None
        self._clock = runtime.clock
        self._engine = engine
        self._answering = AnsweringEngine(engine, runtime.cache)
        self._batcher = Batcher(
            runtime.cache,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            wake=self._wake,
            clock=runtime.clock.time,
        )
        self.ledger = Ledger(self._batcher, runtime.cache, engine)
        self._watched = WatchedBatcher(self._batcher, self.ledger, runtime.run_blocked)
        self._watching = WatchingEngine(self._answering, self.ledger)
        self._calls: collections.deque[
            tuple[concurrent.futures.Future[Any], Callable[[Engine], Any]]
        ] = collections.deque()
        self._woken = False
        self._closing = False
        self.is_turning = False
        self._is_at_work = False
        self._ended: GenrtError | None = None

    # -- as EngineThread ----------------------------------------------------------------------

    @property
    def batcher(self) -> Batcher:
        """The batcher, watched by the ledger."""
        return cast("Batcher", self._watched)

    @property
    def alive(self) -> bool:
        """Whether it has not been told to end."""
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
        self._closing = True
        self._wake()
        reason = Closed("the runtime was closed; load it again to ask more")
        self.ledger.closed(reason)
        self._batcher.close()
        if wait and not self._is_at_work and self._ended is None:
            self.go_round()

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
            self._end(Closed("the runtime was closed; load it again to ask more"))
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
            self.is_turning = True
            self.ledger.turning()
            self._batcher.turn(self._watching)
            self.ledger.turned()
        except Violation:
            raise
        except BaseException as error:
            if not self._engine.raised(error):
                raise Violation(f"a turn ended in {error!r}, which no engine raised") from error
            reason = EngineFailed(
                f"the engine can't go on and was closed: {type(error).__name__}: {error}"
            )
            reason.__cause__ = error
            self._end(reason)
        finally:
            self._is_at_work = self.is_turning = False

    def check_nothing_is_left(self) -> None:
        """Nothing is kept for who waited, and a thread that has ended has closed its engine."""
        kept = (self._answering._readers, self._answering._asked, self._answering._cached)
        if any(kept):
            raise Violation(f"nobody waits, but the answers keep {kept}")
        if self._calls:
            raise Violation(f"{len(self._calls)} calls were never made")
        if self._ended is not None and not self._engine.closed:
            raise Violation("the thread has ended, but the engine is open")

    def _do_calls(self) -> None:
        while self._calls:
            future, function = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = function(cast("Engine", self._engine))
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

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


class WatchedBatcher:
    """What a batcher's callers see of it, with the ledger told of every question and its end."""

    def __init__(
        self,
        batcher: Batcher,
        ledger: Ledger,
        run_blocked: Callable[[Coroutine[Any, Any, list[Result]]], list[Result]],
    ) -> None:
        self._batcher = batcher
        self._ledger = ledger
        self._run_blocked = run_blocked
        self.retire = batcher.retire
        self.statistics = batcher.statistics

    async def ask(self, requests: Sequence[Request], *, stacked: bool = False) -> list[Result]:
        """As ``Batcher.ask``."""
        question = self._ledger.asked(requests, stacked)
        try:
            results = await self._batcher.ask(requests, stacked=stacked)
        except BaseException as error:
            self._ledger.left(question, error)
            raise
        self._ledger.answered(question, results)
        return results

    def ask_sync(self, requests: Sequence[Request], *, stacked: bool = False) -> list[Result]:
        """As ``Batcher.ask_sync``: the loop that it is called on is held up, the simulation goes on."""
        return self._run_blocked(self.ask(requests, stacked=stacked))

    def __repr__(self) -> str:
        return repr(self._batcher)


class WatchingEngine:
    """An engine as the batcher sees it, with the ledger told of everything that passes."""

    def __init__(self, engine: AnsweringEngine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def max_batch_size(self) -> int:
        return self._engine.max_batch_size

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        self._ledger.submitted(requests)
        try:
            self._engine.submit(requests)
        except Exception as error:
            self._ledger.submit_failed(requests, error)
            raise

    def step(self) -> list[Finished]:
        try:
            finished = self._engine.step()
        except Exception as error:
            self._ledger.step_failed(error)
            raise
        self._ledger.finished(finished)
        return finished

    def cancel(self, requests: Sequence[Request]) -> None:
        self._ledger.withdrawn(requests)
        self._engine.cancel(requests)

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self._engine.add_adapter(adapter, path)

    def remove_adapter(self, adapter: Adapter) -> None:
        self._engine.remove_adapter(adapter)

    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def close(self) -> None:
        self._engine.close()
