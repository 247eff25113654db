"""The loads of replicas, and the least of those that are compared, found without looking at each.

Rules:
    Replicas of one load are a bucket, and a heap has the loads: a change costs the logarithm of how many
    different loads there are, and the least costs nothing more.
    A load stays in the heap until it is the least, though no replica may have it by then. When these are
    too many, the heap is made anew.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Set

__all__ = ["Loads"]

MOST_UNUSED = 64
"""How many loads more than four for each replica the heap has at most."""


class Loads:
    """A load for each of ``count`` replicas, all of which are compared at first."""

    def __init__(self, count: int) -> None:
        self._loads = [0.0] * count
        self._places: dict[int, int] = {}  # of those compared, each one's place in its bucket
        self._buckets: dict[float, list[int]] = {}  # for each load in the heap, maybe an empty one
        self._heap: list[float] = []
        self.compare({*range(count)})

    def __getitem__(self, number: int) -> float:
        return self._loads[number]

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def compare(self, numbers: Set[int]) -> None:
        """Compare these replicas from now on, and no others."""
        for number in self._places.keys() - numbers:
            self._leave(number)
        for number in sorted(numbers - self._places.keys()):
            self._enter(number)

    def put(self, number: int, load: float) -> None:
        """Set a replica's load."""
        if number not in self._places:
            self._loads[number] = load
            return
        self._leave(number)
        self._loads[number] = load
        self._enter(number)
        if len(self._heap) > 4 * len(self._places) + MOST_UNUSED:
            self._buckets = {each: these for each, these in self._buckets.items() if these}
            self._heap = sorted(self._buckets)

    def least(self) -> float:
        """Return the least load of the compared, of which there is one at least."""
        while not self._buckets[self._heap[0]]:
            del self._buckets[heapq.heappop(self._heap)]
        return self._heap[0]

    def any_least(self, chosen: random.Random) -> int:
        """Return a replica of the least load, each with the same probability."""
        return chosen.choice(self._buckets[self.least()])

    def _enter(self, number: int) -> None:
        load = self._loads[number]
        bucket = self._buckets.get(load)
        if bucket is None:
            bucket = self._buckets[load] = []
            heapq.heappush(self._heap, load)
        self._places[number] = len(bucket)
        bucket.append(number)

    def _leave(self, number: int) -> None:
        bucket, place = self._buckets[self._loads[number]], self._places.pop(number)
        last = bucket.pop()
        if last != number:
            bucket[place] = last
            self._places[last] = place
