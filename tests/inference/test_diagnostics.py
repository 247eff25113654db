"""How well chains mix: against Markov chains whose answer is known, and what is not claimed to be known.

Of a stationary chain with autocorrelations r^t the effective sample size is T (1 - r) / (1 + r), up to
what its ends take off; of the two-state chain that is so for r = 1 - a - b, with a and b the
probabilities of leaving its states. Fixed seeds; estimates are averaged over many runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference import Result
from genrt.inference.estimates import ChainStatistics, diagnose

Floats: TypeAlias = NDArray[np.float64]


def two_states(rng: Generator, chains: int, steps: int, share: float, r: float) -> Floats:
    """Stationary chains on 0 and 1, with this share of ones and autocorrelation ``r``."""
    states = np.empty((chains, steps))
    states[:, 0] = rng.random(chains) < share
    for step in range(1, steps):
        redrawn = rng.random(chains) < share
        states[:, step] = np.where(rng.random(chains) < r, states[:, step - 1], redrawn)
    return states


def autoregressive(rng: Generator, chains: int, steps: int, r: float) -> Floats:
    numbers = rng.standard_normal((chains, steps))
    for step in range(1, steps):
        numbers[:, step] = r * numbers[:, step - 1] + math.sqrt(1 - r * r) * numbers[:, step]
    return numbers


Chains: TypeAlias = Callable[[Generator, int, int, float], Floats]
MARKOV: dict[str, Chains] = {
    "two states": lambda rng, chains, steps, r: two_states(rng, chains, steps, 0.5, r),
    "two uneven states": lambda rng, chains, steps, r: two_states(rng, chains, steps, 0.2, r),
    "autoregressive": autoregressive,
    "heavy tails": lambda rng, chains, steps, r: np.tan(
        1.5 * np.tanh(autoregressive(rng, chains, steps, r))
    ),
}


@pytest.mark.parametrize("r", [0.0, 0.9])
@pytest.mark.parametrize(("chains", "steps"), [(1, 4000), (50, 80)])
@pytest.mark.parametrize("name", MARKOV)
def test_the_effective_sample_size_is_that_of_the_theory(
    name: str, chains: int, steps: int, r: float
) -> None:
    found = [
        diagnose(MARKOV[name](np.random.default_rng(seed), chains, steps, r)) for seed in range(12)
    ]
    exact = chains * steps * (1 - r) / (1 + r)
    # Halves of 40 steps hold fewer lags of r = 0.9 than there are.
    least, most = (0.5, 1.4) if r == 0.9 and steps == 80 else (0.85, 1.1)
    assert least * exact < statistics.mean(each.ess_bulk for each in found) < 1.15 * exact
    assert all(each.ess_bulk <= chains * steps for each in found)
    assert chains == 1 or all(each.r_hat < most for each in found)


def by_definition(numbers: Floats) -> tuple[float, float, float]:
    """Both ESS and R-hat of finite numbers, by loops over the docstring's formulas."""
    chains, steps = numbers.shape
    half = steps // 2

    def scores_of(values: Floats) -> list[list[float]]:
        flat = sorted(values.ravel().tolist())
        scores = {}
        for value in flat:
            places = [place + 1 for place, other in enumerate(flat) if other == value]
            share = (statistics.mean(places) - 3 / 8) / (len(flat) + 1 / 4)
            scores[value] = statistics.NormalDist().inv_cdf(share)
        return [[scores[value] for value in row] for row in halves(values)]

    def halves(values: Floats) -> list[list[float]]:
        return [row[:half] for row in values.tolist()] + [row[-half:] for row in values.tolist()]

    def spread(rows: list[list[float]]) -> tuple[float, float]:
        within = statistics.mean(statistics.variance(row) for row in rows)
        between = statistics.variance([statistics.mean(row) for row in rows])
        return within, (half - 1) / half * within + between

    def r_hat(rows: list[list[float]]) -> float:
        within, total = spread(rows)
        return math.sqrt(total / within)

    def covariance(row: list[float], lag: int) -> float:
        mean = statistics.mean(row)
        return float(
            sum((a - mean) * (b - mean) for a, b in zip(row, row[lag:], strict=False)) / half
        )

    def ess(rows: list[list[float]]) -> float:
        within, total = spread(rows)
        correlations = [
            1 - (within - statistics.mean(covariance(row, lag) for row in rows)) / total
            if lag
            else 1.0
            for lag in range(half)
        ]
        tau, least = -1.0, math.inf
        for lag in range(0, half - 1, 2):
            pair = correlations[lag] + correlations[lag + 1]
            if pair <= 0:
                break
            least = min(least, pair)
            tau += 2 * least
        return float(2 * chains * half / max(tau, 1.0))

    rows = scores_of(numbers)
    folded = scores_of(np.abs(numbers - np.median(numbers)))
    return ess(rows), ess(halves(numbers)), max(r_hat(rows), r_hat(folded))


@pytest.mark.parametrize(("chains", "steps"), [(4, 5), (2, 101), (9, 20)])
@pytest.mark.parametrize("r", [0.0, 0.7, 0.98])
def test_both_numbers_are_those_of_the_formulas(chains: int, steps: int, r: float) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        for numbers in (
            autoregressive(rng, chains, steps, r),
            np.round(autoregressive(rng, chains, steps, r), 1),
            autoregressive(rng, chains, steps, r) + np.arange(chains)[:, None],
        ):
            found = diagnose(numbers)
            numbers_found = found.ess_bulk, found.ess_mean, found.r_hat
            assert numbers_found == pytest.approx(by_definition(numbers), rel=1e-9)


@pytest.mark.parametrize("factor", [1e-300, 1e300])
def test_scale_and_infinities_make_no_difference(factor: float) -> None:
    numbers = autoregressive(np.random.default_rng(1), 5, 40, 0.5)
    expected = diagnose(numbers)
    assert diagnose(numbers * factor).ess_bulk == pytest.approx(expected.ess_bulk)
    assert diagnose(numbers * factor).ess_mean == pytest.approx(expected.ess_mean)
    far = diagnose(np.where(numbers == numbers.max(), math.inf, numbers))
    assert (far.ess_bulk, far.r_hat) == (expected.ess_bulk, expected.r_hat)
    assert math.isnan(far.ess_mean)
    half = np.where(numbers < 0, -math.inf, math.inf)
    assert diagnose(half).ess_bulk == pytest.approx(diagnose(np.sign(numbers)).ess_bulk)


UNKNOWN: dict[str, Any] = {
    "nothing": np.zeros((0, 0)),
    "no chain": np.zeros((0, 5)),
    "one value": np.full((8, 100), 3.0),
    "one value but in the middle": np.array([[1.0] * 3 + [2.0] + [1.0] * 3] * 9),
    "three steps": np.random.default_rng(0).random((50, 3)),
    "three chains of 99 steps": np.random.default_rng(0).random((3, 99)),
    "not a number": np.where(np.arange(400).reshape(4, 100) == 7, math.nan, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_not_claimed(name: str) -> None:
    found = diagnose(UNKNOWN[name])
    assert math.isnan(found.ess_bulk)
    assert math.isnan(found.r_hat)


def test_one_chain_does_not_know_whether_another_would_agree() -> None:
    found = diagnose(autoregressive(np.random.default_rng(0), 1, 500, 0.5))
    assert 100 < found.ess_bulk < 250
    assert math.isnan(found.r_hat)


def test_of_one_step_each_chain_is_one_independent_value() -> None:
    assert diagnose(np.random.default_rng(0).random((7, 1))).ess_bulk == 7


# -- functions of values ----------------------------------------------------------------------


def statistics_of(values: list[list[Any]], **options: Any) -> Any:
    zeros = np.zeros((len(values), len(values[0])))
    given: dict[str, Any] = {
        "log_weights": zeros, "lengths": zeros.astype(int), "acceptance": zeros[:, 0], "missing": 0,
    }  # fmt: skip
    return ChainStatistics(tuple(map(tuple, values)), **(given | options))


def test_chains_are_diagnosed_by_functions_of_their_values() -> None:
    states = two_states(np.random.default_rng(0), 4, 200, 0.5, 0.5)
    chains = statistics_of([["yes" if state else "no" for state in chain] for chain in states])
    values = tuple(value for step in zip(*chains.values, strict=True) for value in step)
    result = Result(values, ((),) * 800, values, np.zeros(800), math.nan, chains=chains)
    functions: list[Callable[[Any], Any]] = [
        len, lambda value: value == "yes", lambda value: np.float32(value == "no"),
    ]  # fmt: skip
    for function in functions:
        found, expected = result.diagnose(function), diagnose(states)
        assert found.ess_bulk == pytest.approx(expected.ess_bulk)
        assert found.r_hat == pytest.approx(expected.r_hat)
    assert math.isnan(result.diagnose(lambda value: 1.0).ess_bulk)
    wrong: list[Callable[[Any], Any]] = [str, lambda value: None, list]
    for function in wrong:
        with pytest.raises(InvalidRequest, match="a function that gives numbers"):
            result.diagnose(function)
    with pytest.raises(InvalidRequest, match="MetropolisHastings has chains"):
        replace(result, chains=None).diagnose(len)


def test_the_worst_of_weights_lengths_and_common_values_is_reported() -> None:
    rng = np.random.default_rng(0)
    quick, slow = rng.integers(0, 3, (4, 300)).astype(float), two_states(rng, 4, 300, 0.5, 0.95)
    alone = statistics_of(quick.tolist())
    assert alone.ess > 800
    assert alone.r_hat < 1.02
    by_value = statistics_of(slow.tolist())
    for worse in (
        statistics_of(quick.tolist(), log_weights=slow),
        statistics_of(quick.tolist(), lengths=slow.astype(int)),
        by_value,
    ):
        assert worse.ess == pytest.approx(diagnose(slow).ess_bulk)
        assert worse.r_hat == pytest.approx(diagnose(slow).r_hat)
    unhashable = statistics_of([[[value] for value in chain] for chain in slow.tolist()])
    assert (unhashable.ess, unhashable.r_hat) == (by_value.ess, by_value.r_hat)
