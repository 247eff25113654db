"""Metropolis–Hastings: moves leave the law as it is, chains find it from anywhere, and how they begin.

Exact draws from the target, by rejection of weighted particles, begin the chains; whatever moves they
make then, their texts must be exact draws still. Fixed seeds; every test has a level of 1e-6.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.constraints import predicate, regex
from genrt.engines.exact import NGram
from genrt.inference import (
    Info,
    MetropolisHastings,
    Model,
    ParticleGibbs,
    State,
    TextModel,
)
from genrt.lm import AsyncLM
from genrt.testing import assert_samples_from, exact_posterior
from genrt.tokens.texts import Text

PROMPT = [0]
MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=4)
PATTERN = "(a|b){2,5}b"


def likes_short(text: Text) -> float:
    return -0.4 * len(text.token_ids)


def no_bb(text: Text) -> bool:
    return b"bb" not in text.bytes


async def grown(model: Model, count: int, seed: int) -> list[Any]:
    """Independent finished or dead traces of a model."""
    traces = [model.start() for _ in range(count)]
    going, step = list(range(count)), 0
    while going:
        longer = await model.extend([traces[i] for i in going], 1000 * seed + step)
        for i, trace in zip(going, longer, strict=True):
            traces[i] = trace
        step += 1
        going = [i for i in going if traces[i].gain > -math.inf and not traces[i].finished]
    return traces


async def exact_chains(model: Model, count: int, *, most: int = 400) -> State:
    """Up to ``most`` chains that begin with independent, exact draws, for models with weights up to 1."""
    rng = np.random.default_rng(0)
    chains = []
    for trace in await grown(model, count, 1):
        log_weight = sum(each.gain for each in trace.path())
        assert log_weight <= 1e-6
        if math.log1p(-rng.random()) <= log_weight:
            chains.append(trace)
    return State(tuple(chains[:most]), np.zeros(len(chains[:most])), 1, 7)


async def moved(
    sampler: MetropolisHastings, state: State, *, steps: int
) -> tuple[list[Any], list[Info]]:
    """Where the chains are after so many moves, as the model's values, and the records of the moves."""
    infos = []
    for _ in range(steps):
        state, info = await sampler.step(replace(state, step=1))
        infos.append(info)
        state = replace(state, seed=state.seed + 1)
    return [sampler.model.value(each) for each in state.particles], infos


def case(name: str, lm: AsyncLM) -> tuple[TextModel, dict[Any, float]]:
    """A model, and the law of its values."""
    options: dict[str, Any] = {"max_tokens": 5}
    if name == "awrs":
        options |= {"temperature": 3.0, "constraint": predicate(no_bb, lm)}
    if name == "twist":
        options |= {"constraint": regex(PATTERN, lm), "potential": likes_short}
    exact = exact_posterior(MODEL, PROMPT, **options)
    if name == "twist":
        options["twist"] = likes_short
    law = {text.decode(): probability for text, probability in exact.texts.items()}
    return TextModel(lm, PROMPT, **options), law


RARE = NGram([b"a", b"b", b""], torch.tensor([[0.7, 0.1, 0.2]] * 3).log(), eos_token_id=2)


def two_bs(text: Text) -> float:
    return 0.0 if text.bytes.count(b"b") == 2 else -math.inf


# -- the law ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "twist", "awrs"])
async def test_moves_leave_the_law_as_it_is(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model, law = case(name, lm)
        state = await exact_chains(model, {"plain": 400, "twist": 1400, "awrs": 700}[name])
        assert len(state.particles) > 80
        assert_samples_from([model.value(each) for each in state.particles], law)
        for steps in (1, 4):
            sampler = MetropolisHastings(model, num_chains=1, num_steps=1)
            values, infos = await moved(sampler, state, steps=steps)
            assert_samples_from(values, law)
        rate = np.mean([info.moved.mean() for info in infos])
        assert 0.2 < rate <= 1


async def test_conditional_smc_leaves_the_law_as_it_is() -> None:
    """With so few particles that what is pinned counts for most."""
    with genrt.load(MODEL, engine="exact") as lm:
        model, law = case("twist", lm)
        state = await exact_chains(model, 2000, most=500)
        sampler = ParticleGibbs(model, num_particles=2, num_chains=1, num_steps=1)
        values, infos = await moved(sampler, state, steps=2)
        assert_samples_from(values, law)
        assert 0.02 < infos[0].moved.mean() < 1


# -- how well chains mixed --------------------------------------------------------------------


async def test_a_result_has_its_chains() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model, _ = case("twist", lm)
        sampler = MetropolisHastings(model, num_chains=6, num_steps=9, warm_up=3)
        seen: list[tuple[State, Info]] = []
        result = await sampler.run(1, on_step=lambda state, info: seen.append((state, info)))
    chains = result.chains
    assert chains is not None
    counted = [(state, info) for state, info in seen if info.step > 3]
    assert len(counted) == 6
    for place in range(6):
        for step, (state, _) in enumerate(counted):
            chain = state.particles[place]
            assert chains.values[place][step] == model.value(chain)
            assert chains.lengths[place, step] == len(chain.token_ids)
            gained = sum(each.gain for each in chain.path())
            assert chains.log_weights[place, step] == pytest.approx(gained)
        accepted = [bool(info.moved[place]) for _, info in counted]
        assert chains.acceptance[place] == pytest.approx(np.mean(accepted))
    assert sorted(map(str, result.values)) == sorted(map(str, sum(chains.values, ())))
    assert chains.missing == 0
    assert result.ess == chains.ess <= len(result.texts)


# -- how chains begin -------------------------------------------------------------------------


async def test_some_chains_may_find_none_and_the_others_go_on() -> None:
    with genrt.load(RARE, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=4, potential=two_bs)
        sampler = MetropolisHastings(model, num_chains=40, num_steps=3, attempts=5)
        state, seen = sampler.init(0), []
        for _ in range(4):
            state, info = await sampler.step(state)
            seen.append(info)
        found = state.log_weights == 0
        assert 0 < found.sum() < 40
        assert all((info.log_weights == state.log_weights).all() for info in seen)
        assert not any(info.moved[~found].any() for info in seen)
        chains = [each for each, is_found in zip(state.particles, found, strict=True) if is_found]
        assert all(model.text(chain).count("b") == 2 for chain in chains)
        result = sampler.result(state, infos=seen)
        assert result.chains is not None
        assert (len(result.chains.values), result.chains.missing) == (found.sum(), 40 - found.sum())
        taken = np.mean([info.moved[found] for info in seen[1:]], axis=0)
        assert result.chains.acceptance.tolist() == taken.tolist()
        nothing = sampler.result(sampler.init(0))
        assert (nothing.texts, nothing.ess, nothing.posterior()) == ((), 0.0, [])


# -- wrong use --------------------------------------------------------------------------------
