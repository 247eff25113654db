"""Converts masks, the sets of allowed tokens, from every form that callers use to one bit per token.

Rules:
    An array's dtype decides its form: bool is a mask, int32 a packed mask, int64 holds token ids. Other
    dtypes are refused, because their numbers could be flags or ids.
    A sequence or set holds token ids. Repeated zeros and ones are flags, and refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
import torch

from genrt.errors import InvalidRequest
from genrt.numbers import is_truth_value
from genrt.questions.arguments import Table, TokenIds, host_array, is_plain_sequence
from genrt.questions.rows import id_words


class MaskedState(Protocol):
    """A state of a constraint."""

    def mask(self) -> torch.Tensor:
        """Return the allowed tokens, bool ``[vocab_size]``."""

    def advance(self, token_id: int) -> Any:
        """Return the state after another token."""


Mask: TypeAlias = torch.Tensor | np.ndarray | Sequence[int] | Set[int] | MaskedState
"""The tokens that may be drawn: a constraint's state; bool ``[vocab_size]``; token ids as a sequence, a
set or int64; or a packed bitmask, int32 ``[ceil(vocab_size / 32)]`` with token ``i`` at bit ``i % 32`` of
word ``i // 32``."""

Masks: TypeAlias = Sequence[Mask | None] | torch.Tensor | np.ndarray
"""A mask for each context, or a bool or packed matrix of them."""


def packed_mask(mask: Mask, vocab_size: int) -> bytes:
    """Return a mask as ``draws.DrawToken`` has it; the same for every form of the same mask.

    Raises:
        InvalidRequest: another form or length, or an ambiguous form.
    """
    words = -(-vocab_size // 32)
    if _is_packed(mask, words):
        return _cleared(mask.numpy().tobytes(), vocab_size)
    if hasattr(mask, "advance"):
        mask = _mask_of_state(mask)
    if not isinstance(mask, torch.Tensor | np.ndarray):
        bits = _bits_of_ids(_ids(mask, vocab_size), vocab_size)
    elif (kind := str(mask.dtype).removeprefix("torch.").lstrip("<>")) in ("int32", "i4"):
        _check_shape(mask, words, vocab_size)
        return _cleared(host_array(mask, "mask").astype(np.int32).tobytes(), vocab_size)
    elif kind == "bool":
        _check_shape(mask, vocab_size, vocab_size)
        bits = host_array(mask, "mask")
    elif kind in ("int64", "i8") or tuple(mask.shape) == (0,):
        bits = _bits_of_ids(mask, vocab_size)
    else:
        raise InvalidRequest(
            f"mask is {mask.dtype} {list(mask.shape)}: {_mask_advice(vocab_size)}; of numbers that say "
            "allowed or not make bools, as in mask != 0"
        )
    return np.packbits(bits, bitorder="little").tobytes().ljust(4 * words, b"\0")


def packed_words(mask: Mask, vocab_size: int) -> torch.Tensor:
    """Return a mask as a packed tensor; a packed tensor on the host as it is, which may have bits beyond
    the vocabulary. Raises as ``packed_mask``."""
    if _is_packed(mask, -(-vocab_size // 32)):
        return mask
    return torch.frombuffer(bytearray(packed_mask(mask, vocab_size)), dtype=torch.int32)


def words_or_state(mask: Mask, vocab_size: int) -> torch.Tensor | MaskedState:
    """Return a mask as ``packed_words`` does, and a constraint's state as it is."""
    if _is_packed(mask, -(-vocab_size // 32)):
        return mask
    return cast("MaskedState", mask) if hasattr(mask, "advance") else packed_words(mask, vocab_size)


def _is_packed(mask: Any, words: int) -> TypeGuard[torch.Tensor]:
    """Return whether a mask is a packed tensor on the host."""
    return (
        type(mask) is torch.Tensor
        and mask.dtype is torch.int32
        and mask.shape == (words,)
        and mask.is_cpu
        and mask.layout is torch.strided
    )


def _cleared(packed: bytes, vocab_size: int) -> bytes:
    """Return a packed mask without bits beyond the vocabulary."""
    if used := vocab_size % 32:
        last = int.from_bytes(packed[-4:], sys.byteorder)
        if last >> used:
            return packed[:-4] + (last & (1 << used) - 1).to_bytes(4, sys.byteorder)
    return packed


def words_of_each(masks: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """Return packed tensors, with one that allows every token for a missing mask; ``None`` without any
    mask."""
    given = next((mask for mask in masks if mask is not None), None)
    if given is None:
        return None
    everything = torch.full_like(given, -1)
    return [everything if mask is None else mask for mask in masks]


def packed_masks(
    masks: Masks | None, count: int, vocab_size: int, *, copies: bool = False
) -> np.ndarray | None:
    """Return a packed mask for each of ``count`` contexts: uint8 ``[count, size]``; ``None`` without any
    mask. Equal masks may share memory. A packed matrix gives a view, unless ``copies`` is true.

    Raises:
        InvalidRequest: as ``packed_mask``, or not a sequence of ``count`` masks.
    """
    each: Any = masks
    if masks is None:
        return None
    if isinstance(masks, torch.Tensor | np.ndarray):
        if masks.ndim != 2:
            raise InvalidRequest(
                f"masks have shape {list(masks.shape)}: give one row for each of {count} contexts"
            )
        each = host_array(masks, "masks")
    elif not is_plain_sequence(each):
        raise InvalidRequest(f"masks must be a sequence of masks, got {type(masks).__name__}")
    if len(each) != count:
        raise InvalidRequest(f"masks has length {len(each)}, not {count}: give one for each")
    if isinstance(each, np.ndarray) and count:
        table = each[:1] if each.strides[0] == 0 else each  # one for all, expanded
        if (packed := _packed_table(table, vocab_size, copies)) is not None:
            return np.broadcast_to(packed, (count, packed.shape[1]))
    if all(mask is None for mask in each):
        return None
    size = -(-vocab_size // 32) * 4
    everything = b"\xff" * size
    found = [everything if mask is None else packed_mask(mask, vocab_size) for mask in each]
    return np.frombuffer(b"".join(found), np.uint8).reshape(count, size)


def _packed_table(table: np.ndarray, vocab_size: int, copies: bool) -> np.ndarray | None:
    """Return the rows of a bool or packed table, packed; ``None`` for other tables."""
    words = -(-vocab_size // 32)
    if table.dtype == np.bool_ and table.shape[1] == vocab_size:
        packed = np.packbits(table, axis=1, bitorder="little")
        return np.pad(packed, ((0, 0), (0, 4 * words - packed.shape[1])))
    if table.dtype != np.int32 or table.shape[1] != words:
        return None
    packed = np.array(table, order="C") if copies else np.ascontiguousarray(table)
    return _without_excess(packed, vocab_size).view(np.uint8)


def _without_excess(packed: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return packed int32 masks without bits beyond the vocabulary."""
    last = np.int32((1 << vocab_size % 32) - 1) if vocab_size % 32 else np.int32(-1)
    if (packed[:, -1] & ~last).any():
        packed = packed.copy()
        packed[:, -1] &= last
    return packed


def _ids(mask: Sequence[int] | Set[int], vocab_size: int) -> Sequence[int]:
    """Return a mask's token ids. Raises InvalidRequest for bools and constraints."""
    if hasattr(mask, "start") and not isinstance(mask, range):
        raise InvalidRequest("mask is a constraint: give a state, at first constraint.start()")
    given = tuple(mask) if isinstance(mask, Set) else mask
    if isinstance(given, Sequence) and any(
        kind in (bool, np.bool_) or (kind is torch.Tensor and any(map(is_truth_value, given)))
        for kind in {*map(type, given)}
    ):
        raise InvalidRequest(f"mask is a sequence of bool: {_mask_advice(vocab_size)}")
    return given


def _mask_of_state(state: Any) -> torch.Tensor:
    if hasattr(state, "check"):
        raise InvalidRequest(
            "mask is a state that checks single tokens, as of a predicate: give its mask, "
            "(await abitmasks([state]))[0], or draw after a context, which asks it"
        )
    mask: torch.Tensor = state.mask()
    return mask


def _bits_of_ids(token_ids: TokenIds, vocab_size: int) -> np.ndarray:
    """Return bool ``[vocab_size]``, true at these token ids."""
    words = id_words(token_ids, vocab_size, allow_empty=True, name="mask")
    if len(words) and max(words) <= 1 and len(set(words)) < len(words):
        raise InvalidRequest(
            f"mask has {len(words)} entries, all of them 0 or 1, which as token ids allow no token but "
            f"these: {_mask_advice(vocab_size)}, each once"
        )
    bits = np.zeros(vocab_size, dtype=np.bool_)
    bits[np.frombuffer(words, np.uint32)] = True
    return bits


def _check_shape(mask: Table, length: int, vocab_size: int) -> None:
    if tuple(mask.shape) != (length,):
        form = "bool" if mask.dtype in (torch.bool, np.bool_) else "packed int32"
        raise InvalidRequest(
            f"mask is {form} of shape {list(mask.shape)}: {_mask_advice(vocab_size)}"
        )


def _mask_advice(vocab_size: int) -> str:
    packed = f"packed int32 [{-(-vocab_size // 32)}]"
    return f"give bool [{vocab_size}], {packed}, or token ids as a list or int64"
