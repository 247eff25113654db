"""Scores: the log-probabilities of a continuation's tokens, each given those before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from genrt.questions.candidates import Candidates
from genrt.questions.contexts import TOKEN_BYTES, Adapter, Limits, abbreviated
from genrt.questions.reads import ReadRequest
from genrt.questions.rows import LogprobsRequest, row_request
from genrt.questions.token_ids import TokenIds

__all__ = ["ScoreRequest", "joined", "score_requests"]


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
    _hash: int = field(init=False, compare=False)
    weight: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.packed, self.start, self.adapter)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The text; unpacked every time."""
        return tuple(array("I", self.packed))

    @property
    def computed(self) -> LogprobsRequest:
        """The row after the longest context that the answer needs: all of the text but its last token."""
        return LogprobsRequest(packed=self.packed[:-TOKEN_BYTES], adapter=self.adapter)

    @property
    def nbytes(self) -> int:
        """The memory that the text takes."""
        return len(self.packed)

    def bound_to(self, adapter: Adapter | None) -> ScoreRequest:
        """Return the same question to another adapter."""
        return ScoreRequest(self.packed, self.start, adapter)

    def owned(self, result: object) -> object:
        """Return a result for one caller alone; tensors are copied before, all at once."""
        return result

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
) -> list[ReadRequest] | list[ScoreRequest]:
    """Return the requests whose results, ``joined``, are a continuation's score: one for all of its
    tokens with ``in_one``, otherwise a read for each token, from the row after what comes before it. A
    single token is read too: its row may be there, and others read from it.

    Raises:
        InvalidRequest: bad token ids in either.
        ContextTooLong: context and continuation, less its last token, are too long together.
    """
    before = limits.token_ids(token_ids)
    after = limits.token_ids(continuation, allow_empty=True, name="continuation")
    whole = row_request(limits, (*before, *after[:-1]), adapter).packed
    if in_one and len(after) > 1:
        packed = whole + array("I", after[-1:]).tobytes()
        return [ScoreRequest(packed, len(before), adapter)]
    start = TOKEN_BYTES * len(before)
    rows = (
        LogprobsRequest(adapter=adapter, packed=whole[: start + TOKEN_BYTES * count])
        for count in range(len(after))
    )
    return [ReadRequest(row, Candidates((each,))) for row, each in zip(rows, after, strict=True)]


def joined(scores: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities of all tokens: float32 ``[len(continuation)]`` on the host."""
    return torch.cat([torch.empty(0), *scores])
