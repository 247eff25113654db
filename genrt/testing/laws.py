r"""Laws that samples and weights of a right sampler obey, as assertions with an error level that holds.

Both assertions are bets against the null hypothesis that the sampler is right. A bet starts with a
capital of 1 and is fair or worse if the hypothesis is true, so its end capital E has mean at most 1, and
by Markov's inequality P(E >= 1/level) <= level: for any number of runs and any distribution, however
skewed, without an appeal to the central limit theorem. 1/E is reported as the p-value. Several bets are
combined by spreading the capital over them, that is by averaging.

*Means.* If X >= 0 has mean m, a fixed share lambda in [0, 1] of the capital is bet on every X_i / m:

    E = prod_i (1 + lambda (X_i / m - 1)),

which grows if the true mean is above m. If X <= h, the same with h - X and h - m grows if it is below.
Without a bound h no test at all can find too small a mean at a level that holds (Bahadur & Savage 1956):
what was not seen yet may make up for it.

*Categories.* The bet is a likelihood ratio of the counts: under a Dirichlet mixture around the stated
probabilities, over the stated ones. Its mean under these is exactly 1, rare categories or not.

Waudby-Smith & Ramdas (2024), *Estimating means of bounded random variables by betting*. Shafer (2021),
*Testing by betting*. Bahadur & Savage (1956), *The nonexistence of certain statistical procedures in
nonparametric problems*. Good (1967), *A Bayesian significance test for multinomial distributions*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.resampling import Floats, log_mean_exp

__all__ = ["assert_samples_from", "assert_unbiased"]

STAKES = 64
"""Over how many shares, in geometric progression from 1/n to 1, the capital is spread."""

WORST = 5
"""How many of the samples whose counts are most unlikely a message shows."""


def assert_unbiased(
    estimates: Iterable[float] | Floats | Tensor,
    exact: float,
    *,
    level: float = 1e-6,
    lowest: float = 0.0,
    highest: float | None = 1.0,
    rtol: float = 1e-5,
) -> None:
    """Fail if the mean of what these estimates are drawn from is not ``exact``.

    The estimates come from independent runs: the evidence of each run of an SMC, or the weight of each
    particle of an importance sampler, which never interact. A right sampler fails with probability
    at most ``level``, whatever the distribution, as long as every estimate that can come lies between
    ``lowest`` and ``highest``. A wrong one is found surely when its bias is more than about 6 standard
    errors (at the default level), and n times the bias more than 15 times ``highest - lowest``: the
    latter asks for many runs if the evidence is small beside ``highest``.

    Args:
        estimates: as they are, not their logarithms; constant ones are well.
        exact: the mean that they should have.
        level: how often a right sampler may fail.
        lowest: no estimate can be less; that of weights is 0.
        highest: no estimate can be more: 1 if the weights are probabilities, as for a constraint
            alone. With a potential it is e to the largest one. ``math.inf`` says that there is no bound,
            and then only too large a mean is found. ``None`` supposes twice the largest number seen or
            expected: then the level is true only if no event that n runs may miss makes a good part of
            the mean.
        rtol: the relative error in ``exact`` and the estimates that is rounding.

    Raises:
        AssertionError: the mean is another, or an estimate is NaN or out of its bounds.
        InvalidRequest: there are no estimates, or an argument is out of its range.
    """
    _check_level(level)
    values = _array(estimates)
    count = len(values)
    if count == 0:
        raise InvalidRequest("there are no estimates: give those of a few hundred runs")
    supposed = highest is None
    if highest is None:
        highest = 2 * max(float(values.max()), abs(exact))
    slack = rtol * abs(exact)
    if not lowest <= exact <= highest:
        raise InvalidRequest(
            f"exact is {exact}, which is not between lowest={lowest} and highest={highest}: these "
            "are the least and the most that an estimate can be"
        )
    outside = ~((values >= lowest - slack) & (values <= highest + slack))
    if outside.any():
        index = int(outside.argmax())
        raise AssertionError(
            f"estimate {index} is {values[index]:.6g}, which is not between lowest={lowest:g} and "
            f"highest={highest:g}: the sampler is wrong, or it is not made of probabilities alone; "
            "then say by highest= what an estimate can be at most"
        )
    values = values.clip(lowest, highest)
    too_large = _log_capital(values - lowest, exact - lowest + slack)
    too_small = (
        _log_capital(highest - values, highest - exact + slack) if highest < math.inf else -math.inf
    )
    log_p = -float(np.logaddexp(too_large, too_small) - math.log(2))
    if log_p > math.log(level):
        return
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    raise AssertionError(
        f"the estimates are biased: their mean is {mean:.6g}, and should be {exact:.6g}\n"
        f"  standard error {error:.3g}, n = {count}, p <= {_power(log_p)} (level {level:g})\n"
        f"  {_diagnosis(values, mean, exact, supposed)}"
    )


def assert_samples_from(
    samples: Iterable[Hashable],
    probabilities: Mapping[Hashable, float],
    *,
    level: float = 1e-6,
) -> None:
    """Fail if independent samples don't have these probabilities.

    Samples that have them fail with probability at most ``level``, for any number of samples and
    however rare some of them are. A sample of probability 0 fails at once.

    It is not for weighted samples: their weights, run by run, are unbiased or not (``assert_unbiased``).

    Args:
        samples: one for each independent draw; anything hashable.
        probabilities: of every sample that can come; they add up to 1.
        level: how often a right sampler may fail.

    Raises:
        AssertionError: they don't have them; the message shows the samples that are most off.
        InvalidRequest: there are no samples, or the probabilities are not a distribution.
    """
    _check_level(level)
    counts = Counter(samples)
    count = counts.total()
    law = {sample: float(probability) for sample, probability in probabilities.items()}
    if any(not 0 <= probability < math.inf for probability in law.values()):
        raise InvalidRequest("a probability is negative or not finite")
    if count == 0:
        raise InvalidRequest("there are no samples: give a few hundred")
    impossible = [sample for sample in counts if not law.get(sample)]
    if impossible:
        raise AssertionError(
            f"{impossible[0]!r} was sampled ({counts[impossible[0]]} of {count} times), and its "
            f"probability is 0; so it is for {len(impossible)} of {len(counts)} distinct samples"
        )
    total = math.fsum(law.values())
    if abs(total - 1) > 1e-4:
        raise InvalidRequest(f"the probabilities add up to {total:.6g}: they must add up to 1")
    possible = [sample for sample, probability in law.items() if probability > 0]
    expected = torch.tensor([law[sample] / total for sample in possible], dtype=torch.float64)
    observed = torch.tensor([counts[sample] for sample in possible], dtype=torch.float64)
    each = _log_cell_capitals(observed, expected)
    together = _log_joint_capital(observed, expected)
    log_p = -float(np.logaddexp(log_mean_exp(each.numpy()), together) - math.log(2))
    if log_p > math.log(level):
        return
    worst = each.argsort(descending=True)[:WORST].tolist()
    lines = [
        f"  {possible[index]!r}: {int(observed[index])} times, "
        f"expected {float(expected[index]) * count:.6g}"
        for index in worst
    ]
    raise AssertionError(
        f"the samples don't have these probabilities: n = {count}, {len(possible)} possible, "
        f"{len(counts)} seen, p <= {_power(log_p)} (level {level:g}); most off are\n"
        + "\n".join(lines)
    )


def _log_capital(values: Floats, mean: float) -> float:
    """The log of what betting on non-negative values of this mean gives: large if they exceed it."""
    if mean <= 0:
        return math.inf if bool((values > 0).any()) else 0.0
    shares = np.geomspace(1 / len(values), 1, STAKES)
    gains = values / mean - 1
    with np.errstate(divide="ignore"):
        return log_mean_exp(np.array([np.log1p(share * gains).sum() for share in shares]))


def _log_joint_capital(observed: Tensor, expected: Tensor) -> float:
    """The log of the Dirichlet mixture's likelihood ratio, over concentrations from diffuse to narrow."""
    logs = [
        _log_ratio(observed, concentration * expected, expected).sum()
        + math.lgamma(concentration)
        - math.lgamma(concentration + int(observed.sum()))
        for concentration in _concentrations(int(observed.sum()), len(expected))
    ]
    return log_mean_exp(np.array([float(value) for value in logs]))


def _log_cell_capitals(observed: Tensor, expected: Tensor) -> Tensor:
    """The log likelihood ratio of each count by itself, the category against all others: ``[k]``.

    Mixtures around the stated probability see small deviations of common samples, and Jeffreys' prior
    any deviation of rare ones.
    """
    count = int(observed.sum())
    others = (1 - expected).clamp(min=0)
    half = torch.full_like(expected, 0.5)
    priors = [(half, half)]
    priors += [
        (concentration * expected, concentration * others)
        for concentration in _concentrations(count, len(expected))
    ]
    logs = []
    for here, there in priors:
        concentration = here + there
        logs.append(
            _log_ratio(observed, here, expected)
            + _log_ratio(count - observed, there, others)
            + torch.lgamma(concentration)
            - torch.lgamma(concentration + count)
        )
    return torch.stack(logs).logsumexp(0) - math.log(len(logs))


def _log_ratio(observed: Tensor, prior: Tensor, expected: Tensor) -> Tensor:
    """Per category: log Gamma(a + c) / Gamma(a) - c log p, which is 0 where c is."""
    logs = torch.lgamma(prior + observed) - torch.lgamma(prior) - observed * expected.log()
    return torch.where(observed > 0, logs, 0.0)


def _concentrations(count: int, categories: int) -> list[float]:
    """From one that makes nothing of the stated probabilities to one that differs from them by less than
    so many samples can show."""
    most = max(16.0, 16.0 * count * categories)
    return [4.0**power for power in range(math.ceil(math.log(most, 4)) + 1)]


def _diagnosis(values: Floats, mean: float, exact: float, supposed: bool) -> str:
    if values.std() <= 1e-9 * abs(mean):
        return "every estimate is the same: a constant factor is wrong, or weights are left out"
    total = float(values.sum())
    share = float(values.max()) / total if total > 0 else 0.0
    if mean > exact:
        return "too large: a weight left out or counted twice, or not reset where particles are resampled"
    if supposed and share * len(values) > 20:
        return (
            f"too small, but one run in {len(values)} has {share:.0%} of the total: these may be too few "
            "runs of a heavy tail; give highest=, or more runs"
        )
    return "too small: texts that never come, a weight multiplied in twice, or particles dropped"


def _array(estimates: Iterable[float] | Floats | Tensor) -> Floats:
    if isinstance(estimates, Tensor):
        estimates = estimates.detach().cpu().double().numpy()
    elif not isinstance(estimates, np.ndarray | Sequence):
        estimates = list(estimates)
    try:
        values = np.asarray(estimates, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the estimates are not numbers: {error}") from error
    if values.ndim != 1:
        raise InvalidRequest(
            f"the estimates have the shape {values.shape}: give one number for each run"
        )
    return values


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InvalidRequest(
            f"level is {level}: give a probability above 0 and below 1, such as 1e-6"
        )


def _power(log_p: float) -> str:
    """A probability by its logarithm, also where it is too small for a float."""
    if log_p == -math.inf:
        return "0"
    return f"{math.exp(log_p):.2g}" if log_p > -600 else f"1e{math.floor(log_p / math.log(10))}"
