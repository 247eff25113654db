"""A whole runtime without threads: the real batcher, cache, answers and rounds of the engine's thread,
over a simulated engine, and the event loops that are opened on it, all taken on by one seeded scheduler.

Rules:
    One thing happens at a time: one callback of one loop, one round of the engine's thread, or time
    passes. Which, the seed decides; so any order of these that threads could bring about can come about.
    While the engine's thread is in ``submit`` or ``step``, caches rows or delivers, loops go on: in the
    middle of the call, before and after the rows are cached, between one delivery and the next.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import torch

from genrt.lm import AsyncLM
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.cache import RowCache
from genrt.runtime.thread import EngineThread
from genrt.testing.record import Record, Violation
from genrt.testing.simulated_batcher import SimulatedBatcher, SimulatedRounds
from genrt.testing.simulated_engine import Faults, SimulatedEngine
from genrt.testing.simulated_model import Model
from genrt.testing.virtual_loop import VirtualClock, VirtualLoop

T = TypeVar("T")

IDLE_ROUNDS = 100_000
"""How many things may happen in a row before a simulation counts as stuck."""


class SimulatedRuntime:
    """One runtime and the loops that ask it.

    Args:
        random: decides everything that is left open.
        model: what the answers are.
        faults: what goes wrong with the engine.
        cache_bytes, max_batch_size, max_wait_seconds, max_queued_requests: see ``genrt.load``.
        restarts: whether another engine takes the place of one that died.
        seed: what draws without a seed are drawn from.

    The methods ``make_…`` are there to be overridden: by simulations that see more.
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
        self.faults = faults
        self.record = Record()
        self.clock = VirtualClock()
        self.loops: list[VirtualLoop] = []
        self.stopped: set[VirtualLoop] = set()
        self.on_interrupt: Callable[[VirtualLoop], None] = lambda loop: None
        self._engine_share = random.choice([0.05, 0.3, 0.7])
        self._is_meanwhile = False
        self._most_meanwhile = random.choice([0, 2, 8])
        self.cache = self.make_cache(cache_bytes)
        self.thread = EngineThread(
            self._open_engine,
            self.cache,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            max_queued_requests=max_queued_requests,
            restarts=restarts,
            make_batcher=self._make_batcher,
            make_thread=self._make_rounds,
        )
        self.lm = AsyncLM(self.thread, self.cache, self.thread.engine, seed=seed)

    def make_cache(self, max_bytes: int) -> RowCache:
        """Return the cache."""
        return BusyCache(max_bytes, self)

    def make_batcher(self, cache: RowCache, **options: Any) -> SimulatedBatcher:
        """Return the batcher."""
        return SimulatedBatcher(cache, **options)

    def make_engine(self) -> SimulatedEngine:
        """Return an engine, the first or one in place of another."""
        return SimulatedEngine(
            self.random,
            self.model,
            self.faults,
            self.record,
            meanwhile=self.meanwhile,
            spend=self.spend,
        )

    def _make_batcher(self, cache: RowCache, **options: Any) -> SimulatedBatcher:
        self.batcher = self.make_batcher(
            cache,
            record=self.record,
            model=self.model,
            run_blocked=self.run_blocked,
            on_turn=self._on_turn,
            clock=self.clock.time,
            **options,
        )
        return self.batcher

    def _on_turn(self) -> None:
        self.rounds.is_turning = True

    def _make_rounds(
        self, round: Callable[[], float | None], close: Callable[..., None]
    ) -> SimulatedRounds:
        self.rounds = SimulatedRounds(round, self.clock)
        return self.rounds

    def _open_engine(self) -> SimulatedEngine:
        self.engine = self.make_engine()
        return self.engine

    # -- loops --------------------------------------------------------------------------------

    def open_loop(self) -> VirtualLoop:
        """Return another event loop, taken on with the others until it is stopped or closed."""
        loop = VirtualLoop(self.clock, before_delivery=self.meanwhile)  # type: ignore[abstract]  # it has no sockets
        self.loops.append(loop)
        return loop

    def close_loop(self, loop: VirtualLoop) -> None:
        """Close a loop, whatever is pending on it."""
        self.check_reports(loop)
        self.forget_loop(loop)

    def forget_loop(self, loop: VirtualLoop) -> None:
        """Close a loop without a look at what it was told."""
        for task in asyncio.all_tasks(loop):
            coroutine = coroutine_of(task)
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # that it never ran is no mistake
        loop.close()
        self.loops.remove(loop)
        self.stopped.discard(loop)

    def discard(self) -> None:
        """Let go of everything, without a look at it."""
        for loop in [*self.loops]:
            self.forget_loop(loop)
        self.model.close()

    # -- time ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Have one thing happen; return ``False`` if nothing can."""
        loops = self._busy_loops()
        is_due = self.rounds.is_due
        if is_due and (not loops or self.random.random() < self._engine_share):
            self.rounds.go_round()
        elif loops:
            self._run_one(self.random.choice(loops))
        else:
            moments = [loop.next_timer for loop in self.loops if loop not in self.stopped]
            due = min((each for each in moments if each is not None), default=math.inf)
            due = min(due, self.rounds.alarm)
            if due == math.inf:
                return False
            self.clock.pass_until(due)
        if self.record.violation is not None:
            raise self.record.violation
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
                raise Violation(f"nothing can happen any more, and {what}: {self.batcher}")
        raise Violation(f"after {IDLE_ROUNDS} rounds still {what}: {self.batcher}")

    def settle(self) -> None:
        """Have things happen until nothing can any more."""
        for _ in range(IDLE_ROUNDS):
            if not self.step():
                return
        raise Violation(f"something goes on happening after {IDLE_ROUNDS} rounds")

    def run_blocked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns, for a caller that blocks: its loop is held up meanwhile, the
        others are not."""
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

    def meanwhile(self) -> None:
        """Run a few callbacks of loops, in the middle of a turn."""
        if self._is_meanwhile or not self.rounds.is_turning:
            return
        self._is_meanwhile = True
        try:
            for _ in range(self.random.randint(0, self._most_meanwhile)):
                loops = self._busy_loops()
                if not loops:
                    return
                self._run_one(self.random.choice(loops))
        finally:
            self._is_meanwhile = False

    def spend(self, seconds: float) -> None:
        """Have time pass."""
        self.clock.pass_until(self.clock.now + seconds)

    def _busy_loops(self) -> list[VirtualLoop]:
        return [loop for loop in self.loops if loop.has_work and loop not in self.stopped]

    def _run_one(self, loop: VirtualLoop) -> None:
        try:
            loop.run_one()
        except KeyboardInterrupt:
            self.on_interrupt(loop)

    # -- what must hold -----------------------------------------------------------------------

    def check_nothing_is_left(self) -> None:
        """Check that everyone was told and nothing is kept for anyone, once nothing can happen any more.

        Raises:
            Violation: it is not so.
        """
        for loop in self.loops:
            self.check_reports(loop)
        if waiting := self.batcher.unanswered:
            raise Violation(f"nothing can happen any more, but nobody told {sorted(waiting)}")
        s = self.batcher.statistics()
        if s.queued + s.in_flight + s.waiting:
            raise Violation(f"nobody waits, but there is something to do: {self.batcher}")

    def check_reports(self, loop: VirtualLoop) -> None:
        """Check that all was well on this loop."""
        if loop.reports:
            raise Violation(f"an event loop's exception handler was told {loop.reports}")


def coroutine_of(task: asyncio.Task[Any]) -> Coroutine[Any, Any, Any]:
    """Return what a task runs."""
    return cast("Coroutine[Any, Any, Any]", task.get_coro())


class BusyCache(RowCache):
    """Rows by request. Loops go on before and after some are put; then their requests end."""

    def __init__(self, max_bytes: int, runtime: SimulatedRuntime) -> None:
        super().__init__(max_bytes)
        self.runtime = runtime

    def put_all(
        self, rows: dict[LogprobsRequest, torch.Tensor]
    ) -> dict[LogprobsRequest, Exception]:
        self.runtime.meanwhile()
        errors = super().put_all(rows)
        self.runtime.meanwhile()
        return errors
