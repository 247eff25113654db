"""``genrt.testing`` in users' hands: property tests of a sampler of their own.

Each property is tried on models, constraints and seeds that Hypothesis draws, the same ones every time,
at the level 1e-6 an example. A sampler that is broken on purpose must be found so as well.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import genrt
from genrt.constraints import Constraint
from genrt.engines.exact import NGram
from genrt.lm import AsyncLM
from genrt.testing import (
    assert_weighted_samples_from,
    constraints,
    exact_posterior,
    seeds,
    small_lms,
)

PROMPT = [0]
MAX_TOKENS = 4
RUNS = 300
EXAMPLES = 15

Weighted = tuple[list[tuple[int, ...]], list[float]]


def property_test(examples: int = EXAMPLES, *, shrink: bool = True) -> Any:
    """The same examples every time, and as many as are affordable."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        report_multiple_bugs=False,
    )


async def own_smc(
    lm: AsyncLM,
    constraint: Any,
    rng: np.random.Generator,
    *,
    particles: int = 4,
    bug: str = "",
) -> Weighted:
    """A user's SMC: masks, weights, multinomial resampling before each step but the first."""
    eos = lm.tokenizer.eos_token_id
    states = [constraint.start()] * particles
    texts: list[tuple[int, ...]] = [()] * particles
    ended = [False] * particles
    log_weights = np.zeros(particles)
    for step in range(MAX_TOKENS):
        if step and log_weights.max() > -math.inf:
            weights = np.exp(log_weights - log_weights.max())
            chosen = rng.choice(particles, particles, p=weights / weights.sum())
            states = [states[index] for index in chosen]
            texts = [texts[index] for index in chosen]
            ended = [ended[index] for index in chosen]
            mean = log_weights.max() + math.log(weights.sum() / particles)
            if bug == "resampled weights are kept":
                log_weights = log_weights[chosen]
            else:
                log_weights = np.full(particles, mean)
        growing = [i for i in range(particles) if not ended[i] and log_weights[i] > -math.inf]
        if not growing:
            break
        rows = await lm.batch_next_token_logprobs([[*PROMPT, *texts[i]] for i in growing])
        for i, row in zip(growing, rows.double(), strict=True):
            mask = states[i].mask()
            if step == MAX_TOKENS - 1 and bug != "a text that is cut counts":
                mask &= torch.arange(len(mask)) == eos
            allowed = torch.where(mask, row, -math.inf)
            mass = float(allowed.logsumexp(0))
            if bug != "a weight is not multiplied":
                log_weights[i] += mass
            if bug == "a token is never proposed" and mask.sum() > 1:
                allowed[int(mask.nonzero()[0])] = -math.inf
                mass = float(allowed.logsumexp(0))
            if mass == -math.inf:
                log_weights[i] = -math.inf
                continue
            token = int(rng.choice(len(row), p=(allowed - mass).exp().numpy()))
            if token == eos:
                ended[i] = True
            else:
                texts[i] = (*texts[i], token)
                states[i] = states[i].advance(token)
    if bug == "divided by one too few":
        log_weights += math.log(particles / (particles - 1))
    return texts, log_weights.tolist()


def check_own_smc(model: NGram, seed: int, data: st.DataObject, *, bug: str = "") -> None:
    async def runs(lm: AsyncLM, constraint: Constraint) -> list[Weighted]:
        rngs = np.random.default_rng(seed).spawn(RUNS)
        return await asyncio.gather(*(own_smc(lm, constraint, rng, bug=bug) for rng in rngs))

    with genrt.load(model, engine="exact") as lm:
        constraint = data.draw(constraints(lm, predicates=False))
        exact = exact_posterior(model, PROMPT, max_tokens=MAX_TOKENS, constraint=constraint)
        found = asyncio.run(runs(lm, constraint))
    assert_weighted_samples_from(
        found, exact.token_ids, log_evidence=exact.log_evidence, highest=1.0
    )


@property_test()
@given(model=small_lms(), seed=seeds(), data=st.data())
def test_a_right_smc_of_ones_own_passes(model: NGram, seed: int, data: st.DataObject) -> None:
    check_own_smc(model, seed, data)


@pytest.mark.parametrize(
    "bug",
    [
        "resampled weights are kept",
        "a text that is cut counts",
        "a weight is not multiplied",
        "a token is never proposed",
        "divided by one too few",
    ],
)
def test_a_wrong_smc_of_ones_own_is_found(bug: str) -> None:
    @property_test(150, shrink=False)
    @given(model=small_lms(), seed=seeds(), data=st.data())
    def check(model: NGram, seed: int, data: st.DataObject) -> None:
        check_own_smc(model, seed, data, bug=bug)

    with pytest.raises(AssertionError, match=r"properly weighted|its probability is 0"):
        check()
