"""Language models over bytes: the law of the next byte of a text, from a model of tokens.

A byte string s begins the text if the tokens of the text cover it: t_1 … t_n spell s and maybe more, and
t_1 … t_(n-1) spell less. With p the model's law of tokens,

    P(s) = sum of p(t_1 … t_n) over all covers of s,    P(b | s) = P(s b) / P(s).

Covers with the same tokens t_1 … t_(n-1) are one *candidate*: a token prefix, and the tokens that may
follow it and begin with the rest of s. Covers that end where s does are candidates of their own, with
any next token. A beam keeps the likeliest candidates. The probability of the others is lost: P(s) lies
between the kept probability and the sum of both.

Vieira, LeBrun, Giulianelli, Gastaldi, DuSell, Terilla, O'Donnell & Cotterell (2024), *From language
models over tokens to language models over characters*. Phan, Havasi, Muckley & Ullrich (2024),
*Understanding and mitigating tokenization bias in language models*.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrt.constraints.protocols import prompt_tokens, tokens_of
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_float, check_int, displayed

__all__ = ["END", "ByteLM", "ByteProduct", "ByteState"]

END = 256
"""The place of the text's end in a law of the next byte."""

Floats = NDArray[np.float64]

UNASKED: Floats = np.zeros(0)
"""The row of a new candidate."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Covers of a text that have all but their last token in common.

    Attributes:
        token_ids: the common tokens.
        log_probability: that of the common tokens.
        row: the probabilities of the next tokens, in the order of their bytes, and of the end.
        start: the first token in that order that covers the text and more.
        stop: the place after the last one.
        depth: how many bytes of the text the last token begins with.
    """

    token_ids: tuple[int, ...]
    log_probability: float
    row: Floats
    start: int = 0
    stop: int = 0
    depth: int = 0

    @property
    def log_mass(self) -> float:
        """The logarithm of the probability of all of its covers."""
        if not self.depth:
            return self.log_probability
        return self.log_probability + _log(float(self.row[self.start : self.stop].sum()))


class ByteLM:
    """A token model's texts after a prompt, byte by byte.

    Tokens that stand for no text, other than the end token, have no part in it: each row is normalized
    without them.
    """

    def __init__(
        self,
        lm: AsyncLM,
        prompt: str | Sequence[int],
        *,
        beam: int | None = 16,
        adapter: str | None = None,
    ) -> None:
        """
        Args:
            prompt: a text, tokenized as by ``lm.generate``, or token ids.
            beam: the most candidates of a text; each costs a row when it is new. ``None`` keeps all, and
                their number may grow with the text.
            adapter: the name of the adapter.

        Raises:
            InvalidRequest: an argument is out of range.
            InvalidConstraint: ``lm`` is no runtime, or its tokenizer names no end token.
        """
        tokens = tokens_of(lm)
        self._lm, self._adapter = lm, adapter
        self._prompt = [*prompt_tokens(lm, prompt, allow_empty=True)]
        self._beam = None if beam is None else check_int("beam", beam, 1)
        end = tokens.eos_token_id
        ids = [i for i in range(len(tokens)) if i != end and tokens.is_open(i)]
        self._ids = sorted(ids, key=tokens.byte_vocab.__getitem__)
        self._places = np.array([*self._ids, end])
        self._spelled = [tokens.byte_vocab[i] for i in self._ids]
        self._column = lru_cache(64)(self._bytes_at)

    def _bytes_at(self, depth: int) -> NDArray[np.int64]:
        """Return the byte of each token at a depth, in the tokens' order; -1 after a token's end."""
        return np.array([each[depth] if depth < len(each) else -1 for each in self._spelled])

    async def start(self) -> ByteState:
        """Return the state before any byte. It asks for one row; raises as ``lm.next_token_logprobs``."""
        return await self._pruned(b"", [_Candidate((), 0.0, UNASKED)], -math.inf)

    async def _pruned(self, text: bytes, found: list[_Candidate], log_lost: float) -> ByteState:
        """Return the state of a text, from its candidates: of the likeliest, with their rows."""
        found.sort(key=lambda each: -each.log_mass)
        kept = found[: self._beam]
        lost = np.logaddexp.reduce([log_lost, *(each.log_mass for each in found[len(kept) :])])
        new = [each for each in kept if each.row is UNASKED]
        if new:
            contexts = [[*self._prompt, *each.token_ids] for each in new]
            rows = await self._lm.batch_next_token_logprobs(
                contexts, device="cpu", adapter=self._adapter
            )
            wanted = np.exp(rows.numpy()[:, self._places].astype(np.float64))
            made = iter(wanted / wanted.sum(1, keepdims=True))
            stop = len(self._ids)
            kept = [
                replace(each, row=next(made).copy(), stop=stop) if each.row is UNASKED else each
                for each in kept
            ]
        laws = [self._following(each) for each in kept]
        joint: Floats = np.logaddexp.reduce([np.full(END + 1, -math.inf), *laws])
        log_mass = float(np.logaddexp.reduce(joint))
        logprobs = joint if log_mass == -math.inf else joint - log_mass
        return ByteState(text, logprobs, log_mass, float(lost), self, tuple(kept))

    def _following(self, candidate: _Candidate) -> Floats:
        """Return the joint log-probability of a candidate's tokens and each next byte, or the end."""
        start, stop, row = candidate.start, candidate.stop, candidate.row
        column = self._column(candidate.depth)[start:stop]
        found = np.bincount(column, row[start:stop], END + 1).astype(np.float64)
        if not candidate.depth:
            found[END] = row[-1]
        with np.errstate(divide="ignore"):
            return candidate.log_probability + np.log(found)

    async def _extended(self, state: ByteState, byte: int) -> ByteState:
        """Return the state after one more byte."""
        found = []
        for each in state._candidates:
            column = self._column(each.depth)[each.start : each.stop]
            start, stop = each.start + np.searchsorted(column, (byte, byte + 1))
            longer = start + np.searchsorted(self._column(each.depth + 1)[start:stop], 0)
            for place in range(start, longer):  # tokens of these bytes
                probability = each.log_probability + _log(each.row[place])
                found.append(_Candidate((*each.token_ids, self._ids[place]), probability, UNASKED))
            found.append(replace(each, start=longer, stop=stop, depth=each.depth + 1))
        found = [each for each in found if each.log_mass > -math.inf]
        return await self._pruned(state.text + bytes([byte]), found, state.log_lost)


@dataclass(frozen=True, eq=False)
class ByteState:
    """A text of bytes, and the law of its next byte.

    With P the probability that a text begins with these bytes, and for an unlimited beam ``log_lost`` of
    -inf,

        log_mass <= log P <= log(exp(log_mass) + exp(log_lost)).

    Attributes:
        text: the bytes so far.
        logprobs: of each next byte, and at ``END`` of the end of the text: float64 ``[257]``; all -inf if
            no kept candidate spells the text.
        log_mass: the log-probability of the candidates that the beam keeps.
        log_lost: of all that it has dropped, for this text and its prefixes.
    """

    text: bytes
    logprobs: Floats
    log_mass: float
    log_lost: float
    _of: ByteLM = field(repr=False)
    _candidates: tuple[Any, ...] = field(repr=False)

    async def extend(self, data: bytes) -> ByteState:
        """Return the state after more bytes. Each byte asks for the rows of its new candidates, in one
        question."""
        state = self
        if not isinstance(data, bytes):
            raise InvalidRequest(f"the bytes are {displayed(data)}: give bytes, as in b'a'")
        for byte in data:
            state = await self._of._extended(state, byte)
        return state


@dataclass(frozen=True, eq=False)
class ByteProduct:
    """Texts of one bytes under several models, whose tokens may differ, with the product of their laws.

    The law of the next byte is the normalized product of the models' own, each to its power. It is an
    ensemble byte by byte, and not the product of the models' laws of whole texts.

    Attributes:
        states: of equal texts, such as the starts of several models.
        powers: the exponents of the laws, above 0; 1 each by default.
    """

    states: Sequence[ByteState]
    powers: Sequence[float] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            InvalidRequest: there are no states, their texts differ, or a power is not above 0.
        """
        powers = [1.0] * len(self.states) if self.powers is None else [*self.powers]
        for power in powers:
            if not 0 < check_float("a power", power) < math.inf:
                raise InvalidRequest(f"a power is {displayed(power)}: give a finite number above 0")
        if len({state.text for state in self.states}) != 1 or len(powers) != len(self.states):
            raise InvalidRequest("give states of one text, and as many powers")
        object.__setattr__(self, "powers", powers)

    @property
    def text(self) -> bytes:
        """The bytes so far."""
        return self.states[0].text

    @property
    def logprobs(self) -> Floats:
        """Of each next byte, and at ``END`` of the end; all -inf if the models agree on none."""
        pairs = zip(self.powers or (), self.states, strict=True)
        joint: Floats = np.sum([power * state.logprobs for power, state in pairs], axis=0)
        total = np.logaddexp.reduce(joint)
        return joint if total == -math.inf else joint - total

    async def extend(self, data: bytes) -> ByteProduct:
        """Return the product after more bytes; the models are asked at once."""
        states = await asyncio.gather(*(state.extend(data) for state in self.states))
        return ByteProduct(states, self.powers)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf
