"""Rows in memory that two processes share: written once by a replica, read in place by the runtime.

A segment is a file without a name (``memfd_create``), which the runtime opens by the replica's table of
open files. It is the rows' alone until the last tensor over it is gone; then others are written there.
Nothing is left of it once both processes have ended, however they do.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["LEAST_SHARED", "Segment", "Segments", "rows_in"]

LEAST_SHARED = 2**14
"""How many bytes of rows are worth a segment; fewer travel in the message."""

MOST_FREE = 4
"""How many segments that are free are kept for the next rows."""


class Segment(NamedTuple):
    """Where rows are: float32 ``[rows, width]``."""

    number: int
    process: int
    file: int
    rows: int
    width: int


@dataclass(slots=True)
class _Mapped:
    file: int
    memory: mmap.mmap

    def close(self) -> None:
        self.memory.close()
        os.close(self.file)


class Segments:
    """The segments of a replica."""

    def __init__(self) -> None:
        self._used: dict[int, _Mapped] = {}
        self._free: list[_Mapped] = []
        self._last = 0

    def write(self, rows: Sequence[Tensor]) -> Segment:
        """Copy rows of one length into a segment."""
        count, width = len(rows), len(rows[0])
        mapped = self._taken(4 * count * width)
        self._last += 1
        self._used[self._last] = mapped
        target = torch.frombuffer(mapped.memory, dtype=torch.float32, count=count * width)
        torch.stack([*rows], out=target.view(count, width))
        return Segment(self._last, os.getpid(), mapped.file, count, width)

    def free(self, numbers: Sequence[int]) -> None:
        """Have segments whose rows are gone for the next ones."""
        for number in numbers:
            if (mapped := self._used.pop(number, None)) is not None:
                self._free.append(mapped)
        while len(self._free) > MOST_FREE:
            self._free.pop(0).close()

    def _taken(self, nbytes: int) -> _Mapped:
        for place, mapped in enumerate(self._free):
            if nbytes <= len(mapped.memory) <= 4 * nbytes:
                return self._free.pop(place)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = os.memfd_create("genrt-rows", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        return _Mapped(file, mmap.mmap(file, size))


def rows_in(segment: Segment, freed: deque[int]) -> Tensor:
    """Return the rows of a segment, ``[rows, width]``, in place; its number is in ``freed`` once they are
    gone. Raises OSError if the replica is."""
    nbytes = 4 * segment.rows * segment.width
    file = os.open(f"/proc/{segment.process}/fd/{segment.file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(file, nbytes)
    finally:
        os.close(file)
    numbers = np.frombuffer(memory, np.float32)
    weakref.finalize(numbers, freed.append, segment.number).atexit = False
    return torch.from_numpy(numbers).view(segment.rows, segment.width)
