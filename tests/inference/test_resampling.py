"""Resampling schemes: unbiased, as steady as they promise, and the dead have no children.

Statistical tests use fixed seeds and reject beyond 5 standard errors per quantity compared: with at most
20 quantities a test, a right program fails under one choice of seeds in 80,000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference import (
    Resampler,
    effective_sample_size,
    log_mean_exp,
    multinomial,
    partial,
    residual,
    stratified,
    systematic,
)

Floats: TypeAlias = NDArray[np.float64]
Equal: TypeAlias = Callable[[np.random.Generator, Floats], NDArray[np.int64]]
"""A resampler after which all weigh the same."""

SIGMAS = 5.0
RESAMPLERS: list[Equal] = [multinomial, stratified, systematic, residual]


def expect_means(samples: Floats, means: Floats) -> None:
    """Each column of ``samples`` ``[runs, quantities]`` has its mean, within SIGMAS standard errors."""
    errors = samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    scores = (samples.mean(axis=0) - means) / errors
    assert np.all(np.abs(scores) < SIGMAS), f"z-scores {scores.round(1)}"


log_weights_of_any_kind = st.lists(
    st.one_of(st.floats(-50, 50), st.floats(-2, 2), st.just(-math.inf)), min_size=1, max_size=40
).filter(lambda values: max(values) > -math.inf)


@pytest.mark.parametrize("resample", RESAMPLERS)
@settings(deadline=None)
@given(log_weights_of_any_kind, st.integers(0, 2**32), st.sampled_from([0.0, -1e4, 1e4]))
def test_ancestors_are_valid_and_the_dead_have_no_children(
    resample: Equal, values: list[float], seed: int, shift: float
) -> None:
    log_weights = np.array(values) + shift
    given_weights = log_weights.copy()
    ancestors = resample(np.random.default_rng(seed), log_weights)
    assert ancestors.shape == log_weights.shape
    assert ancestors.dtype == np.int64
    assert np.all(log_weights[ancestors] > -math.inf)
    assert np.all(np.diff(ancestors) >= 0)
    assert np.array_equal(log_weights, given_weights)
    again = resample(np.random.default_rng(seed), log_weights)
    assert np.array_equal(ancestors, again)


class Constant(np.random.Generator):
    """A generator whose every uniform is the same number."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.value = value

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return self.value if size is None else np.full(size, self.value)


@pytest.mark.parametrize("resample", RESAMPLERS)
@pytest.mark.parametrize("uniform", [0.0, 0.5, float(np.nextafter(1.0, 0.0))])
def test_extreme_uniforms_draw_no_dead_ancestor(resample: Equal, uniform: float) -> None:
    for weights in ([0.0, 1.0, 0.0], [0.0, 0.3, 0.3, 0.0, 0.7, 0.0], [0.0, *[0.1] * 10, 0.0]):
        with np.errstate(divide="ignore"):
            ancestors = resample(Constant(uniform), np.log(weights))
        assert len(ancestors) == len(weights)
        assert np.all(np.array(weights)[ancestors] > 0)


@pytest.mark.parametrize(
    ("resample", "below", "above"),
    [(systematic, 1, 1), (stratified, 2, 2), (residual, 1, math.inf)],
)
@settings(deadline=None)
@given(log_weights_of_any_kind, st.integers(0, 2**32))
def test_how_far_counts_can_be_from_their_expectation(
    resample: Equal, below: float, above: float, values: list[float], seed: int
) -> None:
    log_weights = np.array(values)
    n = len(log_weights)
    weights = np.exp(log_weights - log_weights.max())
    expected = n * weights / weights.sum()
    counts = np.bincount(resample(np.random.default_rng(seed), log_weights), minlength=n)
    assert np.all(counts > expected - below - 1e-9)
    assert np.all(counts < expected + above + 1e-9)


@pytest.mark.parametrize("resample", [*RESAMPLERS, partial])
@pytest.mark.parametrize(
    "weights", [[0.5, 0.0, 1.7, 0.1, 2.2, 0.0], [1.0, 2.0, 3.3], [0.01, 1.0, 0.01, 0.4, 5.0]]
)
def test_children_weigh_as_much_as_their_parent_in_expectation(
    resample: Resampler, weights: list[float]
) -> None:
    rng = np.random.default_rng(0)
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)
    mean, totals = np.mean(weights), np.zeros((1000, len(weights)))
    for row in totals:
        chosen = resample(rng, log_weights)
        if isinstance(chosen, tuple):
            np.add.at(row, chosen[0], np.exp(chosen[1]))
        else:
            np.add.at(row, chosen, mean)
    varying = totals.std(axis=0) > 1e-12
    np.testing.assert_allclose(totals[0, ~varying], np.array(weights)[~varying], atol=1e-12)
    expect_means(totals[:, varying], np.array(weights)[varying])


@pytest.mark.parametrize("resample", [*RESAMPLERS, partial])
@pytest.mark.parametrize("values", [[-math.inf] * 3, [0.0, math.nan], [0.0, math.inf], []], ids=str)
def test_no_ancestors_without_weights(resample: Equal, values: list[float]) -> None:
    with pytest.raises(InvalidRequest, match="log-weight"):
        resample(np.random.default_rng(0), np.array(values))


@pytest.mark.parametrize("shift", [0.0, 700.0, -12_345.678])
@pytest.mark.parametrize("resample", [stratified, systematic, residual])
def test_equal_weights_have_one_child_each(resample: Equal, shift: float) -> None:
    for n in (*range(1, 100), 49_999):
        ancestors = resample(np.random.default_rng(n), np.full(n, shift))
        assert np.array_equal(ancestors, np.arange(n)), n


@pytest.mark.parametrize("shift", [0.0, 700.0, -700.0])
@pytest.mark.parametrize("resample", [stratified, systematic, residual])
def test_weights_that_are_whole_numbers_of_children_have_these(
    resample: Equal, shift: float
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        n = int(rng.integers(1, 300))
        children = rng.multinomial(n, rng.dirichlet(np.full(n, 0.3)))
        with np.errstate(divide="ignore"):
            log_weights = np.log(children) + shift
        assert np.array_equal(np.bincount(resample(rng, log_weights), minlength=n), children)


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=30))
def test_ess_and_mean_of_weights(values: list[float]) -> None:
    log_weights = np.array(values)
    n = len(values)
    ess = effective_sample_size(log_weights)
    assert 1 - 1e-9 <= ess <= n + 1e-9
    assert effective_sample_size(log_weights - 1e5) == pytest.approx(ess)
    assert effective_sample_size(np.full(n, values[0])) == pytest.approx(n)
    mean = log_mean_exp(log_weights)
    assert mean == pytest.approx(
        float(torch.tensor(values, dtype=torch.float64).logsumexp(0)) - math.log(n), abs=1e-6
    )
    dead = np.append(log_weights, -math.inf)
    assert effective_sample_size(dead) == pytest.approx(ess)
    assert log_mean_exp(dead) == pytest.approx(mean + math.log(n / (n + 1)), abs=1e-9)


# -- the one that keeps weights ---------------------------------------------------------------


@settings(deadline=None)
@given(log_weights_of_any_kind, st.integers(0, 2**32), st.sampled_from([0.0, -1e4, 1e4]))
def test_partial_keeps_weights_near_the_mean_and_the_total(
    values: list[float], seed: int, shift: float
) -> None:
    log_weights = np.array(values) + shift
    given_weights = log_weights.copy()
    ancestors, after = partial(np.random.default_rng(seed), log_weights)
    assert np.array_equal(log_weights, given_weights)
    relative = np.exp(log_weights - log_mean_exp(log_weights))
    for index in np.nonzero((relative > 0.5) & (relative < 2))[0]:
        assert (ancestors[index], after[index]) == (index, log_weights[index])
    alive = after > -math.inf
    assert np.all(log_weights[ancestors[alive]] > -math.inf)
    assert log_mean_exp(after) == pytest.approx(log_mean_exp(log_weights), rel=1e-12, abs=1e-12)
    assert effective_sample_size(after) >= effective_sample_size(log_weights) - 1e-9


def test_partial_keeps_weights_of_exactly_half_and_twice_the_mean() -> None:
    for n in range(3, 60):
        shares = np.full(n, 0.5)
        shares[-1] = n - 0.5 * (n - 1)
        for scale in (1.0, 1 / 3, 1e-100):
            ancestors, after = partial(np.random.default_rng(n), np.log(shares * scale))
            assert np.array_equal(ancestors, np.arange(n)), n
            np.testing.assert_allclose(after, np.log(shares * scale), rtol=1e-14, atol=1e-14)
