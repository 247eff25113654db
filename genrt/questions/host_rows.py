"""Host rows: rows that are moved to the host's memory, all those of a step together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor

from genrt.errors import InvalidRequest
from genrt.numbers import named
from genrt.questions.reads import Answering, Read, ReadRequest, Wanted
from genrt.questions.rows import LogprobsRequest, is_row
from genrt.tokens.rows import together
from genrt.tokens.sampling import rows_at_once

__all__ = ["Device", "HostRow", "host_row", "move_rows", "moved_rows", "must_move"]

Device: TypeAlias = str | torch.device
"""A device or its name, as torch takes it."""


@dataclass(frozen=True, slots=True)
class HostRow(Wanted):
    """Wanted of a row: all of it, in the host's memory; the answer is a tensor ``[vocab_size]``."""

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterator[Tensor]:
        """Yield the rows as views of one block, pinned if they come from a GPU: who keeps one copies it.
        They are put into the cache, as rows that were asked for."""
        block = moved_rows([read.row for read in reads])
        for read in reads:
            engine.keep(read)
        yield from block

    def is_answer(self, row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
        """Return whether this is the row, on the host."""
        return (
            isinstance(result, Tensor)
            and result.device.type == "cpu"
            and is_row(row, result, tolerance=tolerance)
        )

    @classmethod
    def examples(cls, vocab_size: int, generator: torch.Generator) -> list[Self]:
        """Return the only one there is."""
        return [cls()]


def host_row(row: LogprobsRequest) -> ReadRequest:
    """Return the request for a row on the host."""
    return ReadRequest(row, HostRow())


def moved_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return a copy of rows in one block of the host's memory, pinned if they come from a GPU."""
    first = rows[0]
    block = torch.empty(len(rows), len(first), dtype=first.dtype, pin_memory=first.is_cuda)
    move_rows(rows, block)
    return block


def move_rows(rows: Sequence[Tensor], block: Tensor) -> None:
    """Copy rows to a block ``[n, vocab_size]`` of the host's memory, and wait until they are there."""
    first, size = rows[0], rows_at_once(rows[0])
    for start, places in enumerate(torch.split(block, size)):
        part = rows[start * size :][:size]
        try:
            places.copy_(together(part), non_blocking=True)
        except torch.OutOfMemoryError:  # where rows that lie apart have no room to be together
            for place, row in zip(places, part, strict=True):
                place.copy_(row, non_blocking=True)
    if first.is_cuda:
        torch.cuda.current_stream(first.device).synchronize()


def must_move(device: Device | None, own: torch.device) -> bool:
    """Return whether rows on ``own`` have to be moved to the host to be where they are wanted.

    Raises:
        InvalidRequest: it is neither the rows' device nor the host.
    """
    if device is None:
        return False
    advice = f"device is {named(device)}: give " + " or ".join(
        dict.fromkeys([repr(str(own)), "'cpu'"])
    )
    given: object = device
    if not isinstance(given, str | int | torch.device):  # or torch's error would show what it is
        raise InvalidRequest(advice)
    try:
        wanted = torch.device(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(advice) from error
    if wanted.type == own.type and wanted.index in (None, own.index):
        return False
    if wanted.type != "cpu":
        raise InvalidRequest(f"device is {device!r}: rows are on {own}; give 'cpu' to move them")
    return True
