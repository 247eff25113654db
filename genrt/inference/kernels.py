r"""Kernels: functions from a state to a state. Samplers are compositions of kernels.

::

    smc = chain(resample(), extend(model))                             # sequential Monte Carlo
    moving = chain(resample(), extend(model), repeat(move(model), 2))  # resample-move
    beam = chain(branch(4, share=False), extend(model), keep(8))       # beam search

A kernel leaves E[sum_i w_i f(x_i) / N] as it is: Z E[f] for the target so far. ``keep`` alone does not.
``Sampler`` runs a kernel until its state is done. Randomness comes from the seed of the state, the number
of the step and the kernel's place in it, so kernels may run at once.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference.checks import check_callable, check_log_weights
from genrt.inference.model import Model, State, Trace, extended, model_seed
from genrt.inference.resampling import (
    Floats,
    Resampler,
    multinomial,
    normalized_weights,
    partial,
    systematic,
)
from genrt.numbers import check_float, check_int, displayed, frozen

Kernel: TypeAlias = Callable[[State], Awaitable[State]]
"""A function from a state to the next one."""

Rule: TypeAlias = Callable[[State], bool]
"""Returns whether to resample."""

LogTarget: TypeAlias = Callable[[Sequence[Any]], Floats | Awaitable[Floats]]
"""Returns the log target of each trace, up to a constant."""


def chain(*kernels: Kernel) -> Kernel:
    """Return the kernel that runs these one after the other."""
    return functools.partial(_chained, kernels)


async def _chained(kernels: Sequence[Kernel], state: State) -> State:
    key = state.key
    for number, kernel in enumerate(kernels):
        state = await kernel(state.at(*key, number))
    return state.at(*key)


def repeat(kernel: Kernel, count: int) -> Kernel:
    """Return the kernel that runs this one ``count`` times."""
    return chain(*[kernel] * check_int("count", count, 0))


def extend(model: Model, *, pinned: Trace | None = None) -> Kernel:
    """Return the kernel that extends every particle that is alive and unfinished by one unit.

    Args:
        pinned: a trace that particle 0 follows, as conditional SMC needs it.
    """
    return functools.partial(_extended_by, model, pinned)


async def _extended_by(model: Model, pinned: Trace | None, state: State) -> State:
    places = [place for place in state.unfinished if place or pinned is None]
    particles, log_weights = list(state.particles), state.log_weights.copy()
    if pinned is not None and 0 in state.unfinished:
        particles[0] = pinned.cut(particles[0].units + 1)
        log_weights[0] += particles[0].gain
    if places:
        growing = [particles[place] for place in places]
        longer, gains = await extended(model, growing, model_seed(state.seed_sequence()))
        log_weights[places] += gains
        for place, trace in zip(places, longer, strict=True):
            particles[place] = trace
    units, frozen_weights = state.units + 1, frozen(log_weights)
    return replace(state, particles=tuple(particles), log_weights=frozen_weights, units=units)


def resample(
    scheme: Resampler = systematic,
    *,
    below: float | Rule = 0.5,
    count: int | None = None,
    pinned: bool = False,
) -> Kernel:
    """Return the kernel that resamples the particles while one of them is alive and unfinished, or to
    another number.

    Args:
        scheme: how ancestors are drawn; ``partial`` keeps the weights of most particles. Or your own.
        below: resample if the effective sample size is under this share of the particles: 0 never does, 1
            does whenever weights differ. Or a rule of your own.
        count: so many particles afterwards, whatever the weights; not for ``partial``.
        pinned: particle 0 is its own ancestor, and the others are drawn independently.
    """
    if not callable(below) and not 0 <= check_float("the share to resample below", below) <= 1:
        raise InvalidRequest(
            f"the share to resample below is {displayed(below)}: give one from 0 to 1, or a rule"
        )
    check_callable("the scheme", scheme, "a resampler, such as genrt.inference.systematic")
    if pinned and scheme is not multinomial:
        raise InvalidRequest("pinned=True needs independent ancestors: give multinomial")
    size = None if count is None else check_int("count", count, 1)
    if size is not None and scheme is partial:
        raise InvalidRequest(
            "partial keeps the number of particles: leave count out, or give optimal"
        )
    return functools.partial(_resampled, scheme, below, size, pinned)


async def _resampled(
    scheme: Resampler, below: float | Rule, size: int | None, pinned: bool, state: State
) -> State:
    if size is None:
        is_due = bool(state.unfinished) and _is_due(state, below)
    else:
        is_due = len(state.particles) != size and state.ess > 0
    if not is_due:
        return state
    rng = np.random.default_rng(state.seed_sequence())
    more = () if size is None else (size,)
    chosen = scheme(rng, state.log_weights, *more)
    ancestors, log_weights = _checked_ancestors(chosen, state, size)
    if pinned:  # the others as they were drawn, before they were sorted
        ancestors = rng.permutation(ancestors)
        ancestors[0] = 0
    is_independent = scheme is multinomial and not pinned and len(ancestors) == len(state.particles)
    return state.take(ancestors, log_weights, independent=is_independent)


def reweight(log_ratio: LogTarget) -> Kernel:
    """Return the kernel that adds ``log_ratio(traces)`` to the log-weights of the particles alive: the
    logarithm of a new target over the old one."""
    return functools.partial(_reweighted, log_ratio)


async def _reweighted(log_ratio: LogTarget, state: State) -> State:
    log_weights = state.log_weights + await values_at(log_ratio, state)
    return replace(state, log_weights=frozen(log_weights))


def move(model: Model, *, target: LogTarget | None = None, whole: bool = False) -> Kernel:
    """Return the kernel that makes a Metropolis-Hastings move of every particle alive: it cuts the trace
    before a unit, drawn uniformly, grows another suffix, and takes it by the usual ratio. Weights stay.
    Traces grow to as many units as the state's steps have extended them by, or to their end, so that a
    move leaves the target of the step as it is.

    Args:
        target: the log target of traces, up to a constant, in place of the model's own.
        whole: grow to the end; all traces are finished.
    """
    return functools.partial(_moved, model, target, whole)


async def _moved(model: Model, target: LogTarget | None, whole: bool, state: State) -> State:
    places = [place for place in state.alive if state.particles[place].units]
    if not places:
        return state
    rng = np.random.default_rng(state.seed_sequence(0))
    seeds = np.random.SeedSequence(model_seed(state.seed_sequence(1)))
    old = [state.particles[place] for place in places]
    most = math.inf if whole else state.units
    cuts = [int(rng.integers(each.units)) for each in old]
    begun = [each.cut(cut) for each, cut in zip(old, cuts, strict=True)]
    new = await finished(model, begun, seeds, most=most)
    log_ratios = np.full(len(old), -math.inf)
    alive = [place for place, each in enumerate(new) if each.gain > -math.inf]
    for place in alive:
        before, after = (each.path()[cuts[place] :] for each in (old[place], new[place]))
        log_ratios[place] = math.log(old[place].units / new[place].units)
        if target is None:
            gains = [sum(each.gain for each in units) for units in (before, after)]
            log_ratios[place] += gains[1] - gains[0]
        else:
            log_ratios[place] += sum(each.log_proposal for each in before)
            log_ratios[place] -= sum(each.log_proposal for each in after)
    if target is not None and alive:
        log_ratios[alive] += await values_of(target, [new[place] for place in alive])
        log_ratios[alive] -= await values_of(target, [old[place] for place in alive])
    particles = list(state.particles)
    thresholds = np.log1p(-rng.random(len(places)))
    for place, trace, is_taken in zip(places, new, thresholds <= log_ratios, strict=True):
        if is_taken:
            particles[place] = trace
    return replace(state, particles=tuple(particles))


def branch(copies: int, *, share: bool = True) -> Kernel:
    """Return the kernel that copies every particle that is alive and unfinished ``copies`` times.

    Args:
        share: whether copies share the weight of their parent, as an estimate needs it. Otherwise each
            has it whole, as a beam ranks particles, and there is no estimate of the evidence.
    """
    check_int("copies", copies, 1)
    return functools.partial(_branched, copies, share)


async def _branched(copies: int, share: bool, state: State) -> State:
    times = np.ones(len(state.particles), np.int64)
    times[list(state.unfinished)] = copies
    ancestors = np.repeat(np.arange(len(times)), times)
    log_weights = state.log_weights
    if share:
        log_weights = log_weights - np.log(times) + math.log(times.mean())
    after = state.take(ancestors, log_weights[ancestors], resampled=False)
    return after if share else after.labeled(has_evidence=False)


def keep(count: int, *, by: LogTarget | None = None) -> Kernel:
    """Return the kernel that keeps the ``count`` best particles of different texts, by weight or by a
    score of traces. Weights of the others are lost, so there is no estimate of the evidence."""
    check_int("count", count, 1)
    return functools.partial(_kept, count, by)


async def _kept(count: int, by: LogTarget | None, state: State) -> State:
    scores = state.log_weights if by is None else await values_at(by, state)
    best: dict[Any, int] = {}
    for place in np.argsort(-scores, kind="stable").tolist():
        trace = state.particles[place]
        best.setdefault(trace.token_ids or trace, place)
    chosen = np.array([*best.values()][:count])
    best_of = state.take(chosen, state.log_weights[chosen], resampled=False)
    return best_of.labeled(has_evidence=False)


async def conditional(
    model: Model,
    reference: Any,
    *,
    count: int,
    seed: int,
    below: float | Rule = 1.0,
    ancestors: bool = False,
) -> State:
    """Return the particles of SMC in which particle 0 follows a finished trace, and the others have
    ancestors of their own: conditional SMC (Andrieu, Doucet & Holenstein 2010).

    Args:
        count: the number of particles.
        below: when to resample, as for ``resample``.
        ancestors: whether each resampling draws a new past for the reference (Lindsten, Jordan & Schön
            2014), in proportion to the weight of the past and to the target of the whole. The model needs
            ``follow``, as ``TextModel`` has it.
    """
    state = State.begin(model.start(), count, seed)
    resampling = resample(multinomial, below=below, pinned=True)
    while not state.done:
        after = await resampling(state.at(0))
        if ancestors and after.resamplings > state.resamplings and 0 in state.unfinished:
            reference = await _with_new_past(model, reference, state)
            past = reference.cut(state.units)
            after = replace(after, particles=(past, *after.particles[1:]))
        after = await extend(model, pinned=reference)(after.at(1))
        state = replace(after, step=state.step + 1, key=())
    return state


async def _with_new_past(model: Any, reference: Any, state: State) -> Any:
    """Return the reference's last units after the units of a particle, or the reference itself."""
    units = state.units
    future = reference.path()[units:]
    own = state.particles[0].token_ids
    pasts = {state.particles[place].token_ids: state.particles[place] for place in state.unfinished}
    pasts.pop(own)
    tokens = [token for unit in future for token in unit.tokens]
    grown = {own: reference}
    if pasts:
        joined = await model.follow([*pasts.values()], [tokens] * len(pasts))
        grown |= zip(pasts, joined, strict=True)
    log_weights = np.full(len(state.particles), -math.inf)
    for place in state.unfinished:
        trace = grown[state.particles[place].token_ids]
        units_after = trace.path()[units:]
        is_same = [each.tokens for each in units_after] == [each.tokens for each in future]
        if trace.finished and is_same:
            gained = sum(each.log_target for each in units_after) - state.particles[place].log_twist
            log_weights[place] = state.log_weights[place] + gained
    rng = np.random.default_rng(state.seed_sequence(3))
    chosen = rng.choice(len(log_weights), p=normalized_weights(log_weights))
    return grown[state.particles[chosen].token_ids]


async def finished(
    model: Model, traces: Sequence[Any], seeds: np.random.SeedSequence, *, most: float = math.inf
) -> list[Any]:
    """Return traces extended to their end, to ``most`` units, or until they die."""
    new = list(traces)
    while True:
        places = [place for place, each in enumerate(new) if each.is_open and each.units < most]
        if not places:
            return new
        growing = [new[place] for place in places]
        longer, _ = await extended(model, growing, model_seed(seeds.spawn(1)[0]))
        for place, trace in zip(places, longer, strict=True):
            new[place] = trace


async def values_at(function: LogTarget, state: State) -> Floats:
    """Return the log-weights that a function gives the particles; -inf for a dead one."""
    values, alive = np.full(len(state.particles), -math.inf), [*state.alive]
    if alive:
        values[alive] = await values_of(function, [state.particles[i] for i in alive])
    return values


async def values_of(function: LogTarget, traces: Sequence[Any]) -> Floats:
    """Return the log-weights that a function gives traces. Raises InvalidRequest for other values."""
    found: Any = function(traces)
    if inspect.isawaitable(found):
        found = await found
    return check_log_weights(found, len(traces), f"a function of {len(traces)} traces gave")


def _is_due(state: State, below: float | Rule) -> bool:
    if not callable(below):
        return state.ess < below * len(state.particles)
    answer: Any = below(state)
    if not isinstance(answer, bool | np.bool_ | int):
        raise InvalidRequest(
            f"the rule gave a {type(answer).__name__}: give a rule that returns True or False"
        )
    return bool(answer)


def _checked_ancestors(chosen: Any, state: State, size: int | None) -> tuple[Any, Floats]:
    """Return the ancestors of the next particles, and their log-weights. Raises InvalidRequest if a
    resampler gave something else."""
    before, count = len(state.log_weights), size or len(state.log_weights)
    is_pair = isinstance(chosen, tuple) and len(chosen) == 2
    indices, weights = chosen if is_pair else (chosen, np.full(count, state.log_evidence))
    try:
        ancestors, log_weights = np.array(indices), np.array(weights, dtype=np.float64)
        is_right = (
            ancestors.shape == log_weights.shape == (count,)
            and ancestors.dtype.kind in "iu"
            and 0 <= ancestors.min() <= ancestors.max() < before
            and (log_weights < np.inf).all()
        )
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise InvalidRequest(
            f"the resampler gave {displayed(chosen)}: give {count} integers from 0 to {before - 1}, "
            f"or these and {count} log-weights, finite or -inf"
        )
    return ancestors.astype(np.int64), log_weights
