"""The answers of a simulated engine. Each is a function of the question alone, so a result that reaches
the wrong caller is detected."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from genrt.engines.protocol import Engine, FullEngine, capabilities_of
from genrt.questions.completions import Completion, CompletionRequest, Decoding, SampleRequest
from genrt.questions.contexts import Adapter
from genrt.questions.native import NativeRequest
from genrt.questions.population_draws import PopulationDraw
from genrt.questions.programs import ProgramRequest
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest, is_row
from genrt.questions.scores import ScoreRequest

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


class EngineModel:
    """The answers of a real engine, computed one question at a time and cached."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._engine = open_engine()
        self._answers: dict[Request, Result] = {}
        self.vocab_size = self._engine.vocab_size
        self.max_model_len = self._engine.max_model_len
        self.tokenizer = self._engine.tokenizer

    def answer(
        self, request: LogprobsRequest | SampleRequest | CompletionRequest, weights: int = 0
    ) -> Result:
        """Return the row (read-only), the sample's tokens, or the completion. The weights are always the
        engine's own."""
        if request not in self._answers:
            self._engine.submit([request])
            while not (ends := self._engine.step()):
                pass
            if ends[0].error is not None:
                raise ends[0].error
            self._answers[request] = ends[0].result
        return self._answers[request]

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return the reason why the engine does not support these options, or ``None``."""
        if capabilities_of(self._engine).completes:
            return cast("FullEngine", self._engine).unsupported(decoding)
        return "it draws no completions"

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self._engine.add_adapter(adapter, path)

    def close(self) -> None:
        self._engine.close()


Model: TypeAlias = HashedModel | EngineModel


def is_right(model: Model, request: Request, result: Result, weights: int = 0) -> bool:
    """Return whether a result answers its request: exactly for results that the engine computes, and by
    ``is_answer`` for reads."""
    if getattr(result, "weights_version", request.weights_version) != request.weights_version:
        return False
    if isinstance(request, ReadRequest):
        return request.wanted.is_answer(model.answer(request.row, weights), result)
    if isinstance(request, PopulationDraw | ScoreRequest):
        rows = request.rows
        return request.is_answer([model.answer(row, weights) for row in rows], result)
    if isinstance(request, LogprobsRequest):
        return is_row(model.answer(request, weights), result)
    if isinstance(request, NativeRequest | ProgramRequest):  # not used in simulations
        return False
    return bool(result == model.answer(request, weights))


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
    )
