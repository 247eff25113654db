"""Sequences that go on from what the other end holds travel as their last tokens, and come out whole."""

from __future__ import annotations

import gc
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from genrt.cluster import messages
from genrt.cluster.frames import Frames, received
from genrt.cluster.memory import Memory
from genrt.cluster.messages import (
    LEAST_APART,
    AskedNumbers,
    RemotePopulations,
    dump_message,
    load_message,
    outgoing,
)
from genrt.questions import sequences
from genrt.questions.contexts import Limits
from genrt.questions.draws import PopulationDraw
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import Contexts, Origins, SequenceHandle, Sequences
from tests.questions.test_origins import AsLists

Lists = list[list[int]]


class Hop:
    """A connection: what its sender knows of the receiver, and what that one has."""

    def __init__(self) -> None:
        self.numbers, self.held = AskedNumbers(), RemotePopulations()
        self.table: dict[int, SequenceHandle] = {}
        self.sent = 0

    def carry(self, draw: PopulationDraw) -> PopulationDraw:
        """Return a question as it comes out at the other end."""
        self.forget()
        data = dump_message(draw, self.numbers.of, held=self.held)
        self.sent = len(data)
        found: PopulationDraw = load_message(data, self.table)
        return found

    def forget(self) -> None:
        """Have the receiver forget what nobody goes on from."""
        while self.numbers.gone:
            self.table.pop(self.numbers.gone.popleft(), None)


def lists_of(contexts: Contexts) -> Lists:
    return [[*LogprobsRequest(packed=contexts.packed(n)).token_ids] for n in range(len(contexts))]


class FarEnds(AsLists):
    """Every question goes to one of two replicas, and on to another rank, unless it is lost on the way;
    ``far`` has what came out and has not been read. Replicas die, and are others after that."""

    @initialize(growth=st.sampled_from([0, 2, 20]), most=st.sampled_from([0, 200, 2**28]))
    def bounds(self, growth: int, most: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sequences, "EXTENSION_BYTES", growth)
        self.patch.setattr(messages, "MOST_HELD", most)
        self.most = most
        self.ways = [(Hop(), Hop()), (Hop(), Hop())]
        self.far: list[tuple[Contexts, Lists]] = []

    def questions(
        self, contexts: Contexts, places: np.ndarray, sizes: list[int], data: Any
    ) -> list[SequenceHandle]:
        origins, asked, start = self.origins.take(places), list[SequenceHandle](), 0
        goes_on = origins.go_on(contexts.lengths)
        for size in sizes:
            part = slice(start, start := start + size)
            of = origins.take(part).needed() if goes_on else None
            seeds = np.zeros(size, np.uint64)
            draw = PopulationDraw(contexts.part(part), None, None, 1.0, seeds, of)
            asked.append(draw.handle)
            way = data.draw(st.lists(st.sampled_from(self.ways), min_size=1, max_size=2))
            for near, far in way:
                first = near.carry(draw)
                lists = [[*self.lists[place]] for place in places[part]]
                self.came(first, lists)
                if data.draw(st.booleans()):
                    self.came(far.carry(first), lists)
        return asked

    def came(self, draw: PopulationDraw, lists: Lists) -> None:
        contexts = draw.contexts
        assert contexts.lengths.tolist() == [len(each) for each in lists]
        assert contexts.last_tokens.tolist() == [each[-1] for each in lists]
        assert contexts.nbytes == 4 * sum(map(len, lists))
        self.far.append((contexts, lists))

    @rule(token=st.integers(0, 4))
    def go_on(self, token: int) -> None:
        """All get a token more, as those do that go on by number."""
        self.sequences.append(np.full(len(self.lists), token))
        for each in self.lists:
            each.append(token)

    @rule(which=st.integers(0, 1))
    def die(self, which: int) -> None:
        self.ways[which] = Hop(), Hop()

    @precondition(lambda self: self.far)
    @rule(data=st.data())
    def read(self, data: Any) -> None:
        contexts, lists = self.far.pop(data.draw(st.integers(0, len(self.far) - 1)))
        assert lists_of(contexts) == lists
        assert lists_of(contexts.part(slice(1, None))) == lists[1:]
        assert contexts.last_tokens.tolist() == [each[-1] for each in lists]

    @invariant()
    def little_is_held(self) -> None:
        for near, far in getattr(self, "ways", ()):
            for hop in (near, far):
                hop.forget()
                held = [each.contexts for each in hop.table.values() if each.contexts is not None]
                assert sum(each.nbytes for each in held) <= self.most

    def teardown(self) -> None:
        if hasattr(self, "ways"):
            self.patch.undo()
            for contexts, lists in self.far:
                assert lists_of(contexts) == lists
            vars(self).pop("origins", None)
            vars(self).pop("known", None)
            gc.collect()
            for near, far in self.ways:
                for hop in (near, far):
                    hop.forget()
                    assert not hop.table


FarEnds.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestFarEnds = FarEnds.TestCase


def steps(count: int, length: int) -> Iterator[PopulationDraw]:
    """Yield questions about ``count`` sequences, each of which goes on from the one before."""
    table = np.arange(count * length, dtype=np.int64).reshape(count, length)
    whole = Sequences.of(Limits(count * length, 10**6), table)
    origins = Origins.none(count)
    while True:
        contexts = whole.contexts(np.arange(count))
        goes_on = origins.go_on(contexts.lengths)
        seeds = np.zeros(count, np.uint64)
        draw = PopulationDraw(contexts, None, None, 1.0, seeds, origins if goes_on else None)
        yield draw
        origins = origins.after([draw.handle], np.arange(count), contexts.lengths)
        whole.append(np.full(count, 3))


def test_the_third_question_of_a_population_and_all_after_it_are_small() -> None:
    hop, other = Hop(), Hop()
    sizes = list[int]()
    for draw, _ in zip(steps(20, 500), range(8), strict=False):
        assert lists_of(other.carry(hop.carry(draw)).contexts) == lists_of(draw.contexts)
        assert hop.sent == other.sent
        sizes.append(hop.sent)
    assert min(sizes[:2]) > 4 * 20 * 500
    assert max(sizes[2:]) < 2_000


def test_sequences_are_put_together_once_what_they_have_grown_from_takes_more() -> None:
    """As when few of many are left, or many steps have been taken."""
    many = Sequences.of(Limits(9, 100), np.ones((50, 40), np.int64)).contexts(np.arange(50))
    few = Contexts.grown([many], np.array([4, 4]), np.array([7, 8], np.uint32))
    assert few._growth is None
    assert [each[-2:] for each in lists_of(few)] == [[1, 7], [1, 8]]
    contexts, depths, depth = many, list[int](), 0
    for _ in range(60):
        contexts = Contexts.grown([contexts], np.arange(50), np.full(50, 3, np.uint32))
        depth = 0 if contexts._growth is None else depth + 1
        depths.append(depth)
    assert 2 <= max(depths) <= 20
    assert depths.count(0) > 2
    assert lists_of(contexts) == [[1] * 40 + [3] * 60] * 50


@pytest.mark.parametrize("seed", range(5))
def test_sequences_that_have_grown_many_times_are_put_together_as_they_are(seed: int) -> None:
    chosen, limits = random.Random(seed), Limits(9, 1000)
    lists = [[chosen.randrange(9) for _ in range(chosen.randrange(30, 50))] for _ in range(8)]
    whole = [(Sequences.of(limits, lists).contexts(np.arange(8)), lists)]
    depth = 0
    for _ in range(60):
        several = chosen.sample(whole[-4:], min(len(whole), chosen.choice([1, 1, 1, 1, 2])))
        count = sum(len(each) for _, each in several)
        numbers = [chosen.randrange(count) for _ in range(8)]
        tokens = [chosen.randrange(9) for _ in numbers]
        every = [each for _, some in several for each in some]
        lists = [[*every[n], token] for n, token in zip(numbers, tokens, strict=True)]
        given = np.array(numbers), np.array(tokens, np.uint32)
        whole.append((Contexts.grown([each for each, _ in several], *given), lists))
        growth, deep = whole[-1][0]._growth, 0
        while growth is not None:
            growth, deep = growth.before._growth, deep + 1
        depth = max(depth, deep)
        if chosen.random() < 0.05:
            contexts, lists = chosen.choice(whole)
            assert lists_of(contexts) == lists
    assert depth > 3
    for contexts, lists in whole:
        assert contexts.last_tokens.tolist() == [each[-1] for each in lists]
        assert lists_of(contexts) == lists


def test_what_goes_on_from_some_that_are_not_held_too_travels_whole() -> None:
    hop, one, other = Hop(), steps(20, 500), steps(20, 500)
    for _ in range(3):
        hop.carry(first := next(one))
        second = next(other)  # which another replica is asked
    some, more = first.contexts, second.contexts
    tables = [Sequences(each.table[:, :502].copy(), each.lengths) for each in (some, more)]
    joined = Sequences.joined(tables)
    known = [
        Origins((each.handle,), np.arange(20), each.contexts.lengths) for each in (first, second)
    ]
    joined.append(np.full(40, 5))
    contexts, seeds = joined.contexts(np.arange(40)), np.zeros(40, np.uint64)
    draw = PopulationDraw(contexts, None, None, 1.0, seeds, Origins.joined(known))
    found = hop.carry(draw)
    assert hop.sent > 4 * 40 * 500
    assert lists_of(found.contexts) == lists_of(contexts)


def test_another_connection_gets_the_whole_of_what_goes_on() -> None:
    hop, questions = Hop(), steps(20, 500)
    for _ in range(4):
        hop.carry(next(questions))
    another = Hop()
    for number in range(3):
        draw = next(questions)
        assert lists_of(another.carry(draw).contexts) == lists_of(draw.contexts)
        assert (another.sent < 2_000) == (number > 0)


def test_a_receiver_that_does_not_hold_it_fails_and_guesses_nothing() -> None:
    hop, questions = Hop(), steps(3, 5)
    for _ in range(3):
        hop.carry(next(questions))
    hop.table.clear()
    with pytest.raises(AttributeError):
        hop.carry(next(questions))


def test_what_is_held_does_not_keep_the_memory_in_which_it_came() -> None:
    """That is wanted for the next message."""
    one, other = socket.socketpair()
    with one, other:
        memory, frames, hop = Memory(), Frames(), Hop()
        for draw, _ in zip(steps(4, LEAST_APART), range(3), strict=False):
            outgoing(draw, memory, hop.numbers.of, hop.held).send_to([one])
            came = received(other, frames)
            assert came is not None
            [frame] = came
            found = load_message(frame.data, hop.table, frame.arrays)
            del frame, came, found
        assert len(memory._pieces) == 1  # of which the second question's sequences are free too
        assert [each.memory[0] for each in memory._pieces] == [0]
        last = [*hop.table.values()][-1].contexts
        assert last is not None
        assert last.packed(3) == draw.contexts.packed(3)
