"""The simulator: that the runtime stands up to it, that a seed is a run, and that it finds what is broken.

The fixed seeds are the same every time; a few fresh ones are tried in addition, and named in the output.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch

import genrt.answers
import genrt.batcher
import genrt.cache
from genrt.answers import AnsweringEngine
from genrt.batcher import Batcher
from genrt.cache import RowCache
from genrt.engine import Adapter, Finished, LogprobsRequest, ReadRequest, Request
from genrt.engines.residency import Residents
from genrt.errors import GenrtError
from genrt.rows import together
from genrt.testing import simulate

SEEDS = 1_000
PARTS = 10
OPERATIONS = 100
FRESH_SEEDS = 20
SEEDS_TO_FIND_A_BREAK = 300


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_found_in_fixed_seeds(part: int) -> None:
    """A tenth of a thousand runs, a hundred thousand operations in all."""
    seeds = range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)
    done = sum(simulate(seed, operations=OPERATIONS).operations for seed in seeds)
    assert done >= OPERATIONS * SEEDS // PARTS


def test_nothing_is_found_in_fresh_seeds() -> None:
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(FRESH_SEEDS)]
    print("fresh seeds:", *seeds)
    for seed in seeds:
        assert simulate(seed, operations=OPERATIONS).operations >= OPERATIONS


# -- what is broken on purpose ----------------------------------------------------------------------

Patch = pytest.MonkeyPatch
Break = Callable[[Patch], None]


def a_waiter_that_leaves_is_forgotten(patch: Patch) -> None:
    patch.setattr(Batcher, "_leave", lambda self, waiter: None)


def nothing_in_flight_is_withdrawn(patch: Patch) -> None:
    drop = Batcher._drop

    def drop_only(self: Batcher, waiter: Any) -> None:
        drop(self, waiter)
        self._withdrawn.clear()

    patch.setattr(Batcher, "_drop", drop_only)


def a_request_dies_with_its_first_waiter(patch: Patch) -> None:
    drop = Batcher._drop

    def drop_all(self: Batcher, waiter: Any) -> None:
        for request in waiter.found:
            if request in self._entries and not self._entries[request].in_flight:
                self._ready.pop(self._entries[request], None)
        drop(self, waiter)

    patch.setattr(Batcher, "_drop", drop_all)


def what_is_asked_again_stays_withdrawn(patch: Patch) -> None:
    class Kept(dict[Any, Any]):
        def pop(self, *args: Any) -> Any:
            return None

    start = Batcher.__init__

    def start_so(self: Batcher, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self._withdrawn = Kept()

    patch.setattr(Batcher, "__init__", start_so)


def rows_go_by_position(patch: Patch) -> None:
    settle = Batcher._settle

    def settle_so(self: Batcher, finished: Sequence[Finished]) -> None:
        places = [each for each in self._entries if any(each == end.request for end in finished)]
        ends = [end for end in finished if end.request in places]
        moved = zip(places, ends, strict=False)
        settle(self, [Finished(each, end.result, end.error) for each, end in moved])

    patch.setattr(Batcher, "_settle", settle_so)


def rows_are_handed_out_as_views(patch: Patch) -> None:
    patch.setattr(genrt.batcher, "apart", list)


def rows_are_cached_as_views(patch: Patch) -> None:
    patch.setattr(genrt.cache, "apart", list)


def a_stack_is_a_view(patch: Patch) -> None:
    patch.setattr(genrt.batcher, "stacked", together)


def the_key_lacks_the_adapter(patch: Patch) -> None:
    patch.setattr(LogprobsRequest, "__eq__", lambda self, other: self.packed == other.packed)
    patch.setattr(LogprobsRequest, "__hash__", lambda self: hash(self.packed))


def an_answer_is_set_on_a_cancelled_future(patch: Patch) -> None:
    def resolve(outcomes: Any) -> None:
        for future, outcome in outcomes:
            failed = isinstance(outcome, GenrtError)
            (future.set_exception if failed else future.set_result)(outcome)

    patch.setattr(genrt.batcher, "_resolve", resolve)


def waiters_share_an_error(patch: Patch) -> None:
    patch.setattr(GenrtError, "fresh", lambda self: self)


def the_youngest_go_first(patch: Patch) -> None:
    def last(entries: Any, count: int) -> Iterator[Any]:
        return iter(list(entries)[-count:]) if isinstance(entries, dict) else islice(entries, count)

    patch.setattr(genrt.batcher, "islice", last)


def a_quiet_loop_wakes_nobody(patch: Patch) -> None:
    quiet = Batcher._quiet

    def quiet_so(self: Batcher, *args: Any) -> None:
        patch.setattr(self, "_wake", lambda: None)
        quiet(self, *args)

    patch.setattr(Batcher, "_quiet", quiet_so)


def closed_loops_are_not_swept(patch: Patch) -> None:
    patch.setattr(Batcher, "_sweep", lambda self, entries: None)


def closing_tells_nobody(patch: Patch) -> None:
    def close(self: Batcher, reason: GenrtError | None = None) -> None:
        self._closed = reason or genrt.errors.Closed("closed")
        self._entries.clear()
        self._in_flight = 0

    patch.setattr(Batcher, "close", close)


def a_failing_step_fails_nobody(patch: Patch) -> None:
    turn = Batcher.turn

    def turn_so(self: Batcher, engine: Any) -> None:
        settle = self._settle
        patch.setattr(
            self, "_settle", lambda ends: settle([end for end in ends if end.error is None])
        )
        turn(self, engine)

    patch.setattr(Batcher, "turn", turn_so)


def one_error_fails_the_whole_step(patch: Patch) -> None:
    settle = Batcher._settle

    def settle_so(self: Batcher, finished: Sequence[Finished]) -> None:
        errors = [end.error for end in finished if end.error is not None]
        if errors:
            finished = [Finished(end.request, error=errors[0]) for end in finished]
        settle(self, finished)

    patch.setattr(Batcher, "_settle", settle_so)


def adapters_go_at_once(patch: Patch) -> None:
    patch.setattr(Batcher, "_unbound", lambda self: list(self._retired))


def adapters_never_go(patch: Patch) -> None:
    patch.setattr(Batcher, "retire", lambda self, adapter: None)


def cached_rows_outlive_their_adapter(patch: Patch) -> None:
    patch.setattr(RowCache, "forget", lambda self, adapter: None)


def the_cache_counts_rows_for_bytes(patch: Patch) -> None:
    patch.setattr(genrt.cache, "_storage_bytes", lambda row: 1)


def questions_in_the_cache_are_not_counted(patch: Patch) -> None:
    register = Batcher._register

    def register_so(self: Batcher, waiter: Any) -> list[Any]:
        cached = self._cached
        queued = register(self, waiter)
        self._cached = cached
        return queued

    patch.setattr(Batcher, "_register", register_so)


def a_reader_cancels_for_all_readers(patch: Patch) -> None:
    cancel = AnsweringEngine.cancel

    def cancel_so(self: AnsweringEngine, requests: Sequence[Request]) -> None:
        cancel(self, requests)
        self._engine.cancel([each.row for each in requests if isinstance(each, ReadRequest)])

    patch.setattr(AnsweringEngine, "cancel", cancel_so)


def who_asked_a_row_that_is_read_is_forgotten(patch: Patch) -> None:
    class Empty(set[Request]):
        def update(self, *others: Any) -> None:
            pass

    start = AnsweringEngine.__init__

    def start_so(self: AnsweringEngine, *args: Any) -> None:
        start(self, *args)
        self._asked = Empty()

    patch.setattr(AnsweringEngine, "__init__", start_so)


def masks_are_dropped(patch: Patch) -> None:
    patch.setattr(genrt.answers, "_masks", lambda asked, row: None)


def seeded_draws_depend_on_their_batch(patch: Patch) -> None:
    patch.setattr(genrt.answers, "seeded_uniforms", lambda seeds: torch.rand(len(seeds), 2).double())


def residents_of_all_adapters_are_parents(patch: Patch) -> None:
    put = Residents.put
    patch.setattr(
        Residents, "put", lambda self, name, adapter, context: put(self, name, None, context)
    )


def removed_residents_are_found(patch: Patch) -> None:
    remove = Residents.remove

    def remove_every_other(self: Residents, name: str) -> None:
        if int(name) % 2:
            remove(self, name)

    patch.setattr(Residents, "remove", remove_every_other)


BREAKS: list[Break] = [
    a_waiter_that_leaves_is_forgotten,
    nothing_in_flight_is_withdrawn,
    a_request_dies_with_its_first_waiter,
    what_is_asked_again_stays_withdrawn,
    rows_go_by_position,
    rows_are_handed_out_as_views,
    rows_are_cached_as_views,
    a_stack_is_a_view,
    the_key_lacks_the_adapter,
    an_answer_is_set_on_a_cancelled_future,
    waiters_share_an_error,
    the_youngest_go_first,
    a_quiet_loop_wakes_nobody,
    closed_loops_are_not_swept,
    closing_tells_nobody,
    a_failing_step_fails_nobody,
    one_error_fails_the_whole_step,
    adapters_go_at_once,
    adapters_never_go,
    cached_rows_outlive_their_adapter,
    the_cache_counts_rows_for_bytes,
    questions_in_the_cache_are_not_counted,
    a_reader_cancels_for_all_readers,
    who_asked_a_row_that_is_read_is_forgotten,
    masks_are_dropped,
    seeded_draws_depend_on_their_batch,
    residents_of_all_adapters_are_parents,
    removed_residents_are_found,
]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda each: each.__name__)
def test_what_is_broken_on_purpose_is_found(broken: Break, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"^seed \d+: .+\nreplay with simulate\(\d+\)"):
        for seed in range(SEEDS_TO_FIND_A_BREAK):
            simulate(seed)
