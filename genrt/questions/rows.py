"""Rows: the log-probabilities of every next token, on the device or moved to the host."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from genrt.errors import ContextTooLong, InvalidRequest, NotFinite
from genrt.numbers import named
from genrt.questions.arguments import TOKEN_BYTES, Adapter, Limits, TokenIds, abbreviated, id_words
from genrt.questions.request import Request
from genrt.tokens.rows import gather_rows
from genrt.tokens.sampling import rows_at_once

Device: TypeAlias = str | torch.device
"""A device or its name, as torch takes it."""


@dataclass(frozen=True, slots=True, repr=False, init=False)
class LogprobsRequest(Request):
    """The row after ``token_ids``: normalized log-probabilities, float32 ``[vocab_size]`` on the engine's
    device.

    Attributes:
        packed: the token ids as unsigned 32-bit words in this machine's byte order, which hash and
            compare at the speed of memory.
    """

    packed: bytes
    adapter: Adapter | None = None
    weights_version: int = 0
    _hash: int = field(init=False, compare=False)

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        adapter: Adapter | None = None,
        *,
        packed: bytes | None = None,
        weights_version: int = 0,
    ) -> None:
        if packed is None:
            packed = (token_ids if type(token_ids) is array else _token_words(token_ids)).tobytes()
        # Every question makes one, and a frozen dataclass's own way takes 1.5 times as long.
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
        return len(self.packed)

    def of_weights(self, version: int) -> LogprobsRequest:
        return LogprobsRequest(packed=self.packed, adapter=self.adapter, weights_version=version)

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process hashes bytes by another key.
        return _restored, (self.packed, self.adapter, self.weights_version)

    def __repr__(self) -> str:
        return f"LogprobsRequest({abbreviated(self.token_ids)}, adapter={self.adapter})"


def _restored(packed: bytes, adapter: Adapter | None, version: int) -> LogprobsRequest:
    return LogprobsRequest(packed=packed, adapter=adapter, weights_version=version)


def _token_words(token_ids: Sequence[int]) -> array[int]:
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
    packed = id_words(token_ids, limits.vocab_size).tobytes()
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
