"""Many awaits, one call: queue, dedupe, flush policy, cancellation, delivery.

A question travels: ``join`` finds its row in the cache, joins an equal request that is queued or in
flight, or queues it, if need be when there is room; when the asking loop has gone quiet the request is
*ready*; the engine thread's next ``turn`` submits the ready requests as one flush, runs one engine step,
and delivers what finished.

Rules:
    All state changes under one lock, held for dictionary work on what changed, never on all there is but
    when the batcher is closed, held or goes on with another engine; ``turn`` alone talks to the engine.
    A turn with something in flight always steps; what needs no forward is delivered before that. It
    begins once those have asked who ask again as soon as they are answered.
    A request is in ``_entries`` from the question that queued it until it ends; it ends once.
    Requests that ran out of memory together are sent again, fewer at a time; one alone fails.
    A waiter that leaves is seen by nobody else; a request whose last waiter left is withdrawn: from
    the queue at once, from the engine at the next turn, unless an equal question comes first.
    A row is in the cache before its request leaves ``_entries``; a question looks at both under the lock.
    Entries hold their waiters: a coroutine that is collected waits for nothing, or its loop is closed.
    Waiters and loops that are let go of are kept until the lock is free: their end may run any code.
    The garbage collector and signal handlers may run code while this thread holds the lock, which it can
    take again. What such code calls here only reads; ``close`` refuses, ``leave_soon`` puts off.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from genrt.engines.protocol import Finished, survived
from genrt.errors import WAS_CLOSED, Closed, GenrtError, OutOfMemory
from genrt.questions.contexts import Adapter
from genrt.questions.request import Request, Result
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache
from genrt.runtime.lifecycle import Lifecycle
from genrt.runtime.queue import Admission, Bindings, Entries, Flight, Ready
from genrt.runtime.returning import Returning
from genrt.runtime.statistics import BatcherStatistics
from genrt.runtime.streams import Streams
from genrt.runtime.waiters import (
    Entry,
    Gatherings,
    Observer,
    OnLoops,
    Outcome,
    Waiter,
    deliver,
    hand_out,
    outcome_of,
)

__all__ = ["Batcher"]


class Batcher:
    """The questions of all callers, as flushes for one engine.

    Args:
        cache: answers before the engine is asked, and keeps the rows that come back.
        max_batch_size: the most requests in one flush, by their weight; that many queued ones are ready
            at once. With ``None`` a flush is everything that is ready.
        max_wait_seconds: how long ready requests wait for more company; 0 is never.
        max_queued_requests, max_queued_bytes: how much may be queued; who asks for more waits for room.
        wake: called, from any thread, when there may be something for ``turn`` to do.
        clock, cpu_clock: monotonic seconds; the thread's CPU time. For simulations, as all that follows.
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
        cpu_clock: Callable[[], float] = time.thread_time,
        lock: threading.RLock | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._cache, self._wake, self._observer = cache, wake, observer
        self._lock = lock or threading.RLock()
        most = max_batch_size or sys.maxsize
        self._ready = Ready(most, max_wait_seconds, clock)
        self._flight = Flight(Streams(self._lock, clock, cpu_clock))
        self._on_loops, self._bindings = OnLoops(), Bindings()
        self._admission = Admission(max_queued_requests, max_queued_bytes)
        self._returning = Returning(clock)
        asked = self._returning.asked
        self._gatherings = Gatherings(self._lock, self._make_ready, wake, most, asked)
        self._left: deque[Waiter] = deque()
        self._closed: GenrtError | None = None
        self._last_told: list[tuple[Waiter, Outcome]] = []
        self._counted: Counter[str] = Counter()  # by names of BatcherStatistics
        self._entries = Entries(cache, self._flight, self._ready, self._counted)
        places = self._entries, self._gatherings, self._admission
        own = self._drop, self._wait, self._admit
        self.lifecycle = Lifecycle(self._lock, wake, *places, *own)

    # -- asking and leaving: event loops and threads --------------------------------------------

    def join(self, waiter: Waiter) -> list[Result] | None:
        """Register the waiter for what the cache lacks; return the results if that is nothing. Raises
        Closed if the batcher is."""
        with self._lock:
            if self._closed is not None:
                raise self._closed.fresh()
            try:
                if self.lifecycle.up and self.lifecycle.stop(waiter):
                    return None
                waiter.bind(self.lifecycle.weights_version)
                must_wait, entries = self._admission.must_wait(waiter.requests), self._entries
                if must_wait and not all(r in entries or r in self._cache for r in waiter.requests):
                    self._wait(waiter)
                    self._gatherings.end()
                    wake = bool(self._ready)
                else:
                    wake = self._gatherings.add(waiter.loop, self._register(waiter))
                lacks_something = waiter.missing  # later, it may have failed and miss nothing more
            except BaseException:  # an interrupt, wherever it was
                self._recount()
                raise
        if wake:
            self._wake()
        return None if lacks_something else outcome_of(waiter)

    def _wait(self, waiter: Waiter) -> None:
        """Have it wait for room, or behind the holds, under the lock."""
        self._bindings.bind(waiter.requests)
        (self._admission.hold if self.lifecycle.up else self._admission.wait)(waiter)
        self._on_loops.add(waiter)

    def _register(self, waiter: Waiter) -> list[Entry]:
        """Find or join each request, under the lock; return the entries that have to be queued."""
        if self._observer is not None:
            self._observer.registering(waiter)
        queued, new = self._entries.register(waiter)
        self._admission.enter(new)
        self._bindings.bind(new)
        self._on_loops.add(waiter)
        return queued

    def _recount(self) -> None:
        """Count what is queued and bound anew, under the lock, after an interrupt in the middle of it."""
        self._admission.recount(each for each, e in self._entries.items() if not e.in_flight)
        self._bindings.clear()
        self._bindings.bind([*self._entries, *self._admission.requests()])

    def _admit(self) -> list[Waiter]:
        """Register waiters while there is room, under the lock; return those that lack nothing."""
        answered: list[Waiter] = []
        while (waiter := self._admission.first()) is not None:
            self._enter(waiter)
            if not waiter.missing:
                self._on_loops.discard(waiter)
                answered.append(waiter)
        return answered

    def _enter(self, waiter: Waiter) -> None:
        """Register a waiter that waited for room, under the lock."""
        self._admission.admit(waiter)
        self._bindings.bind(waiter.requests, -1)
        waiter.bind(self.lifecycle.weights_version)
        self._make_ready(self._register(waiter))

    def _make_ready(self, entries: Iterable[Entry]) -> bool:
        """Have entries sent, under the lock, but those dropped or sent already; return if any are."""
        added = [entry for entry in entries if entry.waiters and not entry.in_flight]
        self._ready.add(added)
        return bool(added)

    def leave(self, waiter: Waiter) -> None:
        """Withdraw the question of a waiter that is still missing something."""
        if self._observer is not None:
            self._observer.leaving(waiter)
        with self._lock:
            self._cancel(waiter)
        self._wake()  # to forget requests, an adapter, or let in who waits for room

    def leave_soon(self, waiter: Waiter) -> None:
        """Withdraw it at the next turn. This takes no lock: finalizers call it, whatever is locked."""
        self._left.append(waiter)
        self._wake()

    def _cancel(self, waiter: Waiter) -> None:
        """Count and drop a waiter that leaves by itself, under the lock, if it has not ended."""
        if waiter.missing:
            self._counted["cancelled"] += 1
            self._drop(waiter)

    def _drop(self, waiter: Waiter) -> None:
        """Take a waiter off every request it still waits for, under the lock."""
        waiter.missing = 0
        self._on_loops.discard(waiter)
        if self._admission.withdraw(waiter):
            self._bindings.bind(waiter.requests, -1)
            return
        for request, result in waiter.found.items():
            entry = self._entries.get(request) if result is None else None
            if entry is None or entry.waiters.pop(waiter, self) is self or entry.waiters:
                continue
            if entry.in_flight:
                self._flight.withdraw(entry)
            else:
                self._end(entry)
                self._ready.discard(entry)
                self._admission.leave([request])

    def _end(self, entry: Entry) -> None:
        """Forget an entry that has ended, under the lock."""
        del self._entries[entry.request]
        self._flight.end(entry)
        self._bindings.bind([entry.request], -1)

    def _sweep(self) -> list[object]:
        """Cancel waiters of closed loops and of finalizers, under the lock; return what is let go of."""
        waiters = self._on_loops.closed()
        waiters += [self._left.popleft() for _ in range(len(self._left))]
        for waiter in waiters:
            self._cancel(waiter)
        return [waiters, self._gatherings.of_closed_loops()]

    # -- turning: the engine thread -----------------------------------------------------------

    def seconds_until_due(self) -> float | None:
        """Return the seconds until ``turn`` has something to do; ``None``: not before ``wake``."""
        with self._lock:
            has_work = self._left or self._free() or self._admission.first()
            if has_work or (self.lifecycle.is_watched and self.lifecycle.is_passed):
                return 0.0
            if self._flight:  # behind a hold, what comes would not be in the next step
                return 0.0 if self.lifecycle.up else self._returning.seconds()
            return self._ready.seconds_until_due()

    def turn(self, engine: AnsweringEngine) -> None:
        """Move everything one step on: withdraw, submit, deliver what needs no forward, step, deliver.

        Raises:
            EngineDied: the engine can't go on. Nobody has been told; what was in flight still is.
        """
        flush, withdrawn, retired, answered = self._take()
        if self._observer is not None:
            self._observer.taken(flush, withdrawn)
        hand_out(answered)
        if withdrawn:
            engine.cancel(withdrawn)
        for adapter in retired:
            engine.remove_adapter(adapter)
            self._cache.forget(adapter)
            with self._lock:
                self._bindings.gone(adapter)
        if flush:
            self._settle(self._sent(engine, flush))
        if self._flight:
            with self._returning.step():
                finished = self._stepped(engine)
            self._settle(finished, stepped=True)
            if self._flight.streams.by_loop:
                self._flight.streams.tell(engine.progress)
        if self.lifecycle.is_watched and self.lifecycle.is_passed:
            self.lifecycle.tell()

    def _sent(self, engine: AnsweringEngine, flush: Sequence[Request]) -> list[Finished]:
        """Submit a flush; what of it has ended already."""
        try:
            engine.submit(flush)
        except Exception as error:
            failed = survived(error)
            return [Finished(request, error=failed) for request in flush]
        return engine.ready()

    def _stepped(self, engine: AnsweringEngine) -> list[Finished]:
        """Step; what has ended."""
        try:
            return engine.step(lambda ends: self._settle(ends, stepped=True))
        except Exception as error:
            failed = survived(error)
            with self._lock:
                lost = [entry.request for entry in self._flight]
            engine.cancel(lost)
            return [Finished(request, error=failed) for request in lost]

    def _take(self) -> tuple[list[Request], list[Request], list[Adapter], list[Waiter]]:
        with self._lock:
            gone = self._sweep()
            withdrawn = self._flight.withdrawn
            for entry in withdrawn:
                self._end(entry)
            sent = self._ready.take(self._flight.room, is_idle=not self._flight)
            weight = self._flight.send(sent)
            flush = [entry.request for entry in sent]
            self._counted["flushes"] += bool(flush)
            self._counted["largest_flush"] = max(self._counted["largest_flush"], weight)
            self._admission.leave(flush)
            answered = self._admit()
            free = self._free()
        del gone  # without the lock: see the rules
        return flush, [entry.request for entry in withdrawn], free, answered

    def _free(self) -> list[Adapter]:
        """Return the adapters that may go, under the lock: none in an update or a sleep."""
        return [] if self.lifecycle.owner is not None else self._bindings.free()

    def _settle(self, finished: Sequence[Finished], *, stepped: bool = False) -> None:
        """End these requests: cache the rows, then hand every waiter its own. Those that ran out of
        memory with others in flight are queued again."""
        if any(isinstance(end.error, OutOfMemory) for end in finished):
            if self._flight.weight > 1:
                self._flight.shrink()  # one alone may be a population, whose parts are asked next
            if len(self._flight) > 1:
                finished = self._send_again(finished)
        elif stepped:
            self._flight.grow()
        if not finished:
            return
        no_room = self._cache.keep(finished)
        failed: list[tuple[Waiter, Outcome]] = []
        answered: list[Waiter] = []
        with self._lock:
            for end in finished:
                request, result, error = end.request, end.result, end.error
                entry = self._entries.get(request)
                if entry is None or not entry.in_flight:
                    continue
                self._end(entry)
                error = error or no_room.get(request)
                self._counted["answered" if error is None else "failed"] += request.weight
                for waiter in entry.waiters:
                    if error is not None:
                        self._drop(waiter)
                        failed.append((waiter, error.fresh()))
                        continue
                    waiter.found[request] = result
                    waiter.missing -= 1
                    if not waiter.missing:
                        self._on_loops.discard(waiter)
                        answered.append(waiter)
            if stepped:
                self._returning.told(answered)
            answered += self._admit()  # who failed may have left room in the queue
        deliver(failed)
        hand_out(answered)

    def _send_again(self, finished: Sequence[Finished]) -> list[Finished]:
        """Queue those again that ran out of memory, first of all, for a smaller flush; the rest."""
        short = [end.request for end in finished if isinstance(end.error, OutOfMemory)]
        with self._lock:
            self._requeue([entry for entry in map(self._entries.get, short) if entry is not None])
        return [end for end in finished if not isinstance(end.error, OutOfMemory)]

    def _requeue(self, entries: Iterable[Entry]) -> None:
        """Make entries that the engine has forgotten ready again, before all others, under the lock."""
        withdrawn, again = set(self._flight.withdrawn), []
        for entry in [entry for entry in entries if entry.in_flight]:
            if entry in withdrawn:
                self._end(entry)
            else:
                self._flight.bring_back(entry)
                again.append(entry)
        self._counted["retried"] += sum(entry.request.weight for entry in again)
        self._admission.enter([entry.request for entry in again])
        self._ready.put_back(again)

    # -- the rest of a life -------------------------------------------------------------------

    def retire(self, adapter: Adapter) -> None:
        """Have ``turn`` remove the adapter from the engine once no request is bound to it."""
        with self._lock:
            self._bindings.retire(adapter)
        self._wake()

    def fail(self, lost: Mapping[Adapter, GenrtError]) -> None:
        """End every request that is bound to one of these adapters with that one's error."""
        with self._lock:
            for waiter in self._admission.bound_to(lost):
                self._enter(waiter)  # its bounds do not matter: it fails below and is never sent
            bound = [entry for entry in self._entries.values() if entry.request.adapter in lost]
            for entry in (queued := [entry for entry in bound if not entry.in_flight]):
                self._ready.discard(entry)
            self._admission.leave([entry.request for entry in queued])
            self._flight.send(queued)
        if requests := [entry.request for entry in bound]:
            errors = [lost[cast("Adapter", each.adapter)] for each in requests]
            self._settle([Finished(r, error=e) for r, e in zip(requests, errors, strict=True)])

    @property
    def is_closed(self) -> bool:
        """True once questions are refused; read without the lock."""
        return self._closed is not None

    @property
    def most_in_flight(self) -> int:
        """How much the engine's memory may have room for; read without the lock."""
        return self._flight.most

    def close(self, reason: GenrtError | None = None) -> bool:
        """End every waiter with ``reason`` (``Closed`` by default), and every later question too.
        Idempotent; returns at once, whatever the engine is doing.

        Returns ``False``, and does nothing, if the calling thread is in the middle of something under the
        lock, as where a finalizer or a signal handler interrupts it: another thread must close then.
        """
        # As threading.Condition asks a lock. Taking it would go on in a state that is half changed.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return False
        with self._lock:
            if self._closed is None:
                self._closed = reason or Closed(WAS_CLOSED)
                self._last_told = [(waiter, self._closed.fresh()) for waiter in self._let_go()]
            self._returning.clear()
            told, gone, holds = self._last_told, self._gatherings.clear(), self.lifecycle.clear()
            reason = self._closed
        del gone
        self.lifecycle.fail(holds, reason)
        deliver(told)  # also what an earlier call did not come to, which an interrupt ended
        self._last_told = []
        return True

    def _let_go(self) -> Iterable[Waiter]:
        """Forget everything that is asked, under the lock; return the waiters."""
        waiting = dict.fromkeys(self._admission.clear())
        waiters = waiting | {w: None for e in self._entries.values() for w in e.waiters}
        for waiter in waiters:
            waiter.missing = 0
        for entry in self._entries.values():
            entry.waiters.clear()
        for each in (self._entries, self._on_loops, self._ready, self._flight, self._bindings):
            each.clear()
        return waiters

    def reopen(self) -> None:
        """Take questions again, for another engine."""
        with self._lock:
            self._closed = None
            self.lifecycle.reopen()

    def resume(self) -> None:
        """Send everything that was in flight again: another engine is in the place of that one's."""
        with self._lock:
            self._requeue(self._flight)

    def statistics(self) -> BatcherStatistics:
        with self._lock:
            admission, weight = self._admission, self._flight.weight
            return BatcherStatistics(
                **self._counted, queued=admission.queued, in_flight=weight, waiting=len(admission)
            )

    def __repr__(self) -> str:
        s, state = self.statistics(), "closed" if self.is_closed else "open"
        return f"Batcher({state}, {s.queued} queued, {s.in_flight} in flight, {s.flushes} flushes)"
