"""Many awaits, one call: queue, dedupe, flush policy, cancellation, delivery.

A question travels: ``ask`` finds its row in the cache, joins an equal request that is queued or in
flight, or queues it, if need be when there is room; when the asking loop has gone quiet the request is
*ready*; the engine thread's next ``turn`` submits the ready requests as one flush, runs one engine step,
and delivers what finished.

Rules:
    All state changes under one lock, held for dictionary work only; ``turn`` alone talks to the engine.
    A request is in ``_entries`` from the question that queued it until it ends; it ends once.
    Requests that ran out of memory together are sent again, fewer at a time; one alone fails.
    A waiter that leaves is seen by nobody else; a request whose last waiter left is withdrawn: from
    the queue at once, from the engine at the next turn, unless an equal question comes first.
    A row is in the cache before its request leaves ``_entries``, and a question looks at both under
    the lock, so none falls in between.
    A waiter is held by its entries. So a coroutine that is collected, by any thread at any moment, the
    one that holds the lock included, waits for nothing any more, or on a closed loop: it takes no lock.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import cast

from genrt.admission import Admission, Window
from genrt.cache import RowCache
from genrt.engine import Adapter, Engine, Finished, LogprobsRequest, Request, Result, failure
from genrt.errors import Closed, EngineDied, GenrtError, OutOfMemory
from genrt.gathering import Gatherings
from genrt.statistics import BatcherStatistics
from genrt.waiters import (
    Entry,
    Outcome,
    Waiter,
    deliver,
    hand_out,
    outcome_of,
    timed_out,
    within,
)

__all__ = ["Batcher"]


class Batcher:
    """The questions of all callers, as flushes for one engine.

    Args:
        cache: answers before the engine is asked, and keeps the rows that come back.
        max_batch_size: the most requests in one flush; that many queued ones are ready at once. With
            ``None`` a flush is everything that is ready.
        max_wait_seconds: how long ready requests wait for more company; 0 is never.
        max_queued_requests, max_queued_bytes: how much may be queued; who asks for more waits for room.
        wake: called, from any thread, when there may be something for ``turn`` to do.
        clock: seconds, monotonic; injected by simulations.
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
    ) -> None:
        self._cache = cache
        self._max_batch_size = max_batch_size or sys.maxsize
        self._max_wait_seconds = max_wait_seconds
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[Request, Entry] = {}
        self._ready: dict[Entry, None] = {}
        self._due = float("inf")
        self._withdrawn: dict[Entry, None] = {}
        self._in_flight = 0
        self._admission = Admission(max_queued_requests, max_queued_bytes)
        self._window = Window()
        self._gatherings = Gatherings(self._lock, self._make_ready, wake, self._max_batch_size)
        self._retired: list[Adapter] = []
        self._closed: GenrtError | None = None
        self._questions = self._deduplicated = self._cached = 0
        self._flushes = self._largest_flush = self._retried = 0
        self._answered = self._failed = self._cancelled = 0

    # -- asking: event loops and threads ------------------------------------------------------

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """The results in order, each in storage of its own; equal requests may appear more than once.
        With ``stacked``, the only result is the stack of the rows, of which there is at least one.

        Cancelling the await withdraws this caller alone. Works on any running event loop.

        Raises:
            EngineFailed: the step that one of the requests was in failed; the other requests of this
                question are withdrawn.
            TimedOut: there was no answer within ``timeout`` seconds; the question is withdrawn.
            Closed: the batcher is closed, or was while this waited.
        """
        if timeout is not None:
            return await within(timeout, self.ask(requests, stacked=stacked))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Result]] = loop.create_future()
        waiter = Waiter(requests, loop, future, stacked, {})
        try:
            results = self._join(waiter)
            return await future if results is None else results
        finally:
            if waiter.missing and not loop.is_closed():
                self._leave(waiter)

    def ask_sync(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """``ask`` for a thread, which blocks; an interrupt withdraws the question."""
        future: concurrent.futures.Future[list[Result]] = concurrent.futures.Future()
        waiter = Waiter(requests, None, future, stacked, {})
        try:
            results = self._join(waiter)
            return future.result(timeout) if results is None else results
        except concurrent.futures.TimeoutError:
            raise timed_out(cast("float", timeout)) from None
        finally:
            if waiter.missing:
                self._leave(waiter)

    def _join(self, waiter: Waiter) -> list[Result] | None:
        """Register the waiter for what the cache lacks; the results if that is nothing."""
        with self._lock:
            if self._closed is not None:
                raise self._closed.fresh()
            if self._admission.must_wait(waiter.requests) and not self._known(waiter.requests):
                self._admission.wait(waiter)
                self._gatherings.end()
                wake = bool(self._ready)
            else:
                try:
                    queued = self._register(waiter)
                except BaseException:  # an interrupt, wherever it was
                    self._admission.recount(
                        each for each, e in self._entries.items() if not e.in_flight
                    )
                    raise
                wake = bool(queued) and self._gather(queued, waiter.loop)
        if wake:
            self._wake()
        if waiter.missing:
            return None
        return outcome_of(waiter)

    def _known(self, requests: Sequence[Request]) -> bool:
        """Under the lock: whether all of these can be joined, or are in the cache."""
        return all(each in self._entries or each in self._cache for each in requests)

    def _register(self, waiter: Waiter) -> list[Entry]:
        """Under the lock: find or join each request; the entries that have to be queued."""
        queued: list[Entry] = []
        new: list[Request] = []
        found, entries, borrow = waiter.found, self._entries, self._cache.borrow
        self._questions += len(waiter.requests)
        for request in waiter.requests:
            if request in found:
                self._cached += found[request] is not None
                self._deduplicated += found[request] is None
                continue
            row = borrow(request) if isinstance(request, LogprobsRequest) else None
            found[request] = row
            if row is not None:
                self._cached += 1
                continue
            waiter.missing += 1
            entry = entries.get(request)
            if entry is None:
                entries[request] = entry = Entry(request, {waiter: None})
                queued.append(entry)
                new.append(request)
                continue
            self._deduplicated += 1
            entry.waiters[waiter] = None
            self._withdrawn.pop(entry, None)
            if not entry.in_flight and entry not in self._ready:
                queued.append(entry)
        self._admission.enter(new)
        return queued

    def _admit(self) -> list[Waiter]:
        """Under the lock: register those who waited for room, as far as there is some; those of them who
        lack nothing any more."""
        answered: list[Waiter] = []
        while (waiter := self._admission.next()) is not None:
            self._make_ready(self._register(waiter))
            if not waiter.missing:
                answered.append(waiter)
        return answered

    def _gather(self, queued: list[Entry], loop: asyncio.AbstractEventLoop | None) -> bool:
        """Under the lock: queue these until the loop is quiet; True if the engine thread must look."""
        if loop is None:
            return self._make_ready(queued)
        if loop not in self._gatherings:
            self._sweep(self._gatherings.of_closed_loops())
        return self._gatherings.add(loop, queued)

    def _make_ready(self, entries: Iterable[Entry]) -> bool:
        """Under the lock. One that was dropped, or sent by another loop, stays as it is."""
        added = [entry for entry in entries if entry.waiters and not entry.in_flight]
        if added and not self._ready:
            self._due = self._clock() + self._max_wait_seconds
        self._ready.update(dict.fromkeys(added))
        return bool(added)

    # -- leaving ------------------------------------------------------------------------------

    def _leave(self, waiter: Waiter) -> None:
        with self._lock:
            self._cancel(waiter)
            answered = self._admit()
            wake = bool(self._withdrawn or self._retired or self._ready)
        if wake:
            self._wake()
        hand_out(answered)

    def _cancel(self, waiter: Waiter) -> None:
        """Under the lock: take off, and count, a waiter that leaves by itself, if it has not ended."""
        if waiter.missing:
            self._cancelled += 1
            self._drop(waiter)

    def _drop(self, waiter: Waiter) -> None:
        """Under the lock: take a waiter off every request it still waits for."""
        waiter.missing = 0
        if self._admission.withdraw(waiter):
            return
        for request, result in waiter.found.items():
            entry = self._entries.get(request) if result is None else None
            if entry is None or entry.waiters.pop(waiter, self) is self or entry.waiters:
                continue
            if entry.in_flight:
                self._withdrawn[entry] = None
            else:
                del self._entries[request]
                self._ready.pop(entry, None)
                self._admission.leave([request])

    def _sweep(self, entries: Iterable[Entry]) -> None:
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
        """Move everything one engine step on: withdraw, submit the next flush, step, deliver.

        Raises:
            EngineDied: the engine can't go on. Nobody has been told; what was in flight still is.
        """
        flush, withdrawn, retired, answered = self._take()
        hand_out(answered)
        if withdrawn:
            engine.cancel(withdrawn)
        for adapter in retired:
            engine.remove_adapter(adapter)
            self._cache.forget(adapter)
            with self._lock:
                self._retired.remove(adapter)
        if flush:
            try:
                engine.submit(flush)
            except EngineDied:
                raise
            except Exception as error:
                self._settle([Finished(r, error=failure(error)) for r in flush])
        if not self._in_flight:
            return
        try:
            finished = engine.step()
        except EngineDied:
            raise
        except Exception as error:
            with self._lock:
                failed = [each for each, entry in self._entries.items() if entry.in_flight]
            engine.cancel(failed)
            finished = [Finished(r, error=failure(error)) for r in failed]
        self._settle(finished)

    def _take(self) -> tuple[list[Request], list[Request], list[Adapter], list[Waiter]]:
        with self._lock:
            self._sweep(self._ready)
            withdrawn = [entry.request for entry in self._withdrawn]
            self._withdrawn.clear()
            for request in withdrawn:
                del self._entries[request]
            self._in_flight -= len(withdrawn)
            flush: list[Request] = []
            if len(self._ready) >= self._max_batch_size or self._clock() >= self._due:
                most = min(self._max_batch_size, self._window.room(self._in_flight))
                for entry in list(islice(self._ready, most)):
                    del self._ready[entry]
                    entry.in_flight = True
                    flush.append(entry.request)
            self._in_flight += len(flush)
            self._flushes += bool(flush)
            self._largest_flush = max(self._largest_flush, len(flush))
            if not self._ready:
                self._due = float("inf")
            self._admission.leave(flush)
            answered = self._admit()
            return flush, withdrawn, self._unbound(), answered

    def _unbound(self) -> list[Adapter]:
        """Under the lock: the retired adapters that no request is bound to any more."""
        if not self._retired:
            return []
        bound = {each.adapter for each in chain(self._entries, self._admission.requests())}
        return [adapter for adapter in self._retired if adapter not in bound]

    def _settle(self, finished: Sequence[Finished]) -> None:
        """End these requests: cache the rows, then hand every waiter its own. Those that ran out of
        memory with others in flight are queued again."""
        if any(isinstance(end.error, OutOfMemory) for end in finished):
            if self._in_flight > 1:
                finished = self._send_again(finished)
        else:
            self._window.grow()
        no_room = self._cache.keep(finished)
        failed: list[tuple[Waiter, Outcome]] = []
        answered: list[Waiter] = []
        with self._lock:
            entries, withdrawn = self._entries, self._withdrawn
            for end in finished:
                request, result, error = end.request, end.result, end.error
                entry = entries.get(request)
                if entry is None or not entry.in_flight:
                    continue
                del entries[request]
                if withdrawn:
                    withdrawn.pop(entry, None)
                self._in_flight -= 1
                if no_room and error is None:
                    error = no_room.get(request)
                self._failed += error is not None
                self._answered += error is None
                for waiter in entry.waiters:
                    if error is not None:
                        self._drop(waiter)
                        failed.append((waiter, error.fresh()))
                        continue
                    waiter.found[request] = result
                    waiter.missing -= 1
                    if not waiter.missing:
                        answered.append(waiter)
            answered += self._admit()  # who failed may have left room in the queue
        deliver(failed)
        hand_out(answered)

    def _send_again(self, finished: Sequence[Finished]) -> list[Finished]:
        """Queue those again that ran out of memory, first of all, for a smaller flush; the rest."""
        short = [end.request for end in finished if isinstance(end.error, OutOfMemory)]
        with self._lock:
            self._window.shrink(self._in_flight)
            self._requeue([entry for entry in map(self._entries.get, short) if entry is not None])
        return [end for end in finished if not isinstance(end.error, OutOfMemory)]

    def _requeue(self, entries: Iterable[Entry]) -> None:
        """Under the lock: these, which the engine has forgotten, are ready again, before all others."""
        again: dict[Entry, None] = {}
        for entry in [entry for entry in entries if entry.in_flight]:
            self._in_flight -= 1
            if entry in self._withdrawn:
                del self._withdrawn[entry], self._entries[entry.request]
                continue
            entry.in_flight = False
            again[entry] = None
        self._retried += len(again)
        self._admission.enter([entry.request for entry in again])
        self._ready = again | self._ready
        if again:
            self._due = self._clock()

    # -- the rest of a life -------------------------------------------------------------------

    def retire(self, adapter: Adapter) -> None:
        """Have ``turn`` remove the adapter from the engine once no request is bound to it."""
        with self._lock:
            self._retired.append(adapter)
        self._wake()

    def fail(self, lost: Mapping[Adapter, GenrtError]) -> None:
        """End every request that is bound to one of these adapters with that one's error."""
        with self._lock:
            bound = [entry for entry in self._entries.values() if entry.request.adapter in lost]
            queued = [entry for entry in bound if not entry.in_flight]
            self._admission.leave([entry.request for entry in queued])
            for entry in queued:
                entry.in_flight = True
            self._ready = {entry: None for entry in self._ready if not entry.in_flight}
            self._in_flight += len(queued)
        if bound:
            errors = [lost[cast("Adapter", entry.request.adapter)] for entry in bound]
            ends = zip(bound, errors, strict=True)
            self._settle([Finished(entry.request, error=error) for entry, error in ends])

    def close(self, reason: GenrtError | None = None) -> None:
        """End every waiter with ``reason`` (``Closed`` by default), and every later question too.
        Idempotent; returns at once, whatever the engine is doing."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = reason or Closed("the runtime was closed: restart it, or load it again")
            waiting = dict.fromkeys(self._admission.clear())
            waiters = waiting | {w: None for e in self._entries.values() for w in e.waiters}
            for waiter in waiters:
                waiter.missing = 0
            for entry in self._entries.values():
                entry.waiters.clear()
            self._entries.clear()
            self._gatherings.clear()
            self._ready.clear()
            self._withdrawn.clear()
            self._in_flight, self._due = 0, float("inf")
        deliver([(waiter, self._closed.fresh()) for waiter in waiters])

    def reopen(self) -> None:
        """Take questions again, for another engine."""
        with self._lock:
            self._closed = None

    def resume(self) -> None:
        """Send everything that was in flight again: another engine is in the place of that one's."""
        with self._lock:
            self._requeue(self._entries.values())

    def statistics(self) -> BatcherStatistics:
        with self._lock:
            return BatcherStatistics(
                questions=self._questions,
                deduplicated=self._deduplicated,
                cached=self._cached,
                flushes=self._flushes,
                largest_flush=self._largest_flush,
                retried=self._retried,
                answered=self._answered,
                failed=self._failed,
                cancelled=self._cancelled,
                queued=self._admission.queued,
                in_flight=self._in_flight,
                waiting=len(self._admission),
            )

    def __repr__(self) -> str:
        s = self.statistics()
        state = "closed" if self._closed is not None else "open"
        return f"Batcher({state}, {s.queued} queued, {s.in_flight} in flight, {s.flushes} flushes)"
