"""Scores: the log-probabilities of a continuation's tokens, each given those before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.questions.candidates import Candidates
from genrt.questions.contexts import TOKEN_BYTES, Adapter, Limits, abbreviated, check_contexts
from genrt.questions.reads import ReadRequest
from genrt.questions.rows import LogprobsRequest, is_row, row_request
from genrt.questions.token_ids import TokenIds

__all__ = ["ScoreRequest", "batch_score_requests", "joined", "score_requests", "text_requests"]


@dataclass(frozen=True, slots=True, repr=False)
class ScoreRequest:
    """The log-probabilities of a text's tokens from number ``start`` on, at least one of them.

    Its answer is a tensor ``[len(token_ids) - start]``, float32, on the host. Only an engine that is
    ``Scoring`` is given one: it computes the text once, and takes every position as it comes by.

    Attributes:
        packed: the text, context and continuation, packed as in ``LogprobsRequest``.
        start: how many tokens of it are the context, at least one.
    """

    packed: bytes
    start: int
    adapter: Adapter | None = None
    weights_version: int = 0
    _hash: int = field(init=False, compare=False)
    weight: ClassVar[int] = 1

    def __post_init__(self) -> None:
        own = self.packed, self.start, self.adapter, self.weights_version
        object.__setattr__(self, "_hash", hash(own))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The text; unpacked every time."""
        return tuple(array("I", self.packed))

    @property
    def rows(self) -> list[LogprobsRequest]:
        """The row before each token of the continuation."""
        most = len(self.packed)
        ends = range(TOKEN_BYTES * self.start, most, TOKEN_BYTES)
        return [self._row(end) for end in ends]

    @property
    def computed(self) -> LogprobsRequest:
        """The row after the longest context that the answer needs: all of the text but its last token."""
        return self._row(-TOKEN_BYTES)

    def _row(self, end: int) -> LogprobsRequest:
        return LogprobsRequest(
            packed=self.packed[:end], adapter=self.adapter, weights_version=self.weights_version
        )

    @property
    def nbytes(self) -> int:
        """The memory that the text takes."""
        return len(self.packed)

    def bound_to(self, adapter: Adapter | None) -> ScoreRequest:
        """Return the same question to another adapter."""
        return replace(self, adapter=adapter)

    def of_weights(self, version: int) -> ScoreRequest:
        """Return the same question to this version of the weights."""
        return replace(self, weights_version=version)

    def owned(self, result: object) -> object:
        """Return a result for one caller alone; tensors are copied before, all at once."""
        return result

    def is_answer(self, rows: Sequence[Tensor], result: object, *, tolerance: float = 0.0) -> bool:
        """Return whether this is the answer, given the row before each token."""
        return is_row(self.answer(rows), result, tolerance=tolerance)

    def answer(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the answer, given the row before each token."""
        pairs = zip(rows, self.token_ids[self.start :], strict=True)
        return torch.stack([row[token_id] for row, token_id in pairs]).cpu()

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES - self.start

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        text = abbreviated(self.token_ids)
        return f"ScoreRequest({text}, start={self.start}, adapter={self.adapter})"


def score_requests(
    limits: Limits,
    token_ids: TokenIds,
    continuation: TokenIds,
    adapter: Adapter | None,
    *,
    in_one: bool,
) -> list[ReadRequest | ScoreRequest]:
    """Return the requests whose results, ``joined``, are a continuation's score: one for all of its
    tokens with ``in_one``, otherwise a read for each token, from the row after what comes before it. A
    single token is read too: its row may be there, and others read from it.

    Raises:
        InvalidRequest: bad token ids in either.
        ContextTooLong: context and continuation, less its last token, are too long together.
    """
    before = limits.token_ids(token_ids)
    after = limits.token_ids(continuation, allow_empty=True, name="continuation")
    computed = row_request(limits, (*before, *after[:-1]), adapter)
    whole = computed.packed + array("I", after[-1:]).tobytes()
    score = ScoreRequest(whole, len(before), adapter)
    if in_one and len(after) > 1:
        return [score]
    pairs = zip(score.rows, after, strict=True)
    return [ReadRequest(row, Candidates((each,))) for row, each in pairs]


def batch_score_requests(
    limits: Limits,
    contexts: Sequence[TokenIds],
    continuations: Sequence[TokenIds],
    adapter: Adapter | None,
    *,
    in_one: bool,
) -> list[list[ReadRequest | ScoreRequest]]:
    """Return ``score_requests`` of each continuation after its context. Raises InvalidRequest too if
    there are not as many of one as of the other."""
    pairs = check_contexts(contexts), check_contexts(continuations, "continuations")
    if len(pairs[0]) != len(pairs[1]):
        raise InvalidRequest(
            f"{len(pairs[0])} contexts and {len(pairs[1])} continuations: give one for each"
        )
    return [
        score_requests(limits, before, after, adapter, in_one=in_one)
        for before, after in zip(*pairs, strict=True)
    ]


def text_requests(
    limits: Limits, token_ids: TokenIds, adapter: Adapter | None, *, in_one: bool
) -> list[ReadRequest | ScoreRequest]:
    """Return ``score_requests`` of all tokens of a text after its first; raise as that does."""
    text = limits.token_ids(token_ids)
    return score_requests(limits, text[:1], text[1:], adapter, in_one=in_one)


def joined(scores: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities of all tokens: float32 ``[len(continuation)]`` on the host."""
    return torch.cat([torch.empty(0), *scores])
