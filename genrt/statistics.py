"""What a runtime did, counted where it happens: frozen values, to be subtracted from later ones."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from genrt.cache import CacheStatistics
from genrt.engine import EngineStatistics

__all__ = ["BatcherStatistics", "Statistics"]

Part = TypeVar("Part", bound=Any)

NO_COUNTERS = {"largest_flush", "queued", "in_flight", "waiting", "rows", "bytes", "max_bytes"}
"""Of the batcher and the cache: what is no counter, and so is not subtracted."""


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """What was asked and what became of it; counters only grow, but for ``largest_flush`` and the last
    three, which are of this moment.

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

    def since(self, earlier: Statistics) -> Statistics:
        """What was done between ``earlier`` and this, of the same runtime: the counters' differences.

        What is no counter stays as it is here: the ``largest_flush`` since the runtime was loaded, what
        is ``queued``, ``in_flight`` and ``waiting``, the ``rows`` and ``bytes`` that the cache holds and
        its ``max_bytes``, the engine's ``resident`` sequences. The counters of an engine that was opened
        in between, by a restart, are taken as they are.
        """
        engine = self.engine
        if not _is_less(engine, earlier.engine, but={"resident"}):
            engine = _difference(engine, earlier.engine, but={"resident"})
        return Statistics(
            batcher=_difference(self.batcher, earlier.batcher, but=NO_COUNTERS),
            cache=_difference(self.cache, earlier.cache, but=NO_COUNTERS),
            engine=engine,
        )


def _counters(part: Any, *, but: set[str]) -> list[str]:
    return [field.name for field in fields(part) if field.name not in but]


def _difference(later: Part, earlier: Part, *, but: set[str]) -> Part:
    names = _counters(later, but=but)
    differences = {name: getattr(later, name) - getattr(earlier, name) for name in names}
    changed: Part = replace(later, **differences)
    return changed


def _is_less(later: Any, earlier: Any, *, but: set[str]) -> bool:
    """Whether a counter went down, which it never does in one engine's life."""
    return any(getattr(later, name) < getattr(earlier, name) for name in _counters(later, but=but))
