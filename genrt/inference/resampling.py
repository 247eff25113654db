"""Weights and ancestors: resampling schemes of one signature, effective sample size, mean weight.

All schemes are unbiased: in expectation the children of index i together weigh as much as i. Except with
``partial`` all children weigh the same, so index i has N w_i / sum_j w_j children in expectation. Except
with ``partial`` ancestors come in ascending order: which place a child has depends on its ancestor, so a
single place, such as the first, is not a draw from the weights.
All raise InvalidRequest if no weight is positive, or one is NaN or +inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidRequest

Floats: TypeAlias = NDArray[np.float64]
Ancestors: TypeAlias = NDArray[np.int64]

Resampler: TypeAlias = Callable[..., Ancestors | tuple[Ancestors, Floats]]
"""``resample(rng, log_weights) -> ancestors``: for N unnormalized log-weights, at least one of them
above -inf, N indices, index i in expectation N w_i / sum_j w_j times; every child then weighs the mean.
Or ``-> (ancestors, log_weights)`` of the children, whose weights add up to those of their parent in
expectation. Weights of 0 have no children that weigh anything. ``resample(rng, log_weights, count)``
returns ``count`` of them; ``partial`` cannot."""


def multinomial(
    rng: np.random.Generator, log_weights: Floats, count: int | None = None
) -> Ancestors:
    """Draw independent ancestors, and sort them: the simplest scheme, and the most random (Gordon et
    al. 1993)."""
    uniforms = np.sort(rng.random(_size(log_weights, count)))
    return _inverse_cdf(normalized_weights(log_weights), uniforms)


def stratified(
    rng: np.random.Generator, log_weights: Floats, count: int | None = None
) -> Ancestors:
    """Draw one uniform in each of N equal strata of the cumulative weights (Kitagawa 1996)."""
    size = _size(log_weights, count)
    return _by_strata(log_weights, rng.random(size), size)


def systematic(
    rng: np.random.Generator, log_weights: Floats, count: int | None = None
) -> Ancestors:
    """Draw one uniform and shift it into each of N equal strata: an ancestor of normalized weight w has
    ``floor(N w)`` or ``ceil(N w)`` children (Kitagawa 1996; Douc & Cappé 2005)."""
    return _by_strata(log_weights, rng.random(), _size(log_weights, count))


def residual(rng: np.random.Generator, log_weights: Floats, count: int | None = None) -> Ancestors:
    """Give ``floor(N w)`` children for certain, the rest multinomially by the remainders (Liu & Chen
    1998)."""
    size = _size(log_weights, count)
    expected = _expected(log_weights, size)
    certain = np.floor(expected)
    ancestors = np.repeat(np.arange(len(expected)), certain.astype(np.int64))
    if not (missing := size - len(ancestors)):
        return ancestors
    drawn = _inverse_cdf(expected - certain, np.sort(rng.random(missing)))
    return np.sort(np.concatenate([ancestors, drawn]))


def partial(rng: np.random.Generator, log_weights: Floats) -> tuple[Ancestors, Floats]:
    """Keep weights from half the mean to twice the mean, and resample the others among themselves,
    systematically, each child with their mean weight: less randomness than resampling all, and fewer
    forks (Bolić, Djurić & Hong 2003)."""
    relative = _expected(log_weights, len(log_weights))
    [others] = np.nonzero((_round_whole(2 * relative) < 1) | (relative > 2))
    ancestors, weights = np.arange(len(log_weights)), log_weights.copy()
    if relative[others].sum() > 0:
        ancestors[others] = others[systematic(rng, log_weights[others])]
        weights[others] = log_mean_exp(log_weights[others])
    return ancestors, weights


def optimal(
    rng: np.random.Generator, log_weights: Floats, count: int | None = None
) -> tuple[Ancestors, Floats]:
    """Keep ``count`` different ones of N weights: weights above a threshold as they are, and others by
    strata, each raised to the threshold. No scheme of unbiased weights has a smaller squared error
    (Fearnhead & Clifford 2003). With at most ``count`` positive weights all stay."""
    weights, count = normalized_weights(log_weights), _size(log_weights, count)
    scale = math.log(count / len(weights))
    [positive] = np.nonzero(weights > 0)
    if len(positive) <= count:
        padded = np.concatenate([positive, np.full(count - len(positive), positive[0])])
        kept = np.where(np.arange(count) < len(positive), log_weights[padded], -math.inf)
        return padded, kept + scale
    # The threshold c solves sum_i min(1, w_i / c) = count.
    ordered = np.sort(weights)[::-1]
    left = np.cumsum(ordered[::-1])[::-1]
    larger = int(np.argmax(ordered * (count - np.arange(len(ordered))) <= left))
    threshold = left[larger] / (count - larger)
    [certain] = np.nonzero(weights > threshold)
    [others] = np.nonzero((weights <= threshold) & (weights > 0))
    missing = count - len(certain)
    cumulative = np.cumsum(weights[others])
    points = (np.arange(missing) + rng.random()) * (cumulative[-1] / missing)
    drawn = others[np.searchsorted(cumulative, np.minimum(points, cumulative[-1]), side="left")]
    ancestors = np.concatenate([certain, drawn])
    total = log_mean_exp(log_weights) + math.log(len(weights))
    kept = np.where(
        np.arange(count) < len(certain), log_weights[ancestors], math.log(threshold) + total
    )
    return ancestors, kept + scale


def effective_sample_size(log_weights: Floats) -> float:
    """Return ``(sum w)^2 / sum w^2``, from 1 to N (Kong 1992); 0 if every weight is 0."""
    return ess_and_log_mean(log_weights)[0]


def log_mean_exp(log_weights: Floats) -> float:
    """Return the logarithm of the mean weight, which is ``log_evidence``; -inf if every weight is 0."""
    return ess_and_log_mean(log_weights)[1]


def ess_and_log_mean(log_weights: Floats) -> tuple[float, float]:
    """Return ``effective_sample_size`` and ``log_mean_exp``, of one pass over the weights."""
    peak = log_weights.max(initial=-math.inf)
    if peak == -math.inf:
        return 0.0, -math.inf
    weights = np.exp(log_weights - peak)
    total = weights.sum()
    return float(total**2 / (weights**2).sum()), float(peak + math.log(total / len(weights)))


def normalized_weights(log_weights: Floats) -> Floats:
    """Return weights that sum to 1. Raises InvalidRequest as the schemes do."""
    peak = log_weights.max() if len(log_weights) else -math.inf
    if not math.isfinite(peak):
        raise InvalidRequest(
            f"the largest log-weight is {peak}: resampling needs a positive weight, and finite ones"
        )
    weights: Floats = np.exp(log_weights - peak)
    weights /= weights.sum()
    return weights


def _size(log_weights: Floats, count: int | None) -> int:
    return len(log_weights) if count is None else count


def _expected(log_weights: Floats, count: int) -> Floats:
    """Return how many of ``count`` children each index has in expectation."""
    return _round_whole(normalized_weights(log_weights) * count)


def _round_whole(counts: Floats) -> Floats:
    """Return counts made whole where only rounding kept them from it. Without this 49 equal weights would
    expect 0.9999999999999998 children each, and so no certain one."""
    nearest: Floats = np.rint(counts)
    return np.where(abs(counts - nearest) <= 1e-9 * nearest, nearest, counts)


def _by_strata(log_weights: Floats, uniforms: Floats | float, count: int) -> Ancestors:
    """Return the indices at which the cumulative weights, scaled to sum to ``count``, pass
    ``k + uniforms`` for k from 0 to ``count`` - 1."""
    cumulative = np.cumsum(_expected(log_weights, count))
    cumulative = _round_whole(cumulative * (count / cumulative[-1]))
    # Rounding may bring k and a uniform below 1 up to k + 1.
    points = np.minimum(np.arange(count) + uniforms, np.nextafter(np.arange(1.0, count + 1), 0.0))
    indices: Ancestors = np.searchsorted(cumulative, points, side="right")
    return indices


def _inverse_cdf(weights: Floats, uniforms: Floats) -> Ancestors:
    """Return the indices at which the cumulative weights pass the uniforms, in ascending order."""
    cumulative = np.cumsum(weights)
    # Of equal cumulative weights ``side="right"`` takes the first, so a weight of 0 is never taken;
    # rounding may bring a uniform up to 1, which would be past the end.
    below_one = np.minimum(uniforms, np.nextafter(1.0, 0.0))
    indices: Ancestors = np.searchsorted(cumulative / cumulative[-1], below_one, side="right")
    return indices
