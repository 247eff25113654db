"""Conditional SMC: known texts as traces, ancestor sampling, bounds of the evidence, against enumeration.

Exact draws of the target begin everything. Seeds are fixed; each statistical assertion fails for right
code with probability under 1e-5, had the seeds been drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import genrt
from genrt.constraints import predicate, regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    SMC,
    Bounds,
    Law,
    ParticleGibbs,
    Program,
    State,
    TextModel,
    evidence_bounds,
    importance_sampling,
    multinomial,
)
from genrt.inference.kernels import conditional
from genrt.inference.model import Trace
from genrt.inference.texts import TextTrace
from genrt.lm import AsyncLM
from genrt.testing import ExactPosterior, assert_samples_from, exact_posterior
from genrt.tokens.texts import Text

MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=4)
LENGTH = 5


def likes_short(text: Text) -> float:
    return -0.9 * len(text.token_ids)


def problem(name: str, lm: AsyncLM) -> tuple[TextModel, ExactPosterior]:
    constraint = regex("(a|b){2,5}b", lm)
    more: dict[str, dict[str, Any]] = {
        "free": {"twist": likes_short, "stop": [1, 4]},
        "dead ends": {"constraint": constraint, "twist": likes_short, "stop": [0, 4]},
        "proposed": {
            "constraint": constraint,
            "proposal": Law(lm, [1], temperature=2.0),
            "unit": 2,
        },
        "up to a string": {"constraint": constraint, "unit": "b", "stop": None},
        "no stop": {"constraint": constraint, "twist": likes_short, "stop": None},
    }
    options: dict[str, Any] = {"max_tokens": LENGTH, "potential": likes_short}
    told = {k: v for k, v in more[name].items() if k in ("constraint", "stop")}
    exact = exact_posterior(MODEL, [0], **options, **told)
    return TextModel(lm, [0], **options, **more[name]), exact


async def exact_traces(model: TextModel, exact: ExactPosterior, count: int) -> list[TextTrace]:
    """Independent draws of the target as traces; a stop token is drawn by its share."""
    rng = np.random.default_rng(1)
    texts, shares = [*exact.token_ids], np.array([*exact.token_ids.values()])
    chosen = [texts[i] for i in rng.choice(len(texts), count, p=shares / shares.sum())]
    tokens = []
    for ids in chosen:
        row = np.exp(MODEL.row([0, *ids]).double().numpy())
        stops = np.array(sorted(model.ends.token_ids))
        over = model.ends.never or (model.constraint is None and len(ids) == LENGTH)
        ends = [] if over else [int(rng.choice(stops, p=row[stops] / row[stops].sum()))]
        tokens.append((*ids, *ends))
    return await model.follow([model.start()] * count, tokens)


NAMES = ["free", "dead ends", "proposed", "up to a string", "no stop"]


# -- known texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
async def test_known_tokens_have_the_weights_of_drawn_ones(name: str) -> None:
    """Traces that grew, unit by unit, and the same tokens after their first unit."""
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model, _ = problem(name, lm)
        drawn = (await importance_sampling(model, num_particles=60).run(0)).log_weights
        state = importance_sampling(model, num_particles=60).init(0)
        while not state.done:
            state, _ = await importance_sampling(model, num_particles=60).step(state)
        alive = [each for each in state.particles if each.finished and each.gain > -math.inf]
        assert len(alive) > 10
        begun = [each.cut(1) for each in alive]
        tokens = [[t for unit in each.path()[1:] for t in unit.tokens] for each in alive]
        again = await model.follow(begun, tokens)
        assert drawn.tolist() == state.log_weights.tolist()
        for old, new in zip(alive, again, strict=True):
            assert (new.generated, new.finished) == (old.generated, True)
            for before, after in zip(old.path(), new.path(), strict=True):
                assert before.tokens == after.tokens
                assert after.gain == pytest.approx(before.gain, abs=1e-5)
                assert after.log_proposal == pytest.approx(before.log_proposal, abs=1e-5)


async def test_tokens_that_cannot_be_drawn_are_dead() -> None:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model, _ = problem("dead ends", lm)
        wrong = [
            (0, 0),
            (1, 1, 1, 4, 1),
            (2, 2),
        ]  # a stop too early, tokens after the end, no end yet
        found = await model.follow([model.start()] * 3, wrong)
        assert [each.gain > -math.inf for each in found] == [False, False, True]
        assert [each.finished for each in found] == [False, True, False]
        pairs, _ = problem("proposed", lm)
        [odd] = await pairs.follow([pairs.start()], [(2, 2, 1)])  # it stops inside a unit
        assert odd.gain == -math.inf
        slow = TextModel(lm, [0], max_tokens=3, constraint=predicate(lambda text: True, lm))
        with pytest.raises(InvalidRequest, match='give proposal="mask"'):
            await slow.follow([slow.start()], [(1, 4)])


# -- ancestor sampling ------------------------------------------------------------------------


async def one_sweep(name: str, *, ancestors: bool, count: int = 200) -> tuple[float, Any]:
    """The share of the chains whose first unit changed, and the assertion about their law."""
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model, exact = problem(name, lm)
        traces = await exact_traces(model, exact, count)
        gibbs = ParticleGibbs(
            model, num_particles=2, num_chains=1, num_steps=1, ancestors=ancestors
        )
        state, _ = await gibbs.step(State(tuple(traces), np.zeros(count), 1, 7))
    first = [[each.path()[0].tokens for each in own] for own in (traces, state.particles)]
    values = [each.token_ids for each in state.particles]
    changed = float(np.mean([a != b for a, b in zip(*first, strict=True)]))
    return changed, lambda: assert_samples_from(values, exact.token_ids)


@pytest.mark.parametrize("name", NAMES)
async def test_ancestor_sampling_leaves_the_law_as_it_is(name: str) -> None:
    changed, check = await one_sweep(name, ancestors=True)
    check()
    assert changed > 0


async def test_with_ancestor_sampling_beginnings_change_more_often() -> None:
    with_them, _ = await one_sweep("dead ends", ancestors=True, count=150)
    without, _ = await one_sweep("dead ends", ancestors=False, count=150)
    assert with_them > 2 * without


async def test_models_without_known_weights_have_no_ancestors() -> None:
    numbers: dict[str, int] = {"num_particles": 2, "num_chains": 1, "num_steps": 1}
    async with await genrt.aload(MODEL, engine="exact") as lm:

        async def nothing(p: Any) -> None: ...

        slow = TextModel(lm, [0], max_tokens=3, constraint=predicate(lambda text: True, lm))
        for model in (Program(lm, nothing), slow):
            with pytest.raises(InvalidRequest, match="give a TextModel"):
                ParticleGibbs(model, **numbers, ancestors=True)
        with pytest.raises(InvalidRequest, match="True or False"):
            ParticleGibbs(slow, **numbers, ancestors=1)  # type: ignore[arg-type]


# -- bounds of the evidence -------------------------------------------------------------------


async def bounds(name: str, when: float, count: int = 150) -> tuple[Bounds, float]:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model, exact = problem(name, lm)
        traces = await exact_traces(model, exact, count)
        smc = SMC(model, num_particles=6, resample=multinomial, resample_when=when)
        return await evidence_bounds(smc, traces, runs=count, seed=3), exact.log_evidence


def hold(found: Bounds, truth: float) -> bool:
    """Both bounds are true in expectation, so each fails with probability under 1e-5."""
    lower = found.lower - 4.5 * found.lower_error
    return lower < truth < found.upper + 4.5 * found.upper_error


@pytest.mark.parametrize(("name", "when"), [("free", 1.0), ("dead ends", 0.5), ("no stop", 0.0)])
async def test_bounds_hold_the_evidence_between_them(name: str, when: float) -> None:
    found, truth = await bounds(name, when)
    assert hold(found, truth)
    assert found.lower < found.upper


@pytest.mark.parametrize(("name", "when"), [("dead ends", 0.0), ("dead ends", 0.5), ("free", 1.0)])
async def test_the_inverse_evidence_of_conditional_runs_is_unbiased(name: str, when: float) -> None:
    """What makes the upper bound one, without resampling, with some, and at every step. With four
    particles and dead ends, the last has so long a tail that few runs say nothing."""
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model, exact = problem(name, lm)
        traces = await exact_traces(model, exact, 200)
        ratios = []
        for seed, trace in enumerate(traces):
            state = await conditional(model, trace, count=4, seed=seed, below=when)
            assert state.particles[0].token_ids == trace.token_ids
            ratios.append(math.exp(exact.log_evidence - state.log_evidence))
    assert abs(np.mean(ratios) - 1) < 4.5 * np.std(ratios) / math.sqrt(len(ratios)) < 0.5


@pytest.mark.parametrize(
    ("make", "exact", "message"),
    [
        (lambda m: SMC(m, num_particles=2), None, "resample=multinomial"),
        (lambda m: ParticleGibbs(m, num_particles=2, num_chains=1, num_steps=1), None, "give SMC"),
        (lambda m: importance_sampling(m, num_particles=2), [], "exact has None"),
        (lambda m: importance_sampling(m, num_particles=2), ["text"], "exact has 'text'"),
        (lambda m: importance_sampling(m, num_particles=2), [Trace()], "finished traces"),
    ],
)
async def test_wrong_bounds_say_so(
    make: Callable[[TextModel], Any], exact: Sequence[Any] | None, message: str
) -> None:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model, law = problem("free", lm)
        traces = await exact_traces(model, law, 1) if exact is None else exact
        with pytest.raises(InvalidRequest, match=message):
            await evidence_bounds(make(model), traces, runs=2, seed=0)
        single = importance_sampling(model, num_particles=2)
        one = await evidence_bounds(single, await exact_traces(model, law, 1), runs=2, seed=0)
        assert math.isnan(one.upper_error)
