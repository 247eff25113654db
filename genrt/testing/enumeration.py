"""The exact answer of an inference over a small model: every text, weighed."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from genrt import sampling
from genrt.constraints import Constraint, ConstraintState, masks
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.texts import Potential, Text

__all__ = ["ExactPosterior", "exact_posterior"]

T = TypeVar("T")

MASKS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExactPosterior:
    """The target of an inference, text by text. Probabilities are positive and add up to 1, likeliest
    first; if no text is possible, both mappings are empty.

    Fields:
        log_evidence: log Z, the log of the target's mass before it is normalised; -inf if that is 0.
        token_ids: the probability of each sequence of generated tokens, without the end token.
        texts: the probability of each text in bytes, over all its tokenizations.
    """

    log_evidence: float
    token_ids: Mapping[tuple[int, ...], float]
    texts: Mapping[bytes, float]

    @property
    def evidence(self) -> float:
        """Z itself: what the weights of a right sampler average to."""
        return math.exp(self.log_evidence)

    def __repr__(self) -> str:
        return (
            f"ExactPosterior(log_evidence={self.log_evidence:.6g}, {len(self.texts)} texts, "
            f"{len(self.token_ids)} token sequences)"
        )


def exact_posterior(
    model: NGram,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    constraint: Constraint | None = None,
    potential: Potential | None = None,
    temperature: float = 1.0,
    max_texts: int = 100_000,
) -> ExactPosterior:
    """What ``genrt.inference`` estimates, by enumeration: with p the model's law of a text x after the
    prompt, its rows tempered and normalised again,

        target(x) = p(x) 1[constraint(x)] exp(potential(x)) / Z.

    With a constraint or a potential a text must end, by the end token, within ``max_tokens`` tokens, the
    end token counted. Without either a text cut at ``max_tokens`` is an outcome too, and Z = 1.

    Prefixes that the model or the constraint rules out are not followed, so that a narrow constraint
    may be enumerated over many tokens.

    Args:
        max_tokens: at least 1.
        potential: called once for every text that is possible, finished; an asynchronous one is run to
            its end in a thread, so this may be called where an event loop runs.
        temperature: above 0.
        max_texts: how many texts and prefixes of one length to follow at most.

    Raises:
        InvalidRequest: an argument is out of its range, there are too many texts, a potential is NaN or
            +inf, or texts must end and the model has no end token.
    """
    _check(model, prompt, max_tokens, temperature, max_texts)
    must_end = constraint is not None or potential is not None
    if must_end and model.eos_token_id is None:
        raise InvalidRequest(
            "with a constraint or a potential a text ends with the end token, and the model has none: "
            "give it an eos_token_id"
        )
    walk = _Walk(model, prompt, max_tokens, constraint, must_end, temperature, max_texts)
    logprobs = walk.texts()
    texts = {ids: b"".join(model.vocabulary[token] for token in ids) for ids in logprobs}
    if potential is not None:
        finished = [Text(ids, text, True) for ids, text in texts.items()]
        weights = _weights(potential, finished)
        logprobs = {text.token_ids: logprobs[text.token_ids] + weights[text] for text in finished}
    return _normalised(logprobs, texts)


class _Walk:
    """All texts that can come, found a token at a time, all prefixes of one length together."""

    def __init__(
        self,
        model: NGram,
        prompt: Sequence[int],
        max_tokens: int,
        constraint: Constraint | None,
        must_end: bool,
        temperature: float,
        max_texts: int,
    ) -> None:
        self._model = model
        self._prompt = tuple(prompt)
        self._max_tokens = max_tokens
        self._constraint = constraint
        self._must_end = must_end
        self._temperature = temperature
        self._max_texts = max_texts
        self._rows: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def texts(self) -> dict[tuple[int, ...], float]:
        """The log-probability of each possible sequence of tokens, without the end token."""
        ended: dict[tuple[int, ...], float] = {}
        start = None if self._constraint is None else self._constraint.start()
        prefixes: list[tuple[tuple[int, ...], float, ConstraintState | None]] = [((), 0.0, start)]
        for length in range(self._max_tokens):
            last = length == self._max_tokens - 1
            longer = []
            allowed = self._allowed([state for _, _, state in prefixes])
            for (ids, logprob, state), may_follow in zip(prefixes, allowed, strict=True):
                for token, token_logprob in self._row(ids):
                    if may_follow is not None and token not in may_follow:
                        continue
                    if token == self._model.eos_token_id:
                        ended[ids] = logprob + token_logprob
                    elif not (last and self._must_end):
                        after = None if state is None or last else state.advance(token)
                        longer.append(((*ids, token), logprob + token_logprob, after))
                if len(ended) + len(longer) > self._max_texts:
                    raise InvalidRequest(
                        f"there are more than max_texts={self._max_texts} texts of up to {length + 1} "
                        "tokens: take a smaller model, fewer tokens or a narrower constraint"
                    )
            prefixes = longer
        return ended | {ids: logprob for ids, logprob, _ in prefixes}

    def _allowed(self, states: Sequence[ConstraintState | None]) -> Iterable[frozenset[int] | None]:
        if self._constraint is None:
            return [None] * len(states)
        there = [state for state in states if state is not None]
        return [
            frozenset(mask.nonzero()[:, 0].tolist())
            for start in range(0, len(there), MASKS_AT_ONCE)
            for mask in masks(there[start : start + MASKS_AT_ONCE])
        ]

    def _row(self, ids: tuple[int, ...]) -> list[tuple[int, float]]:
        """The tokens that may follow, with their log-probabilities."""
        order = self._model.order
        context = (self._prompt + ids)[-order:] if order else ()
        if context not in self._rows:
            row = self._model.row(context).double()
            if self._temperature != 1:
                row = sampling.truncate(row, temperature=self._temperature)
            row = row.log_softmax(-1)
            self._rows[context] = [
                (token, logprob)
                for token, logprob in enumerate(row.tolist())
                if logprob > -math.inf
            ]
        return self._rows[context]


def _weights(potential: Potential, texts: Sequence[Text]) -> dict[Text, float]:
    values: list[Any] = [potential(text) for text in texts]
    places = [place for place, value in enumerate(values) if inspect.isawaitable(value)]
    if places:
        awaited = _run(_all([values[place] for place in places]))
        for place, value in zip(places, awaited, strict=True):
            values[place] = value
    weights = {}
    for text, value in zip(texts, values, strict=True):
        try:
            weight = float(value)
        except (TypeError, ValueError):
            weight = math.nan
        if math.isnan(weight) or weight == math.inf:
            raise InvalidRequest(
                f"the potential of {text.bytes!r} is {value!r}: give a finite log-weight, or -inf"
            )
        weights[text] = weight
    return weights


async def _all(awaitables: Iterable[Awaitable[float]]) -> list[float]:
    return [await awaitable for awaitable in awaitables]


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result, from an event loop of its own in a thread of its own."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _normalised(
    log_weights: Mapping[tuple[int, ...], float], texts: Mapping[tuple[int, ...], bytes]
) -> ExactPosterior:
    highest = max(log_weights.values(), default=-math.inf)
    if highest == -math.inf:
        return ExactPosterior(-math.inf, MappingProxyType({}), MappingProxyType({}))
    total = math.fsum(math.exp(value - highest) for value in log_weights.values())
    log_evidence = highest + math.log(total)
    likeliest_first = sorted(log_weights.items(), key=lambda entry: (-entry[1], entry[0]))
    by_tokens: dict[tuple[int, ...], float] = {}
    by_bytes: defaultdict[bytes, float] = defaultdict(float)
    for ids, value in likeliest_first:
        probability = math.exp(value - log_evidence)
        if probability > 0:
            by_tokens[ids] = probability
            by_bytes[texts[ids]] += probability
    ranked = dict(sorted(by_bytes.items(), key=lambda entry: (-entry[1], entry[0])))
    return ExactPosterior(log_evidence, MappingProxyType(by_tokens), MappingProxyType(ranked))


def _check(
    model: NGram, prompt: Sequence[int], max_tokens: int, temperature: float, max_texts: int
) -> None:
    if not isinstance(model, NGram):
        raise InvalidRequest(
            f"the model is a {type(model).__name__}: give an NGram, whose texts can be enumerated"
        )
    if any(isinstance(token, str) for token in prompt):
        raise InvalidRequest("the prompt is text: give token ids")
    if max_tokens < 1 or max_texts < 1:
        raise InvalidRequest(
            f"max_tokens={max_tokens} and max_texts={max_texts}: both are at least 1"
        )
    if not 0 < temperature < math.inf:
        raise InvalidRequest(f"temperature is {temperature}: give a positive, finite number")
