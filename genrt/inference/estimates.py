r"""Error bars: the variance of an estimate from one run.

Particles of one first ancestor are a family. With weights W that sum to 1, families F, r
resamplings that drew independent ancestors, and c = (N / (N - 1))^(r + 1),

    Var(Z_hat) / Z^2 = 1 - c (1 - sum_F (sum_{i in F} W_i)^2),
    Var(E_hat[f]) = c sum_F (sum_{i in F} W_i (f(x_i) - E_hat[f]))^2

are consistent estimates, the first one times Z_hat^2 also unbiased (Lee & Whiteley 2018, *Variance
estimation in the particle filter*). Other resampling schemes have less variance, and their ancestors
depend on each other: then, or where one family is left, take ``several`` runs of
``genrt.inference.samplers``.
"""

from __future__ import annotations

import math

import numpy as np

from genrt.inference.resampling import Ancestors, Floats, normalized_weights


def relative_error(log_weights: Floats, eve: Ancestors | None, resamplings: int) -> float:
    """Return the standard error of an evidence, relative to it; NaN if it is unknown."""
    if eve is None or len(eve) < 2 or not (log_weights > -math.inf).any():
        return math.nan
    shares = np.bincount(eve, normalized_weights(log_weights))
    factor = _correction(len(eve), resamplings)
    return math.sqrt(max(0.0, 1 - factor * (1 - float((shares**2).sum()))))


def expectation_error(
    centred: Floats, weights: Floats, eve: Ancestors | None, resamplings: int
) -> float:
    """Return the standard error of a mean, of values less the mean and weights that sum to 1; NaN if it
    is unknown."""
    if eve is None or len(eve) < 2 or not weights.any():
        return math.nan
    sums = np.bincount(eve, weights * centred)
    return math.sqrt(_correction(len(eve), resamplings) * float((sums**2).sum()))


def _correction(count: int, resamplings: int) -> float:
    return math.exp((resamplings + 1) * math.log(count / (count - 1)))
