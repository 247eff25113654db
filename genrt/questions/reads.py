"""Reads from rows that stay on the device: the request, and what each kind of read provides.

A kind is a file beside this one, with a frozen value that is a ``Wanted``, a function that makes the
request from what a caller gives, and a method that answers all reads of that kind in a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from genrt.questions.contexts import Adapter, abbreviated
from genrt.questions.rows import LogprobsRequest
from genrt.tokens.rows import together
from genrt.tokens.sampling import rows_at_once

__all__ = [
    "Answering",
    "Read",
    "ReadRequest",
    "Wanted",
    "moved",
    "parts_of",
    "rows_of",
    "wanted_of",
]


class Wanted(Protocol):
    """The frozen value that says what is read from a row. The methods here are what most kinds do."""

    __slots__ = ()

    computes: ClassVar[bool] = False
    """Whether the engine is to compute the context even if its row is known."""

    @property
    def nbytes(self) -> int:
        """The memory that this takes beside the context, where it is much."""
        return 0

    @property
    def group(self) -> Hashable:
        """The same value for reads that are answered together."""
        return type(self)

    @staticmethod
    def answer(reads: Sequence[Read], engine: Answering) -> Iterable[object]:
        """Return the results of one group of reads, in their order. What is raised fails the group."""
        ...

    def owned(self, result: Any) -> object:
        """Return a result for one caller alone. A result that is a tensor does not come here:
        ``waiters.py`` copies those of all callers at once."""
        return result

    def is_answer(self, row: Tensor, result: object, *, tolerance: float = 0.0) -> bool:
        """Return whether a result is right, given the row: by arithmetic of its own."""
        ...

    @classmethod
    def examples(cls, vocab_size: int, generator: torch.Generator) -> list[Self]:
        """Return a few to test engines with."""
        ...


class Answering(Protocol):
    """The part of the answering engine that a kind of read may use."""

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: Tensor) -> None:
        """Tell the engine which tokens, float64 ``[n]`` on its device, were drawn from these rows."""
        ...

    def keep(self, read: Read) -> None:
        """Keep a copy of a read's row in the cache."""
        ...

    def keep_context(self, read: Read) -> None:
        """Have the engine keep what it has computed of a read's context."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class ReadRequest:
    """A read from a row that stays on the device. An engine never sees one: ``answers.py`` asks it for
    the row, once for all reads from it, and answers from that."""

    row: LogprobsRequest
    wanted: Wanted
    _hash: int = field(init=False, compare=False)
    weight: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.row, self.wanted)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The context."""
        return self.row.token_ids

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the row is computed with."""
        return self.row.adapter

    @property
    def weights_version(self) -> int:
        """The version of the weights that the row is computed with."""
        return self.row.weights_version

    @property
    def nbytes(self) -> int:
        """The memory that the context takes, and what is wanted."""
        return self.row.nbytes + self.wanted.nbytes

    def bound_to(self, adapter: Adapter | None) -> ReadRequest:
        """Return the same question to another adapter."""
        return ReadRequest(self.row.bound_to(adapter), self.wanted)

    def of_weights(self, version: int) -> ReadRequest:
        """Return the same question to this version of the weights."""
        return ReadRequest(self.row.of_weights(version), self.wanted)

    def owned(self, result: object) -> object:
        """Return a result for one caller alone; tensors are copied before, all at once."""
        return self.wanted.owned(result)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        kind = type(self.wanted).__name__
        return f"ReadRequest({kind}, {abbreviated(self.token_ids)}, adapter={self.adapter})"


class Read(NamedTuple):
    """One thing to read, and the row ``[vocab_size]`` to read it from, which others may share."""

    request: ReadRequest
    row: Tensor


def wanted_of(reads: Sequence[Read]) -> list[Any]:
    """Return what is wanted by reads of one kind."""
    return [read.request.wanted for read in reads]


def parts_of(reads: Sequence[Read]) -> Iterator[Sequence[Read]]:
    """Yield as many reads at a time as fit a CPU's caches, or leave room in a GPU's memory."""
    size = rows_at_once(reads[0].row)
    for start in range(0, len(reads), size):
        yield reads[start : start + size]


def rows_of(reads: Sequence[Read]) -> Tensor:
    """Return the rows of reads, ``[n, vocab_size]``, not to be written to."""
    return together([read.row for read in reads])


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Move numbers of the host to the device, without synchronizing with it."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)
