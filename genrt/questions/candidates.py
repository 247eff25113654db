"""Candidates: the log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from genrt.questions.contexts import Adapter, Limits
from genrt.questions.reads import Answering, Read, ReadRequest, Wanted, wanted_of
from genrt.questions.rows import is_row, row_request
from genrt.questions.token_ids import TokenIds

__all__ = ["Candidates", "candidates_request"]


@dataclass(frozen=True, slots=True)
class Candidates(Wanted):
    """Wanted of a row: the log-probabilities of these tokens; the answer is a tensor on the host."""

    token_ids: tuple[int, ...]

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Tensor]:
        """Yield entries of the rows, read with one index over all of them."""
        asked: list[Candidates] = wanted_of(reads)
        counts = [len(each.token_ids) for each in asked]
        index = torch.tensor(
            [token_id for each in asked for token_id in each.token_ids], dtype=torch.int64
        )
        index = index.to(reads[0].row.device)
        parts = zip(reads, torch.split(index, counts), strict=True)
        entries = torch.cat([read.row[ids] for read, ids in parts]).cpu()
        for each in torch.split(entries, counts):
            yield each.clone()

    def is_answer(self, row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
        """Return whether these are the row's entries."""
        return is_row(row[list(self.token_ids)], result, tolerance=tolerance)

    @classmethod
    def examples(cls, vocab_size: int, generator: torch.Generator) -> list[Self]:
        """Return a few tokens, one of them twice, and none."""
        ids = torch.randperm(vocab_size, generator=generator)[:5].tolist()
        return [cls((*ids, ids[0])), cls(())]


def candidates_request(
    limits: Limits, token_ids: TokenIds, candidates: TokenIds, adapter: Adapter | None
) -> ReadRequest:
    """Return the request for entries of a row. Raises InvalidRequest for bad token ids or candidates,
    ContextTooLong for too many."""
    wanted = limits.token_ids(candidates, allow_empty=True, name="candidates")
    return ReadRequest(row_request(limits, token_ids, adapter), Candidates(wanted))
