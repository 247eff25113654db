r"""Error bars: the variance of an estimate from one run.

Particles of one first ancestor are a family. With weights W that sum to 1, families F, r
resamplings that drew independent ancestors, and c = (N / (N - 1))^(r + 1),

    Var(Z_hat) / Z^2 = 1 - c (1 - sum_F (sum_{i in F} W_i)^2),
    Var(E_hat[f]) = c sum_F (sum_{i in F} W_i (f(x_i) - E_hat[f]))^2

are consistent estimates, the first one times Z_hat^2 also unbiased (Lee & Whiteley 2018, *Variance
estimation in the particle filter*). The first one is noisy where weights are nearly even: if it is not
positive, the error is unknown. Other resampling schemes have less variance, and their ancestors
depend on each other: then, or where one family is left, take ``several`` runs of
``genrt.inference.samplers``.

Pareto k is the shape of the tail of the weights: they have fewer than 1 / k moments, so that means
converge slowly from k = 0.5 on, and never from 1 on (Vehtari, Simpson, Gelman, Yao & Gabry 2024, *Pareto
smoothed importance sampling*; fitted as by Zhang & Stephens 2009).
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
    variance = 1 - factor * (1 - float((shares**2).sum()))
    return math.sqrt(variance) if variance > 0 else math.nan


def expectation_error(
    centred: Floats, weights: Floats, eve: Ancestors | None, resamplings: int
) -> float:
    """Return the standard error of a mean, of values less the mean and weights that sum to 1; NaN if it
    is unknown."""
    if eve is None or len(eve) < 2 or not weights.any():
        return math.nan
    sums = np.bincount(eve, weights * centred)
    return math.sqrt(_correction(len(eve), resamplings) * float((sums**2).sum()))


def pareto_k(log_weights: Floats) -> float:
    """Return the shape of the tail of the weights; NaN for fewer than 21 positive weights, or if the
    largest are equal."""
    alive = np.sort(log_weights[log_weights > -math.inf])
    size = math.ceil(min(0.2 * len(alive), 3 * math.sqrt(len(alive))))
    if size < 5:
        return math.nan
    gaps = alive[-size:] - alive[-size - 1]
    if gaps[-1] <= 1e-12:
        return math.nan
    # What is above the largest weight under the tail, divided by the tail's first quartile of it, or by
    # that weight where so many are equal to it. A float holds no more than 700 nats.
    unit = gap if (gap := gaps[int(size / 4 + 0.5) - 1]) > 1e-12 else math.log(2)
    tail = np.exp(np.minimum(gaps - unit, 700)) * np.expm1(-gaps) / math.expm1(-unit)
    # The posterior mean of b = k / sigma over a grid, under a weak prior.
    count = 30 + int(math.sqrt(size))
    grid = 1 / tail[-1] + (1 - np.sqrt(count / (np.arange(count) + 0.5))) / 3
    shapes = np.log1p(-grid[:, None] * tail).mean(axis=1)
    likelihood = size * (np.log(-grid / shapes) - shapes - 1)
    b = float(grid @ normalized_weights(likelihood))
    shape = float(np.log1p(-b * tail).mean())
    return (size * shape + 5) / (size + 10)  # shrunk to 0.5, as ten more weights would


def tail_in_words(shape: float, count: int) -> str:
    """Return what a Pareto k of so many weights says about estimates."""
    if not shape > min(1 - 1 / math.log10(count), 0.7):
        return "the weights are even enough"
    if shape < 1:
        return "few particles have most weight: take more of them, a twist or another proposal"
    return "estimates are not reliable: take a twist or another proposal"


def _correction(count: int, resamplings: int) -> float:
    return math.exp((resamplings + 1) * math.log(count / (count - 1)))
