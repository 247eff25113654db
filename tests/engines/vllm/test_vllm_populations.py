"""Populations that go on by number on vLLM, step by step, whatever happens beside them: every draw is
that from transformers' row, and most steps read no context."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrt.engines.protocol import Finished
from genrt.engines.vllm.engine import VLLMEngine
from genrt.errors import NotFinite
from genrt.questions.contexts import Adapter, Limits
from genrt.questions.origins import Origins
from genrt.questions.population_draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.samples import SampleRequest
from genrt.questions.sequences import Sequences
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache
from genrt.tokens.sampling import BatchDraw

pytestmark = pytest.mark.vllm

SIZE = 320
SLOTS = 12
LONGEST = 200
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": LONGEST,
    "max_num_seqs": SLOTS,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 2**25,
}
LIMITS = Limits(SIZE, LONGEST - 1)
TOLERANCE = 1e-3
Oracle = Callable[[Sequence[int]], torch.Tensor]


class Particles:
    """Sequences that are asked about as a population is, one turn of the engine at a time."""

    def __init__(
        self,
        contexts: Sequence[Sequence[int]],
        adapter: Adapter | None = None,
        origins: Origins | None = None,
    ) -> None:
        self.sequences = Sequences.of(LIMITS, contexts)
        self.origins = Origins.none(len(contexts)) if origins is None else origins
        self.adapter = adapter
        self.lists = [[*each] for each in contexts]

    def question(self, seed: int = 0) -> PopulationDraw:
        places = np.arange(len(self.lists))
        contexts = self.sequences.contexts(places)
        origins = self.origins if self.origins.go_on(contexts.lengths) else None
        seeds = np.arange(seed, seed + len(places)).astype(np.uint64)
        return PopulationDraw(contexts, self.adapter, None, 1.0, seeds, origins)

    def answered(self, question: PopulationDraw) -> None:
        places, lengths = np.arange(len(self.lists)), question.contexts.lengths
        self.origins = self.origins.after([question.asked], places, lengths)

    def append(self, token_ids: Sequence[int]) -> None:
        self.sequences.append(np.array(token_ids))
        for each, token_id in zip(self.lists, token_ids, strict=True):
            each.append(token_id)

    def take(self, places: Sequence[int]) -> Particles:
        lists = [self.lists[place] for place in places]
        return Particles(lists, self.adapter, self.origins.take(np.array(places)))


class Turns:
    """An engine with reads, which is told when to step."""

    def __init__(self, engine: VLLMEngine, oracle: Oracle) -> None:
        self.engine = engine
        self.answering = AnsweringEngine(engine, RowCache(0))
        self.oracle = oracle
        self.ends: dict[Request, Finished] = {}

    def submit(self, *requests: Request) -> None:
        self.answering.submit(requests)
        self.ends |= {end.request: end for end in self.answering.ready()}

    def step(self) -> None:
        self.ends |= {end.request: end for end in self.answering.step()}

    def finish(self, *requests: Request) -> None:
        for _ in range(500):
            if all(each in self.ends for each in requests):
                return
            self.step()
        raise AssertionError("it does not end")

    def check(self, request: PopulationDraw | LogprobsRequest) -> Any:
        """Return a question's answer, which must be the model's."""
        end = self.ends.pop(request)
        assert end.error is None, end.error
        found: Any = end.result
        rows = [request] if isinstance(request, LogprobsRequest) else request.rows
        wanted = [self.oracle(row.token_ids) for row in rows]
        if isinstance(request, LogprobsRequest):
            assert float((found - wanted[0]).abs().max()) < TOLERANCE
            return found
        tokens, logprobs, log_mass = request.drawn(wanted).unbind(dim=-1)
        assert found.token_ids.tolist() == tokens.long().tolist()
        assert float((found.logprobs - logprobs).abs().max()) < TOLERANCE
        assert float((found.log_mass - log_mass).abs().max()) < TOLERANCE
        return found

    def ask(self, particles: Particles, *beside: Request, seed: int = 0) -> BatchDraw:
        """Return a population's draws, after which it goes on by number."""
        question = particles.question(seed)
        self.submit(question, *beside)
        self.finish(question, *beside)
        particles.answered(question)
        for each in beside:
            if isinstance(each, LogprobsRequest):
                self.check(each)
        found: BatchDraw = self.check(question)
        return found

    def grow(self, particles: Particles, *beside: Request, seed: int = 0) -> None:
        particles.append(self.ask(particles, *beside, seed=seed).token_ids.tolist())

    @property
    def by_number(self) -> int:
        """How many vLLM requests populations in progress have."""
        return sum(isinstance(each, PopulationDraw) for each in self.engine._in_progress.values())


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[VLLMEngine]:
    from genrt.engines.vllm.opening import open_vllm

    opened = open_vllm(str(llama), options=OPTIONS)
    yield opened
    opened.close()


@pytest.fixture
def turns(engine: VLLMEngine, oracle: Oracle) -> Iterator[Turns]:
    """One engine for the file; nothing may be in progress after a test, nor known but what lives."""
    engine.forget_residents()
    rows: dict[tuple[int, ...], torch.Tensor] = {}

    def remembered(context: Sequence[int]) -> torch.Tensor:
        key = tuple(context)
        if key not in rows:
            rows[key] = oracle(key)
        return rows[key]

    yield Turns(engine, remembered)
    assert not engine._in_progress
    assert not engine._populations
    engine.forget_residents()
    scheduler: Any = engine._core.engine_core.scheduler
    assert not scheduler.requests
    assert not scheduler.parked
    kept: Any = engine._open
    assert not len(kept._residents)
    assert not kept._asked_in
    assert not kept._residents._by_digest


def contexts_of(count: int, length: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(SIZE) for _ in range(length)] for _ in range(count)]


# -- what else uses a sequence ----------------------------------------------------------------------


def test_a_question_between_the_steps_of_one_population_is_of_the_sequences_as_they_are(
    turns: Turns,
) -> None:
    """Texts take most places, so the population's rows come in several steps. Those that have come have
    grown, and whoever asks about what they were starts anew."""
    particles = Particles(contexts_of(8, 20, seed=1))
    turns.grow(particles)
    texts = [SampleRequest((n, 1), max_tokens=40, seed=n) for n in range(SLOTS - 2)]
    turns.submit(*texts)
    for _ in range(3):
        turns.step()
    question = particles.question()
    turns.submit(question)
    assert turns.by_number == 8
    while turns.by_number > 6:
        turns.step()
    assert turns.by_number > 0
    others = [LogprobsRequest((*each[:-1], 5)) for each in particles.lists]
    turns.submit(*others)
    turns.finish(question, *others, *texts)
    turns.check(question)
    for each in others:
        turns.check(each)


def test_sequences_that_someone_else_extends_are_not_settled_as_they_were(turns: Turns) -> None:
    particles = Particles(contexts_of(4, 20, seed=2))
    turns.grow(particles)
    copy = particles.take([2])
    other = LogprobsRequest((*particles.lists[2][:-1], 7))
    turns.submit(other)
    question = particles.question()
    turns.submit(question)
    turns.finish(other, question)
    turns.check(other)
    turns.check(question)
    turns.ask(copy)


def test_a_population_that_fails_beside_others_leaves_nothing_wrong(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of it is not finite; the sequences of the others have grown."""
    from genrt.engines.vllm import speculation

    particles, beside = Particles(contexts_of(4, 20, seed=3)), LogprobsRequest((1, 2))
    turns.grow(particles)
    turns.submit(beside)
    turns.finish(beside)
    normalised = speculation._normalised

    def poisoned(logits: torch.Tensor) -> torch.Tensor:
        rows = normalised(logits).clone()
        rows[2, 0] = float("nan")
        return rows

    question, other = particles.question(), LogprobsRequest((1, 2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(speculation, "_normalised", poisoned)
        turns.submit(question, other)
        assert turns.by_number == 4
        turns.finish(question, other)
    assert isinstance(turns.ends.pop(question).error, NotFinite)
    turns.check(other)
    others = [LogprobsRequest((*each[:-1], 5)) for each in particles.lists]
    turns.submit(*others)
    turns.finish(*others)
    for each in others:
        turns.check(each)
    turns.ask(particles)
