"""The requests in flight, those of them that nobody wants, and how many there may be.

Pure bookkeeping, under the batcher's lock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from genrt.questions.request import Request
from genrt.runtime.waiters import Entry

__all__ = ["Flight", "Window"]

GOOD_STEPS = 8
"""After so many steps that went well, more is sent again: a step that fails costs as much as many do."""


class Flight:
    """The entries that are in flight, and those of them that are withdrawn: the engine is to forget them
    at the next turn, unless somebody asks for them first."""

    def __init__(self) -> None:
        self._entries: dict[Entry, None] = {}
        self._withdrawn: dict[Entry, None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def requests(self) -> list[Request]:
        """The requests in flight."""
        return [entry.request for entry in self._entries]

    @property
    def entries(self) -> list[Entry]:
        """The requests in flight, with their waiters."""
        return [*self._entries]

    @property
    def withdrawn(self) -> list[Entry]:
        """The entries that have lost their last waiter."""
        return [*self._withdrawn]

    def send(self, entries: Iterable[Entry]) -> None:
        """Have these in flight."""
        for entry in entries:
            entry.in_flight = True
            self._entries[entry] = None

    def withdraw(self, entry: Entry) -> None:
        """Have the engine forget this one, which has lost its last waiter."""
        self._withdrawn[entry] = None

    def rescue(self, entry: Entry) -> None:
        """Let this one go on: it has a waiter again, if it had none."""
        self._withdrawn.pop(entry, None)

    def end(self, entry: Entry) -> None:
        """Forget this one, wherever it is."""
        self._entries.pop(entry, None)
        self._withdrawn.pop(entry, None)

    def bring_back(self, entry: Entry) -> None:
        """Have this one in flight no more; it is to be sent again."""
        entry.in_flight = False
        del self._entries[entry]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._withdrawn.clear()


class Window:
    """How many requests may be in flight at once: any number, until the engine's memory runs out."""

    def __init__(self) -> None:
        self._size = sys.maxsize
        self._good_steps = 0

    def room(self, in_flight: int) -> int:
        """Return how many more may be sent."""
        return max(0, self._size - in_flight)

    def shrink(self, in_flight: int) -> None:
        """Halve the window after running out of memory with so many in flight."""
        self._size = max(1, in_flight // 2)
        self._good_steps = 0

    def grow(self) -> None:
        """Count a step that went well; after ``GOOD_STEPS`` of them, double the window."""
        self._good_steps += 1
        if self._good_steps == GOOD_STEPS:
            self._size = min(2 * self._size, sys.maxsize)
            self._good_steps = 0
