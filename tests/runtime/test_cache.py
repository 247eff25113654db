"""cache.py: against a plain dictionary with a list of uses, in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.cache import RowCache
from genrt.tokens.rows import separate_copies
from tests.scripted import logprobs

A, B, C = logprobs(1), logprobs(2), logprobs(3)


def row(entries: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((entries,), float(value))


class Model:
    """What a cache bounded in bytes, least recently used out, should hold."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.rows: dict[LogprobsRequest, torch.Tensor] = {}  # the least recently used first
        self.hits = self.misses = self.evictions = 0

    @property
    def bytes(self) -> int:
        return sum(4 * len(row) for row in self.rows.values())

    def borrow(self, request: LogprobsRequest) -> torch.Tensor | None:
        if request not in self.rows:
            self.misses += 1
            return None
        self.hits += 1
        self.rows[request] = found = self.rows.pop(request)
        return found

    def put(self, request: LogprobsRequest, row: torch.Tensor) -> None:
        if 4 * len(row) > self.max_bytes:
            return
        self.rows.pop(request, None)
        while self.bytes + 4 * len(row) > self.max_bytes:
            del self.rows[next(iter(self.rows))]
            self.evictions += 1
        self.rows[request] = row


requests = st.builds(
    logprobs, st.integers(0, 6), adapter=st.sampled_from([None, Adapter("a", 1), Adapter("a", 2)])
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), requests),
        st.tuples(st.just("borrow"), requests),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("forget"), st.sampled_from([Adapter("a", 1), Adapter("a", 2)])),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.integers(0, 120), st.integers(1, 12))
def test_it_holds_what_a_plain_model_holds(
    script: list[tuple[str, object]], max_bytes: int, entries: int
) -> None:
    """All rows of one size, as one model's rows are; a run never holds more than its bound."""
    cache, model = RowCache(max_bytes), Model(max_bytes)
    for number, (operation, subject) in enumerate(script):
        if isinstance(subject, LogprobsRequest) and operation == "put":
            cache.put(subject, row(entries, number))
            model.put(subject, row(entries, number))
        elif isinstance(subject, LogprobsRequest):
            found, wanted = cache.borrow(subject), model.borrow(subject)
            assert (found is None) == (wanted is None)
            assert found is None or wanted is None or torch.equal(found, wanted)
        elif isinstance(subject, Adapter):
            cache.forget(subject)
            model.rows = {r: kept for r, kept in model.rows.items() if r.adapter != subject}
        else:
            cache.clear()
            model.rows.clear()
        s = cache.statistics()
        assert s.bytes <= s.max_bytes == max_bytes
        assert (s.rows, s.bytes) == (len(model.rows), model.bytes)
        assert (s.hits, s.misses, s.evictions) == (model.hits, model.misses, model.evictions)
        assert all(request in cache for request in model.rows)


@pytest.mark.promise(number=15)
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=40), st.integers(0, 200))
def test_rows_of_any_size_stay_within_the_bound(
    puts: list[tuple[int, int]], max_bytes: int
) -> None:
    cache = RowCache(max_bytes)
    for name, entries in puts:
        cache.put(logprobs(name), row(entries))
        held = [kept for kept in (cache.borrow(logprobs(n)) for n in range(5)) if kept is not None]
        s = cache.statistics()
        assert s.bytes == sum(kept.untyped_storage().nbytes() for kept in held) <= max_bytes
        assert (logprobs(name) in cache) or 4 * entries > max_bytes or s.rows > 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(requests, max_size=6, unique=True), max_size=6),
    st.integers(0, 120),
    st.integers(1, 12),
)
def test_rows_put_together_are_as_good_as_put_in_turn(
    steps: list[list[LogprobsRequest]], max_bytes: int, entries: int
) -> None:
    together, in_turn = RowCache(max_bytes), RowCache(max_bytes)
    for number, asked in enumerate(steps):
        step = torch.arange(number, number + len(asked)).repeat(entries, 1).t().float()
        together.put_all(dict(zip(asked, step, strict=True)))
        for request, given_row in zip(asked, step, strict=True):
            in_turn.put(request, given_row)
        one_by_one, at_once = in_turn.statistics(), together.statistics()
        assert at_once.bytes == one_by_one.bytes <= max_bytes
        assert at_once.evictions <= one_by_one.evictions, (
            "what is put again is not driven out first"
        )
    held = {request for asked in steps for request in asked}
    for request in held:
        one, other = together.borrow(request), in_turn.borrow(request)
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_of_more_rows_than_there_is_room_for_the_last_are_copied_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []

    def counted(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        copied.append(len(rows))
        return separate_copies(rows)

    monkeypatch.setattr("genrt.runtime.cache.separate_copies", counted)
    cache = RowCache(32)
    cache.put_all({request: row(4) for request in (A, B, C)})
    assert [request in cache for request in (A, B, C)] == [False, True, True]
    assert copied == [2]
    RowCache(0).put_all({A: row(4)})
    assert copied == [2]


def test_a_row_larger_than_the_cache_keeps_none_of_its_step_out() -> None:
    cache = RowCache(32)
    cache.put_all({A: row(4), B: row(9), C: row(4)})
    assert [request in cache for request in (A, B, C)] == [True, False, True]


def test_a_stored_row_is_a_copy() -> None:
    cache, given_row = RowCache(1000), row(4, 1.0)
    cache.put(A, given_row)
    given_row.fill_(9.0)
    kept = cache.borrow(A)
    assert kept is not None
    assert torch.equal(kept, row(4, 1.0))


@pytest.mark.promise(number=15)
@pytest.mark.parametrize(
    "view",
    [
        lambda batch: batch[3],
        lambda batch: batch[:, 1],
        lambda batch: batch[0, ::2],
        lambda batch: batch[:1, 0].expand(8),
    ],
)
def test_a_row_that_is_a_view_does_not_pin_its_batch(
    view: type[torch.Tensor],
) -> None:
    batch = torch.randn(8, 8)
    cache = RowCache(32)
    cache.put(A, view(batch))
    kept = cache.borrow(A)
    assert kept is not None
    assert torch.equal(kept, view(batch))
    assert cache.statistics().bytes == kept.untyped_storage().nbytes() == 4 * kept.numel()


def test_a_row_larger_than_the_cache_is_not_kept_and_drives_nothing_out() -> None:
    cache = RowCache(40)
    cache.put(A, row(4))
    cache.put(B, row(11))
    assert B not in cache
    assert A in cache
    assert cache.statistics().evictions == 0


def test_no_bytes_are_no_cache() -> None:
    cache = RowCache(0)
    cache.put(A, row(1))
    assert cache.borrow(A) is None
    assert cache.statistics().rows == 0


@pytest.mark.promise(number=14)
def test_adapters_and_their_versions_never_share_a_row() -> None:
    bound = [None, Adapter("a", 1), Adapter("a", 2), Adapter("b", 1)]
    cache = RowCache(1000)
    for number, adapter in enumerate(bound):
        cache.put(logprobs(1, 2, adapter=adapter), row(3, number))
    for number, adapter in enumerate(bound):
        kept = cache.borrow(logprobs(1, 2, adapter=adapter))
        assert kept is not None
        assert torch.equal(kept, row(3, number))
    cache.forget(Adapter("a", 1))
    assert [logprobs(1, 2, adapter=adapter) in cache for adapter in bound] == [
        True,
        False,
        True,
        True,
    ]


def test_a_look_up_makes_a_row_recent() -> None:
    cache = RowCache(32)
    cache.put(A, row(4))
    cache.put(B, row(4))
    cache.borrow(A)
    cache.put(C, row(4))
    assert [request in cache for request in (A, B, C)] == [True, False, True]


def test_threads_at_once_lose_no_count() -> None:
    cache, start = RowCache(400), threading.Barrier(4)

    def use(offset: int) -> None:
        start.wait()
        for number in range(300):
            request = logprobs((number * 7 + offset) % 40)
            kept = cache.borrow(request)
            if kept is None:
                cache.put(request, row(4, request.token_ids[0]))
            elif not torch.equal(kept, row(4, request.token_ids[0])):
                wrong.append(request)

    wrong: list[LogprobsRequest] = []
    threads = [threading.Thread(target=use, args=[offset]) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    s = cache.statistics()
    assert wrong == []
    assert s.hits + s.misses == 1200
    assert s.bytes == 16 * s.rows <= 400


def test_repr_and_frozen_statistics() -> None:
    cache = RowCache(100)
    cache.put(A, row(4))
    cache.borrow(A)
    assert repr(cache) == "RowCache(1 rows, 16 of 100 bytes, 1 hits)"
    with pytest.raises(AttributeError):
        cache.statistics().hits = 0  # type: ignore[misc]


def test_who_interrupts_it_may_read_its_statistics() -> None:
    """As a signal handler does, on the thread that has its lock."""
    cache = RowCache(100)
    cache.put(A, row(5))
    seen: list[int] = []

    class Interrupted(OrderedDict[Any, Any]):
        def get(self, *arguments: object) -> object:
            seen.append(cache.statistics().rows)
            return super().get(*arguments)

    cache._rows = Interrupted(cache._rows)
    asked = threading.Thread(target=cache.borrow, args=(A,), daemon=True)
    asked.start()
    asked.join(60)
    assert not asked.is_alive()
    assert seen == [1]
