"""A lock that goes to whoever has waited longest: the engines of a process take turns by it."""

from __future__ import annotations

import collections
import threading

__all__ = ["Turns"]

_HANDED_OVER = -1
"""The holder between the one that left and the one that was woken: no thread."""


class Turns:
    """A context manager that one thread at a time is in, and may enter again inside itself.

    A thread that leaves hands over to the first one waiting, even if it comes back at once. So an engine
    that steps all the time, as in its self-test, leaves every other engine a step in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._depth = 0
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def __enter__(self) -> None:
        own = threading.get_ident()
        if self._holder != own:
            with self._lock:
                gate = self._gate()
            if gate is not None:
                self._wait(gate)
            self._holder = own
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._hand_over()

    def _gate(self) -> threading.Lock | None:
        """Return a gate in the queue to wait at, ``None`` if nobody is inside. Call it under the lock."""
        if self._holder is None:
            self._holder = _HANDED_OVER
            return None
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        return gate

    def _wait(self, gate: threading.Lock) -> None:
        try:
            gate.acquire()
        except BaseException:  # an interrupt
            with self._lock:
                was_waiting = gate in self._waiting
                if was_waiting:
                    self._waiting.remove(gate)
            if not was_waiting:
                self._hand_over()
            raise

    def _hand_over(self) -> None:
        with self._lock:
            self._holder = _HANDED_OVER if self._waiting else None
            if self._waiting:
                self._waiting.popleft().release()
