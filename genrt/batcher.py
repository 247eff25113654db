"""Many awaits, one call: queue, dedupe, flush policy, cancellation, delivery.

A question travels: ``ask`` finds its row in the cache, joins an equal request that is queued or in
flight, or queues it; when the asking loop has gone quiet the request is *ready*; the engine thread's
next ``turn`` submits the ready requests as one flush, runs one engine step, and delivers what finished.

Rules:
    All state changes under one lock, held for dictionary work only; ``turn`` alone talks to the engine.
    A request is in ``_entries`` from the question that queued it until it ends; it ends once.
    A waiter that leaves is seen by nobody else; a request whose last waiter left is withdrawn: from
    the queue at once, from the engine at the next turn, unless an equal question comes first.
    A row is in the cache before its request leaves ``_entries``, and a question looks at both under
    the lock, so none falls in between.
    A waiter is held by its entries. So a coroutine that is collected, by any thread at any moment, the
    one that holds the lock included, waits for nothing any more and takes no lock.
    Every waiter gets storage (or an exception object) of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias, cast

from torch import Tensor

from genrt.cache import RowCache
from genrt.engine import Adapter, Engine, Finished, LogprobsRequest, Request, Result, failure
from genrt.errors import Closed, GenrtError
from genrt.rows import apart, stacked
from genrt.sampling import TopLogprobs

__all__ = ["Batcher", "BatcherStatistics"]

PATIENCE = 100
"""How many passes a loop that asks something new in each of them is waited for."""

Outcome: TypeAlias = list[Result] | GenrtError
"""What a waiter's future gets."""


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """What was asked and what became of it; counters only grow, the last two are of this moment.

    ``questions`` were asked; ``deduplicated`` of them joined an equal request, ``cached`` ones were
    answered at once, and the rest entered the engine in ``flushes``, the largest of ``largest_flush``
    requests. ``cancelled`` waiters left before their answer; ``failed`` requests ended in an error.
    """

    questions: int = 0
    deduplicated: int = 0
    cached: int = 0
    flushes: int = 0
    largest_flush: int = 0
    cancelled: int = 0
    failed: int = 0
    queued: int = 0
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    """One awaiting caller of one or more requests, on an event loop or (``loop is None``) a thread.

    ``found`` has the result of each distinct request; ``missing`` counts those that are still None.
    """

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop | None
    future: asyncio.Future[list[Result]] | concurrent.futures.Future[list[Result]]
    stacked: bool
    found: dict[Request, Result | None]
    missing: int = 0

    def results(self) -> list[Result]:
        """What was found for each request; others may hold it too."""
        return [cast("Result", self.found[request]) for request in self.requests]


@dataclass(slots=True, eq=False)
class _Entry:
    """One request on its way, and who waits for it. With no waiter it is withdrawn, or was never sent."""

    request: Request
    waiters: dict[_Waiter, None]
    in_flight: bool = False


@dataclass(slots=True, eq=False)
class _Gathering:
    """What one event loop has asked since it was last quiet."""

    entries: dict[_Entry, None] = field(default_factory=dict)
    questions: int = 0
    passes: int = 0


class Batcher:
    """The questions of all callers, as flushes for one engine.

    Args:
        cache: answers before the engine is asked, and keeps the rows that come back.
        max_batch_size: the most requests in one flush; that many queued ones are ready at once. With
            ``None`` a flush is everything that is ready.
        max_wait_seconds: how long ready requests wait for more company; 0 is never.
        wake: called, from any thread, when there may be something for ``turn`` to do.
        clock: seconds, monotonic; injected by simulations.
    """

    def __init__(
        self,
        cache: RowCache,
        *,
        max_batch_size: int | None = None,
        max_wait_seconds: float = 0.0,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._max_batch_size = max_batch_size or sys.maxsize
        self._max_wait_seconds = max_wait_seconds
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[Request, _Entry] = {}
        self._gathering: dict[asyncio.AbstractEventLoop, _Gathering] = {}
        self._ready: dict[_Entry, None] = {}
        self._due = float("inf")
        self._withdrawn: dict[_Entry, None] = {}
        self._in_flight = 0
        self._retired: list[Adapter] = []
        self._closed: GenrtError | None = None
        self._questions = self._deduplicated = self._cached = 0
        self._flushes = self._largest_flush = 0
        self._cancelled = self._failed = 0

    # -- asking: event loops and threads ------------------------------------------------------

    async def ask(self, requests: Sequence[Request], *, stacked: bool = False) -> list[Result]:
        """The results in order, each in storage of its own; equal requests may appear more than once.
        With ``stacked``, the only result is the stack of the rows, of which there is at least one.

        Cancelling the await withdraws this caller alone. Works on any running event loop.

        Raises:
            EngineFailed: the step that one of the requests was in failed; the other requests of this
                question are withdrawn.
            Closed: the batcher is closed, or was while this waited.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Result]] = loop.create_future()
        waiter = _Waiter(requests, loop, future, stacked, {})
        try:
            results = self._join(waiter)
            return await future if results is None else results
        finally:
            if waiter.missing:
                self._leave(waiter)

    def ask_sync(self, requests: Sequence[Request], *, stacked: bool = False) -> list[Result]:
        """``ask`` for a thread, which blocks; an interrupt withdraws the question."""
        future: concurrent.futures.Future[list[Result]] = concurrent.futures.Future()
        waiter = _Waiter(requests, None, future, stacked, {})
        try:
            results = self._join(waiter)
            return future.result() if results is None else results
        finally:
            if waiter.missing:
                self._leave(waiter)

    def _join(self, waiter: _Waiter) -> list[Result] | None:
        """Register the waiter for what the cache lacks; the results if that is nothing."""
        with self._lock:
            if self._closed is not None:
                raise self._closed.fresh()
            queued = self._register(waiter)
            wake = bool(queued) and self._gather(queued, waiter.loop)
        if wake:
            self._wake()
        if waiter.missing:
            return None
        [outcome] = _outcomes([waiter])
        if isinstance(outcome, GenrtError):
            raise outcome
        return outcome

    def _register(self, waiter: _Waiter) -> list[_Entry]:
        """Under the lock: find or join each request; the entries that have to be queued."""
        queued: list[_Entry] = []
        found = waiter.found
        self._questions += len(waiter.requests)
        for request in waiter.requests:
            if request in found:
                self._cached += found[request] is not None
                self._deduplicated += found[request] is None
                continue
            row = self._cache.borrow(request) if isinstance(request, LogprobsRequest) else None
            found[request] = row
            if row is not None:
                self._cached += 1
                continue
            waiter.missing += 1
            entry = self._entries.get(request)
            if entry is None:
                entry = self._entries[request] = _Entry(request, {waiter: None})
            else:
                self._deduplicated += 1
                entry.waiters[waiter] = None
                self._withdrawn.pop(entry, None)
            if not entry.in_flight and entry not in self._ready:
                queued.append(entry)
        return queued

    def _gather(self, queued: list[_Entry], loop: asyncio.AbstractEventLoop | None) -> bool:
        """Under the lock: queue these until the loop is quiet; True if the engine thread must look."""
        if loop is None:
            return self._make_ready(queued)
        gathering = self._gathering.get(loop)
        if gathering is None:
            for other in [other for other in self._gathering if other.is_closed()]:
                self._sweep(self._gathering.pop(other).entries)
            gathering = _Gathering()
            loop.call_soon(self._quiet, loop, gathering, 0)
            self._gathering[loop] = gathering
        gathering.questions += 1
        gathering.entries.update(dict.fromkeys(queued))
        if len(gathering.entries) < self._max_batch_size:
            return False
        wake = self._make_ready(gathering.entries)
        gathering.entries = {}
        return wake

    def _quiet(self, loop: asyncio.AbstractEventLoop, gathering: _Gathering, seen: int) -> None:
        """Once a pass of the loop brought no new question, what it asked is ready. The pass that brought
        the first one counts as one that did, so tasks that others started in it are waited for too."""
        try:
            with self._lock:
                gathering.passes += 1
                if gathering.questions != seen and gathering.passes < PATIENCE:
                    loop.call_soon(self._quiet, loop, gathering, gathering.questions)
                    return
                wake = self._end_gathering(loop, gathering)
            if wake:
                self._wake()
        except BaseException:  # an interrupt, after which nothing else would end this gathering
            with self._lock:
                self._end_gathering(loop, gathering)
            self._wake()
            raise

    def _end_gathering(self, loop: asyncio.AbstractEventLoop, gathering: _Gathering) -> bool:
        """Under the lock. Done a second time, it is as done once."""
        self._gathering.pop(loop, None)
        return self._make_ready(gathering.entries)

    def _make_ready(self, entries: Iterable[_Entry]) -> bool:
        """Under the lock. One that was dropped, or sent by another loop, stays as it is."""
        added = [entry for entry in entries if entry.waiters and not entry.in_flight]
        if added and not self._ready:
            self._due = self._clock() + self._max_wait_seconds
        self._ready.update(dict.fromkeys(added))
        return bool(added)

    # -- leaving ------------------------------------------------------------------------------

    def _leave(self, waiter: _Waiter) -> None:
        with self._lock:
            self._cancel(waiter)
            wake = bool(self._withdrawn or self._retired)
        if wake:
            self._wake()

    def _cancel(self, waiter: _Waiter) -> None:
        """Under the lock: take off, and count, a waiter that leaves by itself, if it has not ended."""
        if waiter.missing:
            self._cancelled += 1
            self._drop(waiter)

    def _drop(self, waiter: _Waiter) -> None:
        """Under the lock: take a waiter off every request it still waits for."""
        waiter.missing = 0
        for request, result in waiter.found.items():
            entry = self._entries.get(request) if result is None else None
            if entry is None or entry.waiters.pop(waiter, self) is self or entry.waiters:
                continue
            if entry.in_flight:
                self._withdrawn[entry] = None
            else:
                del self._entries[request]
                self._ready.pop(entry, None)

    def _sweep(self, entries: Iterable[_Entry]) -> None:
        """Under the lock: take off these the waiters whose loop was closed under them."""
        waiters = [waiter for entry in entries for waiter in entry.waiters]
        loops = {waiter.loop for waiter in waiters if waiter.loop is not None}
        closed = {loop for loop in loops if loop.is_closed()}
        for waiter in waiters if closed else ():
            if waiter.loop in closed:
                self._cancel(waiter)

    # -- turning: the engine thread -----------------------------------------------------------

    def seconds_until_due(self) -> float | None:
        """How long ``turn`` has nothing to do: 0.0 for now, ``None`` for until the next ``wake``."""
        with self._lock:
            if self._in_flight or self._withdrawn or self._unbound():
                return 0.0
            if not self._ready:
                return None
            if len(self._ready) >= self._max_batch_size:
                return 0.0
            return max(0.0, self._due - self._clock())

    def turn(self, engine: Engine) -> None:
        """Move everything one engine step on: withdraw, submit the next flush, step, deliver."""
        flush, withdrawn, retired = self._take()
        if withdrawn:
            engine.cancel(withdrawn)
        for adapter in retired:
            engine.remove_adapter(adapter)
            self._cache.forget(adapter)
        if flush:
            try:
                engine.submit(flush)
            except Exception as error:
                self._settle([Finished(r, error=failure(error)) for r in flush])
        if not self._in_flight:
            return
        try:
            finished = engine.step()
        except Exception as error:
            with self._lock:
                failed = [each for each, entry in self._entries.items() if entry.in_flight]
            engine.cancel(failed)
            finished = [Finished(r, error=failure(error)) for r in failed]
        self._settle(finished)

    def _take(self) -> tuple[list[Request], list[Request], list[Adapter]]:
        with self._lock:
            self._sweep(self._ready)
            withdrawn = [entry.request for entry in self._withdrawn]
            self._withdrawn.clear()
            for request in withdrawn:
                del self._entries[request]
            self._in_flight -= len(withdrawn)
            flush: list[Request] = []
            if len(self._ready) >= self._max_batch_size or self._clock() >= self._due:
                for entry in list(islice(self._ready, self._max_batch_size)):
                    del self._ready[entry]
                    entry.in_flight = True
                    flush.append(entry.request)
            self._in_flight += len(flush)
            self._flushes += bool(flush)
            self._largest_flush = max(self._largest_flush, len(flush))
            if not self._ready:
                self._due = float("inf")
            retired = self._unbound()
            self._retired = [a for a in self._retired if a not in retired]
            return flush, withdrawn, retired

    def _unbound(self) -> list[Adapter]:
        """Under the lock: the retired adapters that no request is bound to any more."""
        if not self._retired:
            return []
        bound = {request.adapter for request in self._entries}
        return [adapter for adapter in self._retired if adapter not in bound]

    def _settle(self, finished: Sequence[Finished]) -> None:
        """End these requests: cache the rows, then hand every waiter its own."""
        no_room = self._keep(finished)
        failed: list[tuple[_Waiter, Outcome]] = []
        answered: list[_Waiter] = []
        with self._lock:
            for end in finished:
                request, result = end.request, end.result
                entry = self._entries.get(request)
                if entry is None or not entry.in_flight:
                    continue
                del self._entries[request]
                self._withdrawn.pop(entry, None)
                self._in_flight -= 1
                error = end.error or no_room.get(request)
                self._failed += error is not None
                for waiter in entry.waiters:
                    if error is not None:
                        self._drop(waiter)
                        failed.append((waiter, error.fresh()))
                        continue
                    waiter.found[request] = result
                    waiter.missing -= 1
                    if not waiter.missing:
                        answered.append(waiter)
        _deliver(failed + list(zip(answered, _outcomes(answered), strict=True)))

    def _keep(self, finished: Sequence[Finished]) -> dict[Request, GenrtError]:
        """Put the rows into the cache; the errors of those for whose copies there is no memory."""
        rows = {
            end.request: end.result
            for end in (finished if self._cache.max_bytes else ())
            if isinstance(end.request, LogprobsRequest) and isinstance(end.result, Tensor)
        }
        return {each: failure(error) for each, error in self._cache.put_all(rows).items()}

    # -- the rest of a life -------------------------------------------------------------------

    def retire(self, adapter: Adapter) -> None:
        """Have ``turn`` remove the adapter from the engine once no request is bound to it."""
        with self._lock:
            self._retired.append(adapter)
        self._wake()

    def close(self, reason: GenrtError | None = None) -> None:
        """End every waiter with ``reason`` (``Closed`` by default), and every later question too.
        Idempotent; returns at once, whatever the engine is doing."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason or Closed("the runtime was closed; load it again to ask more")
            waiters = {w: None for e in self._entries.values() for w in e.waiters}
            for waiter in waiters:
                self._drop(waiter)
            self._entries.clear()
            self._gathering.clear()
            self._ready.clear()
            self._withdrawn.clear()
            self._retired.clear()
            self._in_flight = 0
            self._due = float("inf")
        _deliver([(waiter, self._closed.fresh()) for waiter in waiters])

    def statistics(self) -> BatcherStatistics:
        with self._lock:
            return BatcherStatistics(
                questions=self._questions,
                deduplicated=self._deduplicated,
                cached=self._cached,
                flushes=self._flushes,
                largest_flush=self._largest_flush,
                cancelled=self._cancelled,
                failed=self._failed,
                queued=len(self._entries) - self._in_flight,
                in_flight=self._in_flight,
            )

    def __repr__(self) -> str:
        s = self.statistics()
        state = "closed" if self._closed is not None else "open"
        return f"Batcher({state}, {s.queued} queued, {s.in_flight} in flight, {s.flushes} flushes)"


def _outcomes(waiters: Sequence[_Waiter]) -> list[Outcome]:
    """What each of these waiters gets: results in storage of its own, or an error if there is no memory
    for that. All are copied at once; or, if that fails, one by one, to see whose copies do."""
    try:
        return list(_own(waiters))
    except Exception as error:
        if len(waiters) == 1:
            return [failure(error)]
    return [outcome for waiter in waiters for outcome in _outcomes([waiter])]


def _own(waiters: Sequence[_Waiter]) -> Iterator[list[Result]]:
    """What each found, in storage of its own: one stack of the rows for who wants that."""
    apiece = [each for waiter in waiters if not waiter.stacked for each in waiter.results()]
    rows = iter(apart([each for each in apiece if isinstance(each, Tensor)]))
    own = iter([next(rows) if isinstance(each, Tensor) else _copy(each) for each in apiece])
    for waiter in waiters:
        if waiter.stacked:
            yield [stacked(cast("list[Tensor]", waiter.results()))]
        else:
            yield list(islice(own, len(waiter.requests)))


def _copy(result: Result) -> Result:
    return TopLogprobs(*apart(result)) if isinstance(result, TopLogprobs) else result


def _deliver(done: Iterable[tuple[_Waiter, Outcome]]) -> None:
    """Resolve the waiters still waiting: threads here, each event loop by one call into it."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Any, Outcome]]] = {}
    for waiter, outcome in done:
        by_loop.setdefault(waiter.loop, []).append((waiter.future, outcome))
    _resolve(by_loop.pop(None, []))
    for loop, outcomes in by_loop.items():
        with contextlib.suppress(RuntimeError):  # closed, and with it all who waited there
            cast("asyncio.AbstractEventLoop", loop).call_soon_threadsafe(_resolve, outcomes)


def _resolve(outcomes: Iterable[tuple[Any, Outcome]]) -> None:
    for future, outcome in outcomes:
        if not future.done():
            failed = isinstance(outcome, GenrtError)
            (future.set_exception if failed else future.set_result)(outcome)
