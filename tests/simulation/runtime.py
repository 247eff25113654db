"""A whole runtime without threads, run by one seeded scheduler, with a ledger of all questions.

It has the real batcher, cache, answers and rounds of the engine's thread. The engine and the event loops
are simulated. Streams compare each delta with the expected completion; the batcher and the engine report
to the ledger, unless the weights are replaced, which it does not follow.

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
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from genrt.engines.protocol import Finished
from genrt.errors import WAS_CLOSED, Closed, EngineDied, GenrtError, NotFinite
from genrt.lm import AsyncLM
from genrt.questions.arguments import Adapter
from genrt.questions.completions import Completion, CompletionRequest, Delta, TextRequest
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.ask import Asker
from genrt.runtime.batcher import Batcher, Entry, Waiter
from genrt.runtime.cache import RowCache
from genrt.runtime.streams import Stream
from genrt.runtime.thread import EngineThread
from genrt.testing.simulation import VirtualRounds
from genrt.testing.virtual_loop import VirtualClock, VirtualLoop
from tests.inside import adapters_of, calls_of, in_progress, kept_by
from tests.simulation.engine import (
    Faults,
    HashedModel,
    Record,
    SimulatedEngine,
    Violation,
    is_right,
)
from tests.simulation.ledger import Ledger, Question


class WatchedStream(Stream):
    """A stream that compares each delta with the expected completion, and tells the ledger."""

    question: Question | None = None

    def __init__(self, stream: Stream, runtime: SimulatedRuntime, timeout: float | None) -> None:
        super().__init__(stream._deltas, stream._flow, stream._request)
        self.runtime = runtime
        self.timeout = timeout
        self._number: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = False
        self._start = self._text_start = 0

    async def __anext__(self) -> Delta:
        if self._number is None:
            self._number = next(self.runtime.numbers)
            self._loop = asyncio.get_running_loop()
            self.runtime.record.add("streamed", self._number, self._request)
            self.question = self.runtime.ledger.streamed(self._request, self.timeout)
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
            self._left(error)
            raise
        finally:
            self.runtime.unanswered.pop(self._number, None)
        self._check(delta)
        return delta

    async def aclose(self) -> None:
        await super().aclose()
        if self._end("left"):
            self._left(GeneratorExit())

    def __del__(self) -> None:
        if self._loop is None or not self._loop.is_closed():  # else it is collected at any moment
            self._end("dropped")
        if self.question is not None:
            self.runtime.ledger.dropped(self.question)

    def _left(self, error: BaseException) -> None:
        if self.question is not None:
            self.runtime.ledger.left(self.question, error)

    def _end(self, how: str) -> bool:
        """Record the end; return whether the stream had begun and had not ended before."""
        if self._number is None or self._is_over:
            return False
        self._is_over = True
        self.runtime.record.add(how, self._number)
        return True

    def _check(self, delta: Delta) -> None:
        request, wrong = self._request, self.runtime.record.violated
        version = self.partial.weights_version
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
        if self.question is not None:
            self.runtime.ledger.answered(self.question, [self.completion])


T = TypeVar("T")

IDLE_ROUNDS = 100_000
"""The number of events in a row after which a simulation counts as stuck."""


class WatchedBatcher(Batcher):
    """A batcher that tells the ledger what it does, and records its turns, ends and beginnings."""

    def __init__(self, cache: RowCache, runtime: SimulatedRuntime, **options: Any) -> None:
        self._runtime = runtime
        self._ledger, self._record = runtime.ledger, runtime.record
        lock = cast("threading.RLock", CheckedLock(self._record))
        super().__init__(cache, lock=lock, **options)

    def _register(self, waiter: Waiter) -> list[Entry]:
        self._ledger.registering(waiter)
        return super()._register(waiter)

    def cancel(self, waiter: Waiter) -> None:
        self._ledger.leaving(waiter)
        super().cancel(waiter)

    def _take(self) -> tuple[list[Request], list[Request], list[Adapter], list[Waiter]]:
        """Take a flush; loops run during the rest of the turn."""
        taken = super()._take()
        flush, withdrawn = taken[:2]
        self._runtime.rounds.is_turning = True
        if withdrawn:
            self._record.add("withdrawn", *withdrawn)
            self._ledger.withdrawn(withdrawn)
        if flush:
            self._record.add("taken", *flush)
            self._ledger.taken(flush)
        return taken

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
        was_closed = self.closed is not None
        if not was_closed and not self.lock._is_owned():  # type: ignore[attr-defined]
            self._ledger.closed(reason or Closed(WAS_CLOSED))
        done = super().close(reason)
        if done and not was_closed:
            self._record.add("closed", self.closed)
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
        # A later call, for rows of others, may have forgotten it, or failed with another error.
        row = request.row if isinstance(request, ReadRequest) else request
        return row in self.was_unforgotten and self.raised(error.__cause__ or error)

    def _block(self, rows: int) -> Tensor:
        self._blocks.append(super()._block(rows))
        return self._blocks[-1]


class SimulatedRuntime:
    """One runtime and the event loops that use it.

    ``random`` decides everything that is not specified. The options are those of ``genrt.load``. With
    ``restarts`` a new engine replaces one that died. With ``updates`` there is no ledger.
    """

    on_interrupt: Callable[[VirtualLoop], None]

    def __init__(
        self,
        random: random.Random,
        model: HashedModel,
        *,
        faults: Faults,
        cache_bytes: int,
        seed: int,
        updates: bool = False,
        **options: Any,
    ) -> None:
        self.random = random
        self.updates = updates
        self.model = model
        self.faults = faults
        self.record = Record()
        self.clock = VirtualClock()
        self.loops: list[VirtualLoop] = []
        self.stopped: set[VirtualLoop] = set()
        self._lost: list[asyncio.Task[Any]] = []  # of closed loops
        self.unanswered: dict[int, asyncio.AbstractEventLoop] = {}
        self.told: list[tuple[type[GenrtError], str]] = []  # the errors of questions
        self.weights = {0: 0}  # the weights' number for each version
        self.numbers: Iterator[int] = itertools.count()
        self._engine_share = random.choice([0.05, 0.3, 0.7])
        self._is_meanwhile = False
        self._most_meanwhile = random.choice([0, 2, 8])
        self.ledger: Any = Silent() if updates else Ledger(self)
        self.cache = BusyCache(cache_bytes, self)
        self.thread = EngineThread(
            self._open_engine,
            self.cache,
            make_batcher=self._make_batcher,
            make_thread=self._make_rounds,
            **options,
        )
        self.batcher = cast("WatchedBatcher", self.thread.batcher)
        self.lm = AsyncLM(self.thread, self.cache, self.thread.engine, seed=seed)
        self._ask, self._stream, self.bound = self.lm._ask, self.lm._stream, self.lm._bound
        self.lm._ask = self.ask
        self.lm._populations.asker = cast("Asker", self)  # it has the methods of an Asker
        self.lm._stream = self.stream

    def _make_batcher(self, cache: RowCache, **options: Any) -> Batcher:
        options |= {"clock": self.clock.time}
        return WatchedBatcher(cache, self, **options)

    def _open_engine(self) -> SimulatedEngine:
        self.engine = CheckedEngine(
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
        requests = [*requests]
        question = self.ledger.asked(requests, stacked, timeout)
        number, asked_at = next(self.numbers), self.lm.weights_version
        self.unanswered[number] = asyncio.get_running_loop()
        self.record.add("asked", number, *requests)
        try:
            results = await self._ask(requests, stacked=stacked, timeout=timeout)
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # collected with its loop, at any moment
                self.record.add(type(error).__name__, number)
            if isinstance(error, GenrtError):
                self.told.append((type(error), str(error)))
            self.ledger.left(question, error)
            raise
        finally:
            self.unanswered.pop(number, None)
        self.record.add("answered", number)
        found = [*zip(requests, results[0] if stacked else results, strict=True)]
        versions = range(asked_at, self.lm.weights_version + 1)
        # Texts of one question may begin before and after an update that lets texts go on.
        are_texts = all(isinstance(each, TextRequest) for each in requests)
        for pairs in [[each] for each in found] if are_texts else [found]:
            if any(all(self.is_right(*pair, version) for pair in pairs) for version in versions):
                continue
            self.record.violated(f"{requests} were answered wrongly, or by a mixture: {results}")
        self.ledger.answered(question, results)
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
        return WatchedStream(self._stream(request, timeout=timeout), self, timeout)

    # -- loops --------------------------------------------------------------------------------

    def open_loop(self) -> VirtualLoop:
        """Return a new event loop, which runs with the others until it is stopped or closed."""
        loop = VirtualLoop(self.clock, before_delivery=self.meanwhile)
        self.loops.append(loop)
        return loop

    def close_loop(self, loop: VirtualLoop) -> None:
        """Close a loop, whatever is pending on it. What was cancelled there and can't run any more may be
        collected at any moment: it is, where that is worst, while the batcher's lock is held."""
        self.check_reports(loop)
        tasks = asyncio.all_tasks(loop)
        self.forget_loop(loop)
        with self.batcher.lock:
            for task in tasks:
                if task.cancelling():
                    coroutine_of(task).close()

    def forget_loop(self, loop: VirtualLoop) -> None:
        """Close a loop without checking its error reports."""
        for task in asyncio.all_tasks(loop):
            self._lost.append(task)
            coroutine = coroutine_of(task)
            if not inspect.iscoroutine(coroutine):
                coroutine.close()  # the cleanup of an asynchronous generator that was collected
            elif inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # a coroutine that never ran is not an error
        loop.close()
        self.loops.remove(loop)
        self.stopped.discard(loop)
        self.ledger.loop_closed(loop)

    def collect_lost(self) -> None:
        """Close the coroutines of closed loops, as a garbage collector does some day."""
        for task in self._lost:
            coroutine_of(task).close()

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
        """Raise a Violation unless everyone was told, and everything counted, once nothing can happen any
        more."""
        if any(
            each in self.loops and each not in self.stopped for each in self.unanswered.values()
        ):
            raise Violation(f"nothing can happen any more, but nobody told {self.unanswered}")
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
        left = self.engine.in_progress.keys() - self.engine.unforgotten.keys()
        s = self.batcher.statistics()
        if left or s.queued + s.in_flight + s.waiting:
            raise Violation(f"nobody waits, but there is something to do: {left}, {self.batcher}")
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
            number = self.weights[self.lm.weights_version]
            if not torch.equal(row, self.model.answer(request, number)):
                raise Violation(f"the cached row of {request} is {row}")
            is_loaded = request.adapter is None or request.adapter in self.engine.adapters
            if self.thread.alive and not is_loaded:
                raise Violation(f"{request} is cached, but its adapter is gone")
        s = self.cache.statistics()
        held = sum(row.untyped_storage().nbytes() for row in rows.values())
        if not s.bytes == held <= s.max_bytes or s.rows != len(rows):
            raise Violation(f"{held} bytes are held in {len(rows)} rows, but {s}")

    def check_reports(self, loop: VirtualLoop) -> None:
        """Raise a Violation if this loop's exception handler was called."""
        if loop.reports:
            raise Violation(f"an event loop's exception handler was told {loop.reports}")


def coroutine_of(task: asyncio.Task[Any]) -> Coroutine[Any, Any, Any]:
    """Return the coroutine of a task."""
    return cast("Coroutine[Any, Any, Any]", task.get_coro())


class BusyCache(RowCache):
    """A row cache that lets loops run before and after it stores rows, and tells the ledger."""

    def __init__(self, max_bytes: int, runtime: SimulatedRuntime) -> None:
        super().__init__(max_bytes)
        self.runtime = runtime

    def put_all(self, rows: dict[LogprobsRequest, torch.Tensor]) -> dict[Request, GenrtError]:
        self.runtime.ledger.settling()
        self.runtime.meanwhile()
        errors = super().put_all(rows)
        self.runtime.meanwhile()
        self.runtime.ledger.settled()
        return errors


class Silent:
    """Takes the place of a ledger, and ignores what it is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None
