"""Tops: the likeliest tokens of a row, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from genrt.numbers import check_int
from genrt.questions.contexts import Adapter, Limits
from genrt.questions.reads import Answering, Read, ReadRequest, Wanted, parts_of, rows_of, wanted_of
from genrt.questions.rows import is_row, row_request
from genrt.questions.token_ids import TokenIds
from genrt.tokens.rows import apart
from genrt.tokens.sampling import TopLogprobs

__all__ = ["TopTokens", "top_request"]


@dataclass(frozen=True, slots=True)
class TopTokens(Wanted):
    """Wanted of a row: the ``k`` likeliest tokens, ``1 .. vocab_size``, as a ``TopLogprobs``."""

    k: int

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[TopLogprobs]:
        """Yield the likeliest tokens, each read's share of the longest list that was asked for. Of
        equally likely ones those with the lower ids come first: a share does not depend on the list."""
        for part in parts_of(reads):
            rows = rows_of(part)
            asked: list[TopTokens] = wanted_of(part)
            # The bits of a float as a number that orders as it does, with the token id to break ties.
            bits = rows.view(torch.int32)
            order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32
            order += torch.arange(2**32 - 1, 2**32 - 1 - rows.shape[-1], -1, device=rows.device)
            keys = order.topk(max(each.k for each in asked), dim=-1).values
            token_ids = 2**32 - 1 - (keys & (2**32 - 1))
            logprobs = rows.gather(-1, token_ids)
            for each, ids, values in zip(asked, token_ids.cpu(), logprobs.cpu(), strict=True):
                yield TopLogprobs(ids[: each.k].clone(), values[: each.k].clone())

    def owned(self, result: TopLogprobs) -> TopLogprobs:
        """Return a copy of both tensors."""
        return TopLogprobs(*apart(result))

    def is_answer(self, row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
        """Return whether these are ``k`` of the likeliest tokens in order, with their entries."""
        if not isinstance(result, TopLogprobs) or len(set(result.token_ids.tolist())) != self.k:
            return False
        best = row.topk(self.k).values
        own = row[result.token_ids.to(row.device)]
        return is_row(best, result.logprobs, tolerance=tolerance) and is_row(
            own, result.logprobs, tolerance=tolerance
        )

    @classmethod
    def examples(cls, vocab_size: int, generator: torch.Generator) -> list[Self]:
        """Return the likeliest token, and a few."""
        return [cls(1), cls(min(5, vocab_size))]


def top_request(
    limits: Limits, token_ids: TokenIds, k: int, adapter: Adapter | None
) -> ReadRequest:
    """Return the request for the likeliest tokens. Raises InvalidRequest for bad token ids or ``k``,
    ContextTooLong for too many."""
    k = check_int("k", k, 1, limits.vocab_size)
    return ReadRequest(row_request(limits, token_ids, adapter), TopTokens(k))
