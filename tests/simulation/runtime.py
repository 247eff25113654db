"""A whole runtime without threads, run by one seeded scheduler.

It has the real batcher, cache, answers and rounds of the engine's thread. The engine and the event loops
are simulated. Streams compare each delta with the expected completion.

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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from genrt.lm import AsyncLM
from genrt.questions.arguments import Adapter
from genrt.questions.completions import Completion, CompletionRequest, Delta
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.ask import Asker
from genrt.runtime.batcher import Batcher, Entry, Waiter
from genrt.runtime.cache import RowCache
from genrt.runtime.streams import Stream
from genrt.runtime.thread import EngineThread
from genrt.testing.simulation import VirtualRounds
from genrt.testing.virtual_loop import VirtualClock, VirtualLoop
from tests.simulation.engine import (
    Faults,
    HashedModel,
    Record,
    SimulatedEngine,
    Violation,
    is_right,
)


class WatchedStream(Stream):
    """A stream that compares each delta with the expected completion.

    A simulation that observes more overrides ``began``, ``whole`` and ``left``.
    """

    def __init__(self, stream: Stream, runtime: SimulatedRuntime, timeout: float | None) -> None:
        super().__init__(stream._deltas, stream._flow, stream._request)
        self.runtime = runtime
        self.timeout = timeout
        self._number: int | None = None
        self._is_over = False
        self._start = self._text_start = 0

    async def __anext__(self) -> Delta:
        if self._number is None:
            self._number = next(self.runtime.numbers)
            self.runtime.record.add("streamed", self._number, self._request)
            self.began()
        self.runtime.unanswered[self._number] = asyncio.get_running_loop()
        try:
            delta = await super().__anext__()
        except StopAsyncIteration:
            self._end("read")
            raise
        except GeneratorExit:  # garbage-collected with its loop, at any moment
            raise
        except BaseException as error:
            self._end(type(error).__name__)
            self.left(error)
            raise
        finally:
            self.runtime.unanswered.pop(self._number, None)
        self._check(delta)
        return delta

    async def aclose(self) -> None:
        await super().aclose()
        if self._end("left"):
            self.left(GeneratorExit())

    def __del__(self) -> None:
        self._end("dropped")

    def began(self) -> None:
        """Note that the request is about to be sent."""

    def whole(self, completion: Completion) -> None:
        """Note that the last delta has come."""

    def left(self, error: BaseException) -> None:
        """Note the error that ended the stream before its last delta."""

    def _end(self, how: str) -> bool:
        """Record the end; return whether the stream had begun and had not ended before."""
        if self._number is None or self._is_over:
            return False
        self._is_over = True
        self.runtime.record.add(how, self._number)
        return True

    def _check(self, delta: Delta) -> None:
        request, wrong = self._request, self.runtime.record.violated
        version = self._flow.weights_version
        numbers = self.runtime.weights
        expected = cast("Completion", self.runtime.model.answer(request, numbers[version]))
        start, end = self._start, self._start + len(delta.token_ids)
        text_start, text_end = self._text_start, self._text_start + len(delta.text)
        if (delta.start, delta.text_start) != (start, text_start):
            wrong(f"{request} has a gap: at {start} tokens and {text_start} letters came {delta}")
        self._start, self._text_start = end, text_end
        if (
            delta.token_ids != expected.token_ids[start:end]
            or delta.text != expected.text[text_start:text_end]
            or delta.logprobs != expected.logprobs[start:end]
            or delta.top_logprobs != expected.top_logprobs[start:end]
        ):
            wrong(f"{request} was brought what is not its own: {delta} of {expected}")
        partial, so_far = self.partial, (expected.text[:text_end], expected.top_logprobs[:end])
        if (partial.text, partial.top_logprobs) != so_far:
            wrong(f"{request} has read {partial}, not {so_far}")
        if delta.finish_reason is None:
            if end == start and text_end == text_start:
                wrong(f"{request} was brought nothing")
            return
        self._end("whole")
        ends = (delta.finish_reason, delta.stop_reason)
        is_whole = end == len(expected.token_ids) and text_end == len(expected.text)
        if not is_whole or ends != (expected.finish_reason, expected.stop_reason):
            wrong(f"{request} has ended in {delta}, which is not the end of {expected}")
        if self.completion is None or not self.runtime.is_right(request, self.completion, version):
            wrong(f"{request} has ended with {self.completion}, not with {expected}")
        self.whole(self.completion)


T = TypeVar("T")

IDLE_ROUNDS = 100_000
"""The number of events in a row after which a simulation counts as stuck."""


class ObservedBatcher(Batcher):
    """A batcher that tells its runtime of questions and turns."""

    def __init__(self, cache: RowCache, runtime: SimulatedRuntime, **options: Any) -> None:
        super().__init__(cache, **options)
        self._runtime = runtime

    def _register(self, waiter: Waiter) -> list[Entry]:
        self._runtime.registering(waiter)
        return super()._register(waiter)

    def leave(self, waiter: Waiter) -> None:
        self._runtime.leaving(waiter)
        super().leave(waiter)

    def _take(self) -> tuple[list[Request], list[Request], list[Adapter], list[Waiter]]:
        taken = super()._take()
        self._runtime.taken(*taken[:2])
        return taken


class SimulatedRuntime:
    """One runtime and the event loops that use it.

    ``random`` decides everything that is not specified. The options are those of ``genrt.load``. With
    ``restarts`` a new engine replaces one that died. Simulations that observe more override ``ask``, the
    methods that the batcher calls, and the types of the parts.
    """

    engine_type: type[SimulatedEngine] = SimulatedEngine
    stream_type: type[WatchedStream] = WatchedStream
    on_interrupt: Callable[[VirtualLoop], None]

    def __init__(
        self,
        random: random.Random,
        model: HashedModel,
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
        self.unanswered: dict[int, asyncio.AbstractEventLoop] = {}
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
        self.lm._ask = self.ask
        self.lm._populations.asker = cast("Asker", self)  # it has the two methods of an Asker
        self.lm._stream = self.stream

    def make_cache(self, max_bytes: int) -> RowCache:
        """Return the cache."""
        return BusyCache(max_bytes, self)

    def make_batcher(self, cache: RowCache, **options: Any) -> Batcher:
        """Return the batcher."""
        time = self.clock.time
        return ObservedBatcher(cache, self, clock=time, **options)

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
    ) -> VirtualRounds:
        self.rounds = VirtualRounds(round, self.clock)
        return self.rounds

    # -- questions ----------------------------------------------------------------------------

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Ask as an AsyncLM does, and check and record the answers."""
        number, asked_at = next(self.numbers), self.lm.weights_version
        self.unanswered[number] = asyncio.get_running_loop()
        self.record.add("asked", number, *requests)
        try:
            results = await self._ask(requests, stacked=stacked, timeout=timeout)
        except GeneratorExit:  # garbage-collected with its loop, at any moment
            raise
        except BaseException as error:
            self.record.add(type(error).__name__, number)
            raise
        finally:
            self.unanswered.pop(number, None)
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

    def ask_sync(self, requests: Sequence[Request], **options: Any) -> list[Result]:
        """Refuse a caller that blocks: there is one thread."""
        raise NotImplementedError(f"nobody may block for {requests} in a simulation")

    def stream(self, request: CompletionRequest, *, timeout: float | None = None) -> WatchedStream:
        """Return the stream of an AsyncLM, with checks of its deltas."""
        return self.stream_type(self._stream(request, timeout=timeout), self, timeout)

    # -- called by the batcher ------------------------------------------------------------------

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
        try:
            loop.run_one()
        except KeyboardInterrupt:
            self.on_interrupt(loop)

    # -- what must hold -----------------------------------------------------------------------

    def check_rest(self) -> None:
        """Check what can be checked when no event is possible; ``CheckedRuntime`` has more."""

    def check_nothing_is_left(self) -> None:
        """Raise a Violation unless all callers have their answers and the batcher is empty. Call it when
        no event is possible."""
        for loop in self.loops:
            self.check_reports(loop)
        waiting = [number for number, loop in self.unanswered.items() if not loop.is_closed()]
        if waiting:
            raise Violation(f"nothing can happen any more, but nobody told {waiting}")
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
