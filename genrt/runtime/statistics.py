"""Counters of a runtime as frozen values, and their differences."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from genrt.engines.protocol import EngineStatistics, ReplicaStatistics
from genrt.runtime.cache import CacheStatistics

Part = TypeVar("Part", bound=Any)

NO_COUNTERS = {
    "batcher": {"largest_flush", "queued", "in_flight", "waiting"},
    "cache": {"rows", "bytes", "max_bytes"},
    "engine": {"resident", "kept_tokens"},
}
"""The values of each part that are not sums: ``Statistics.since`` does not subtract them."""


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """The questions of a runtime. A draw of a population counts as one question and request for each
    sequence, and as one waiter.

    Attributes:
        questions: all questions.
        deduplicated: questions that joined an equal request.
        cached: questions that the cache answered.
        flushes: the number of flushes.
        largest_flush: the maximum requests in a flush.
        retried: requests sent again after running out of memory or after a restart.
        answered: requests with a result.
        failed: requests with an error.
        cancelled: waiters that left before their answer.
        queued: requests that wait for the engine now.
        in_flight: requests in the engine now.
        waiting: waiters that wait for room in the queue now.
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
        batcher: the questions and their requests.
        cache: the row cache.
        engine: the engine since it was opened; the sum over replicas.
        replicas: the present state and the counters of each replica, with ``load(…, replicas=…)``.
    """

    batcher: BatcherStatistics
    cache: CacheStatistics
    engine: EngineStatistics
    replicas: tuple[ReplicaStatistics, ...] = ()

    def since(self, earlier: Statistics) -> Statistics:
        """Return the differences to earlier counters of the same runtime.

        Values that are not sums stay as they are here: ``largest_flush``, ``queued``, ``in_flight``,
        ``waiting``, the cache's ``rows``, ``bytes`` and ``max_bytes``, the engine's ``resident`` and
        ``kept_tokens``, and the ``replicas``. So do the counters of an engine that a restart has opened
        since ``earlier``.
        """
        engine, is_another = self.engine, False
        for name in _counters("engine", engine):  # a counter never falls in one engine's life
            is_another = is_another or getattr(engine, name) < getattr(earlier.engine, name)
        if not is_another:
            engine = _difference("engine", engine, earlier.engine)
        return Statistics(
            batcher=_difference("batcher", self.batcher, earlier.batcher),
            cache=_difference("cache", self.cache, earlier.cache),
            engine=engine,
            replicas=self.replicas,
        )


def _counters(name: str, part: Any) -> list[str]:
    return [field.name for field in fields(part) if field.name not in NO_COUNTERS[name]]


def _difference(name: str, later: Part, earlier: Part) -> Part:
    counters = _counters(name, later)
    changed: Part = replace(
        later, **{each: getattr(later, each) - getattr(earlier, each) for each in counters}
    )
    return changed
