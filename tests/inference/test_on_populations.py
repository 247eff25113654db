"""Inference on populations: each step goes on from the one before by number; whatever loses that place (a
copy, another order, a cancelled step, a restart, an eviction) gives the same texts and weights by the
texts' tokens."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.errors import Closed
from genrt.inference import SMC, MetropolisHastings, State, TextModel, importance_sampling
from genrt.inference.trails import Trail
from genrt.lm import AsyncLM
from genrt.populations import Population
from tests.inside import engine_of, populations_of

NGRAM = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.1, eos_token_id=4)
PROMPT = [5, 6, 7, 8]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**25,
}


@pytest.fixture
async def exact() -> AsyncIterator[AsyncLM]:
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        yield lm


@pytest.fixture(scope="module")
def lm(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine_options=OPTIONS, cache_bytes=0) as runtime:
        yield runtime


def populations_in(state: State) -> list[Population]:
    """The populations that a state's particles go on from."""
    frontiers = {particle.trail.frontier for particle in state.particles} - {None}
    return [each.population for each in frontiers if each.population is not None]


def forgetful(state: State) -> State:
    """The same state, of which no particle knows its place."""
    particles = tuple(
        replace(particle, trail=Trail.of(particle.generated)) for particle in state.particles
    )
    return State(particles, state.log_weights, state.step, state.seed)


def told(state: State) -> tuple[list[tuple[int, ...]], list[float]]:
    return [each.token_ids for each in state.particles], state.log_weights.tolist()


async def test_with_places_and_without_the_same_is_drawn(exact: AsyncLM) -> None:
    """Resampled, constrained, dying and ending particles, over many seeds: texts and weights are equal,
    and every step but the first goes on by number where places are known."""
    for seed in range(8):
        constraint = regex("(a|b)*a", exact) if seed % 2 else None
        model = TextModel(exact, [0], max_tokens=7, constraint=constraint)
        smc = SMC(model, num_particles=12, resample_when=0.9)
        state = other = smc.init(seed)
        while not state.done:
            (state, _), (other, _) = await smc.step(state), await smc.step(forgetful(other))
            assert told(state) == told(other)
            assert len(populations_in(state)) <= 1


async def test_a_state_is_a_value(exact: AsyncLM) -> None:
    """Stepped twice, by two at once, and from a pickle, it gives the same."""
    smc = SMC(TextModel(exact, [0], max_tokens=9), num_particles=8, resample_when=1.0)
    state = smc.init(1)
    for _ in range(6):
        pickled = State(
            pickle.loads(pickle.dumps(state.particles)),  # noqa: S301
            state.log_weights,
            state.step,
            state.seed,
        )
        stepped = await asyncio.gather(smc.step(state), smc.step(state), smc.step(pickled))
        again = await smc.step(state)
        assert [told(each) for each, _ in [*stepped, again]] == [told(again[0])] * 4
        state = stepped[0][0]


async def test_a_history_holds_no_arrays(exact: AsyncLM) -> None:
    """Of all the states of a run only the last has a population; nor do particles that ended or died."""
    smc = importance_sampling(TextModel(exact, [0], max_tokens=12), num_particles=32)
    states, populations = [smc.init(0)], []
    async for state, _ in smc.steps(states[0]):
        states.append(state)
        populations += [weakref.ref(each) for each in populations_in(state)]
    gc.collect()
    assert len(populations) > 4
    assert len({id(each()) for each in populations} - {id(None)}) <= 1
    assert [len(populations_in(state)) for state in states[:-1]] == [0] * (len(states) - 1)


async def test_chains_of_different_histories_go_on(exact: AsyncLM) -> None:
    """Metropolis-Hastings cuts each text elsewhere, and grows them side by side."""
    model = TextModel(exact, [0], max_tokens=6)
    chains = MetropolisHastings(model, num_chains=6, num_steps=20)
    state = other = chains.init(3)
    for _ in range(20):
        (state, _), (other, _) = await chains.step(state), await chains.step(copy.deepcopy(other))
        texts = [
            [chain.particle.token_ids for chain in each.chains if chain is not None]
            for each in (state, other)
        ]
        assert texts[0] == texts[1]


async def test_a_cancelled_step_is_made_again(exact: AsyncLM) -> None:
    smc = SMC(TextModel(exact, [0], max_tokens=9), num_particles=8, resample_when=1.0)
    state, _ = await smc.step(smc.init(5))
    for turns in range(12):
        step = asyncio.ensure_future(smc.step(state))
        for _ in range(turns):
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        made, _ = await smc.step(state)
        assert told(made) == told((await smc.step(forgetful(state)))[0])


async def test_after_the_runtime_closed_a_step_says_so() -> None:
    async with await genrt.aload(NGRAM, engine="exact") as lm:
        smc = SMC(TextModel(lm, [0], max_tokens=9), num_particles=8)
        state, _ = await smc.step(smc.init(0))
    for _ in range(2):
        with pytest.raises(Closed):
            await smc.step(state)


# -- on vLLM ------------------------------------------------------------------------------------


def seated(lm: AsyncLM) -> list[bool]:
    """Which populations that were asked from now on went on by number."""
    engine = engine_of(lm)
    inner, found = populations_of(engine), []
    take = inner.go_on

    def go_on(*arguments: Any) -> Any:
        taken = take(*arguments)
        found.append(taken is not None)
        return taken

    inner.go_on = go_on
    return found


@pytest.mark.vllm
async def test_steps_go_on_by_number_on_vllm(lm: AsyncLM) -> None:
    """The first step finds its prompt; later ones look for no context, while particles part and meet."""
    went_on = seated(lm)
    smc = SMC(TextModel(lm, PROMPT, max_tokens=20, stop=None), num_particles=8, resample_when=1.0)
    state, before = smc.init(0), lm.statistics().engine
    while not state.done:
        state, _ = await smc.step(state)
    assert went_on == [True] * 19
    after = lm.statistics().engine
    assert after.computed_tokens - before.computed_tokens < len(PROMPT) + 8 * 20
    del populations_of(engine_of(lm)).go_on


LOSSES = {2: "evict", 4: "cancel", 6: "forget", 8: "restart", 11: "evict", 12: "cancel"}


@pytest.mark.vllm
async def test_losses_between_steps_change_no_text(lm: AsyncLM) -> None:
    """Beside an undisturbed run of the same seed."""
    model = TextModel(lm, PROMPT, max_tokens=14, stop=None)
    smc = SMC(model, num_particles=12, resample_when=1.0)
    quiet = [state async for state, _ in smc.steps(smc.init(9))]
    state = smc.init(9)
    for step, wanted in enumerate(quiet):
        match LOSSES.get(step):
            case "restart":
                await lm.arestart()
            case "evict":
                await lm.batch_next_token_logprobs([[number, 3, 2] for number in range(64)])
            case "cancel":
                cancelled = asyncio.ensure_future(smc.step(state))
                await asyncio.sleep(0.0)
                cancelled.cancel()
                await asyncio.gather(cancelled, return_exceptions=True)
            case "forget":
                state = forgetful(state)
        state, _ = await smc.step(state)
        assert told(state)[0] == told(wanted)[0]
        assert np.allclose(state.log_weights, wanted.log_weights, atol=1e-3)
    assert lm.statistics().batcher.in_flight == 0
