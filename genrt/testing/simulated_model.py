"""What a simulated engine answers: a function of the question alone, so that a result that went to the
wrong caller is seen."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from genrt.engines.protocol import Engine
from genrt.questions.values import Adapter, LogprobsRequest, Request, Result, SampleRequest
from genrt.testing.witness import row_in, tokens_in

VOCAB_SIZE = 8


class Model(Protocol):
    """Answers to rows and samples, the same whenever they are asked."""

    @property
    def vocab_size(self) -> int:
        """The length of a row."""
        ...

    @property
    def max_model_len(self) -> int:
        """The longest context."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or ``None``."""
        ...

    def row(self, request: LogprobsRequest) -> Tensor:
        """The row, not to be written to."""
        ...

    def sample(self, request: SampleRequest) -> tuple[int, ...]:
        """The tokens of a sample."""
        ...

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Questions may be bound to the adapter from now on, and for ever."""
        ...

    def share_of(self, request: Request) -> float:
        """A number in [0, 1) that the context decides."""
        ...

    def close(self) -> None:
        """Nothing is asked any more."""
        ...


class HashedModel:
    """Rows and samples of eight tokens, made of a hash of the whole question."""

    vocab_size = VOCAB_SIZE
    max_model_len = 256
    tokenizer: Any = None

    def row(self, request: LogprobsRequest) -> Tensor:
        return _hashed_row(request.packed, request.adapter)

    def sample(self, request: SampleRequest) -> tuple[int, ...]:
        number = zlib.crc32(repr((request.token_ids, request.adapter, request.seed)).encode())
        return tuple((number + place) % VOCAB_SIZE for place in range(request.max_tokens))

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        pass

    def share_of(self, request: Request) -> float:
        return share_of(request)

    def close(self) -> None:
        pass


class EngineModel:
    """The answers of an engine that is asked one question at a time, and remembered."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._engine = open_engine()
        self._answers: dict[Request, Result] = {}

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    def row(self, request: LogprobsRequest) -> Tensor:
        return row_in(self._answer(request))

    def sample(self, request: SampleRequest) -> tuple[int, ...]:
        return tokens_in(self._answer(request))

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self._engine.add_adapter(adapter, path)

    def share_of(self, request: Request) -> float:
        return share_of(request)

    def close(self) -> None:
        self._engine.close()

    def _answer(self, request: Request) -> Result:
        known = self._answers.get(request)
        if known is not None:
            return known
        self._engine.submit([request])
        while True:
            for end in self._engine.step():
                if end.error is not None:
                    raise end.error
                if end.result is not None:
                    self._answers[request] = end.result
                    return end.result


def share_of(request: Request) -> float:
    """A number in [0, 1) that the tokens of the context decide."""
    return zlib.crc32(repr(request.token_ids).encode()) / 2**32


@lru_cache(maxsize=2**16)
def _hashed_row(packed: bytes, adapter: Adapter | None) -> Tensor:
    digest = blake2b(packed, key=repr(adapter).encode()[:64], digest_size=4 * VOCAB_SIZE).digest()
    return (torch.frombuffer(bytearray(digest), dtype=torch.int32) / 2.0**29).log_softmax(0)
