"""Converts masks, the sets of allowed tokens, from every form that callers use to one bit per token.

Rules:
    An array's dtype decides its form: bool is a mask, int32 a packed mask, int64 holds token ids. Other
    dtypes are refused, because their numbers could be flags or ids.
    A sequence or set holds token ids. Repeated zeros and ones are flags, and refused.
"""

from __future__ import annotations

import array
from collections.abc import Sequence, Set
from typing import TypeAlias

import numpy as np
import torch

from genrt.errors import InvalidRequest
from genrt.questions.contexts import Table, TokenIds, host_array, id_words

__all__ = ["Mask", "Masks", "check_masks", "packed_mask", "packed_masks"]

Mask: TypeAlias = torch.Tensor | np.ndarray | Sequence[int] | Set[int]
"""The tokens that may be drawn: bool ``[vocab_size]``, token ids as a sequence, a set or int64, or a
packed bitmask, int32 ``[ceil(vocab_size / 32)]`` with token ``i`` at bit ``i % 32`` of word ``i // 32``.
"""

Masks: TypeAlias = Sequence[Mask | None] | torch.Tensor | np.ndarray
"""A mask for each context, or a bool or packed matrix of them."""


def packed_mask(mask: Mask, vocab_size: int) -> bytes:
    """Return a mask as ``draws.DrawToken`` has it; the same for every form of the same mask.

    Raises:
        InvalidRequest: another form or length, or an ambiguous form.
    """
    words = -(-vocab_size // 32)
    if not isinstance(mask, torch.Tensor | np.ndarray):
        bits = _bits_of_ids(_ids(mask, vocab_size), vocab_size)
    elif mask.dtype in (torch.int32, np.int32, _SWAPPED_INT32):
        _check_shape(mask, words, vocab_size)
        packed = host_array(mask, "mask").tobytes()
        if beyond := vocab_size % 32:
            last = int.from_bytes(packed[-4:], "little")
            if last >> beyond:
                packed = packed[:-4] + (last & (1 << beyond) - 1).to_bytes(4, "little")
        return packed
    elif mask.dtype in (torch.bool, np.bool_):
        _check_shape(mask, vocab_size, vocab_size)
        bits = host_array(mask, "mask")
    elif mask.dtype in (torch.int64, np.int64, _SWAPPED_INT64) or tuple(mask.shape) == (0,):
        bits = _bits_of_ids(mask, vocab_size)
    else:
        raise InvalidRequest(
            f"mask is {mask.dtype} {list(mask.shape)}: {_mask_advice(vocab_size)}; of numbers that say "
            "allowed or not make bools, as in mask != 0"
        )
    return np.packbits(bits, bitorder="little").tobytes().ljust(4 * words, b"\0")


def packed_masks(
    masks: Masks | None, count: int, vocab_size: int, *, copies: bool = False
) -> np.ndarray | None:
    """Return a packed mask for each of ``count`` contexts: uint8 ``[count, size]``; ``None`` if every
    mask is ``None``. Equal masks may share memory. A packed matrix gives a view, unless ``copies`` is
    true.

    Raises:
        InvalidRequest: as ``packed_mask`` and ``check_masks``.
    """
    if isinstance(masks, torch.Tensor | np.ndarray) and masks.ndim == 2 and len(masks):
        given = host_array(masks, "masks")
        if given.strides[0] == 0:  # one for all, expanded
            given = given[:1]
        packed = _packed_table(given, vocab_size, copies)
        if packed is not None:
            _check_mask_count(len(masks), count)
            return (
                np.broadcast_to(packed, (count, packed.shape[1])) if len(packed) < count else packed
            )
    each = check_masks(masks, count)
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
    if beyond := vocab_size % 32:
        last = (1 << beyond) - 1
        if (packed[:, -1] & ~np.int64(last)).any():
            packed = packed.copy()
            packed[:, -1] &= np.int32(last)
    return packed.view(np.uint8)


def check_masks(masks: Masks | None, count: int) -> Sequence[Mask | None]:
    """Return a mask or ``None`` for each of ``count`` contexts, without a check of each mask.

    Raises:
        InvalidRequest: not a sequence of ``count`` masks.
    """
    if masks is None:
        return [None] * count
    if isinstance(masks, torch.Tensor | np.ndarray):
        if masks.ndim != 2:
            raise InvalidRequest(
                f"masks have shape {list(masks.shape)}: give one row for each of {count} contexts"
            )
        masks = list(host_array(masks, "masks"))
    given: object = masks
    if isinstance(given, str | bytes | bytearray | memoryview) or not isinstance(given, Sequence):
        raise InvalidRequest(f"masks must be a sequence of masks, got {type(masks).__name__}")
    _check_mask_count(len(masks), count)
    return masks


def _check_mask_count(given: int, count: int) -> None:
    if given != count:
        raise InvalidRequest(f"{given} masks for {count} contexts: give one for each")


_SWAPPED_INT32 = np.dtype(np.int32).newbyteorder()
_SWAPPED_INT64 = np.dtype(np.int64).newbyteorder()


def _ids(mask: Sequence[int] | Set[int], vocab_size: int) -> Sequence[int]:
    """Return a mask's token ids. Raises InvalidRequest for bools and constraints."""
    if hasattr(mask, "start") and not isinstance(mask, range):
        raise InvalidRequest(
            "mask is a constraint: give the mask of a state, at first constraint.start().mask()"
        )
    if hasattr(mask, "mask"):
        raise InvalidRequest(f"mask is a {type(mask).__name__}: give its mask, state.mask()")
    given = tuple(mask) if isinstance(mask, Set) else mask
    if isinstance(given, Sequence):
        kinds = set(map(type, given))
        if kinds & _BOOLS or (
            torch.Tensor in kinds and any(getattr(x, "dtype", None) == torch.bool for x in given)
        ):
            raise InvalidRequest(f"mask is a sequence of bool: {_mask_advice(vocab_size)}")
    return given


_BOOLS: set[type] = {bool, np.bool_}


def _bits_of_ids(token_ids: TokenIds, vocab_size: int) -> np.ndarray:
    """Return bool ``[vocab_size]``, true at these token ids."""
    words = id_words(token_ids, vocab_size, allow_empty=True, name="mask")
    if _are_flags(words):
        raise InvalidRequest(
            f"mask has {len(words)} entries, all of them 0 or 1, which as token ids allow no token but "
            f"these: {_mask_advice(vocab_size)}, each once"
        )
    bits = np.zeros(vocab_size, dtype=np.bool_)
    bits[np.frombuffer(words, np.uint32)] = True
    return bits


def _are_flags(words: array.array[int]) -> bool:
    """Return whether these numbers are flags, 0 or 1, rather than token ids."""
    return len(words) > 0 and max(words) <= 1 and len(set(words)) < len(words)


def _check_shape(mask: Table, length: int, vocab_size: int) -> None:
    if tuple(mask.shape) != (length,):
        form = "bool" if mask.dtype in (torch.bool, np.bool_) else "packed int32"
        raise InvalidRequest(
            f"mask is {form} of shape {list(mask.shape)}: {_mask_advice(vocab_size)}"
        )


def _mask_advice(vocab_size: int) -> str:
    packed = f"packed int32 [{-(-vocab_size // 32)}]"
    return f"give bool [{vocab_size}], {packed}, or token ids as a list or int64"
