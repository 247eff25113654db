"""The index of resident sequences against a plain list of token sequences, under any order of events.

Those put later are put, in order, when somebody looks for contexts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from genrt.engines import residency
from genrt.engines.residency import PIECE, Residents
from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest

ADAPTERS = [None, Adapter("a", 1), Adapter("a", 2)]

Context = tuple[int, ...]

contexts = st.tuples(
    st.integers(0, 3 * PIECE), st.lists(st.integers(0, 1), max_size=6).map(tuple)
).map(lambda parts: (*(n % 3 for n in range(parts[0])), *parts[1]))
"""Few tokens and long common beginnings, so that most sequences share something."""


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def packed(context: Sequence[int]) -> bytes:
    return LogprobsRequest(context).packed


class ResidentsMachine(RuleBasedStateMachine):
    """``known`` has the sequences by name, in the order in which they were put last; ``later`` those
    that were put later since."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents()
        self.known: dict[str, tuple[Adapter | None, Context]] = {}
        self.later: dict[str, tuple[Adapter | None, Context]] = {}
        self.read: list[int] = []
        self.count = 0

    # -- the events ---------------------------------------------------------------------------

    @rule(target=names, adapter=st.sampled_from(ADAPTERS), context=contexts)
    def open(self, adapter: Adapter | None, context: Context) -> str:
        self.count += 1
        self.put(str(self.count), adapter, context)
        return str(self.count)

    @rule(target=names, name=names, tokens=st.lists(st.integers(0, 2), max_size=3))
    def fork(self, name: str, tokens: list[int]) -> str:
        """Another sequence begins with one that is there, or is a part of it."""
        self.count += 1
        adapter, context = self.known.get(name, (None, ()))
        end = len(context) - self.count % 3
        self.put(str(self.count), adapter, (*context[: max(0, end)], *tokens))
        return str(self.count)

    @rule(name=names, more=st.lists(st.integers(0, 2), max_size=2 * PIECE))
    def extend(self, name: str, more: list[int]) -> None:
        if name in self.known:
            adapter, context = self.known[name]
            self.put(name, adapter, (*context, *more))

    @rule(target=names, name=names, step=st.lists(st.integers(0, 2), min_size=1, max_size=2))
    def follow(self, name: str, step: list[int]) -> str:
        """A fork grows to be the equal of the one that it came from, which grows before it."""
        self.count += 1
        fork = str(self.count)
        if name in self.known:
            adapter, context = self.known[name]
            for each, tokens in (
                (fork, context),
                (name, (*context, *step)),
                (fork, (*context, *step)),
            ):
                self.put(each, adapter, tokens)
        return fork

    @rule(
        target=names,
        names=st.lists(names, max_size=4, unique=True),
        more=st.lists(st.integers(0, 2), max_size=2),
        twice=st.booleans(),
    )
    def put_later(self, names: list[str], more: list[int], twice: bool) -> str:
        """Sequences of one population grow, one of which is new; their contexts are not read yet. Or the
        new one is the equal of the first, which is put again after it."""
        self.count += 1
        new = str(self.count)
        before = self.known | self.later
        found = [before[name] for name in names if name in before]
        adapter = found[0][0] if found else None
        ids = [name for name in names if name in before and before[name][0] == adapter]
        contexts = [(*before[name][1], *more) for name in ids]
        ids, contexts = [*ids, new], [*contexts, contexts[0] if twice and contexts else (1, *more)]

        def context(number: int) -> bytes:
            self.read.append(number)
            return packed(contexts[number])

        reads = len(self.read)
        self.residents.put_later({name: n for n, name in enumerate(ids)}, adapter, context)
        put = [*zip(ids, contexts, strict=True)]
        if twice:
            self.residents.put_later({ids[0]: 0}, adapter, context)
            put.append(put[0])
        assert len(self.read) == reads
        for name, tokens in put:
            self.later.pop(name, None)
            self.later[name] = adapter, tokens
        return new

    @rule(name=consumes(names))
    def remove(self, name: str) -> None:
        self.residents.remove(name)
        self.residents.remove(name)
        self.known.pop(name, None)
        self.later.pop(name, None)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def remove_adapter(self, adapter: Adapter | None) -> None:
        self.look()
        bound = [name for name, (other, _) in self.known.items() if other == adapter]
        assert sorted(self.residents.bound_to(adapter)) == sorted(bound)
        for name in bound:
            self.residents.remove(name)
            del self.known[name]

    # -- what is asked ------------------------------------------------------------------------

    @rule(adapter=st.sampled_from(ADAPTERS), context=contexts, last=st.integers(0, 2))
    def ask(self, adapter: Adapter | None, context: Context, last: int) -> None:
        self.check(adapter, (*context, last))

    @rule(name=names, last=st.integers(0, 2))
    def ask_next(self, name: str, last: int) -> None:
        adapter, context = self.known.get(name, (None, ()))
        self.check(adapter, (*context, last))

    @rule(name=names, keep=st.integers(1, 3 * PIECE))
    def ask_part(self, name: str, keep: int) -> None:
        adapter, context = self.known.get(name, (None, ()))
        self.check(adapter, context[:keep] or (0,))

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def it_knows_what_it_was_told(self) -> None:
        known = self.known | self.later
        assert len(self.residents) == len(known)
        assert all(name in self.residents for name in known)
        assert "unknown" not in self.residents

    def teardown(self) -> None:
        self.look()
        assert sorted(self.residents.request_ids()) == sorted(self.known)
        assert not self.residents._later
        for name in list(self.known):
            self.residents.remove(name)
        assert not self.residents._by_digest
        assert not self.residents._by_piece
        assert not self.residents._without_digest
        assert not self.residents._uncut

    def put(self, name: str, adapter: Adapter | None, context: Context) -> None:
        self.residents.put(name, adapter, packed(context))
        self.known.pop(name, None)
        self.later.pop(name, None)
        self.known[name] = adapter, context

    def look(self) -> None:
        """Somebody looks for contexts."""
        for name, (adapter, context) in self.later.items():
            self.known.pop(name, None)
            self.known[name] = adapter, context
        self.later.clear()

    def check(self, adapter: Adapter | None, asked: Context) -> None:
        """Every answer about this context."""
        for name in self.later:
            assert not self.residents.is_parent(name, adapter, packed(asked)), "it may have grown"
        self.look()
        parents = [name for name, known in self.known.items() if known == (adapter, asked[:-1])]
        parent = self.residents.parent(adapter, packed(asked))
        assert parent == (parents[-1] if parents else None), "of several, the last put"
        for name in (*self.known, "unknown"):
            assert self.residents.is_parent(name, adapter, packed(asked)) == (name in parents)
        common = {
            name: shared(known, asked) for name, (a, known) in self.known.items() if a == adapter
        }
        best = max(common.values(), default=0)
        found = self.residents.nearest(adapter, packed(asked))
        if best < PIECE:
            assert found is None
            return
        assert found is not None
        assert found[1] == min(best, len(asked) - 1) <= common[found[0]]


def test_sequences_are_cut_no_further_than_a_piece_behind_what_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forty contexts of one text, as of its rows; then something else is asked, and half of the text."""
    cut: list[int] = []

    def counted(piece: int, context: bytes, start: int) -> int:
        cut.append(start)
        return chained(piece, context, start)

    chained = residency._chained
    monkeypatch.setattr(residency, "_chained", counted)
    residents, text = Residents(), tuple(range(20 * PIECE))
    for number in range(40):
        residents.put(str(number), None, packed(text[: 20 * PIECE - number % PIECE]))
    assert residents.nearest(None, packed((1, *text))) is None
    assert len(cut) == 40 + 1
    assert residents.nearest(None, packed((2, *text))) is None
    assert len(cut) == 40 + 2
    half = text[: 10 * PIECE]
    found = residents.nearest(None, packed((*half, 0, *half)))
    assert found is not None
    assert found[1] == len(half)
    assert len(cut) == 40 + 2 + 40 * 10 + 11


TestResidentsMachine = ResidentsMachine.TestCase
TestResidentsMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
