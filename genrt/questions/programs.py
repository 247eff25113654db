"""Whole programs, asked of an engine that runs them where its rows are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

__all__ = ["ProgramRequest"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProgramRequest:
    """A program, to be run by a replica. The answer is its outcome, as ``packed`` bytes too. No two such
    requests are equal, whatever they run.

    Attributes:
        packed: the program; see ``cluster/programs.py``.
        runtime: makes the runtime that it asks: ``AsyncLM``.
        seed: given to an inference, and decides what a function asks without a seed.
    """

    packed: bytes
    runtime: Any
    seed: int
    weights_version: int = 0
    token_ids: ClassVar[tuple[int, ...]] = ()
    adapter: ClassVar[None] = None
    weight: ClassVar[int] = 1

    @property
    def nbytes(self) -> int:
        """The memory that the program takes, packed."""
        return len(self.packed)

    def bound_to(self, adapter: object) -> ProgramRequest:
        """Return the same program, which binds each of its questions by itself."""
        return self

    def of_weights(self, version: int) -> ProgramRequest:
        """Return the same program, to ask this version of the weights."""
        return replace(self, weights_version=version)

    def owned(self, result: object) -> object:
        """Return the outcome, which only one caller waits for."""
        return result

    def __repr__(self) -> str:
        return f"ProgramRequest({len(self.packed)} bytes, seed={self.seed})"
