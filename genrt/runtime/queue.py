"""Where requests are: in the bounded queue, ready to be sent, in flight; and which adapters they hold.

Pure bookkeeping, under the batcher's lock.

Rules:
    Requests are counted by their weights; the sums are kept up to date as requests come and go.
    A question enters the queue whole, or waits whole; one that is larger than the queue enters an empty
    one, so nobody waits for ever.
    Those who wait enter by turns, one question of each client: who asks for much waits for its own.
    A retired adapter goes after the last request that is bound to it.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Sequence
from typing import cast

from genrt.questions.completions import Streamed
from genrt.questions.contexts import Adapter
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.cache import RowCache
from genrt.runtime.streams import Streams
from genrt.runtime.waiters import Entry, Waiter

__all__ = ["Admission", "Bindings", "Entries", "Flight", "Ready"]

GOOD_STEPS = 8
"""After so many steps that went well, more is sent again: a step that fails costs as much as many do."""


class Admission:
    """The bounds of the queue, and the waiters there is no room for yet.

    Args:
        max_requests, max_bytes: what may be queued: the weight of requests, and the bytes of their
            contexts and masks.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queued = 0
        # Of clients, and of each one's waiters, the first is found at once. With each waiter, its size.
        self._waiting: OrderedDict[Hashable, OrderedDict[Waiter, tuple[int, int]]] = OrderedDict()
        self._clients: dict[Waiter, Hashable] = {}
        self._held: dict[Waiter, None] = {}  # behind a hold, and not in ``_waiting``

    def __len__(self) -> int:
        """Return how many waiters wait for room, or behind a hold."""
        return len(self._clients)

    @property
    def is_waited_for(self) -> bool:
        """True if a waiter waits for room."""
        return bool(self._waiting)

    def requests(self) -> Iterator[Request]:
        """Yield the requests of waiters not yet admitted."""
        for waiter in self._clients:
            yield from waiter.requests

    @property
    def queued(self) -> int:
        """How many requests are in the queue."""
        return self._queued

    def enter(self, requests: Collection[Request]) -> None:
        """Count requests that enter the queue."""
        weight, nbytes = _size(requests)
        self._queued += weight
        self._bytes += nbytes

    def leave(self, requests: Collection[Request]) -> None:
        """Count requests that have left the queue: for the engine, or for good."""
        weight, nbytes = _size(requests)
        self._queued -= weight
        self._bytes -= nbytes

    def recount(self, requests: Iterable[Request]) -> None:
        """Count anew: these requests are in the queue, and no others."""
        self._queued = self._bytes = 0
        self.enter(list(requests))

    def must_wait(self, requests: Collection[Request]) -> bool:
        """Tell whether a question of these has no room, or others have waited longer."""
        return bool(self._clients or (self._queued and not self._fits(_size(requests))))

    def _fits(self, size: tuple[int, int]) -> bool:
        weight, nbytes = size
        queued, held = self._queued + weight, self._bytes + nbytes
        return queued <= self._max_requests and held <= self._max_bytes

    def wait(self, waiter: Waiter) -> None:
        """Have it wait behind the others of the same client: its event loop, or the thread that asks."""
        client = waiter.loop or threading.get_ident()
        size = _size(waiter.requests)
        waiter.missing = len(waiter.requests)
        self._clients[waiter] = client
        try:
            self._waiting.setdefault(client, OrderedDict())[waiter] = size
        except BaseException:  # an interrupt
            self.withdraw(waiter)
            raise

    def hold(self, waiter: Waiter) -> None:
        """Have it wait behind a hold, until ``go_on``."""
        waiter.missing = len(waiter.requests)
        self._clients[waiter] = waiter.loop or threading.get_ident()
        self._held[waiter] = None

    def go_on(self) -> None:
        """Have all that are held wait for room, in the order in which they came."""
        for waiter in self._held:
            waiters = self._waiting.setdefault(self._clients[waiter], OrderedDict())
            waiters[waiter] = _size(waiter.requests)
        self._held.clear()

    def waiters(self) -> list[Waiter]:
        """Return the waiters that wait for room."""
        return [waiter for waiter in self._clients if waiter not in self._held]

    def told_in_part(self) -> list[Waiter]:
        """Return the waiters, held ones too, whose stream was told a part of its text."""
        return [each for each in self._clients if each.flow is not None and each.flow.is_told]

    def withdraw(self, waiter: Waiter) -> bool:
        """Have it wait no more; returns whether it did."""
        client = self._clients.pop(waiter, None)
        if client is None:
            return False
        self._held.pop(waiter, None)
        waiters = self._waiting.get(client, OrderedDict())
        waiters.pop(waiter, None)
        if not waiters:
            self._waiting.pop(client, None)
        return True

    def first(self) -> Waiter | None:
        """Return the waiter whose turn it is, if there is room for its question."""
        if not self._waiting:
            return None
        waiter, size = next(iter(next(iter(self._waiting.values())).items()))
        return waiter if not self._queued or self._fits(size) else None

    def admit(self, waiter: Waiter) -> None:
        """Have this one wait no more, and its client behind the others."""
        if waiter not in self._held:
            self._waiting.move_to_end(self._clients[waiter])
        self.withdraw(waiter)
        waiter.missing = 0

    def bound_to(self, adapters: Container[Adapter | None]) -> list[Waiter]:
        """Return the waiters whose requests are bound to one of these."""
        return [
            waiter
            for waiter in self._clients
            if any(request.adapter in adapters for request in waiter.requests)
        ]

    def clear(self) -> list[Waiter]:
        """Empty the queue; return the waiters without room in it."""
        waiting = [*self._clients]
        self._waiting.clear()
        self._clients.clear()
        self._held.clear()
        self._queued = self._bytes = 0
        return waiting


def _size(requests: Iterable[Request]) -> tuple[int, int]:
    """Return the weight of requests, and the bytes of their contexts and masks."""
    weight = nbytes = 0
    for request in requests:
        weight += request.weight
        nbytes += request.nbytes
    return weight, nbytes


class Ready:
    """The entries that are ready to be sent, oldest first, and when the next of them are.

    Args:
        most: the weight that is sent at once; so much is sent without waiting for more.
        wait_seconds: how long the oldest waits for more.
        clock: seconds, monotonic.
    """

    def __init__(self, most: int, wait_seconds: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._wait_seconds = float(wait_seconds)
        self._clock = clock
        # The first is found at once. With each entry, its weight.
        self._entries: OrderedDict[Entry, int] = OrderedDict()
        self._weight = 0
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entries: Iterable[Entry]) -> None:
        """Have these sent after the others; those that are here already keep their place."""
        if not self._entries:
            self._due = self._clock() + self._wait_seconds
            self._weight = 0  # an interrupt may have left some
        for entry in entries:
            if entry not in self._entries:
                self._weight += entry.request.weight
                self._entries[entry] = entry.request.weight

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Have these, which were taken, sent before the others and without waiting for more."""
        for entry in reversed(entries):
            self._put_first(entry, entry.request.weight)
        if entries:
            self._due = self._clock()

    def discard(self, entry: Entry) -> None:
        """Have this one not sent, if it is here."""
        self._weight -= self._entries.pop(entry, 0)

    def seconds_until_due(self) -> float | None:
        """Return how long nothing is to be sent; ``None`` while there is nothing."""
        if not self._entries:
            return None
        return 0.0 if self._weight >= self._most else max(0.0, self._due - self._clock())

    def take(self, room: int, *, is_idle: bool) -> list[Entry]:
        """Remove and return those that are to be sent now, and for which there is room. One that is
        larger than a flush is one by itself; one for which there is no room is sent if nothing else is,
        once the engine ``is_idle``."""
        if self.seconds_until_due() != 0.0:
            return []
        left = min(self._most, room)
        if self._weight <= left:
            taken = [*self._entries]
            self.clear()
            return taken
        taken = []
        while self._entries:
            entry, weight = self._entries.popitem(last=False)
            self._weight -= weight
            if weight > left and (taken or (weight > room and not is_idle)):
                self._put_first(entry, weight)
                break
            taken.append(entry)
            left -= weight
        return taken

    def _put_first(self, entry: Entry, weight: int) -> None:
        self._weight += weight
        self._entries[entry] = weight
        self._entries.move_to_end(entry, last=False)

    def clear(self) -> None:
        """Have nothing sent."""
        self._entries.clear()
        self._weight = 0


class Entries(dict[Request, Entry]):
    """The entries by request, from the question that queued each to its end.

    Args:
        cache: has rows that need no entry.
        flight, ready: where else an entry is.
        counted: the batcher's counters.
    """

    def __init__(
        self, cache: RowCache, flight: Flight, ready: Ready, counted: Counter[str]
    ) -> None:
        super().__init__()
        self._cache = cache
        self._flight = flight
        self._ready = ready
        self._counted = counted

    def register(self, waiter: Waiter) -> tuple[list[Entry], list[Request]]:
        """Find or join each request of a question; return the entries that have to be queued, and the
        requests of those that are new."""
        queued: list[Entry] = []
        new: list[Request] = []
        found, counted, borrow, asked = waiter.found, self._counted, self._cache.borrow, 0
        for request in waiter.requests:
            asked += request.weight
            if request in found:
                counted["deduplicated" if found[request] is None else "cached"] += request.weight
                continue
            row = found[request] = borrow(request) if isinstance(request, LogprobsRequest) else None
            if row is not None:
                counted["cached"] += 1
                continue
            waiter.missing += 1
            entry = self.get(request)
            if entry is None:
                self[request] = entry = Entry(request, {waiter: None}, waiter.flow)
                queued.append(entry)
                new.append(request)
                continue
            counted["deduplicated"] += request.weight
            entry.waiters[waiter] = None
            self._flight.rescue(entry)
            if not entry.in_flight and entry not in self._ready:
                queued.append(entry)
        counted["questions"] += asked
        return queued, new


class Flight:
    """The entries in flight; those of them that are withdrawn, which the engine is to forget at the next
    turn, unless somebody asks for them first; and how much there may be, ``most``: anything, until the
    engine's memory runs out. ``streams`` are those of them whose tokens are told meanwhile."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._entries: dict[Entry, int] = {}  # with the weight of each
        self._weight = 0
        self._withdrawn: dict[Entry, None] = {}
        self.most = sys.maxsize
        self._good_steps = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def withdrawn(self) -> list[Entry]:
        """The entries that have lost their last waiter."""
        return [*self._withdrawn]

    @property
    def weight(self) -> int:
        """The weight of all that is in flight."""
        return self._weight

    @property
    def room(self) -> int:
        """How much more may be sent."""
        return max(0, self.most - self._weight)

    def shrink(self) -> None:
        """Halve what may be in flight, after running out of memory with what is now."""
        self.most = max(1, self._weight // 2)
        self._good_steps = 0

    def grow(self) -> None:
        """Count a step that went well; after ``GOOD_STEPS`` of them, double what may be in flight."""
        self._good_steps += 1
        if self._good_steps == GOOD_STEPS:
            self.most = min(2 * self.most, sys.maxsize)
            self._good_steps = 0

    def send(self, entries: Iterable[Entry]) -> int:
        """Have these, which are not, in flight; return their weight."""
        before = self._weight
        for entry in entries:
            entry.in_flight = True
            self._entries[entry] = weight = entry.request.weight
            self._weight += weight
            if entry.flow is not None:
                self.streams.add(cast("Streamed", entry.request), entry.flow)
        return self._weight - before

    def withdraw(self, entry: Entry) -> None:
        """Have the engine forget this one, which has lost its last waiter."""
        self._withdrawn[entry] = None

    def rescue(self, entry: Entry) -> None:
        """Let this one go on: it has a waiter again, if it had none."""
        self._withdrawn.pop(entry, None)

    def end(self, entry: Entry) -> None:
        """Forget this one, wherever it is."""
        self._weight -= self._entries.pop(entry, 0)
        self._withdrawn.pop(entry, None)
        if entry.flow is not None:
            self.streams.discard(cast("Streamed", entry.request), entry.flow)

    def bring_back(self, entry: Entry) -> None:
        """Have this one in flight no more; it is to be sent again."""
        self.end(entry)
        entry.in_flight = False

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._weight = 0
        self._withdrawn.clear()
        self.streams.clear()


class Bindings:
    """How many requests are bound to each adapter, queued, in flight or waiting for room; and the
    adapters that are retired, whose weights are still loaded."""

    def __init__(self) -> None:
        self._bound: Counter[Adapter] = Counter()
        self._retired: list[Adapter] = []

    def bind(self, requests: Iterable[Request], times: int = 1) -> None:
        """Count these for their adapters; -1 times undoes it."""
        for request in requests:
            adapter = request.adapter
            if adapter is not None:
                self._bound[adapter] += times
                if not self._bound[adapter]:
                    del self._bound[adapter]

    def clear(self) -> None:
        """Forget every request; what is retired stays so."""
        self._bound.clear()

    def retire(self, adapter: Adapter) -> None:
        """Have this one go once no request is bound to it."""
        self._retired.append(adapter)

    def gone(self, adapter: Adapter) -> None:
        """Forget a retired adapter: its weights are loaded no more."""
        self._retired.remove(adapter)

    def free(self) -> list[Adapter]:
        """Return the retired adapters that no request is bound to."""
        return [adapter for adapter in self._retired if adapter not in self._bound]

    def __bool__(self) -> bool:
        return bool(self._retired)
