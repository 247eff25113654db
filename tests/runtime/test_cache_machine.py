"""cache.py against a dictionary with a list of uses, under any order of puts, look-ups and removals.

What is put is a view of a larger tensor that is overwritten at once, as an engine's rows may be; so a row
that was kept and not copied is seen.
"""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.cache import RowCache
from tests.scripted import logprobs

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


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
