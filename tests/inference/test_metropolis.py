"""Metropolis–Hastings: moves leave the law as it is, chains find it from anywhere, and how they begin.

Exact draws from the target, by rejection of weighted particles, begin the chains; whatever moves they
make then, their texts must be exact draws still. Fixed seeds; every test has a level of 1e-6.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.constraints import predicate, regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    SMC,
    Chains,
    Execution,
    Growth,
    MetropolisHastings,
    Model,
    Moves,
    Program,
    Result,
    TextModel,
)
from genrt.inference.metropolis import Chain
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


async def grown(model: Model, count: int, seed: int) -> list[tuple[Growth, ...]]:
    """Independent particles of a model, each with all of its growths."""
    histories: list[list[Growth]] = [[] for _ in range(count)]
    going, step = list(range(count)), 0
    while going:
        particles = [histories[i][-1].particle if histories[i] else model.start() for i in going]
        for i, growth in zip(going, await model.grow(particles, 1000 * seed + step), strict=True):
            histories[i].append(growth)
        step += 1
        going = [
            i
            for i in going
            if histories[i][-1].log_weight > -math.inf and not histories[i][-1].particle.finished
        ]
    return [tuple(history) for history in histories]


async def exact_chains(model: Model, count: int, *, most: int = 400) -> Chains:
    """Up to ``most`` chains that begin with independent, exact draws, for models with weights up to 1."""
    rng = np.random.default_rng(0)
    histories = await grown(model, count, 1)
    chains = []
    for history in histories:
        log_weight = sum(growth.log_weight for growth in history)
        assert log_weight <= 1e-6
        if math.log1p(-rng.random()) <= log_weight:
            chains.append(Chain(history))
    return Chains(tuple(chains[:most]), 1, 7)


async def moved(model: Model, state: Chains, *, steps: int) -> tuple[list[Any], list[Moves]]:
    """Where the chains are after so many moves, as the model's values, and the moves."""
    sampler = MetropolisHastings(model, num_chains=1, num_steps=1)
    moves = []
    for _ in range(steps):
        state, made = await sampler.step(state)
        moves.append(made)
    return [model.value(chain.particle) for chain in state.chains if chain], moves


async def by_hand(p: Execution) -> tuple[int, ...]:
    """A text with a potential, as a program."""
    tokens: list[int] = []
    while len(tokens) < 5:
        mask = [4] if len(tokens) == 4 else [0, 1, 2, 4] if tokens else [1, 2]
        token = await p.sample([*PROMPT, *tokens], mask=mask)
        if token == 4:
            break
        tokens.append(token)
        p.observe(-0.4)
    return tuple(tokens)


def by_hands_law() -> dict[Any, float]:
    law: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for ids, logprob in MODEL.enumerate(PROMPT, 5):
        text = ids[:-1]
        if text and text[0] in (1, 2) and set(text) <= {0, 1, 2}:
            law[text] += math.exp(logprob - 0.4 * len(text))
    total = sum(law.values())
    return {text: weight / total for text, weight in law.items()}


def case(name: str, lm: AsyncLM) -> tuple[Model, dict[Any, float]]:
    """A model, and the law of its values."""
    if name == "program":
        return Program(lm, by_hand), by_hands_law()
    options: dict[str, Any] = {"max_tokens": 5}
    if name in ("temperature", "awrs", "mask"):
        options["temperature"] = 3.0
    if name in ("constraint", "twist", "temperature"):
        options["constraint"] = regex(PATTERN, lm)
    if name in ("awrs", "mask"):
        options["constraint"] = predicate(no_bb, lm)
    if name in ("potential", "twist"):
        options["potential"] = likes_short
    exact = exact_posterior(MODEL, PROMPT, **options)
    if name == "twist":
        options["twist"] = likes_short
    if name in ("awrs", "mask"):
        options["proposal"] = name
    law = {text.decode(): probability for text, probability in exact.texts.items()}
    return TextModel(lm, PROMPT, **options), law


CASES = [
    "plain", "constraint", "potential", "twist", "temperature", "awrs", "mask", "program",
]  # fmt: skip


RARE = NGram([b"a", b"b", b""], torch.tensor([[0.7, 0.1, 0.2]] * 3).log(), eos_token_id=2)


def two_bs(text: Text) -> float:
    return 0.0 if text.bytes.count(b"b") == 2 else -math.inf


# -- the law ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
async def test_moves_leave_the_law_as_it_is(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model, law = case(name, lm)
        state = await exact_chains(model, 400 if name == "plain" else 1400)
        assert len(state.chains) > 80
        assert_samples_from([model.value(each.particle) for each in state.chains if each], law)
        for steps in (1, 4):
            values, moves = await moved(model, state, steps=steps)
            assert_samples_from(values, law)
        rate = np.mean([made.accepted.mean() for made in moves])
        assert 0.2 < rate <= 1


async def test_without_weights_and_with_one_length_every_move_is_taken() -> None:
    endless = NGram.random([b"a", b"b", b"c"], seed=1)
    with genrt.load(endless, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=4)
        state = await exact_chains(model, 50)
        _, moves = await moved(model, state, steps=5)
    assert all(made.accepted.all() and not made.log_ratios.any() for made in moves)
    assert {int(cut) for made in moves for cut in made.cuts} == {0, 1, 2, 3}


async def test_ratios_are_those_of_the_detailed_balance() -> None:
    """By hand, from the texts before and after: weights of suffixes, and how many cuts there are."""
    with genrt.load(MODEL, engine="exact") as lm:
        model, _ = case("twist", lm)
        state = await exact_chains(model, 1500)
        sampler = MetropolisHastings(model, num_chains=1, num_steps=1)
        after, made = await sampler.step(state)
    lengths = set()
    for old, new, cut, accepted, ratio in zip(
        state.chains, after.chains, made.cuts, made.accepted, made.log_ratios, strict=True
    ):
        assert old is not None
        assert new is not None
        assert 0 <= cut < len(old.growths)
        assert [g.token_id for g in new.growths[:cut]] == [g.token_id for g in old.growths[:cut]]
        if not accepted:
            assert new is old
            continue
        gained = sum(g.log_weight for g in new.growths) - sum(g.log_weight for g in old.growths)
        expected = gained + math.log(len(old.growths) / len(new.growths))
        assert ratio == pytest.approx(expected, abs=1e-9)
        lengths.add(len(new.growths) - len(old.growths))
    assert len(lengths) > 2


# -- runs -------------------------------------------------------------------------------------


def same(first: Result, second: Result) -> bool:
    return (first.texts, first.token_ids) == (second.texts, second.token_ids)


@pytest.mark.parametrize("name", ["constraint", "awrs", "program"])
async def test_a_seed_makes_a_run_whatever_is_cached(name: str) -> None:
    results = []
    runtimes: list[dict[str, Any]] = [{}, {"cache_bytes": 0}, {"max_batch_size": 1}]
    for options in runtimes:
        with genrt.load(MODEL, engine="exact", **options) as lm:
            sampler = MetropolisHastings(case(name, lm)[0], num_chains=5, num_steps=6)
            results.append(await sampler.run(3))
    assert all(same(result, results[0]) for result in results)
    with genrt.load(MODEL, engine="exact") as lm:
        sampler = MetropolisHastings(case(name, lm)[0], num_chains=5, num_steps=6)
        assert not same(await sampler.run(4), results[0])


@pytest.mark.parametrize("name", ["twist", "program"])
async def test_a_run_is_its_steps_and_each_may_be_taken_again(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model, _ = case(name, lm)
        sampler = MetropolisHastings(model, num_chains=4, num_steps=5, warm_up=2)
        seen: list[tuple[Chains, Moves]] = []
        result = await sampler.run(1, on_step=lambda state, moves: seen.append((state, moves)))
        state, states, counted = sampler.init(1), [], []
        async for after, moves in sampler.steps(sampler.init(1)):
            again, _ = await sampler.step(state)
            assert [chain.particle.token_ids for chain in again.chains if chain] == [
                chain.particle.token_ids for chain in after.chains if chain
            ]
            state = after
            if moves.step > 2:
                states.append(after)
                counted.append(moves)
            if moves.step == 5:
                break
        by_steps = sampler.result(states, moves=counted)
    assert same(by_steps, result)
    assert by_steps.chains is not None
    assert result.chains is not None
    assert by_steps.chains.acceptance.tolist() == result.chains.acceptance.tolist()
    assert by_steps.chains.log_weights.tolist() == result.chains.log_weights.tolist()
    assert [moves.step for _, moves in seen] == list(range(6))
    assert len(result.texts) == 4 * 3


async def test_cancelling_a_step_leaves_the_state_good() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        for name in ("awrs", "program"):
            sampler = MetropolisHastings(case(name, lm)[0], num_chains=4, num_steps=6)
            expected, state, states = await sampler.run(2), sampler.init(2), list[Chains]()
            for turns in range(7):
                step = asyncio.ensure_future(sampler.step(state))
                for _ in range(7 * turns):
                    await asyncio.sleep(0)
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
                state, _ = await sampler.step(state)
                if turns:
                    states.append(state)
            assert same(sampler.result(states), expected)


# -- how well chains mixed --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["constraint", "twist", "program"])
async def test_a_result_has_its_chains(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model, _ = case(name, lm)
        sampler = MetropolisHastings(model, num_chains=6, num_steps=9, warm_up=3)
        seen: list[tuple[Chains, Moves]] = []
        result = await sampler.run(1, on_step=lambda state, moves: seen.append((state, moves)))
        chains = result.chains
        assert chains is not None
        counted = [(state, moves) for state, moves in seen if moves.step > 3]
        for place in range(6):
            visited = [state.chains[place] for state, _ in counted]
            for step, chain in enumerate(visited):
                assert chain is not None
                assert chains.values[place][step] == model.value(chain.particle)
                assert chains.lengths[place, step] == len(chain.particle.token_ids)
                gained = sum(growth.log_weight for growth in chain.growths)
                assert chains.log_weights[place, step] == pytest.approx(gained)
            accepted = [bool(moves.accepted[place]) for _, moves in counted]
            assert chains.acceptance[place] == pytest.approx(np.mean(accepted))
    assert sorted(map(str, result.values)) == sorted(
        str(value) for each in chains.values for value in each
    )
    assert chains.missing == 0
    assert result.ess == chains.ess <= len(result.texts)
    assert result.diagnose(len).ess_mean <= len(result.texts)


async def test_states_of_one_run_make_a_result() -> None:
    with genrt.load(RARE, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=4, potential=two_bs)
        sampler = MetropolisHastings(model, num_chains=40, num_steps=5, attempts=5)
        state, states, moves = sampler.init(0), [], []
        for _ in range(6):
            state, made = await sampler.step(state)
            states.append(state)
            moves.append(made)
        result = sampler.result(states, moves=moves)
        assert result.chains is not None
        found = [chain is not None for chain in state.chains]
        assert result.chains.missing == 40 - sum(found) > 0
        assert result.chains.log_weights.shape == (sum(found), 6)
        taken = np.mean([made.accepted[found] for made in moves[1:]], axis=0)
        assert result.chains.acceptance.tolist() == taken.tolist()
        without = sampler.result(states).chains
        assert without is not None
        assert np.isnan(without.acceptance).all()
        nothing = sampler.result([])
        assert (nothing.texts, nothing.ess, nothing.posterior()) == ((), 0.0, [])
        with pytest.raises(InvalidRequest, match="different chains: give those of one run"):
            sampler.result([sampler.init(0), *states])


async def test_chains_are_missing_of_those_that_there_are() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        sampler = MetropolisHastings(TextModel(lm, [0], max_tokens=3), num_chains=4, num_steps=2)
        state, _ = await sampler.step(sampler.init(0))
        fewer = Chains((*state.chains[:2], None), state.step, state.seed)
        result = sampler.result([fewer, (await sampler.step(fewer))[0]])
    assert result.chains is not None
    assert (len(result.chains.values), result.chains.missing) == (2, 1)


async def test_other_results_have_no_chains_to_diagnose() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        result = await SMC(TextModel(lm, PROMPT, max_tokens=2), num_particles=2).run(0)
    assert result.chains is None
    with pytest.raises(InvalidRequest, match="MetropolisHastings has chains"):
        result.diagnose(len)


# -- how chains begin -------------------------------------------------------------------------


async def test_some_chains_may_find_none_and_the_others_go_on() -> None:
    with genrt.load(RARE, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=4, potential=two_bs)
        sampler = MetropolisHastings(model, num_chains=40, num_steps=3, attempts=5)
        state, seen = sampler.init(0), []
        for _ in range(4):
            state, moves = await sampler.step(state)
            seen.append(moves)
        found = np.array([chain is not None for chain in state.chains])
        assert 0 < found.sum() < 40
        assert seen[0].accepted.tolist() == found.tolist()
        for moves in seen[1:]:
            assert not moves.accepted[~found].any()
            assert (moves.log_ratios[~found] == -math.inf).all()
        assert all(model.text(chain.particle).count("b") == 2 for chain in state.chains if chain)


async def test_attempts_are_made_for_the_chains_that_need_them_alone() -> None:
    sizes: list[int] = []

    class Watched:
        def __init__(self, model: TextModel) -> None:
            self.max_steps, self.start = model.max_steps, model.start
            self.text, self.value, self._model = model.text, model.value, model

        async def grow(self, particles: Sequence[Any], seed: int) -> list[Growth]:
            if particles[0].token_ids == ():
                sizes.append(len(particles))
            return await self._model.grow(particles, seed)

    with genrt.load(RARE, engine="exact") as lm:
        watched = Watched(TextModel(lm, PROMPT, max_tokens=4, potential=two_bs))
        sampler = MetropolisHastings(watched, num_chains=30, num_steps=1)
        await sampler.step(sampler.init(0))
    assert sizes[0] == 30
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) > 1


# -- wrong use --------------------------------------------------------------------------------


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=2)
        with pytest.raises(InvalidRequest, match="nothing is counted"):
            MetropolisHastings(model, num_chains=2, num_steps=2, warm_up=2)
