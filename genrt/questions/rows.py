"""Rows: the log-probabilities of every next token, on the device."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from genrt.errors import ContextTooLong, InvalidRequest, NotFinite
from genrt.questions.contexts import TOKEN_BYTES, Adapter, Limits, abbreviated
from genrt.questions.token_ids import TokenIds, id_words

__all__ = [
    "LogprobsRequest",
    "check_length",
    "is_row",
    "not_finite",
    "packed_row_request",
    "row_request",
]


@dataclass(frozen=True, slots=True, repr=False, init=False)
class LogprobsRequest:
    """The row after ``token_ids``: log-probabilities over the vocabulary, float32, normalised.

    Its answer is a tensor ``[vocab_size]`` on the engine's device.

    Attributes:
        packed: the token ids as unsigned 32-bit numbers in this machine's byte order, ``TOKEN_BYTES``
            each. Contexts are long and are compared all the time: bytes are hashed and compared at the
            speed of memory, whatever number objects they were made of.
        weights_version: the version of the model's weights; so for every kind of request. It is 0 until
            the batcher has the question.
    """

    packed: bytes
    adapter: Adapter | None = None
    weights_version: int = 0
    _hash: int = field(init=False, compare=False)
    weight: ClassVar[int] = 1

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        adapter: Adapter | None = None,
        *,
        packed: bytes | None = None,
        weights_version: int = 0,
    ) -> None:
        if packed is None:
            packed = (token_ids if type(token_ids) is array else _words(token_ids)).tobytes()
        # One is made for every question: what a frozen dataclass would do costs half as much again.
        _set_packed(self, packed)
        _set_adapter(self, adapter)
        _set_version(self, weights_version)
        _set_hash(self, hash((packed, adapter, weights_version)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The context; unpacked every time."""
        return tuple(array("I", self.packed))

    @property
    def last_token(self) -> int:
        """The last token id of the context."""
        return int.from_bytes(self.packed[-TOKEN_BYTES:], sys.byteorder)

    @property
    def nbytes(self) -> int:
        """The memory that the context takes."""
        return len(self.packed)

    def bound_to(self, adapter: Adapter | None) -> LogprobsRequest:
        """Return the same question to another adapter."""
        return LogprobsRequest(
            packed=self.packed, adapter=adapter, weights_version=self.weights_version
        )

    def of_weights(self, version: int) -> LogprobsRequest:
        """Return the same question to this version of the weights."""
        return LogprobsRequest(packed=self.packed, adapter=self.adapter, weights_version=version)

    def owned(self, result: object) -> object:
        """Return a result for one caller alone; tensors are copied before, all at once."""
        return result

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"LogprobsRequest({abbreviated(self.token_ids)}, adapter={self.adapter})"


def _words(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", token_ids)
    except OverflowError as error:
        raise InvalidRequest(f"{abbreviated(token_ids)}: no token id is negative") from error


_set_packed, _set_adapter, _set_version, _set_hash = (
    vars(LogprobsRequest)[name].__set__
    for name in ("packed", "adapter", "weights_version", "_hash")
)


def row_request(limits: Limits, token_ids: TokenIds, adapter: Adapter | None) -> LogprobsRequest:
    """Return the request for a row. Raises InvalidRequest for bad token ids, ContextTooLong for too
    many."""
    return packed_row_request(limits, id_words(token_ids, limits.vocab_size).tobytes(), adapter)


def packed_row_request(limits: Limits, packed: bytes, adapter: Adapter | None) -> LogprobsRequest:
    """Return the request for a row after token ids that are checked. Raises ContextTooLong for too
    many."""
    check_length(limits, len(packed) // TOKEN_BYTES)
    return LogprobsRequest(packed=packed, adapter=adapter)


def check_length(limits: Limits, count: int) -> None:
    """Raise ContextTooLong if so many tokens are too many for a context."""
    if count > limits.max_model_len:
        raise ContextTooLong(
            f"a context of {count} tokens is over max_model_len={limits.max_model_len}: shorten "
            'it, or load with engine_options={"max_model_len": …} if the model can take more'
        )


def not_finite() -> NotFinite:
    """Return the error for a row that is no distribution."""
    return NotFinite(
        "the model's logits for this context are NaN, +inf or all -inf: check the weights and dtype"
    )


def is_row(row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
    """Return whether a result is this row: float32, of the same length, with the same entries."""
    if not isinstance(result, Tensor) or result.dtype != torch.float32:
        return False
    if result.shape != row.shape:
        return False
    return torch.allclose(row.to(result.device), result, rtol=0.0, atol=tolerance)
