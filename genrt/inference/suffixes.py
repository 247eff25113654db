"""Laws after the ends of texts: of each, the likeliest next tokens where it was met last.

Texts under a grammar repeat themselves, and so do the texts of one population: what the model says after
``", "distances": [`` hardly depends on what comes before. Only the ``WIDTH`` likeliest tokens of a row
are kept, on the host, so that to guess costs no forward and no copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from genrt.tokens.host_draws import inverse
from genrt.tokens.sampling import BLOCK, LARGEST

__all__ = ["LENGTHS", "Law", "Suffixes", "chosen"]

LENGTHS = (24, 16, 12, 8, 6, 4, 3, 2)
"""Of how many tokens ends are compared, the longest first."""

WIDTH = 128
"""How many tokens are kept of each row."""

MOST = 2**15
"""How many ends are remembered; the longest unused are forgotten."""


class Law(NamedTuple):
    """The likeliest tokens after an end of ``length`` tokens: their ids in order, int64 ``[WIDTH]``, and
    their probabilities, float64."""

    length: int
    token_ids: np.ndarray
    weights: np.ndarray


class Suffixes:
    """The laws after the ends of texts."""

    def __init__(self) -> None:
        self._laws: OrderedDict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._laws)

    def put(self, texts: Sequence[Sequence[int]], rows: Tensor) -> None:
        """Remember the rows ``[n, vocab_size]`` after these texts, whose last tokens are enough."""
        found = rows.topk(min(WIDTH, rows.shape[-1]), sorted=False)
        order = found.indices.argsort(dim=-1)
        ids = found.indices.gather(-1, order).cpu().numpy()
        weights = found.values.gather(-1, order).double().exp().cpu().numpy()
        for text, *law in zip(texts, ids, weights, strict=True):
            for length in LENGTHS:
                if length <= len(text):
                    end = tuple(text[-length:])
                    self._laws[end] = (law[0], law[1])
                    self._laws.move_to_end(end)
        while len(self._laws) > MOST:
            self._laws.popitem(last=False)

    def find(self, text: Sequence[int]) -> Law | None:
        """Return the law after the longest end of a text that was met; ``None`` if none was."""
        for length in LENGTHS:
            if length <= len(text):
                law = self._laws.get(tuple(text[-length:]))
                if law is not None:
                    return Law(length, *law)
        return None


def chosen(
    laws: Sequence[Law], words: Sequence[np.ndarray | None], uniforms: np.ndarray
) -> list[tuple[int, float]]:
    """Return the token that a draw with these random numbers, float64 ``[n, 2]``, would most likely take,
    and its probability, by each law under a packed mask; -1 where the mask leaves nothing of it.

    ``sampling.drawn`` inverts the law in two stages, with two numbers: first a block of tokens, then a
    token of that. So does this, of the tokens that are there.
    """
    ids = np.stack([law.token_ids for law in laws])
    weights = np.stack([law.weights for law in laws])
    for row, mask, token_ids in zip(weights, words, ids, strict=True):
        if mask is not None:
            row[(mask[token_ids >> 5] >> (token_ids & 31)) & 1 == 0] = 0.0
    total = weights.sum(axis=1)
    numbers = uniforms.clip(max=LARGEST)
    blocks = ids // BLOCK
    first, _ = inverse(weights, numbers[:, 0])
    within = np.where(blocks == np.take_along_axis(blocks, first[:, None], 1), weights, 0.0)
    found, _ = inverse(within, numbers[:, 1])
    places = np.arange(len(laws))
    with np.errstate(invalid="ignore"):
        shares = weights[places, found] / total
    return [
        (token, share) if mass > 0 else (-1, 0.0)
        for token, share, mass in zip(
            ids[places, found].tolist(), shares.tolist(), total.tolist(), strict=True
        )
    ]
