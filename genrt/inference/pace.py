"""The decision whether to run ahead, by the time that steps take with and without it.

Both ways are tried in turns, a few steps each, so that whatever else makes steps slow at that time makes
both slow. What runs ahead has to learn first, and is then tried again, more and more seldom.
"""

from __future__ import annotations

import math
import threading

__all__ = ["Pace"]

FIRST = 4
"""How many steps go without at the beginning, where nothing says that running ahead is dear."""

LEARNING = 24
"""How many steps go ahead before the first trial."""

TURN, TURNS = 8, 4
"""How many steps a turn has, and how many turns a trial."""

FASTER = 0.95
"""The share of the time without it, at which running ahead is taken up."""

LOSS = 12
"""How many steps' time may be lost by running ahead until it is given up, whatever there is to learn."""

GAP, LONGEST_GAP = 64, 4096
"""How many steps lie between a trial and the next; twice as many each time, at most."""

SHARE = 0.02
"""The share of all time that trials may lose."""

PATIENT = round(LOSS / SHARE)
"""How many steps earn what the first trial may lose."""


class _Mean:
    """The mean time of steps."""

    __slots__ = ("seconds", "steps")

    def __init__(self) -> None:
        self.seconds = self.steps = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.steps += 1

    def halved(self) -> _Mean:
        """Return the same mean, of half as many steps."""
        half = _Mean()
        half.seconds, half.steps = self.seconds / 2, self.steps / 2
        return half

    def of(self, steps: float) -> float:
        """Return the seconds that so many steps take."""
        return self.seconds * steps / self.steps if self.steps else math.inf


class _Size:
    """Knowledge of steps of one size.

    Args:
        first: how many steps go without at the beginning.
        like: steps of a size like it, which have taught what there is to be learnt.
    """

    __slots__ = ("_gap", "_left", "_means", "_phase", "_trials", "pays")

    def __init__(self, first: int, like: _Size | None) -> None:
        self._phase = "first" if like is None else "between"
        self.pays: bool = like is not None and like.pays
        self._left = first if like is None else max(GAP, first)  # steps of the phase
        self._means = {False: _Mean(), True: _Mean()}
        self._trials = {False: _Mean(), True: _Mean()}
        self._gap = GAP

    def is_ahead(self) -> bool:
        if self._phase == "trial":
            return (self._left - 1) // TURN % 2 == 0
        return self._phase == "learning" or (self._phase == "between" and self.pays)

    def took(self, seconds: float) -> None:
        is_ahead = self.is_ahead()
        ahead, without = self._means[True], self._means[False]
        is_first = self._phase == "trial" and self._left % TURN == 0
        if not is_first:  # the other way has left nothing to go on from
            self._means[is_ahead].add(seconds)
        self._left -= 1
        usual = without.of(1)
        lost = (max(seconds - usual, ahead.seconds - without.of(ahead.steps))) / usual
        is_costly = self._phase != "between" and is_ahead and lost > LOSS
        if self._left and not is_costly:
            return
        if self._phase == "trial" or is_costly:
            self.pays = not is_costly and ahead.seconds < FASTER * without.of(ahead.steps)
            self._left = min(max(self._gap, round(lost / SHARE)), LONGEST_GAP)
            self._means = {False: _Mean(), True: _Mean()}
            if not is_costly:
                self._gap = min(2 * self._gap, LONGEST_GAP)
            self._phase = "between"
        elif self._phase == "first":
            self._phase, self._left = "learning", LEARNING
        else:
            # Trials count half as much each time; what went ahead to learn, and the rest, not at all.
            self._trials = {way: mean.halved() for way, mean in self._trials.items()}
            self._phase, self._left, self._means = "trial", TURN * TURNS, self._trials


class Pace:
    """Says whether to run ahead, for steps of any size.

    Args:
        first: how many steps go without at the beginning.
    """

    def __init__(self, first: int = FIRST) -> None:
        self._first = first
        self._sizes: dict[int, _Size] = {}
        self._lock = threading.Lock()

    def is_ahead(self, count: int) -> bool:
        """Return whether the next step of ``count`` texts is to run ahead."""
        with self._lock:
            return self._size(count).is_ahead()

    def took(self, count: int, seconds: float) -> None:
        """Take note of how long that step took."""
        with self._lock:
            self._size(count).took(seconds)

    def _size(self, count: int) -> _Size:
        size = count.bit_length()
        if size not in self._sizes:
            like = self._sizes.get(size + 1) or self._sizes.get(size - 1)
            self._sizes[size] = _Size(self._first, like)
        return self._sizes[size]
