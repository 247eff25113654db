"""Draws of populations in answers.py: rows that are shared, missing, failing and given up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from genrt.engines.protocol import Finished
from genrt.errors import NotFinite
from genrt.questions.arguments import nonces_of
from genrt.questions.draws import DrawToken, PopulationDraw, population_draw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import Origins, SequenceHandle
from genrt.runtime.cache import RowCache
from genrt.tokens.rows import AsyncHostCopy
from genrt.tokens.sampling import Draw
from tests.scripted import Answers, ScriptedEngine, contexts_of, expected_row, logprobs

A, B, C = logprobs(1), logprobs(2), logprobs(3)
VOCAB_SIZE = ScriptedEngine.vocab_size


def population(*rows: LogprobsRequest, seed: int = 0, **options: Any) -> PopulationDraw:
    given: dict[str, Any] = {"masks": None, "temperature": 1.0} | options
    places = np.arange(len(rows))
    request = population_draw(
        contexts_of(*rows),
        None,
        places,
        nonces_of(0),
        count=len(rows),
        vocab_size=VOCAB_SIZE,
        seed=seed,
        **given,
    )
    assert request is not None
    return request


def read(row: LogprobsRequest, seed: int = 0, **options: Any) -> ReadRequest:
    return ReadRequest(row, DrawToken(seed=seed, **options))


def ended(engine: Answers) -> dict[Request, Finished]:
    ends: dict[Request, Finished] = {}
    for some in [engine.ready, *[engine.step] * 12]:
        for end in some():
            assert end.request not in ends
            ends[end.request] = end
    return ends


def single(draws: Any) -> list[Draw]:
    return [Draw(*each) for each in zip(*[part.tolist() for part in draws], strict=True)]


def answering(scripted: ScriptedEngine, cache: RowCache | None = None) -> Answers:
    return Answers(scripted, RowCache(2**20) if cache is None else cache)


def test_its_rows_are_shared_with_whoever_asks_for_them() -> None:
    scripted, cache = ScriptedEngine(), RowCache(2**20)
    cache.put(C, expected_row(C))
    engine = answering(scripted, cache)
    one, other = population(A, B, A, C), population(B, C)
    engine.submit([read(B), one, A, other])
    assert sorted(scripted.submitted[0], key=repr) == sorted([A, B], key=repr)
    assert ended(engine).keys() == {read(B), one, A, other}
    known = population(C, C)
    engine.submit([known])
    assert [end.request for end in engine.ready()] == [known]
    assert len(scripted.submitted) == 1


def test_parts_are_what_they_are_parts_of() -> None:
    rows = [logprobs(n) for n in range(5)]
    masks = torch.eye(VOCAB_SIZE, dtype=torch.bool)[:5]
    whole = population(*rows, seed=3, masks=masks, temperature=0.5)
    engine, parts = answering(ScriptedEngine()), [*whole.parts(2)]
    assert [len(part.rows) for part in parts] == [2, 2, 1]
    engine.submit([whole, *parts])
    ends = ended(engine)
    joined = [each for part in parts for each in single(ends[part].result)]
    assert joined == single(ends[whole].result)
    assert whole.nbytes > sum(row.nbytes for row in rows)


class Numbered(ScriptedEngine):
    """An engine that knows populations by number, but for one that it fails to look for."""

    def __init__(self, broken: PopulationDraw) -> None:
        super().__init__()
        self._broken = broken

    def continue_population(self, population: PopulationDraw) -> bool:
        if population is self._broken:
            raise RuntimeError("no")
        return True

    def settle(self, population: PopulationDraw) -> None: ...

    def release(self, asked: Any) -> None: ...


def test_a_flush_that_fails_leaves_no_population_that_the_engine_has_taken() -> None:
    one, other = population(A, B), population(B, C)
    known = [
        replace(each, origins=Origins.none(2).after([SequenceHandle(2)], np.arange(2), np.ones(2)))
        for each in (one, other)
    ]
    scripted = Numbered(known[1])
    engine = answering(scripted)
    with pytest.raises(RuntimeError, match="no"):
        engine.submit(known)
    assert scripted.cancelled == [[known[0]]]
    engine.cancel(known)
    assert scripted.cancelled == [[known[0]]]


class Telling(Numbered):
    """An engine that tells of a population whose draws are these, and has a row to return besides."""

    tell: Any = None

    def __init__(self, told: PopulationDraw, draws: torch.Tensor) -> None:
        super().__init__(population(C))
        self._told, self._draws = told, draws
        self.done: list[Any] = []

    def step(self) -> list[Finished]:
        self.tell([Finished(self._told, AsyncHostCopy(self._draws))])
        self.done.append("the rest of the step")
        return super().step()

    def release(self, asked: Any) -> None:
        self.done.append(asked)


@pytest.mark.parametrize("is_finite", [True, False])
def test_an_end_that_is_told_of_in_a_step_is_not_returned_by_it(is_finite: bool) -> None:
    """Sequences whose rows are not finite are released, but not while the step goes on."""
    known = Origins.none(2).after([SequenceHandle(2)], np.arange(2), np.ones(2))
    asked, told = replace(population(A, B), origins=known), list[Any]()
    draws = torch.tensor([[3, -1.0, -0.5], [5, -2.0, 0.0 if is_finite else math.nan]]).double()
    scripted = Telling(asked, draws)
    engine = answering(scripted)
    engine.submit([asked, C])

    def tell(ends: Sequence[Finished]) -> None:
        assert scripted.done == []
        told.extend(ends)

    assert [end.request for end in engine.step(tell)] == [C]
    [end] = told
    assert end.request is asked
    if is_finite:
        assert end.result.token_ids.tolist() == [3, 5]
        assert scripted.done == ["the rest of the step"]
    else:
        assert isinstance(end.error, NotFinite)
        assert scripted.done == ["the rest of the step", [asked.handle]]
    engine.cancel([asked])
    assert scripted.cancelled == []
