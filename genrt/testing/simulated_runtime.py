"""A whole runtime without threads, run by one seeded scheduler.

It has the real batcher, cache, answers and rounds of the engine's thread. The engine and the event loops
are simulated.

Rules:
    One event happens at a time: a callback of a loop, a round of the engine's thread, or time passes. The
    seed decides which one, so every order that threads could produce can occur.
    Loops also run while the engine's thread is in ``submit`` or ``step``, caches rows or delivers: in the
    middle of the call, before and after caching, and between deliveries.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from genrt.engines.protocol import Engine
from genrt.lm import AsyncLM
from genrt.questions.completions import CompletionRequest, Delta
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.ask import Asker
from genrt.runtime.batcher import Batcher, Waiter
from genrt.runtime.cache import RowCache
from genrt.runtime.streams import SyncStream
from genrt.runtime.thread import EngineThread, LoopThread
from genrt.testing.record import Record, Violation
from genrt.testing.simulated_engine import Faults, SimulatedEngine
from genrt.testing.simulated_model import Model, is_right
from genrt.testing.simulated_streams import WatchedStream
from genrt.testing.virtual_loop import VirtualClock, VirtualLoop

T = TypeVar("T")

IDLE_ROUNDS = 100_000
"""The number of events in a row after which a simulation counts as stuck."""


class SimulatedRuntime:
    """One runtime and the event loops that use it.

    ``random`` decides everything that is not specified. The options are those of ``genrt.load``. With
    ``restarts`` a new engine replaces one that died. Simulations that observe more override ``ask``, the
    observer methods, and the types of the parts.
    """

    engine_type: type[SimulatedEngine] = SimulatedEngine
    stream_type: type[WatchedStream] = WatchedStream

    def __init__(
        self,
        random: random.Random,
        model: Model,
        *,
        faults: Faults,
        cache_bytes: int,
        seed: int,
        **options: Any,
    ) -> None:
        self.random = random
        self.model = model
        self.faults = faults
        self.record = Record()
        self.clock = VirtualClock()
        self.loops: list[VirtualLoop] = []
        self.stopped: set[VirtualLoop] = set()
        self.unanswered: set[int] = set()
        self.weights = {0: 0}  # the weights' number for each version
        self.numbers: Iterator[int] = itertools.count()
        self._engine_share = random.choice([0.05, 0.3, 0.7])
        self._is_meanwhile = False
        self._most_meanwhile = random.choice([0, 2, 8])
        self.cache = self.make_cache(cache_bytes)
        self.thread = EngineThread(
            self._open_engine,
            self.cache,
            make_batcher=self.make_batcher,
            make_thread=self._make_rounds,
            **options,
        )
        self.batcher = self.thread.batcher
        self.lm = AsyncLM(self.thread, self.cache, self.thread.engine, seed=seed)
        self._ask, self._stream = self.lm._ask, self.lm._stream
        self.lm._ask, self.lm._ask_sync = self.ask, self.ask_sync
        self.lm._home.asker = cast("Asker", self)  # it has the two methods of an Asker
        self.lm._stream, self.lm._stream_sync = self.stream, self.stream_sync

    def make_cache(self, max_bytes: int) -> RowCache:
        """Return the cache."""
        return BusyCache(max_bytes, self)

    def make_batcher(self, cache: RowCache, **options: Any) -> Batcher:
        """Return the batcher."""
        time = self.clock.time
        return Batcher(cache, observer=self, clock=time, **options)

    def _open_engine(self) -> SimulatedEngine:
        self.engine = self.engine_type(
            self.random,
            self.model,
            self.faults,
            self.record,
            meanwhile=self.meanwhile,
            spend=self._spend,
            renewed=self._renewed,
        )
        self.record.add("opened")
        return self.engine

    def _make_rounds(
        self, round: Callable[[], float | None], close: Callable[..., None]
    ) -> SimulatedRounds:
        self.rounds = SimulatedRounds(round, self.clock)
        return self.rounds

    # -- questions ----------------------------------------------------------------------------

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Ask as an AsyncLM does, and check and record the answers."""
        number, asked_at = next(self.numbers), self.lm.weights_version
        self.unanswered.add(number)
        self.record.add("asked", number, *requests)
        try:
            results = await self._ask(requests, stacked=stacked, timeout=timeout)
        except GeneratorExit:  # garbage-collected with its loop, at any moment
            raise
        except BaseException as error:
            self.record.add(type(error).__name__, number)
            raise
        finally:
            self.unanswered.discard(number)
        self.record.add("answered", number)
        found = [*zip(requests, results[0] if stacked else results, strict=True)]
        versions = range(asked_at, self.lm.weights_version + 1)
        if not any(all(self.is_right(*pair, version) for pair in found) for version in versions):
            self.record.violated(f"{requests} were answered wrongly, or by a mixture: {results}")
        return results

    def is_right(self, request: Request, result: Result, version: int) -> bool:
        """Return whether this is the answer for the weights of this version."""
        asked = request.of_weights(version) if version else request
        return is_right(self.model, asked, result, self.weights[version])

    def _renewed(self, number: int) -> None:
        self.weights[self.lm.weights_version + 1] = number
        self.record.add("renewed", number)

    def ask_sync(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Ask as ``ask`` does, for a blocking caller: only the calling loop is blocked."""
        return self.run_blocked(self.ask(requests, stacked=stacked, timeout=timeout))

    def stream(self, request: CompletionRequest, *, timeout: float | None = None) -> WatchedStream:
        """Return the stream of an AsyncLM, with checks of its deltas."""
        return self.stream_type(self._stream(request, timeout=timeout), self, timeout)

    def stream_sync(
        self, request: CompletionRequest, *, timeout: float | None = None
    ) -> SyncStream:
        """Return a stream that reads all deltas when the first one is requested. It blocks its loop as
        ``ask_sync`` does."""
        stream = self.stream(request, timeout=timeout)

        async def brought() -> list[Delta]:
            return [delta async for delta in stream]

        def deltas() -> Generator[Delta, None, None]:
            yield from self.run_blocked(brought())

        return SyncStream(deltas(), stream._flow, request)

    # -- as the batcher's observer ------------------------------------------------------------

    def registering(self, waiter: Waiter) -> None:
        """Ignore the event."""

    def leaving(self, waiter: Waiter) -> None:
        """Ignore the event."""

    def taken(self, flush: Sequence[Request], withdrawn: Sequence[Request]) -> None:
        """Record a turn; loops run during the rest of it."""
        self.rounds.is_turning = True
        if withdrawn:
            self.record.add("withdrawn", *withdrawn)
        if flush:
            self.record.add("taken", *flush)

    # -- loops --------------------------------------------------------------------------------

    def open_loop(self) -> VirtualLoop:
        """Return a new event loop, which runs with the others until it is stopped or closed."""
        loop = VirtualLoop(self.clock, before_delivery=self.meanwhile)
        self.loops.append(loop)
        return loop

    def close_loop(self, loop: VirtualLoop) -> None:
        """Close a loop, whatever is pending on it."""
        self.check_reports(loop)
        self.forget_loop(loop)

    def forget_loop(self, loop: VirtualLoop) -> None:
        """Close a loop without checking its error reports."""
        for task in asyncio.all_tasks(loop):
            coroutine = coroutine_of(task)
            if not inspect.iscoroutine(coroutine):
                coroutine.close()  # the cleanup of an asynchronous generator that was collected
            elif inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # a coroutine that never ran is not an error
        loop.close()
        self.loops.remove(loop)
        self.stopped.discard(loop)

    def discard(self) -> None:
        """Close all loops and the model without any check."""
        for loop in [*self.loops]:
            self.forget_loop(loop)
        self.model.close()

    # -- time ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one event happen; return ``False`` if there is no possible event."""
        loops = self._busy_loops()
        is_due = self.rounds.is_due
        if is_due and (not loops or self.random.random() < self._engine_share):
            self.rounds.go_round()
        elif loops:
            self.run_one(self.random.choice(loops))
        else:
            moments = [loop.next_timer for loop in self.loops if loop not in self.stopped]
            due = min(self.rounds.alarm, *(each for each in moments if each is not None), math.inf)
            if due == math.inf:
                return False
            self.clock.pass_until(due)
        if self.record.violation is not None:
            raise self.record.violation
        return True

    def run_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Let events happen until ``is_done()``. Raise a Violation if no event is possible or after too
        many events; ``what`` describes the wait."""
        for _ in range(IDLE_ROUNDS):
            if is_done():
                return
            if not self.step() and not is_done():
                raise Violation(f"nothing can happen any more, and {what}: {self.batcher}")
        raise Violation(f"after {IDLE_ROUNDS} rounds still {what}: {self.batcher}")

    def settle(self) -> None:
        """Let events happen until no event is possible."""
        for _ in range(IDLE_ROUNDS):
            if not self.step():
                return
        raise Violation(f"something goes on happening after {IDLE_ROUNDS} rounds")

    def run_blocked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result to a caller that blocks. Its own loop is stopped meanwhile; the
        others run."""
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
        """Run a few callbacks of loops in the middle of a turn."""
        if self._is_meanwhile or not self.rounds.is_turning:
            return
        self._is_meanwhile = True
        try:
            for _ in range(self.random.randint(0, self._most_meanwhile)):
                loops = self._busy_loops()
                if not loops:
                    return
                self.run_one(self.random.choice(loops))
        finally:
            self._is_meanwhile = False

    def _spend(self, seconds: float) -> None:
        self.clock.pass_until(self.clock.now + seconds)

    def _busy_loops(self) -> list[VirtualLoop]:
        return [loop for loop in self.loops if loop.has_work and loop not in self.stopped]

    def run_one(self, loop: VirtualLoop) -> None:
        """Run a loop's next callback."""
        loop.run_one()

    # -- what must hold -----------------------------------------------------------------------

    def check_nothing_is_left(self) -> None:
        """Raise a Violation unless all callers have their answers and the batcher is empty. Call it when
        no event is possible."""
        for loop in self.loops:
            self.check_reports(loop)
        if self.unanswered:
            raise Violation(
                f"nothing can happen any more, but nobody told {sorted(self.unanswered)}"
            )
        s = self.batcher.statistics()
        if s.queued + s.in_flight + s.waiting:
            raise Violation(f"nobody waits, but there is something to do: {self.batcher}")
        if streams := self.batcher.streams.by_loop:
            raise Violation(f"nobody reads, but {streams} are still told of")

    def check_reports(self, loop: VirtualLoop) -> None:
        """Raise a Violation if this loop's exception handler was called."""
        if loop.reports:
            raise Violation(f"an event loop's exception handler was told {loop.reports}")


def coroutine_of(task: asyncio.Task[Any]) -> Coroutine[Any, Any, Any]:
    """Return the coroutine of a task."""
    return cast("Coroutine[Any, Any, Any]", task.get_coro())


class BusyCache(RowCache):
    """A row cache that lets loops run before and after it stores rows."""

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


class SimulatedRounds(LoopThread):
    """Rounds without a thread, each run by ``go_round``. Between rounds it sleeps until it is woken or
    due, as the thread does, so a missing wake is detected."""

    def __init__(self, round: Callable[[], float | None], clock: VirtualClock) -> None:
        super().__init__(round, lambda **_: None)
        self.is_at_work = self.is_turning = False
        self.alarm = math.inf
        self._clock = clock
        self._is_awake = False
        self._is_over = False

    def go_round(self) -> None:
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
        """True if it is awake or its alarm has passed."""
        is_free = not self._is_over and not self.is_at_work
        return is_free and (self._is_awake or self.alarm <= self._clock.now)

    # -- as a thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Run rounds until the engine is open and there is no work; a real start blocks as long."""
        self._is_awake = True
        while self._is_awake:
            self.go_round()

    def wake(self) -> None:
        self._is_awake = True

    def join(self, timeout: float | None = None) -> None:
        """Run the last round, unless a round is running, which cannot be waited for."""
        if not self.is_at_work and not self._is_over:
            self.go_round()

    def is_alive(self) -> bool:
        return not self._is_over

    def open(self, open_engine: Callable[[], Engine]) -> Engine:
        return open_engine()
