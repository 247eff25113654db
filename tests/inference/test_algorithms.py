"""Every algorithm on models, constraints and potentials that Hypothesis draws, against enumeration.

The first thing that must hold of inference: evidence unbiased and posterior right, zeros and dead ends
included; seeds reproduce; cache and batches make no difference. The examples are the same in every run.
Each assertion has a level of 1e-7 and each test makes at most 30 of them, so that all of them together
fail for right algorithms with probability under 1e-4, had the seeds been drawn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import genrt
from genrt.constraints import CheckedState, amasks
from genrt.engines.exact import NGram
from genrt.inference import (
    END_TOKEN,
    SMC,
    Execution,
    Law,
    MetropolisHastings,
    ParticleGibbs,
    Program,
    Rejection,
    Resampler,
    TextModel,
    importance_sampling,
    multinomial,
    partial,
    resample_move,
    residual,
    stratified,
    systematic,
    tempered,
    without_replacement,
)
from genrt.inference.checks import evaluate_potential
from genrt.lm import AsyncLM
from genrt.testing import (
    ExactPosterior,
    assert_samples_from,
    assert_unbiased,
    assert_variance_bounded,
    assert_weighted_samples_from,
    exact_posterior,
)
from genrt.testing.strategies import constraints, potentials, small_lms
from genrt.tokens.texts import Text

LEVEL = 1e-7
MAX_TOKENS = 3
WORSE = 3.0
"""How many times the variance of independent particles resampling may have, at most."""

REJECTION = 2.5
"""The second moment of a weight of adaptive rejection over its mean's square: at masses above 0.1."""


@dataclass(frozen=True)
class Case:
    """What is drawn: a model, and the options of a ``TextModel`` over its runtime, plain ones, and other
    ends and temperatures."""

    ngram: NGram
    lm: AsyncLM
    options: dict[str, Any]
    other: dict[str, Any]
    twist: Any
    resample: Resampler = systematic

    def text_model(self, **more: Any) -> TextModel:
        return TextModel(self.lm, [0], **self.options, **more)

    @property
    def otherwise(self) -> Case:
        return replace(self, options=self.options | self.other)

    @property
    def exact(self) -> ExactPosterior:
        return exact_posterior(self.ngram, [0], **self.options)

    async def variance(self) -> float:
        """The relative variance of the weight of one text that is drawn token by token under masks: what
        all samplers are held to. As w = pi / q, E[w^2] is the mean of w under the target."""
        exact, constraint = self.exact, self.options.get("constraint")
        potential = self.options.get("potential", lambda text: 0.0)
        mean = 0.0
        for ids, probability in exact.token_ids.items():
            log_weight = await evaluate_potential("potential", potential, [self.text(ids)])
            weight = probability * math.exp(log_weight[0])
            state = None if constraint is None else constraint.start()
            for place in range(len(ids) + 1):
                if state is not None:
                    mask = (await amasks([state]))[0]
                    if place == MAX_TOKENS - 1:
                        mask &= torch.arange(len(mask)) == self.ngram.eos_token_id
                    weight *= float(self.ngram.row([0, *ids[:place]])[mask].exp().sum())
                    state = state if place == len(ids) else state.advance(ids[place])
                    if isinstance(state, CheckedState):
                        weight *= REJECTION
            mean += weight
        return mean / exact.evidence - 1

    def text(self, ids: tuple[int, ...]) -> Text:
        return Text(ids, b"".join(self.lm.byte_vocab[each] for each in ids), True)


Check: TypeAlias = Callable[[Case], Awaitable[None]]


async def weighs(
    runs: Any, case: Case, *, highest: float | None = 1.0, variance: bool = True
) -> None:
    exact = case.exact
    assert_weighted_samples_from(
        runs, exact.token_ids, log_evidence=exact.log_evidence, highest=highest, level=LEVEL
    )
    if variance and exact.token_ids:
        means = [float(np.exp(log_weights).mean()) for _, log_weights in runs]
        bound = WORSE * await case.variance() / len(runs[0][0])
        assert_variance_bounded(
            means, exact.evidence, relative_variance=max(bound, 1e-6), level=LEVEL
        )


async def importance(case: Case) -> None:
    """Without resampling, of plain options, and of other ends and temperatures."""
    for each, own in ((case, {}), (case.otherwise, {"highest": None, "variance": False})):
        result = await importance_sampling(each.text_model(), num_particles=250).run(0)
        weights = zip(result.token_ids, result.log_weights, strict=True)
        runs = [([token_ids], [weight]) for token_ids, weight in weights]
        await weighs(runs, each, **own)  # type: ignore[arg-type]


def smc(*, twisted: bool = False) -> Check:
    async def check(case: Case) -> None:
        more = {"twist": case.twist} if twisted else {}
        sampler = SMC(
            case.text_model(**more), num_particles=5, resample_when=0.9, resample=case.resample
        )
        results = await asyncio.gather(*(sampler.run(seed) for seed in range(40)))
        await weighs(
            [(result.token_ids, result.log_weights) for result in results],
            case,
            highest=None if twisted else 1.0,
            variance=not twisted,  # the twist is any function
        )

    return check


async def proposed(case: Case) -> None:
    """Another model proposes, of the same tokens and with no zeros; other ends and temperatures."""
    case, ngram = case.otherwise, case.ngram
    other = NGram(
        ngram.vocabulary, ngram.table.clamp(min=-3.0) * 0.8, eos_token_id=ngram.eos_token_id
    )
    async with await genrt.aload(other, engine="exact") as small:
        model = case.text_model(proposal=small, unit=2)
        sampler = SMC(model, num_particles=5, resample_when=0.9)
        results = await asyncio.gather(*(sampler.run(seed) for seed in range(40)))
    runs = [(result.token_ids, result.log_weights) for result in results]
    await weighs(runs, case, highest=None, variance=False)


def by_hand(case: Case) -> Program:
    """The ``TextModel`` of the case as a program."""
    eos = case.ngram.eos_token_id
    constraint, potential = case.options.get("constraint"), case.options.get("potential")

    async def program(p: Execution) -> tuple[int, ...]:
        tokens: list[int] = []
        state = None if constraint is None else constraint.start()
        while len(tokens) < MAX_TOKENS:
            mask = None
            if state is not None:
                mask = (await amasks([state]))[0]
                if len(tokens) == MAX_TOKENS - 1:
                    mask &= torch.arange(len(mask)) == eos
            token = await p.sample([0, *tokens], mask=mask)
            if token == eos:
                break
            tokens.append(token)
            state = None if state is None else state.advance(token)
        if potential is not None:
            weight = potential(case.text(tuple(tokens)))
            p.observe(await weight if asyncio.iscoroutine(weight) else weight)
        return tuple(tokens)

    return Program(case.lm, program)


async def program(case: Case) -> None:
    sampler = SMC(by_hand(case), num_particles=5, resample_when=0.9)
    results = await asyncio.gather(*(sampler.run(seed) for seed in range(40)))
    # Texts are weighed as they end, and resampling them beside longer ones has a variance of its own.
    runs = [(result.values, result.log_weights) for result in results]
    await weighs(runs, case, variance=False)


async def metropolis(case: Case) -> None:
    """Chains begin with a draw from their proposal; 15 moves forget it, or these 60 do not show it."""
    exact = case.exact
    for model in (case.text_model(), by_hand(case)):
        sampler = MetropolisHastings(model, num_chains=60, num_steps=15, warm_up=14, attempts=20)
        result = await sampler.run(0)
        found = result.values if isinstance(model, Program) else result.token_ids
        if exact.evidence > 0.3:
            assert len(found) == 60
            assert_samples_from(found, exact.token_ids, level=LEVEL)
        assert set(found) <= set(exact.token_ids)


def log_probability(ngram: NGram, prompt: list[int], ids: tuple[int, ...]) -> float:
    """Of a text, with its end if it is not cut at ``MAX_TOKENS``."""
    end = [] if len(ids) == MAX_TOKENS or ngram.eos_token_id is None else [ngram.eos_token_id]
    tokens = [*prompt, *ids, *end]
    places = range(len(prompt), len(tokens))
    return sum(float(ngram.row(tokens[:place])[tokens[place]]) for place in places)


async def laws(case: Case) -> None:
    """Two prompts and powers multiply: the base law, with the rest as a potential."""
    ngram, own = case.ngram, case.options.get("potential", likes_nothing)

    async def rest(text: Text) -> float:
        more = own(text)
        total = float(await more if asyncio.iscoroutine(more) else more)
        total += 0.5 * log_probability(ngram, [0], text.token_ids)
        return total + 1.25 * log_probability(ngram, [1], text.token_ids)

    exact = exact_posterior(ngram, [0], **(case.options | {"potential": rest}))
    model = TextModel([Law(case.lm, [0], power=1.5), Law(case.lm, [1], power=1.25)], **case.options)
    sampler = SMC(model, num_particles=5, resample_when=0.9, resample=case.resample)
    results = await asyncio.gather(*(sampler.run(seed) for seed in range(40)))
    assert_weighted_samples_from(
        [(result.token_ids, result.log_weights) for result in results],
        exact.token_ids, log_evidence=exact.log_evidence, highest=1.0, level=LEVEL,
    )  # fmt: skip


def recipe(make: Callable[[Any], Any], **more: Any) -> Check:
    async def check(case: Case) -> None:
        sampler = make(case.text_model(**more))
        results = await asyncio.gather(*(sampler.run(seed) for seed in range(40)))
        runs = [(result.token_ids, result.log_weights) for result in results]
        await weighs(runs, case, variance=False)

    return check


async def annealed(case: Case) -> None:
    """The potential comes in by degrees after the texts are whole."""
    options = {name: each for name, each in case.options.items() if name != "potential"}
    potential = case.options.get("potential", likes_nothing)
    sampler = tempered(
        TextModel(case.lm, [0], **options), potential, num_particles=5, temperatures=[0.2, 1.0]
    )
    results = await asyncio.gather(*(sampler.run(seed) for seed in range(40)))
    runs = [(result.token_ids, result.log_weights) for result in results]
    await weighs(runs, case, variance=False)


def likes_nothing(text: Text) -> float:
    return 0.0


async def gibbs(case: Case) -> None:
    exact, model = case.exact, case.text_model(twist=case.twist, unit=2)
    sampler = ParticleGibbs(
        model, num_particles=4, num_chains=60, num_steps=6, warm_up=5, attempts=20
    )
    found = (await sampler.run(0)).token_ids
    if exact.evidence > 0.3:
        assert len(found) == 60
        assert_samples_from(found, exact.token_ids, level=LEVEL)
    assert set(found) <= set(exact.token_ids)


async def rejection(case: Case) -> None:
    """Of other ends and temperatures; a constraint without a stop is refused."""
    if case.other["stop"] is not None or "constraint" not in case.options:
        case = case.otherwise
    exact = case.exact
    sampler = Rejection(case.text_model(), num_samples=3, max_texts=12, batch_size=6, bound=0.3)
    results = await asyncio.gather(*(sampler.run(seed) for seed in range(60)))
    evidence = [math.exp(result.log_evidence) for result in results]
    assert_unbiased(evidence, exact.evidence, highest=math.exp(0.3), level=LEVEL)
    if kept := [token_ids for result in results for token_ids in result.token_ids]:
        assert_samples_from(kept, exact.token_ids, level=LEVEL)


RESAMPLERS: list[Resampler] = [multinomial, stratified, systematic, residual, partial]
ALGORITHMS: dict[str, Check] = {
    "importance sampling": importance,
    "SMC": smc(),
    "SMC, twisted": smc(twisted=True),
    "SMC, proposed in blocks": proposed,
    "two laws": laws,
    "SMC, in units of two": recipe(lambda model: SMC(model, num_particles=5), unit=2),
    "SMC, in units up to a string": recipe(lambda model: SMC(model, num_particles=5), unit="b"),
    "resample-move": recipe(lambda model: resample_move(model, num_particles=5, moves=2)),
    "without replacement": recipe(
        lambda model: without_replacement(model, num_particles=4, branches=3)
    ),
    "tempered": annealed,
    "particle Gibbs": gibbs,
    "program": program,
    "Metropolis-Hastings": metropolis,
    "rejection": rejection,
}


def drawn(data: st.DataObject, ngram: NGram, lm: AsyncLM) -> Case:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS}
    if data.draw(st.booleans(), "constrained"):
        options["constraint"] = data.draw(constraints(lm), "constraint")
    if data.draw(st.booleans(), "weighted"):
        options["potential"] = data.draw(potentials(lowest=-2.0), "potential")
    stops: list[Any] = [END_TOKEN, [0, END_TOKEN], None]
    if "constraint" not in options:
        stops.append([lm.byte_vocab[0].decode(errors="replace") + "a", "b"])
    other = {
        "stop": data.draw(st.sampled_from(stops), "stop"),
        "temperature": data.draw(st.sampled_from([1.0, 0.6, 1.8]), "temperature"),
    }
    resample = data.draw(st.sampled_from(RESAMPLERS), "resampler")
    twist = data.draw(potentials(lowest=-2.0, zeros=False), "twist")
    return Case(ngram, lm, options, other, twist, resample)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(ngram=small_lms(max_vocab_size=4, max_order=1), data=st.data())
def test_evidence_and_posterior_are_right(name: str, ngram: NGram, data: st.DataObject) -> None:
    with genrt.load(ngram, engine="exact") as lm:
        case = drawn(data, ngram, lm)
        asyncio.run(ALGORITHMS[name](case))  # type: ignore[arg-type]


def test_the_cases_have_dead_ends_and_checked_constraints() -> None:
    """What is drawn above is worth drawing: the same strategies, with the same options."""
    seen: set[str] = set()

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(ngram=small_lms(max_vocab_size=4, max_order=1), data=st.data())
    def look(ngram: NGram, data: st.DataObject) -> None:
        with genrt.load(ngram, engine="exact") as lm:
            case = drawn(data, ngram, lm)
            exact = case.exact
            seen.add("nothing" if exact.log_evidence == -math.inf else "something")
            if 0 < exact.evidence < 0.99:
                seen.add("rejects")
            if "constraint" in case.options:
                start = case.options["constraint"].start()
                seen.add("checked" if isinstance(start, CheckedState) else "masked")
            if bool((ngram.table == -math.inf).any()):
                seen.add("zeros")
            if np.any((ngram.table < -30).numpy() & (ngram.table > -math.inf).numpy()):
                seen.add("near zeros")

    look()
    assert seen == {
        "nothing", "something", "rejects", "checked", "masked", "zeros", "near zeros",
    }  # fmt: skip
