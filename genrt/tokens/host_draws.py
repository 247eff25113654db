"""Draws on the CPU with numpy on one thread: waking torch's threads for a dozen kernels takes longer than
they save.

Rule: a row is *ordinary* if it has some mass and float32 holds its tokens' weights without scaling. All
other rows go to ``sampling.drawn``, where every block has its own scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["drawn", "inverse"]

LEAST = 1e-15
"""The least mass of an ordinary row: its weights that underflow in float32 are less than 2^-53 of it."""


def drawn(rows: Tensor, numbers: Tensor, block: int, otherwise: Callable[..., Tensor]) -> Tensor:
    """Return the result of ``sampling.drawn`` for masked float32 rows at temperature 1.

    ``otherwise`` is that function. Rows that are not ordinary go to it, with a temperature.
    """
    logarithms, (first, second) = rows.detach().numpy(), numbers.numpy().T
    (count, width), places = rows.shape, np.arange(len(rows))
    weights = np.empty((count, width + -width % block), np.float32)
    weights[:, width:] = 0.0
    blocks = weights.reshape(count, weights.shape[1] // block, block)
    with np.errstate(all="ignore"):
        np.exp(logarithms, out=weights[:, :width])
        chosen, mass = inverse(np.einsum("nbi->nb", blocks), first)
        within, _ = inverse(blocks[places, chosen], second)
        token_ids, log_mass = chosen * block + within, np.log(mass)
        logprobs = np.minimum(logarithms[places, token_ids] - log_mass, 0.0)
    found = torch.from_numpy(np.stack([token_ids, logprobs, log_mass], axis=1))
    others = np.flatnonzero(~((mass > LEAST) & (mass < np.inf)))
    if len(others):
        heat = numbers.new_ones(len(others), 1)
        found[others] = otherwise(rows[others], numbers[others], heat=heat)
    return found


def inverse(weights: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first index in each row with a cumulative weight above its number's share of the total,
    and the total."""
    sums = weights.cumsum(axis=1, dtype=np.float64)
    return (sums > (sums[:, -1] * numbers)[:, None]).argmax(axis=1), sums[:, -1]
