"""Error bars: intervals of one run hold the truth as often as they say; tails of weights; comparisons.

The model is a Markov chain with observations, whose evidence and expectations are sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    SMC,
    BestOfN,
    Law,
    MetropolisHastings,
    Result,
    TextModel,
    Trace,
    compare,
    importance_sampling,
    multinomial,
    several,
    systematic,
)
from genrt.inference.estimates import pareto_k

STEPS = 3


class Place(Trace):
    """A walk so far, at one of three places."""

    __slots__ = ("at",)
    at: int


class Walk:
    """A walk over three places, which observes each place with a likelihood."""

    max_steps = STEPS

    def __init__(self, seed: int, spread: float) -> None:
        rng = np.random.default_rng(seed)
        self.moves = rng.dirichlet(np.ones(3), 3)
        self.likelihood = np.exp(spread * rng.normal(size=3))

    def start(self) -> Place:
        first = Place()
        first.at = 0
        return first

    async def extend(self, traces: Sequence[Place], seed: int) -> list[Place]:
        cumulative = self.moves.cumsum(axis=1)[[each.at for each in traces]]
        uniforms = np.random.default_rng(seed).random((len(traces), 1))
        found = []
        places = (uniforms > cumulative[:, :2]).sum(axis=1).tolist()
        for trace, at in zip(traces, places, strict=True):
            weight = math.log(self.likelihood[at])
            longer = Place(trace, (at,), weight, finished=trace.units + 1 == STEPS)
            longer.at = at
            found.append(longer)
        return found

    def text(self, trace: Place) -> str:
        return str(trace.at)

    def value(self, trace: Place) -> int:
        return trace.at

    def exact(self) -> tuple[float, float]:
        """The evidence, and the expectation of the last place."""
        total = mean = 0.0
        for path in itertools.product(range(3), repeat=STEPS):
            pairs = itertools.pairwise((0, *path))
            weight = math.prod(self.moves[a, b] * self.likelihood[b] for a, b in pairs)
            total += weight
            mean += weight * path[-1]
        return total, mean / total


@pytest.mark.proof
@pytest.mark.parametrize(
    ("problem", "when"), [((0, 0.5), 0.0), ((2, 0.7), 0.6), ((3, 0.5), 1.0)], ids=str
)
async def test_intervals_of_one_run_hold_the_truth_as_often_as_they_say(
    problem: tuple[int, float], when: float
) -> None:
    """95 % intervals over 2,000 runs, of the evidence, its logarithm and an expectation: 93 to 97 %."""
    walk = Walk(*problem)
    evidence, mean = walk.exact()
    sampler = SMC(walk, num_particles=300, resample_when=when, resample=multinomial)
    ratios, errors, means, own = [], [], [], []
    for seed in range(2000):
        result = await sampler.run(seed)
        ratios.append(math.exp(result.log_evidence) / evidence)
        errors.append(result.evidence_error * ratios[-1])
        means.append(result.expectation(float))
        own.append(result.expectation_error(float))
    relative = np.array(errors) / ratios
    assert 0.93 <= np.mean(np.abs(np.log(ratios)) < 1.96 * relative) <= 0.97
    for found, truth, error in ((ratios, 1.0, errors), (means, mean, own)):
        covered = np.abs(np.array(found) - truth) < 1.96 * np.array(error)
        assert 0.93 <= covered.mean() <= 0.97
        assert np.mean(np.square(error)) == pytest.approx(np.var(found), rel=0.15)


async def test_other_schemes_have_no_error_of_one_run_and_several_have() -> None:
    walk = Walk(3, 0.5)
    evidence, truth = walk.exact()
    sampler = SMC(walk, num_particles=32, resample_when=1.0)
    result = await sampler.run(0)
    assert math.isnan(result.evidence_error)
    assert math.isnan(result.expectation_error(float))
    assert "\N{PLUS-MINUS SIGN}" not in str(result)
    assert "its error unknown: take several runs" in str(result)
    runs = await several(sampler, 40, seed=0)
    assert len({each.log_evidence for each in runs.results}) == 40
    off = math.exp(runs.log_evidence) / evidence - 1
    assert 0 < abs(off) < 4 * runs.evidence_error < 0.5
    mean, error = runs.expectation(float)
    assert 0 < abs(mean - truth) < 4 * error < 0.3
    weights = dict(runs.posterior())
    assert math.fsum(value * weight for value, weight in weights.items()) == pytest.approx(mean)
    assert math.fsum(weights.values()) == pytest.approx(1)
    assert sum(weight for sign, weight in runs.posterior(of=np.sign) if sign > 0) == pytest.approx(
        sum(weight for value, weight in weights.items() if value > 0)
    )
    assert math.isnan(runs.cost)  # without a runtime
    plain = await importance_sampling(walk, num_particles=32).run(0)
    assert plain.evidence_error > 0
    assert "\N{PLUS-MINUS SIGN}" in str(plain)
    assert "several" not in str(plain)


async def test_weights_and_steps_are_shown_with_their_standard_errors() -> None:
    """Of 100 independent texts the weight p has the error sqrt(p (1 - p) / 99)."""
    values, known = ("a",) * 64 + ("b",) * 36, {"eve": np.arange(100)}
    result = Result(values, ((),) * 100, values, np.zeros(100), 0.0, **known)  # type: ignore[arg-type]
    error = math.sqrt(0.64 * 0.36 / 99)
    assert result.expectation_error(lambda text: text == "a") == pytest.approx(error)
    assert f"0.6400 \N{PLUS-MINUS SIGN} {error:.4f}  a" in str(result)
    unknown = Result(values, ((),) * 100, values, np.zeros(100), 0.0)
    assert "\N{PLUS-MINUS SIGN}" not in str(unknown)
    one = Result(("a",) * 100, ((),) * 100, ("a",) * 100, np.zeros(100), 0.0, **known)  # type: ignore[arg-type]
    assert "1.0000  a" in str(one)  # that all agree does not mean an error of 0
    for resample in (multinomial, systematic):
        sampler = SMC(Walk(3, 0.5), num_particles=32, resample_when=0.9, resample=resample)
        run = await sampler.run(0)
        errors = run.to_pandas(steps=True)["log_evidence_error"]
        assert errors.iloc[-1] == pytest.approx(run.evidence_error, nan_ok=True)
        assert errors.notna().any() == (resample is multinomial)


async def test_chains_have_the_errors_of_their_autocorrelations() -> None:
    """Over 40 runs, the error of a mean is its standard deviation."""
    walk = Walk(3, 0.5)
    sampler = MetropolisHastings(walk, num_chains=8, num_steps=60, warm_up=10)
    runs = [await sampler.run(seed) for seed in range(40)]
    errors = [each.expectation_error(float) for each in runs]
    means = [each.expectation(float) for each in runs]
    assert np.mean(errors) == pytest.approx(np.std(means, ddof=1), rel=0.4)
    assert "\N{PLUS-MINUS SIGN}" in str(runs[0])


async def test_runs_without_an_evidence_count_alike() -> None:
    model = NGram.random([b"a", b"b", b""], seed=1, eos_token_id=2)
    with genrt.load(model, engine="exact") as lm:
        texts = TextModel(lm, [0], max_tokens=6)
        best = BestOfN(texts, n=4, score=lambda text: float(len(text.bytes)))
        runs = await several(best, 6, seed=0)
        means = [each.expectation(len) for each in runs.results]
        mean, error = runs.expectation(len)
        assert mean == pytest.approx(np.mean(means))
        assert 0 < error == pytest.approx(np.std(means, ddof=1) / math.sqrt(6))
        found = await compare(best, SMC(texts, num_particles=4), runs=3, seed=0)
    assert math.isnan(found.efficiency)


@pytest.mark.parametrize("shape", [-0.3, 0.2, 0.5, 0.8, 1.5])
def test_pareto_k_is_the_shape_of_a_tail_that_is_known(shape: float) -> None:
    uniforms = np.random.default_rng(0).random((10, 100_000))
    log_weights = np.log((uniforms**-shape - 1) / shape)
    assert np.mean([pareto_k(each) for each in log_weights]) == pytest.approx(shape, abs=0.04)
    assert pareto_k(log_weights[0] - 5000.0) == pytest.approx(pareto_k(log_weights[0]))


def test_pareto_k_of_a_tail_of_many_nats_is_known() -> None:
    rng = np.random.default_rng(0)
    assert pareto_k(5.0 * rng.exponential(size=10_000)) == pytest.approx(5.0, rel=0.15)
    for count in (50, 200, 10_000):
        light, *heavy = [pareto_k(sd * rng.normal(size=count)) for sd in (1, 15, 30, 1000)]
        assert light < 1 < heavy[0] < heavy[1] < heavy[2] < math.inf
    for others in (np.zeros(99), rng.normal(size=99), np.repeat([0.0, -1.0, -math.inf], 33)):
        for largest in (40.0, 800.0, 1e300):
            weights = np.append(others, largest)
            assert pareto_k(weights) > 1
            shifted = pareto_k(weights - 700.0)
            assert shifted == pytest.approx(pareto_k(weights))
    # A few equal weights, or one a little above equal ones, are no tail of many nats.
    assert pareto_k(np.append(np.zeros(99), 0.5)) < 0.5
    tied = np.append(np.zeros(80), np.full(20, 3.0))
    assert pareto_k(tied) < 0.5
    assert math.isnan(pareto_k(np.append(tied, np.full(20, 3.0))))


@pytest.mark.parametrize(
    ("log_weights", "words"),
    [
        (np.full(100, -math.inf), None),
        (np.zeros(100), None),
        (np.log(np.arange(1.0, 21.0)), None),
        (np.log(np.linspace(0.5, 1.5, 200)), "even enough"),
        (-0.9 * np.log(np.linspace(0.001, 1, 1000)), "few particles have most weight"),
        (-3.0 * np.log(np.linspace(0.001, 1, 1000)), "not reliable"),
        (-100.0 * np.log(np.linspace(0.001, 1, 1000)), "not reliable"),
        (np.append(np.zeros(99), 40.0), "not reliable"),
    ],
)
def test_a_result_says_what_its_tail_means(log_weights: Any, words: str | None) -> None:
    count = len(log_weights)
    result = Result(("",) * count, ((),) * count, ("",) * count, log_weights, 0.0)
    assert ("Pareto k" in str(result)) == (words is not None)
    assert words is None or words in str(result)


async def test_samplers_are_compared_at_equal_cost() -> None:
    model = NGram.random([b"a", b"b", b""], seed=1, eos_token_id=2)
    with genrt.load(model, engine="exact", cache_bytes=0) as lm:
        texts = TextModel(lm, [0], max_tokens=6, constraint=regex("(a|b){3}b*", lm))
        few = SMC(texts, num_particles=8, resample_when=0.0)
        same = await compare(few, few, runs=4, seed=0)
        assert same.efficiency == 1
        many = importance_sampling(texts, num_particles=32)
        # Four times as many particles cost less than four times as much: equal ones share a row.
        found = await compare(many, few, runs=60, seed=1)
        assert found.first.cost < 4 * found.second.cost
        assert found.efficiency > 1 - 3 * found.efficiency_error
        assert found.first.evidence_error < found.second.evidence_error
        assert f"efficiency {found.efficiency:.2g}" in str(found)
        with pytest.raises(InvalidRequest, match="runs"):
            await compare(few, few, runs=1, seed=0)


async def test_costs_are_of_runs_that_begin_with_nothing_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model that asks for rows, which the next run would find."""
    model = NGram.random([b"a", b"b", b""], seed=1, eos_token_id=2)
    with genrt.load(model, engine="exact") as lm:
        forgotten: list[None] = []
        monkeypatch.setattr(lm, "reset_prefix_cache", lambda: forgotten.append(None))
        texts = TextModel([Law(lm, [0]), Law(lm, [1], power=-0.5)], max_tokens=6)
        sampler = SMC(texts, num_particles=8)
        same = await compare(sampler, sampler, runs=6, seed=0)
        assert len(forgotten) == 12
        assert same.efficiency == 1
        for each in same.first.results:
            assert each.statistics is not None
            assert each.statistics.engine.computed_tokens > 0
