r"""Recipes: algorithms of the field, composed of kernels.

Each returns a sampler with ``run(seed)``. They are short on purpose: read one, and write your own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference.checks import check_callable, evaluate_potential
from genrt.inference.kernels import (
    branch,
    chain,
    extend,
    keep,
    move,
    repeat,
    resample,
    values_of,
)
from genrt.inference.model import Model, State, frozen
from genrt.inference.resampling import (
    Floats,
    Resampler,
    effective_sample_size,
    optimal,
    systematic,
)
from genrt.inference.samplers import Sampler
from genrt.inference.text_model import TextModel
from genrt.numbers import check_float, check_int, displayed
from genrt.tokens.texts import Potential, Text


def resample_move(
    model: Model,
    *,
    num_particles: int,
    moves: int = 1,
    below: float = 0.5,
    scheme: Resampler = systematic,
) -> Sampler:
    """Return SMC with ``moves`` Metropolis-Hastings moves of every particle after each step, which make
    copies differ again (Gilks & Berzuini 2001).

    With a target of a power, ``TextModel(Law(lm, prompt, power=4), unit=16, …)``, this is power sampling
    with exact weights; with one particle it is that of Karan & Du (2025), *Reasoning with sampling*.
    """
    kernel = chain(resample(scheme, below=below), extend(model), repeat(move(model), moves))
    return Sampler(model, kernel, num_particles=num_particles)


def without_replacement(model: Model, *, num_particles: int, branches: int = 4) -> Sampler:
    """Return SMC whose particles branch, grow, and are resampled without copies (Lew et al. 2023,
    *Sequential Monte Carlo steering*; Fearnhead & Clifford 2003)."""
    kernel = chain(branch(branches), extend(model), resample(optimal, count=num_particles))
    return Sampler(model, kernel, num_particles=num_particles)


def beam_search(
    model: Model, *, width: int, branches: int = 4, reward: Potential | None = None
) -> Sampler:
    """Return a beam search over sampled units: every text branches, grows by a unit, and the ``width``
    best different ones stay, by weight or by a reward of the text. It is no sample of a posterior.

    With ``TextModel(…, unit="\\n\\n")`` it searches by paragraphs, as reward models judge them.
    """
    by = None if reward is None else _judge(model, reward)
    width, branches = check_int("width", width, 1), check_int("branches", branches, 1)
    kernel = chain(branch(branches, share=False), extend(model), keep(width, by=by))
    return Sampler(model, kernel, num_particles=width)


def tempered(
    model: Model,
    potential: Potential,
    *,
    num_particles: int,
    moves: int = 2,
    ess: float = 0.5,
    temperatures: Sequence[float] | None = None,
) -> Sampler:
    """Return a sampler of whole texts that brings in a potential by degrees (Neal 2001; Del Moral, Doucet
    & Jasra 2006): the target goes through p(x) exp(b phi(x)) for rising b, and particles are reweighted,
    resampled and moved at each.

    Args:
        potential: phi, log-weights of whole texts.
        moves: the Metropolis-Hastings moves of each particle at each b.
        ess: choose each b so that the effective sample size of the new weights is this share. Then the
            evidence is only nearly unbiased.
        temperatures: the values of b instead, from above 0 to 1, rising.
    """
    share = check_float("ess", ess)
    if not 0 < share < 1:
        raise InvalidRequest(f"ess is {displayed(ess)}: give a share between 0 and 1")
    check_int("moves", moves, 0)
    steps = None
    if temperatures is not None:
        if not isinstance(temperatures, list | tuple):
            raise InvalidRequest(f"temperatures are {displayed(temperatures)}: give them in a list")
        steps = [check_float("temperatures", each) for each in temperatures]
    if steps is not None and not (
        steps and steps[-1] == 1 and all(a < b for a, b in zip([0.0, *steps], steps, strict=False))
    ):
        raise InvalidRequest(
            f"temperatures are {displayed(temperatures)}: give rising ones up to 1"
        )
    _judge(model, potential)

    async def anneal(state: State) -> State:
        key, present, number = state.key, 0.0, 0
        judge = _judge(model, potential, known={})
        while present < 1 and (state.log_weights > -math.inf).any():
            state = state.at(*key, number)
            [alive] = np.nonzero(state.log_weights > -math.inf)
            values = np.full(len(state.particles), -math.inf)
            values[alive] = await values_of(judge, [state.particles[i] for i in alive])
            if steps is None:
                following = _next_temperature(state.log_weights, values, present, share)
            else:
                following = steps[number]
            log_weights = state.log_weights + _scaled(following - present, values)
            state = replace(state, log_weights=frozen(log_weights))
            present, number = following, number + 1
            if state.ess == 0:
                break
            if present < 1 or state.ess < share * len(log_weights):
                rng = np.random.default_rng(state.seed_sequence(2))
                ancestors = systematic(rng, log_weights)
                state = state.take(ancestors, np.full(len(log_weights), state.log_evidence))
            target = _target(judge, present)
            for again in range(moves):
                state = await move(model, target=target, whole=True)(state.at(*key, number, again))
        return state.at(*key)

    kernel = extend(model)
    return Sampler(model, kernel, num_particles=num_particles, last=anneal)


def _judge(model: Model, potential: Potential, known: dict[Text, float] | None = None) -> Any:
    """Return a potential of texts as a function of traces; it asks about no text in ``known``, and adds
    the answers. Raises InvalidRequest if it is no function, or the model is not one of texts."""
    check_callable("the potential", potential, "a function of a Text")
    if not isinstance(model, TextModel):
        raise InvalidRequest(
            f"the model is a {type(model).__name__}: give a TextModel for a reward"
        )

    async def judged(traces: Sequence[Any]) -> Floats:
        texts = [each.generated for each in traces]
        found = {} if known is None else known
        missing = [each for each in dict.fromkeys(texts) if each not in found]
        values = await evaluate_potential("potential", potential, missing)
        found.update(zip(missing, values, strict=True))
        return np.array([found[each] for each in texts])

    return judged


def _target(judge: Any, share: float) -> Any:
    """Return the log target of whole traces times a power of a potential."""

    async def target(traces: Sequence[Any]) -> Floats:
        own = [math.fsum(unit.log_target for unit in each.path()) for each in traces]
        return np.array(own) + _scaled(share, await values_of(judge, traces))

    return target


def _scaled(share: float, values: Floats) -> Floats:
    """Return ``share * values``, where any share of -inf is -inf."""
    return np.multiply(share, values, where=values > -math.inf, out=values.copy())


def _next_temperature(log_weights: Floats, values: Floats, present: float, share: float) -> float:
    """Return the largest b up to 1 that leaves the share of the effective sample size; by bisection."""
    most = share * effective_sample_size(log_weights)
    low, high = present, 1.0
    if effective_sample_size(log_weights + _scaled(1 - present, values)) >= most:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        found = effective_sample_size(log_weights + _scaled(middle - present, values))
        low, high = (middle, high) if found >= most else (low, middle)
    return max(low, min(1.0, present + 1e-6))
