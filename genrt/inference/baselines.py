r"""The baselines: plain samples of the language model, by vLLM's own decode loop, kept or ranked.

**Rejection** draws whole texts from the model without its constraint, and keeps one with probability
1[x in C] exp(phi(x) - c), for a bound c of the potential phi. What is kept follows the target exactly,
however few there are. Of a run that stops at the k-th kept text, the n-th drawn, or at n = N texts,

    Z_hat = exp(c) (k - 1) / (n - 1)  if it stopped for having kept k,    exp(c) kept / N  else,

is unbiased for k >= 2 (Haldane 1945; Girshick, Mosteller & Savage 1946). The cost is 1 / Z texts for each
kept one (von Neumann 1951).

**Best of N** ranks N such texts by a score and takes the best that satisfies the constraint: no sample of
any posterior, but what is often compared with.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import numpy as np

from genrt.constraints import potential
from genrt.errors import InvalidRequest
from genrt.inference.checks import frozen, integer, seeds_of_step
from genrt.inference.potentials import evaluated
from genrt.inference.progress import Progress
from genrt.inference.resampling import Floats
from genrt.inference.result import Result
from genrt.inference.runtime import Counting
from genrt.inference.text_model import TextModel
from genrt.texts import Potential, Text

__all__ = ["BestOfN", "Drawn", "Kept", "Rejection"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A whole text of the language model.

    Fields:
        text: what was drawn.
        log_weight: its potential; -inf if the constraint is not satisfied.
        kept: whether rejection keeps it.
    """

    text: Text
    log_weight: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What rejection has drawn after ``step`` batches, kept or not, in order."""

    drawn: tuple[Drawn, ...]
    step: int
    seed: int

    @property
    def kept(self) -> tuple[Drawn, ...]:
        """The texts that were kept."""
        return tuple(each for each in self.drawn if each.kept)


class Rejection:
    """Rejection sampling for a ``TextModel``: independent texts of its target, dear where it is small.

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
            num_samples: how many texts to keep; the evidence has an unbiased estimate from 2 up.
            max_texts: the most to draw for that.
            batch_size: how many to draw at once.
            bound: what the model's potential never exceeds.

        Raises:
            InvalidRequest: an argument is out of its range.
        """
        self._model = _text_model(model)
        self._num_samples = integer("num_samples", num_samples, at_least=2)
        self._max_texts = integer("max_texts", max_texts, at_least=1)
        self._batch_size = integer("batch_size", batch_size, at_least=1)
        if not math.isfinite(bound):
            raise InvalidRequest(f"bound is {bound}: give a finite number")
        self._bound = float(bound)

    @property
    def model(self) -> TextModel:
        """What it runs."""
        return self._model

    def init(self, seed: int) -> Kept:
        """Nothing drawn yet.

        Raises:
            InvalidRequest: the seed is not an integer of at least 0.
        """
        return Kept((), 0, integer("seed", seed, at_least=0))

    def is_done(self, state: Kept) -> bool:
        """Whether enough was kept, or drawn."""
        return len(state.kept) >= self._num_samples or len(state.drawn) >= self._max_texts

    async def step(self, state: Kept) -> tuple[Kept, tuple[Drawn, ...]]:
        """One batch more, up to the last text that is wanted.

        Cancelling it, or an error, leaves ``state`` as good as it was.

        Raises:
            InvalidRequest: a potential above the bound.
            GenrtError: whatever the model raised.
        """
        own, models = seeds_of_step(state.seed, state.step)
        count = min(self._batch_size, self._max_texts - len(state.drawn))
        texts, log_weights = await _plain_texts(self._model, count, models)
        thresholds = np.log1p(-np.random.default_rng(own).random(count))
        batch, missing = [], self._num_samples - len(state.kept)
        for text, log_weight, threshold in zip(texts, log_weights, thresholds, strict=True):
            if log_weight > self._bound:
                raise InvalidRequest(
                    f"the potential of {str(text)!r} is {log_weight}, above the bound {self._bound}: "
                    "give a higher bound="
                )
            if missing > 0:
                kept = bool(threshold < log_weight - self._bound)
                batch.append(Drawn(text, log_weight, kept))
                missing -= kept
        after = Kept(state.drawn + tuple(batch), state.step + 1, state.seed)
        return after, tuple(batch)

    async def steps(self, state: Kept) -> AsyncIterator[tuple[Kept, tuple[Drawn, ...]]]:
        """Step until enough was kept, or drawn, from ``init(seed)`` or from any later state."""
        while not self.is_done(state):
            state, batch = await self.step(state)
            yield state, batch

    async def run(
        self,
        seed: int,
        *,
        on_step: Callable[[Kept, tuple[Drawn, ...]], None] | None = None,
        progress: bool = False,
    ) -> Result:
        """All batches from ``init(seed)``: what was kept, weighted alike. Equal seeds, equal texts."""
        state, counting = self.init(seed), Counting(self._model)
        with Progress("rejection", None, shown=progress) as shown:
            async for after, batch in self.steps(state):
                state = after
                shown.step(kept=f"{len(state.kept)}/{self._num_samples}", drawn=len(state.drawn))
                if on_step is not None:
                    on_step(state, batch)
        return replace(self.result(state), statistics=counting.statistics())

    def result(self, state: Kept) -> Result:
        """What was kept so far, and the estimate of the evidence."""
        kept, drawn = len(state.kept), len(state.drawn)
        share = (kept - 1, drawn - 1) if kept >= self._num_samples else (kept, max(drawn, 1))
        log_share = math.log(share[0] / share[1]) if share[0] > 0 else -math.inf
        return _result([each.text for each in state.kept], np.zeros(kept), log_share + self._bound)


class BestOfN:
    """The best of N texts by the model's potential, of those that satisfy its constraint.

    ::

        result = await BestOfN(model, n=64).run(seed=0)
        result.posterior()  # [(the best text, 1.0)], or [] if none satisfies the constraint
    """

    def __init__(self, model: TextModel, *, n: int, score: Potential | None = None) -> None:
        """
        Args:
            score: what to rank by; by default the model's potential, without one all texts are alike.

        Raises:
            InvalidRequest: an argument is out of its range.
        """
        self._model = _text_model(model)
        self._n = integer("n", n, at_least=1)
        self._score = score

    @property
    def model(self) -> TextModel:
        """What it runs."""
        return self._model

    def init(self, seed: int) -> Kept:
        """Nothing drawn yet.

        Raises:
            InvalidRequest: the seed is not an integer of at least 0.
        """
        return Kept((), 0, integer("seed", seed, at_least=0))

    async def step(self, state: Kept) -> tuple[Kept, tuple[Drawn, ...]]:
        """All N texts, at once; ``kept`` is the best so far."""
        _, models = seeds_of_step(state.seed, state.step)
        texts, scores = await _plain_texts(self._model, self._n, models)
        if self._score is not None:
            judged = await evaluated("score", self._score, texts)
            scores = [
                score if valid > -math.inf else valid
                for score, valid in zip(judged, scores, strict=True)
            ]
        everything = [
            *state.drawn,
            *(Drawn(t, s, False) for t, s in zip(texts, scores, strict=True)),
        ]
        best = max(range(len(everything)), key=lambda place: everything[place].log_weight)
        found = everything[best].log_weight > -math.inf
        batch = tuple(
            Drawn(each.text, each.log_weight, found and place == best)
            for place, each in enumerate(everything)
        )
        return Kept(batch, state.step + 1, state.seed), batch[len(state.drawn) :]

    async def run(self, seed: int) -> Result:
        """The best text as the only one of positive weight, all N of them in order; the log evidence is
        NaN. The same seed gives the same."""
        counting = Counting(self._model)
        state, _ = await self.step(self.init(seed))
        weights = np.array([0.0 if each.kept else -math.inf for each in state.drawn])
        result = _result([each.text for each in state.drawn], weights, math.nan)
        return replace(result, statistics=counting.statistics())


def _text_model(model: TextModel) -> TextModel:
    if not isinstance(model, TextModel):
        raise InvalidRequest(f"the model is a {type(model).__name__}: give a TextModel")
    return model


async def _plain_texts(model: TextModel, count: int, seed: int) -> tuple[list[Text], list[float]]:
    """Texts of the language model without constraint and twist, and their log-weights in the target."""
    end = model.eos_token_id
    sampled = await model.lm.batch_sample(
        [model.prompt] * count,
        max_tokens=model.max_steps,
        stop_token_ids=() if end is None else (end,),
        temperature=model.temperature,
        seed=seed >> 1,  # leaves room for the places that are added to it
        adapter=model.adapter,
    )
    vocabulary = model.lm.byte_vocab
    texts = [
        Text(tuple(token_ids), b"".join(map(vocabulary.__getitem__, token_ids)), True)
        for token_ids in sampled
    ]
    valid = [len(text.token_ids) < model.max_steps for text in texts]
    log_weights = [0.0] * count
    if model.constraint is not None:
        log_weights = await evaluated("constraint", potential(model.constraint), texts)
        log_weights = [
            weight if ended else -math.inf for weight, ended in zip(log_weights, valid, strict=True)
        ]
    if model.potential is not None:
        places = [place for place, weight in enumerate(log_weights) if weight > -math.inf]
        judged = await evaluated("potential", model.potential, [texts[place] for place in places])
        for place, value in zip(places, judged, strict=True):
            log_weights[place] = value
    return texts, log_weights


def _result(texts: list[Text], log_weights: Floats, log_evidence: float) -> Result:
    strings = tuple(text.bytes.decode(errors="replace") for text in texts)
    return Result(
        texts=strings,
        token_ids=tuple(text.token_ids for text in texts),
        values=strings,
        log_weights=frozen(log_weights),
        log_evidence=log_evidence,
    )
