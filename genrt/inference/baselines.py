r"""The baselines: samples of the language model, by the engine's own decode loop, kept or ranked.

**Rejection** draws whole texts from the model without its constraint, and keeps one with probability
1[x in C] exp(phi(x) - c), for a bound c of the potential phi. The kept texts follow the target exactly,
even if they are few. For a run that stops at the k-th kept text, the n-th drawn, or at n = N texts,

    Z_hat = exp(c) (k - 1) / (n - 1)  if it stopped at the k-th kept,    exp(c) kept / N  else,

is unbiased for k >= 2 (Haldane 1945; Girshick, Mosteller & Savage 1946). The cost is 1 / Z texts for each
kept one (von Neumann 1951).

**Best of N** ranks N texts by a score and takes the best: a common baseline, but not a sample of any
posterior. With a constraint the texts are drawn under its masks, as SMC draws them. Each has the weight
of an importance sample of p(x) 1[x in C], which the ranking leaves out: a score ranks, a weight does not.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from genrt.constraints import potential as indicator
from genrt.errors import InvalidRequest
from genrt.inference.checks import check_callable, frozen, seeds_of_step, state_of
from genrt.inference.counting import start_counting
from genrt.inference.potentials import evaluate_potential
from genrt.inference.resampling import Floats
from genrt.inference.result import Result
from genrt.inference.smc import importance_sampling
from genrt.inference.state import Deaths
from genrt.inference.text_model import TextModel
from genrt.numbers import check_float, check_int
from genrt.progress import progress_bar
from genrt.runtime.concurrency import blocking_twin
from genrt.tokens.texts import Potential, Text, decoded


@dataclass(frozen=True, slots=True)
class SampledText:
    """A whole text of the language model.

    Attributes:
        log_weight: its potential; -inf if the constraint is not satisfied.
        kept: whether rejection keeps it, or it is the best of N.
    """

    text: Text
    log_weight: float
    kept: bool


@dataclass(frozen=True, slots=True)
class RejectionState:
    """The state of rejection after ``step`` batches: the texts that were kept, of ``drawn`` ones. It is a
    value: stepping the same one again gives the same."""

    texts: tuple[Text, ...]
    drawn: int
    step: int
    seed: int


class Rejection:
    """Rejection sampling for a ``TextModel``: independent texts of its target, slow where that has little
    mass.

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
            num_samples: how many texts to keep, at least 1. From 2 up the estimate of the evidence is
                unbiased; of 1 that was kept there is none, and it is NaN.
            max_texts: the most to draw for that.
            batch_size: how many to draw at once.
            bound: what the model's potential never exceeds.

        Raises:
            InvalidRequest: an argument is out of its range.
        """
        self._plain = _Plain(model)
        self._num_samples = check_int("num_samples", num_samples, 1)
        self._max_texts = check_int("max_texts", max_texts, 1)
        self._batch_size = check_int("batch_size", batch_size, 1)
        self._bound = check_float("bound", bound)

    def __repr__(self) -> str:
        return f"Rejection({self.model!r}, num_samples={self._num_samples}, max_texts={self._max_texts})"

    @property
    def model(self) -> TextModel:
        """The model that is run."""
        return self._plain.model

    def init(self, seed: int) -> RejectionState:
        """Return the state before the first batch; the seed is an integer from 0 on."""
        return RejectionState((), 0, 0, check_int("seed", seed, 0))

    def is_done(self, state: RejectionState) -> bool:
        """Tell whether enough texts were kept or drawn."""
        enough = len(state_of(RejectionState, state).texts) >= self._num_samples
        return enough or state.drawn >= self._max_texts

    async def step(self, state: RejectionState) -> tuple[RejectionState, tuple[SampledText, ...]]:
        """Draw one more batch, up to the last text that is wanted; nothing if it is done.

        Cancelling it, or an error, leaves ``state`` as good as it was.

        Raises:
            InvalidRequest: a potential above the bound.
            GenrtError: whatever the model raised.
        """
        own, models = seeds_of_step(state_of(RejectionState, state).seed, state.step)
        missing = self._num_samples - len(state.texts)
        count = min(self._batch_size, self._max_texts - state.drawn) if missing > 0 else 0
        texts = await self._plain.texts(count, models)
        log_weights = await self._plain.log_weights(texts, self.model.potential)
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

    async def steps(
        self, state: RejectionState
    ) -> AsyncIterator[tuple[RejectionState, tuple[SampledText, ...]]]:
        """Step until enough was kept or drawn, from ``init(seed)`` or from any later state."""
        while not self.is_done(state):
            state, batch = await self.step(state)
            yield state, batch

    async def run(
        self,
        seed: int,
        *,
        on_step: Callable[[RejectionState, tuple[SampledText, ...]], None] | None = None,
        progress: bool = False,
    ) -> Result:
        """Draw all batches from ``init(seed)`` and return what was kept, weighted alike. Equal seeds give
        equal texts."""
        state, counted = self.init(seed), start_counting(self.model)
        with progress_bar("rejection", None, shown=progress) as show:
            async for after, batch in self.steps(state):
                state = after
                show(kept=f"{len(state.texts)}/{self._num_samples}", drawn=state.drawn)
                if on_step is not None:
                    on_step(state, batch)
        return replace(self.result(state), statistics=counted())

    run_sync = blocking_twin(run)
    """``run``, blocking: in another thread, where it calls ``on_step``. An interrupt cancels it."""

    def result(self, state: RejectionState) -> Result:
        """Return what was kept so far, and the estimate of the evidence."""
        kept, drawn = len(state.texts), state.drawn
        if kept < self._num_samples:
            share = kept / max(drawn, 1)
        else:
            share = (kept - 1) / (drawn - 1) if kept > 1 else math.nan
        log_share = -math.inf if share == 0 else math.log(share)
        return _weighted_result(state.texts, np.zeros(kept), log_share + self._bound)


@dataclass(frozen=True, slots=True)
class BestOfNState:
    """Texts and their scores. A value.

    Attributes:
        texts: dead ones as far as they got.
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
        """The index of the first text of the highest score; ``None`` if none is above -inf."""
        highest = max(self.scores, default=-math.inf)
        return None if highest == -math.inf else self.scores.index(highest)


class BestOfN:
    """The best of N texts, drawn under the model's constraint, by its potential.

    ::

        result = await BestOfN(model, n=64).run(seed=0)
        result.posterior()  # [(the best text, 1.0)], or [] if all met dead ends
    """

    def __init__(self, model: TextModel, *, n: int, score: Potential | None = None) -> None:
        """
        Args:
            score: what to rank by; by default the model's potential. Without one all texts are alike, and
                the first that is not dead is taken.

        Raises:
            InvalidRequest: an argument is out of its range.
        """
        self._model = _text_model(model)
        self._n = check_int("n", n, 1)
        check_callable("the score", score, "a function of a Text", optional=True)
        self._score = model.potential if score is None else score

    def __repr__(self) -> str:
        return f"BestOfN({self.model!r}, n={self._n})"

    @property
    def model(self) -> TextModel:
        """The model that is run."""
        return self._model

    def init(self, seed: int) -> BestOfNState:
        """Return the state before any text; the seed is an integer from 0 on."""
        return BestOfNState((), (), (), 0, check_int("seed", seed, 0))

    async def step(self, state: BestOfNState) -> tuple[BestOfNState, tuple[SampledText, ...]]:
        """Draw N more texts at once; ``kept`` marks the best of all so far, if it is among these.

        Cancelling it, or an error, leaves ``state`` as good as it was.

        Raises:
            GenrtError: whatever the model raised.
        """
        _, models = seeds_of_step(state_of(BestOfNState, state).seed, state.step)
        texts, log_weights = await self._drawn(models)
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

    async def _drawn(self, seed: int) -> tuple[list[Text], list[float]]:
        """Draw N texts; return them with their log-weights."""
        if self.model.constraint is None:
            return await _Plain(self.model).texts(self._n, seed), [0.0] * self._n
        sampler = importance_sampling(self.model.unweighted(), num_particles=self._n)
        state = sampler.init(seed)
        async for after, _ in sampler.steps(state):
            state = after
        return [each.generated for each in state.particles], state.log_weights.tolist()

    async def run(self, seed: int) -> Result:
        """Make one step and return its N texts in order, the best as the only one of positive weight; the
        log evidence is NaN. The same seed gives the same."""
        counted = start_counting(self.model)
        state, _ = await self.step(self.init(seed))
        return replace(self.result(state), statistics=counted())

    run_sync = blocking_twin(run)
    """``run``, blocking: in another thread. An interrupt cancels it."""

    def result(self, state: BestOfNState) -> Result:
        """Return all texts so far, of which the best alone has a weight."""
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
        result = _weighted_result(state.texts, log_weights, math.nan)
        return replace(result, deaths=Deaths.of(self.model, dead))


class _Plain:
    """Whole texts of a model's language model, drawn without its constraint and twist."""

    def __init__(self, model: TextModel) -> None:
        self.model = _text_model(model)
        constraint = model.constraint
        if constraint is not None and model.ends.never:
            raise InvalidRequest(
                "whole texts are drawn to their end, and with stop=None the constraint alone knows where "
                "that is: give tokens that end a text, or take SMC"
            )
        self._indicator = None if constraint is None else indicator(constraint, lm=model.lm)

    async def texts(self, count: int, seed: int) -> list[Text]:
        """Draw this many independent texts."""
        model = self.model
        sampled = await model.lm.batch_sample(
            [model.prompt] * count,
            max_tokens=model.max_steps,
            stop_token_ids=sorted(model.ends.token_ids),
            temperature=model.temperature,
            seed=seed >> 1,  # leaves room for the index that batch_sample adds
            adapter=model.adapter,
        )
        return [self._text(token_ids) for token_ids in sampled]

    def _text(self, token_ids: Sequence[int]) -> Text:
        """Return the text that these tokens are, up to a string that ends it."""
        if not self.model.ends.strings:
            data = b"".join(map(self.model.lm.byte_vocab.__getitem__, token_ids))
            return Text(token_ids, data, finished=True)
        text = Text()
        for token_id in token_ids:
            text = self.model.extended(text, token_id)
            if text.finished:
                break
        return Text(text.token_ids, text.bytes, finished=True)

    async def log_weights(self, texts: Sequence[Text], potential: Potential | None) -> list[float]:
        """Return what the potential gives each text; -inf for those that don't satisfy the constraint."""
        # A text cut at max_tokens has not ended, so it is not one of the constraint's.
        longest = math.inf if self._indicator is None else self.model.max_steps
        log_weights = [0.0 if len(text.token_ids) < longest else -math.inf for text in texts]
        log_weights = await _scored("constraint", self._indicator, texts, log_weights)
        return await _scored("potential", potential, texts, log_weights)


def _text_model(model: TextModel) -> TextModel:
    if not isinstance(model, TextModel):
        raise InvalidRequest(f"the model is a {type(model).__name__}: give a TextModel")
    return model


async def _scored(
    name: str, judge: Potential | None, texts: Sequence[Text], log_weights: Sequence[float]
) -> list[float]:
    """Return what the judge gives each text, 0 without one; -inf for texts of weight 0."""
    places = [place for place, each in enumerate(log_weights) if each > -math.inf]
    scores = [-math.inf] * len(texts)
    found = [0.0] * len(places)
    if judge is not None:
        found = await evaluate_potential(name, judge, [texts[place] for place in places])
    for place, value in zip(places, found, strict=True):
        scores[place] = value
    return scores


def _weighted_result(texts: Sequence[Text], log_weights: Floats, log_evidence: float) -> Result:
    strings = tuple(decoded(text.bytes) for text in texts)
    return Result(
        texts=strings,
        token_ids=tuple(text.token_ids for text in texts),
        values=strings,
        log_weights=frozen(log_weights),
        log_evidence=log_evidence,
    )
