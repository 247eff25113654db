"""SAMPLERS × LAWS: what holds of every algorithm on every kind of model, whatever its state.

Evidence and posterior are in ``test_algorithms.py``.
"""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import genrt
from genrt.constraints import predicate, regex
from genrt.engines.exact import NGram
from genrt.errors import Closed
from genrt.inference import (
    AWRS,
    END_TOKEN,
    SMC,
    BestOfN,
    Execution,
    Law,
    MetropolisHastings,
    ParticleGibbs,
    Program,
    Rejection,
    Result,
    TextModel,
    beam_search,
    best_first,
    evidence_bounds,
    importance_sampling,
    infilling,
    multinomial,
    partial,
    resample_move,
    residual,
    stochastic_beam_search,
    stratified,
    tempered,
    without_replacement,
)
from genrt.lm import AsyncLM
from genrt.tokens.texts import Text

TOKENS = [b"a", b"b", b"ab", b"ba", b""]
MODEL = NGram.random(TOKENS, seed=3, zeros=0.25, eos_token_id=4)
NOISE = 0.4 * torch.randn(5, 5, generator=torch.Generator().manual_seed(8))
SMALL = NGram(TOKENS, (0.7 * MODEL.table).clamp(min=-3.0) + NOISE, eos_token_id=4)


def likes_b(text: Text) -> float:
    return 0.6 * text.bytes.count(b"b") - 2.0


async def likes_b_later(text: Text) -> float:
    await asyncio.sleep(0)
    return likes_b(text)


def even(text: Text) -> bool:
    return not text.finished or len(text.bytes) % 2 == 0


async def by_hand(p: Execution) -> tuple[int, ...]:
    tokens: list[int] = []
    while len(tokens) < 4 and await p.uniform() < 0.8:
        tokens.append(await p.sample([0, *tokens], mask=[0, 1, 2]))
        p.observe(-0.4)
    await p.condition([0, *tokens], [1])
    return tuple(tokens)


async def by_texts(p: Execution) -> tuple[int, ...]:
    context = p.context([0])
    first = await p.text(context, max_tokens=2, stop=None, constraint=regex("(a|b){1,3}", p.lm))
    context.extend(first.token_ids)
    p.observe(likes_b(first))
    return *first.token_ids, *(await p.text(context, max_tokens=2)).token_ids


def text(lm: AsyncLM, **options: Any) -> TextModel:
    return TextModel(lm, [0], **({"max_tokens": 5} | options))


def words(lm: AsyncLM, **options: Any) -> TextModel:
    return text(lm, constraint=regex("(a|b){2,5}b", lm), **options)


def smc(model: Any, **options: Any) -> SMC:
    return SMC(model, **({"num_particles": 8, "resample_when": 1.0} | options))


SAMPLERS: dict[str, Callable[[AsyncLM, AsyncLM], Any]] = {
    "importance sampling": lambda lm, small: importance_sampling(words(lm), num_particles=8),
    "SMC": lambda lm, small: smc(words(lm), resample=stratified),
    "SMC, without a constraint": lambda lm, small: smc(
        text(lm, twist=likes_b), resample=multinomial
    ),
    "SMC, twisted": lambda lm, small: smc(
        words(lm, potential=likes_b_later, twist=likes_b), resample=residual
    ),
    "SMC, strings": lambda lm, small: smc(text(lm, stop=["bb", "aba", END_TOKEN], twist=likes_b)),
    "SMC, no stop": lambda lm, small: smc(words(lm, stop=None), resample=partial),
    "SMC, tempered": lambda lm, small: smc(words(lm, temperature=0.7, stop=[END_TOKEN, 0])),
    "SMC, by rejection": lambda lm, small: smc(text(lm, constraint=predicate(even, lm))),
    "SMC, by few rejections": lambda lm, small: smc(
        text(lm, constraint=predicate(even, lm), proposal=AWRS(accepts=3, rejects=2))
    ),
    "SMC, in blocks": lambda lm, small: smc(words(lm, proposal=small, unit=3)),
    "SMC, two laws": lambda lm, small: smc(
        TextModel([Law(lm, [0], power=1.5), Law(small, [1])], max_tokens=5, twist=likes_b)
    ),
    "SMC, up to a string": lambda lm, small: smc(words(lm, twist=likes_b, unit="b")),
    "resample-move": lambda lm, small: resample_move(
        words(lm, twist=likes_b, unit=2), num_particles=8, moves=2, below=1.0
    ),
    "without replacement": lambda lm, small: without_replacement(
        words(lm, twist=likes_b), num_particles=6, branches=3
    ),
    "beam search": lambda lm, small: beam_search(text(lm), width=4, branches=3, reward=likes_b),
    "tempered": lambda lm, small: tempered(words(lm), likes_b_later, num_particles=8, ess=0.9),
    "particle Gibbs": lambda lm, small: ParticleGibbs(
        words(lm, potential=likes_b, twist=likes_b), num_particles=3, num_chains=2, num_steps=4
    ),
    "particle Gibbs, ancestors": lambda lm, small: ParticleGibbs(
        words(lm, twist=likes_b), num_particles=3, num_chains=2, num_steps=4, ancestors=True
    ),
    "stochastic beam": lambda lm, small: stochastic_beam_search(words(lm), width=6),
    "best first": lambda lm, small: best_first(words(lm), num_texts=4, width=2),
    "program": lambda lm, small: smc(Program(lm, by_hand)),
    "program of texts": lambda lm, small: smc(Program(lm, by_texts)),
    "infilling": lambda lm, small: smc(infilling(lm, [0], [1], max_tokens=3)),
    "chains": lambda lm, small: MetropolisHastings(
        words(lm, twist=likes_b, potential=likes_b), num_chains=4, num_steps=6, warm_up=2
    ),
    "chains, by rejection": lambda lm, small: MetropolisHastings(
        text(lm, constraint=predicate(even, lm)), num_chains=3, num_steps=5
    ),
    "chains of a program": lambda lm, small: MetropolisHastings(
        Program(lm, by_hand), num_chains=3, num_steps=6
    ),
    "rejection": lambda lm, small: Rejection(words(lm), num_samples=6, max_texts=300, batch_size=8),
    "best of N": lambda lm, small: BestOfN(text(lm, potential=likes_b_later), n=8),
    "best of N, constrained": lambda lm, small: BestOfN(words(lm, potential=likes_b), n=8),
}


def known(lm: AsyncLM, small: AsyncLM, **options: Any) -> tuple[TextModel, Any]:
    """A model, and texts that it may write, as traces."""
    model = words(lm, **options)
    tokens = [(*each, 1, 4) for count in (2, 3) for each in product(range(3), repeat=count)]
    return model, lambda: model.follow([model.start()] * len(tokens), tokens)


def known_texts(lm: AsyncLM, small: AsyncLM) -> Any:
    _, follow = known(lm, small, twist=likes_b)

    async def ask() -> Any:
        return [[(unit.gain, unit.tokens) for unit in each.path()] for each in await follow()]

    return ask


def bounds(lm: AsyncLM, small: AsyncLM) -> Any:
    model, follow = known(lm, small)
    sampler = smc(model, resample=multinomial)

    async def ask() -> Any:
        traces = [each for each in await follow() if each.gain > -math.inf]
        return repr(await evidence_bounds(sampler, traces, runs=2, seed=7))

    return ask


def asked(name: str, lm: AsyncLM, small: AsyncLM) -> Callable[[], Awaitable[Any]]:
    """A run of a sampler, known texts or bounds; what it gives can be compared."""
    if name not in SAMPLERS:
        return KNOWN[name](lm, small)  # type: ignore[no-any-return]
    sampler = SAMPLERS[name](lm, small)

    async def ask() -> Any:
        return figures(await sampler.run(7))

    return ask


KNOWN: dict[str, Callable[[AsyncLM, AsyncLM], Any]] = {"known texts": known_texts, "bounds": bounds}

RESAMPLED = "SMC", "program", "infilling", "resample", "without", "tempered"


def figures(result: Result) -> Any:
    """The numbers and texts of a result, which can be compared."""
    chains = result.chains
    return (
        (result.texts, result.token_ids, result.values),
        (result.log_weights.tolist(), repr(result.log_evidence), result.deaths),
        [(info.ancestors.tolist(), info.token_ids.tolist()) for info in result.infos],
        None if chains is None else (chains.acceptance.tolist(), chains.log_weights.tolist()),
    )


def content(state: Any) -> Any:
    """What a state holds, which can be compared."""
    particles = [[(unit.gain, unit.tokens) for unit in each.path()] for each in state.particles]
    return particles, state.log_weights.tolist(), state.step


def without_places(state: Any) -> Any:
    """The same state, of which no text knows its place in a population, and no program runs."""

    return replace(state, particles=tuple(map(copy.copy, state.particles)))


def test_every_part_of_the_table_differs() -> None:
    """Samplers that resample do, and their runs have dead ends, so that the laws say something."""
    seen = set()
    with genrt.load(MODEL, engine="exact") as lm, genrt.load(SMALL, engine="exact") as small:
        for name, make in SAMPLERS.items():
            result = make(lm, small).run_sync(7)
            resampled = any(info.resampled for info in result.infos)
            assert resampled == name.startswith(RESAMPLED), name
            seen |= {"dead"} if -math.inf in result.log_weights else {"alive"}
            assert len(set(result.values)) > 1, name
    assert seen == {"dead", "alive"}


@pytest.mark.promise(number=16)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_makes_a_run_whatever_is_cached_or_batched(name: str) -> None:
    """On every event loop, too."""
    runs = []
    runtimes: list[dict[str, Any]] = [{}, {"cache_bytes": 0}, {"max_batch_size": 1}]
    for options in [*runtimes, {"cache_bytes": 40}]:
        with (
            genrt.load(MODEL, engine="exact", **options) as lm,
            genrt.load(SMALL, engine="exact", **options) as small,
        ):
            sampler = SAMPLERS[name](lm, small)
            runs.append(figures(asyncio.run(sampler.run(7))))
            other = figures(sampler.run_sync(8))
    assert runs == [runs[0]] * len(runs)
    assert (other != runs[0]) == (name != "best first")  # which draws nothing


@pytest.mark.parametrize("name", SAMPLERS)
async def test_a_run_is_its_steps_and_a_state_is_a_value(name: str) -> None:
    """Stepped twice, by two at once, after a cancelled step, and without its places, a state gives the
    same."""
    seen: list[Any] = []
    with genrt.load(MODEL, engine="exact") as lm, genrt.load(SMALL, engine="exact") as small:
        sampler = SAMPLERS[name](lm, small)
        whole = await sampler.run(1, on_step=lambda state, info: seen.append((state, info)))
        state, infos = sampler.init(1), list[Any]()
        while not sampler.is_done(state):
            cancelled = asyncio.ensure_future(sampler.step(state))
            for _ in range(3 * len(infos) + 1):
                await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            stepped = await asyncio.gather(
                *map(sampler.step, [state, state, without_places(state)])
            )
            assert all(content(each) == content(stepped[0][0]) for each, _ in stepped)
            state, info = stepped[0]
            infos.append(info)
            assert content(seen[len(infos) - 1][0]) == content(state)
        assert len(seen) == len(infos)
        assert figures(sampler.result(state, infos=infos)) == figures(whole)
        half = len(seen) // 2
        rest = [info async for _, info in sampler.steps(seen[half][0])]
        infos[half + 1 :] = rest
        assert figures(sampler.result(state, infos=infos)) == figures(whole)


@pytest.mark.parametrize("name", SAMPLERS)
async def test_a_step_on_a_closed_runtime_says_so_and_one_on_a_restarted_one_goes_on(
    name: str,
) -> None:
    lm, small = genrt.load(MODEL, engine="exact"), genrt.load(SMALL, engine="exact")
    sampler = SAMPLERS[name](lm, small)
    state = sampler.init(0)
    if not name.startswith(("best", "stochastic", "rejection")):
        state, _ = await sampler.step(state)
    wanted, _ = await sampler.step(state)
    await lm.arestart()
    await small.arestart()
    assert content((await sampler.step(state))[0]) == content(wanted)
    await lm.aclose()
    await small.aclose()
    for _ in range(2):
        with pytest.raises(Closed):
            await sampler.step(without_places(state))


@pytest.mark.parametrize("name", [*SAMPLERS, *KNOWN])
async def test_a_run_is_the_same_whatever_happens_in_its_middle(name: str) -> None:
    """After it was cancelled at several points, while its rows and prefixes are dropped, and while the
    same weights are loaded again; with other weights it ends."""
    with genrt.load(MODEL, engine="exact") as lm, genrt.load(SMALL, engine="exact") as small:
        ask, same = asked(name, lm, small), {"table": MODEL.table}
        await lm.update_weights(same)
        wanted = await ask()
        for passes in (1, 4, 13):
            cancelled = asyncio.ensure_future(ask())
            for _ in range(passes):
                await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
        for weights in ({}, same, {"table": SMALL.table}):
            run, version = asyncio.ensure_future(ask()), lm.weights_version
            while not run.done():
                lm.clear_cache()
                lm.reset_prefix_cache()
                if weights and lm.weights_version < version + 3:
                    await lm.update_weights(weights)
                await asyncio.sleep(0)
            found = await run  # other weights may come after its last question
            assert found == wanted or (weights and weights is not same)
        assert await ask() != wanted


@pytest.mark.parametrize("name", KNOWN)
async def test_known_texts_of_a_closed_runtime_say_so(name: str) -> None:
    lm, small = genrt.load(MODEL, engine="exact"), genrt.load(SMALL, engine="exact")
    ask = asked(name, lm, small)
    wanted = await ask()
    await lm.arestart()
    assert await ask() == wanted
    await lm.aclose()
    await small.aclose()
    with pytest.raises(Closed):
        await ask()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_result_counts_its_questions_and_is_shown_and_pickled(name: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm, genrt.load(SMALL, engine="exact") as small:
        before = lm.statistics()
        result = SAMPLERS[name](lm, small).run_sync(0)
        assert result.statistics == lm.statistics().since(before)
    again = pickle.loads(pickle.dumps(result))  # noqa: S301
    assert figures(again) == figures(result)
    for each in (result, again):
        shown = str(each)
        assert ("resampled" in shown) == bool(result.infos)
        assert ("log evidence" in shown) == (not math.isnan(result.log_evidence))
        assert "nan" not in shown
        assert shown == str(result)
    for value in (result.log_weights, *(info.ancestors for info in result.infos)):
        with pytest.raises(ValueError, match="read-only"):
            value[:1] = 0
