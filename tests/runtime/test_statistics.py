"""Statistics: what lay between two moments."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from genrt.engines.protocol import EngineStatistics
from genrt.runtime.cache import CacheStatistics
from genrt.runtime.statistics import BatcherStatistics, Statistics

MOMENTARY = {
    "largest_flush",
    "queued",
    "in_flight",
    "waiting",
    "rows",
    "bytes",
    "max_bytes",
    "resident",
    "kept_tokens",
}


def counting_from(first: int, *, step: int) -> Statistics:
    """Every figure another one."""

    def filled(kind: Any, start: int) -> Any:
        return kind(*(start + step * place for place in range(len(fields(kind)))))

    return Statistics(
        filled(BatcherStatistics, first),
        filled(CacheStatistics, first + 100),
        filled(EngineStatistics, first + 200),
    )


def test_counters_are_subtracted_and_what_is_of_the_moment_stays() -> None:
    earlier, later = counting_from(1, step=2), counting_from(1000, step=5)
    done = later.since(earlier)
    for part, before, after in (
        (done.batcher, earlier.batcher, later.batcher),
        (done.cache, earlier.cache, later.cache),
        (done.engine, earlier.engine, later.engine),
    ):
        for field in fields(part):
            name = field.name
            is_counter = name not in MOMENTARY or (part is done.engine and name == "rows")
            less = getattr(before, name) if is_counter else 0
            assert getattr(part, name) == getattr(after, name) - less, name


def test_nothing_lies_between_a_moment_and_itself() -> None:
    statistics = counting_from(7, step=0)
    done = statistics.since(statistics)
    assert done.batcher == BatcherStatistics(largest_flush=7, queued=7, in_flight=7, waiting=7)
    assert done.cache == CacheStatistics(rows=107, bytes=107, max_bytes=107)
    assert done.engine == EngineStatistics(resident=207, kept_tokens=207)


def test_an_engine_that_was_opened_in_between_counts_from_then() -> None:
    earlier = Statistics(
        BatcherStatistics(questions=5), CacheStatistics(hits=2), EngineStatistics(steps=9, rows=3)
    )
    later = Statistics(
        BatcherStatistics(questions=8), CacheStatistics(hits=4), EngineStatistics(steps=1, rows=4)
    )
    done = later.since(earlier)
    assert (done.batcher.questions, done.cache.hits) == (3, 2)
    assert done.engine == later.engine


@pytest.mark.parametrize("name", ["resident", "kept_tokens"])
def test_fewer_of_what_is_held_are_no_restart(name: str) -> None:
    earlier = replace(EngineStatistics(steps=2), **{name: 9})
    later = replace(EngineStatistics(steps=3), **{name: 4})
    parts = (BatcherStatistics(), CacheStatistics())
    done = Statistics(*parts, later).since(Statistics(*parts, earlier))
    assert done.engine == replace(EngineStatistics(steps=1), **{name: 4})
