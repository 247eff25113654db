r"""The baselines: samples of the language model, by the engine's own decode loop, filtered or ranked.

**Rejection** draws whole texts from the model without its constraint, and keeps one with probability
1[x in C] exp(phi(x) - c), for a bound c of the potential phi. Accepted texts follow the target exactly.
For a run that stops at the k-th accepted text, the n-th drawn, or at n = N texts,

    Z_hat = exp(c) (k - 1) / (n - 1)  if it stopped at the k-th,    exp(c) accepted / N  else,

is unbiased for k >= 2 (Haldane 1945; Girshick, Mosteller & Savage 1946). The cost is 1 / Z texts for each
accepted one (von Neumann 1951).

**Best of N** ranks N texts by a score and takes the best: a common baseline, but not a sample of any
posterior. With a constraint the texts are drawn under its masks, as SMC draws them. Each has the weight
of an importance sample of p(x) 1[x in C], which the ranking ignores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genrt.constraints import potential as indicator
from genrt.errors import InvalidRequest
from genrt.inference.algorithms import Algorithm, result_of
from genrt.inference.checks import check_callable, frozen, seeds_of_step, state_of
from genrt.inference.potentials import evaluate_potential
from genrt.inference.resampling import Floats
from genrt.inference.result import Result
from genrt.inference.smc import importance_sampling
from genrt.inference.state import Deaths
from genrt.inference.text_model import TextModel, TextParticle
from genrt.inference.trails import Trail
from genrt.numbers import check_float, check_int
from genrt.tokens.texts import Potential, Text


@dataclass(frozen=True, slots=True)
class SampledText:
    """A whole text of the language model.

    Attributes:
        log_weight: its potential, or its score; -inf if the constraint is not satisfied.
        kept: whether rejection accepts it, or it is the best of N.
    """

    text: Text
    log_weight: float
    kept: bool


@dataclass(frozen=True, slots=True)
class RejectionState:
    """The state of rejection after ``step`` batches: accepted texts among ``drawn`` ones."""

    texts: tuple[Text, ...]
    drawn: int
    step: int
    seed: int


_Texts = tuple[SampledText, ...]


class Rejection(Algorithm[TextModel, RejectionState, _Texts, None]):
    """Rejection sampling for a ``TextModel``: independent texts of its target, weighted alike. It is slow
    where the target has little mass.

    ::

        result = await Rejection(model, num_samples=20, max_texts=10_000).run(seed=0)
    """

    _name = "rejection"

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
            InvalidRequest: an argument is out of its range.
        """
        super().__init__(_text_model(model))
        if model.constraint is not None and model.ends.never:
            raise InvalidRequest(
                "whole texts are drawn to their end, and with stop=None the constraint alone knows where "
                "that is: give tokens that end a text, or take SMC"
            )
        self._indicator = (
            None if model.constraint is None else indicator(model.constraint, lm=model.lm)
        )
        self._num_samples = check_int("num_samples", num_samples, 1)
        self._max_texts = check_int("max_texts", max_texts, 1)
        self._batch_size = check_int("batch_size", batch_size, 1)
        self._bound = check_float("bound", bound)

    def __repr__(self) -> str:
        return f"Rejection({self.model!r}, num_samples={self._num_samples}, max_texts={self._max_texts})"

    def init(self, seed: int) -> RejectionState:
        """Return the state before the first batch; the seed is an integer from 0 on."""
        return RejectionState((), 0, 0, check_int("seed", seed, 0))

    def is_done(self, state: RejectionState) -> bool:
        """Return whether enough texts were accepted or drawn."""
        enough = len(state_of(RejectionState, state).texts) >= self._num_samples
        return enough or state.drawn >= self._max_texts

    async def step(self, state: RejectionState) -> tuple[RejectionState, tuple[SampledText, ...]]:
        """Draw one more batch, up to the last text that is wanted; an empty one if the state is done. A
        cancelled or failed step leaves ``state`` unchanged.

        Raises:
            InvalidRequest: a potential above the bound.
            GenrtError: any error of the model.
        """
        own, models = seeds_of_step(state_of(RejectionState, state).seed, state.step)
        missing = self._num_samples - len(state.texts)
        count = min(self._batch_size, self._max_texts - state.drawn) if missing > 0 else 0
        texts = await _whole_texts(self.model, count, models)
        # A text cut at max_tokens has not ended, so it is not one of the constraint's.
        longest = math.inf if self._indicator is None else self.model.max_steps
        log_weights = [0.0 if len(text.token_ids) < longest else -math.inf for text in texts]
        log_weights = await _scored("constraint", self._indicator, texts, log_weights)
        log_weights = await _scored("potential", self.model.potential, texts, log_weights)
        thresholds = np.log1p(-np.random.default_rng(own).random(count))
        batch: list[SampledText] = []
        for text, log_weight, threshold in zip(texts, log_weights, thresholds, strict=True):
            if log_weight > self._bound:
                raise InvalidRequest(
                    f"the potential of {str(text)!r} is {log_weight}, above the bound {self._bound}: "
                    "give a higher bound="
                )
            if missing > 0:
                kept = bool(threshold <= log_weight - self._bound)
                batch.append(SampledText(text, log_weight, kept))
                missing -= kept
        kept_now = tuple(each.text for each in batch if each.kept)
        after = RejectionState(
            state.texts + kept_now, state.drawn + len(batch), state.step + 1, state.seed
        )
        return after, tuple(batch)

    def result(self, state: RejectionState) -> Result:
        """Return the accepted texts, weighted alike, and the estimate of the evidence."""
        kept, drawn = len(state.texts), state.drawn
        if kept < self._num_samples:
            share = kept / max(drawn, 1)
        else:
            share = (kept - 1) / (drawn - 1) if kept > 1 else math.nan
        log_share = -math.inf if share == 0 else math.log(share)
        return _weighted(self.model, state.texts, np.zeros(kept), log_share + self._bound)

    def _figures(self, state: RejectionState, info: _Texts) -> dict[str, Any]:
        return {"kept": f"{len(state.texts)}/{self._num_samples}", "drawn": state.drawn}

    def _result(self, state: RejectionState, kept: list[None]) -> Result:
        return self.result(state)


@dataclass(frozen=True, slots=True)
class BestOfNState:
    """Texts and their scores.

    Attributes:
        texts: dead ones are prefixes.
        scores: -inf for the dead, which met a dead end of the constraint, or ``max_tokens``.
        log_weights: the weights of the texts as importance samples of the model's own texts under the
            constraint, without the potential; 0 without a constraint, -inf for the dead.
    """

    texts: tuple[Text, ...]
    scores: tuple[float, ...]
    log_weights: tuple[float, ...]
    step: int
    seed: int

    @property
    def best(self) -> int | None:
        """The index of the first text of the highest score; ``None`` if all scores are -inf."""
        highest = max(self.scores, default=-math.inf)
        return None if highest == -math.inf else self.scores.index(highest)


class BestOfN(Algorithm[TextModel, BestOfNState, _Texts, None]):
    """The best of N texts, drawn under the model's constraint, by its potential. A run makes one step;
    its result has all N texts, the best with the only positive weight, and a log evidence of NaN.

    ::

        result = await BestOfN(model, n=64).run(seed=0)
        result.posterior()  # [(the best text, 1.0)], or [] if all met dead ends
    """

    _name = "best of N"

    def __init__(self, model: TextModel, *, n: int, score: Potential | None = None) -> None:
        """
        Args:
            score: the ranking; by default the model's potential. Without one the first text that is not
                dead is the best.

        Raises:
            InvalidRequest: an argument is out of its range.
        """
        super().__init__(_text_model(model))
        self._n = check_int("n", n, 1)
        check_callable("the score", score, "a function of a Text", optional=True)
        self._score = model.potential if score is None else score

    def __repr__(self) -> str:
        return f"BestOfN({self.model!r}, n={self._n})"

    def init(self, seed: int) -> BestOfNState:
        """Return the state before any text; the seed is an integer from 0 on."""
        return BestOfNState((), (), (), 0, check_int("seed", seed, 0))

    def is_done(self, state: BestOfNState) -> bool:
        """Return whether a step was made."""
        return state_of(BestOfNState, state).step > 0

    async def step(self, state: BestOfNState) -> tuple[BestOfNState, tuple[SampledText, ...]]:
        """Draw N more texts at once; ``kept`` marks the best of all so far, if it is among these. A
        cancelled or failed step leaves ``state`` unchanged.

        Raises:
            GenrtError: any error of the model.
        """
        _, models = seeds_of_step(state_of(BestOfNState, state).seed, state.step)
        if self.model.constraint is None:
            texts = await _whole_texts(self.model, self._n, models)
            log_weights = [0.0] * self._n
        else:
            sampler = importance_sampling(self.model.unweighted(), num_particles=self._n)
            drawn = sampler.init(models)
            while not drawn.done:
                drawn, _ = await sampler.step(drawn)
            texts = [each.generated for each in drawn.particles]
            log_weights = drawn.log_weights.tolist()
        scores = await _scored("score", self._score, texts, log_weights)
        after = BestOfNState(
            (*state.texts, *texts),
            (*state.scores, *scores),
            (*state.log_weights, *log_weights),
            state.step + 1,
            state.seed,
        )
        first = len(state.texts)
        return after, tuple(
            SampledText(text, score, first + place == after.best)
            for place, (text, score) in enumerate(zip(texts, scores, strict=True))
        )

    def result(self, state: BestOfNState) -> Result:
        """Return all texts so far; the best alone has a weight."""
        log_weights = np.full(len(state.texts), -math.inf)
        if state.best is not None:
            log_weights[state.best] = 0.0
        dead = [
            (len(text.token_ids), log_weight > -math.inf)
            for text, log_weight, score in zip(
                state.texts, state.log_weights, state.scores, strict=True
            )
            if score == -math.inf
        ]
        deaths = Deaths.of(self.model, dead)
        return _weighted(self.model, state.texts, log_weights, math.nan, deaths=deaths)

    def _result(self, state: BestOfNState, kept: list[None]) -> Result:
        return self.result(state)


async def _whole_texts(model: TextModel, count: int, seed: int) -> list[Text]:
    """Draw independent texts without the model's constraint and twist."""
    sampled = await model.lm.batch_sample(
        [model.prompt] * count,
        max_tokens=model.max_steps,
        stop_token_ids=sorted(model.ends.token_ids),
        temperature=model.temperature,
        seed=seed >> 1,  # leaves room for the index that batch_sample adds
        adapter=model.adapter,
    )
    texts = []
    for token_ids in sampled:
        text = Text(token_ids, b"".join(map(model.lm.byte_vocab.__getitem__, token_ids)))
        if model.ends.strings:
            text = Text()
            for token_id in token_ids:
                text = model.extended(text, token_id)
                if text.finished:
                    break
        texts.append(Text(text.token_ids, text.bytes, finished=True))
    return texts


def _text_model(model: TextModel) -> TextModel:
    if not isinstance(model, TextModel):
        raise InvalidRequest(f"the model is a {type(model).__name__}: give a TextModel")
    return model


async def _scored(
    name: str, judge: Potential | None, texts: Sequence[Text], log_weights: Sequence[float]
) -> list[float]:
    """Return the judge's value of each text, 0 without one; -inf for texts of weight 0."""
    places = [place for place, each in enumerate(log_weights) if each > -math.inf]
    scores = [-math.inf] * len(texts)
    found = [0.0] * len(places)
    if judge is not None:
        found = await evaluate_potential(name, judge, [texts[place] for place in places])
    for place, value in zip(places, found, strict=True):
        scores[place] = value
    return scores


def _weighted(
    model: TextModel, texts: Sequence[Text], log_weights: Floats, log_evidence: float, **fields: Any
) -> Result:
    particles = (TextParticle(Trail.of(text), None) for text in texts)
    return result_of(model, particles, frozen(log_weights), log_evidence, **fields)
