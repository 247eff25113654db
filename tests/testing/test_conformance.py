"""The conformance suite must be able to fail: engines that break one promise each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Engine, EngineStatistics, Finished
from genrt.errors import EngineFailed
from genrt.questions.arguments import Adapter
from genrt.questions.completions import SampleRequest
from genrt.questions.request import Request
from genrt.testing import check_engine
from tests.inside import in_progress

MODEL = NGram.random(16, order=2, seed=3)
Ends = list[Finished]


class Wrapper:
    """An ExactEngine with one thing changed: what it is asked, or what comes of it.

    Args:
        ask: changes a request on its way to the engine; the answer is told as the original's.
        answer: changes the results of a step.
        count: changes the statistics.
        others: attributes and methods in place of the engine's.
    """

    def __init__(
        self,
        ask: Callable[[Any], Request] = lambda request: request,
        answer: Callable[[Ends], Ends] = lambda ends: ends,
        count: Callable[[EngineStatistics], Any] = lambda counted: counted,
        **others: Any,
    ) -> None:
        self.inner = ExactEngine(MODEL, max_model_len=64, max_batch_size=8)
        self.ask, self.answer, self.count = ask, answer, count
        self.sent: dict[Request, Request] = {}
        self.flush: Sequence[Request] = ()
        for name, other in others.items():
            setattr(self, name, other.__get__(self) if callable(other) else other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self.flush = requests
        self.sent |= {request: self.ask(request) for request in requests}
        self.inner.submit([self.sent[request] for request in requests])

    def cancel(self, requests: Sequence[Request]) -> None:
        self.inner.cancel([self.sent.get(each, each) for each in requests])

    def step(self) -> Ends:
        original = {sent: request for request, sent in self.sent.items()}
        ends = [replace(end, request=original[end.request]) for end in self.inner.step()]
        return self.answer(ends)

    def statistics(self) -> Any:
        return self.count(self.inner.statistics())


fresh = itertools.count(1)


def sample(**changed: Any) -> dict[str, Any]:
    """Samples with these arguments instead of their own."""

    def ask(request: Request) -> Request:
        if not isinstance(request, SampleRequest):
            return request
        made = {name: of(request) if callable(of) else of for name, of in changed.items()}
        return replace(request, **{"nonce": next(fresh)} | made)

    return {"ask": ask}


def rows(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Every row passed through a function."""

    def answer(ends: Ends) -> Ends:
        return [
            replace(end, result=change(end.result)) if isinstance(end.result, Tensor) else end
            for end in ends
        ]

    return {"answer": answer}


def rows_swapped(ends: Ends) -> Ends:
    of_rows = [end for end in ends if isinstance(end.result, Tensor)]
    results = [end.result for end in of_rows[1:] + of_rows[:1]]
    return [end for end in ends if end not in of_rows] + [
        replace(end, result=result) for end, result in zip(of_rows, results, strict=True)
    ]


def samples_first(self: Any) -> Ends:
    """Nothing is computed beside a sample in progress."""
    running = [*in_progress(self.inner)]
    if any(isinstance(each, SampleRequest) for each in running):
        others = [each for each in running if not isinstance(each, SampleRequest)]
        self.inner.cancel(others)
        ends = self.inner.step()
        self.inner.submit(others)
        return cast(Ends, ends)
    return cast(Ends, self.inner.step())


def closes_once(self: Any) -> None:
    if self.__dict__.get("closed"):
        raise AssertionError("closed twice")
    self.closed = True


def counts_idle_steps(self: Any) -> Ends:
    self.steps = self.__dict__.get("steps", 0) + 1
    self.count = lambda counted: replace(counted, steps=self.steps)
    return Wrapper.step(self)


def first_weights(self: Any, adapter: Adapter, path: Path) -> None:
    """Old weights under a new version."""
    known: dict[str, Path] = self.__dict__.setdefault("known", {})
    self.inner.add_adapter(adapter, known.setdefault(adapter.name, path))


BROKEN: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "rows swapped": (lambda: {"answer": rows_swapped}, "in a flush and alone|shuffled"),
    "cancel ignored": (lambda: {"cancel": lambda self, requests: None}, "came back"),
    "unnormalised": (lambda: rows(lambda row: row + 1), "not normalised"),
    "all rows alike": (
        lambda: rows(lambda row: torch.zeros_like(row).log_softmax(-1)),
        "all contexts have the same row",
    ),
    "answered twice": (lambda: {"answer": lambda ends: ends + ends[:1]}, "answered before"),
    "one is lost": (lambda: {"answer": lambda ends: ends[1:]}, "not answered"),
    "everything fails": (
        lambda: {
            "answer": lambda ends: [Finished(e.request, error=EngineFailed("no")) for e in ends]
        },
        "failed",
    ),
    "long samples first": (lambda: {"step": samples_first}, "held up"),
    "seed ignored": (lambda: sample(seed=None), "seeded sample"),
    "unseeded alike": (lambda: sample(seed=lambda r: r.seed or 5), "independent"),
    "temperature ignored": (lambda: sample(temperature=1.0), "temperature 0"),
    "top_k ignored": (lambda: sample(top_k=0), "top_k=1"),
    "stop ignored": (lambda: sample(stop_token_ids=frozenset()), "before its stop token"),
    "too short": (lambda: sample(max_tokens=lambda r: max(1, r.max_tokens - 1)), "not max_tokens"),
    "one token short": (lambda: {"max_model_len": 65}, "failed: ContextTooLong"),
    "counts idle steps": (lambda: {"step": counts_idle_steps}, "must not be counted"),
    "counts no rows": (lambda: {"count": lambda all: replace(all, rows=0)}, "rows grew by 0"),
    "closes once": (lambda: {"close": closes_once}, "closed twice"),
    "adapters ignored": (
        lambda: {"ask": lambda request: request.bound_to(None)},
        "are those of the base model",
    ),
    "old weights": (lambda: {"add_adapter": first_weights}, "the same weights"),
}


def opened(changes: dict[str, Any]) -> Engine:
    return cast(Engine, Wrapper(**changes))


def adapter_directories(root: Path) -> list[Path]:
    made = []
    for seed in (11, 12):
        path = root / str(seed)
        path.mkdir()
        table = NGram.random(16, order=2, seed=seed).table
        save_file({"table": table}, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text("{}")
        made.append(path)
    return made


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return adapter_directories(tmp_path_factory.mktemp("adapters"))


def test_an_unbroken_wrapper_passes(adapters: list[Path]) -> None:
    check_engine(lambda: opened({}), adapter_paths=adapters)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_engine_is_found_out(
    name: str, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genrt.testing.witness._PATIENCE", 200)
    changes, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check_engine(lambda: opened(changes()), adapter_paths=adapters)


def test_the_engine_is_closed_also_when_it_fails() -> None:
    engine = opened({"answer": rows_swapped})
    with pytest.raises(AssertionError):
        check_engine(lambda: engine)
    assert "closed" in repr(cast(Any, engine).inner)
