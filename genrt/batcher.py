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
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch

from genrt.cache import RowCache
from genrt.engine import (
    Adapter,
    Engine,
    Finished,
    LogprobsRequest,
    Request,
    Result,
    failure,
)
from genrt.errors import Closed, GenrtError
from genrt.sampling import TopLogprobs

__all__ = ["Batcher", "BatcherStatistics"]

PATIENCE = 100
"""How many passes a loop that asks something new in each of them is waited for."""

Outcome: TypeAlias = GenrtError | None
"""What a waiter's future gets: an error, or None for "your results are there"."""


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
    """One awaiting caller of one or more requests, on an event loop or (``loop is None``) a thread."""

    requests: Sequence[Request]
    future: asyncio.Future[None] | concurrent.futures.Future[None]
    loop: asyncio.AbstractEventLoop | None
    stacked: bool = False
    results: list[Result | None] = field(default_factory=list)
    missing: dict[Request, list[int]] = field(default_factory=dict)

    def own(self) -> None:
        """Put what others hold too, and parts of larger tensors, into storage of this waiter's own: one
        tensor for all rows if they are to be stacked."""
        if self.stacked:
            self.results = [torch.stack(cast("list[torch.Tensor]", self.results))]
        else:
            self.results = [_copy(cast("Result", result)) for result in self.results]


@dataclass(slots=True, eq=False)
class _Gathering:
    """What one event loop has asked since it was last quiet."""

    requests: dict[Request, None] = field(default_factory=dict)
    questions: int = 0
    passes: int = 0

    def pop(self) -> dict[Request, None]:
        requests, self.requests = self.requests, {}
        return requests


@dataclass(slots=True, eq=False)
class _Entry:
    """One request on its way, and who waits for it."""

    waiters: dict[_Waiter, None] = field(default_factory=dict)
    in_flight: bool = False


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
        self._ready: dict[Request, None] = {}
        self._due = float("inf")
        self._withdrawn: dict[Request, None] = {}
        self._in_flight = 0
        self._retired: list[Adapter] = []
        self._closed: GenrtError | None = None
        self._questions = 0
        self._deduplicated = 0
        self._cached = 0
        self._flushes = 0
        self._largest_flush = 0
        self._cancelled = 0
        self._failed = 0

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
        waiter = _Waiter(requests, loop.create_future(), loop, stacked)
        try:
            if not self._join(waiter):
                await cast("asyncio.Future[None]", waiter.future)
        finally:
            if waiter.missing:
                self._leave(waiter)
        return cast("list[Result]", waiter.results)

    def ask_sync(self, requests: Sequence[Request], *, stacked: bool = False) -> list[Result]:
        """``ask`` for a thread, which blocks; an interrupt withdraws the question."""
        waiter = _Waiter(requests, concurrent.futures.Future(), None, stacked)
        try:
            if not self._join(waiter):
                cast("concurrent.futures.Future[None]", waiter.future).result()
        finally:
            if waiter.missing:
                self._leave(waiter)
        return cast("list[Result]", waiter.results)

    def _join(self, waiter: _Waiter) -> bool:
        """Give the waiter what the cache has and register it for the rest; True if that is nothing."""
        borrowed = 0
        with self._lock:
            if self._closed is not None:
                raise self._closed.fresh()
            waiter.results = [None] * len(waiter.requests)
            for position, request in enumerate(waiter.requests):
                row = self._cache.borrow(request) if isinstance(request, LogprobsRequest) else None
                if row is None:
                    waiter.missing.setdefault(request, []).append(position)
                else:
                    waiter.results[position] = row
                    borrowed += 1
            complete = not waiter.missing
            self._questions += len(waiter.requests)
            self._cached += borrowed
            self._deduplicated += len(waiter.requests) - borrowed - len(waiter.missing)
            wake = self._register(waiter)
        if wake:
            self._wake()
        if complete:
            waiter.own()
        return complete

    def _register(self, waiter: _Waiter) -> bool:
        """Under the lock: join or queue what is missing; True if the engine thread must look."""
        queued: list[Request] = []
        for request in waiter.missing:
            entry = self._entries.get(request)
            if entry is None:
                self._entries[request] = _Entry({waiter: None})
                queued.append(request)
            else:
                self._deduplicated += 1
                self._withdrawn.pop(request, None)
                entry.waiters[waiter] = None
                if not entry.in_flight and request not in self._ready:
                    queued.append(request)
        if not queued:
            return False
        if waiter.loop is None:
            return self._make_ready(queued)
        gathering = self._gathering.get(waiter.loop)
        if gathering is None:
            for loop in [loop for loop in self._gathering if loop.is_closed()]:
                self._sweep(self._gathering.pop(loop).requests)
            gathering = self._gathering[waiter.loop] = _Gathering()
            waiter.loop.call_soon(self._quiet, waiter.loop, gathering, 0)
        gathering.questions += 1
        gathering.requests.update(dict.fromkeys(queued))
        if len(gathering.requests) < self._max_batch_size:
            return False
        return self._make_ready(gathering.pop())

    def _quiet(self, loop: asyncio.AbstractEventLoop, gathering: _Gathering, seen: int) -> None:
        """Once a pass of the loop brought no new question, what it asked is ready. The pass that brought
        the first one counts as one that did, so tasks that others started in it are waited for too."""
        with self._lock:
            gathering.passes += 1
            if gathering.questions != seen and gathering.passes < PATIENCE:
                loop.call_soon(self._quiet, loop, gathering, gathering.questions)
                return
            self._gathering.pop(loop, None)
            wake = self._make_ready(gathering.pop())
        if wake:
            self._wake()

    def _make_ready(self, requests: Iterable[Request]) -> bool:
        """Under the lock. A request that has been dropped, or sent by another loop, stays as it is."""
        added = [r for r in requests if r in self._entries and not self._entries[r].in_flight]
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
        for request in waiter.missing:
            entry = self._entries.get(request)
            if entry is None or entry.waiters.pop(waiter, self) is self or entry.waiters:
                continue
            if entry.in_flight:
                self._withdrawn[request] = None
            else:
                del self._entries[request]
                self._ready.pop(request, None)
        waiter.missing.clear()

    def _sweep(self, requests: Iterable[Request]) -> None:
        """Under the lock: take off these requests the waiters whose loop was closed under them."""
        entries = [self._entries[request] for request in requests if request in self._entries]
        for waiter in {waiter for entry in entries for waiter in entry.waiters}:
            if waiter.loop is not None and waiter.loop.is_closed():
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
                failed = [r for r, entry in self._entries.items() if entry.in_flight]
            engine.cancel(failed)
            finished = [Finished(r, error=failure(error)) for r in failed]
        self._settle(finished)

    def _take(self) -> tuple[list[Request], list[Request], list[Adapter]]:
        with self._lock:
            self._sweep(self._ready)
            withdrawn = list(self._withdrawn)
            self._withdrawn.clear()
            for request in withdrawn:
                del self._entries[request]
            self._in_flight -= len(withdrawn)
            flush: list[Request] = []
            if len(self._ready) >= self._max_batch_size or self._clock() >= self._due:
                flush = list(self._ready)[: self._max_batch_size]
            for request in flush:
                del self._ready[request]
                self._entries[request].in_flight = True
            self._in_flight += len(flush)
            if flush:
                self._flushes += 1
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
        done: list[tuple[_Waiter, Outcome]] = []
        answered: list[_Waiter] = []
        kept = [self._kept(end) for end in finished]
        with self._lock:
            for end in kept:
                entry = self._entries.get(end.request)
                if entry is None or not entry.in_flight:
                    continue
                del self._entries[end.request]
                self._withdrawn.pop(end.request, None)
                self._in_flight -= 1
                self._failed += end.error is not None
                for waiter in entry.waiters:
                    if end.error is not None:
                        self._drop(waiter)
                        done.append((waiter, end.error.fresh()))
                        continue
                    for position in waiter.missing.pop(end.request):
                        waiter.results[position] = end.result
                    if not waiter.missing:
                        answered.append(waiter)
        for waiter in answered:
            try:
                waiter.own()
                done.append((waiter, None))
            except Exception as error:
                done.append((waiter, failure(error)))
        _deliver(done)

    def _kept(self, end: Finished) -> Finished:
        """The same end with its row in the cache; an error if there is no memory for a copy."""
        if isinstance(end.request, LogprobsRequest) and isinstance(end.result, torch.Tensor):
            try:
                self._cache.put(end.request, end.result)
            except Exception as error:
                return Finished(end.request, error=failure(error))
        return end

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
            self._entries.clear()
            self._gathering.clear()
            self._ready.clear()
            self._withdrawn.clear()
            self._retired.clear()
            self._in_flight = 0
            self._due = float("inf")
            for waiter in waiters:
                waiter.missing.clear()
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


def _copy(result: Result) -> Result:
    if isinstance(result, TopLogprobs):
        return TopLogprobs(*(part.clone() for part in result))
    return result.clone() if isinstance(result, torch.Tensor) else result


def _deliver(done: Iterable[tuple[_Waiter, Outcome]]) -> None:
    """Resolve the waiters still waiting: threads here, each event loop by one call into it."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Any, Outcome]]] = {}
    for waiter, outcome in done:
        by_loop.setdefault(waiter.loop, []).append((waiter.future, outcome))
    _resolve(by_loop.pop(None, []))
    for loop, outcomes in by_loop.items():
        try:
            cast("asyncio.AbstractEventLoop", loop).call_soon_threadsafe(_resolve, outcomes)
        except RuntimeError:  # the loop was closed, and with it everyone who waited there
            continue


def _resolve(outcomes: Iterable[tuple[Any, Outcome]]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue
        if outcome is None:
            future.set_result(None)
        else:
            future.set_exception(outcome)
