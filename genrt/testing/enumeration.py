"""The exact answer of an inference over a small model: every text with its weight."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from genrt.constraints import CheckedState, Constraint, ConstraintState, amasks
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference.checks import check_temperature, evaluate_potential
from genrt.inference.texts import END_TOKEN, Ends, Stop, parse_stop
from genrt.numbers import check_int
from genrt.runtime.concurrency import blocking
from genrt.tokens import sampling
from genrt.tokens.texts import Potential, Text

State: TypeAlias = ConstraintState | CheckedState
Prefix: TypeAlias = tuple[tuple[int, ...], float, State | None]
"""Token ids, their log-probability, and the constraint's state after them."""

Weighed: TypeAlias = dict[tuple[tuple[int, ...], bytes], float]
"""Log-weights of texts, each keyed by its tokens and its bytes."""

MASKS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExactPosterior:
    """The target of an inference, text by text. Probabilities are positive, sorted from the likeliest,
    and add up to 1. If no text is possible, both mappings are empty.

    Attributes:
        log_evidence: log Z, the log of the target's mass before normalization; -inf if that mass is 0.
        token_ids: the probability of each sequence of generated tokens, without the end token.
        texts: the probability of each text in bytes, over all its tokenizations.
    """

    log_evidence: float
    token_ids: Mapping[tuple[int, ...], float]
    texts: Mapping[bytes, float]

    @property
    def evidence(self) -> float:
        """Z itself, the mean of the weights of a correct sampler."""
        return math.exp(self.log_evidence)

    def __repr__(self) -> str:
        return (
            f"ExactPosterior(log_evidence={self.log_evidence:.6g}, {len(self.texts)} texts, "
            f"{len(self.token_ids)} token sequences)"
        )


def exact_posterior(
    model: NGram,
    prompt: str | Sequence[int],
    *,
    max_tokens: int,
    stop: Stop = END_TOKEN,
    constraint: Constraint | None = None,
    potential: Potential | None = None,
    temperature: float = 1.0,
    max_texts: int = 100_000,
) -> ExactPosterior:
    """Return the target of a ``TextModel`` with the same arguments, by enumeration.

    With p the model's distribution of a text x after the prompt, from tempered and renormalized rows,

        pi(x) = p(x) 1[x in constraint] exp(potential(x)) / Z.

    With a constraint, a text must end by the end token within ``max_tokens`` tokens, including the end
    token. Without a constraint, a text cut at ``max_tokens`` is an outcome too.

    Prefixes that the model or the constraint excludes are not followed, so a narrow constraint can be
    enumerated over many tokens. The function may be called where an event loop runs: constraint and
    potential run on another loop, in a thread that it waits for.

    Args:
        max_tokens: at least 1.
        stop: the condition that ends a text, as in ``TextModel``.
        constraint: over a runtime of the same model.
        potential: called once for every possible finished text.
        temperature: above 0.
        max_texts: the most texts and prefixes of one length to follow.

    Raises:
        InvalidRequest: an argument is out of its range, there are too many texts, a potential is NaN or
            +inf, or a constrained text must end and the model has no end token.
    """
    if not isinstance(model, NGram):
        raise InvalidRequest(
            f"the model is a {type(model).__name__}: give an NGram, whose texts can be enumerated"
        )
    if constraint is not None and not isinstance(constraint, Constraint):
        raise InvalidRequest(
            f"the constraint is a {type(constraint).__name__}: give one of genrt.constraints"
        )
    if constraint is not None and model.eos_token_id is None:
        raise InvalidRequest(
            "a constrained text ends with the end token, and the model has none: give it an eos_token_id"
        )
    walk = _TextWalk(
        model,
        tuple(
            model.tokenizer.encode(prompt)
            if isinstance(prompt, str)
            else [check_int("a token id", token, 0) for token in prompt]
        ),
        check_int("max_tokens", max_tokens, 1),
        constraint,
        check_temperature(temperature),
        check_int("max_texts", max_texts, 1),
        parse_stop(stop, eos_token_id=model.eos_token_id, vocab_size=model.vocab_size),
    )
    return blocking(_posterior_of(walk, model, potential))


async def _posterior_of(
    walk: _TextWalk, model: NGram, potential: Potential | None
) -> ExactPosterior:
    logprobs = await walk.texts()
    texts = [Text(ids, data, True) for ids, data in logprobs]
    weights = list(logprobs.values())
    if potential is not None:
        gained = await evaluate_potential("potential", potential, texts)
        weights = [logprob + more for logprob, more in zip(weights, gained, strict=True)]
    return _normalised_masses(texts, weights)


@dataclass(frozen=True, slots=True)
class _TextWalk:
    """Enumerates all possible texts token by token, with all prefixes of one length together."""

    model: NGram
    prompt: tuple[int, ...]
    max_tokens: int
    constraint: Constraint | None
    temperature: float
    max_texts: int
    ends: Ends
    rows: dict[tuple[int, ...], list[tuple[int, float]]] = field(default_factory=dict)

    async def texts(self) -> Weighed:
        """Return the log-probability of each possible text, by its tokens and its bytes."""
        ended: Weighed = {}
        start = None if self.constraint is None else self.constraint.start()
        prefixes: list[Prefix] = [((), 0.0, start)]
        for length in range(self.max_tokens):
            longer: list[Prefix] = []
            last = length == self.max_tokens - 1 and not self.ends.never
            allowed = await self._allowed(prefixes, last=last)
            if self.ends.never and self.constraint is not None:
                prefixes = self._cut(prefixes, allowed, ended, last=False)
                allowed = await self._allowed(prefixes, last=False)
            for (ids, logprob, state), may_follow in zip(prefixes, allowed, strict=True):
                for token, token_logprob in self._row(ids):
                    text, drawn = (*ids, token), logprob + token_logprob
                    if token in self.ends.token_ids:
                        if may_follow is None or self.model.eos_token_id in may_follow:
                            _add(ended, (ids, self._said(ids)), drawn)
                    elif may_follow is not None and (
                        token == self.model.eos_token_id or token not in may_follow
                    ):
                        continue
                    elif not self._drawn(ended, text, drawn):
                        after = None if state is None else state.advance(token)
                        longer.append((text, drawn, after))
                if len(ended) + len(longer) > self.max_texts:
                    raise InvalidRequest(
                        f"there are more than max_texts={self.max_texts} texts of up to {length + 1} "
                        "tokens: take a smaller model, fewer tokens or a narrower constraint"
                    )
            prefixes = longer
        if self.constraint is None or self.ends.never:
            self._cut(prefixes, await self._allowed(prefixes, last=False), ended, last=True)
        return ended

    def _cut(
        self,
        prefixes: Sequence[Prefix],
        allowed: Sequence[frozenset[int] | None],
        ended: Weighed,
        *,
        last: bool,
    ) -> list[Prefix]:
        """Move texts that end here without a drawn end to ``ended``; return the other prefixes."""
        going, end = [], self.model.eos_token_id
        for prefix, may_follow in zip(prefixes, allowed, strict=True):
            ids, logprob, state = prefix
            # ``mask`` runs no predicate, so a text that only a predicate excludes continues here and
            # never ends.
            if not last and (state is None or _ones(state.mask()) - {end}):
                going.append(prefix)
            elif may_follow is None or end in may_follow:
                _add(ended, (ids, self._said(ids)), logprob)
        return going

    def _said(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.model.vocabulary[token] for token in ids)

    def _drawn(self, ended: Weighed, ids: tuple[int, ...], logprob: float) -> bool:
        """Return whether these tokens spell a stop string; if so, add the cut text to ``ended``."""
        said = self._said(ids)
        places = [said.find(each) for each in self.ends.strings if each in said]
        if not places:
            return False
        cut = min(places)
        kept = tuple(token for place, token in enumerate(ids) if len(self._said(ids[:place])) < cut)
        _add(ended, (kept, said[:cut]), logprob)
        return True

    async def _allowed(
        self, prefixes: Sequence[Prefix], *, last: bool
    ) -> Sequence[frozenset[int] | None]:
        """Return the tokens that the constraint allows after each prefix; ``None`` without a
        constraint."""
        eos = self.model.eos_token_id
        states = [state for _, _, state in prefixes if state is not None]
        if eos is None or not states:
            return [None] * len(prefixes)
        if last:
            ends = [
                (await state.check([eos]))[0]
                if isinstance(state, CheckedState)
                else state.accepting
                for state in states
            ]
            return [frozenset([eos] if end else []) for end in ends]
        found: list[frozenset[int]] = []
        for start in range(0, len(states), MASKS_AT_ONCE):
            masks = await amasks(states[start : start + MASKS_AT_ONCE])
            found += map(_ones, masks)
        return found

    def _row(self, ids: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return the tokens that may follow, with their log-probabilities."""
        order = self.model.order
        context = (self.prompt + ids)[-order:] if order else ()
        if context not in self.rows:
            row = self.model.row(context).double()
            if self.temperature != 1:
                row = sampling.truncate(row, temperature=self.temperature)
            row = row.log_softmax(-1)
            self.rows[context] = [
                (token, logprob)
                for token, logprob in enumerate(row.tolist())
                if logprob > -math.inf
            ]
        return self.rows[context]


def _ones(mask: Tensor) -> frozenset[int]:
    """Return the tokens that a mask allows."""
    return frozenset(mask.nonzero()[:, 0].tolist())


def _add(texts: Weighed, text: tuple[tuple[int, ...], bytes], logprob: float) -> None:
    """Add a way in which a text can end; the text has the total probability of all ways."""
    texts[text] = float(np.logaddexp(texts.get(text, -math.inf), logprob))


def _normalised_masses(texts: Sequence[Text], log_weights: Sequence[float]) -> ExactPosterior:
    highest = max(log_weights, default=-math.inf)
    if highest == -math.inf:
        return ExactPosterior(-math.inf, MappingProxyType({}), MappingProxyType({}))
    total = math.fsum(math.exp(value - highest) for value in log_weights)
    log_evidence = highest + math.log(total)
    by_tokens: defaultdict[tuple[int, ...], float] = defaultdict(float)
    by_bytes: defaultdict[bytes, float] = defaultdict(float)
    for text, value in zip(texts, log_weights, strict=True):
        probability = math.exp(value - log_evidence)
        if probability > 0:
            by_tokens[text.token_ids] += probability
            by_bytes[text.bytes] += probability
    return ExactPosterior(log_evidence, _ranked(by_tokens), _ranked(by_bytes))


def _ranked(probabilities: Mapping[Any, float]) -> Mapping[Any, float]:
    likeliest_first = sorted(probabilities.items(), key=lambda entry: (-entry[1], entry[0]))
    return MappingProxyType(dict(likeliest_first))
