"""Rows: the log-probabilities of every next token, on the device or moved to the host. The contexts
before them are checked here: token ids become 32-bit words below the limits of the model."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from genrt.errors import ContextTooLong, InvalidRequest, NotFinite
from genrt.numbers import named, shown
from genrt.questions.arguments import (
    TOKEN_BYTES,
    Adapter,
    TokenIds,
    abbreviated,
    advice_for,
    integer_list,
    is_plain_sequence,
)
from genrt.questions.request import Request
from genrt.tokens.rows import gather_rows
from genrt.tokens.sampling import rows_at_once

Device: TypeAlias = str | torch.device
"""A device or its name, as torch takes it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a model: token ids below ``vocab_size``, contexts up to ``max_model_len``."""

    vocab_size: int
    max_model_len: int

    def token_ids(
        self, token_ids: TokenIds, *, allow_empty: bool = False, name: str = "token ids"
    ) -> tuple[int, ...]:
        """Return token ids as a tuple of int; messages call them ``name``.

        Raises:
            InvalidRequest: not a flat sequence of ints in the vocabulary, or empty.
        """
        return tuple(id_words(token_ids, self.vocab_size, allow_empty=allow_empty, name=name))


def id_words(
    token_ids: TokenIds, vocab_size: int, *, allow_empty: bool = False, name: str = "token ids"
) -> array[int]:
    """Return the token ids as unsigned 32-bit numbers; messages call them ``name``.

    Raises:
        InvalidRequest: not a flat sequence of ints below ``vocab_size``, or empty.
    """
    given: Any = token_ids
    if isinstance(given, torch.Tensor | np.ndarray):
        given = integer_list(given, name)
    elif type(given) is not list and type(given) is not tuple and not is_plain_sequence(given):
        kind = type(given).__name__
        raise InvalidRequest(f"{name} must be a sequence of int, got {kind}{advice_for(given)}")
    try:
        words = array("I", given)
    except (TypeError, OverflowError, ValueError, RuntimeError):  # torch raises the last
        raise InvalidRequest(_what_is_wrong(given, vocab_size, name)) from None
    if not words:
        if allow_empty:
            return words
        raise InvalidRequest("an empty prompt has no next token: give at least one token id")
    if words[np.frombuffer(words, np.uint32).argmax()] >= vocab_size:
        raise InvalidRequest(_what_is_wrong(words, vocab_size, name))
    return words


class _RowKey(NamedTuple):
    packed: bytes
    adapter: Adapter | None
    weights_version: int


class LogprobsRequest(_RowKey, Request):
    """The row after ``token_ids``: normalized log-probabilities, float32 ``[vocab_size]`` on the engine's
    device. A tuple, because it is the key of many look-ups, which then call no Python.

    Attributes:
        packed: the token ids as unsigned 32-bit words in this machine's byte order, which hash and
            compare at the speed of memory.
    """

    __slots__ = ()

    def __new__(
        cls,
        token_ids: Sequence[int] = (),
        adapter: Adapter | None = None,
        *,
        packed: bytes | None = None,
        weights_version: int = 0,
    ) -> Self:
        if packed is None:
            packed = (token_ids if type(token_ids) is array else _token_words(token_ids)).tobytes()
        return tuple.__new__(cls, (packed, adapter, weights_version))

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._asdict()

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
        return len(self.packed)

    def bound_to(self, adapter: Adapter | None) -> Self:
        return tuple.__new__(type(self), (self.packed, adapter, self.weights_version))

    def of_weights(self, version: int) -> Self:
        return tuple.__new__(type(self), (self.packed, self.adapter, version))

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"LogprobsRequest({abbreviated(self.token_ids)}, adapter={self.adapter})"


def _token_words(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", token_ids)
    except OverflowError as error:
        raise InvalidRequest(f"{abbreviated(token_ids)}: no token id is negative") from error


def row_request(limits: Limits, token_ids: TokenIds, adapter: Adapter | None) -> LogprobsRequest:
    """Return the request for a row. Raises InvalidRequest for bad token ids, ContextTooLong for too
    many."""
    words = id_words(token_ids, limits.vocab_size)
    check_length(limits, len(words))
    return LogprobsRequest(words, adapter)


def _what_is_wrong(token_ids: Sequence[Any], vocab_size: int, name: str) -> str:
    for position, token_id in enumerate(token_ids):
        if not isinstance(token_id, int | np.integer):
            kind = type(token_id).__name__ + (advice_for(token_id) if position == 0 else "")
            return f"{name} must be int, but at position {position} there is a {kind}"
        if not 0 <= token_id < vocab_size:
            return (
                f"{name} must be in the vocabulary, from 0 to {vocab_size - 1}, "
                f"but at position {position} there is {shown(token_id)}"
            )
    return f"{name} must be one flat sequence of int"


def check_length(limits: Limits, count: int) -> None:
    """Raise ContextTooLong if so many tokens are too many for a context."""
    if count > limits.max_model_len:
        raise ContextTooLong(
            f"a context of {count} tokens is over max_model_len={limits.max_model_len}: shorten "
            'it, or load with engine_options={"max_model_len": …} if the model can take more'
        )


def not_finite() -> NotFinite:
    """Return the error for a row that is not a distribution."""
    return NotFinite(
        "the model's logits for this context are NaN, +inf or all -inf: check the weights and dtype"
    )


def moved_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return a copy of rows in one block of the host's memory, pinned if they come from a GPU."""
    first = rows[0]
    block = torch.empty(len(rows), len(first), dtype=first.dtype, pin_memory=first.is_cuda)
    move_rows(rows, block)
    return block


def move_rows(rows: Sequence[Tensor], block: Tensor) -> None:
    """Copy rows to a block ``[n, vocab_size]`` of the host's memory, and wait until they are there."""
    first, size = rows[0], rows_at_once(rows[0])
    for start, places in enumerate(torch.split(block, size)):
        part = rows[start * size :][:size]
        try:
            places.copy_(gather_rows(part), non_blocking=True)
        except torch.OutOfMemoryError:  # there is no memory to gather scattered rows
            for place, row in zip(places, part, strict=True):
                place.copy_(row, non_blocking=True)
    if first.is_cuda:
        torch.cuda.current_stream(first.device).synchronize()


def must_move(device: Device | None, own: torch.device) -> bool:
    """Return whether rows on device ``own`` must be moved to the host to be on ``device``. Raises
    InvalidRequest if that is neither the rows' device nor the host."""
    if device is None:
        return False
    given: object = device
    wanted = None
    if isinstance(given, str | int | torch.device):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            wanted = torch.device(given)
    if wanted is not None and wanted.type == own.type and wanted.index in (None, own.index):
        return False
    if wanted is None or wanted.type != "cpu":
        choices = dict.fromkeys([repr(str(own)), "'cpu'"])
        raise InvalidRequest(f"device is {named(device)}: give {' or '.join(choices)}")
    return True
