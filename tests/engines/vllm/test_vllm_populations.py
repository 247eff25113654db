"""Populations that go on by number on vLLM, one turn of the engine at a time: every draw is that from
transformers' row, and most steps read no context. ``test_population_walks.py`` has random events."""

from __future__ import annotations

import itertools
import types
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from genrt.engines.protocol import Finished
from genrt.engines.vllm.capture import RowStore
from genrt.engines.vllm.engine import VLLMEngine
from genrt.engines.vllm.populations import EarlyDelivery
from genrt.engines.vllm.steps import CoreSteps
from genrt.errors import NotFinite
from genrt.populations import Population, PopulationRuntime, begin
from genrt.questions.completions import SampleRequest
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import Limits, LogprobsRequest
from genrt.questions.sequences import Contexts
from genrt.runtime.cache import RowCache
from genrt.tokens.sampling import BatchDraw
from tests.engines.vllm.small import BLOCK, Oracle, left_over, tokens
from tests.inside import core_of
from tests.scripted import Answers

pytestmark = pytest.mark.vllm

SLOTS, LONGEST = 12, 200
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": LONGEST,
    "max_num_seqs": SLOTS,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 2**25,
}
TOLERANCE = 1e-3


@types.coroutine
def _asked(requests: Sequence[Request]) -> Generator[Any, Any, list[Any]]:
    found: list[Any] = yield requests
    return found


class _Asker:
    """Hands requests to whoever drives the coroutine."""

    async def ask(self, requests: Sequence[Request], **_: Any) -> list[Any]:
        return await _asked(requests)

    def bound(self, _: str | None) -> None:
        return None

    ask_sync = None


class Turns:
    """An engine with reads, which is told when to step, and its populations."""

    def __init__(self, engine: VLLMEngine, oracle: Oracle) -> None:
        self.engine = engine
        self.answering = Answers(engine, RowCache(0))
        self.oracle = oracle
        self.ends: dict[Request, Finished] = {}
        self.went_on = 0
        thread: Any = SimpleNamespace(max_weight=100, give_back=self.answering.give_back)
        asker: Any = _Asker()
        self.home = PopulationRuntime(thread, asker, Limits(320, LONGEST - 1), itertools.count())

    def begin(self, count: int, length: int, seed: int) -> Population:
        contexts = [tokens(length, seed=100 * seed + n) for n in range(count)]
        return begin(self.home, contexts, None, None)

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
        token_ids, logprobs, log_mass = request.draw(wanted).unbind(dim=-1)
        assert found.token_ids.tolist() == token_ids.long().tolist()
        assert float((found.logprobs - logprobs).abs().max()) < TOLERANCE
        assert float((found.log_mass - log_mass).abs().max()) < TOLERANCE
        return found

    @contextmanager
    def asking(self, population: Population, **way: Any) -> Iterator[PopulationDraw]:
        """A question of a population, submitted in here; afterwards it ends, and its draws are
        appended."""
        drawing: Coroutine[Any, Any, BatchDraw] = population.draw(**{"seed": 0} | way)
        [question] = drawing.send(None)
        try:
            yield question
            if question in self.ends and self.ends[question].error is not None:
                return
            self.finish(question)
            try:
                drawing.send([self.check(question)])
            except StopIteration as ended:
                if int(population.lengths.max()) < LONGEST - 1:
                    population.append(ended.value.token_ids)
        finally:
            drawing.close()

    def grow(self, population: Population, **way: Any) -> None:
        with self.asking(population, **way) as question:
            self.submit(question)


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[VLLMEngine]:
    from genrt.engines.vllm.opening import open_vllm

    opened = open_vllm(str(llama), options=OPTIONS)
    yield opened
    opened.close()


@pytest.fixture
def turns(engine: VLLMEngine, oracle: Oracle) -> Iterator[Turns]:
    """Turns of one engine for the file; nothing may be in progress after a test, nor left."""
    engine.forget_residents()
    turns, continue_population = Turns(engine, oracle), engine.continue_population

    def counted(population: PopulationDraw) -> bool:
        is_taken = continue_population(population)
        turns.went_on += is_taken
        return is_taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "continue_population", counted)
        yield turns
    assert left_over(engine) == {}
    scheduler = core_of(engine).scheduler
    assert set(scheduler.parked) == set(scheduler.requests)
    assert engine.statistics().resident == len(scheduler.requests)
    engine.forget_residents()
    assert not scheduler.requests
    assert not engine.statistics().resident


# -- by number ------------------------------------------------------------------------------------


def test_steps_after_the_first_go_by_number_and_read_no_context(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth, resampling, a cut of nothing, questions about some, a part that is taken, a join."""
    particles = turns.begin(6, 30, seed=9)
    turns.grow(particles)
    before, read = turns.engine.statistics(), list[int]()
    packed = Contexts.packed

    def counted(contexts: Contexts, number: int) -> bytes:
        read.append(number)
        return packed(contexts, number)

    for step in range(6):
        with turns.asking(particles, seed=step) as question:
            with monkeypatch.context() as patch:
                patch.setattr(Contexts, "packed", counted)
                turns.submit(question)
                turns.finish(question)
            # Of the first, which was asked for by rows, once; of the others never.
            assert (turns.went_on, len(read)) == (step + 1, 6)
        if step % 2:
            particles.resample([0, 0, 1, 4, 4, 5])
            particles.cut(100)
    after = turns.engine.statistics()
    # After resampling the equal ones share a row, and one step later there are forks.
    assert after.rows - before.rows == after.computed_tokens - before.computed_tokens == 32
    assert after.forked - before.forked == 4
    some = particles.take([0, 2, 3, 5])
    turns.grow(some)
    for _ in range(2):
        turns.grow(some, seed=7, where=[True, False, True, False])
    turns.grow(some.take([3, 1]).join(some.take([0, 2])))
    assert turns.went_on == 10
    assert turns.engine.statistics().computed_tokens - after.computed_tokens == 12


def test_sequences_that_are_extended_compute_what_is_new_in_one_step(turns: Turns) -> None:
    """Of equal ones once; by number, as the next step does."""
    particles = turns.begin(3, 30, seed=21)
    particles.resample([0, 1, 2, 2])
    turns.grow(particles)
    particles.cut(30)
    particles.extend([[1, 2, 3], [4], [5, 6, 7, 8], [5, 6, 7, 8]])
    before = turns.engine.statistics()
    turns.grow(particles)
    after = turns.engine.statistics()
    assert (after.steps - before.steps, after.rows - before.rows) == (1, 3)
    assert after.computed_tokens - before.computed_tokens == 8
    turns.grow(particles)
    assert turns.went_on == 2


@pytest.mark.parametrize("texts", [0, SLOTS - 3])
def test_forks_that_find_no_unused_request_become_requests_of_their_own(
    turns: Turns, texts: int
) -> None:
    """Two sequences become six, at once, or a few at a time where texts leave room for no more: whoever
    asks about one that is still to be computed, or what it came from, gets its own row."""
    particles = turns.begin(2, BLOCK - 1, seed=12)
    turns.grow(particles)
    particles.cut(BLOCK - 1)
    many = particles.take([0, 1] * 3)
    many.append([30, 31, 32, 33, 34, 35])
    others = [SampleRequest((n, 1), max_tokens=40, seed=n) for n in range(texts)]
    if others:
        turns.submit(*others)
        turns.step()
    lists = [*many]
    same = [LogprobsRequest(tuple(each)) for each in lists]
    beside = [LogprobsRequest((*each, 9)) for each in lists]
    beside += [LogprobsRequest((*each[:-1], 5)) for each in lists]
    with turns.asking(many) as question:
        before = turns.engine.statistics().requests
        turns.submit(question, *same[3:])
        assert turns.engine.statistics().requests - before == 6 + 3
        turns.submit(*same[:3], *dict.fromkeys(beside))
        turns.finish(*same, *beside, *others)
    for each in dict.fromkeys((*same, *beside)):
        turns.check(each)
    turns.grow(many)


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_population_of_which_vllm_ends_a_request_fails_alone(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step of vLLM's own, whose other rows are there."""
    particles, beside = turns.begin(4, 20, seed=4), LogprobsRequest((9, 9, 9))
    turns.grow(particles)
    with turns.asking(particles) as question:
        turns.submit(question, beside)
        core, run = core_of(turns.engine), CoreSteps.run
        ended = core.scheduler.running[0].request_id

        def aborted(self: CoreSteps, *, only_texts: bool) -> Sequence[EngineCoreOutput]:
            core.abort_requests([ended])
            outputs = run(self, only_texts=only_texts)
            return [*outputs, EngineCoreOutput(ended, [], finish_reason=FinishReason.ABORT)]

        with monkeypatch.context() as patch:
            patch.setattr(CoreSteps, "run", aborted)
            turns.step()
        turns.check(beside)
        assert "ended the request" in str(turns.ends[question].error)
    turns.engine.forget_residents()
    turns.grow(particles)


def test_rows_after_one_that_is_not_finite_leave_no_request(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forks that found no unused request, which nobody knows before they are computed."""
    particles = turns.begin(2, 20, seed=14)
    turns.grow(particles)
    many = particles.take([0, 1, 0, 1])
    many.cut(20)
    many.append([30, 31, 32, 33])
    take = RowStore.take

    def poisoned(self: RowStore, tickets: Any) -> Any:
        return [None, *take(self, tickets)[1:]]

    with turns.asking(many) as question, monkeypatch.context() as patch:
        patch.setattr(RowStore, "take", poisoned)
        turns.submit(question)
        turns.finish(question)
        assert isinstance(turns.ends[question].error, NotFinite)
    assert turns.engine.forget_residents(), "or new weights would be refused"


# -- those who wait ---------------------------------------------------------------------


def test_who_waits_begins_with_no_sequence_that_has_become_another(turns: Turns) -> None:
    """Rows that are to begin with sequences of a population, which is resampled while they wait."""
    particles = turns.begin(6, 40, seed=30)
    turns.grow(particles)
    turns.grow(particles)
    resident = [each[:41] for each in particles]
    crowd = [LogprobsRequest((n, 1)) for n in range(turns.engine.max_batch_size)]
    waiting = [LogprobsRequest((*each, 7, 8)) for each in resident[3:]]
    turns.submit(*crowd, *waiting)
    turns.step()
    assert not any(each in turns.ends for each in waiting)
    particles.resample([0, 1, 2, 0, 1, 2])
    particles.cut(41)
    particles.append([30, 31, 32, 33, 34, 35])
    with turns.asking(particles) as question:
        turns.submit(question)
        turns.finish(question, *crowd, *waiting)
    for each in (*crowd, *waiting):
        turns.check(each)


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
