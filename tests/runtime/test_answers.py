"""answers.py: who shares a row, what it costs the engine, and that answers are the row's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Finished
from genrt.errors import EngineDied, EngineFailed, GenrtError, NotFinite, OutOfMemory
from genrt.questions import draws
from genrt.questions.draws import DrawToken
from genrt.questions.reads import Candidates, HostRow, ReadRequest, TopTokens
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime import answers
from genrt.runtime.cache import RowCache
from genrt.testing import check_engine
from tests.answers import check_reads
from tests.scripted import Answers, ScriptedEngine, expected_row, logprobs, sample

A, B = logprobs(1), logprobs(2)
VOCAB_SIZE = ScriptedEngine.vocab_size


def packed(*token_ids: int, vocab_size: int = VOCAB_SIZE) -> bytes:
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def draw(row: LogprobsRequest, seed: int = 0, **options: Any) -> ReadRequest:
    return ReadRequest(row, DrawToken(seed=seed, **options))


def every_kind(row: LogprobsRequest) -> list[ReadRequest]:
    return [
        draw(row),
        draw(row, 1, mask=packed(0, 3)),
        draw(row, 2, temperature=0.5),
        ReadRequest(row, TopTokens(3)),
        ReadRequest(row, Candidates((4, 1, 4))),
        ReadRequest(row, HostRow()),
    ]


def answering(engine: ScriptedEngine, *, cache_bytes: int = 2**20) -> Answers:
    return Answers(engine, RowCache(cache_bytes))


def drain(engine: Answers, count: int) -> dict[Request, Finished]:
    """So many ends; none comes twice."""
    ends: dict[Request, Finished] = {}
    for some in [engine.ready, *[engine.step] * 20]:
        for end in some():
            assert end.request not in ends
            ends[end.request] = end
        if len(ends) == count:
            return ends
    raise AssertionError(f"{len(ends)} of {count} requests ended")


def ask(engine: Answers, *requests: Request) -> list[Result]:
    engine.submit(requests)
    ends = drain(engine, len(requests))
    for end in ends.values():
        assert end.error is None, end
    return [cast("Result", ends[request].result) for request in requests]


def same(one: Result, other: Result) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, cast("torch.Tensor", other))
    parts = zip(cast("Sequence[Any]", one), cast("Sequence[Any]", other), strict=True)
    return type(one) is type(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in parts
    )


def test_draws_are_equal_in_everything_and_their_hash_is_cheap() -> None:
    fields: list[Any] = [packed(1), 1.0, 5, None]
    others = [packed(2), 0.5, 6, 7]
    one = DrawToken(*fields)
    assert one == DrawToken(*fields)
    assert hash(one) == hash(DrawToken(*fields))
    for place, other in enumerate(others):
        changed = [*fields[:place], other, *fields[place + 1 :]]
        assert one != DrawToken(*changed)
    assert hash(one) != hash(DrawToken(packed(2), seed=5)), "nothing else tells these apart"
    ones = [DrawToken(mask, nonce=7) for mask in (packed(1), packed(2))]
    assert hash(ones[0]) == hash(ones[1]), "masks are long, and a nonce is enough"
    assert ones[0] != ones[1]


# -- who shares a row -------------------------------------------------------------------------


def test_all_who_ask_about_a_context_in_one_flush_share_its_row() -> None:
    scripted = ScriptedEngine()
    engine = answering(scripted)
    results = ask(engine, *every_kind(A), A, *every_kind(B), sample(1))
    assert scripted.submitted == [[A, B, sample(1)]]
    assert torch.equal(cast("torch.Tensor", results[6]), expected_row(A))
    assert engine.statistics().reads == 12


def test_rows_moved_to_the_host_are_cached_and_rows_only_read_from_are_not() -> None:
    cache = RowCache(2**20)
    engine = Answers(ScriptedEngine(), cache)
    ask(engine, *every_kind(A)[:-1], ReadRequest(B, HostRow()))
    assert A not in cache
    assert B in cache
    [again] = ask(engine, ReadRequest(B, HostRow()))
    assert torch.equal(cast("torch.Tensor", again), expected_row(B))
    cast("torch.Tensor", again).fill_(math.nan)
    assert torch.equal(cast("torch.Tensor", cache.borrow(B)), expected_row(B))


# -- failures ---------------------------------------------------------------------------------


def test_a_dead_engine_is_asked_nothing_more() -> None:
    """What it would raise then would hide that it died."""
    engine = answering(ScriptedEngine(fail_at={1: EngineDied("dead")}, fail_cancel=KeyError("no")))
    engine.submit([draw(A)])
    with pytest.raises(EngineDied, match="dead"):
        engine.step()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("no"), EngineFailed), (MemoryError(), OutOfMemory), (NotFinite("x"), NotFinite)],
)
def test_a_kind_of_read_that_fails_fails_alone(
    error: Exception, kind: type[GenrtError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(draws, "draw_chunk", fail)
    engine = answering(ScriptedEngine())
    engine.submit([*every_kind(A), A])
    ends = drain(engine, 7)
    for read in every_kind(A)[:3]:
        assert type(ends[read].error) is kind
    others: list[Request] = [*every_kind(A)[3:], A]
    assert all(ends[request].error is None for request in others)


# -- what they answer -------------------------------------------------------------------------

EXACT = NGram.random(41, order=2, seed=3, zeros=0.4)
contexts = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(
    lambda ids: LogprobsRequest(tuple(ids))
)
masks = st.one_of(
    st.none(), st.sets(st.integers(0, 40)).map(lambda ids: packed(*ids, vocab_size=41))
)
wanted = st.one_of(
    st.builds(
        DrawToken,
        mask=masks,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        seed=st.integers(0, 2**63 - 1),
    ),
    st.builds(TopTokens, st.integers(1, 41)),
    st.builds(Candidates, st.lists(st.integers(0, 40), max_size=5).map(tuple)),
    st.builds(HostRow),
)
reads = st.lists(st.builds(ReadRequest, contexts, wanted), min_size=1, max_size=12, unique=True)


def exact() -> Answers:
    return Answers(ExactEngine(EXACT), RowCache(0))


@pytest.mark.promise(number=18)
@settings(max_examples=60, deadline=None)
@given(reads)
def test_an_answer_does_not_depend_on_what_it_is_batched_with(asked: list[ReadRequest]) -> None:
    for request, result in zip(asked, ask(exact(), *asked), strict=True):
        [alone] = ask(exact(), request)
        assert same(alone, result), request


def test_reads_of_more_rows_than_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        draw(LogprobsRequest((n,)), n, mask=packed(*range(n), vocab_size=41)) for n in range(41)
    ]
    asked += [ReadRequest(LogprobsRequest((n,)), TopTokens(1 + n)) for n in range(41)]
    together = ask(exact(), *asked)
    monkeypatch.setattr("genrt.tokens.sampling.CPU_CHUNK", 5 * 41)
    for one, other in zip(together, ask(exact(), *asked), strict=True):
        assert same(one, other)


def test_what_a_read_brings_to_the_host_is_small() -> None:
    counted = {
        type(request.wanted): answers._bytes(result)
        for request, result in zip(
            every_kind(A), ask(answering(ScriptedEngine()), *every_kind(A)), strict=True
        )
    }
    assert counted == {
        DrawToken: 24,
        TopTokens: 3 * (8 + 4),
        Candidates: 3 * 4,
        HostRow: 4 * VOCAB_SIZE,
    }


# -- an engine like any other -----------------------------------------------------------------


def test_without_reads_it_is_the_engine_itself() -> None:
    make: Any = lambda: Answers(ExactEngine(EXACT, max_model_len=32), RowCache(0))
    check_engine(make)


def test_repr_and_statistics_tell_what_goes_on() -> None:
    engine = answering(ScriptedEngine())
    engine.submit([draw(A), draw(A, 1), draw(B)])
    assert "3 reads in progress" in repr(engine)
    drain(engine, 3)
    s = engine.statistics()
    assert (s.reads, s.requests, s.steps, s.bytes_to_host) == (3, 2, 1, 0)


def test_every_kind_of_read_is_what_its_row_says() -> None:
    check_reads(Answers(ExactEngine(EXACT, max_model_len=32), RowCache(0)), EXACT.vocab_size)
