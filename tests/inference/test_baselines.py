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
    Info,
    Rejection,
    State,
    TextModel,
)
from genrt.inference.texts import TextTrace
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
@pytest.mark.parametrize("bound", [0.0, 1.5])
def test_the_evidence_is_unbiased_over_all_points_at_which_it_stops(
    num_samples: int, max_texts: int, share: float, bound: float
) -> None:
    """Exactly: over every (kept, drawn) that independent trials of probability ``share`` can stop at."""
    with genrt.load(LIVELY, engine="exact") as lm:
        sampler = Rejection(
            TextModel(lm, PROMPT, max_tokens=2),
            num_samples=num_samples,
            max_texts=max_texts,
            bound=bound,
        )
        total, mean = 0.0, 0.0
        for kept in range(num_samples + 1):
            for drawn in range(1, max_texts + 1):
                if kept == num_samples:
                    ways = math.comb(drawn - 1, kept - 1)
                else:
                    ways = math.comb(drawn, kept) if drawn == max_texts else 0
                probability = ways * share**kept * (1 - share) ** max(drawn - kept, 0)
                if probability:
                    particles = (TextTrace(finished=True),) * kept
                    state = State(particles, np.zeros(kept), 1, 0, drawn=drawn)
                    assert sampler.is_done(state)
                    total += probability
                    mean += probability * math.exp(sampler.result(state).log_evidence)
    assert total == pytest.approx(1)
    assert mean == pytest.approx(share * math.exp(bound))


async def test_of_one_text_there_is_no_estimate() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        sampler = Rejection(TextModel(lm, PROMPT, max_tokens=2), num_samples=1, max_texts=5)
        result = await sampler.run(0)
        assert math.isnan(sampler.result(sampler.init(0)).log_evidence)
    assert len(result.texts) == 1
    assert math.isnan(result.log_evidence)


async def test_a_state_keeps_what_was_accepted_and_a_record_is_of_that() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=5, constraint=regex("a(a|b)*", lm))
        sampler = Rejection(model, num_samples=9, max_texts=900, batch_size=4, bound=0.5)
        state, kept = sampler.init(3), [0]
        async for after, info in sampler.steps(state):
            assert after.particles[: kept[-1]] == state.particles
            assert (after.particles == ()) or after.log_evidence == pytest.approx(
                math.log(len(after.particles) / after.drawn) + 0.5
            )
            assert len(info.token_ids) == len(info.log_weights) == len(after.particles)
            assert (info.token_ids[: kept[-1]] == -1).all()
            assert not info.moved.any()
            state = after
            kept.append(len(state.particles))
        result = sampler.result(state)
    assert kept[-1] == 9 == len(result.texts)
    assert 4 * (len(kept) - 2) < state.drawn <= 4 * (len(kept) - 1) < 900
    assert result.log_evidence == pytest.approx(math.log(8 / (state.drawn - 1)) + 0.5)


def test_the_bar_counts_batches(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt(state: State, info: Info) -> None:
        raise KeyboardInterrupt

    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=7)
        sampler = Rejection(model, num_samples=20, max_texts=20, batch_size=8)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(sampler.run(0, progress=True, on_step=interrupt))
    last = capfd.readouterr().err.rstrip().rsplit("\r", 1)[-1]
    assert "1/3" in last
    assert "kept=8/20, drawn=8" in last


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
