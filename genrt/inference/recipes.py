r"""Recipes: algorithms of the field, composed of kernels, and the baselines.

Each is a sampler with ``run(seed)``. They are short on purpose: read one, and write your own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, islice, pairwise
from typing import Any

import numpy as np

from genrt.constraints import potential as indicator
from genrt.errors import InvalidRequest
from genrt.inference.checks import check_callable, evaluate_potential
from genrt.inference.kernels import (
    branch,
    chain,
    extend,
    finished,
    keep,
    move,
    repeat,
    resample,
    values_at,
    values_of,
)
from genrt.inference.model import Info, Model, State, model_seed
from genrt.inference.resampling import Floats, Resampler, effective_sample_size, optimal, systematic
from genrt.inference.result import Result
from genrt.inference.samplers import Sampler
from genrt.inference.text_model import NO_TOKEN, TextModel, checked_text_model
from genrt.numbers import check_float, check_int, displayed, frozen
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
    best different ones stay, by weight or by a reward of the text. It is no sample of a posterior. With
    ``TextModel(…, unit="\\n\\n")`` it searches by paragraphs, as reward models judge them."""
    by = None if reward is None else _judge(model, reward)
    kernel = chain(branch(branches, share=False), extend(model), keep(width, by=by))
    return Sampler(model, kernel, num_particles=width)


def stochastic_beam_search(model: TextModel, *, width: int) -> Sampler:
    """Return a sampler of ``width`` different texts, drawn without replacement, with weights that leave
    evidence and expectations unbiased (Kool, van Hoof & Welling 2019, *Stochastic beams and where to find
    them*).

    Each text has a key: log q plus Gumbel noise, where q draws under the masks. A prefix has the largest
    key of its continuations, so a search finds the texts of the largest keys. With the next smaller key
    k, a text weighs its target divided by the probability that its key is above k.
    """
    size = check_int("width", width, 1, 2**31)
    checked_text_model(model)

    async def search(state: State) -> State:
        rng = np.random.default_rng(state.seed_sequence())
        beam = await model.only_empty(state.particles) or [*state.particles]
        keys, log_q = rng.gumbel(size=1), np.zeros(1)
        while going := [place for place, each in enumerate(beam) if each.is_open]:
            rows = await model.next_log_weights([beam[place] for place in going])
            masses = np.logaddexp.reduce(rows, axis=1)
            is_dead = masses == -math.inf  # it keeps its key, as a text that is over
            rows[is_dead, 0] = 0.0
            rows -= np.where(is_dead, 0.0, masses)[:, None]
            noisy = log_q[going, None] + rows + rng.gumbel(size=rows.shape)
            new = _below(keys[going, None], noisy)
            ended = np.setdiff1d(np.arange(len(beam)), going)
            found = np.concatenate([keys[ended], new.ravel()])
            best = np.argpartition(-found, min(size, len(found) - 1))[: size + 1]
            best = np.sort(best[found[best] > -math.inf])
            over, more = ended[best[best < len(ended)]], best[best >= len(ended)] - len(ended)
            own, tokens = np.divmod(more, rows.shape[1])
            drawn = [
                NO_TOKEN if is_dead[i] else (token, float(masses[i]), float(rows[i, token]))
                for i, token in zip(own.tolist(), tokens.tolist(), strict=True)
            ]
            longer = await model.longer([beam[going[i]] for i in own], drawn)
            beam = [*(beam[i] for i in over), *longer]
            keys = np.concatenate([keys[over], new[own, tokens]])
            log_q = np.concatenate([log_q[over], log_q[going][own] + rows[own, tokens]])
        order = np.argsort(-keys)
        chosen, below = order[:size], keys[order[size]] if len(order) > size else -math.inf
        log_weights = np.array([_log_target(beam[i]) for i in chosen]) + math.log(len(chosen))
        log_weights -= np.log(-np.expm1(-np.exp(log_q[chosen] - below)))
        return _found(state, [beam[i] for i in chosen], log_weights)

    return Sampler(model, search, num_particles=1)


def best_first(
    model: TextModel, *, num_texts: int = 1, visits: int = 1000, width: int = 8, bound: float = 0.0
) -> Sampler:
    """Return a search for the ``num_texts`` likeliest texts of the target, which visits prefixes in the
    order of their upper bounds (A*; Hart, Nilsson & Raphael 1968). It is exact, and no sample of a
    posterior. A text weighs its target.

    Args:
        visits: the most prefixes and texts to visit. Then the best texts so far are the result.
        width: how many prefixes are extended at once.
        bound: an upper bound of the model's potential.
    """
    size, most = check_int("num_texts", num_texts, 1), check_int("visits", visits, 1)
    at_once, highest = check_int("width", width, 1), check_float("bound", bound)
    if any(law.power < 0 for law in checked_text_model(model).laws):
        raise InvalidRequest("a law of negative power has no upper bound: give positive powers")

    async def search(state: State) -> State:
        left, number, best = most, count(), list[Any]()
        heap = list[Any]()  # minus a bound, an order, a text; its score, draw and siblings

        def offer(siblings: Iterator[Any]) -> None:
            for score, trace, drawn in islice(siblings, 1):
                heappush(heap, (-score - highest, next(number), trace, score, drawn, siblings))

        new, scores = await model.only_empty(state.particles) or [*state.particles], [0.0]
        while new:
            going = [pair for pair in zip(new, scores, strict=True) if pair[0].is_open]
            rows = await model.next_log_weights([each for each, _ in going]) if going else ()
            for (trace, score), row in zip(going, rows, strict=True):
                offer(_continuations(trace, score, row, left))
            for trace, score in zip(new, scores, strict=True):
                if (log_target := _log_target(trace)) > score + highest + 1e-6:
                    raise InvalidRequest(
                        f"a text's potential is above bound={bound}: give a higher one"
                    )
                if log_target > -math.inf:
                    heappush(heap, (-log_target, next(number), trace, None, None, None))
            popped = list[Any]()
            while heap and len(best) < size and len(popped) < min(at_once, left):
                if heap[0][4] is not None:
                    popped.append(heappop(heap))
                    offer(popped[-1][5])
                elif popped:
                    break
                else:
                    best.append(heappop(heap))
            left -= len(popped)
            scores = [each[3] for each in popped]
            new = await model.longer([each[2] for each in popped], [each[4] for each in popped])
        best += sorted(each for each in heap if each[4] is None)[: size - len(best)]
        log_weights = -np.array([each[0] for each in best])
        after = _found(state, [each[2] for each in best], log_weights)
        return after.labeled(has_evidence=False)

    return Sampler(model, search, num_particles=1)


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
    given = temperatures if isinstance(temperatures, list | tuple) else ()
    steps = [check_float("temperatures", each) for each in given]
    is_rising = steps[-1:] == [1] and all(a < b for a, b in pairwise([0.0, *steps]))
    if temperatures is not None and not is_rising:
        raise InvalidRequest(
            f"temperatures are {displayed(temperatures)}: give a list of rising ones up to 1"
        )
    _judge(model, potential)

    async def anneal(state: State) -> State:
        key, present, number = state.key, 0.0, 0
        judge = _judge(model, potential, known={})
        while present < 1 and (state.log_weights > -math.inf).any():
            state = state.at(*key, number)
            values = await values_at(judge, state)
            if steps:
                following = steps[number]
            else:
                following = _next_temperature(state.log_weights, values, present, share)
            log_weights = state.log_weights + (following - present) * values
            state = replace(state, log_weights=frozen(log_weights))
            present, number = following, number + 1
            if state.ess == 0:
                break
            if present < 1 or state.ess < share * len(log_weights):
                rng = np.random.default_rng(state.seed_sequence(2))
                ancestors = systematic(rng, log_weights)
                state = state.take(ancestors, np.full(len(log_weights), state.log_evidence))
            moving = repeat(move(model, target=_target(judge, present), whole=True), moves)
            state = await moving(state.at(*key, number))
        return state.at(*key)

    return Sampler(model, extend(model), num_particles=num_particles, last=anneal)


class Rejection(Sampler):
    """Rejection sampling for a ``TextModel``: independent texts of its target, weighted alike, at a cost
    of 1 / Z texts for each (von Neumann 1951), in one step.

    Texts drawn without the constraint are accepted with probability 1[x in C] exp(phi(x) - c), for a
    bound c of the potential phi. If it stops at the k-th accepted text, the n-th drawn, or after
    N = ``max_texts`` texts,

        Z_hat = exp(c) (k - 1) / (n - 1)  if it stopped at the k-th,    exp(c) accepted / N  else,

    is unbiased for k >= 2 (Haldane 1945; Girshick, Mosteller & Savage 1946).

    ::

        result = await Rejection(model, num_samples=20, max_texts=10_000).run(seed=0)
    """

    def __init__(
        self,
        model: TextModel,
        *,
        num_samples: int,
        max_texts: int,
        batch_size: int = 64,
        bound: float = 0.0,
    ) -> None:
        """
        Args:
            num_samples: the texts to keep, at least 1. With 1 there is no estimate of the evidence: it is
                NaN.
            max_texts: the most texts to draw.
            batch_size: the texts to draw at once.
            bound: an upper bound of the model's potential.
        """
        super().__init__(checked_text_model(model), self._reject, num_particles=1)
        if len(model.laws) > 1 or model.laws[0].power != 1:
            raise InvalidRequest(
                "whole texts are drawn from one law of power 1, and this model has others: take SMC or "
                "importance_sampling"
            )
        if model.constraint is not None and model.ends.never:
            raise InvalidRequest(
                "whole texts are drawn to their end, and with stop=None the constraint alone knows where "
                "that is: give tokens that end a text, or take SMC"
            )
        self._judges = {} if model.potential is None else {"potential": model.potential}
        if model.constraint is not None:
            self._judges = {"constraint": indicator(model.constraint, lm=model.lm), **self._judges}
        self._plain = _unweighted(model, constrained=False)
        self._num_samples = check_int("num_samples", num_samples, 1)
        self._max_texts = check_int("max_texts", max_texts, 1)
        self._batch_size = check_int("batch_size", batch_size, 1)
        self._bound = check_float("bound", bound)

    async def _reject(self, state: State) -> State:
        """Draw until enough texts were accepted or drawn, and keep the accepted ones."""
        kept, drawn, wanted = list[Any](), 0, self._num_samples
        for number in count():
            size = min(self._batch_size, self._max_texts - drawn)
            if not size or len(kept) == wanted:
                break
            batch = state.labeled(step=state.step + number)
            seeds = np.random.SeedSequence(model_seed(batch.seed_sequence(1)))
            traces = await finished(self._plain, [self._plain.start()] * size, seeds)
            found = await self._log_chances([each.generated for each in traces])
            thresholds = np.log1p(-np.random.default_rng(batch.seed_sequence(0)).random(size))
            places = np.nonzero(thresholds <= found)[0][: wanted - len(kept)].tolist()
            kept += [traces[place] for place in places]
            drawn += places[-1] + 1 if len(kept) == wanted else size
        # Of one text there is no estimate, and its weight is of no consequence.
        share = acceptance_rate(len(kept), drawn, is_enough=len(kept) == wanted) or 1.0
        after = _found(state, kept, np.full(len(kept), math.log(share) + self._bound))
        families = frozen(np.arange(len(kept)))
        return after.labeled(eve=families, has_evidence=wanted > 1)

    async def _log_chances(self, texts: Sequence[Text]) -> Floats:
        """Return the logarithms of the texts' chances to be accepted."""
        # A text cut at max_tokens has not ended, so it is not one of the constraint's.
        longest = self._plain.max_tokens if "constraint" in self._judges else math.inf
        found = np.array([0.0 if len(text.token_ids) < longest else -math.inf for text in texts])
        for name, judge in self._judges.items():
            [alive] = np.nonzero(found > -math.inf)
            found[alive] = await evaluate_potential(name, judge, [texts[each] for each in alive])
        if (highest := found.max()) > self._bound:
            text = texts[int(found.argmax())]
            raise InvalidRequest(
                f"the potential of {str(text)!r} is {highest}, above the bound {self._bound}: "
                "give a higher bound="
            )
        return found - self._bound


def acceptance_rate(kept: int, drawn: int, *, is_enough: bool) -> float:
    """Return an unbiased estimate of the share of texts that are accepted, 0 if there is none: from a
    run that kept so many, and stopped because they were enough, or because all were drawn."""
    return (kept - is_enough) / max(drawn - is_enough, 1)


class BestOfN(Sampler):
    """The best of N texts, drawn under the masks of the model's constraint: no sample of a posterior. The
    result has all N texts, the best with the only positive weight, and a log evidence of NaN.

    ::

        result = await BestOfN(model, n=64).run(seed=0)
        result.posterior()  # [(the best text, 1.0)], or [] if all met dead ends
    """

    def __init__(self, model: TextModel, *, n: int, score: Potential | None = None) -> None:
        """
        Args:
            score: the ranking; by default the model's potential. Without one the first text that is not
                dead is the best.
        """
        drawing = extend(_unweighted(checked_text_model(model)))
        number = check_int("n", n, 1, 2**31)
        super().__init__(model, drawing, num_particles=number, last=self._ranked)
        check_callable("the score", score, "a function of a Text", optional=True)
        ranking = model.potential if score is None else score
        self._score = None if ranking is None else _judge(model, ranking, name="score")

    async def _ranked(self, state: State) -> State:
        """Return the texts with their scores as log-weights: -inf for a text that met a dead end of the
        constraint, or ``max_tokens``."""
        alive = np.where(state.log_weights > -math.inf, 0.0, -math.inf)
        scores = alive if self._score is None else await values_at(self._score, state)
        ranked = replace(state, log_weights=frozen(scores))
        return ranked.labeled(has_evidence=False, eve=None)

    def result(self, state: State, *, infos: Sequence[Info] = ()) -> Result:
        """Return all texts. The first one of the highest score alone has a weight."""
        log_weights = np.full(len(state.particles), -math.inf)
        best = int(np.argmax(state.log_weights))
        if state.log_weights[best] > -math.inf:
            log_weights[best] = 0.0
        return replace(super().result(state), log_weights=frozen(log_weights))


def _found(state: State, traces: Sequence[Any], log_weights: Floats) -> State:
    """Return traces that a search from the first particle found, as particles of these log-weights."""
    after = state.take(np.zeros(len(traces), np.int64), log_weights, resampled=False)
    return replace(after, particles=tuple(traces))


def _judge(
    model: Model, potential: Potential, known: Any = None, *, name: str = "potential"
) -> Any:
    """Return a potential of texts as a function of traces; it asks about no text in ``known``, and adds
    the answers. Raises InvalidRequest if it is no function, or the model is not one of texts."""
    check_callable(f"the {name}", potential, "a function of a Text")
    checked_text_model(model)

    async def judged(traces: Sequence[Any]) -> Floats:
        texts = [each.generated for each in traces]
        found: dict[Text, float] = {} if known is None else known
        missing = [each for each in dict.fromkeys(texts) if each not in found]
        values = await evaluate_potential(name, potential, missing)
        found.update(zip(missing, values, strict=True))
        return np.array([found[each] for each in texts])

    return judged


def _below(largest: Floats, keys: Floats) -> Floats:
    """Return Gumbel keys ``[n, V]`` under the condition that the largest of a row is ``largest``:
    -log(exp(-largest) - exp(-max) + exp(-key)), without overflow."""
    with np.errstate(divide="ignore"):
        rest = np.log(-np.expm1(keys - keys.max(axis=1, keepdims=True)))
    apart = largest - keys + rest
    below: Floats = largest - np.maximum(apart, 0.0) - np.log1p(np.exp(-np.abs(apart)))
    return below


def _continuations(trace: Any, score: float, row: Floats, most: int) -> Iterator[Any]:
    """Yield the scores, the text and the draws of the likeliest tokens after it, in order."""
    mass = float(np.logaddexp.reduce(row))
    places = np.argpartition(-row, min(most, len(row)) - 1)[:most]
    chosen = places[np.argsort(-row[places], kind="stable")]
    for token, weight in zip(chosen.tolist(), row[chosen].tolist(), strict=True):
        if weight > -math.inf:
            yield score + weight, trace, (token, mass, weight - mass)


def _log_target(trace: Any) -> float:
    """Return the log target of a text, -inf if it is not complete."""
    if not trace.finished:
        return -math.inf
    return math.fsum(unit.log_target for unit in trace.path())


def _target(judge: Any, share: float) -> Any:
    """Return the log target of whole traces times a power of a potential."""

    async def target(traces: Sequence[Any]) -> Floats:
        own = np.array([*map(_log_target, traces)])
        return own + share * await values_of(judge, traces)

    return target


def _next_temperature(log_weights: Floats, values: Floats, present: float, share: float) -> float:
    """Return the largest b up to 1 that leaves the share of the effective sample size; by bisection."""

    def is_even(b: float) -> bool:
        return effective_sample_size(log_weights + (b - present) * values) >= most

    most = share * effective_sample_size(log_weights)
    low, high = present, 1.0
    if is_even(1.0):
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_even(middle) else (low, middle)
    return max(low, min(1.0, present + 1e-6))


def _unweighted(model: TextModel, *, constrained: bool = True) -> TextModel:
    """Return the model without potential and twist, or also without its constraint."""
    made = copy.copy(model)
    made.potential = made._twist = None
    made._unit = 1  # so that no text waits for the others at the end of a unit
    if not constrained:
        made.constraint, made._start, made.has_exact_weights = None, None, True
    return made
