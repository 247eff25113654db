"""What a runtime did, counted where it happens: frozen values, to be subtracted from later ones."""

from __future__ import annotations

from dataclasses import dataclass

from genrt.cache import CacheStatistics
from genrt.engine import EngineStatistics

__all__ = ["BatcherStatistics", "Statistics"]


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """What was asked and what became of it; counters only grow, the last three are of this moment.

    ``questions`` were asked; ``deduplicated`` of them joined an equal request, ``cached`` ones were
    answered at once, and the rest entered the engine in ``flushes``, the largest of ``largest_flush``
    requests, ``retried`` of them once more, for want of memory or after a restart. ``answered`` requests
    ended in a result, ``failed`` ones in an error; ``cancelled`` waiters left before their answer. Now
    there are requests ``queued`` and ``in_flight``, and waiters ``waiting`` for room in the queue.
    """

    questions: int = 0
    deduplicated: int = 0
    cached: int = 0
    flushes: int = 0
    largest_flush: int = 0
    retried: int = 0
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    queued: int = 0
    in_flight: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a runtime did since it was loaded; its engine, since it was opened."""

    batcher: BatcherStatistics
    cache: CacheStatistics
    engine: EngineStatistics
