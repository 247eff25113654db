"""cache.py against a dictionary with a list of uses, under any order of puts, look-ups and removals.

What is put is a view of a larger tensor that is overwritten at once, as an engine's rows may be; so a row
that was stored and not copied is seen.
"""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from genrt.engines.protocol import Finished
from genrt.errors import EngineFailed, OutOfMemory
from genrt.questions.arguments import Adapter
from genrt.questions.reads import HostRow, ReadRequest
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.cache import RowCache
from genrt.tokens.rows import separate_copies
from tests.inside import is_held
from tests.scripted import logprobs

A, B, C, D = map(logprobs, range(1, 5))


def row(entries: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((entries,), float(value))


ADAPTERS = [None, Adapter("a", 1), Adapter("a", 2), Adapter("b", 1)]
REQUESTS = [logprobs(token, adapter=adapter) for token in range(3) for adapter in ADAPTERS]


class CacheMachine(RuleBasedStateMachine):
    """Rows of one width, as one model's are. ``rows`` has the values, the least recently used first."""

    @initialize(room=st.integers(0, 5), spare=st.integers(0, 11), width=st.sampled_from([1, 3]))
    def start(self, room: int, spare: int, width: int) -> None:
        self.width = width
        self.max_bytes = room * 4 * width + min(spare, 4 * width - 1)
        self.cache = RowCache(self.max_bytes)
        self.rows: dict[LogprobsRequest, float] = {}
        self.hits = self.misses = self.evictions = 0
        self.count = 0.0

    # -- the events ---------------------------------------------------------------------------

    @rule(request=st.sampled_from(REQUESTS))
    def put(self, request: LogprobsRequest) -> None:
        block = torch.full((2, self.width), self.value())
        self.cache.put(request, block[1])
        block.fill_(-1.0)
        self.evictions += self.keep(request, self.count)

    @rule(requests=st.lists(st.sampled_from(REQUESTS), max_size=8, unique=True))
    def put_all(self, requests: list[LogprobsRequest]) -> None:
        """As good as put in turn; but one that would only drive out another of them is not put first."""
        before = self.cache.statistics().evictions
        values = [self.value() for _ in requests]
        block = torch.tensor(values).repeat(self.width, 1).t().contiguous()
        assert self.cache.put_all(dict(zip(requests, block, strict=True))) == {}
        block.fill_(-1.0)
        in_turn = sum(
            self.keep(request, value) for request, value in zip(requests, values, strict=True)
        )
        evicted = self.cache.statistics().evictions - before
        assert evicted <= in_turn
        self.evictions += evicted

    @rule(request=st.sampled_from(REQUESTS))
    def borrow(self, request: LogprobsRequest) -> None:
        found = self.cache.borrow(request)
        wanted = self.rows.pop(request, None)
        self.hits += wanted is not None
        self.misses += wanted is None
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.tolist() == [wanted] * self.width
            self.rows[request] = wanted

    @rule(adapter=st.sampled_from(ADAPTERS[1:]))
    def forget(self, adapter: Adapter) -> None:
        self.cache.forget(adapter)
        self.rows = {
            request: value for request, value in self.rows.items() if request.adapter != adapter
        }

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.rows.clear()

    # -- what must hold after each ------------------------------------------------------------

    @invariant()
    def it_holds_what_the_dictionary_holds(self) -> None:
        assert [request for request in REQUESTS if request in self.cache] == [
            request for request in REQUESTS if request in self.rows
        ]

    @invariant()
    def its_counters_are_right(self) -> None:
        s = self.cache.statistics()
        assert (s.hits, s.misses, s.evictions) == (self.hits, self.misses, self.evictions)
        assert (s.rows, s.max_bytes) == (len(self.rows), self.max_bytes)
        assert s.bytes == 4 * self.width * len(self.rows) <= self.max_bytes

    def teardown(self) -> None:
        """Every row is still its own, whatever was done with the tensors it came from."""
        for request, value in getattr(self, "rows", {}).items():
            found = self.cache.borrow(request)
            assert found is not None
            assert found.tolist() == [value] * self.width
            assert found.untyped_storage().nbytes() == found.nbytes

    # -- the model ----------------------------------------------------------------------------

    def value(self) -> float:
        self.count += 1.0
        return self.count

    def keep(self, request: LogprobsRequest, value: float) -> int:
        """Put one row, and how many went for it."""
        room = self.max_bytes // (4 * self.width)
        if not room:
            return 0
        self.rows.pop(request, None)
        self.rows[request] = value
        evicted = len(self.rows) - room
        for oldest in list(self.rows)[: max(0, evicted)]:
            del self.rows[oldest]
        return max(0, evicted)


@pytest.mark.promise(number=14)  # adapters and their versions never share a row
@pytest.mark.promise(number=15)
class TestCacheMachine(CacheMachine.TestCase):  # type: ignore[valid-type,misc]
    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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


def test_only_rows_are_kept() -> None:
    cache, read = RowCache(100), ReadRequest(C, HostRow())
    ends = [Finished(A, row(4)), Finished(B, error=EngineFailed("no")), Finished(read, row(4))]
    assert cache.keep(ends) == {}
    assert [each in cache for each in (A, B, C, read)] == [True, False, False, False]


def test_rows_without_memory_for_a_copy_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        if any(float(each[0]) == 2.0 for each in rows):
            raise MemoryError("no room")
        return separate_copies(rows)

    monkeypatch.setattr("genrt.runtime.cache.separate_copies", scarce)
    cache = RowCache(100)
    errors = cache.put_all({A: row(4, 1.0), B: row(4, 2.0), C: row(4, 3.0)})
    assert {each: type(error) for each, error in errors.items()} == {B: OutOfMemory}
    assert [each in cache for each in (A, B, C)] == [True, False, True]
    with pytest.raises(OutOfMemory, match="no room"):
        cache.put(B, row(4, 2.0))


@pytest.mark.parametrize("later", [(A, B), (C, D)], ids=["replaced", "evicted"])
def test_rows_are_dropped_without_the_lock(later: tuple[LogprobsRequest, ...]) -> None:
    cache, is_locked = RowCache(32), list[bool]()
    cache.put_all({A: row(4), B: row(4)})
    for request in (A, B):
        stored = cache.borrow(request)
        weakref.finalize(stored, lambda: is_locked.append(is_held(vars(cache)["_lock"])))
    del stored
    cache.put_all({each: row(4) for each in later})
    assert is_locked == [False, False]


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
