"""The batcher turns many awaits into few engine calls.

States of a request, each an ``Entry`` from the question that queued it to its end:
    gathered   its event loop may still add requests in this pass.
    ready      the next flush takes it if there is room.
    in flight  the engine has it.
    withdrawn  in flight without a waiter. The next turn cancels it unless another question joins it.
A question *waits in line* without an entry while the queue is full or a ``Barrier`` is raised.

Rules:
    State changes under one lock, held for dictionary work on changed entries. Only a close, a barrier and
    a restart touch everything. Only ``turn`` calls the engine.
    A turn with requests in flight always steps. Answers without a forward are delivered before the step.
    A request ends once. Requests that ran out of memory together are sent again in smaller flushes.
    A cancelled waiter affects no other waiter. A request is withdrawn with its last waiter.
    A row is cached only before its entry ends. A question checks cache and entries under the lock.
    The requests of a question enter the queue together. Clients take turns, one question each. A question
    larger than the queue enters an empty queue.
    Every waiter gets its own storage or exception object. A turn calls each event loop once.
    References are dropped after the lock is released: finalizers may run arbitrary code.
    The lock is reentrant because finalizers and signal handlers may interrupt its holder. They change no
    state: in one, ``close`` returns False and ``cancel_soon`` only notes the waiter.

The *weight* of a request is the number of sequences that it asks about.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from genrt.engines.protocol import Finished, failure, survived
from genrt.errors import (
    WAS_CLOSED,
    Closed,
    EngineFailed,
    GenrtError,
    InvalidRequest,
    OutOfMemory,
    StreamCut,
)
from genrt.questions.arguments import Adapter
from genrt.questions.completions import Streamed, TextRequest
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import follow, resolve
from genrt.runtime.statistics import BatcherStatistics
from genrt.runtime.streams import StreamBuffer, Streams
from genrt.tokens.rows import separate_copies, stacked

T = TypeVar("T")

MAX_PASSES = 100
"""The maximum passes of a loop that gather requests, if every pass brings a question."""

WAITERS_A_PASS = 256
"""The maximum waiters of a loop resolved in one pass, because their tasks take time too."""

RETURN_SHARE = 0.1
"""The maximum wait for a loop's next question, as a share of the average step. Other requests in flight
lose that time; a sampler asks again within about half a millisecond."""

OLD_STEPS = 0.75
"""The weight of earlier steps in the average duration of a step."""

GOOD_STEPS = 8
"""The number of good steps after which more is sent again. A step out of memory is costly."""

ONE_STEP = LogprobsRequest | ReadRequest | PopulationDraw
"""Requests that one step answers. A text takes many."""

BROKEN = "the engine was restarted, replaced or closed in the middle of this: begin again"

Outcome: TypeAlias = list[Result] | GenrtError
"""The value or the error of a waiter's future."""

Pending: TypeAlias = Literal["finish", "restart", "continue"]
"""Whether questions asked before a barrier are answered first, or restarted after it. With "continue",
texts go on after it; other questions are answered first."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One awaiting caller of one or more requests, on an event loop or (``loop is None``) a thread.

    Attributes:
        flow: the buffer of a stream, which has one request.
        results: the results in the order of the requests.
        missing: the number of distinct requests without a result; of all requests while it waits in line.
        client: the loop or thread while the question waits in line.
    """

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop | None
    future: asyncio.Future[list[Result]] | concurrent.futures.Future[list[Result]]
    stacked: bool = False
    flow: StreamBuffer[Any] | None = None
    results: list[Result | None] = field(default_factory=list)
    missing: int = 0
    client: Hashable = None


@dataclass(slots=True, eq=False)
class Entry:
    """One request on its way, with its waiters and the places of the request in each question."""

    request: Request
    waiters: dict[Waiter, list[int]]
    flow: StreamBuffer[Any] | None = None
    in_flight: bool = False


class Barrier:
    """Makes later questions wait until it is lifted.

    Args:
        pending: whether earlier questions are answered first, or restarted or continued after the
            barrier.
        refusal: the error that later questions raise instead of waiting.

    Attributes:
        drained: resolves once every earlier question has ended, except texts that continue, or to the
            error that prevents it.
        broken: resolves to an error if a restart or a close breaks the barrier.
        is_lifted: true once the barrier has ended: it is never raised again. Set under the lock.
    """

    def __init__(self, pending: Pending, refusal: GenrtError | None = None) -> None:
        self.pending = pending
        self.refusal = refusal
        self.drained: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.broken: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.is_lifted = False

    async def wait(self) -> None:
        """Wait until ``drained``. Cancelling affects only this caller."""
        await asyncio.wrap_future(follow(self.drained))

    async def unless_broken(self, work: Awaitable[T]) -> T:
        """Return the result of the work; if the barrier is broken, cancel it and raise EngineFailed."""
        task = asyncio.ensure_future(work)
        broken = asyncio.wrap_future(follow(self.broken))
        try:
            either: set[asyncio.Future[Any]] = {task, broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
            return await task
        finally:
            broken.cancel()
            task.cancel()
            # Retrieve an error of the work: asyncio would log it.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def break_with(self, reason: GenrtError) -> None:
        """End the barrier with errors for everything that waits for it or works behind it."""
        resolve(self.drained, reason.fresh())
        resolve(self.broken, EngineFailed(BROKEN))


@dataclass(slots=True, eq=False)
class _Loop:
    """The waiters and the gathered requests of one event loop, and whether it asks again at once.

    Attributes:
        gathered: the entries added since the loop was last idle; ``None`` without a scheduled pass.
        answered_at: the time of the last answer, unless the loop has asked since.
        returns: whether a question followed its last answer in time.
    """

    waiters: dict[Waiter, None] = field(default_factory=dict)
    gathered: dict[Entry, None] | None = None
    weight: int = 0
    questions: int = 0
    passes: int = 0
    answered_at: float | None = None
    returns: bool = False


class Batcher:
    """Collects the questions of all callers into flushes for one engine.

    Args:
        cache: answers before the engine does, and stores computed rows.
        max_batch_size: the maximum weight of a flush, by default unbounded. Ready requests of this weight
            do not wait for more.
        max_wait_seconds: how long ready requests wait for more.
        max_queued_requests, max_queued_bytes: the bounds of the queue; later questions wait in line.
        wake: called from any thread when ``turn`` may have something to do.
        clock, lock: for simulations.

    Attributes:
        weights_version: the version of the weights for new questions.
        barriers: the raised barriers. Read without the lock.
        closed: the reason to refuse every question, once there is one. Read without the lock.
        keeps_adapters: whether retired adapters stay in the engine: while an update or a sleep owns it.
    """

    def __init__(
        self,
        cache: RowCache,
        *,
        max_batch_size: int | None = None,
        max_wait_seconds: float = 0.0,
        max_queued_requests: int = sys.maxsize,
        max_queued_bytes: int = sys.maxsize,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        lock: threading.RLock | None = None,
    ) -> None:
        self._cache, self._wake, self._clock = cache, wake, clock
        self.lock = lock or threading.RLock()
        self.closed: GenrtError | None = None
        self._undelivered: list[tuple[Waiter, Outcome]] = []  # after an interrupted close
        self._counted: Counter[str] = Counter()  # by names of BatcherStatistics
        self._entries: dict[Request, Entry] = {}
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()
        self._gathering: dict[_Loop, None] = {}  # the loops with gathered entries
        self._cancelled: deque[Waiter] = deque()
        # The queue: its bounds, its size, and the waiters in line by client.
        self._max_queued = max_queued_requests, max_queued_bytes
        self._queued = self._queued_bytes = 0
        self._line: OrderedDict[Hashable, OrderedDict[Waiter, None]] = OrderedDict()
        # Ready entries, oldest first, with their weights; when the oldest is due.
        self._max_batch_size = max_batch_size or sys.maxsize
        self._max_wait_seconds = float(max_wait_seconds)
        self._ready: OrderedDict[Entry, int] = OrderedDict()
        self._ready_weight, self._due = 0, 0.0
        # Entries in flight, with their weights; their bound after running out of memory.
        self._flight: dict[Entry, int] = {}
        self._flight_weight, self.most_in_flight, self._good_steps = 0, sys.maxsize, 0
        self._withdrawn: dict[Entry, None] = {}
        self._step_seconds = 0.0
        self._returning: dict[_Loop, None] = {}
        self.streams = Streams(self.lock, clock)
        # The number of requests of each adapter; the adapters of questions that ask later; the adapters
        # to remove without any.
        self._bound: Counter[Adapter] = Counter()
        self._held: dict[object, Adapter] = {}
        self._retired: list[Adapter] = []
        self.weights_version = 0
        self.barriers: dict[Barrier, None] = {}
        self._is_draining = False  # a barrier is raised whose ``drained`` is unresolved
        self.keeps_adapters = False

    # -- asking and cancelling: event loops and threads --------------------------------------------

    def join(self, waiter: Waiter) -> list[Result] | None:
        """Register the waiter, or return its results if the cache has them all. Raises Closed, or the
        refusal of a barrier."""
        requests = waiter.requests
        with self.lock:
            if self.closed is not None:
                raise self.closed.fresh()
            try:
                if self.barriers and requests:
                    for barrier in self.barriers:
                        if barrier.refusal is not None:
                            raise barrier.refusal.fresh()
                    self._wait_in_line(waiter)
                    wake = False
                elif self._must_wait(waiter):
                    self._wait_in_line(waiter)
                    self._send_all_gathered()
                    wake = bool(self._ready)
                else:
                    wake = self._gather(waiter.loop, self._register(waiter))
                lacks_something = waiter.missing  # a failure sets it to 0 later
            except BaseException:  # an interrupt, at any line
                self._recount()
                raise
        if wake:
            self._wake()
        if lacks_something:
            return None
        [(_, outcome)] = outcomes([waiter])
        if isinstance(outcome, GenrtError):
            raise outcome
        return outcome

    def _must_wait(self, waiter: Waiter) -> bool:
        """Bind a question to the present weights; return whether it needs room and there is no room, or
        others wait already."""
        self._bind_to_weights(waiter)
        requests = waiter.requests
        if not self._line and (not self._queued or self._fits(requests)):
            return False
        return not all(each in self._entries or each in self._cache for each in requests)

    def _bind_to_weights(self, waiter: Waiter) -> None:
        version = self.weights_version
        if waiter.requests and waiter.requests[0].weights_version != version:
            waiter.requests = [each.of_weights(version) for each in waiter.requests]
        if waiter.flow is not None:
            waiter.flow.weights_version = version

    def _fits(self, requests: Sequence[Request]) -> bool:
        weight, nbytes = _size(requests)
        max_requests, max_bytes = self._max_queued
        return self._queued + weight <= max_requests and self._queued_bytes + nbytes <= max_bytes

    def _register(self, waiter: Waiter) -> list[Entry]:
        """Find or join each request, under the lock; return the entries to send."""
        results: list[Result | None] = [None] * len(waiter.requests)
        waiter.results = results
        entries, counted, borrow, send = self._entries, self._counted, self._cache.borrow, []
        for place, request in enumerate(waiter.requests):
            weight = request.weight
            counted["questions"] += weight
            if isinstance(request, LogprobsRequest) and (row := borrow(request)) is not None:
                results[place] = row
                counted["cached"] += 1
                continue
            entry = entries.get(request)
            if entry is None:
                waiter.missing += (
                    1  # first: an interrupt after it removes the waiter from its entry
                )
                entries[request] = entry = Entry(request, {waiter: [place]}, waiter.flow)
                self._queued += weight
                self._queued_bytes += request.nbytes
                if (adapter := request.adapter) is not None:
                    self._bound[adapter] += 1
                send.append(entry)
                continue
            counted["deduplicated"] += weight
            if waiter in entry.waiters:
                entry.waiters[waiter].append(place)
                continue
            waiter.missing += 1
            entry.waiters[waiter] = [place]
            self._withdrawn.pop(entry, None)
            if not entry.in_flight and entry not in self._ready:
                send.append(entry)
        if waiter.missing and waiter.loop is not None:
            self._loop(waiter.loop).waiters[waiter] = None
        return send

    def _loop(self, loop: asyncio.AbstractEventLoop) -> _Loop:
        found = self._loops.get(loop)
        if found is None:
            found = self._loops[loop] = _Loop()
        return found

    def _gather(self, loop: asyncio.AbstractEventLoop | None, entries: list[Entry]) -> bool:
        """Gather entries until their running loop is idle; send the entries of a thread, and a full
        flush, at once. Return whether to wake the engine's thread."""
        if loop is None or not entries:
            return self._make_ready(entries)
        asking = self._loops[loop]
        if asking.gathered is None:
            loop.call_soon(self._look_for_more, loop, asking, 0)  # first: it may be interrupted
            asking.gathered, asking.weight, asking.questions, asking.passes = {}, 0, 0, 0
        asking.questions += 1
        self._gathering[asking] = None
        for entry in entries:
            if entry not in asking.gathered:
                asking.gathered[entry] = None
                asking.weight += entry.request.weight
        return asking.weight >= self._max_batch_size and self._send_gathered(asking)

    def _look_for_more(self, loop: asyncio.AbstractEventLoop, asking: _Loop, seen: int) -> None:
        """Run once a pass of the loop until a pass brings no question. ``seen`` is 0 in the first pass: a
        second one always follows, after the tasks that woke together with the asking one."""
        try:
            with self.lock:
                asking.passes += 1
                if asking.questions != seen and asking.passes < MAX_PASSES:
                    loop.call_soon(self._look_for_more, loop, asking, asking.questions)
                    return
                wake = self._end_gathering(asking)
            if wake:
                self._wake()
        except BaseException:  # an interrupt: no other call would end the gathering
            with self.lock:
                self._end_gathering(asking)
            self._wake()
            raise

    def _end_gathering(self, asking: _Loop) -> bool:
        """Send the gathered entries of an idle loop, and note whether it asks again right after answers.
        Under the lock."""
        wake = self._send_gathered(asking)
        asking.gathered = None
        if asking.answered_at is not None:
            elapsed = self._clock() - asking.answered_at
            asking.returns = elapsed <= RETURN_SHARE * self._step_seconds
            asking.answered_at = None
            self._returning.pop(asking, None)
        return wake

    def _send_all_gathered(self) -> None:
        """Send the entries of every loop at once, under the lock."""
        for asking in [*self._gathering]:
            self._send_gathered(asking)

    def _send_gathered(self, asking: _Loop) -> bool:
        added = self._make_ready(asking.gathered or ())
        # After they are ready: an interrupt in between sends them once more, which changes nothing.
        if asking.gathered:
            asking.gathered, asking.weight = {}, 0
        self._gathering.pop(asking, None)
        return added

    def _make_ready(self, entries: Iterable[Entry]) -> bool:
        """Make entries ready that have waiters and are not in flight; return whether there are any."""
        ready, added = self._ready, False
        if not ready:
            self._due = self._clock() + self._max_wait_seconds
            self._ready_weight = 0  # an interrupt may have corrupted it
        for entry in entries:
            if entry.waiters and not entry.in_flight:
                added = True
                if entry not in ready:
                    ready[entry] = weight = entry.request.weight
                    self._ready_weight += weight
        return added

    def cancel(self, waiter: Waiter) -> None:
        """Cancel the question of a waiter with missing results. In the next turn, the engine cancels
        requests without another waiter."""
        with self.lock:
            self._withdraw(waiter)
        self._wake()  # to cancel requests, to remove an adapter, or to admit the next in line

    def cancel_soon(self, waiter: Waiter) -> None:
        """Cancel the question at the next turn. Finalizers call this, so it takes no lock."""
        self._cancelled.append(waiter)
        self._wake()

    def _withdraw(self, waiter: Waiter) -> None:
        """Withdraw and count the question of a waiter that still lacks results."""
        if waiter.missing:
            self._counted["cancelled"] += 1
            self._drop(waiter)

    def _drop(self, waiter: Waiter) -> None:
        """Remove a waiter from all its requests, under the lock."""
        waiter.missing = 0
        self._forget_waiter(waiter)
        if waiter.client is not None:
            self._leave_line(waiter)
            return
        for request, result in zip(waiter.requests, waiter.results, strict=False):
            entry = self._entries.get(request) if result is None else None
            if entry is None or entry.waiters.pop(waiter, None) is None or entry.waiters:
                continue
            if entry.in_flight:
                self._withdrawn[entry] = None
            else:
                self._end(entry)
                self._ready_weight -= self._ready.pop(entry, 0)
                self._leave_queue(entry.request)

    def _end(self, entry: Entry) -> None:
        """Remove an entry that has ended, under the lock."""
        request = entry.request
        del self._entries[request]
        self._land(entry)
        if (adapter := request.adapter) is not None:
            self._unbind(adapter)

    def _land(self, entry: Entry) -> None:
        """Remove an entry from the flight, if it is there, under the lock."""
        self._flight_weight -= self._flight.pop(entry, 0)
        self._withdrawn.pop(entry, None)
        if entry.flow is not None:
            self.streams.discard(cast("Streamed", entry.request), entry.flow)

    def _unbind(self, adapter: Adapter) -> None:
        self._bound[adapter] -= 1
        if not self._bound[adapter]:
            del self._bound[adapter]

    def _leave_queue(self, request: Request) -> None:
        self._queued -= request.weight
        self._queued_bytes -= request.nbytes

    def _recount(self) -> None:
        """Recount queued requests and bound adapters after an interrupt, under the lock."""
        queued = [request for request, entry in self._entries.items() if not entry.in_flight]
        self._queued, self._queued_bytes = _size(queued)
        in_line = (request for waiter in self._in_line() for request in waiter.requests)
        named = [r.adapter for r in (*self._entries, *in_line) if r.adapter is not None]
        self._bound = Counter(named)

    # -- waiting in line ----------------------------------------------------------------------

    def _in_line(self) -> Iterator[Waiter]:
        return (waiter for waiters in self._line.values() for waiter in waiters)

    def _wait_in_line(self, waiter: Waiter) -> None:
        """Put a question behind the others of the same client: a loop or thread."""
        waiter.missing, waiter.results = len(waiter.requests), []
        waiter.client = client = waiter.loop or threading.get_ident()
        try:
            self._line.setdefault(client, OrderedDict())[waiter] = None
        except BaseException:  # an interrupt
            self._leave_line(waiter)
            raise
        for request in waiter.requests:
            if request.adapter is not None:
                self._bound[request.adapter] += 1
        if waiter.loop is not None:
            self._loop(waiter.loop).waiters[waiter] = None

    def _leave_line(self, waiter: Waiter) -> None:
        client, waiter.client = waiter.client, None
        waiters = self._line.get(client, OrderedDict())
        is_in_line = waiters.pop(waiter, self) is None
        if not waiters:
            self._line.pop(client, None)
        for request in waiter.requests if is_in_line else ():
            if request.adapter is not None:
                self._unbind(request.adapter)

    def _first_in_line(self) -> Waiter | None:
        """Return the next waiter in line if its question may enter the queue."""
        if not self._line or self.barriers:
            return None
        waiter = next(iter(next(iter(self._line.values()))))
        return waiter if not self._queued or self._fits(waiter.requests) else None

    def _admit(self) -> list[Waiter]:
        """Register waiters in line while there is room; return waiters that the cache answers."""
        answered: list[Waiter] = []
        while (waiter := self._first_in_line()) is not None:
            self._enter(waiter, answered)
        return answered

    def _enter(self, waiter: Waiter, answered: list[Waiter]) -> None:
        """Register a waiter in line; its client goes behind the others. Append it to ``answered`` if the
        cache answers it."""
        self._line.move_to_end(waiter.client)
        self._leave_line(waiter)
        waiter.missing = 0
        self._bind_to_weights(waiter)
        self._make_ready(self._register(waiter))
        if not waiter.missing:
            self._forget_waiter(waiter)
            answered.append(waiter)

    def _forget_waiter(self, waiter: Waiter) -> None:
        if waiter.loop is not None and (asking := self._loops.get(waiter.loop)) is not None:
            asking.waiters.pop(waiter, None)

    # -- turning: the engine's thread ---------------------------------------------------------

    def seconds_until_due(self) -> float | None:
        """Return the seconds until ``turn`` has something to do; ``None`` means after ``wake``."""
        with self.lock:
            if self._cancelled or (self._is_draining and not self._entries):
                return 0.0
            if self._line and self._first_in_line() is not None:
                return 0.0
            if self._retired and self._removable():
                return 0.0
            if self._flight:  # behind a barrier, a new question would not be in the next step
                return self._return_seconds() if self._returning and not self.barriers else 0.0
            return self._ready_seconds() if self._ready else None

    def _ready_seconds(self) -> float:
        if not self._max_wait_seconds or self._ready_weight >= self._max_batch_size:
            return 0.0
        return max(0.0, self._due - self._clock())

    def _return_seconds(self) -> float:
        """Return how long the next step waits for loops that ask again at once after an answer. Without
        this wait, a sampler beside texts would join only every other step."""
        last = max(asking.answered_at or 0.0 for asking in self._returning)
        left = last + RETURN_SHARE * self._step_seconds - self._clock()
        if left <= 0.0:
            self._returning.clear()
        return max(0.0, left)

    def turn(self, answering: AnsweringEngine) -> None:
        """Cancel, remove adapters, submit, deliver answers without a forward, step, deliver.

        Raises:
            EngineDied: the engine cannot go on. Requests in flight stay in flight.
        """
        flush, withdrawn, retired, answered = self._take()
        if answered:
            deliver(outcomes(answered))
        if withdrawn:
            answering.cancel(withdrawn)
        for adapter in retired:
            answering.remove_adapter(adapter)
            self._cache.forget(adapter)
            with self.lock:
                self._retired.remove(adapter)
        if flush:
            try:
                ends: Sequence[Finished] = answering.submit(flush)
            except Exception as error:
                failed = survived(error)
                ends = [Finished(request, error=failed) for request in flush]
            if ends:
                self._settle(ends)
        if self._flight:
            began = self._clock()
            finished = self._step(answering)
            seconds = self._clock() - began
            old = OLD_STEPS if self._step_seconds else 0.0
            self._step_seconds = old * self._step_seconds + (1.0 - old) * seconds
            self._settle(finished, stepped=True)
            if self.streams.by_loop:
                self.streams.deliver(answering.progress)
        if self._is_draining:
            with self.lock:
                waiting = [each for each in self.barriers if not each.drained.done()]
                drained = [each for each in waiting if self._has_drained(each)]
                self._is_draining = len(drained) < len(waiting)
            for barrier in drained:
                resolve(barrier.drained, None)

    def _step(self, answering: AnsweringEngine) -> Sequence[Finished]:
        """Step; return the finished requests."""
        try:
            return answering.step(lambda ends: self._settle(ends, stepped=True))
        except Exception as error:
            failed = survived(error)
            with self.lock:
                lost = [entry.request for entry in self._flight]
            answering.cancel(lost)
            return [Finished(request, error=failed) for request in lost]

    def _take(self) -> tuple[list[Request], list[Request], list[Adapter], list[Waiter]]:
        """Move ready entries into flight, end withdrawn ones and admit waiters in line. Return the flush,
        the withdrawn requests, the adapters to remove, and waiters that the cache answers."""
        with self.lock:
            released: list[object] = []
            for loop in [*self._loops]:
                if loop.is_closed():
                    released.append(asking := self._loops.pop(loop))
                    self._returning.pop(asking, None)
                    self._gathering.pop(asking, None)
                    self._cancelled.extend(asking.waiters)
            while self._cancelled:
                released.append(waiter := self._cancelled.popleft())
                self._withdraw(waiter)
            withdrawn = []
            for entry in [*self._withdrawn]:
                self._end(entry)
                withdrawn.append(entry.request)
            flush = self._launch(self._take_ready()) if self._ready else []
            answered = self._admit() if self._line else []
            retired = self._removable() if self._retired else []
        del released  # without the lock
        return flush, withdrawn, retired, answered

    def _take_ready(self) -> list[Entry]:
        """Remove and return the ready entries that are due and fit. An entry larger than a flush is its
        own flush; one larger than the room in flight waits until the engine is idle."""
        if self._ready_seconds() > 0.0:
            return []
        ready, is_idle = self._ready, not self._flight
        room = max(0, self.most_in_flight - self._flight_weight)
        left = min(self._max_batch_size, room)
        if self._ready_weight <= left:
            taken = [*ready]
            ready.clear()
            self._ready_weight = 0
            return taken
        taken = []
        while ready:
            entry, weight = ready.popitem(last=False)
            if weight > left and (taken or (weight > room and not is_idle)):
                self._put_first(entry)
                break
            self._ready_weight -= weight
            taken.append(entry)
            left -= weight
        return taken

    def _put_first(self, entry: Entry) -> None:
        self._ready[entry] = entry.request.weight
        self._ready.move_to_end(entry, last=False)

    def _launch(self, entries: Sequence[Entry]) -> list[Request]:
        """Move entries from the queue into flight; return the flush."""
        flush, before = [], self._flight_weight
        for entry in entries:
            request, entry.in_flight = entry.request, True
            self._leave_queue(request)
            self._flight[entry] = request.weight
            self._flight_weight += request.weight
            if entry.flow is not None:
                self.streams.add(cast("Streamed", request), entry.flow)
            flush.append(request)
        if flush:
            weight = self._flight_weight - before
            self._counted["flushes"] += 1
            self._counted["largest_flush"] = max(self._counted["largest_flush"], weight)
        return flush

    def _removable(self) -> list[Adapter]:
        """Return the retired adapters without requests, under the lock."""
        if self.keeps_adapters:
            return []
        held = [*self._held.values()]  # in one step: ``hold`` takes no lock
        return [each for each in self._retired if each not in self._bound and each not in held]

    def _settle(self, finished: Sequence[Finished], *, stepped: bool = False) -> None:
        """End these requests: cache the rows, then give each waiter its own results. Requests that ran
        out of memory with others in flight are queued again."""
        is_short = False
        for end in finished:
            is_short = is_short or isinstance(end.error, OutOfMemory)
        if is_short:
            finished = self._send_less(finished)
        elif stepped:
            self._good_steps += 1
            if self._good_steps == GOOD_STEPS:
                self.most_in_flight = min(2 * self.most_in_flight, sys.maxsize)
                self._good_steps = 0
        if not finished:
            return
        no_room = self._cache.keep([end for end in finished if end.request in self._entries])
        failed: list[tuple[Waiter, Outcome]] = []
        answered: list[Waiter] = []
        with self.lock:
            for end in finished:
                request, result = end.request, end.result
                entry = self._entries.get(request)
                if entry is None or not entry.in_flight:
                    continue
                self._end(entry)
                error = end.error or (no_room.get(request) if no_room else None)
                self._counted["answered" if error is None else "failed"] += request.weight
                for waiter, places in [*entry.waiters.items()]:
                    if error is not None:
                        self._drop(waiter)
                        failed.append((waiter, error.fresh()))
                        continue
                    for place in places:
                        waiter.results[place] = result
                    waiter.missing -= 1
                    if not waiter.missing:
                        answered.append(waiter)
            self._note_answers(answered, stepped=stepped)
            if self._line:
                answered += self._admit()  # a failed question may have made room in the queue
        deliver([*failed, *outcomes(answered)])

    def _note_answers(self, answered: Sequence[Waiter], *, stepped: bool) -> None:
        """Forget answered waiters, and note the loops that may ask again at once. Under the lock."""
        noted: set[_Loop] = set()
        for waiter in answered:
            if waiter.loop is None or (asking := self._loops.get(waiter.loop)) is None:
                continue
            asking.waiters.pop(waiter, None)
            if not stepped or asking in noted or not isinstance(waiter.requests[0], ONE_STEP):
                continue
            noted.add(asking)
            if asking.answered_at is not None:  # it did not ask since an earlier answer
                asking.returns = False
            asking.answered_at = self._clock()
            if asking.returns:
                self._returning[asking] = None

    def _send_less(self, finished: Sequence[Finished]) -> list[Finished]:
        """Halve the bound in flight and queue the requests that ran out of memory again, before all
        others; return the other ends. A request that ran out of memory alone fails."""
        if self._flight_weight > 1:
            self.most_in_flight = max(1, self._flight_weight // 2)
            self._good_steps = 0  # the caller of a failed population asks for its parts next
        if len(self._flight) <= 1:
            return [*finished]
        short = [end.request for end in finished if isinstance(end.error, OutOfMemory)]
        with self.lock:
            self._requeue([entry for entry in map(self._entries.get, short) if entry is not None])
        return [end for end in finished if not isinstance(end.error, OutOfMemory)]

    def _requeue(self, entries: Iterable[Entry]) -> None:
        """Make entries that the engine has forgotten ready again, before all others, under the lock."""
        again = []
        for entry in [entry for entry in entries if entry.in_flight]:
            if entry in self._withdrawn:
                self._end(entry)
            else:
                self._land(entry)
                entry.in_flight = False
                again.append(entry)
        weight, nbytes = _size([entry.request for entry in again])
        self._counted["retried"] += weight
        self._queued += weight
        self._queued_bytes += nbytes
        for entry in reversed(again):
            self._put_first(entry)
        self._ready_weight += weight
        if again:
            self._due = self._clock()

    # -- barriers -----------------------------------------------------------------------------

    def raise_barrier(self, barrier: Barrier) -> None:
        """Make later questions wait until the barrier is lifted, unless it was. Earlier questions are
        sent beyond the bounds of the queue, or wait in line too, as ``barrier.pending`` says. Called on
        the engine's thread."""
        answered: list[Waiter] = []
        with self.lock:
            if barrier.is_lifted:
                return
            self._send_all_gathered()  # a loop may be blocked
            if barrier.pending == "restart":
                in_line = [*self._in_line()]
                asked = {waiter: None for e in self._entries.values() for waiter in e.waiters}
                for waiter in (*asked, *in_line):
                    self._drop(waiter)
                    self._wait_in_line(waiter)
            elif not self.barriers:
                for waiter in [*self._in_line()]:
                    self._enter(waiter, answered)
            self.barriers[barrier] = None
            self._is_draining = True
        deliver(outcomes(answered))
        self._wake()

    def lift_barrier(self, barrier: Barrier, weights_version: int | None = None) -> None:
        """Send later questions again, unless another barrier is raised; idempotent. With a version, all
        questions are bound to it except texts in flight, and partly delivered texts in line fail."""
        cut: list[tuple[Waiter, Outcome]] = []
        with self.lock:
            if weights_version is not None:
                self.weights_version = weights_version
                begun = [w for w in self._in_line() if w.flow is not None and w.flow.is_delivered]
                cut = [(waiter, StreamCut(CUT)) for waiter in begun]
                for waiter in begun:
                    self._drop(waiter)
            barrier.is_lifted = True
            self.barriers.pop(barrier, None)
            answered = self._admit()
        resolve(
            barrier.drained,
            InvalidRequest("the runtime was resumed before its earlier questions had ended"),
        )
        deliver(cut)
        deliver(outcomes(answered))
        self._wake()

    @property
    def is_drained(self) -> bool:
        """True if every question from before the barriers has ended."""
        return not self._entries

    def _has_drained(self, barrier: Barrier) -> bool:
        if barrier.pending != "continue":
            return self.is_drained
        return all(isinstance(request, TextRequest) for request in self._entries)

    # -- adapters, close, restart -------------------------------------------------------------

    def hold(self, question: object, adapter: Adapter) -> None:
        """Keep an adapter in the engine for a question that asks its requests later."""
        self._held[question] = adapter

    def let_go(self, question: object) -> None:
        """End ``hold``. Finalizers call this, so neither takes the lock."""
        self._held.pop(question, None)
        if self._retired:
            self._wake()

    def retire(self, adapter: Adapter) -> None:
        """Have ``turn`` remove the adapter from the engine after its last request."""
        with self.lock:
            self._retired.append(adapter)
        self._wake()

    def close(self, reason: GenrtError | None = None) -> bool:
        """End every waiter and every later question with ``reason`` (``Closed`` by default), and break
        the barriers. Idempotent; never waits for the engine.

        Returns ``False`` without effect if the calling thread holds the lock, as in a finalizer or a
        signal handler: another thread must close then.
        """
        # As threading.Condition asks a lock. Taking it again would change a half-changed state.
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return False
        with self.lock:
            released: list[object] = [self._loops]
            if self.closed is None:
                self.closed = reason or Closed(WAS_CLOSED)
                waiters = {waiter: None for waiter in self._in_line()}
                waiters |= {w: None for entry in self._entries.values() for w in entry.waiters}
                self._undelivered = [(waiter, self.closed.fresh()) for waiter in waiters]
                for waiter in waiters:
                    waiter.missing, waiter.client = 0, None
                for entry in self._entries.values():
                    entry.waiters.clear()
                released += [self._entries, self._line, self._ready, self._flight]
                self._entries, self._line, self._ready = {}, OrderedDict(), OrderedDict()
                self._flight, self._withdrawn, self._returning = {}, {}, {}
                self._gathering = {}
                self._queued = self._queued_bytes = self._ready_weight = self._flight_weight = 0
                self.streams.by_loop.clear()
                self._bound.clear()
            self._loops = WeakKeyDictionary()
            undelivered, reason = self._undelivered, self.closed
            barriers, self.barriers, self._is_draining = [*self.barriers], {}, False
            for barrier in barriers:
                barrier.is_lifted = True
        del released
        for barrier in barriers:
            barrier.break_with(reason)
        deliver(undelivered)  # including the rest of an earlier call that an interrupt ended
        self._undelivered = []
        return True

    def reopen(self) -> None:
        """Take questions again, for another engine."""
        with self.lock:
            self.closed = None

    def resume(self) -> None:
        """Queue everything in flight again: another engine replaces the one before."""
        with self.lock:
            self._requeue(self._flight)

    def statistics(self) -> BatcherStatistics:
        with self.lock:
            waiting = sum(map(len, self._line.values()))
            sizes = {"queued": self._queued, "in_flight": self._flight_weight, "waiting": waiting}
            return BatcherStatistics(**self._counted, **sizes)

    def __repr__(self) -> str:
        s, state = self.statistics(), "open" if self.closed is None else "closed"
        return f"Batcher({state}, {s.queued} queued, {s.in_flight} in flight, {s.flushes} flushes)"


CUT = (
    "the weights were replaced while this text was drawn, and a part of it was delivered: ask again, "
    'or replace them with pending="finish"'
)


def _size(requests: Iterable[Request]) -> tuple[int, int]:
    """Return the total weight and bytes of requests."""
    weight = nbytes = 0
    for request in requests:
        weight += request.weight
        nbytes += request.nbytes
    return weight, nbytes


# -- delivery -------------------------------------------------------------------------------------


def outcomes(waiters: Sequence[Waiter]) -> list[tuple[Waiter, Outcome]]:
    """Return each waiter with its results in its own storage, or with an error if there is no memory for
    them. All are copied together; if that fails, one by one."""
    try:
        return _own(waiters)
    except Exception as error:
        if len(waiters) == 1:
            return [(waiters[0], failure(error))]
    return [outcome for waiter in waiters for outcome in outcomes([waiter])]


def _own(waiters: Sequence[Waiter]) -> list[tuple[Waiter, Outcome]]:
    """Return each waiter with its results in its own storage, or one stack of the rows. Tensors are
    copied here, other results by their requests."""
    shared = [
        result
        for waiter in waiters
        if not waiter.stacked
        for result in waiter.results
        if isinstance(result, Tensor)
    ]
    copies = iter(separate_copies(shared))
    owned: list[tuple[Waiter, Outcome]] = []
    for waiter in waiters:
        if waiter.stacked:
            results = [stacked(cast("list[Tensor]", waiter.results))]
        else:
            results = [
                next(copies) if isinstance(result, Tensor) else request.owned(result)
                for request, result in zip(waiter.requests, waiter.results, strict=True)
            ]
        owned.append((waiter, results))
    return owned


def deliver(done: Iterable[tuple[Waiter, Outcome]]) -> None:
    """Resolve the futures of waiters: of threads here, of each event loop by one call into it."""
    by_loop: dict[asyncio.AbstractEventLoop | None, deque[tuple[Any, Outcome]]] = {}
    for waiter, outcome in done:
        loop = waiter.loop
        if loop not in by_loop:
            by_loop[loop] = deque()
        by_loop[loop].append((waiter.future, outcome))
    for loop, resolved in by_loop.items():
        if loop is None:
            _resolve_all(None, resolved)
            continue
        with contextlib.suppress(RuntimeError):  # closed, and with it all of its waiters
            loop.call_soon_threadsafe(_resolve_all, loop, resolved)


def _resolve_all(loop: asyncio.AbstractEventLoop | None, done: deque[tuple[Any, Outcome]]) -> None:
    """Resolve futures; those of a loop go on in its next pass after ``WAITERS_A_PASS`` futures or an
    interrupt."""
    try:
        for _ in range(len(done) if loop is None else min(len(done), WAITERS_A_PASS)):
            future, outcome = done[0]
            failed = isinstance(outcome, GenrtError)
            # Cancelled at any moment by a signal handler, or resolved by another thread.
            with _IS_DONE:
                (future.set_exception if failed else future.set_result)(outcome)
            done.popleft()
    except Exception:  # a future that raises would do so for ever
        done.popleft()
        raise
    finally:
        if loop is not None and done:
            loop.call_soon(_resolve_all, loop, done)


_IS_DONE = contextlib.suppress(asyncio.InvalidStateError, concurrent.futures.InvalidStateError)
