"""The index of resident sequences against a plain list of token sequences, under any order of events."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from genrt.engines.residency import SHORTEST, Residents
from genrt.questions.arguments import Adapter
from genrt.questions.rows import LogprobsRequest

ADAPTERS = [None, Adapter("a", 1), Adapter("a", 2)]

Context = tuple[int, ...]

contexts = st.tuples(
    st.integers(0, 3 * SHORTEST), st.lists(st.integers(0, 1), max_size=6).map(tuple)
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
    """``known`` has the sequences by name, in the order in which they were put last; ``unread`` those
    whose contexts no look-up has read."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents()
        self.known: dict[str, tuple[Adapter | None, Context]] = {}
        self.unread: set[str] = set()
        self.count = 0

    def put(self, name: str, adapter: Adapter | None, context: Context) -> None:
        self.residents.put(name, adapter, packed(context))
        self.note(name, adapter, context)
        self.unread.discard(name)

    def note(self, name: str, adapter: Adapter | None, context: Context) -> None:
        self.known.pop(name, None)
        self.known[name] = adapter, context

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

    @rule(name=names, more=st.lists(st.integers(0, 2), max_size=2 * SHORTEST))
    def extend(self, name: str, more: list[int]) -> None:
        if name in self.known:
            adapter, context = self.known[name]
            self.put(name, adapter, (*context, *more))

    @rule(
        target=names,
        names=st.lists(names, max_size=4, unique=True),
        more=st.lists(st.integers(0, 2), max_size=2),
        twice=st.booleans(),
    )
    def put_later(self, names: list[str], more: list[int], twice: bool) -> str:
        """Sequences of one population grow, one of which is new, maybe as the equal of the first, which
        is then put again after it. No context is read."""
        self.count += 1
        new = str(self.count)
        found = [(name, *self.known[name]) for name in names if name in self.known]
        adapter = found[0][1] if found else None
        grown = {name: (*tokens, *more) for name, of, tokens in found if of == adapter}
        first = next(iter(grown), None)
        grown[new] = grown[first] if twice and first else (1, *more)
        tokens, reading = [*grown.values()], True

        def context(number: int) -> bytes:
            assert not reading
            return packed(tokens[number])

        again = [first] if twice and first else []
        self.residents.put_later({name: n for n, name in enumerate(grown)}, adapter, context)
        self.residents.put_later(dict.fromkeys(again, 0), adapter, context)
        reading = False
        for name in (*grown, *again):
            self.note(name, adapter, grown[name])
        self.unread |= grown.keys()
        return new

    @rule(name=consumes(names))
    def remove(self, name: str) -> None:
        self.residents.remove(name)
        self.residents.remove(name)
        self.known.pop(name, None)
        self.unread.discard(name)

    # -- what is asked ------------------------------------------------------------------------

    @rule(adapter=st.sampled_from(ADAPTERS), context=contexts, last=st.integers(0, 2))
    def ask(self, adapter: Adapter | None, context: Context, last: int) -> None:
        self.check(adapter, (*context, last))

    @rule(name=names, last=st.integers(0, 2))
    def ask_next(self, name: str, last: int) -> None:
        adapter, context = self.known.get(name, (None, ()))
        self.check(adapter, (*context, last))

    @rule(name=names, keep=st.integers(1, 3 * SHORTEST))
    def ask_part(self, name: str, keep: int) -> None:
        adapter, context = self.known.get(name, (None, ()))
        self.check(adapter, context[:keep] or (0,))

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def it_knows_what_it_was_told(self) -> None:
        assert len(self.residents) == len(self.known)
        assert sorted(self.residents.request_ids()) == sorted(self.known)
        assert all(name in self.residents for name in self.known)
        for adapter in ADAPTERS:
            bound = [name for name, (other, _) in self.known.items() if other == adapter]
            assert sorted(self.residents.bound_to(adapter)) == sorted(bound)

    def teardown(self) -> None:
        for name in self.known:
            self.residents.remove(name)
        assert not any(vars(self.residents)[name] for name in ("_by_digest", "_digests", "_unread"))

    def check(self, adapter: Adapter | None, asked: Context) -> None:
        """Check every answer about this context."""
        parents = [name for name, known in self.known.items() if known == (adapter, asked[:-1])]
        for name in (*self.known, "unknown"):
            is_parent = self.residents.is_parent(name, adapter, packed(asked))
            assert is_parent == (name in parents and name not in self.unread)
        parent = self.residents.parent(adapter, packed(asked))
        assert parent == (parents[-1] if parents else None), "of several, the last put"
        self.unread.clear()
        common = {
            name: shared(known, asked) for name, (a, known) in self.known.items() if a == adapter
        }
        best = max(common.values(), default=0)
        found = self.residents.nearest(adapter, packed(asked))
        if best < SHORTEST:
            assert found is None
            return
        assert found is not None
        assert found[1] == min(best, len(asked) - 1) <= common[found[0]]


TestResidentsMachine = ResidentsMachine.TestCase
TestResidentsMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
