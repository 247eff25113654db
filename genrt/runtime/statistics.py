"""Counters of a runtime as frozen values, and the difference of two of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from genrt.engines.protocol import EngineStatistics, ReplicaStatistics
from genrt.runtime.cache import CacheStatistics

__all__ = ["NO_COUNTERS", "BatcherStatistics", "Statistics"]

Part = TypeVar("Part", bound=Any)

NO_COUNTERS = {
    "batcher": {"largest_flush", "queued", "in_flight", "waiting"},
    "cache": {"rows", "bytes", "max_bytes"},
    "engine": {"resident", "kept_tokens"},
}
"""The values of each part that may go down, and so are not subtracted."""


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """The questions asked of a runtime, and what became of them. Counters only grow. A population's draw
    is as many questions and requests as it has sequences, but one waiter.

    Attributes:
        questions: how many were asked.
        deduplicated: questions that joined an equal request, queued or in flight.
        cached: questions that were answered from the cache.
        flushes: how often requests entered the engine.
        largest_flush: the most requests that entered it together.
        retried: requests that were sent again, after running out of memory or after a restart.
        answered: requests that ended in a result.
        failed: requests that ended in an error.
        cancelled: waiters that left before their answer.
        queued: requests that wait for the engine at this moment.
        in_flight: requests that are in the engine at this moment.
        waiting: waiters that wait for room in the queue at this moment.
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
    """The counters of a runtime since it was loaded.

    Attributes:
        batcher: the questions asked, and what became of them.
        cache: the row cache.
        engine: what the engine computed since it was opened; of replicas, all of them together.
        replicas: what each replica is at this moment and has done, with ``load(…, replicas=…)``.
    """

    batcher: BatcherStatistics
    cache: CacheStatistics
    engine: EngineStatistics
    replicas: tuple[ReplicaStatistics, ...] = ()

    def since(self, earlier: Statistics) -> Statistics:
        """Return what was done since ``earlier``, of the same runtime: the differences of the counters.

        Values that are no counters stay as they are here: ``largest_flush``, ``queued``, ``in_flight``,
        ``waiting``, the cache's ``rows``, ``bytes`` and ``max_bytes``, the engine's ``resident`` and
        ``kept_tokens``, and the ``replicas``. The counters of an engine that a restart has opened since
        ``earlier`` are taken as they are.
        """
        engine, but = self.engine, NO_COUNTERS
        if not _is_less(engine, earlier.engine, but=but["engine"]):
            engine = _difference(engine, earlier.engine, but=but["engine"])
        return Statistics(
            batcher=_difference(self.batcher, earlier.batcher, but=but["batcher"]),
            cache=_difference(self.cache, earlier.cache, but=but["cache"]),
            engine=engine,
            replicas=self.replicas,
        )


def _counters(part: Any, *, but: set[str]) -> list[str]:
    return [field.name for field in fields(part) if field.name not in but]


def _difference(later: Part, earlier: Part, *, but: set[str]) -> Part:
    names = _counters(later, but=but)
    differences = {name: getattr(later, name) - getattr(earlier, name) for name in names}
    changed: Part = replace(later, **differences)
    return changed


def _is_less(later: Any, earlier: Any, *, but: set[str]) -> bool:
    """Tell whether a counter went down, which it never does in one engine's life."""
    return any(getattr(later, name) < getattr(earlier, name) for name in _counters(later, but=but))
