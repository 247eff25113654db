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
import inspect
import random
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import torch

from genrt.lm import AsyncLM
from genrt.questions.values import LogprobsRequest
from genrt.runtime.cache import RowCache
from genrt.runtime.thread import EngineThread
from genrt.testing.ledger import Ledger
from genrt.testing.simulated_engine import Faults, SimulatedEngine
from genrt.testing.simulated_model import Model
from genrt.testing.simulated_thread import SimulatedThread
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
        cache_bytes, max_batch_size, max_wait_seconds, max_queued_requests: see ``genrt.load``.
        restarts: whether another engine takes the place of one that died.
        seed: what draws without a seed are drawn from.
    """

    def __init__(
        self,
        random: random.Random,
        model: Model,
        *,
        faults: Faults,
        cache_bytes: int,
        max_batch_size: int | None = None,
        max_wait_seconds: float = 0.0,
        max_queued_requests: int = sys.maxsize,
        restarts: bool = False,
        seed: int,
    ) -> None:
        self.random = random
        self.model = model
        self._faults = faults
        self.clock = VirtualClock()
        self.loops: list[VirtualLoop] = []
        self.stopped: set[VirtualLoop] = set()
        self.on_interrupt: Callable[[VirtualLoop], None] = lambda loop: None
        self._engine_share = random.choice([0.05, 0.3, 0.7])
        self._is_meanwhile = False
        self._most_meanwhile = random.choice([0, 2, 8])
        self.cache = _BusyCache(cache_bytes, self)
        self.thread = SimulatedThread(
            self.cache,
            self.clock,
            self.open_engine,
            self.run_blocked,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            max_queued_requests=max_queued_requests,
            restarts=restarts,
        )
        self.ledger: Ledger = self.thread.ledger
        self.lm = AsyncLM(
            cast("EngineThread", self.thread), self.cache, self.thread.engine, seed=seed
        )

    def open_engine(self) -> SimulatedEngine:
        """An engine, the first or one in place of another."""
        self.engine = SimulatedEngine(
            self.random, self.model, self._faults, meanwhile=self.meanwhile, spend=self._spend
        )
        return self.engine

    # -- loops --------------------------------------------------------------------------------

    def open_loop(self) -> VirtualLoop:
        """Another event loop, taken on with the others until it is stopped or closed."""
        loop = VirtualLoop(self.clock, before_delivery=self.meanwhile)  # type: ignore[abstract]  # it has no sockets
        self.loops.append(loop)
        return loop

    def stop(self, loop: VirtualLoop) -> None:
        """Take a loop on no more, whatever is pending on it."""
        self.stopped.add(loop)

    def close_loop(self, loop: VirtualLoop) -> None:
        """Close a loop, whatever is pending on it. What was cancelled there and can't run any more may be
        collected at any moment: it is, where that is worst, while the batcher's lock is held."""
        self._check_reports(loop)
        tasks = asyncio.all_tasks(loop)
        self._discard(loop, tasks)
        self.ledger.loop_closed(loop)
        with self.thread.held():
            for task in tasks:
                if task.cancelling():
                    _coroutine(task).close()

    def discard(self) -> None:
        """Let go of everything, without a look at it."""
        for loop in [*self.loops]:
            self.ledger.loop_closed(loop)
            self._discard(loop, asyncio.all_tasks(loop))
        self.lm._finalizer.detach()
        self.model.close()

    def _discard(self, loop: VirtualLoop, tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks:
            if inspect.getcoroutinestate(_coroutine(task)) == inspect.CORO_CREATED:
                _coroutine(task).close()  # that it never ran is no mistake
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

    def meanwhile(self) -> None:
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
        self._check_cache()

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

    def _check_cache(self) -> None:
        """What is cached is right, of adapters that are loaded, and as large as it says."""
        rows = dict(self.cache._rows)
        for request, row in rows.items():
            if not torch.equal(row, self.model.row(request)):
                raise Violation(f"the cached row of {request} is {row}")
            if request.adapter is not None and request.adapter not in self.engine.adapters:
                raise Violation(f"{request} is cached, but its adapter is gone")
        s = self.cache.statistics()
        held = sum(row.untyped_storage().nbytes() for row in rows.values())
        if not s.bytes == held <= s.max_bytes or s.rows != len(rows):
            raise Violation(f"{held} bytes are held in {len(rows)} rows, but {s}")

    def _check_reports(self, loop: VirtualLoop) -> None:
        if loop.reports:
            raise Violation(f"an event loop's exception handler was told {loop.reports}")


def _coroutine(task: asyncio.Task[Any]) -> Coroutine[Any, Any, Any]:
    return cast("Coroutine[Any, Any, Any]", task.get_coro())


class _BusyCache(RowCache):
    """Rows by request. Loops go on before and after some are put; then their requests end."""

    def __init__(self, max_bytes: int, runtime: SimulatedRuntime) -> None:
        super().__init__(max_bytes)
        self._runtime = runtime

    def put_all(
        self, rows: dict[LogprobsRequest, torch.Tensor]
    ) -> dict[LogprobsRequest, Exception]:
        self._runtime.ledger.settling()
        self._runtime.meanwhile()
        errors = super().put_all(rows)
        self._runtime.meanwhile()
        self._runtime.ledger.settled()
        return errors
