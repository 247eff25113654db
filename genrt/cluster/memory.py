"""Memory that a process shares with those it sends to: arrays are copied there once, and read in place.

A *piece* is a file without a name (``memfd_create``), which the receivers have mapped since it first came
to them. It begins with a byte for each receiver, which is 1 while that one has arrays there. Once none
has any, others are written there: pages that both processes have cost a tenth of new ones.

Rows on a GPU are copied there by the device: a piece that they come to is *pinned* for as long as the
sender has it.

Rule:
    The sender alone sets a receiver's byte, and the receiver alone clears it. A piece that somebody has
    arrays in is written to by nobody; the sender may forget it, and it is gone with the last array.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from genrt.questions.rows import move_rows

__all__ = ["Array", "Memory", "Place", "ReceivedPieces"]

ALIGNMENT = 64
"""Where arrays begin: at multiples of it."""

MOST_RECEIVERS = ALIGNMENT

MOST_KEPT = 2**28
"""How many bytes a sender keeps at most, beyond the ``LEAST_KEPT`` pieces that it had last."""

LEAST_KEPT, MOST_PIECES = 4, 32

Array = Sequence[memoryview]
"""An array in parts, one after the other."""


class Place(NamedTuple):
    """Where arrays of these sizes are: the number of their piece, and its file where it is new to the
    receivers."""

    piece: int
    file: int | None
    sizes: list[int]


@dataclass(slots=True, eq=False)
class _Piece:
    number: int
    memory: mmap.mmap
    is_pinned: bool | None = None  # None: not tried

    @property
    def address(self) -> int:
        """Where it begins in this process's memory."""
        return int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    def pin(self) -> None:
        """Have the GPU write there by itself, if it can: in a fourth of the time, or less."""
        if self.is_pinned is not None:
            return
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        refused = int(cudart.cudaHostRegister(self.address, len(self.memory), 0))
        self.is_pinned = not refused
        if refused:  # or whatever the device does next would raise it
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")

    def unpin(self) -> None:
        """Let go of it, before its memory is."""
        if self.is_pinned:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.address)
        self.is_pinned = None


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where arrays of these sizes begin in a piece, and last where the next one would."""
    found = [MOST_RECEIVERS]
    for size in sizes:
        found.append(found[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return found


class Memory:
    """The memory that one process shares with its receivers, who are numbered."""

    def __init__(self, receivers: int = 1) -> None:
        self._flags = bytes([1] * receivers)
        self._pieces: list[_Piece] = []  # the last that was written to last

    def put(self, arrays: Sequence[Array], rows: Sequence[Tensor] = ()) -> Place:
        """Copy arrays, and rows of one length as the last of them, to where nobody has any; return the
        place, whose file is the caller's to close."""
        sizes = [sum(part.nbytes for part in each) for each in arrays]
        if rows:
            sizes.append(len(rows) * rows[0].nbytes)
        starts = _starts(sizes)
        piece, file = self._taken(starts[-1])
        whole = np.frombuffer(piece.memory, np.uint8)
        for start, each in zip(starts, arrays, strict=False):
            at = start
            for part in each:
                whole[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
                at += part.nbytes
        if rows:
            if rows[0].is_cuda:
                piece.pin()
            block = torch.from_numpy(whole[starts[-2] :][: sizes[-1]])
            move_rows(rows, block.view(rows[0].dtype).view(len(rows), -1))
        whole[: len(self._flags)] = np.frombuffer(self._flags, np.uint8)
        return Place(piece.number, file, sizes)

    def _taken(self, nbytes: int) -> tuple[_Piece, int | None]:
        free = bytes(len(self._flags))
        fitting = [each for each in self._pieces if len(each.memory) >= nbytes]
        for piece in sorted(fitting, key=lambda each: len(each.memory)):
            if piece.memory[: len(free)] == free:
                self._pieces.remove(piece)
                self._pieces.append(piece)
                return piece, None
        # With room to spare: what is asked step after step grows.
        size = -(-nbytes * 5 // 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        while self._is_too_much(size):
            self._pieces.pop(0).unpin()
        numbers = {each.number for each in self._pieces}
        number = next(n for n in range(len(numbers) + 1) if n not in numbers)
        file = os.memfd_create("genrt-arrays", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            self._pieces.append(_Piece(number, mmap.mmap(file, size)))
        except BaseException:
            os.close(file)
            raise
        return self._pieces[-1], file

    def _is_too_much(self, more: int) -> bool:
        count, nbytes = len(self._pieces), sum(len(each.memory) for each in self._pieces)
        return count >= LEAST_KEPT and (count >= MOST_PIECES or nbytes + more > MOST_KEPT)


class ReceivedPieces:
    """The pieces that have come to one receiver, by number."""

    def __init__(self, receiver: int = 0) -> None:
        self._receiver = receiver
        self._pieces: dict[int, mmap.mmap] = {}

    def add(self, number: int, file: int) -> None:
        """Take a new piece in place of what had its number before; close the file."""
        try:
            self._pieces[number] = mmap.mmap(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    def arrays(self, number: int, sizes: Sequence[int]) -> list[memoryview]:
        """Return the arrays of a piece in place; it is free once they are gone."""
        memory, starts = self._pieces[number], _starts(sizes)
        whole = np.frombuffer(memory, np.uint8)
        left = weakref.finalize(whole, _release, memory, self._receiver, os.getpid())
        left.atexit = False
        ends = zip(starts, sizes, strict=False)
        return [whole[start : start + size].data for start, size in ends]


def _release(memory: mmap.mmap, receiver: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the same memory, and its own arrays
        memory[receiver] = 0
