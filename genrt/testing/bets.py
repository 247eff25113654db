r"""Tests hypotheses about samples by betting against them: the capital won is the evidence.

A bet starts with a capital of 1. If the hypothesis is true, its final capital E has a mean of at most 1,
and P(E >= 1 / level) <= level by Markov's inequality, for any number of samples and any distribution that
the hypothesis allows. Capital may be spread over several bets; their final capitals are averaged.

*Means.* If X >= 0 has mean m, a share lambda in [0, 1] of the capital is bet on every X_i / m,

    E = prod_i (1 + lambda (X_i / m - 1)),

which grows if the mean is above m. If X <= h, the same bet with h - X and h - m grows if the mean is
below m. Without a bound h, no test of a valid level can detect too small a mean (Bahadur & Savage 1956):
unseen values may make up for it. A bound v of the variance of X / m serves as well: since exp(-x) is at
most 1 - x + x^2 / 2 for x >= 0,

    E = prod_i exp(-lambda X_i / m) / (1 - lambda + lambda^2 (1 + v) / 2)

has mean at most 1 for every lambda > 0, and grows if the mean is below m.
*Categories.* The bet is a likelihood ratio of the counts: a Dirichlet mixture around the stated
probabilities against these probabilities. Its mean under them is exactly 1, with rare categories too.

Bahadur & Savage (1956), *The nonexistence of certain statistical procedures in nonparametric problems*.
Good (1967), *A Bayesian significance test for multinomial distributions*. Shafer (2021), *Testing by
betting*. Waudby-Smith & Ramdas (2024), *Estimating means of bounded random variables by betting*.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from genrt.inference.resampling import Floats, log_mean_exp

SHARES = 64
"""The number of shares, in geometric progression from 1/n to 1, over which the capital is spread."""

LARGEST = 1e300
"""The largest value that counts, in units of its mean, so that logarithms are finite."""


def mixture(*log_capitals: float) -> float:
    """Return the log-capital of equal parts of the capital, one in each of these bets."""
    return float(np.logaddexp.reduce(log_capitals) - math.log(len(log_capitals)))


def on_mean(values: Floats, mean: float, *, lowest: float, highest: float, slack: float) -> float:
    """Return the log-capital of a bet that independent values within these bounds have another mean, by
    more than the slack. Without an upper bound, the bet is on a larger mean alone."""
    values = values.clip(lowest, highest)
    larger = on_larger_mean(values - lowest, mean - lowest + slack)
    if highest == math.inf:
        return mixture(larger, -math.inf)
    return mixture(larger, on_smaller_mean(values, mean, highest=highest, slack=slack))


def on_smaller_mean(values: Floats, mean: float, *, highest: float, slack: float) -> float:
    """Return the log-capital of a bet that independent values, at most ``highest``, have a smaller mean,
    by more than the slack."""
    return on_larger_mean(highest - values, highest - mean + slack)


def on_larger_mean(values: Floats, mean: float) -> float:
    """Return the log-capital of a bet that independent non-negative values have a larger mean."""
    if mean <= 0:
        return math.inf if bool((values > 0).any()) else 0.0
    shares = np.geomspace(1 / len(values), 1, SHARES)
    with np.errstate(over="ignore", divide="ignore"):
        gains = np.minimum(values / mean, LARGEST) - 1
        return log_mean_exp(np.array([np.log1p(share * gains).sum() for share in shares]))


def on_smaller_mean_by_variance(values: Floats, mean: float, *, relative_variance: float) -> float:
    """Return the log-capital of betting that independent non-negative values, whose variance is at most
    ``relative_variance * mean**2``, have a smaller mean."""
    shares = np.geomspace(1 / len(values), 1, SHARES)
    costs = np.log1p(-shares + shares**2 * (1 + relative_variance) / 2)
    return log_mean_exp(-shares * (values / mean).sum() - len(values) * costs)


def on_all_counts(observed: Tensor, expected: Tensor) -> float:
    """Return the log-capital of a bet that many categories are slightly off.

    Args:
        observed: float64 ``[k]``, the count of each category.
        expected: float64 ``[k]``, their probabilities, positive.
    """
    count = int(observed.sum())
    logs = [
        float(_log_ratio(observed, concentration * expected, expected).sum())
        + math.lgamma(concentration)
        - math.lgamma(concentration + count)
        for concentration in _concentrations(count, len(expected))
    ]
    return log_mean_exp(np.array(logs))


def on_each_count(observed: Tensor, expected: Tensor) -> Tensor:
    """Return the log-capital of bets on each category against all others together: float64 ``[k]``.

    A mixture around the stated probability detects small deviations of a common category. Jeffreys'
    prior detects any deviation of a rare one.
    """
    count = int(observed.sum())
    others = (1 - expected).clamp(min=0)
    # Where one probability is nearly 1, rounding could make the others' probability 0.
    likeliest = int(expected.argmax())
    others[likeliest] = expected[torch.arange(len(expected)) != likeliest].sum()
    half = torch.full_like(expected, 0.5)
    priors = [(half, half)]
    priors += [
        (concentration * expected, concentration * others)
        for concentration in _concentrations(count, len(expected))
    ]
    logs = [
        _log_ratio(observed, here, expected)
        + _log_ratio(count - observed, there, others)
        + torch.lgamma(here + there)
        - torch.lgamma(here + there + count)
        for here, there in priors
    ]
    return torch.stack(logs).logsumexp(0) - math.log(len(logs))


def _log_ratio(observed: Tensor, prior: Tensor, expected: Tensor) -> Tensor:
    """Return log Gamma(a + c) - log Gamma(a) - c log p of each category, which is 0 where c is 0."""
    logs = torch.lgamma(prior + observed) - torch.lgamma(prior) - observed * expected.log()
    return torch.where(observed > 0, logs, 0.0)


def _concentrations(count: int, categories: int) -> list[float]:
    """Return concentrations for the mixtures, in powers of 4. The lowest ignores the stated
    probabilities; the highest is too close to them for this many samples to show a difference."""
    most = max(16.0, 16.0 * count * categories)
    return [4.0**power for power in range(math.ceil(math.log(most, 4)) + 1)]
