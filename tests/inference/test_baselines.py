"""Rejection and best of N: the estimator by enumeration of stopping points, and what is the best.

The texts that rejection keeps are in ``test_algorithms.py``.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    BestOfN,
    Rejection,
    TextModel,
)
from genrt.inference.recipes import acceptance_rate
from genrt.testing import exact_posterior
from genrt.tokens.texts import Text

PROMPT = [0]
LIVELY = NGram.random([b"a", b"b", b""], seed=11, eos_token_id=2)


def likes_b(text: Text) -> float:
    return 0.8 * text.bytes.count(b"b") - 1.0


# -- the evidence -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [2, 3])
@pytest.mark.parametrize("max_texts", [1, 2, 3, 6])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_rate_is_unbiased_over_all_points_at_which_a_run_stops(
    num_samples: int, max_texts: int, share: float
) -> None:
    """Exactly: over every (kept, drawn) that independent trials of probability ``share`` can stop at."""
    total, mean = 0.0, 0.0
    for kept in range(num_samples + 1):
        for drawn in range(1, max_texts + 1):
            is_enough = kept == num_samples
            if is_enough:
                ways = math.comb(drawn - 1, kept - 1)
            else:
                ways = math.comb(drawn, kept) if drawn == max_texts else 0
            if probability := ways * share**kept * (1 - share) ** max(drawn - kept, 0):
                total += probability
                mean += probability * acceptance_rate(kept, drawn, is_enough=is_enough)
    assert total == pytest.approx(1)
    assert mean == pytest.approx(share)


async def test_of_one_text_there_is_no_estimate_and_of_no_text_it_is_nothing() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=2)
        result = await Rejection(model, num_samples=1, max_texts=5).run(0)
        never = TextModel(lm, PROMPT, max_tokens=2, potential=lambda text: -math.inf)
        nothing = await Rejection(never, num_samples=2, max_texts=5).run(0)
    assert (len(result.texts), result.weights.tolist()) == (1, [1.0])
    assert math.isnan(result.log_evidence)
    assert (nothing.texts, nothing.log_evidence, nothing.posterior()) == ((), -math.inf, [])


@pytest.mark.parametrize("batch_size", [1, 4, 900])
async def test_a_run_ends_with_the_text_that_is_enough(batch_size: int) -> None:
    """The evidence tells how many texts were drawn, a batch cut at the last one that is kept."""
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=5, constraint=regex("a(a|b)*", lm))
        sampler = Rejection(model, num_samples=9, max_texts=900, batch_size=batch_size, bound=0.5)
        result = await sampler.run(3)
        few = Rejection(model, num_samples=900, max_texts=90, batch_size=batch_size, bound=0.5)
        fewer = await few.run(3)
    assert len(result.texts) == 9
    drawn = 8 / math.exp(result.log_evidence - 0.5) + 1
    assert drawn == pytest.approx(round(drawn))
    assert 9 < round(drawn) < 300
    error = np.std([*map(len, result.texts)], ddof=1) / 3  # of nine independent texts
    assert 0 < error == pytest.approx(result.expectation_error(len))
    kept = len(fewer.texts)
    assert 0 < kept < 90
    assert fewer.log_evidence == pytest.approx(math.log(kept / 90) + 0.5)


async def test_a_potential_above_the_bound_is_refused() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=3, potential=likes_b)
        sampler = Rejection(model, num_samples=100, max_texts=1000)
        with pytest.raises(InvalidRequest, match=r"above the bound 0\.0: give a higher bound="):
            await sampler.run(0)


# -- best of N --------------------------------------------------------------------------------


async def test_the_best_is_the_best_of_all_that_satisfy_the_constraint() -> None:
    judged: list[Text] = []

    def score(text: Text) -> float:
        judged.append(text)
        return float(text.bytes.count(b"a"))

    with genrt.load(LIVELY, engine="exact") as lm:
        constraint = regex("(a|b)*b", lm)
        model = TextModel(lm, PROMPT, max_tokens=4, constraint=constraint, potential=likes_b)
        for sampler, rank in (
            (BestOfN(model, n=40), likes_b),
            (BestOfN(model, n=40, score=score), score),
        ):
            state = sampler.init(1)
            while not sampler.is_done(state):
                state, _ = await sampler.step(state)
            texts = [each.generated for each in state.particles]
            valid = [text for text in texts if text.finished]
            assert 0 < len(valid) < 40
            ranks = [rank(text) if text.finished else -math.inf for text in texts]
            assert state.log_weights.tolist() == ranks
            result = sampler.result(state)
            best = texts[ranks.index(max(ranks))]
            assert result.posterior() == [(best.bytes.decode(), 1.0)]
            assert math.isnan(result.log_evidence)
    assert all(text.bytes.endswith(b"b") for text in judged), "the invalid are not scored"


async def test_a_constraint_of_little_mass_leaves_no_run_without_a_text() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=9, constraint=regex("(ab){4}", lm))
        mass = exact_posterior(LIVELY, PROMPT, max_tokens=9, constraint=model.constraint).evidence
        results = await asyncio.gather(*(BestOfN(model, n=2).run(seed) for seed in range(20)))
    assert mass < 0.01
    assert all(result.posterior() == [("abababab", 1.0)] for result in results)
