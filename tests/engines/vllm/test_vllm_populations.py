"""Populations that go on by number on vLLM, step by step, whatever happens beside them: every draw is
that from transformers' row, and most steps read no context."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from genrt.engines.protocol import Finished
from genrt.engines.vllm.engine import VLLMEngine
from genrt.engines.vllm.populations import EarlyDelivery
from genrt.engines.vllm.runners import step_rows
from genrt.errors import NotFinite
from genrt.questions.completions import SampleRequest
from genrt.questions.contexts import Adapter, Limits
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import Contexts, Origins, Sequences
from genrt.runtime.cache import RowCache
from genrt.tokens.sampling import BatchDraw
from tests.scripted import Answers

pytestmark = pytest.mark.vllm

SIZE = 320
SLOTS = 12
LONGEST = 200
HAS_LORA = not torch.cuda.is_available()
"""vLLM's LoRA kernels for CUDA take 16 bits only, and these tests are of float32."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": LONGEST,
    "max_num_seqs": SLOTS,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 2**25,
} | ({"enable_lora": True, "max_lora_rank": 8} if HAS_LORA else {})
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

    def question(self, seed: int = 0, places: Sequence[int] | None = None) -> PopulationDraw:
        at = np.arange(len(self.lists)) if places is None else np.array(places)
        contexts = self.sequences.contexts(at)
        origins = self.origins if places is None else self.origins.take(at).needed()
        seeds = (seed + at).astype(np.uint64)
        known = origins if origins.go_on(contexts.lengths) else None
        return PopulationDraw(contexts, self.adapter, None, 1.0, seeds, known)

    def answered(self, question: PopulationDraw, places: Sequence[int] | None = None) -> None:
        at = np.arange(len(self.lists)) if places is None else np.array(places)
        self.origins = self.origins.after([question.handle], at, question.contexts.lengths)

    def append(self, token_ids: Sequence[int]) -> None:
        self.sequences.append(np.array(token_ids))
        for each, token_id in zip(self.lists, token_ids, strict=True):
            each += [token_id] * (token_id >= 0)

    def extend(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.sequences.extend(token_ids)
        for each, more in zip(self.lists, token_ids, strict=True):
            each += more

    def cut(self, lengths: Sequence[int]) -> None:
        self.sequences.cut(np.array(lengths))
        self.origins = self.origins.cut(np.array(lengths))
        for each, length in zip(self.lists, lengths, strict=True):
            del each[length:]

    def take(self, places: Sequence[int]) -> Particles:
        lists = [self.lists[place] for place in places]
        return Particles(lists, self.adapter, self.origins.take(np.array(places)))

    def join(self, other: Particles) -> Particles:
        origins = Origins.joined([self.origins, other.origins])
        return Particles([*self.lists, *other.lists], self.adapter, origins)


class Turns:
    """An engine with reads, which is told when to step."""

    def __init__(self, engine: VLLMEngine, oracle: Oracle) -> None:
        self.engine = engine
        self.answering = Answers(engine, RowCache(0))
        self.oracle = oracle
        self.ends: dict[Request, Finished] = {}
        self.went_on = 0
        take = self.answering._continue_by_number

        def go_on(populations: Sequence[PopulationDraw]) -> dict[Request, None]:
            taken = take(populations)
            self.went_on += len(taken)
            return taken

        self.answering._continue_by_number = go_on  # type: ignore[method-assign]

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
        tokens, logprobs, log_mass = request.draw(wanted).unbind(dim=-1)
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
    yield from checked(engine, oracle)


def checked(engine: VLLMEngine, oracle: Oracle) -> Iterator[Turns]:
    """Turns of one engine for the file; nothing may be in progress after a test, nor left."""
    engine.forget_residents()
    rows: dict[tuple[int, ...], torch.Tensor] = {}

    def remembered(context: Sequence[int]) -> torch.Tensor:
        key = tuple(context)
        if key not in rows:
            rows[key] = oracle(key)
        return rows[key]

    turns = Turns(engine, remembered)
    yield turns
    assert not turns.answering._found
    assert not turns.answering._by_number
    assert not engine._in_progress
    assert not engine._populations
    assert not engine._adapters._users
    kept: Any = engine._open
    scheduler: Any = engine._core.engine_core.scheduler
    assert set(kept._asked_in) == set(scheduler.parked) == set(scheduler.requests)
    assert {*kept.residents._by_id, *kept.residents._later} == set(scheduler.requests)
    gc.collect()
    assert len(engine._populations._known) <= 1, "of the last step"
    engine.forget_residents()
    assert not scheduler.requests
    assert not scheduler._waking
    assert not len(kept.residents)
    assert not kept._asked_in
    assert not kept.residents._by_digest


def contexts_of(count: int, length: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(SIZE) for _ in range(length)] for _ in range(count)]


# -- by number ------------------------------------------------------------------------------------


def test_steps_after_the_first_go_by_number_and_read_no_context(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth, resampling, a cut of nothing, questions about some, a part that is taken, a join."""
    particles = Particles(contexts_of(6, 30, seed=9))
    turns.grow(particles)
    before, read = turns.engine.statistics(), list[int]()
    packed = Contexts.packed

    def counted(contexts: Contexts, number: int) -> bytes:
        read.append(number)
        return packed(contexts, number)

    monkeypatch.setattr(Contexts, "packed", counted)
    for step in range(6):
        questions = turns.went_on
        question = particles.question(step)
        turns.submit(question)
        turns.finish(question)
        # Of the first, which was asked for by rows, once; of the others never.
        assert (turns.went_on, len(read)) == (questions + 1, 6)
        particles.answered(question)
        with monkeypatch.context() as patch:
            patch.setattr(Contexts, "packed", packed)
            particles.append(turns.check(question).token_ids.tolist())
        if step % 2:
            particles = particles.take([0, 0, 1, 4, 4, 5])
            particles.cut([100] * 6)
    after = turns.engine.statistics()
    # After resampling the equal ones share a row, and one step later there are forks.
    assert after.rows - before.rows == after.computed_tokens - before.computed_tokens == 32
    assert after.forked - before.forked == 4
    particles = particles.take([0, 2, 3, 5])
    turns.grow(particles)
    for _ in range(2):
        some = particles.question(7, [0, 2])
        turns.submit(some)
        turns.finish(some)
        particles.answered(some, [0, 2])
        first, second = turns.check(some).token_ids.tolist()
        particles.append([first, -1, second, -1])
    turns.grow(particles.take([3, 1]).join(particles.take([0, 2])))
    assert turns.went_on == 10
    assert turns.engine.statistics().computed_tokens - after.computed_tokens == 12


def test_sequences_that_are_extended_compute_what_is_new_in_one_step(turns: Turns) -> None:
    """Of equal ones once; and they go on by number afterwards."""
    particles = Particles(contexts_of(3, 30, seed=21))
    particles = particles.take([0, 1, 2, 2])
    turns.ask(particles)
    particles.extend([[1, 2, 3], [4], [5, 6, 7, 8], [5, 6, 7, 8]])
    before = turns.engine.statistics()
    turns.grow(particles)
    after = turns.engine.statistics()
    assert (after.steps - before.steps, after.rows - before.rows) == (1, 3)
    assert after.computed_tokens - before.computed_tokens == 8
    turns.ask(particles)
    assert turns.went_on == 1


def test_equal_sequences_of_a_joined_population_share_a_row(turns: Turns) -> None:
    particles = Particles(contexts_of(3, 20, seed=10))
    turns.ask(particles)
    twice = particles.take([0, 1]).join(particles.take([1, 2, 1]))
    twice.append([4, 5, 5, 6, 5])
    before = turns.engine.statistics().rows
    turns.ask(twice)
    assert turns.went_on == 1
    assert turns.engine.statistics().rows - before == 3


def test_sequences_grow_to_the_longest_by_number(turns: Turns) -> None:
    particles = Particles(contexts_of(3, LONGEST - 4, seed=11))
    for _ in range(4):
        draws = turns.ask(particles)
        if len(particles.lists[0]) < LONGEST - 1:
            particles.append(draws.token_ids.tolist())
    assert turns.went_on == 3
    again = particles.take([0, 2])
    again.cut([LONGEST - 3] * 2)
    turns.ask(again)


@pytest.mark.parametrize("texts", [0, SLOTS - 3])
def test_forks_that_find_no_seat_become_requests_of_their_own(turns: Turns, texts: int) -> None:
    """Two sequences become six, at once, or a few at a time where texts leave room for no more: whoever
    asks about one that is still to be computed gets its own row."""
    particles = Particles(contexts_of(2, 31, seed=12))  # a block is 32 tokens
    turns.ask(particles)
    many = particles.take([0, 1] * 3)
    many.append([30, 31, 32, 33, 34, 35])
    others = [SampleRequest((n, 1), max_tokens=40, seed=n) for n in range(texts)]
    if others:
        turns.submit(*others)
        turns.step()
    question = many.question()
    same = [LogprobsRequest(tuple(each)) for each in many.lists]
    turns.submit(question, *same[3:])
    assert turns.by_number == 6
    longer = [LogprobsRequest((*each, 9)) for each in many.lists]
    turns.submit(*same[:3], *longer)
    turns.finish(question, *same, *longer, *others)
    many.answered(question)
    many.append(turns.check(question).token_ids.tolist())
    for each in (*same, *longer):
        turns.check(each)
    turns.ask(many)


def test_where_vllm_takes_not_all_of_the_new_requests_the_rows_are_asked_for(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    particles = Particles(contexts_of(2, 20, seed=13))
    turns.ask(particles)
    many = particles.take([0, 1, 0, 1, 0])
    many.append([30, 31, 32, 33, 34])
    core, left = turns.engine._core, [1]
    take = core.add_request

    def add_request(*arguments: Any) -> None:
        if not left:
            monkeypatch.undo()
            raise RuntimeError("no more")
        left.pop()
        take(*arguments)

    monkeypatch.setattr(core, "add_request", add_request)
    turns.ask(many)
    assert turns.went_on == 0


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
    from genrt.engines.vllm import runners as runner_v1

    particles, beside = Particles(contexts_of(4, 20, seed=3)), LogprobsRequest((1, 2))
    turns.grow(particles)
    turns.submit(beside)
    turns.finish(beside)

    def poisoned(logits: torch.Tensor) -> torch.Tensor:
        rows = step_rows(logits).clone()
        rows[2, 0] = float("nan")
        return rows

    question, other = particles.question(), LogprobsRequest((1, 2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(runner_v1, "step_rows", poisoned)
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


def test_a_population_of_which_vllm_ends_a_request_fails_alone(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step of vLLM's own, whose other rows are there."""
    particles, beside = Particles(contexts_of(4, 20, seed=4)), LogprobsRequest((9, 9, 9))
    turns.grow(particles)
    question = particles.question()
    turns.submit(question, beside)
    ended = next(each for each, of in turns.engine._in_progress.items() if of is question)
    run, stop = turns.engine._steps.run, FinishReason.ABORT

    def aborted(*, only_texts: bool) -> Sequence[EngineCoreOutput]:
        turns.engine._core.abort_requests([ended])
        outputs = run(only_texts=only_texts)
        return [*outputs, EngineCoreOutput(ended, [], finish_reason=stop)]

    with monkeypatch.context() as patch:
        patch.setattr(turns.engine._steps, "run", aborted)
        turns.step()
    turns.check(beside)
    assert "ended the request" in str(turns.ends.pop(question).error)
    turns.engine._open.forget([ended])  # type: ignore[union-attr]
    turns.ask(particles)


# -- adapters, restarts, tasks ------------------------------------------------------------------


@pytest.mark.skipif(not HAS_LORA, reason="vLLM's LoRA on CUDA has no float32")
def test_a_population_of_an_adapter_goes_on_with_that_one_alone(
    turns: Turns, loras: tuple[Path, Path], llama: Path
) -> None:
    """It is removed while the population is in progress, and another is loaded under its name."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tuned = {
        Adapter("a", number): PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32), path
        ).eval()
        for number, path in enumerate(loras)
    }

    def row(context: Sequence[int], adapter: Adapter) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = tuned[adapter](torch.tensor([list(context)])).logits[0, -1]
        return logits.log_softmax(dim=-1)

    first, second = tuned
    turns.answering.add_adapter(first, loras[0])
    base_too = Particles(contexts_of(3, 20, seed=12))
    particles = Particles(contexts_of(3, 20, seed=12), first)
    turns.grow(base_too)
    oracle = turns.oracle

    def grow(each: Particles, adapter: Adapter) -> None:
        turns.oracle = lambda context: row(context, adapter)
        turns.grow(each)
        turns.oracle = oracle

    for _ in range(3):
        grow(particles, first)
        turns.grow(base_too)
    assert turns.went_on == 5
    question = particles.question()
    turns.submit(question)
    turns.answering.add_adapter(second, loras[1])
    turns.answering.remove_adapter(first)
    turns.finish(question)
    turns.oracle = lambda context: row(context, first)
    turns.check(question)
    turns.oracle = oracle
    assert not turns.engine._adapters._users
    rebound = Particles(particles.lists, second, particles.origins)
    for _ in range(2):
        grow(rebound, second)
        turns.grow(base_too)
    turns.answering.remove_adapter(second)


def test_who_waits_begins_with_no_sequence_that_has_become_another(turns: Turns) -> None:
    """Rows that are to begin with sequences of a population, which is resampled while they wait."""
    particles = Particles(contexts_of(6, 40, seed=30))
    turns.grow(particles)
    turns.grow(particles)
    resident = [each[:41] for each in particles.lists]
    crowd = [LogprobsRequest((n, 1)) for n in range(turns.engine.max_batch_size)]
    waiting = [LogprobsRequest((*each, 7, 8)) for each in resident[3:]]
    turns.submit(*crowd, *waiting)
    turns.step()
    assert not any(each in turns.ends for each in waiting)
    forked = particles.take([0, 1, 2, 0, 1, 2])
    forked.cut([41] * 6)
    forked.append([30, 31, 32, 33, 34, 35])
    question = forked.question()
    turns.submit(question)
    turns.finish(question, *crowd, *waiting)
    turns.check(question)
    for each in (*crowd, *waiting):
        turns.check(each)


def test_rows_after_one_that_is_not_finite_leave_no_request(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forks that found no seat, which nobody knows before they are computed."""
    particles = Particles(contexts_of(2, 20, seed=14))
    turns.ask(particles)
    many = particles.take([0, 1, 0, 1])
    many.append([30, 31, 32, 33])
    question, take = many.question(), turns.engine._store.take

    def poisoned(tickets: Any) -> Any:
        return [None, *take(tickets)[1:]]

    with monkeypatch.context() as patch:
        patch.setattr(turns.engine._store, "take", poisoned)
        turns.submit(question)
        turns.finish(question)
    assert isinstance(turns.ends.pop(question).error, NotFinite)
    assert turns.engine.forget_residents(), "or new weights would be refused"


@pytest.mark.parametrize(
    ("absence", "device", "is_idle", "is_early"),
    [
        (0.1, "cuda", True, True),
        (1.9, "cuda", True, True),
        (2.1, "cuda", True, False),
        (0.1, "cuda", False, False),
        (0.1, "cpu", True, False),
    ],
)
def test_draws_are_delivered_early_to_a_caller_that_asks_again_soon(
    monkeypatch: pytest.MonkeyPatch, absence: float, device: str, is_idle: bool, is_early: bool
) -> None:
    class Stream:
        def query(self) -> bool:
            return is_idle

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    now = delivered_at = 100.0
    early = EarlyDelivery(lambda: now)
    found = []
    for _ in range(4):
        now = max(now, delivered_at + absence)
        early.requested()
        now += 3.0  # the forward
        found.append(early.is_due(torch.device(device)))
        delivered_at = now
        with early.preparing(is_early=found[-1]):
            now += 1.0
        delivered_at = delivered_at if found[-1] else now
    assert found == [False, *[is_early] * 3], "nothing is known of the first"
