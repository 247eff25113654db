"""The assertions that hold a sampler to its laws: how often they fail a right one, and what they find.

False alarms are counted at the level 0.05 over 40 seeds, of numbers as skewed as weights get.
The bets behind them are conservative, so that a count above the level would be a defect and no bad luck.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.testing import (
    CannotTell,
    assert_samples_from,
    assert_unbiased,
    assert_variance_bounded,
    assert_weighted_samples_from,
)

Draws = Callable[[Generator, int], NDArray[np.float64]]
Run = tuple[list[Any], list[float]]
Given = tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]
"""An assertion with its arguments."""


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
    "product of masses": (lambda rng, count: rng.beta(0.3, 0.3, (count, 6)).prod(1), 2.0**-6),
    "constant": (lambda rng, count: np.full(count, 0.3), 0.3),
}
VARIANCES = {
    "rare ones": 99.0,
    "hardly ever one": 1e9,
    "nearly always one": 0.005 / 0.995,
    "small, and rarely large": 0.01 * 0.99 * 0.99**2 / 0.0199**2,
    "many scales": (0.003 + 0.03e-2 + 0.1e-6 + 0.3e-12) / (0.003 + 0.003 + 1e-4 + 3e-7) ** 2 - 1,
    "beta": 2 / 0.05 / 3.05,
    "product of masses": (2 * 0.65 / 0.8) ** 6 - 1,
    "constant": 1e-9,
}
"""The relative variances of these."""
UNBOUNDED: dict[str, tuple[Draws, float]] = SKEWED | {
    "log-normal": (lambda rng, count: np.exp(2 * rng.standard_normal(count)), math.exp(2)),
    "no variance": (lambda rng, count: 1 + rng.pareto(1.2, count), 1.2 / 0.2),
    "rare and heavy": mixed(0.0, 1e6, weights=(1 - 1e-6, 1e-6)),
    "a small part rare and heavy": mixed(1.0, 1e9, weights=(1 - 1e-9, 1e-9)),
}


def sampled(law: dict[Any, float], rng: Generator, count: int) -> list[Any]:
    weights = np.array(list(law.values()))
    return [list(law)[i] for i in rng.choice(len(law), size=count, p=weights / weights.sum())]


UNEVEN = {"common": 0.7, "rarer": 0.2, "rare": 0.0999, "seldom": 1e-4, "never": 1e-30, "zero": 0.0}
LAWS: dict[str, dict[Any, float]] = {
    "uneven": UNEVEN,
    "many": {index: 1 / (index + 1) / 7.485471 for index in range(1000)},
    "sure": {"x": 1.0, "y": 0.0},
    "fair": {True: 0.5, False: 0.5},
}


def weighted(law: dict[Any, float], rng: Generator, count: int, factor: float = 1.0) -> list[Run]:
    """Runs of three particles, proposed uniformly from ``law`` and a sample that is always dead."""
    names = [*law, "dead"]
    weights = {name: factor * law.get(name, 0.0) * len(names) for name in names}
    runs = []
    for _ in range(count):
        samples = [names[index] for index in rng.integers(len(names), size=3)]
        logs = [math.log(weights[x]) if weights[x] > 0 else -math.inf for x in samples]
        runs.append((samples, logs))
    return runs


TARGET = {"a": 0.6, "b": 0.3, "c": 0.0999, "d": 1e-4, "e": 0.0}
Z = 0.2


def heavy(rng: Generator, count: int) -> Given:
    """Runs of two particles, of which one in ten thousand has nearly all of the weight of "a"."""
    weights = np.where(rng.random((count, 2)) < 1e-4, 5999.0, 1e-4)
    runs = [(["a", "a"], np.log(each).tolist()) for each in weights]
    mean = 0.5999 + 1e-4 * (1 - 1e-4)
    options = {"log_evidence": math.log(mean), "highest": None}
    return assert_weighted_samples_from, (runs, {"a": 1.0}), options


def right(kind: str, name: str, rng: Generator, count: int) -> Given:
    """A law with what obeys it: of estimates, bounded or not, of their variance, samples and weights."""
    if kind == "samples":
        return assert_samples_from, (sampled(LAWS[name], rng, count), LAWS[name]), {}
    if kind == "weights":
        evidence = {"log_evidence": math.log(Z)}
        return assert_weighted_samples_from, (weighted(TARGET, rng, count, Z), TARGET), evidence
    if kind == "heavy weights":
        return heavy(rng, count)
    draws, mean = UNBOUNDED[name]
    estimates = draws(rng, count), mean
    if kind == "variance":
        return assert_variance_bounded, estimates, {"relative_variance": VARIANCES[name]}
    return assert_unbiased, estimates, {"highest": None} if kind == "unbounded" else {}


RIGHT = [("estimates", name) for name in SKEWED] + [("variance", name) for name in SKEWED]
RIGHT += [("unbounded", name) for name in UNBOUNDED] + [("samples", name) for name in LAWS]
RIGHT += [("weights", ""), ("heavy weights", "")]


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize(("kind", "name"), RIGHT)
def test_what_is_right_fails_no_more_often_than_the_level(kind: str, name: str, count: int) -> None:
    alarms = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CannotTell)
        for seed in range(40):
            check, args, options = right(kind, name, np.random.default_rng(seed), count)
            alarms += alarm(check, *args, level=0.05, **options) is not None
    assert alarms <= 0.05 * 40


# -- what is found ----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.7, 0.8, 1.2, 1.3])
def test_a_bias_is_found_that_is_many_standard_errors(factor: float) -> None:
    for seed in range(5):
        estimates = np.random.default_rng(seed).beta(3, 27, 1500)
        assert_unbiased(estimates, 0.1)
        said = str(alarm(assert_unbiased, factor * estimates, 0.1))
        assert said.startswith("the estimates are biased: mean 0.")
        assert ("Too large" in said) == (factor > 1)
        assert ("Too small" in said) == (factor < 1)


@pytest.mark.parametrize(
    ("constant", "exact", "is_right"),
    [
        (1.0, 1.0, True),
        (1.0 - 3e-7, 1.0, True),
        (0.9, 1.0, False),
        (1.0, 0.9, False),
        (0.0, 0.0, True),
        (1e-30, 0.0, False),
        (0.0, 1e-30, True),
        (0.0, 0.5, False),
    ],
)
def test_constant_estimates(constant: float, exact: float, is_right: bool) -> None:
    said = alarm(assert_unbiased, [constant] * 500, exact)
    assert (said is None) == is_right, said
    if said is not None:
        assert "All are the same: a constant factor is wrong" in said
        assert f"mean {constant:g}, exact {exact:g}, standard error 0, n = 500" in said


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        (lambda rng: rng.uniform(0.25, 0.29, 150), "Too small: some texts may never come"),
        (lambda rng: np.where(rng.random(300) < 0.02, 37.0, 0.27), "Too large a variance"),
        (lambda rng: rng.gamma(4.0, 0.5, 200), "Too large: a weight"),
        (lambda rng: np.full(200, 1.5), "All are the same: a constant factor"),
        (lambda rng: [1.0, -0.1], "estimate 1 is -0.1"),
        (lambda rng: [1.0, math.nan], "estimate 1 is nan"),
    ],
)
def test_estimates_that_miss_most_of_the_mean_or_vary_too_much_are_found(
    draws: Callable[[Generator], Any], message: str
) -> None:
    estimates = draws(np.random.default_rng(0))
    assert message in str(alarm(assert_variance_bounded, estimates, 1.0, relative_variance=1.0))


def test_without_a_bound_too_small_a_mean_is_a_warning_and_with_one_it_fails() -> None:
    estimates = [*[0.01] * 1999, 0.4]
    with pytest.warns(
        CannotTell, match=r"cannot tell .* mean 0\.010195, exact 0\.1.* highest="
    ) as seen:
        assert_unbiased(estimates, 0.1, highest=None)
    assert seen[0].filename == __file__
    assert "p <=" not in str(seen[0].message)
    assert_unbiased(estimates, 0.1, highest=math.inf)
    assert_unbiased(estimates, 0.1, highest=1000.0)
    assert "Too small" in str(alarm(assert_unbiased, estimates, 0.1, highest=1.0))
    with pytest.warns(CannotTell):
        assert_unbiased([-0.9] * 1000, -0.5, lowest=-1.0, highest=None)
    said = alarm(assert_unbiased, [-0.9] * 1000, -0.5, lowest=-1.0, highest=0.0)
    assert "All are the same" in str(said)
    # A right sampler's estimates may be 1e6 once in a million runs.
    with pytest.warns(CannotTell, match="cannot tell"):
        assert_unbiased([0.0] * 1000, 1.0, highest=None)
    assert_unbiased([0.0] * 1000, 1.0, highest=1e6)


@pytest.mark.parametrize("highest", [None, math.inf])
def test_without_a_bound_too_large_a_mean_fails(highest: float | None) -> None:
    for estimates, exact, message in (
        ([0.7] * 500 + [0.9] * 500, 0.5, "Too large"),
        ([1e-3] * 9, 1e-320, "All are the same"),
        ([1e-3, 0.0], 1e-320, "Too large"),
    ):
        assert message in str(alarm(assert_unbiased, estimates, exact, highest=highest))


def test_wrong_weights_are_found() -> None:
    rng = np.random.default_rng(0)

    def said(runs: list[Run]) -> str:
        evidence = {"log_evidence": math.log(Z)}
        return str(alarm(assert_weighted_samples_from, runs, TARGET, **evidence))

    assert said(weighted(TARGET, rng, 1000, Z)) == "None"
    assert "the evidence: mean 0.2" in said(weighted(TARGET, rng, 1000, 1.3 * Z))
    swapped = said(weighted(TARGET | {"a": 0.4, "b": 0.5}, rng, 1000, Z))
    assert "p <=" in swapped
    assert "the weight of 'b'" in swapped
    impossible = "'e' has the log-weight -1, and its probability is 0"
    assert said([(["e", "a"], [-1.0, 0.0])]) == impossible


def test_many_rare_samples_are_judged_together() -> None:
    law = {index: 1 / 500 for index in range(500)}
    rng = np.random.default_rng(0)
    assert_weighted_samples_from(weighted(law, rng, 300, Z), law, log_evidence=math.log(Z))
    shifted = {index: (0.2 if index < 100 else 1.2) / 500 for index in range(500)}
    runs = weighted(shifted, rng, 4000, Z)
    said = alarm(assert_weighted_samples_from, runs, law, log_evidence=math.log(Z))
    assert "that of all others: mean" in str(said)


def test_where_nothing_is_possible_all_are_dead() -> None:
    nothing: dict[Any, Any] = {"probabilities": {}, "log_evidence": -math.inf}
    assert_weighted_samples_from([(["a", "b"], [-math.inf] * 2)] * 3, **nothing)
    said = alarm(assert_weighted_samples_from, [(["a"], [-5.0])], **nothing)
    assert "'a' has the log-weight -5" in str(said)


def test_without_a_bound_too_small_weights_are_a_warning_and_with_one_they_fail() -> None:
    runs = [(["a", "b"], [math.log(0.1), math.log(0.3)])] * 3000
    law = {"a": 0.6, "b": 0.4}
    half = {"log_evidence": math.log(0.5)}
    with pytest.warns(CannotTell, match="the weight of 'a': mean 0.05, exact 0.3") as seen:
        assert_weighted_samples_from(runs, law, **half, highest=None)
    assert seen[0].filename == __file__
    assert_weighted_samples_from(runs, law, **half, highest=math.inf)
    assert "All are the same" in str(alarm(assert_weighted_samples_from, runs, law, **half))
    less = {"log_evidence": math.log(0.05), "highest": None}
    assert "All are the same" in str(alarm(assert_weighted_samples_from, runs, law, **less))


@pytest.mark.parametrize("name", ["dropped", "merged", "tilted", "spread"])
def test_wrong_samples_are_found(name: str) -> None:
    law = {index: 1 / 20 for index in range(20)}
    wrong = {
        "dropped": {index: (index != 7) / 19 for index in range(20)},
        "merged": law | {3: 0.1, 4: 0.0},
        "tilted": {index: (index + 10) / 390 for index in range(20)},
        "spread": {index: (0.65 if index % 2 else 1.35) / 20 for index in range(20)},
    }[name]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        assert_samples_from(sampled(law, rng, 1500), law)
        with pytest.raises(AssertionError, match=r"n = 1500, of 20 that can come \d+ did, p <= "):
            assert_samples_from(sampled(wrong, rng, 1500), law)


def test_rare_samples_and_those_that_are_most_off_are_shown() -> None:
    law = {"a": 1 - 1e-30, "b": 1e-30}
    assert_samples_from(["a"] * 1000, law)
    for sample, message in (
        ("b", "'b': 1 times, expected 1e-27"),
        ("c", "'c' came 1 of 1000 times, and its probability is 0"),
    ):
        assert message in str(alarm(assert_samples_from, [*["a"] * 999, sample], law))
    law = {"often": 0.6, "also": 0.3, "less": 0.1}
    samples = ["often"] * 600 + ["also"] * 200 + ["less"] * 200
    said = str(alarm(assert_samples_from, samples, law)).splitlines()
    assert said[0].endswith("Most off are")
    assert said[1] == "  'less': 200 times, expected 100"


@pytest.mark.parametrize("highest", [1.0, math.inf, None])
@pytest.mark.parametrize("estimate", [math.nan, math.inf, -math.inf])
def test_an_estimate_that_is_no_number_is_an_error_of_the_sampler(
    estimate: float, highest: float | None
) -> None:
    with pytest.raises(AssertionError, match=f"estimate 1 is {estimate}, which no right one"):
        assert_unbiased([0.5, estimate], 0.5, highest=highest)


def test_estimates_and_weights_out_of_bounds_are_errors_of_the_sampler() -> None:
    for estimate in (1.1, -0.1):
        with pytest.raises(AssertionError, match=r"estimate 1 is .*from -5e-06 to 1\.00001"):
            assert_unbiased([0.5, estimate], 0.5)
    for weights, said in (
        ([0.0, math.nan], "log-weight 1 is nan"),
        ([0.0, math.inf], "log-weight 1 is inf"),
        ([800.0], "mean weight 0 is inf"),
        ([1.0], r"mean weight 0 is 2\.7"),
    ):
        with pytest.raises(AssertionError, match=said):
            assert_weighted_samples_from(
                [(["a"] * len(weights), weights)], {"a": 1.0}, log_evidence=0.0
            )


# -- wrong use --------------------------------------------------------------------------------

WRONG: list[tuple[Callable[..., None], dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (
        assert_unbiased,
        {"estimates": [0.5], "exact": 0.5},
        [
            ({"estimates": []}, "no estimates"),
            ({"estimates": ["x"]}, "no numbers"),
            ({"estimates": [[0.5, 0.5]]}, "shape"),
            ({"level": 1}, "level is 1"),
            ({"exact": 1.5}, "exact is 1.5, which is not between"),
        ],
    ),
    (
        assert_variance_bounded,
        {"estimates": [1.0], "exact": 1.0, "relative_variance": 1.0},
        [
            ({"exact": 0.0}, "exact is 0: give a number above 0"),
            ({"relative_variance": 0.0}, "relative_variance is 0: give a number above 0"),
        ],
    ),
    (
        assert_samples_from,
        {"samples": ["a"], "probabilities": {"a": 1.0}},
        [
            ({"samples": []}, "no samples"),
            ({"samples": [["a"]]}, "hashable"),
            ({"probabilities": {"a": 0.5}}, "add up to 0.5"),
            ({"probabilities": {}}, "add up to 0"),
            ({"probabilities": {"a": 1.5, "b": -0.5}}, "negative"),
            ({"probabilities": {"a": math.nan}}, "no finite number"),
        ],
    ),
    (
        assert_weighted_samples_from,
        {"runs": [(["a"], [0.0])], "probabilities": {"a": 1.0}, "log_evidence": 0.0},
        [
            ({"runs": []}, "no runs"),
            ({"runs": [(["a"], [0.0, 0.0])]}, "1 samples and 2 log-weights"),
            ({"runs": [([], [])]}, "at least one sample"),
            ({"runs": [(["a"], ["x"])]}, "no numbers"),
            ({"probabilities": {}}, "add up to 0"),
            ({"log_evidence": 1.0}, "the evidence is 2.7.*highest=1"),
            (
                {"log_evidence": -800.0},
                "log_evidence is -800, whose exponential is no float: add a",
            ),
            ({"log_evidence": 800.0, "highest": None}, "log_evidence is 800, whose exponential"),
        ],
    ),
]


@pytest.mark.parametrize(("check", "right", "wrong"), WRONG)
def test_wrong_arguments_are_refused(
    check: Callable[..., None], right: dict[str, Any], wrong: list[tuple[dict[str, Any], str]]
) -> None:
    for options, message in wrong:
        with pytest.raises(InvalidRequest, match=message):
            check(**right | options)
