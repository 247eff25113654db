"""Right-padded batches of token ids: read, checked, and what is wrong with one, by row and position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.numbers import check_bool, check_int, shown
from genrt.questions.contexts import host_array

__all__ = ["check_pad_value", "unpadded", "verify_right_padding"]

FIELDS = {"input_ids": "input_lengths", "output_ids": "unpadded_sequence_lengths"}
"""The fields that hold a batch, and those that hold its lengths."""


def verify_right_padding(
    data: Mapping[str, Any], pad_value: int, *, raise_error: bool = True
) -> tuple[bool, str | None]:
    """Return ``(True, None)`` if a batch is padded on the right, or ``(False, message)``: the message
    says which row is wrong, at which position, and what is there.

    The batch is ``input_ids`` with ``input_lengths``, or ``output_ids`` with
    ``unpadded_sequence_lengths``: integers ``[batch, time]`` and ``[batch]``. Behind its length a row has
    nothing but ``pad_value``; before it, that is a token like any other.

    Args:
        raise_error: whether the message is raised, as InvalidRequest, in place of being returned.

    Raises:
        InvalidRequest: ``pad_value`` is no int, or ``data`` no mapping.
    """
    check_bool("raise_error", raise_error)
    pad_value = check_pad_value(pad_value)
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"data must be a mapping of fields, got {shown(data)}")
    try:
        ids = _field(data)
        unpadded(data[ids], data[FIELDS[ids]], pad_value, ids)
    except InvalidRequest as error:
        if raise_error:
            raise
        return False, str(error)
    return True, None


def check_pad_value(pad_value: int) -> int:
    """Return the value as an int. Raises InvalidRequest if it is none, or more than 64 bits."""
    if pad_value is None:
        raise InvalidRequest(
            "pad_value must be an int, got None: where a tokenizer has no pad_token_id, its eos_token_id "
            "will do, for lengths say what is padding"
        )
    return check_int("pad_value", pad_value, -(2**63), 2**63 - 1)


def unpadded(
    ids: Tensor, lengths: Tensor, pad_value: int, name: str = "input_ids"
) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch, int64 ``[batch, time]``, and its lengths, int64 ``[batch]``, on the host; messages
    call it ``name``.

    Raises:
        InvalidRequest: these are no batch and its lengths, or it is not padded on the right.
    """
    tokens = _integers(ids, name, 2)
    counts = _integers(lengths, FIELDS[name], 1)
    if not torch.iinfo(ids.dtype).min <= pad_value <= torch.iinfo(ids.dtype).max:
        raise InvalidRequest(f"pad_value={shown(pad_value)} is none of the {ids.dtype} of {name}")
    batch, width = tokens.shape
    if len(counts) != batch:
        raise InvalidRequest(f"{name} has {batch} rows, and {FIELDS[name]} {len(counts)} lengths")
    out = np.flatnonzero((counts < 0) | (counts > width))
    if len(out):
        raise InvalidRequest(
            f"row {out[0]}: {FIELDS[name]} says {counts[out[0]]}, and {name} is {width} wide"
        )
    wrong = (tokens != pad_value) & (np.arange(width) >= counts[:, None])
    if wrong.any():
        row, position = np.argwhere(wrong)[0]
        advice = ""
        if counts[row] and tokens[row, 0] == pad_value:
            advice = "; it looks padded on the left"
        raise InvalidRequest(
            f"row {row}, position {position} of {name}: there is {tokens[row, position]} behind the "
            f"row's {counts[row]} tokens, where padding must be {pad_value}{advice}"
        )
    return tokens, counts


def _field(data: Mapping[str, Any]) -> str:
    """Return the name of the field that holds the batch. Raises InvalidRequest if there is none."""
    for ids, lengths in FIELDS.items():
        if ids in data and lengths in data:
            return ids
    pairs = ", or ".join(f"{ids} and {lengths}" for ids, lengths in FIELDS.items())
    names = ", ".join(map(repr, list(data)[:10])) or "nothing"
    raise InvalidRequest(f"data must have {pairs}: it has {names}")


def _integers(tensor: object, name: str, dimensions: int) -> np.ndarray:
    """Return a tensor of so many dimensions as int64 on the host; raise InvalidRequest if it is none."""
    if not isinstance(tensor, Tensor):
        raise InvalidRequest(f"{name} must be a tensor, got {shown(tensor)}")
    kind = tensor.dtype
    is_integer = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    if tensor.dim() != dimensions or not is_integer:
        shape = "[batch, time]" if dimensions == 2 else "[batch]"
        raise InvalidRequest(
            f"{name} must be integers {shape}, got {kind} of shape {list(tensor.shape)}"
        )
    return host_array(tensor, name).astype(np.int64)
