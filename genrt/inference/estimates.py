r"""How sure a result is: error bars of one run, the tail of its weights, the mixing of its chains.

**Error bars.** Particles of one first ancestor are a family. With weights W that sum to 1, families F, r
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

**Chains.** M chains of T steps are diagnosed for one function f of their values at a time. Each chain is
cut in two halves, so that a drift shows as a difference between chains. R-hat and the *bulk* ESS replace
the values of f by the normal scores of their ranks. The *mean* ESS takes the values themselves: it is
that of an estimate of E[f]. R-hat is taken of f and of |f - median f|, and the larger one counts. The ESS
is never more than the number of values; otherwise the definitions are those of Vehtari et al. (2021).

NaN means unknown: f has only one value, at which chains may be stuck; chains have fewer than four steps;
or there are so few and short chains that they may all be in one place by chance. The R-hat of one chain
is unknown, too. For one step of each chain the ESS is M, because chains are independent.

Geyer (1992), *Practical Markov chain Monte Carlo*. Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021),
*Rank-normalization, folding, and localization: an improved R-hat for assessing convergence of MCMC*.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from genrt.inference.formatting import label
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


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """How well chains mix, as far as one function of their values shows.

    Attributes:
        ess_bulk: the number of independent values that describe the bulk of the law as well.
        ess_mean: the number of independent values that estimate the mean as well; NaN if a value is
            infinite.
        r_hat: the spread of the chains together, relative to each; 1 if they agree.
    """

    ess_bulk: float
    ess_mean: float
    r_hat: float


UNKNOWN = Diagnosis(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True, eq=False)
class ChainStatistics:
    """The values of a run's chains, and their mixing. Chains without a first text are not included.

    Attributes:
        values: for each chain the values of its steps, in order, without the warm-up.
        log_weights: float64 ``[chains, steps]``, the gains of each text, by the model.
        lengths: int64 ``[chains, steps]``, the tokens of each text.
        acceptance: float64 ``[chains]``, the share of accepted moves by chain; NaN if unknown.
        missing: the number of chains without a first text.
        ess: the least bulk effective sample size, by autocorrelation, of the log-weights, the lengths,
            and whether a chain is at a value, for each of the ten commonest; NaN if unknown.
        r_hat: the largest R-hat of the same; NaN if unknown.
    """

    values: tuple[tuple[Any, ...], ...]
    log_weights: Floats
    lengths: NDArray[np.int64]
    acceptance: Floats
    missing: int
    ess: float = field(init=False)
    r_hat: float = field(init=False)

    def __post_init__(self) -> None:
        functions = [self.log_weights, self.lengths.astype(np.float64)]
        diagnoses = [*map(diagnose, functions + _indicators(self.values, self.lengths.shape))]
        known = [each.ess_bulk for each in diagnoses if each.ess_bulk == each.ess_bulk]
        object.__setattr__(self, "ess", min(known, default=math.nan))
        known = [each.r_hat for each in diagnoses if each.r_hat == each.r_hat]
        object.__setattr__(self, "r_hat", max(known, default=math.nan))


def diagnose(numbers: Floats) -> Diagnosis:
    """Diagnose chains by numbers ``[chains, steps]``, infinite ones too; ``UNKNOWN`` if one is NaN."""
    if not numbers.size or np.isnan(numbers).any():
        return UNKNOWN
    chains, steps = numbers.shape
    if steps == 1:
        return Diagnosis(float(chains), float(chains), math.nan)
    if steps < 4 or (chains < 4 and steps < 100):  # too few for an autocorrelation, or an agreement
        return UNKNOWN
    scores = _halves(_normal_scores(numbers))
    if (scores == scores[0, 0]).all():
        return UNKNOWN
    ess_bulk, ess_mean = _ess(scores), _ess_mean(numbers)
    if chains == 1:
        return Diagnosis(ess_bulk, ess_mean, math.nan)
    with np.errstate(invalid="ignore"):  # infinities less an infinite median, which are equal
        folded = np.nan_to_num(np.abs(numbers - np.median(numbers)), nan=0.0, posinf=math.inf)
    spread = _r_hat(_halves(_normal_scores(folded)))
    r_hat = max(_r_hat(scores), 0.0 if math.isnan(spread) else spread)
    return Diagnosis(ess_bulk, ess_mean, r_hat)


def key_of(value: Any) -> Hashable:
    """Return a key that tells values apart: the value, or how Python writes it if it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return type(value), label(value)
    return type(value), value


def _indicators(values: Sequence[Sequence[Any]], shape: tuple[int, ...]) -> list[Floats]:
    """Return an indicator for each of the ten commonest values: 1 where a chain is there, else 0."""
    places: dict[Hashable, int] = {}
    codes = np.array(
        [places.setdefault(key_of(value), len(places)) for chain in values for value in chain],
        dtype=np.int64,
    )
    commonest = np.argsort(-np.bincount(codes), kind="stable")[:10]
    return [(codes == code).astype(np.float64).reshape(shape) for code in commonest]


def _halves(numbers: Floats) -> Floats:
    """Cut the chains in halves; the middle one of an odd number of steps is dropped."""
    half = numbers.shape[1] // 2
    return np.concatenate([numbers[:, :half], numbers[:, -half:]])


def _normal_scores(numbers: Floats) -> Floats:
    """Return the normal law's quantiles at the ranks of these numbers, equal ones at their mean rank."""
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places.reshape(numbers.shape)]
    # Blom's (1958) fractions, which are never 0 or 1.
    fractions = torch.from_numpy((ranks - 3 / 8) / (numbers.size + 1 / 4))
    scores: Floats = torch.special.ndtri(fractions).numpy()
    return scores


def _variances(scores: Floats) -> tuple[float, float]:
    """Return the variance within sequences, and var+, that of all together."""
    steps = scores.shape[1]
    within = float(scores.var(axis=1, ddof=1).mean())
    between = float(scores.mean(axis=1).var(ddof=1))
    return within, (steps - 1) / steps * within + between


def _r_hat(scores: Floats) -> float:
    """Return R-hat: NaN if all scores are equal, infinite if they differ between chains alone."""
    within, total = _variances(scores)
    if total == 0:
        return math.nan
    return math.sqrt(total / within) if within > 0 else math.inf


def _ess_mean(numbers: Floats) -> float:
    """Return the effective sample size of numbers ``[chains, steps]``, not all equal, for their mean."""
    if np.isinf(numbers).any():
        return math.nan
    scaled = numbers / np.abs(numbers).max()  # their squares must be floats, too
    return _ess(_halves(scaled - np.median(scaled)))


def _ess(scores: Floats) -> float:
    """Return the effective sample size of sequences ``[sequences, steps]`` that are not all equal, by
    Geyer's initial monotone sequence of autocorrelations."""
    sequences, steps = scores.shape
    within, total = _variances(scores)
    centred = scores - scores.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * steps, axis=1)
    covariances = np.fft.irfft(spectrum * spectrum.conj(), 2 * steps, axis=1)[:, :steps] / steps
    correlations = 1 - (within - covariances.mean(axis=0)) / total
    correlations[0] = 1.0
    pairs = correlations[: steps // 2 * 2].reshape(-1, 2).sum(axis=1)
    negative = np.nonzero(pairs <= 0)[0]
    pairs = np.minimum.accumulate(pairs[: negative[0] if len(negative) else None])
    return float(sequences * steps / max(1.0, -1 + 2 * float(pairs.sum())))
