"""Candidates: the log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.numbers import check_float
from genrt.questions.contexts import Adapter, Limits
from genrt.questions.reads import Answering, Read, ReadRequest, Wanted, parts_of, rows_of, wanted_of
from genrt.questions.rows import is_row, row_request
from genrt.questions.token_ids import TokenIds
from genrt.tokens.rows import entries_of
from genrt.tokens.sampling import truncate

__all__ = ["Candidates", "candidates_request", "checked_temperature"]


@dataclass(frozen=True, slots=True)
class Candidates(Wanted):
    """Wanted of a row: the log-probabilities of these tokens, in the row divided by the temperature and
    normalised again; the answer is a tensor on the host."""

    token_ids: tuple[int, ...]
    temperature: float = 1.0

    @property
    def group(self) -> tuple[type, bool]:
        """Entries at temperature 1 are read without a look at the others of their row."""
        return type(self), self.temperature == 1.0

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Tensor]:
        """Yield entries of the rows, all read at once where they lie in one storage, as a step's do."""
        asked: list[Candidates] = wanted_of(reads)
        counts = [len(each.token_ids) for each in asked]
        is_tempered = asked[0].temperature != 1.0
        found = [
            entries_of(_tempered(part) if is_tempered else [read.row for read in part], ids)
            for part, ids in _parts(reads, is_tempered)
        ]
        for each in torch.split(torch.cat(found).cpu(), counts):
            yield each.clone()

    def is_answer(self, row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
        """Return whether these are the row's entries."""
        if self.temperature != 1.0:
            row = truncate(row, temperature=self.temperature)
        return is_row(row[list(self.token_ids)], result, tolerance=tolerance)

    @classmethod
    def examples(cls, vocab_size: int, generator: torch.Generator) -> list[Self]:
        """Return a few tokens, one of them twice, and none."""
        ids = torch.randperm(vocab_size, generator=generator)[:5].tolist()
        return [cls((*ids, ids[0])), cls(()), cls((*ids,), 0.5), cls((*ids,), 3.0)]


def _parts(
    reads: Sequence[Read], is_tempered: bool
) -> Iterator[tuple[Sequence[Read], list[tuple[int, ...]]]]:
    """Yield the reads that are answered at once, with their tokens: all, if no row is looked at whole."""
    for part in parts_of(reads) if is_tempered else [reads]:
        yield part, [each.token_ids for each in wanted_of(part)]


def _tempered(reads: Sequence[Read]) -> Sequence[Tensor]:
    """Return the rows that are read from, each divided by its temperature and normalised again."""
    heat = [each.temperature for each in wanted_of(reads)]
    return truncate(rows_of(reads), temperature=torch.tensor(heat, dtype=torch.float64)).unbind()


def candidates_request(
    limits: Limits,
    token_ids: TokenIds,
    candidates: TokenIds,
    adapter: Adapter | None,
    temperature: float = 1.0,
) -> ReadRequest:
    """Return the request for entries of a row. Raises InvalidRequest for bad token ids, candidates or
    temperature, ContextTooLong for too many."""
    ids = limits.token_ids(candidates, allow_empty=True, name="candidates")
    wanted = Candidates(ids, checked_temperature(temperature))
    return ReadRequest(row_request(limits, token_ids, adapter), wanted)


def checked_temperature(temperature: Any) -> float:
    """Return a temperature. Raises InvalidRequest unless it is a finite number above 0."""
    number = check_float("temperature", temperature)
    if number <= 0:
        raise InvalidRequest(f"temperature is {number:g}: give a positive number")
    return number
