"""Origins and contexts against plain lists, under any order of questions and changes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from genrt.questions.rows import Limits, LogprobsRequest
from genrt.questions.sequences import Contexts, Origins, SequenceHandle, Sequences

LIMITS = Limits(5, 40)
MOST = 10

Origin = tuple[SequenceHandle, int, int] | None
"""A question, which of its sequences, and how long that was."""


def flags(data: Any, count: int) -> np.ndarray:
    return np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)


class AsLists(RuleBasedStateMachine):
    """``lists`` has the sequences, ``known`` where each comes from, ``told`` what was asked about."""

    @initialize(contexts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=4))
    def begin(self, contexts: list[list[int]]) -> None:
        self.sequences = Sequences.of(LIMITS, contexts)
        self.lists = [[*each] for each in contexts]
        self.origins = Origins.none(len(contexts))
        self.known: list[Origin] = [None] * len(contexts)
        self.told: list[tuple[Contexts, list[list[int]]]] = []

    def seen(self, places: np.ndarray) -> Contexts:
        contexts = self.sequences.contexts(places)
        self.told.append((contexts, [[*self.lists[place]] for place in places]))
        return contexts

    @rule(data=st.data(), parts=st.integers(1, 3))
    def ask(self, data: Any, parts: int) -> None:
        """Some sequences are asked about, by one question or several."""
        places = np.flatnonzero(flags(data, len(self.lists)))
        contexts = self.seen(places)
        if not len(places):
            return
        sizes = [len(each) for each in np.array_split(places, min(parts, len(places)))]
        asked = self.questions(contexts, places, sizes, data)
        self.origins = self.origins.after(asked, places, contexts.lengths)
        numbered = [(each, n) for each, size in zip(asked, sizes, strict=True) for n in range(size)]
        for place, (each, n) in zip(places, numbered, strict=True):
            self.known[place] = each, n, len(self.lists[place])

    def questions(
        self, contexts: Contexts, places: np.ndarray, sizes: list[int], data: Any
    ) -> list[SequenceHandle]:
        """Return the questions about contexts, of so many of them each."""
        return [SequenceHandle(size) for size in sizes]

    @rule(data=st.data())
    def append(self, data: Any) -> None:
        count = len(self.lists)
        drawn = data.draw(st.lists(st.integers(-1, 4), min_size=count, max_size=count))
        self.sequences.append(np.array(drawn, np.int64))
        for each, token_id in zip(self.lists, drawn, strict=True):
            each += [token_id] * (token_id >= 0)

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def take(self, data: Any) -> None:
        places = data.draw(st.lists(st.integers(0, len(self.lists) - 1), max_size=MOST))
        self.sequences = self.sequences.take(np.array(places, np.int64))
        self.origins = self.origins.take(np.array(places, np.int64))
        self.lists = [[*self.lists[place]] for place in places]
        self.known = [self.known[place] for place in places]

    @rule(data=st.data(), twice=st.booleans())
    def split_and_join(self, data: Any, twice: bool) -> None:
        """The sequences in two parts, the second first; or all of them twice."""
        count = len(self.lists)
        if twice and count > MOST:
            return
        at = 0 if twice else data.draw(st.integers(0, count))
        places = [np.arange(at, count), np.arange(count if twice else at)]
        self.sequences = Sequences.joined([self.sequences.take(each) for each in places])
        self.origins = Origins.joined([self.origins.take(each) for each in places])
        order = np.concatenate(places)
        self.lists = [[*self.lists[place]] for place in order]
        self.known = [self.known[place] for place in order]

    @rule(data=st.data())
    def cut(self, data: Any) -> None:
        lengths = [data.draw(st.integers(1, len(each) + 1)) for each in self.lists]
        self.sequences.cut(np.array(lengths, np.int64))
        self.origins = self.origins.cut(np.array(lengths, np.int64))
        for place, (each, most) in enumerate(zip(self.lists, lengths, strict=True)):
            del each[most:]
            origin = self.known[place]
            if origin is not None and most < origin[2]:
                self.known[place] = None

    @rule()
    def need(self) -> None:
        self.origins = self.origins.needed()
        known = {id(each[0]) for each in self.known if each is not None}
        assert sorted(map(id, self.origins.handles)) == sorted(known)

    def found(self, place: int) -> Origin:
        """Return where a sequence comes from, by the arrays."""
        number = int(self.origins.numbers[place])
        if number < 0:
            return None
        for asked in self.origins.handles:
            if number < asked.count:
                return asked, number, int(self.origins.lengths[place])
            number -= asked.count
        raise AssertionError("a number of no question")

    @invariant()
    def they_are_what_the_lists_are(self) -> None:
        if not hasattr(self, "lists"):
            return
        assert [self.sequences.token_ids(n) for n in range(len(self.lists))] == self.lists
        assert [self.found(place) for place in range(len(self.lists))] == self.known
        goes_on = all(
            origin is not None and origin[2] < len(each)
            for origin, each in zip(self.known, self.lists, strict=True)
        )
        lengths = np.array([len(each) for each in self.lists], np.int64)
        assert self.origins.can_continue(lengths) == goes_on

    @invariant()
    def what_was_asked_about_stays_as_it_was(self) -> None:
        for contexts, lists in getattr(self, "told", []):
            assert len(contexts) == len(lists)
            assert [contexts.packed(n) for n in range(len(lists))] == [
                LogprobsRequest(tuple(each)).packed for each in lists
            ]
            assert contexts.last_tokens.tolist() == [each[-1] for each in lists]
            assert contexts.nbytes == 4 * sum(map(len, lists))
            half = slice(len(lists) // 2, None)
            assert contexts.part(half).last_tokens.tolist() == [each[-1] for each in lists[half]]


TestAsLists = AsLists.TestCase
TestAsLists.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_a_sequence_that_is_never_asked_again_keeps_its_own_question_alone() -> None:
    """One of two has ended; the other is asked about again and again."""
    first = SequenceHandle(2)
    origins = Origins.none(2).after([first], np.arange(2), np.array([3, 3]))
    gone: list[weakref.ref[SequenceHandle]] = []
    for length in range(4, 30):
        asked = SequenceHandle(1)
        origins = origins.after([asked], np.array([1]), np.array([length]))
        gone.append(weakref.ref(asked))
        assert origins.handles == (first, asked)
        assert origins.take(np.array([1])).needed().handles == (asked,)
        del asked
    gc.collect()
    assert [each() for each in gone[:-1]] == [None] * (len(gone) - 1)
