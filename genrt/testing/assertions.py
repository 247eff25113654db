"""Assertions about the samples and weights of correct samplers, with a guaranteed error level.

A correct sampler fails with probability at most the level, for any number of runs and any distribution
within the stated bounds: the assertions are bets (``genrt.testing.bets``), not approximations.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.inference.resampling import Floats, log_mean_exp
from genrt.numbers import check_float
from genrt.testing import bets

ROUNDING = 1e-5
"""The relative error of probabilities from float32 rows, with a margin."""

WORST = 5
"""The number of samples that a message shows, the most deviating first."""

WATCHED = 100
"""The likeliest weighted samples that are tested one by one; the others are tested together."""

LOGARITHMS = 690.0
"""Evidence from exp(-LOGARITHMS) to exp(LOGARITHMS) can be computed with as floats."""


class CannotTell(UserWarning):
    """A warning: the mean is too small, and there is no bound. Either the sampler is wrong, or a rare and
    heavy estimate did not occur; ``highest=`` would decide it."""


def assert_unbiased(
    estimates: Iterable[float] | Floats | Tensor,
    exact: float,
    *,
    level: float = 1e-6,
    lowest: float = 0.0,
    highest: float | None = 1.0,
) -> None:
    """Raise AssertionError if the distribution of these estimates has another mean than ``exact``.

    The estimates come from independent runs: the evidence of each run of SMC, or the weight of each
    particle of an importance sampler, in which particles never interact. A wrong sampler is detected if
    its bias is more than about 6 standard errors (at the default level). For too small a mean, n times
    the bias must also be more than some 30 times ``highest - exact``.

    Args:
        estimates: the estimates themselves, not their logarithms. All may be equal.
        exact: the correct mean.
        lowest: a lower bound of all estimates; for weights, 0.
        highest: an upper bound of all estimates. Weights made of probabilities, as with a constraint, are
            at most 1; with a potential, at most e to the power of its largest value. Without a bound only
            too large a mean fails. ``None`` means that no bound is known, and warns if the mean looks too
            small; ``math.inf`` means that there is no bound, and does not warn.

    Raises:
        AssertionError: the mean differs, or an estimate is not finite or out of bounds.
        InvalidRequest: there are no estimates, or an argument is out of its range.

    Warns:
        CannotTell: the mean looks too small, and ``highest`` is ``None``.
    """
    needed = _needed_capital(level)
    values = _estimates(estimates)
    exact, lowest = check_float("exact", exact), check_float("lowest", lowest)
    at_most = _bound(highest)
    slack = ROUNDING * abs(exact)
    if not lowest - ROUNDING * abs(lowest) <= exact <= at_most + ROUNDING * abs(at_most):
        raise InvalidRequest(
            f"exact is {exact:g}, which is not between lowest={lowest:g} and highest={at_most:g}: these "
            "are the least and the most that an estimate can be"
        )
    _check_bounds("estimate", values, lowest - slack, at_most + ROUNDING * abs(at_most))
    exact = min(max(exact, lowest), at_most)
    capital = bets.on_mean(values, exact, lowest=lowest, highest=at_most, slack=slack)
    if capital >= needed:
        raise AssertionError(
            f"the estimates are biased: {_means(values, exact)}, p <= {_p(capital)} (level {level:g}).\n"
            f"{_diagnosis(values, exact)}"
        )
    if highest is None:
        supposed = _supposed(values, exact, lowest)
        if bets.on_smaller_mean(values, exact, highest=supposed, slack=slack) >= needed:
            _warn_caller(f"whether the estimates are biased: {_means(values, exact)}")


def assert_variance_bounded(
    estimates: Iterable[float] | Floats | Tensor,
    exact: float,
    *,
    relative_variance: float,
    level: float = 1e-6,
) -> None:
    """Raise AssertionError if estimates do not have the mean ``exact``, or have a larger variance than
    ``relative_variance * exact**2``.

    It detects a sampler that gives a small part of the evidence in nearly all runs, and the rest in runs
    so rare that a test never sees them. Take the bound from a simple sampler whose variance is known by
    enumeration, divided by the number of particles.

    Args:
        estimates: of independent runs, at least 0, themselves and not their logarithms.
        exact: the correct mean, above 0.
        relative_variance: the largest correct variance of ``estimate / exact``, above 0.

    Raises:
        AssertionError: the mean differs, the variance is larger, or an estimate is negative or not
            finite. Correct estimates fail with probability at most ``level``.
        InvalidRequest: there are no estimates, or an argument is out of its range.
    """
    needed = _needed_capital(level)
    values = _estimates(estimates)
    for name, number in {"exact": exact, "relative_variance": relative_variance}.items():
        if check_float(name, number) <= 0:
            raise InvalidRequest(f"{name} is {number:g}: give a number above 0")
    slack = ROUNDING
    _check_bounds("estimate", values, 0.0, math.inf)
    ratios, bound = values / exact, float(relative_variance)
    errors = np.maximum(np.abs(ratios - 1) - slack, 0.0) ** 2
    capitals = [
        # The slack adds a little more than 4 times itself to the second moment.
        bets.on_smaller_mean_by_variance(ratios + slack, 1.0, relative_variance=bound + 5 * slack),
        bets.on_larger_mean(ratios, 1 + slack),
        bets.on_larger_mean(errors, bound),
    ]
    capital = bets.mixture(*capitals)
    if capital >= needed:
        raise AssertionError(
            f"the estimates have another mean, or more variance than they may: {_means(values, exact)}, "
            f"squared relative error {float(errors.mean()):.4g}, at most {bound:.4g}, "
            f"p <= {_p(capital)} (level {level:g}).\n"
            + (
                "Too large a variance: some estimates are far from the mean."
                if capitals[2] == max(capitals)
                else _diagnosis(values, exact)
            )
        )


def assert_samples_from(
    samples: Iterable[Hashable], probabilities: Mapping[Any, float], *, level: float = 1e-6
) -> None:
    """Raise AssertionError if independent samples do not have these probabilities.

    A sample of probability 0 fails at once. For weighted samples, use ``assert_weighted_samples_from``.

    Args:
        samples: one hashable value for each independent draw.
        probabilities: of each possible sample; they add up to 1.

    Raises:
        AssertionError: the probabilities differ; the message shows the most deviating samples.
        InvalidRequest: there are no samples, or the probabilities are not a distribution.
    """
    needed = _needed_capital(level)
    exact = _distribution(probabilities)
    try:
        counts = Counter(samples)
    except TypeError as error:
        raise InvalidRequest(
            f"the samples can't be counted, make them hashable: {error}"
        ) from error
    count = counts.total()
    if not count:
        raise InvalidRequest("there are no samples: give some hundred")
    for sample, times in counts.items():
        if sample not in exact:
            raise AssertionError(
                f"{sample!r} came {times} of {count} times, and its probability is 0"
            )
    observed = torch.tensor([counts[sample] for sample in exact], dtype=torch.float64)
    expected = torch.tensor(list(exact.values()), dtype=torch.float64)
    each = bets.on_each_count(observed, expected)
    capital = bets.mixture(log_mean_exp(each.numpy()), bets.on_all_counts(observed, expected))
    if capital >= needed:
        names = list(exact)
        worst = "\n".join(
            f"  {names[index]!r}: {counts[names[index]]} times, "
            f"expected {count * float(expected[index]):.4g}"
            for index in each.argsort(descending=True)[:WORST].tolist()
        )
        raise AssertionError(
            f"the samples have other probabilities: n = {count}, of {len(exact)} that can come "
            f"{len(counts)} did, p <= {_p(capital)} (level {level:g}). Most off are\n{worst}"
        )


def assert_weighted_samples_from(
    runs: Iterable[tuple[Sequence[Hashable], Sequence[float] | Floats | Tensor]],
    probabilities: Mapping[Any, float],
    *,
    log_evidence: float,
    level: float = 1e-6,
    highest: float | None = 1.0,
) -> None:
    """Raise AssertionError if the weighted samples of independent runs are not properly weighted.

    In properly weighted runs, a run's N samples x_i and weights w_i have

        E[(1/N) sum_i w_i] = Z    and    E[(1/N) sum_i w_i 1(x_i = x)] = Z probability(x) for each x.

    Importance sampling and SMC guarantee this for any N, while normalized weights have a bias that
    depends on N (Liu & Chen 1998, *Sequential Monte Carlo methods for dynamic systems*). A positive
    weight on a sample of probability 0 fails at once.

    Args:
        runs: for each independent run, its samples and their unnormalized log-weights. Dead samples have
            -inf and do not count. For SMC: ``(result.token_ids, result.log_weights)``.
        probabilities: of each possible sample; they add up to 1. Empty if Z is 0.
        log_evidence: log Z.
        highest: an upper bound of the mean weight of a run, or ``None``; as in ``assert_unbiased``.

    Raises:
        AssertionError: the samples are not properly weighted, or a weight is NaN; the message shows the
            largest deviations.
        InvalidRequest: there are no runs, or an argument is out of its range.

    Warns:
        CannotTell: a mean looks too small, and ``highest`` is ``None``.
    """
    needed = _needed_capital(level)
    at_most = _bound(highest)
    evidence = _evidence(log_evidence)
    exact = _distribution(probabilities) if probabilities or evidence > 0 else {}
    watched = {sample: place for place, sample in enumerate(list(exact)[:WATCHED])}
    rows = []
    for samples, log_weights in runs:
        logs = _float_numbers("log-weights", log_weights)
        if len(logs) != len(samples) or not len(logs):
            raise InvalidRequest(
                f"a run has {len(samples)} samples and {len(logs)} log-weights: give one for each, of at "
                "least one sample"
            )
        _check_bounds("log-weight", logs, -math.inf, math.inf)
        row = np.zeros(len(watched) + 1)
        with np.errstate(over="ignore"):
            weights = np.exp(logs) / len(logs)
        for sample, log_weight, weight in zip(samples, logs, weights, strict=True):
            if log_weight > -math.inf and sample not in exact:
                raise AssertionError(
                    f"{sample!r} has the log-weight {log_weight:.4g}, and its probability is 0"
                )
            if weight > 0:
                row[watched.get(sample, len(watched))] += weight
        rows.append(row)
    if not rows:
        raise InvalidRequest("there are no runs: give some hundred")
    table = np.array(rows)
    names = ["the evidence", *(f"the weight of {sample!r}" for sample in watched)]
    names.append("that of all others")
    parts = [evidence * exact[sample] for sample in watched]
    means = [evidence, *parts, max(evidence - math.fsum(parts), 0.0)]
    columns = [table.sum(axis=1), *table.T]
    if len(exact) <= WATCHED:
        names, means, columns = names[:-1], means[:-1], columns[:-1]
    if evidence > at_most * (1 + ROUNDING):
        raise InvalidRequest(
            f"the evidence is {evidence:g}, above highest={at_most:g}: say by highest= what the mean "
            "weight of a run can be at most"
        )
    _check_bounds("mean weight", columns[0], 0.0, at_most * (1 + ROUNDING))
    capitals = [
        bets.on_mean(
            values, min(mean, at_most), lowest=0.0, highest=at_most, slack=ROUNDING * evidence
        )
        for values, mean in zip(columns, means, strict=True)
    ]
    if _mixture_capital(capitals) >= needed:
        place = int(np.argmax(capitals))
        raise AssertionError(
            f"the samples are not properly weighted: p <= {_p(_mixture_capital(capitals))} "
            f"(level {level:g}). Most off are\n{_most_off(names, columns, means, capitals)}\n"
            f"{_diagnosis(columns[place], means[place])}"
        )
    if highest is None:
        supposed = _supposed(columns[0], evidence, 0.0)
        small = [
            bets.on_smaller_mean(values, mean, highest=supposed, slack=ROUNDING * evidence)
            for values, mean in zip(columns, means, strict=True)
        ]
        if _mixture_capital(small) >= needed:
            _warn_caller(
                "whether the samples are properly weighted. Most off are\n"
                f"{_most_off(names, columns, means, small)}\nThat is too small, as far as was seen"
            )


def _mixture_capital(capitals: Sequence[float]) -> float:
    """Return one log-capital: half of it bet on the first mean, the other half on all others."""
    return bets.mixture(capitals[0], bets.mixture(*capitals[1:]) if capitals[1:] else 0.0)


def _most_off(
    names: Sequence[str],
    columns: Sequence[Floats],
    means: Sequence[float],
    capitals: Sequence[float],
) -> str:
    order = sorted(range(len(names)), key=lambda place: -capitals[place])[:WORST]
    return "\n".join(f"  {names[place]}: {_means(columns[place], means[place])}" for place in order)


def _supposed(values: Floats, mean: float, lowest: float) -> float:
    """Return a guess of the largest value. It depends on the values, so it justifies only a warning."""
    return 2 * max(float(values.max()), mean) - lowest


def _warn_caller(what: str) -> None:
    """Warn the caller of an assertion."""
    warnings.warn(
        f"cannot tell {what}. What is missing may be rare and heavy, or never come: say by highest= what "
        "can come at most, or give more runs",
        CannotTell,
        stacklevel=3,
    )


def _means(values: Floats, exact: float) -> str:
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    if error < 1e-12 * abs(mean):
        error = 0.0
    return f"mean {mean:.6g}, exact {exact:.6g}, standard error {error:.2g}, n = {len(values)}"


def _diagnosis(values: Floats, exact: float) -> str:
    """Return a sentence about the likely mistake."""
    mean = float(values.mean())
    if float(values.max()) - float(values.min()) <= ROUNDING * abs(mean):
        return "All are the same: a constant factor is wrong or left out."
    if mean > exact:
        return "Too large: a weight may be left out, or not reset where particles are resampled."
    return "Too small: some texts may never come, or a weight is multiplied in twice."


def _check_bounds(name: str, values: Floats, lowest: float, highest: float) -> None:
    outside = ~((values >= lowest) & (values <= highest) & (values < math.inf))
    if outside.any():
        index = int(outside.argmax())
        value = float(values[index])
        if not math.isfinite(value):
            raise AssertionError(f"{name} {index} is {value}, which no right one ever is")
        raise AssertionError(
            f"{name} {index} is {value:.6g}, and must be from {lowest:.6g} to {highest:.6g}: either it "
            "is wrong, or more than this can be; then say so by lowest= and highest="
        )


def _needed_capital(level: float) -> float:
    """Return the log-capital that a correct sampler's bets reach with probability at most ``level``."""
    if not 0 < check_float("level", level) < 1:
        raise InvalidRequest(f"level is {level}: give a probability above 0 and below 1, as 1e-6")
    return -math.log(level)


def _bound(highest: float | None) -> float:
    """Return the upper bound, infinity if no bound is known."""
    return math.inf if highest is None or highest == math.inf else check_float("highest", highest)


def _evidence(log_evidence: float) -> float:
    if log_evidence == -math.inf:
        return 0.0
    if abs(check_float("log_evidence", log_evidence)) > LOGARITHMS:
        raise InvalidRequest(
            f"log_evidence is {log_evidence:g}, whose exponential is no float: add a constant to it and "
            f"to the log-weights, so that it is from -{LOGARITHMS:g} to {LOGARITHMS:g}"
        )
    return math.exp(log_evidence)


def _distribution(probabilities: Mapping[Any, float]) -> dict[Any, float]:
    """Return the positive probabilities, likeliest first, normalized."""
    if any(not 0 <= probability < math.inf for probability in probabilities.values()):
        raise InvalidRequest("a probability is negative or no finite number")
    total = math.fsum(probabilities.values())
    if abs(total - 1) > 1e-4:
        raise InvalidRequest(f"the probabilities add up to {total:.6g}: they must add up to 1")
    ranked = sorted(probabilities.items(), key=lambda entry: -entry[1])
    return {sample: probability / total for sample, probability in ranked if probability > 0}


def _estimates(estimates: Iterable[float] | Floats | Tensor) -> Floats:
    values = _float_numbers("estimates", estimates)
    if not len(values):
        raise InvalidRequest("there are no estimates: give those of some hundred runs")
    return values


def _float_numbers(name: str, values: Iterable[float] | Floats | Tensor) -> Floats:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        numbers = np.array(values if isinstance(values, np.ndarray) else list(values), np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the {name} are no numbers: {error}") from error
    if numbers.ndim != 1:
        raise InvalidRequest(f"the {name} have the shape {numbers.shape}: give a list of numbers")
    return numbers


def _p(log_capital: float) -> str:
    """Return the p-value of a capital as text, also one that is too small for a float."""
    if log_capital < 600:
        return f"{min(math.exp(-log_capital), 1.0):.2g}"
    return "0" if log_capital == math.inf else f"1e-{math.floor(log_capital / math.log(10))}"
