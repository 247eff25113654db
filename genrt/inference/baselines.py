r"""The baselines: whole texts of the language model, filtered or ranked.

**Rejection** draws whole texts from the model without its constraint, and keeps one with probability
1[x in C] exp(phi(x) - c), for a bound c of the potential phi. Accepted texts follow the target exactly.
For a run that stops at the k-th accepted text, the n-th drawn, or at n = N texts,

    Z_hat = exp(c) (k - 1) / (n - 1)  if it stopped at the k-th,    exp(c) accepted / N  else,

is unbiased for k >= 2 (Haldane 1945; Girshick, Mosteller & Savage 1946). The cost is 1 / Z texts for each
accepted one (von Neumann 1951).

**Best of N** ranks N texts by a score and takes the best: a common baseline, but not a sample of any
posterior. With a constraint the texts are drawn under its masks, as SMC draws them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from genrt.constraints import potential as indicator
from genrt.errors import InvalidRequest
from genrt.inference.checks import check_callable, evaluate_potential, state_of
from genrt.inference.kernels import extend, finished
from genrt.inference.model import Deaths, Info, State, frozen, model_seed
from genrt.inference.result import Result
from genrt.inference.samplers import Sampler, result_of
from genrt.inference.text_model import TextModel, checked_text_model
from genrt.numbers import check_float, check_int
from genrt.tokens.texts import Potential, Text


class Rejection(Sampler):
    """Rejection sampling for a ``TextModel``: independent texts of its target, weighted alike. It is slow
    where the target has little mass.

    ::

        result = await Rejection(model, num_samples=20, max_texts=10_000).run(seed=0)
    """

    _name = "rejection"
    _keeps_infos = False

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
            batch_size: the texts of a step.
            bound: an upper bound of the model's potential.

        Raises:
            InvalidRequest: an argument is out of range.
        """
        super().__init__(checked_text_model(model), self._batch, num_particles=1)
        if not _has_one_law(model):
            raise InvalidRequest(
                "whole texts are drawn from one law of power 1, and this model has others: take SMC or "
                "importance_sampling"
            )
        if model.constraint is not None and model.ends.never:
            raise InvalidRequest(
                "whole texts are drawn to their end, and with stop=None the constraint alone knows where "
                "that is: give tokens that end a text, or take SMC"
            )
        self._model = model
        self._indicator = (
            None if model.constraint is None else indicator(model.constraint, lm=model.lm)
        )
        self._num_samples = check_int("num_samples", num_samples, 1)
        self._max_texts = check_int("max_texts", max_texts, 1)
        self._batch_size = check_int("batch_size", batch_size, 1)
        self._bound = check_float("bound", bound)
        self._total = -(-self._max_texts // self._batch_size)

    def __repr__(self) -> str:
        return f"Rejection({self.model!r}, num_samples={self._num_samples}, max_texts={self._max_texts})"

    def init(self, seed: int) -> State:
        """Return the state before the first batch; the seed is an integer from 0 on."""
        return State.begin(self.model.start(), 0, check_int("seed", seed, 0))

    def is_done(self, state: State) -> bool:
        """Return whether enough texts were accepted or drawn."""
        enough = len(state_of(State, state).particles) >= self._num_samples
        return enough or state.drawn >= self._max_texts

    async def _batch(self, state: State) -> State:
        """Draw one more batch, up to the last text that is wanted, and keep what is accepted."""
        size = min(self._batch_size, self._max_texts - state.drawn)
        plain = _unweighted(self._model, constrained=False)
        seeds = np.random.SeedSequence(model_seed(state.seed_sequence(1)))
        traces = await finished(plain, [plain.start()] * size, seeds)
        texts = [each.generated for each in traces]
        # A text cut at max_tokens has not ended, so it is not one of the constraint's.
        longest = math.inf if self._indicator is None else self._model.max_tokens
        found = [0.0 if len(text.token_ids) < longest else -math.inf for text in texts]
        found = await _scored("constraint", self._indicator, texts, found)
        found = await _scored("potential", self._model.potential, texts, found)
        for text, log_weight in zip(texts, found, strict=True):
            if log_weight > self._bound:
                raise InvalidRequest(
                    f"the potential of {str(text)!r} is {log_weight}, above the bound {self._bound}: "
                    "give a higher bound="
                )
        thresholds = np.log1p(-np.random.default_rng(state.seed_sequence(0)).random(size))
        [places] = np.nonzero(thresholds <= np.array(found) - self._bound)
        places = places[: self._num_samples - len(state.particles)]
        particles = (*state.particles, *[traces[place] for place in places])
        kept, drawn = len(particles), state.drawn + size
        if kept == self._num_samples:
            drawn = state.drawn + int(places[-1]) + 1
        log_weights = frozen(np.full(kept, math.log(max(kept, 1) / drawn) + self._bound))
        every = frozen(np.arange(kept))
        return replace(
            state,
            particles=particles,
            log_weights=log_weights,
            eve=every,
            ancestors=every,
            drawn=drawn,
        )

    def result(self, state: State, *, infos: Sequence[Info] = ()) -> Result:
        """Return the accepted texts, weighted alike, and the estimate of the evidence."""
        kept = len(state.particles)
        last = kept == self._num_samples  # the text at which it stopped
        share = (kept - last) / max(state.drawn - last, 1)
        log_share = -math.inf if share == 0 else math.log(share)
        if self._num_samples == 1:
            log_share = math.nan
        log_weights = frozen(np.zeros(kept))
        return result_of(self.model, state.particles, log_weights, log_share + self._bound)

    def _figures(self, state: State, info: Info) -> dict[str, Any]:
        return {"kept": f"{len(state.particles)}/{self._num_samples}", "drawn": state.drawn}


class BestOfN(Sampler):
    """The best of N texts, drawn under the model's constraint, by its potential. The result has all N
    texts, the best with the only positive weight, and a log evidence of NaN.

    ::

        result = await BestOfN(model, n=64).run(seed=0)
        result.posterior()  # [(the best text, 1.0)], or [] if all met dead ends
    """

    _name = "best of N"
    _keeps_infos = False

    def __init__(self, model: TextModel, *, n: int, score: Potential | None = None) -> None:
        """
        Args:
            score: the ranking; by default the model's potential. Without one the first text that is not
                dead is the best.

        Raises:
            InvalidRequest: an argument is out of range.
        """
        drawing = extend(_unweighted(checked_text_model(model)))
        count = check_int("n", n, 1, 2**31)
        super().__init__(model, drawing, num_particles=count, last=self._ranked)
        check_callable("the score", score, "a function of a Text", optional=True)
        self._score = model.potential if score is None else score

    def __repr__(self) -> str:
        return f"BestOfN({self.model!r}, n={self._num_particles})"

    async def _ranked(self, state: State) -> State:
        """Return the texts with their scores as log-weights: -inf for a text that met a dead end of the
        constraint, or ``max_tokens``."""
        texts = [each.generated for each in state.particles]
        scores = await _scored("score", self._score, texts, state.log_weights.tolist())
        return replace(state, log_weights=frozen(np.array(scores)))

    def result(self, state: State, *, infos: Sequence[Info] = ()) -> Result:
        """Return all texts. The first one of the highest score alone has a weight."""
        log_weights = np.full(len(state.particles), -math.inf)
        best = int(np.argmax(state.log_weights))
        if state.log_weights[best] > -math.inf:
            log_weights[best] = 0.0
        deaths = Deaths.of(self.model, state)
        return result_of(self.model, state.particles, frozen(log_weights), math.nan, deaths=deaths)


def _unweighted(model: TextModel, *, constrained: bool = True) -> TextModel:
    """Return the model without potential and twist, or also without its constraint."""
    made = copy.copy(model)
    made.potential = made._twist = None
    made._unit = 1  # so that no text waits for the others at the end of a unit
    if not constrained:
        made.constraint, made._start, made._rejects = None, None, False
    return made


def _has_one_law(model: TextModel) -> bool:
    return len(model.laws) == 1 and model.laws[0].power == 1


async def _scored(
    name: str, judge: Potential | None, texts: Sequence[Text], log_weights: Sequence[float]
) -> list[float]:
    """Return the judge's value of each text, 0 without one; -inf for texts of weight 0."""
    alive = [text for text, each in zip(texts, log_weights, strict=True) if each > -math.inf]
    found = [0.0] * len(alive)
    if judge is not None:
        found = await evaluate_potential(name, judge, alive)
    values = iter(found)
    return [next(values) if each > -math.inf else -math.inf for each in log_weights]
