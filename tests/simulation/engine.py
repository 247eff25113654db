"""An engine that implements the protocol as inconveniently as the protocol allows, decided by one seed.

Rules:
    Each answer is a function of the question alone, so a result for the wrong caller is detected.
    Each step computes a part of the requests in progress, in chunks, and restarts some. It always
    includes the oldest request, so all requests end.
    Answers come in any order, and some come again after their request has ended. The rows of a step are
    views of one tensor, between rows without meaning.
    ``Faults`` define the faults, and the seed decides when they occur. After a failed step the engine has
    forgotten all requests, as the protocol says.
    Sequences that populations or contexts continue by number are checked against their tokens. Some are
    evicted.
    A call that the protocol forbids raises a ``Violation``, which is recorded.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from genrt.engines.protocol import EngineStatistics, Finished
from genrt.engines.weights import Layout, NamedTensors, TensorForm
from genrt.errors import EngineDied, EngineFailed, GenrtError, NotFinite, OutOfMemory
from genrt.questions.arguments import Adapter
from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Decoding,
    Delta,
    SampleRequest,
    TextRequest,
    weights_spans,
)
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Origins, SequenceHandle
from genrt.tokens.rows import AsyncHostCopy
from tests.answers import are_draws, is_answer, is_row, is_score


class Violation(BaseException):
    """A rule was broken. It is not an ``Exception``, so that the runtime does not take it for an engine's
    failure."""


class Record:
    """The events of one simulation, in order; ``violation`` is the first violation or ``None``."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.violation: Violation | None = None

    def add(self, *event: object) -> None:
        """Append an event: its name and its subjects."""
        self.events.append(event)

    def violated(self, message: str) -> NoReturn:
        """Raise a Violation. The first one is stored, because a caller may catch the exception."""
        violation = Violation(message)
        self.violation = self.violation or violation
        raise violation

    def lines(self, start: int = 0) -> tuple[str, ...]:
        """Return the events from ``start`` on, as text."""
        return tuple(" ".join(map(str, event)) for event in self.events[start:])


VOCAB_SIZE = 8


class HashedModel:
    """Rows, samples and completions of eight tokens from a hash of the whole question; they follow no
    law."""

    vocab_size = VOCAB_SIZE
    max_model_len = 256
    tokenizer: Any = None

    def answer(
        self, request: LogprobsRequest | SampleRequest | CompletionRequest, weights: int = 0
    ) -> Result:
        """Return the row (read-only), the sample's tokens, or the completion, for these weights."""
        if isinstance(request, LogprobsRequest):
            return _hashed_row(request.packed, request.adapter, weights)
        if isinstance(request, CompletionRequest):
            return _hashed_completion(request, weights)
        number = zlib.crc32(repr((request.token_ids, request.adapter, request.seed)).encode())
        number += weights
        return tuple((number + place) % VOCAB_SIZE for place in range(request.max_tokens))

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return the reason why an option of text is not supported without a tokenizer."""
        name = decoding.of_text
        return name and f"{name} needs a tokenizer, and a hashed model has none: give a model"

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Accept questions with the adapter from now on, without end."""

    def close(self) -> None:
        """Do nothing: there is no engine."""


def is_right(model: HashedModel, request: Request, result: Result, weights: int = 0) -> bool:
    """Return whether a result answers its request: exactly for results that the engine computes, and by
    ``tests.answers`` for reads, draws and scores."""
    if getattr(result, "weights_version", request.weights_version) != request.weights_version:
        return False
    if isinstance(request, ReadRequest):
        return is_answer(request.wanted, model.answer(request.row, weights), result)
    if isinstance(request, PopulationDraw) and request.block is not None:
        return isinstance(result, Tensor) and all(
            is_right(model, request.score(number), entries[: int((tokens >= 0).sum())], weights)
            for number, (tokens, entries) in enumerate(zip(request.block, result, strict=True))
        )
    if isinstance(request, PopulationDraw | ScoreRequest):
        rows = [model.answer(row, weights) for row in request.rows]
        if isinstance(request, PopulationDraw):
            return are_draws(request, rows, result)
        return is_score(request, rows, result)
    if isinstance(request, LogprobsRequest):
        return is_row(model.answer(request, weights), result)
    if isinstance(request, SampleRequest | CompletionRequest):
        return bool(result == model.answer(request, weights))
    return False  # simulations ask nothing else


@lru_cache(maxsize=2**16)
def _hashed_row(packed: bytes, adapter: Adapter | None, weights: int) -> Tensor:
    key = (repr(adapter) + (str(weights) if weights else "")).encode()[-64:]
    digest = blake2b(packed, key=key, digest_size=4 * VOCAB_SIZE).digest()
    return (torch.frombuffer(bytearray(digest), dtype=torch.int32) / 2.0**29).log_softmax(0)


def _hashed_completion(request: CompletionRequest, weights: int) -> Completion:
    """Return from ``min_tokens`` to ``max_tokens`` tokens, with log-probabilities if requested."""
    decoding, number = request.decoding, zlib.crc32(repr((request, request.nonce)).encode())
    number += weights
    least, most = max(decoding.min_tokens, 1), decoding.max_tokens
    count = least + number // VOCAB_SIZE % (most - least + 1)
    tokens = tuple((number + place * place) % VOCAB_SIZE for place in range(count))
    asked = decoding.logprobs
    return Completion(
        text="".join(chr(ord("a") + token) for token in tokens),
        token_ids=tokens,
        prompt_token_ids=request.token_ids,
        logprobs=() if asked is None else tuple(-token / 8 for token in tokens),
        top_logprobs=tuple({(token + i) % 8: -i / 8 for i in range(asked)} for token in tokens)
        if asked
        else (),
        finish_reason="length" if count == most else "stop",
        stop_reason=None if count == most else tokens[-1],
        seconds=0.0,
        seconds_to_first_token=0.0,
        weights_version=request.weights_version,
        weights_spans=weights_spans([(request.weights_version, 0)], 0, count),
    )


MOST_PREEMPTIONS = 3
TAKEN = LogprobsRequest | SampleRequest | CompletionRequest | ScoreRequest
"""The requests that a ``Scoring`` engine accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of a simulated engine; there are no faults by default.

    Attributes:
        submit: the probability that a call of ``submit`` raises, for the requests of that flush.
        step: the probability that a call of ``step`` raises, for everything in progress.
        cancel: the probability that a call of ``cancel`` raises.
        remove: the probability that a call of ``remove_adapter`` raises.
        load: the probability that loading new weights raises and the engine is dead.
        death: the probability that the engine dies in a call of ``step``.
        not_finite: the share of contexts without a finite row; the tokens decide which contexts.
        out_of_memory_above: the number of requests that fit into a step; ``None``: any number.
        at_call: the calls that raise, counted from 1, by the name of the method: ``{"step": 3}``.
    """

    submit: float = 0.0
    step: float = 0.0
    cancel: float = 0.0
    remove: float = 0.0
    load: float = 0.0
    death: float = 0.0
    not_finite: float = 0.0
    out_of_memory_above: int | None = None
    at_call: Mapping[str, int] = field(default_factory=dict)


class SuddenDeath(BaseException):
    """Raised by an engine that dies without a report; it is not an ``Exception``."""


@dataclass(slots=True)
class _Progress:
    chunks: int
    left: int
    preempted: int = 0
    told: int = 0
    told_text: int = 0


class SimulatedWeights:
    """The weights of a simulated engine: a number that every answer depends on, and a second number that
    updates must also contain."""

    def __init__(self, engine: SimulatedEngine, renewed: Callable[[int], None]) -> None:
        self.number = self.version = 0
        self.is_whole = True
        self._engine = engine
        self._renewed = renewed

    def layout(self) -> Layout:
        """Return the forms of the two numbers."""
        form = TensorForm((1,), (torch.int64,))
        return {"number": form, "other": form}

    def checkpoint(self) -> list[Path]:
        """Return no files."""
        return []

    def begin(self) -> None:
        """Check that no request is in progress."""
        self._engine.check("weights are replaced", self.is_whole and not self._engine.in_progress)
        self._engine.known.clear()

    def begin_beside_texts(self, keeps_kv: bool) -> None:
        """Check that nothing but texts is in progress. These keep the numbers that they began with."""
        texts = all(isinstance(each, TextRequest) for each in self._engine.in_progress)
        self._engine.check("weights are replaced beside texts", self.is_whole and texts)
        self._engine.known.clear()

    def set_version(self, version: int) -> None:
        """Label the texts that begin from now on. An update does so just before its end, when the parts
        of the weights have been loaded."""
        self.version = version

    def load(self, tensors: NamedTensors) -> None:
        """Load a part of the weights; after that no step may run until ``finish``."""
        self.is_whole = False
        self._engine.load(dict(tensors).get("number"))

    def finish(self) -> None:
        """End the update, so that steps may run again."""
        self._engine.check("an update ends that did not begin", not self.is_whole)
        self.is_whole = True
        self._renewed(self.number)


class SimulatedEngine:
    """An Engine over a model with known answers. ``known`` has the sequences of the handles that are
    neither released nor extended.

    Args:
        random: decides everything that is not specified.
        meanwhile: called during each call, so that other code can run in the middle of it.
        spend: called with the seconds that a step took.
        renewed: called with the number of the loaded weights.
    """

    def __init__(
        self,
        random: random.Random,
        model: HashedModel,
        faults: Faults,
        record: Record,
        *,
        meanwhile: Callable[[], None],
        spend: Callable[[float], None],
        renewed: Callable[[int], None],
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.max_batch_size = random.choice([1, 2, 3, 8, 1000])
        self.device = torch.device("cpu")
        self.tokenizer = model.tokenizer
        self.scores = True
        self.rows_by_number = True
        self.known: dict[SequenceHandle, list[LogprobsRequest]] = {}
        self.in_progress: dict[Request, _Progress] = {}
        self._texts: dict[
            Request, tuple[int, int]
        ] = {}  # the number and version that each began with
        self.adapters: dict[Adapter, None] = {}
        self.calls = {"submit": 0, "step": 0, "cancel": 0, "remove": 0, "load": 0}
        self.weights = SimulatedWeights(self, renewed)
        self.closed = False
        self.echoed: set[Request] = set()
        self.unforgotten: dict[Request, BaseException] = {}
        self.was_unforgotten: set[Request] = set()
        self._random = random
        self._faults = faults
        self._record = record
        self._meanwhile = meanwhile
        self._spend = spend
        self._most_chunks = random.choice([1, 1, 2, 4])
        self._preempts = random.choice([0.0, 0.0, 0.3])
        self._passes_over = random.choice([0.0, 0.4])
        self._echoes = random.choice([0.0, 0.0, 0.2])
        self._seconds = random.choice([0.0, 0.01])
        self._answered: list[Any] = []
        self._requests = self._rows = self._failed = self._cancelled = self._scored = 0

    def __repr__(self) -> str:
        return f"SimulatedEngine({len(self.in_progress)} in progress, {self.calls['step']} steps)"

    def submit(self, requests: Sequence[Request]) -> None:
        self._called("submit")
        if not requests or len(set(requests)) < len(requests):
            self._record.violated(f"an empty flush, or a request twice in it: {requests}")
        for request in requests:
            if not isinstance(request, TAKEN):
                self._record.violated(f"an engine cannot answer {request}")
            if request in self.in_progress:
                self._record.violated(f"{request} is in progress already")
            if request.adapter is not None and request.adapter not in self.adapters:
                self._record.violated(f"{request} is bound to an adapter that is not loaded")
        self._meanwhile()
        if self._is_due("submit", self._faults.submit):
            raise self._error("submit")
        self._requests += len(requests)
        for request in requests:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        self.was_unforgotten.discard(request)
        if isinstance(request, TextRequest):
            self._texts[request] = self.weights.number, self.weights.version
        chunks = self._random.randint(1, self._most_chunks)
        self.in_progress[request] = _Progress(chunks, chunks)

    def continue_population(self, population: PopulationDraw) -> bool:
        origins = cast("Origins", population.origins)
        if any(each not in self.known for each in origins.handles):
            return False
        before = [row for each in origins.handles for row in self.known[each]]
        for number, row in zip(origins.numbers, population.rows, strict=True):
            if before[number].token_ids != row.token_ids[:-1]:
                self._record.violated(f"{row} does not continue {before[number]}")
            if before[number].adapter != row.adapter:
                return False
        if self._random.random() < 0.2:
            self.release(origins.handles)  # evicted
            return False
        self._begin(population)
        return True

    def settle(self, population: PopulationDraw) -> None:
        self.release([each for each in population.came_from if not each.idle])
        self.known[population.handle] = population.rows

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        for each in asked:
            self.known.pop(each, None)

    def step(self) -> list[Finished]:
        self._called("step")
        self._meanwhile()
        self._spend(self._seconds * self._random.random())
        if self._faults.death and self._random.random() < self._faults.death:
            kind = self._random.choice([SuddenDeath, EngineDied])
            raise self._recorded("died", kind("the simulated engine died"))
        if self._is_due("step", self._faults.step):
            self._forget()
            raise self._error("step")
        running = self._chosen()
        most = self._faults.out_of_memory_above
        if most is not None and len(running) > most:
            self._forget()
            error = OutOfMemory(f"{len(running)} requests do not fit into a step, {most} do")
            raise self._recorded("step failed", error)
        done = [request for request in running if self._is_done(request)]
        for request in done:
            del self.in_progress[request]
            self.unforgotten.pop(request, None)
        finished = self._ends(done, len(running) - len(done))
        finished += self._echo()
        self._random.shuffle(finished)
        if finished:
            self._record.add("finished", *(end.request for end in finished))
        return finished

    def cancel(self, requests: Sequence[Request]) -> None:
        self._called("cancel")
        self._meanwhile()
        fails = self._is_due("cancel", self._faults.cancel)
        for request in requests:
            self.unforgotten.pop(request, None)
            if fails and self._random.random() < 0.5:
                continue
            if self.in_progress.pop(request, None) is not None:
                self._cancelled += 1
        if fails:
            error = self._error("cancel")
            self.unforgotten |= dict.fromkeys(requests, error)
            self.was_unforgotten.update(requests)
            self.echoed.update(self.in_progress.keys() & self.unforgotten.keys())
            raise error

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        if adapter in self.adapters or self.closed or not self.weights.is_whole:
            self._record.violated(f"{adapter} is loaded already, or the engine is closed")
        self.model.add_adapter(adapter, path)
        self.adapters[adapter] = None

    def load(self, number: Tensor | None) -> None:
        """Load a part of new weights."""
        self._called("load", whole=False)
        self._meanwhile()
        if self._is_due("load", self._faults.load):
            raise self._error("load")
        if number is not None:
            self.weights.number = int(number)

    def check(self, what: str, is_lawful: bool) -> None:
        """Record a Violation unless ``is_lawful`` and the engine is open."""
        if self.closed or not is_lawful:
            self._record.violated(f"{what} with {len(self.in_progress)} in progress: {self}")

    def remove_adapter(self, adapter: Adapter) -> None:
        if adapter not in self.adapters or self.closed:
            self._record.violated(f"{adapter} is not loaded, or the engine is closed")
        asked = self.in_progress.keys() - self.unforgotten.keys()
        if any(request.adapter == adapter for request in asked):
            self._record.violated(
                f"{adapter} is removed while requests bound to it are in progress"
            )
        self._called("remove")
        del self.adapters[adapter]
        if self._is_due("remove", self._faults.remove):
            raise self._error("remove")

    def unsupported(self, decoding: Decoding) -> str | None:
        return self.model.unsupported(decoding)

    def progress(self, streamed: Sequence[CompletionRequest]) -> list[Delta | None]:
        if self.closed or not all(request.streamed for request in streamed):
            self._record.violated(f"an engine is asked for the progress of {streamed}")
        return [self._progress_of(request) for request in streamed]

    def _progress_of(self, request: CompletionRequest) -> Delta | None:
        """Return the next part of the completion, in proportion to the request's computed chunks."""
        progress = self.in_progress.get(request)
        completion = None if progress is None else self._drawn(request).result
        if progress is None or not isinstance(completion, Completion):
            return None
        share = (progress.chunks - progress.left) / progress.chunks
        start, text_start = progress.told, progress.told_text
        # Delivered tokens stay drawn after a restart, as the tokens of a preempted request do.
        progress.told = end = max(start, int(len(completion.token_ids) * share))
        progress.told_text = text_end = max(text_start, int(len(completion.text) * share))
        if end == start:
            return None
        return Delta(
            completion.text[text_start:text_end],
            completion.token_ids[start:end],
            completion.logprobs[start:end],
            completion.top_logprobs[start:end],
            start,
            text_start,
            weights_spans=weights_spans([(completion.weights_version, 0)], start, end),
        )

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            steps=self.calls["step"],
            requests=self._requests,
            rows=self._rows,
            scored_tokens=self._scored,
            failed=self._failed,
            cancelled=self._cancelled,
        )

    def close(self) -> None:
        self.closed = True
        self.in_progress.clear()

    def _called(self, name: str, *, whole: bool = True) -> None:
        if self.closed or self.weights.is_whole != whole:
            self._record.violated(f"{name} is called after close, or in the middle of an update")
        self.calls[name] += 1

    def _is_due(self, name: str, probability: float) -> bool:
        if self._faults.at_call.get(name) == self.calls[name]:
            return True
        return probability > 0.0 and self._random.random() < probability

    def _error(self, name: str) -> BaseException:
        kinds = (RuntimeError, MemoryError, torch.OutOfMemoryError, EngineFailed)
        message = f"simulated: {name} {self.calls[name]} failed"
        return self._recorded(f"{name} failed", self._random.choice(kinds)(message))

    def _recorded(self, event: str, error: BaseException) -> BaseException:
        self._record.add(event, error)
        return error

    def _forget(self) -> None:
        self._failed += len(self.in_progress)
        self.in_progress.clear()
        self.unforgotten.clear()

    def _chosen(self) -> list[Request]:
        """Return the requests of this step: the oldest in progress, and others as far as they fit."""
        oldest, others = [*self.in_progress][:1], [*self.in_progress][1:]
        taken = [each for each in others if self._random.random() >= self._passes_over]
        return oldest + taken[: self.max_batch_size - 1]

    def _is_done(self, request: Request) -> bool:
        """Compute one chunk of a request, or restart it; return whether it was the last chunk."""
        progress = self.in_progress[request]
        if progress.preempted < MOST_PREEMPTIONS and self._random.random() < self._preempts:
            progress.preempted += 1
            progress.left = progress.chunks
            return False
        progress.left -= 1
        return progress.left == 0

    def _block(self, rows: int) -> Tensor:
        """Return a tensor for the rows of a step."""
        return torch.full((rows, self.vocab_size), 7.0)

    def _ends(self, done: list[Request], partial: int) -> list[Finished]:
        """Return the results of these requests; their rows lie between rows that belong to no request."""
        ends = [self._drawn_by_number(each) for each in done if isinstance(each, PopulationDraw)]
        done = [request for request in done if not isinstance(request, PopulationDraw)]
        sound = [request for request in done if not self._is_poisoned(request)]
        ends += [
            Finished(request, error=NotFinite(f"{request} has no finite row"))
            for request in done
            if self._is_poisoned(request)
        ]
        rows = [request for request in sound if isinstance(request, LogprobsRequest)]
        if rows:
            places = self._random.sample(range(len(rows) + partial), len(rows))
            block = self._block(len(rows) + partial)
            for place, request in zip(places, rows, strict=True):
                block[place] = self.model.answer(request, self.weights.number)
                ends.append(Finished(request, block[place]))
        self._rows += len(rows)
        scored = [request for request in sound if isinstance(request, ScoreRequest)]
        ends += [Finished(score, self._answer(score)) for score in scored]
        self._scored += sum(map(len, scored))
        ends += [
            self._drawn(request)
            for request in sound
            if isinstance(request, SampleRequest | CompletionRequest)
        ]
        failed = {end.request for end in ends if end.error is not None}
        self._failed += len(failed)
        self._answered += [request for request in sound if request not in failed]
        return ends

    def _drawn_by_number(self, population: PopulationDraw) -> Finished:
        rows = [
            torch.full((VOCAB_SIZE,), torch.nan) if self._is_poisoned(row) else self._answer(row)
            for row in population.rows
        ]
        self.settle(population)
        drawn = population.draw(rows)
        return Finished(population, drawn if population.seeds is None else AsyncHostCopy(drawn))

    def _drawn(self, request: SampleRequest | CompletionRequest) -> Finished:
        number, version = self._texts[request]
        try:
            result = self.model.answer(request, number)
            if isinstance(result, Completion):
                spans = weights_spans([(version, 0)], 0, len(result.token_ids))
                result = replace(result, weights_version=version, weights_spans=spans)
            return Finished(request, result)
        except GenrtError as error:  # the request's own error: its options leave no token to draw
            return Finished(request, error=error)

    def _echo(self) -> list[Finished]:
        """Return the result of an answered request once more, unless the request is in progress again."""
        if not self._answered or self._random.random() >= self._echoes:
            return []
        request = self._random.choice(self._answered)
        is_bound = request.adapter is None or request.adapter in self.adapters
        if request in self.in_progress or not is_bound:
            return []
        self.echoed.add(request)
        return [Finished(request, copy.deepcopy(self._answer(request)))]

    def _answer(self, request: Any) -> Any:
        number = self.weights.number
        if isinstance(request, ScoreRequest):
            return request.answer([self.model.answer(row, number) for row in request.rows])
        return self.model.answer(request, number)

    def _is_poisoned(self, request: Request) -> bool:
        if isinstance(request, ScoreRequest):
            return any(map(self._is_poisoned, request.rows))
        share = zlib.crc32(repr(request.token_ids).encode()) / 2**32
        return share < self._faults.not_finite
