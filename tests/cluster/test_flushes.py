"""Flushes and answers come out as they went in; sequences that are held there travel as last tokens."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from genrt.engines.remote.flushes import (
    LARGE,
    Answers,
    FarEnd,
    HandleNumbers,
    NearEnd,
    packed_ends,
    unpacked_ends,
)
from genrt.engines.remote.wire import Unpacking
from genrt.errors import InvalidRequest
from genrt.questions import sequences
from genrt.questions.arguments import Adapter
from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Decoding,
    Delta,
    SampleRequest,
    SamplingMask,
)
from genrt.questions.draws import DrawToken, PopulationDraw
from genrt.questions.reads import Candidates, ReadRequest, TopTokens, TopWithTail
from genrt.questions.request import Request
from genrt.questions.rows import Limits, LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Contexts, Origins, SequenceHandle, Sequences
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs
from tests.questions.test_origins import AsLists

Lists = list[list[int]]

ADAPTER = Adapter("a b", 2)
ROW = LogprobsRequest([1, 2, 3], ADAPTER, weights_version=5)
DECODING = Decoding(
    9,
    0.5,
    stop=("x", "y"),
    logit_bias=((3, -1.5),),
    structure=("choice", ("a", "b")),
    template=(("tools", ("f",)),),
)
REQUESTS: list[Request] = [
    ROW,
    LogprobsRequest([7], weights_version=5),
    ReadRequest(ROW, DrawToken(b"\x0f" * 16, 0.5, seed=3)),
    ReadRequest(ROW, DrawToken(seed=8)),
    ReadRequest(ROW, TopTokens(3)),
    ReadRequest(ROW, Candidates((3, 1), 0.5)),
    ScoreRequest(ROW.packed, 1, ADAPTER, 5, "greedy"),
    ScoreRequest(ROW.packed, 2, None, 5, temperature=0.5),
    ScoreRequest(ROW.packed, 1, ADAPTER, 5, "rows"),
    SampleRequest((1, 2), 3, frozenset({5, 4}), seed=1, weights_version=5),
    SampleRequest((1, 2), 3, nonce=2**62, adapter=ADAPTER, weights_version=5),
    CompletionRequest((1, 2), DECODING, None, ADAPTER, 7, True, 5),
    ScoreRequest(ROW.packed, 1, ADAPTER, 5, "top", 0.5, 2),
    ReadRequest(ROW, TopWithTail(2, 0.5)),
]
INFINITE = float("-inf")
MASK = SamplingMask("ids", ((-0.5, -0.1, b"abcd"), (0.0, 0.0, b"")), 3)
TEXT = Completion("ab", (1, 2), (0,), (-1.5, INFINITE), ({3: -2.0},), "stop", 5, 1.0, 0.5, "r", 5)
MASKED = replace(TEXT, sampling_mask=MASK)
RESULTS: list[Any] = [
    torch.arange(5.0),
    Draw.of((3, -0.1, INFINITE), 5),
    TopLogprobs(torch.tensor([3, 1, 2]), torch.tensor([-1.0, -2.0, INFINITE])),
    torch.zeros(2, 2),
    (4, 5),
    (),
    TEXT,
    MASKED,
    torch.arange(5, dtype=torch.int32) + 2**30,
    InvalidRequest("not this"),
    BatchDraw.of((torch.tensor([1, -1]), torch.zeros(2), torch.tensor([0.0, INFINITE])), 5),
]


def test_requests_come_out_equal_and_in_order_whatever_their_kind() -> None:
    """Texts travel beside the bytes."""
    data, others = FarEnd(HandleNumbers()).flush(REQUESTS, tickets=[3])
    flush = Unpacking(data)
    found = NearEnd().requests(flush, pickle.loads(pickle.dumps(others)))  # noqa: S301
    assert found == REQUESTS
    assert flush.header["tickets"] == [3]
    assert {each.weights_version for each in found} == {5}
    assert {type(each) for each in others} == {SampleRequest, CompletionRequest}


def test_answers_come_out_equal_whatever_their_kind() -> None:
    delta = Delta("a", (1,), (INFINITE,), ({2: -1.0},), 3, 4, "r", 5)
    ends, counters = [*enumerate(RESULTS)], [3, 0.5]
    message = packed_ends(4, ends, [(10, delta)], counters)
    assert isinstance(message, Answers)
    assert [result for _, result in message.others] == [(4, 5), (), TEXT, MASKED]
    number, found, told, counted = unpacked_ends(message, lambda ticket: 5)
    assert (number, counted, told) == (4, counters, [(10, delta)])
    assert sorted(ticket for ticket, _ in found) == [*range(len(RESULTS))]
    for ticket, mine in found:
        result = RESULTS[ticket]
        assert type(mine) is type(result)
        if isinstance(result, torch.Tensor):
            assert torch.equal(mine, result)
            assert mine.dtype == result.dtype
        elif isinstance(result, TopLogprobs | BatchDraw):
            assert all(map(torch.equal, mine, result))
        elif isinstance(result, InvalidRequest):
            assert str(mine) == "not this"
        else:
            assert mine == result
        if isinstance(result, Draw | BatchDraw | Completion):
            assert mine.weights_version == result.weights_version == 5


def test_many_rows_travel_beside_the_bytes_as_one_array() -> None:
    rows = [torch.arange(LARGE) / 2, torch.arange(3) / 2]
    message = packed_ends(0, [*enumerate(rows)], [], [])
    assert isinstance(message, Answers)
    assert len(message.data) < 1_000
    assert len(message.large) == LARGE + 3  # type: ignore[arg-type]
    message.large.flags.writeable = False  # type: ignore[union-attr]
    _, found, _, _ = unpacked_ends(message, lambda ticket: 0)
    assert all(map(torch.equal, [row for _, row in found], rows))
    found[0][1].add_(1)  # it is its owner's
    assert isinstance(packed_ends(0, [(0, rows[1])], [], []), bytes)


class Hop:
    """A connection: what its sender knows of the receiver, and what that one has."""

    def __init__(self) -> None:
        self.far, self.near = FarEnd(HandleNumbers()), NearEnd()
        self.sent = 0

    def carry(self, draw: PopulationDraw) -> PopulationDraw:
        """Return a question as it comes out at the other end."""
        self.forget()
        data, _ = self.far.flush([draw])
        self.sent = len(data)
        [found] = self.near.requests(Unpacking(data), ())
        assert isinstance(found, PopulationDraw)
        return found

    def forget(self) -> None:
        """Have the receiver forget what nobody goes on from."""
        for each in self.far.numbers.taken():
            self.near.handles.pop(each, None)


def lists_of(contexts: Contexts) -> Lists:
    return [[*LogprobsRequest(packed=contexts.packed(n)).token_ids] for n in range(len(contexts))]


class FarEnds(AsLists):
    """Every question goes to one of two replicas, and on to another rank, unless it is lost on the way;
    ``far`` has what came out and has not been read. Replicas die, and are others after that."""

    @initialize(growth=st.sampled_from([0, 2, 20]))
    def bounds(self, growth: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sequences, "EXTENSION_BYTES", growth)
        self.ways = [(Hop(), Hop()), (Hop(), Hop())]
        self.far: list[tuple[Contexts, Lists]] = []

    def questions(
        self, contexts: Contexts, places: np.ndarray, sizes: list[int], data: Any
    ) -> list[SequenceHandle]:
        origins, asked, start = self.origins.take(places), list[SequenceHandle](), 0
        goes_on = origins.can_continue(contexts.lengths)
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
                    assert not hop.near.handles


FarEnds.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestFarEnds = FarEnds.TestCase


def test_a_draw_has_its_weights_over_there() -> None:
    seeds, laws = np.zeros(1, np.uint64), ((0.5, 2.0), (1.0, 1.5))
    contexts = Sequences.of(Limits(5, 40), [[1, 2], [3]]).contexts(np.arange(2))
    draw = PopulationDraw(contexts, None, None, 1.0, seeds, weights_version=3, laws=laws)
    found = Hop().carry(draw)
    assert (found.laws, found.weights_version) == (laws, 3)
    assert [each.laws for each in [*draw.parts(1), draw.of_weights(4)]] == [laws, laws]


def steps(count: int, length: int) -> Iterator[PopulationDraw]:
    """Yield questions about ``count`` sequences, each of which goes on from the one before."""
    table = np.arange(count * length, dtype=np.int64).reshape(count, length)
    whole = Sequences.of(Limits(count * length, 10**6), table)
    origins = Origins.none(count)
    while True:
        contexts = whole.contexts(np.arange(count))
        goes_on = origins.can_continue(contexts.lengths)
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


def test_a_receiver_that_does_not_hold_it_fails_and_guesses_nothing() -> None:
    hop, questions = Hop(), steps(3, 5)
    for _ in range(3):
        hop.carry(next(questions))
    hop.near.handles.clear()
    with pytest.raises(AttributeError):
        hop.carry(next(questions))
