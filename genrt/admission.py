"""Who may queue, and how much may be in flight: bounds, turns for those who wait, flushes that shrink.

Pure bookkeeping, under the batcher's lock.

Rules:
    A question enters the queue whole, or waits whole; one that is larger than the queue enters an empty
    one, so nobody waits for ever.
    Those who wait enter by turns, one question of each client: who asks for much waits for its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator
from itertools import chain
from operator import attrgetter

from genrt.engine import Request
from genrt.waiters import Waiter

__all__ = ["Admission", "Window"]

GOOD_STEPS = 8
"""After so many steps that went well it is tried to send more again; a step that fails is dear."""

_NBYTES = attrgetter("nbytes")


class Admission:
    """The bounds of the queue, and the waiters there is no room for yet.

    Args:
        max_requests, max_bytes: what may be queued: requests, and bytes of their contexts and masks.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queued = 0
        self._waiting: dict[Hashable, dict[Waiter, None]] = {}

    def __len__(self) -> int:
        """How many waiters wait for room."""
        return sum(map(len, self._waiting.values()))

    def requests(self) -> Iterator[Request]:
        """What those ask who wait for room."""
        for waiter in chain.from_iterable(self._waiting.values()):
            yield from waiter.requests

    @property
    def queued(self) -> int:
        """How many requests are in the queue."""
        return self._queued

    def enter(self, requests: Collection[Request]) -> None:
        """These are in the queue from now on."""
        self._queued += len(requests)
        self._bytes += sum(map(_NBYTES, requests))

    def leave(self, requests: Collection[Request]) -> None:
        """These have left the queue: for the engine, or for good."""
        self._queued -= len(requests)
        self._bytes -= sum(map(_NBYTES, requests))

    def recount(self, requests: Iterable[Request]) -> None:
        """These are in the queue, and no others."""
        self._queued = self._bytes = 0
        self.enter(list(requests))

    def must_wait(self, requests: Collection[Request]) -> bool:
        """Whether there is no room for a question of these, or others have waited longer."""
        return bool(self._waiting) or not self._fits(requests)

    def _fits(self, requests: Collection[Request]) -> bool:
        return not self._queued or (
            self._queued + len(requests) <= self._max_requests
            and self._bytes + sum(map(_NBYTES, requests)) <= self._max_bytes
        )

    def wait(self, waiter: Waiter) -> None:
        """Behind the others of the same client: its event loop, or the thread that asks."""
        client = waiter.loop or threading.get_ident()
        waiter.missing = len(waiter.requests)
        self._waiting.setdefault(client, {})[waiter] = None

    def withdraw(self, waiter: Waiter) -> bool:
        """Whether this one was waiting; it does not any more."""
        for client, waiters in self._waiting.items():
            if waiter in waiters:
                del waiters[waiter]
                if not waiters:
                    del self._waiting[client]
                return True
        return False

    def next(self) -> Waiter | None:
        """The waiter whose turn it is, if there is room for its question; it waits no more."""
        for client, waiters in self._waiting.items():
            waiter = next(iter(waiters))
            if not self._fits(waiter.requests):
                return None
            del self._waiting[client], waiters[waiter]
            if waiters:
                self._waiting[client] = waiters
            waiter.missing = 0
            return waiter
        return None

    def clear(self) -> list[Waiter]:
        """Empty the queue; who waited for room in it."""
        waiting = list(chain.from_iterable(self._waiting.values()))
        self._waiting.clear()
        self._queued = self._bytes = 0
        return waiting


class Window:
    """How many requests may be in flight at once: any number, until the engine's memory runs out."""

    def __init__(self) -> None:
        self._size = sys.maxsize
        self._good_steps = 0

    def room(self, in_flight: int) -> int:
        """How many more may be sent."""
        return max(0, self._size - in_flight)

    def shrink(self, in_flight: int) -> None:
        """So many were too many."""
        self._size = max(1, in_flight // 2)
        self._good_steps = 0

    def grow(self) -> None:
        """A step went well; after some such, twice as many may."""
        self._good_steps += 1
        if self._good_steps == GOOD_STEPS:
            self._size = min(2 * self._size, sys.maxsize)
            self._good_steps = 0
