"""Requests in progress, over a scripted forward: whose turn it is, and what an error reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME
from genrt.engines.protocol import Finished
from genrt.engines.stepping import SteppedEngine, SteppedModel
from genrt.errors import (
    Closed,
    EngineFailed,
    InvalidAdapter,
    InvalidRequest,
    NotFinite,
    OutOfMemory,
    UnknownAdapter,
)
from genrt.questions.arguments import Adapter
from genrt.questions.completions import CompletionRequest, Decoding, SampleRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest

V = 8


class Script(SteppedModel):
    """A model whose logits say what the context was, that records its calls and fails on demand."""

    vocab_size, device, tokenizer = V, torch.device("cpu"), None

    def __init__(self) -> None:
        self.loaded: list[Adapter] = []
        self.unloaded: list[Adapter] = []
        self.closed = 0
        self.calls: list[tuple[list[tuple[int, ...]], Adapter | None]] = []
        self.failures: dict[int, Exception] = {}
        self.poison: dict[int, Tensor] = {}

    def __repr__(self) -> str:
        return "Script()"

    def load_adapter(self, adapter: Adapter, path: Path) -> None:
        self.loaded.append(adapter)

    def unload_adapter(self, adapter: Adapter) -> None:
        self.unloaded.append(adapter)

    def close(self) -> None:
        self.closed += 1

    def logits(self, contexts: Sequence[Sequence[int]], adapter: Adapter | None) -> Tensor:
        self.calls.append(([tuple(context) for context in contexts], adapter))
        failure = self.failures.get(len(self.calls))
        if failure is not None:
            raise failure
        rows = torch.stack([wanted(tuple(context)) for context in contexts])
        for row, context in zip(rows, contexts, strict=True):
            if context[-1] in self.poison:
                row.copy_(self.poison[context[-1]])
        return rows


def wanted(context: tuple[int, ...]) -> Tensor:
    seed = sum((index + 1) * token for index, token in enumerate(context))
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def stepper(script: Script, *, max_batch_size: int = 4, max_model_len: int = 32) -> SteppedEngine:
    return SteppedEngine(script, max_model_len=max_model_len, max_batch_size=max_batch_size)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory that may be loaded as an adapter; the scripted model reads nothing of it."""
    (tmp_path / CONFIG_NAME).write_text("{}", encoding="utf-8")
    (tmp_path / WEIGHTS_NAME).touch()
    return tmp_path


def drain(engine: SteppedEngine, count: int) -> dict[Request, Finished]:
    ends: dict[Request, Finished] = {}
    for _ in range(100):
        ends |= {end.request: end for end in engine.step()}
        if len(ends) == count:
            return ends
    raise AssertionError(f"{len(ends)} of {count} requests came back")


def questions(*tokens: int) -> list[LogprobsRequest]:
    return [LogprobsRequest((1, token)) for token in tokens]


def expect_right(ends: dict[Request, Finished], requests: Sequence[LogprobsRequest]) -> None:
    for request in requests:
        result = ends[request].result
        assert isinstance(result, Tensor)
        torch.testing.assert_close(result, wanted(request.token_ids))


@pytest.mark.promise(number=19)
def test_the_oldest_go_first_and_no_more_than_fit() -> None:
    script = Script()
    engine = stepper(script, max_batch_size=3)
    engine.submit(questions(0, 1, 2, 3, 4, 5, 6))
    sizes = [[end.request.token_ids[1] for end in engine.step()] for _ in range(4)]
    assert sizes == [[0, 1, 2], [3, 4, 5], [6], []]
    assert engine.statistics().steps == 3


@pytest.mark.promise(number=19)
def test_a_row_waits_for_one_turn_of_each_sample_at_most() -> None:
    engine = stepper(Script(), max_batch_size=2)
    engine.submit([SampleRequest((1,), max_tokens=20, seed=seed) for seed in range(6)])
    engine.step()
    [question] = questions(3)
    engine.submit([question])
    steps = 0
    while question not in {end.request for end in engine.step()}:
        steps += 1
    assert steps == 3


def test_requests_of_one_adapter_share_a_forward(directory: Path) -> None:
    script = Script()
    engine = stepper(script, max_batch_size=6)
    one, two = Adapter("one", 1), Adapter("two", 1)
    for adapter in (one, two):
        engine.add_adapter(adapter, directory)
    engine.submit([LogprobsRequest((token,), who) for token in (1, 2) for who in (None, one, two)])
    assert len(engine.step()) == 6
    assert script.calls == [([(1,), (2,)], who) for who in (None, one, two)]
    assert engine.statistics().steps == 1


@pytest.mark.promise(number=6)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_failing_forward_takes_all_in_progress_and_the_next_flush_works(k: int) -> None:
    script = Script()
    script.failures[k] = ValueError("boom")
    engine = stepper(script, max_batch_size=2)
    engine.submit(questions(0, 1, 2, 3, 4, 5))
    answered = sum(len(engine.step()) for _ in range(k - 1))
    with pytest.raises(EngineFailed, match="boom") as caught:
        engine.step()
    assert caught.value.__cause__ is script.failures[k]
    assert engine.step() == []
    assert engine.statistics().failed == 6 - answered
    again = questions(0, 1, 5)
    engine.submit(again)
    expect_right(drain(engine, 3), again)


def test_running_out_of_memory_is_told_apart() -> None:
    for error in (
        torch.OutOfMemoryError("no memory left"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"),
    ):
        script = Script()
        script.failures[1] = error
        engine = stepper(script)
        engine.submit(questions(0))
        with pytest.raises(OutOfMemory) as caught:
            engine.step()
        assert caught.value.__cause__ is error


@pytest.mark.promise(number=8)
@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
def test_a_poisoned_request_fails_alone(worst: float) -> None:
    script = Script()
    script.poison[7] = torch.full((V,), worst) if worst == -math.inf else torch.eye(V)[2] * worst
    engine = stepper(script, max_batch_size=8)
    sound = questions(0, 1)
    poisoned: list[Request] = [*questions(7), SampleRequest((1, 7), max_tokens=3)]
    engine.submit([sound[0], *poisoned, sound[1]])
    ends = drain(engine, 4)
    expect_right(ends, sound)
    assert all(isinstance(ends[request].error, NotFinite) for request in poisoned)
    assert engine.statistics().failed == 2


def test_a_request_that_cannot_be_computed_gets_its_own_error_and_disturbs_nobody() -> None:
    script = Script()
    script.failures[1] = ValueError("boom")
    engine = stepper(script)
    faults: dict[Request, type[Exception]] = {
        LogprobsRequest((1,), Adapter("unknown", 1)): UnknownAdapter,
        CompletionRequest((1,), Decoding(4, split_reasoning=True)): InvalidRequest,
    }
    fitting = LogprobsRequest((1,) * 32)
    engine.submit([*faults, fitting])
    ends = {end.request: end.error for end in engine.step()}
    assert {request: type(error) for request, error in ends.items()} == faults
    with pytest.raises(EngineFailed, match="boom"):
        engine.step()
    engine.submit([fitting])
    expect_right(drain(engine, 1), [fitting])


def test_a_flush_with_a_request_in_progress_is_refused_whole() -> None:
    engine = stepper(Script())
    first, second = questions(0, 1)
    engine.submit([first])
    for flush in ([second, first], [second, second]):
        with pytest.raises(InvalidRequest, match="in progress"):
            engine.submit(flush)
    assert [end.request for end in engine.step()] == [first]
    assert engine.statistics().requests == 1
    engine.submit([LogprobsRequest((1,), Adapter("unknown", 1))])
    engine.cancel([LogprobsRequest((1,), Adapter("unknown", 1))])  # a refused one
    assert (engine.step(), engine.statistics().cancelled) == ([], 1)


@pytest.mark.parametrize("ending", ["finished", "cancelled", "failed", "closed"])
def test_an_adapter_is_unloaded_when_its_last_request_has_ended(
    ending: str, directory: Path
) -> None:
    script = Script()
    engine = stepper(script, max_batch_size=1)
    adapter, unloaded = Adapter("a", 1), script.unloaded
    engine.add_adapter(adapter, directory)
    bound = [LogprobsRequest((token,), adapter) for token in (1, 2)]
    engine.submit(bound)
    engine.remove_adapter(adapter)
    engine.submit([LogprobsRequest((3,), adapter)])
    [refused] = engine.step()
    assert isinstance(refused.error, UnknownAdapter)
    engine.step()
    assert unloaded == []
    if ending == "finished":
        engine.step()
    elif ending == "cancelled":
        engine.cancel(bound)
    elif ending == "failed":
        script.failures[2] = ValueError("boom")
        with pytest.raises(EngineFailed):
            engine.step()
    else:
        engine.close()
    assert unloaded == [adapter]
    engine.close()
    assert unloaded == [adapter]


def test_an_adapter_is_added_once_and_removed_once(directory: Path) -> None:
    engine = stepper(Script())
    adapter = Adapter("a", 1)
    engine.add_adapter(adapter, directory)
    with pytest.raises(InvalidAdapter, match="already"):
        engine.add_adapter(adapter, directory)
    engine.add_adapter(Adapter("a", 2), directory)
    engine.remove_adapter(adapter)
    with pytest.raises(UnknownAdapter, match="not loaded"):
        engine.remove_adapter(adapter)


def test_after_closing_nothing_is_taken_and_nothing_comes_back(directory: Path) -> None:
    script = Script()
    engine = stepper(script)
    engine.submit(questions(0))
    engine.close()
    engine.close()
    assert script.closed == 1
    assert engine.step() == []
    engine.cancel(questions(0))
    with pytest.raises(Closed, match="closed"):
        engine.submit(questions(1))
    with pytest.raises(Closed, match="closed"):
        engine.add_adapter(Adapter("a", 1), directory)
    assert script.loaded == []


def test_seeds_of_any_size_are_taken() -> None:
    engine = stepper(Script())
    seeds = (-1, 0, 2**63, 2**64 - 2, 2**80)
    engine.submit([SampleRequest((1,), max_tokens=4, seed=seed) for seed in seeds])
    assert repr(engine) == "SteppedEngine(Script(), 5 in progress, 0 adapters, 0 steps)"
    assert all(end.error is None for end in drain(engine, 5).values())
    for name in ("max_batch_size", "max_model_len"):
        with pytest.raises(InvalidRequest, match=name):
            stepper(Script(), **{name: 0})
