"""When what a loop asks is complete: questions are gathered, loop by loop, until each has gone quiet.

All but a loop's own callback happens under the batcher's lock.

Rules:
    A loop is quiet once a pass of it brought no new question; one that asks in every pass is waited for
    ``PATIENCE`` passes.
    What was gathered is handed on once, also if an interrupt comes in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from genrt.runtime.waiters import Entry

__all__ = ["MOST_AT_ONCE", "PATIENCE", "AtOnce", "Gatherings"]

MOST_AT_ONCE = 64
"""After so many requests in a row that nobody waited for, the loop goes round once."""

PATIENCE = 100
"""How many passes a loop that asks something new in each of them is waited for."""


class AtOnce(threading.local):
    """How many requests in a row this thread has asked without waiting for one: a task that the cache
    always answers would never let its loop run anything else, not even what is to cancel it. One count
    serves all tasks of the thread, as another task runs only once the loop has gone on."""

    count = 0

    async def go_round(self) -> None:
        """Let the loop run something else, if it is time."""
        if self.count >= MOST_AT_ONCE:
            self.count = 0
            await asyncio.sleep(0)


@dataclass(slots=True, eq=False)
class _Gathering:
    """The entries that one event loop has asked for since it was last quiet."""

    entries: dict[Entry, None] = field(default_factory=dict)
    questions: int = 0
    passes: int = 0


class Gatherings:
    """The entries that each event loop has asked for since it was last quiet.

    Args:
        lock: the batcher's.
        hand_on: the batcher's ``_make_ready``: takes what was gathered, under the lock, and returns
            whether the engine thread must look.
        wake: has the engine thread look; called without the lock.
        most: that many entries of one loop are handed on at once.
    """

    def __init__(
        self,
        lock: threading.RLock,
        hand_on: Callable[[Iterable[Entry]], bool],
        wake: Callable[[], None],
        most: int,
    ) -> None:
        self._lock = lock
        self._hand_on = hand_on
        self._wake = wake
        self._most = most
        self._by_loop: dict[asyncio.AbstractEventLoop, _Gathering] = {}

    def __len__(self) -> int:
        """Return how many loops are being waited for."""
        return len(self._by_loop)

    def __contains__(self, loop: asyncio.AbstractEventLoop) -> bool:
        return loop in self._by_loop

    def add(self, loop: asyncio.AbstractEventLoop | None, entries: Sequence[Entry]) -> bool:
        """Gather what a question queued, on the loop that is running; hand on a thread's. Returns whether
        the engine thread must look."""
        if loop is None or not entries:
            return self._hand_on(entries)
        gathering = self._by_loop.get(loop)
        if gathering is None:
            gathering = _Gathering()
            loop.call_soon(self._quiet, loop, gathering, 0)
            self._by_loop[loop] = gathering
        gathering.questions += 1
        for entry in entries:
            gathering.entries[entry] = None
        return len(gathering.entries) >= self._most and self._end(gathering)

    def of_closed_loops(self) -> list[object]:
        """Forget the loops that were closed before they went quiet, and what they asked; returns that."""
        closed = [loop for loop in self._by_loop if loop.is_closed()]
        return [(loop, self._by_loop.pop(loop)) for loop in closed]

    def end(self) -> None:
        """Pass on what was gathered so far, without waiting for quiet."""
        for gathering in [*self._by_loop.values()]:
            self._end(gathering)

    def clear(self) -> object:
        """Forget everything; returns that."""
        forgotten, self._by_loop = self._by_loop, {}
        return forgotten

    def _end(self, gathering: _Gathering) -> bool:
        wake = self._hand_on(gathering.entries)
        gathering.entries = {}
        return wake

    def _quiet(self, loop: asyncio.AbstractEventLoop, gathering: _Gathering, seen: int) -> None:
        """Look for new questions once a pass of the loop. The pass that brought the first counts as one
        that brought some, so tasks that others started in it are waited for too."""
        try:
            with self._lock:
                gathering.passes += 1
                if gathering.questions != seen and gathering.passes < PATIENCE:
                    loop.call_soon(self._quiet, loop, gathering, gathering.questions)
                    return
                wake = self._end_for_good(loop, gathering)
            if wake:
                self._wake()
        except BaseException:  # an interrupt, after which nothing else would end what was gathered
            with self._lock:
                self._end_for_good(loop, gathering)
            self._wake()
            raise

    def _end_for_good(self, loop: asyncio.AbstractEventLoop, gathering: _Gathering) -> bool:
        if self._by_loop.get(loop) is gathering:  # and not one begun since, after a restart
            del self._by_loop[loop]
        return self._end(gathering)
