"""The sets of tokens that tokens are drawn from: packed, as ids, and with their mass by the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from genrt.tokens.rows import AsyncHostCopy, log_sums, moved
from genrt.tokens.sampling import tempered

MaskForm: TypeAlias = Literal["ids", "bits"]
"""The form in which sets are read: int32 token ids in order, or bits in whole int32 words."""

DrawnFrom: TypeAlias = tuple[float, float, bytes]
"""The set that a token was drawn from: the token's log-probability in it, the set's log mass, and its
tokens, as ``in_form`` stores them. Python's garbage collector does not visit plain tuples of these."""

NUMBERS = 3
"""How many words describe a set before its bits: a log-probability, a log mass and a size."""


class DescribedSets:
    """The sets of one step's draws, on their way to the host.

    Args:
        laws: the logits or log-probabilities that tokens are drawn by, float32 ``[n, V]``.
        rows: the model's log-probabilities, ``[n, V]``; on a GPU, its logits will do.
        divisors: the temperatures of the draws, as ``divisors_of`` returns them.
        token_ids: the tokens, int64 ``[n]``.
    """

    def __init__(
        self, laws: Tensor, rows: Tensor, divisors: Tensor | None, token_ids: Tensor
    ) -> None:
        self._words = -(-laws.shape[-1] // 32)
        if laws.is_cuda:
            from genrt.tokens.set_kernels import described
        else:
            described = _described
        self._copy = AsyncHostCopy(described(laws, rows, divisors, token_ids))
        self._places: dict[MaskForm, list[DrawnFrom]] = {}

    def places(self, form: MaskForm) -> list[DrawnFrom]:
        """Return the sets in the order of the draws. It waits for the device only if the step has not
        ended."""
        if form not in self._places:
            found = self._copy.result().numpy()
            numbers = found[:, : NUMBERS - 1].view(np.float32).T.tolist()
            self._places[form] = [*zip(*numbers, self._in_form(found, form), strict=True)]
        return self._places[form]

    def _in_form(self, found: np.ndarray, form: MaskForm) -> list[bytes]:
        start = NUMBERS + self._words
        packed, listed = found[:, NUMBERS:start], found[:, start:]
        sizes, sets = found[:, NUMBERS - 1].tolist(), list[bytes]()
        for words, ids, size in zip(packed, listed, sizes, strict=True):
            if form == "bits" and size >= self._words:
                sets.append(words.tobytes())
            elif size <= len(ids):
                sets.append(ids[:size].tobytes())
            else:
                sets += in_form(words[None], "ids")
        return sets


def divisors_of(heats: Sequence[float], device: torch.device) -> Tensor | None:
    """Return temperatures above 0 as float32 ``[n]`` on the device; ``None`` if all are 1."""
    if all(heat == 1.0 for heat in heats):
        return None
    exact = torch.tensor([*heats], dtype=torch.float64)
    return moved(exact.clamp(max=torch.finfo(torch.float32).max).float(), device)


def _described(laws: Tensor, rows: Tensor, divisors: Tensor | None, token_ids: Tensor) -> Tensor:
    """Return what ``set_kernels.described`` does, but no ids."""
    own = token_ids[:, None]
    logprobs = laws.gather(-1, own) - log_sums(laws)
    if divisors is not None:
        rows = tempered(rows.float(), divisors[:, None])
    numbers = torch.cat([logprobs, mass_of_sets(rows, laws)], dim=-1)
    packed = torch.from_numpy(packed_sets(laws))
    size = (laws > -math.inf).sum(-1, keepdim=True, dtype=torch.int32)
    return torch.cat([numbers.view(torch.int32), size, packed], dim=-1)


def mass_of_sets(rows: Tensor, laws: Tensor) -> Tensor:
    """Return the log-probability, by the rows ``[n, V]``, of the tokens that each of ``laws``
    ``[n, V]`` has: float32 ``[n, 1]`` on the host, -inf for none."""
    is_in = (laws > -math.inf).cpu().numpy()
    masses = []
    for row, own in zip(rows.cpu().numpy(), is_in, strict=True):
        inside = row[own]
        peak = inside.max(initial=-math.inf)
        weights = np.exp(inside - peak) if peak > -math.inf else np.zeros(0)
        masses.append(peak + math.log(total) if (total := weights.sum()) else -math.inf)
    return torch.tensor(masses, dtype=torch.float32)[:, None].clamp_(max=0.0)


def packed_sets(laws: Tensor) -> np.ndarray:
    """Return the tokens with a probability in each of the rows ``[n, V]``, packed as masks are: int32
    ``[n, ceil(V / 32)]``."""
    bits = np.packbits((laws > -math.inf).cpu().numpy(), axis=-1, bitorder="little")
    return np.pad(bits, ((0, 0), (0, -bits.shape[-1] % 4))).view(np.int32)


def in_form(packed: np.ndarray, form: MaskForm) -> list[bytes]:
    """Return packed sets, int32 ``[n, words]``, as they are stored for this form: as int32 ids in order;
    for ``"bits"`` as their words, if a set has as many tokens as words or more."""
    found = []
    for words in packed:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)
        ids = np.flatnonzero(bits).astype(np.int32)
        stays_packed = form == "bits" and len(ids) >= len(words)
        found.append((words if stays_packed else ids).tobytes())
    return found


def as_bits(sets: Sequence[bytes], words: int) -> np.ndarray:
    """Return sets that are stored for the form ``"bits"``, int32 ``[n, words]``."""
    found = np.zeros((len(sets), words), np.uint32)
    sizes = np.array([len(each) // 4 for each in sets], np.int64)
    packed = sizes == words
    sizes[packed] = 0
    for row in np.flatnonzero(packed).tolist():
        found[row] = np.frombuffer(sets[row], np.uint32)
    listed = b"".join([each for each, size in zip(sets, sizes.tolist(), strict=True) if size])
    ids, rows = np.frombuffer(listed, np.uint32), np.repeat(np.arange(len(sets)), sizes)
    np.bitwise_or.at(found, (rows, ids >> 5), np.uint32(1) << (ids & 31))
    return found.view(np.int32)
