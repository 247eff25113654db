"""The conformance suite must be able to fail: engines that break one promise each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Engine, EngineStatistics, Finished
from genrt.errors import EngineFailed
from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Decoding,
    Delta,
    SampleRequest,
)
from genrt.questions.contexts import Adapter
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.testing import check_engine

MODEL = NGram.random(16, order=2, seed=3)


class Wrapper:
    """An ExactEngine, to be broken in one place."""

    def __init__(self) -> None:
        self.inner = ExactEngine(MODEL, max_model_len=64, max_batch_size=8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class RowsSwapped(Wrapper):
    def step(self) -> list[Finished]:
        ends = self.inner.step()
        rows = [end for end in ends if isinstance(end.result, Tensor)]
        for end, other in zip(rows, rows[1:] + rows[:1], strict=True):
            ends[ends.index(end)] = replace(end, result=other.result)
        return ends


class RowsByPositionOfSubmission(Wrapper):
    """Right in order, wrong when shuffled: rows remembered by place in the flush."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: dict[int, Any] = {}
        self.places: dict[Request, int] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.places = {request: place for place, request in enumerate(requests)}
        self.inner.submit(requests)

    def step(self) -> list[Finished]:
        return [
            replace(end, result=self.remembered.setdefault(self.places[end.request], end.result))
            if end.request in self.places and isinstance(end.result, Tensor)
            else end
            for end in self.inner.step()
        ]


class CancelIgnored(Wrapper):
    def cancel(self, requests: Sequence[Request]) -> None:
        pass


class CancelTakesABystander(Wrapper):
    def cancel(self, requests: Sequence[Request]) -> None:
        self.inner.cancel(requests)
        if requests:
            self.inner.cancel([LogprobsRequest(each.token_ids) for each in requests])
            self.inner.cancel(list(self.inner._in_progress)[:1])


class SharedStorage(Wrapper):
    def step(self) -> list[Finished]:
        ends = self.inner.step()
        return [
            replace(end, result=ends[0].result) if isinstance(end.result, Tensor) else end
            for end in ends
        ]


class RowsInOneBuffer(Wrapper):
    """Gives the rows of every step in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: Tensor | None = None

    def step(self) -> list[Finished]:
        ends = self.inner.step()
        places = [n for n, end in enumerate(ends) if isinstance(end.result, Tensor)]
        if self.buffer is None:
            self.buffer = torch.zeros(256, self.inner.vocab_size)
        for place in places:
            self.buffer[place] = cast(Tensor, ends[place].result)
            ends[place] = replace(ends[place], result=self.buffer[place])
        return ends


class Mapped(Wrapper):
    """Rows passed through a function."""

    change: Callable[[Tensor], Tensor]

    def step(self) -> list[Finished]:
        return [
            replace(end, result=type(self).change(end.result))
            if isinstance(end.result, Tensor)
            else end
            for end in self.inner.step()
        ]


class Unnormalised(Mapped):
    change = staticmethod(lambda row: row + 1)


class DoublePrecision(Mapped):
    change = staticmethod(lambda row: row.double())


class NotANumber(Mapped):
    change = staticmethod(lambda row: row * torch.nan)


class AllRowsAlike(Mapped):
    change = staticmethod(lambda row: torch.zeros_like(row).log_softmax(-1))


class AnsweredTwice(Wrapper):
    def step(self) -> list[Finished]:
        ends = self.inner.step()
        return ends + ends[:1]


class OneIsLost(Wrapper):
    def step(self) -> list[Finished]:
        return self.inner.step()[1:]


class NothingIsAnswered(Wrapper):
    def step(self) -> list[Finished]:
        self.inner.step()
        return []


class EverythingFails(Wrapper):
    def step(self) -> list[Finished]:
        return [Finished(end.request, error=EngineFailed("no")) for end in self.inner.step()]


class LongSamplesFirst(Wrapper):
    """Nothing is computed beside a sample in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Request] = []
        self.samples: set[Request] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        if self.samples:
            self.waiting += requests
        else:
            self.inner.submit(requests)
        self.samples |= {each for each in requests if isinstance(each, SampleRequest)}

    def cancel(self, requests: Sequence[Request]) -> None:
        self.samples -= set(requests)
        self.inner.cancel(requests)

    def step(self) -> list[Finished]:
        ends = self.inner.step()
        self.samples -= {end.request for end in ends}
        if not self.samples and self.waiting:
            self.inner.submit(self.waiting)
            self.waiting = []
        return ends


class Translated(Wrapper):
    """Samples asked with something changed, and answered as if it were not."""

    def __init__(self) -> None:
        super().__init__()
        self.original: dict[Request, Request] = {}
        self.fresh = iter(range(10**6))

    def submit(self, requests: Sequence[Request]) -> None:
        asked = [
            self.change(each) if isinstance(each, SampleRequest) else each for each in requests
        ]
        self.original |= dict(zip(asked, requests, strict=True))
        self.inner.submit(asked)

    def change(self, request: SampleRequest) -> SampleRequest:
        return request

    def cancel(self, requests: Sequence[Request]) -> None:
        unwanted = set(requests)
        self.inner.cancel([asked for asked, each in self.original.items() if each in unwanted])

    def step(self) -> list[Finished]:
        return [replace(end, request=self.original[end.request]) for end in self.inner.step()]


class SeedIgnored(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, seed=None, nonce=next(self.fresh))


class SeedOfTheBatch(Translated):
    """One generator for the batch, so that a draw depends on its neighbours."""

    def change(self, request: SampleRequest) -> SampleRequest:
        crowd = len(self.inner._in_progress) + self.crowd
        return replace(request, seed=(request.seed or 0) + 1000 * crowd, nonce=next(self.fresh))

    crowd = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.crowd = len(requests)
        super().submit(requests)


class UnseededAlike(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, seed=request.seed or 5)


class TemperatureIgnored(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, temperature=1.0, nonce=next(self.fresh))


class TopKIgnored(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, top_k=0, nonce=next(self.fresh))


class TopPIgnored(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, top_p=1.0, nonce=next(self.fresh))


class MinPIgnored(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, min_p=0.0, nonce=next(self.fresh))


class StopIgnored(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, stop_token_ids=frozenset(), nonce=next(self.fresh))


class TooShort(Translated):
    def change(self, request: SampleRequest) -> SampleRequest:
        return replace(request, max_tokens=max(1, request.max_tokens - 1), nonce=next(self.fresh))


class StopTokenReturned(Wrapper):
    def step(self) -> list[Finished]:
        return [
            replace(end, result=(*end.result, *end.request.stop_token_ids))
            if isinstance(end.request, SampleRequest) and isinstance(end.result, tuple)
            else end
            for end in self.inner.step()
        ]


class OneTokenShortOfItsLength(Wrapper):
    @property
    def max_model_len(self) -> int:
        return self.inner.max_model_len + 1


class CountsIdleSteps(Wrapper):
    steps = 0

    def step(self) -> list[Finished]:
        self.steps += 1
        return self.inner.step()

    def statistics(self) -> EngineStatistics:
        return replace(self.inner.statistics(), steps=self.steps)


class CountsNoRows(Wrapper):
    def statistics(self) -> EngineStatistics:
        return replace(self.inner.statistics(), rows=0)


class CountersShrink(Wrapper):
    def statistics(self) -> EngineStatistics:
        counted = self.inner.statistics()
        return replace(counted, computed_tokens=-counted.computed_tokens)


class LiveStatistics(Wrapper):
    def statistics(self) -> Any:
        return SimpleNamespace(**asdict(self.inner.statistics()))


class ClosesOnce(Wrapper):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise AssertionError("closed twice")
        self.closed = True


class AdaptersIgnored(Wrapper):
    """Answers every request from the base model."""

    def __init__(self) -> None:
        super().__init__()
        self.original: dict[Request, Request] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            base = replace(cast("LogprobsRequest | SampleRequest", request), adapter=None)
            self.original[base] = request
            self.inner.submit([base])

    def step(self) -> list[Finished]:
        return [replace(end, request=self.original[end.request]) for end in self.inner.step()]


class MixedStepsGiveTheLastAdapter(Wrapper):
    """As one version of vLLM on the CPU: base requests beside adapter requests get the adapter's."""

    def __init__(self) -> None:
        super().__init__()
        model: Any = self.inner._model
        logits = model.logits
        model.logits = lambda contexts, adapter: logits(contexts, adapter or self.last())

    def last(self) -> Adapter | None:
        bound = [each.adapter for each in self.inner._in_progress]
        return next((adapter for adapter in bound if adapter), None)


class OldWeightsUnderANewVersion(Wrapper):
    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Path] = {}

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self.inner.add_adapter(adapter, self.first.setdefault(adapter.name, path))


class TextsChanged(Wrapper):
    """Completions asked with something changed, and answered as if it were not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[Request, Request] = {}

    def change(self, request: CompletionRequest) -> CompletionRequest:
        return request

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if isinstance(request, CompletionRequest):
                self.asked[request] = self.change(request)
        self.inner.submit([self.asked.get(each, each) for each in requests])

    def cancel(self, requests: Sequence[Request]) -> None:
        self.inner.cancel([self.asked.get(each, each) for each in requests])

    def step(self) -> list[Finished]:
        original = {changed: request for request, changed in self.asked.items()}
        return [
            replace(end, request=original.get(end.request, end.request))
            for end in self.inner.step()
        ]


class TextStopIgnored(TextsChanged):
    def change(self, request: CompletionRequest) -> CompletionRequest:
        return replace(request, decoding=replace(request.decoding, stop_token_ids=()))


class TextsTooEarly(TextsChanged):
    def change(self, request: CompletionRequest) -> CompletionRequest:
        return replace(request, decoding=replace(request.decoding, min_tokens=0))


class TextBiasIgnored(TextsChanged):
    def change(self, request: CompletionRequest) -> CompletionRequest:
        return replace(request, decoding=replace(request.decoding, logit_bias=()))


class TextsNeverGreedy(TextsChanged):
    def change(self, request: CompletionRequest) -> CompletionRequest:
        return replace(request, decoding=replace(request.decoding, temperature=1.0))


class TextSeedOfTheBatch(TextsChanged):
    crowd = 0

    def change(self, request: CompletionRequest) -> CompletionRequest:
        return replace(request, seed=request.seed and request.seed + 1000 * self.crowd)

    def submit(self, requests: Sequence[Request]) -> None:
        self.crowd = len(requests)
        super().submit(requests)


class TextsAlike(TextsChanged):
    def change(self, request: CompletionRequest) -> CompletionRequest:
        return replace(request, seed=request.seed or 5)


class TextsWithAnothersLogprobs(Wrapper):
    def step(self) -> list[Finished]:
        return [
            replace(end, result=replace(end.result, logprobs=tuple(reversed(end.result.logprobs))))
            if isinstance(end.result, Completion)
            else end
            for end in self.inner.step()
        ]


class TextsWithTheModelsLogprobs(TextsChanged):
    def change(self, request: CompletionRequest) -> CompletionRequest:
        decoding = replace(request.decoding, logprobs_mode="raw_logprobs")
        return replace(request, decoding=decoding)


class DeltasOfTheNext(Wrapper):
    def progress(self, streamed: Sequence[CompletionRequest]) -> list[Delta | None]:
        deltas = list(self.inner.progress(streamed))
        return deltas[1:] + deltas[:1]


class DeltasTwice(Wrapper):
    last: list[Delta | None]
    turn = 0

    def progress(self, streamed: Sequence[CompletionRequest]) -> list[Delta | None]:
        self.turn += 1
        if self.turn % 2:
            self.last = list(self.inner.progress(streamed))
        return [
            delta if request in self.inner._in_progress else None
            for request, delta in zip(streamed, self.last, strict=True)
        ]


class DeltasLost(Wrapper):
    turn = 0

    def progress(self, streamed: Sequence[CompletionRequest]) -> list[Delta | None]:
        self.turn += 1
        deltas = list(self.inner.progress(streamed))
        return [None] * len(deltas) if self.turn % 3 == 0 else deltas


class NoDeltas(Wrapper):
    def progress(self, streamed: Sequence[CompletionRequest]) -> list[Delta | None]:
        return [None] * len(streamed)


class DeltasOfWhatIsCancelled(Wrapper):
    last: list[Delta | None] | None = None

    def progress(self, streamed: Sequence[CompletionRequest]) -> list[Delta | None]:
        deltas = list(self.inner.progress(streamed))
        self.last = self.last or deltas
        return [deltas[place] or self.last[place] for place in range(len(deltas))]


class SaysNothingOfOptions(Wrapper):
    def unsupported(self, decoding: Decoding) -> str | None:
        return "no"


BROKEN: dict[type[Wrapper], str] = {
    TextStopIgnored: "must end with its stop token",
    TextsTooEarly: "before its time",
    TextBiasIgnored: "must force",
    TextsNeverGreedy: "below the likeliest's",
    TextSeedOfTheBatch: "depends on its batch",
    TextsAlike: "all the same",
    TextsWithTheModelsLogprobs: "off their law's",
    TextsWithAnothersLogprobs: "off its row's",
    DeltasOfTheNext: "is not what follows|the engine tells",
    DeltasTwice: "is not what follows",
    DeltasLost: "is not what follows",
    NoDeltas: "nothing was told",
    DeltasOfWhatIsCancelled: "is over or cancelled",
    SaysNothingOfOptions: "must be drawn|does not say",
    RowsSwapped: "in a flush and alone|shuffled",
    RowsByPositionOfSubmission: "apart",
    CancelIgnored: "came back",
    CancelTakesABystander: "counts|not answered",
    SharedStorage: "apart|alone",
    RowsInOneBuffer: "a later step has written",
    Unnormalised: "not normalised",
    DoublePrecision: "not float32",
    NotANumber: "has NaN",
    AllRowsAlike: "all contexts have the same row",
    AnsweredTwice: "answered before",
    OneIsLost: "not answered",
    NothingIsAnswered: "not answered",
    EverythingFails: "failed",
    LongSamplesFirst: "held up",
    SeedIgnored: "seeded sample",
    SeedOfTheBatch: "depends on its batch",
    UnseededAlike: "independent",
    TemperatureIgnored: "temperature 0",
    TopKIgnored: "top_k=1",
    TopPIgnored: "top_p=1e-6",
    MinPIgnored: "min_p=1",
    StopIgnored: "before its stop token",
    StopTokenReturned: "before its stop token",
    TooShort: "not max_tokens",
    OneTokenShortOfItsLength: "failed: ContextTooLong",
    CountsIdleSteps: "must not be counted",
    CountsNoRows: "rows grew by 0",
    CountersShrink: "computed_tokens has shrunk",
    LiveStatistics: "frozen",
    ClosesOnce: "closed twice",
    AdaptersIgnored: "are those of the base model",
    MixedStepsGiveTheLastAdapter: "other adapters",
    OldWeightsUnderANewVersion: "the same weights",
}


def adapter_directories(root: Path) -> list[Path]:
    made = []
    for seed in (11, 12):
        path = root / str(seed)
        path.mkdir()
        save_file(
            {"table": NGram.random(16, order=2, seed=seed).table},
            path / "adapter_model.safetensors",
        )
        (path / "adapter_config.json").write_text("{}")
        made.append(path)
    return made


def test_an_unbroken_wrapper_passes(tmp_path: Path) -> None:
    check_engine(lambda: cast(Engine, Wrapper()), adapter_paths=adapter_directories(tmp_path))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_engine_is_found_out(
    broken: type[Wrapper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genrt.testing.witness._PATIENCE", 200)
    with pytest.raises(AssertionError, match=BROKEN[broken]):
        check_engine(lambda: cast(Engine, broken()), adapter_paths=adapter_directories(tmp_path))


def test_the_engine_is_closed_also_when_it_fails() -> None:
    opened: list[RowsSwapped] = []

    def open_engine() -> Engine:
        opened.append(RowsSwapped())
        return cast(Engine, opened[-1])

    with pytest.raises(AssertionError):
        check_engine(open_engine)
    assert "closed" in repr(opened[0].inner)
