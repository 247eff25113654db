"""Token ids as callers give them, checked, as 32-bit words; and their tensors and arrays on the host."""

from __future__ import annotations

import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from genrt.errors import InvalidRequest
from genrt.numbers import shown

__all__ = ["Table", "TokenIds", "advice_for", "host_array", "id_words"]

Table: TypeAlias = torch.Tensor | np.ndarray
"""Numbers in a tensor, on any device, or in an array."""

TokenIds: TypeAlias = Sequence[int] | np.ndarray | torch.Tensor
"""Token ids as callers give them; a request holds them as a tuple of int."""


def id_words(
    token_ids: TokenIds, vocab_size: int, *, allow_empty: bool = False, name: str = "token ids"
) -> array.array[int]:
    """Return the token ids as unsigned 32-bit numbers; messages call them ``name``.

    Raises:
        InvalidRequest: they are no flat sequence of ints below ``vocab_size``, or empty.
    """
    if type(token_ids) is not list and type(token_ids) is not tuple:
        token_ids = _sequence(token_ids, name)
    try:
        words = array.array("I", token_ids)
    except (TypeError, OverflowError, ValueError, RuntimeError):  # torch raises the last
        raise InvalidRequest(_what_is_wrong(token_ids, vocab_size, name)) from None
    if not words:
        if allow_empty:
            return words
        raise InvalidRequest("an empty prompt has no next token: give at least one token id")
    if words[np.frombuffer(words, np.uint32).argmax()] >= vocab_size:
        raise InvalidRequest(_what_is_wrong(words, vocab_size, name))
    return words


def host_array(table: Table, name: str) -> np.ndarray:
    """Return a tensor or array as a plain array in the host's memory and byte order; not always a copy.

    Raises:
        InvalidRequest: it holds no plain numbers: it is sparse, masked or on no device.
    """
    if isinstance(table, np.ndarray):
        if isinstance(table, np.ma.MaskedArray):
            raise InvalidRequest(f"{name}: a masked array says two things; give a plain array")
        return table.astype(table.dtype.newbyteorder("="), copy=False)
    if table.is_meta:
        raise InvalidRequest(
            f"{name}: a tensor on the device 'meta' holds no numbers; give another"
        )
    if table.layout != torch.strided:
        raise InvalidRequest(f"{name}: the tensor is {table.layout}; give a dense one")
    host = table if table.is_cpu else table.cpu()
    try:
        return host.numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error}") from error


def advice_for(given: object) -> str:
    """Return what a message adds about something that was given for token ids; may be empty."""
    if isinstance(given, Mapping) and "input_ids" in given:
        return "; give its token ids, encoding['input_ids'], or lm.encode(text)"
    if isinstance(given, Mapping) and "role" in given:
        return "; for a conversation, give lm.encode_chat(messages)"
    if hasattr(given, "ids") and hasattr(given, "attention_mask"):
        return "; give its token ids, encoding.ids, or lm.encode(text)"
    if isinstance(given, str | bytes):
        return "; for text, give lm.encode(text)"
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return "; give one token id in a list"
    return "; give a list" if isinstance(given, Iterable) else ""


def _sequence(token_ids: object, name: str) -> Sequence[int]:
    """Return what is neither a list nor a tuple, if it is a sequence of token ids all the same."""
    if isinstance(token_ids, torch.Tensor | np.ndarray):
        return _integers(token_ids, name)
    if isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(
        token_ids, Sequence
    ):
        kind = type(token_ids).__name__
        raise InvalidRequest(f"{name} must be a sequence of int, got {kind}{advice_for(token_ids)}")
    return token_ids


def _integers(token_ids: Table, name: str) -> list[int]:
    """Return the ints of a flat array or tensor. Raises InvalidRequest if it is no such thing."""
    if isinstance(token_ids, torch.Tensor):
        dtype = token_ids.dtype
        integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    else:
        integers = np.issubdtype(token_ids.dtype, np.integer)
    if token_ids.ndim != 1 or not (integers or len(token_ids) == 0):
        advice = ": give one row of it" if integers and token_ids.ndim == 2 else ""
        raise InvalidRequest(
            f"{name} must be one flat sequence of int, got {token_ids.dtype} "
            f"of shape {list(token_ids.shape)}{advice}"
        )
    return cast("list[int]", host_array(token_ids, name).tolist()) if len(token_ids) else []


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
