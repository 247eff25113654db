"""An engine around any model that computes logits from whole contexts.

It keeps no keys and values: a sample of ``t`` tokens after ``n`` costs ``t`` forwards over up to
``n + t`` tokens, and no step depends on the one before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from genrt.engines.completions import CompletionState, unsupported
from genrt.engines.protocol import EngineStatistics, Finished, failure
from genrt.engines.weights import Layout, NamedTensors
from genrt.errors import (
    Closed,
    ContextTooLong,
    EngineFailed,
    EngineUnsupported,
    GenrtError,
    InvalidAdapter,
    InvalidRequest,
    NotFinite,
    UnknownAdapter,
)
from genrt.numbers import check_int
from genrt.questions.arguments import Adapter, deciding_seed
from genrt.questions.completions import (
    CompletionRequest,
    Decoding,
    Delta,
    SampleRequest,
    Streamed,
    TextRequest,
)
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.structures.guides import Guides
from genrt.tokens.rows import normalised
from genrt.tokens.sampling import draw, mixed, truncate
from genrt.tokens.spellings import Spellings


class SteppedModel:
    """The model of a SteppedEngine, to be derived from; its methods are called one at a time. By default
    it takes no adapters and no new weights.

    Attributes:
        vocab_size, device, tokenizer: as in the Engine protocol.
    """

    vocab_size: int
    device: torch.device
    tokenizer: Any = None

    def logits(self, contexts: Sequence[Sequence[int]], adapter: Adapter | None) -> Tensor:
        """Return the logits ``[n, vocab_size]`` after each of these contexts, which are not empty and
        share an adapter."""
        raise NotImplementedError

    def load_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load a directory that may be loaded; raise InvalidAdapter, and change nothing, if it does not
        fit."""
        raise InvalidAdapter(f"{self!r} takes no adapters")

    def unload_adapter(self, adapter: Adapter) -> None:
        """Free an adapter that no request needs any more."""

    def layout(self) -> Layout:
        """Return the tensors of new weights. Raises EngineUnsupported if there cannot be any."""
        raise EngineUnsupported(f"{self!r} cannot replace its weights: load another one")

    def load(self, tensors: NamedTensors) -> None:
        """Compute with these tensors from now on; they fit the layout."""

    def close(self) -> None:
        """Free everything; called once."""


@dataclass(slots=True)
class _Progress:
    """One request in progress: the tokens drawn so far, and where its randomness comes from."""

    request: Request
    seed: int = 0
    generator: torch.Generator | None = None
    drawn: Sequence[int] = ()
    state: CompletionState | None = None

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.token_ids, *self.drawn)


class _Weights:
    """A model's weights. The engine stores no results of theirs between two steps: no text has a KV
    cache that it could keep."""

    def __init__(self, engine: SteppedEngine, model: SteppedModel) -> None:
        self._engine = engine
        self.layout, self.load = model.layout, model.load

    def checkpoint(self) -> list[Path]:
        return []

    def begin(self) -> None:
        if self._engine._in_progress:
            raise EngineFailed("not all questions have ended yet")

    def begin_beside_texts(self, keeps_kv: bool) -> None:
        if not all(isinstance(each, TextRequest) for each in self._engine._in_progress):
            raise EngineFailed("not all rows have been computed yet")

    def set_version(self, version: int) -> None:
        self._engine._weights_version = version
        for progress in self._engine._in_progress.values():
            if progress.state is not None:
                progress.state.set_version(version)

    def finish(self) -> None:
        pass


class SteppedEngine:
    """The Engine protocol around a model, with at most ``max_batch_size`` requests to a step.

    A step takes the requests that have waited longest since they were submitted or last stepped. Each
    logprobs request ends in its step; each sample request gains one token.

    Args:
        ends: the tokens that end texts beside the tokenizer's own.

    Raises:
        InvalidRequest: a size is not a positive int.
    """

    def __init__(
        self,
        model: SteppedModel,
        *,
        max_model_len: int,
        max_batch_size: int,
        ends: Collection[int] = (),
    ) -> None:
        self.vocab_size = model.vocab_size
        self.max_model_len = check_int("max_model_len", max_model_len, 1)
        self.max_batch_size = check_int("max_batch_size", max_batch_size, 1, sys.maxsize)
        self.device = model.device
        self.tokenizer = model.tokenizer
        self._ends = ends
        self._model = model
        self._guides = Guides(model.tokenizer, model.vocab_size)
        self._spellings = Spellings(model.tokenizer, model.vocab_size)
        self._in_progress: dict[Request, _Progress] = {}
        self._refused: dict[Request, GenrtError] = {}
        # Adapters that requests may bind; removed adapters that requests in progress still need.
        self._adapters: set[Adapter] = set()
        self._removed: set[Adapter] = set()
        self._closed = False
        self._counts: dict[str, Any] = asdict(EngineStatistics())
        self._weights_version = 0
        self.weights = _Weights(self, model)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._model!r}, {len(self._in_progress)} in progress, "
            f"{len(self._adapters)} adapters, {self._counts['steps']} steps"
            f"{', closed' if self._closed else ''})"
        )

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush. Raises Closed after ``close``, and InvalidRequest if a request is in progress
        or twice in the flush."""
        if self._closed:
            raise Closed("the engine is closed: open another one")
        new = dict.fromkeys(requests)
        is_known = not (
            self._in_progress.keys().isdisjoint(new) and new.keys().isdisjoint(self._refused)
        )
        if is_known or len(new) < len(requests):
            raise InvalidRequest("a request is in progress already: join it, don't submit it again")
        for request in new:
            try:
                self._in_progress[request] = self._begun(request)
            except GenrtError as error:
                self._refused[request] = error
        self._counts["requests"] += len(requests)

    def step(self) -> list[Finished]:
        """Run one forward; refused requests come back in a step without one."""
        # A forward that failed would take their own errors from them.
        if self._refused:
            finished = [Finished(request, error=error) for request, error in self._refused.items()]
            self._refused.clear()
            self._counts["failed"] += len(finished)
            return finished
        batch = list(islice(self._in_progress.values(), self.max_batch_size))
        if not batch:
            return []
        started = time.perf_counter()
        groups: dict[Adapter | None, list[_Progress]] = {}
        for progress in batch:
            groups.setdefault(progress.request.adapter, []).append(progress)
        finished = []
        try:
            for adapter, group in groups.items():
                finished += self._advance(group, adapter)
        except Exception as error:
            self._fail(error, started)
        for end in finished:
            del self._in_progress[end.request]
            self._counts["failed"] += end.error is not None
        if len(finished) < len(batch):  # unfinished ones go behind the waiting ones
            for progress in batch:
                if self._in_progress.pop(progress.request, None) is not None:
                    self._in_progress[progress.request] = progress
        self._counts["steps"] += 1
        self._counts["seconds"] += time.perf_counter() - started
        if self._removed:
            self._unload_unused()
        return finished

    def progress(self, streamed: Sequence[Streamed]) -> list[Delta | None]:
        under_way = [self._in_progress.get(request) for request in streamed]
        return [each.state.progress() if each and each.state else None for each in under_way]

    def cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._in_progress.pop(request, None) or self._refused.pop(request, None):
                self._counts["cancelled"] += 1
        self._unload_unused()

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load an adapter. Raises InvalidAdapter also if this version of this name is loaded already."""
        if self._closed:
            raise Closed("the engine is closed: open another one")
        if adapter in self._adapters or adapter in self._removed:
            raise InvalidAdapter(f"{adapter} is loaded already: give it a new version")
        self._model.load_adapter(adapter, path)
        self._adapters.add(adapter)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter. Raises UnknownAdapter if it is not loaded."""
        if adapter not in self._adapters:
            raise UnknownAdapter(f"{adapter} is not loaded: add it first")
        self._adapters.remove(adapter)
        self._removed.add(adapter)
        self._unload_unused()

    def unsupported(self, decoding: Decoding) -> str | None:
        reason = unsupported(decoding, self.tokenizer)
        if reason is None and decoding.structure is not None:
            self._guides.check(decoding.structure)
        if reason is None:
            self._spellings.of(decoding.bad_words)
        return reason

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(**self._counts)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._in_progress.clear()
        self._refused.clear()
        self._removed |= self._adapters
        self._adapters.clear()
        self._unload_unused()
        self._model.close()

    def _to_host(self, tensor: Tensor) -> list[int]:
        """Return a tensor's values, and count their bytes as moved if they were on a device."""
        if tensor.device.type != "cpu":
            self._counts["bytes_to_host"] += tensor.nbytes
        return list(tensor.tolist())

    def _begun(self, request: Request) -> _Progress:
        """Return a request's progress before its first step. Raises the error of a request that cannot be
        computed."""
        if request.adapter is not None and request.adapter not in self._adapters:
            raise UnknownAdapter(f"{request.adapter} is not loaded: add it first")
        if isinstance(request, LogprobsRequest) and len(request) > self.max_model_len:
            raise ContextTooLong(
                f"the context is over max_model_len {self.max_model_len}: shorten it"
            )
        progress = _Progress(request)
        if isinstance(request, SampleRequest | CompletionRequest):
            if (reason := self.unsupported(request.decoding)) is not None:
                raise InvalidRequest(reason)
            progress.seed = deciding_seed(request) % 2**64
            version = max(request.weights_version, self._weights_version)
            own = self._guides, self._spellings, self._ends, version
            progress.state = CompletionState(request, self.tokenizer, *own)
            progress.drawn = progress.state.drawn
        return progress

    def _generator(self, progress: _Progress) -> torch.Generator:
        """Return the random generator of a sample's next token."""
        if progress.generator is None:
            progress.generator = torch.Generator(self._model.device).manual_seed(progress.seed)
        if progress.seed >= 2**32:  # a CPU's generator takes 32 bits: seed again for every token
            progress.generator.manual_seed(mixed(progress.seed, len(progress.drawn)))
        return progress.generator

    def _advance(self, group: Sequence[_Progress], adapter: Adapter | None) -> list[Finished]:
        """Run one forward over requests that share an adapter; return the ones that end."""
        contexts = [progress.context for progress in group]
        logits = self._model.logits(contexts, adapter).float()
        self._counts["computed_tokens"] += sum(map(len, contexts))
        sound = ~(logits.isnan() | (logits == torch.inf)).any(-1) & (logits > -torch.inf).any(-1)
        finished: list[Finished] = []
        distributions: dict[int, Tensor | None] = {}
        rows = normalised(logits)
        for index, (progress, is_sound) in enumerate(zip(group, self._to_host(sound), strict=True)):
            if not is_sound:
                error = NotFinite("the model's logits are NaN, +inf or all -inf for this context")
                finished.append(Finished(progress.request, error=error))
            elif progress.state is not None:
                try:
                    distributions[index] = progress.state.distribution(logits[index])
                except GenrtError as failed:
                    finished.append(Finished(progress.request, error=failed))
            else:
                finished.append(Finished(progress.request, result=rows[index].clone()))
                self._counts["rows"] += 1
        if distributions:
            finished += self._sample(distributions, rows, group)
        return finished

    def _sample(
        self,
        distributions: dict[int, Tensor | None],
        rows: Tensor,
        group: Sequence[_Progress],
    ) -> list[Finished]:
        """Draw one token for each distribution, by its index; return the requests that end."""
        if len(distributions) == len(rows) and all(each is None for each in distributions.values()):
            drawn_from = rows  # copies would take longer than the draws
        else:
            drawn_from = torch.stack(
                [rows[i] if each is None else each for i, each in distributions.items()]
            )
        drawing = [group[index] for index in distributions]
        states = [cast("CompletionState", each.state) for each in drawing]
        generators = [self._generator(each) for each in drawing]
        asked = [each.decoding for each in states]
        # In float64, as they were checked: float32 would make 0 or infinity of some.
        numbers = [(each.temperature, each.top_p, each.min_p) for each in asked]
        temperature, top_p, min_p = torch.tensor(numbers, dtype=torch.float64).unbind(1)
        top_k = torch.tensor([min(each.top_k, self.vocab_size) for each in asked])
        kept = truncate(drawn_from, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens = self._to_host(draw(kept, generators=generators).token_ids)
        finished: list[Finished] = []
        for place, (index, token) in enumerate(zip(distributions, tokens, strict=True)):
            request = drawing[place].request
            try:
                result = states[place].add(token, rows[index], kept[place])
            except InvalidRequest as wrong:
                finished.append(Finished(request, error=wrong))
            else:
                if result is not None:
                    finished.append(Finished(request, result))
        self._counts["sampled_tokens"] += len(tokens)
        return finished

    def _fail(self, error: Exception, started: float) -> NoReturn:
        """Forget every request, and raise what the step's failure means."""
        self._counts["steps"] += 1
        self._counts["failed"] += len(self._in_progress)
        self._counts["seconds"] += time.perf_counter() - started
        self._in_progress.clear()
        self._unload_unused()
        raise failure(error, "the engine failed in a step") from error

    def _unload_unused(self) -> None:
        if not self._removed:
            return
        bound = {progress.request.adapter for progress in self._in_progress.values()}
        for adapter in [each for each in self._removed if each not in bound]:
            self._removed.remove(adapter)
            self._model.unload_adapter(adapter)
