"""Adaptive weighted rejection sampling: law and weights by enumeration, what it asks, and in SMC.

A draw asks in turn until enough tokens were accepted or rejected, so that all it can do is a finite tree:
``outcomes`` walks it, and every law here follows from that. Statistical tests have fixed seeds and a
level of 1e-6.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.integrate import quad

import genrt
from genrt.constraints import predicate
from genrt.engines.exact import NGram
from genrt.inference import TextModel, awrs, importance_sampling
from genrt.inference.awrs import AWRS, draw_allowed, log_mean_rate
from genrt.inference.model import DEAD
from genrt.inference.text_model import Proposal
from genrt.testing import (
    assert_samples_from,
    assert_unbiased,
)
from genrt.tokens.texts import Text

Floats = NDArray[np.float64]
Outcome = tuple[int, tuple[float, ...], int]
"""The token that was taken, the rates at which draws were waited for, and how many were accepted before
the last one."""


def outcomes(
    weights: Collection[float],
    allowed: Collection[int],
    how: AWRS = AWRS(),  # noqa: B008
) -> dict[Outcome, float]:
    """Everything that a draw may do, with its probability."""
    found: defaultdict[Outcome, float] = defaultdict(float)
    most = math.inf if how.rejects is None else how.rejects

    def walk(
        left: dict[int, float], taken: tuple[int, ...], rates: tuple[float, ...], p: float
    ) -> None:
        rejected = len(rates) - len(taken)
        total = math.fsum(left.values())
        if len(taken) == how.accepts:
            found[taken[0], rates, how.accepts - 1] += p
        elif taken and rejected == most:
            found[taken[0], rates, len(taken)] += p
        elif not total or rejected == most:
            found[DEAD, (), 0] += p
        else:
            for token_id, weight in left.items():
                share, after = p * weight / total, (*rates, total)
                if token_id in allowed:
                    walk(left, (*taken, token_id), after, share)
                else:
                    rest = {other: w for other, w in left.items() if other != token_id}
                    walk(rest, taken, after, share)

    walk({i: w for i, w in enumerate(weights) if w > 0}, (), (), 1.0)
    return found


class Asked:
    """A check that knows what is allowed, and will not be asked twice."""

    def __init__(self, allowed: Collection[int]) -> None:
        self.allowed = allowed
        self.asked: list[int] = []
        self.rounds = 0

    async def __call__(self, token_ids: list[int]) -> list[bool]:
        assert not set(token_ids) & set(self.asked), "asked twice"
        self.asked += token_ids
        self.rounds += 1
        return [token_id in self.allowed for token_id in token_ids]


async def drawn(
    weights: Collection[float],
    allowed: Collection[int],
    *,
    seed: int,
    how: AWRS = AWRS(),  # noqa: B008
) -> tuple[int, float]:
    rng = np.random.default_rng(seed)
    return await draw_allowed(np.array(list(weights)), Asked(allowed), rng, how)


DIALS = [AWRS(), AWRS(accepts=3), AWRS(rejects=2), AWRS(accepts=3, rejects=2)]


# -- the weight -------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.floats(-28, 0).map(math.exp)),
        min_size=1,
        max_size=5,
    ),
    st.sets(st.integers(0, 4)),
    st.sampled_from(DIALS),
)
@settings(max_examples=100, deadline=None)
def test_the_weight_is_unbiased_given_the_token(
    weights: list[float], allowed: set[int], how: AWRS
) -> None:
    """With a bound on rejections, of all draws: dead ones count as 0."""
    mass = math.fsum(weight for i, weight in enumerate(weights) if i in allowed)
    total: defaultdict[int, float] = defaultdict(float)
    mean: defaultdict[int, float] = defaultdict(float)
    for (taken, rates, count), probability in outcomes(weights, allowed, how).items():
        total[taken] += probability
        if rates:
            mean[taken] += probability * count * math.exp(log_mean_rate(np.array(rates)))
    if not mass:
        assert set(total) == {DEAD}
        return
    if how.rejects is None:
        assert DEAD not in total
    for token_id in set(total) - {DEAD}:
        assert mean[token_id] == pytest.approx(weights[token_id], rel=1e-9)
        if how.rejects is None:
            assert total[token_id] == pytest.approx(weights[token_id] / mass, rel=1e-9)
    assert set(total) - {DEAD} == {i for i in allowed if i < len(weights) and weights[i] > 0}


@pytest.mark.parametrize(
    ("weights", "allowed"),
    [
        ([0.5, 0.2, 0.2, 0.1], {0, 2}),
        ([0.5, 0.2, 0.2, 0.1], {3}),
        ([0.1, 0.2, 0.0, 0.3], {1, 2}),
        ([0.3, 0.3, 0.4], {0, 1, 2}),
        ([2.0, 5.0, 3.0], {0, 1}),
        ([1.0, 1e-12, 3e-12, 1e-12], {1, 2}),
        ([0.0, 0.7, 0.0], {1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", DIALS, ids=str)
async def test_a_draw_follows_the_law_that_was_enumerated(
    weights: list[float], allowed: set[int], how: AWRS
) -> None:
    law: defaultdict[tuple[int, float], float] = defaultdict(float)
    for (taken, rates, count), probability in outcomes(weights, allowed, how).items():
        log_weight = math.log(count) + log_mean_rate(np.array(rates)) if count else -math.inf
        law[taken, round(log_weight, 6)] += probability
    samples = []
    for seed in range(800):
        token_id, log_weight = await drawn(weights, allowed, seed=seed, how=how)
        samples.append((token_id, round(log_weight, 6)))
    assert_samples_from(samples, law)


# -- the mean rate ----------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [[1.0, 0.6, 0.5], [1.0, 0.999, 0.2, 0.2], [5.0, 1.0, 1.0, 1e-3]])
def test_other_rates_agree_with_quadrature(rates: list[float]) -> None:
    expected, _ = quad(
        lambda t: math.exp(t + sum(math.log(r / (r + math.exp(t))) for r in rates)),
        -60,
        60,
        limit=500,
        epsabs=1e-14,
    )
    assert math.exp(log_mean_rate(np.array(rates))) == pytest.approx(expected, rel=1e-10)


# -- what is asked ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 2000])
async def test_where_nothing_is_allowed_each_token_is_asked_about_once(size: int) -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(size, 0.1))
    weights[::3] = 0.0
    check = Asked(())
    before = weights.copy()
    assert await draw_allowed(weights, check, np.random.default_rng(0)) == (DEAD, -math.inf)
    assert sorted(check.asked) == np.flatnonzero(weights).tolist()
    assert weights.tolist() == before.tolist()
    assert check.rounds <= 2 + math.log2(size)


async def test_draws_ahead_ask_at_most_three_times_as_much_and_in_few_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(1000))
    asked, rounds = [0, 0], [0, 0]
    ahead = awrs._ahead
    for one_by_one in (0, 1):
        if one_by_one:
            monkeypatch.setattr(
                awrs, "_ahead", lambda left, known, most, rng: ahead(left, known, 1, rng)
            )
        for seed in range(30):
            check = Asked({7, 800})
            await draw_allowed(weights, check, np.random.default_rng(seed))
            asked[one_by_one] += len(check.asked)
            rounds[one_by_one] += check.rounds
    assert rounds[1] == asked[1]
    assert asked[1] < asked[0] < 3 * asked[1]
    assert rounds[0] < 30 * 2 * (2 + math.log2(1000))


async def test_where_everything_is_allowed_two_questions_are_the_most() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(500))
    counts: Counter[int] = Counter()
    for seed in range(50):
        check = Asked(range(500))
        _, log_weight = await draw_allowed(weights, check, np.random.default_rng(seed))
        assert log_weight == pytest.approx(0.0, abs=1e-9)
        counts[len(check.asked)] += 1
    assert set(counts) <= {1, 2}


async def test_one_that_is_almost_certain_and_refused_leaves_the_rest_as_it_is() -> None:
    weights = [1.0, *[1e-18] * 4]
    draws = [await drawn(weights, {2, 4}, seed=seed) for seed in range(300)]
    assert_samples_from([token_id for token_id, _ in draws], {2: 0.5, 4: 0.5})
    assert_unbiased([math.exp(w) * 1e18 for _, w in draws], 2.0, highest=4.0)


# -- in a sampler -----------------------------------------------------------------------------


async def test_a_predicate_is_asked_ten_times_less_than_by_masks() -> None:
    words = [*(f"{i:x} ".encode() for i in range(399)), b""]
    calls: Counter[Proposal | None] = Counter()
    with genrt.load(NGram.random(words, seed=8, eos_token_id=399), engine="exact") as lm:
        proposals: tuple[Proposal | None, ...] = ("mask", "awrs", None)
        for proposal in proposals:

            def wanted(text: Text, proposal: Proposal | None = proposal) -> bool:
                calls[proposal] += 1
                return all(token_id % 2 for token_id in text.token_ids)

            model = TextModel(
                lm, [0], max_tokens=3, constraint=predicate(wanted, lm), proposal=proposal
            )
            importance_sampling(model, num_particles=50).run_sync(0)
    assert calls["mask"] > 10 * calls["awrs"]
    assert calls[None] == calls["awrs"]
