"""Scores: the log-probabilities of a continuation's tokens, each read from the row before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from genrt.questions.candidates import Candidates
from genrt.questions.contexts import TOKEN_BYTES, Adapter, Limits
from genrt.questions.reads import ReadRequest
from genrt.questions.rows import LogprobsRequest, row_request
from genrt.questions.token_ids import TokenIds

__all__ = ["joined", "score_requests"]


def score_requests(
    limits: Limits, token_ids: TokenIds, continuation: TokenIds, adapter: Adapter | None
) -> list[ReadRequest]:
    """Return a request for each token of ``continuation``, after what comes before it.

    Raises:
        InvalidRequest: bad token ids in either.
        ContextTooLong: context and continuation, less its last token, are too long together.
    """
    before = limits.token_ids(token_ids)
    after = limits.token_ids(continuation, allow_empty=True, name="continuation")
    whole = row_request(limits, (*before, *after[:-1]), adapter).packed
    start = TOKEN_BYTES * len(before)
    rows = (
        LogprobsRequest(adapter=adapter, packed=whole[: start + TOKEN_BYTES * count])
        for count in range(len(after))
    )
    return [ReadRequest(row, Candidates((each,))) for row, each in zip(rows, after, strict=True)]


def joined(scores: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities of all tokens: float32 ``[len(continuation)]`` on the host."""
    return torch.cat([torch.empty(0), *scores])
