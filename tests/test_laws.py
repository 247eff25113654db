"""The assertions that hold a sampler to its laws: how often they fail a right one, and what they find.

False alarms are counted at the level 0.05 over thousands of seeds, of numbers as skewed as weights get.
The bets behind them are conservative, so that a count above the level would be a defect and no bad luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from genrt.testing import assert_samples_from, assert_unbiased

Draws = Callable[[Generator, int], NDArray[np.float64]]


def alarm(check: Callable[..., None], *args: Any, **options: Any) -> str | None:
    """What the assertion says, or ``None`` if it holds."""
    try:
        check(*args, **options)
    except AssertionError as error:
        return str(error)
    return None


def mixed(*values: float, weights: tuple[float, ...]) -> tuple[Draws, float]:
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return lambda rng, count: rng.choice(values, size=count, p=weights), mean


SKEWED: dict[str, tuple[Draws, float]] = {
    "rare ones": mixed(0.0, 1.0, weights=(0.99, 0.01)),
    "hardly ever one": mixed(0.0, 1.0, weights=(1 - 1e-9, 1e-9)),
    "nearly always one": mixed(1.0, 0.0, weights=(0.995, 0.005)),
    "small, and rarely large": mixed(0.01, 1.0, weights=(0.99, 0.01)),
    "many scales": mixed(1.0, 0.1, 1e-3, 1e-6, 0.0, weights=(0.003, 0.03, 0.1, 0.3, 0.567)),
    "beta": (lambda rng, count: rng.beta(0.05, 2, count), 0.05 / 2.05),
    "product of masses": (
        lambda rng, count: rng.beta(0.3, 0.3, (count, 6)).prod(axis=1),
        2.0**-6,
    ),
    "constant": (lambda rng, count: np.full(count, 0.3), 0.3),
}


@pytest.mark.parametrize("count", [1, 2, 20, 400])
@pytest.mark.parametrize("name", SKEWED)
def test_right_estimates_fail_no_more_often_than_the_level(name: str, count: int) -> None:
    draws, mean = SKEWED[name]
    alarms = 0
    for seed in range(500):
        estimates = draws(np.random.default_rng(seed), count)
        alarms += alarm(assert_unbiased, estimates, mean, level=0.05) is not None
    assert alarms <= 0.05 * 500


def test_too_large_a_mean_is_found_without_a_bound_at_a_level_that_holds() -> None:
    alarms = 0
    for seed in range(1000):
        estimates = np.exp(2 * np.random.default_rng(seed).standard_normal(100))
        alarms += (
            alarm(assert_unbiased, estimates, math.exp(2), level=0.05, highest=math.inf) is not None
        )
    assert alarms <= 0.05 * 1000


UNEVEN = {"common": 0.7, "rarer": 0.2, "rare": 0.0999, "seldom": 1e-4, "never": 1e-30, "zero": 0.0}
MANY = {index: 1 / (index + 1) / 7.485471 for index in range(1000)}
LAWS: dict[str, dict[Any, float]] = {
    "uneven": UNEVEN,
    "many": MANY,
    "sure": {"x": 1.0, "y": 0.0},
    "fair": {True: 0.5, False: 0.5},
}


def sampled(law: dict[Any, float], rng: Generator, count: int) -> list[Any]:
    weights = np.array(list(law.values()))
    return [list(law)[i] for i in rng.choice(len(law), size=count, p=weights / weights.sum())]


@pytest.mark.parametrize("count", [1, 10, 300])
@pytest.mark.parametrize("name", LAWS)
def test_right_samples_fail_no_more_often_than_the_level(name: str, count: int) -> None:
    law = LAWS[name]
    alarms = 0
    for seed in range(250):
        samples = sampled(law, np.random.default_rng(seed), count)
        alarms += alarm(assert_samples_from, samples, law, level=0.05) is not None
    assert alarms <= 0.05 * 250
