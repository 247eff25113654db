"""Messages between a runtime and its replicas, or the ranks of one, as bytes of pickle.

Rules:
    Every question has a ticket, by which its answer is known.
    Handles of populations travel as numbers, and each end has a table. Messages have to be read in the
    order in which they were made.
    Sequences that extend sequences of the other end travel as their last tokens: see ``FarSequences``.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from genrt.engines.protocol import EngineStatistics
from genrt.questions.completions import Told
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.sequences import Contexts, Origins, SequenceHandle

Pickled: TypeAlias = "bytes | tuple[bytes, list[np.ndarray]]"
"""Bytes, for which Ray has a short way, and the large buffers beside them."""

LARGE = 2**16
"""The bytes of a buffer that an object store takes as it is."""


class HandleNumbers:
    """The numbers of populations' handles, at the end that asks. The collector adds the collected ones to
    ``gone``, from any thread."""

    def __init__(self) -> None:
        self.gone: deque[int] = deque()
        self._numbers: dict[weakref.ref[SequenceHandle], int] = {}
        self._last = 0

    def of(self, handle: SequenceHandle) -> int:
        """Return the number of a handle, a new one the first time."""
        known = weakref.ref(handle, self._forget)
        number = self._numbers.get(known)
        if number is None:
            self._last += 1
            number = self._numbers[known] = self._last
        return number

    def taken(self) -> list[int]:
        """Return the numbers of collected handles, each once."""
        return [self.gone.popleft() for _ in range(len(self.gone))]

    def _forget(self, handle: weakref.ref[SequenceHandle]) -> None:
        self.gone.append(self._numbers.pop(handle))


class FarSequences:
    """The sequences that the other end of a connection holds: of populations that extended others, which
    will probably happen again."""

    def __init__(self, numbers: HandleNumbers) -> None:
        self.numbers = numbers
        self.held: WeakSet[SequenceHandle] = WeakSet()

    def sent(self, draw: PopulationDraw) -> Any:
        """Return the sequences of a question as they travel: the last tokens of known ones, or a table
        and its lengths."""
        contexts, origins, is_known = draw.contexts, draw.origins, False
        if origins is not None:
            is_known = all(each in self.held for each in origins.handles)
            is_known &= np.array_equal(contexts.lengths, origins.lengths + 1)
            self.held.add(draw.handle)
        if is_known:
            return contexts.last_tokens.astype(np.uint32)
        return contexts.table[contexts.places, : int(contexts.lengths.max())], contexts.lengths


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, far: FarSequences | None, large: list[np.ndarray]) -> None:
        def stays(buffer: pickle.PickleBuffer) -> bool:
            if is_large := (memory := buffer.raw()).nbytes >= LARGE:
                large.append(np.frombuffer(memory, np.uint8))
            return not is_large

        super().__init__(out, 5, buffer_callback=stays)
        self._far = far

    def persistent_id(self, each: Any) -> tuple[int, int] | None:
        if self._far is None or not isinstance(each, SequenceHandle):
            return None
        return self._far.numbers.of(each), each.count

    def reducer_override(self, each: Any) -> Any:
        if isinstance(each, Tensor):
            return _tensor, (each.cpu().numpy(),)
        if self._far is None or not isinstance(each, PopulationDraw):
            return NotImplemented
        own = each.adapter, each.mask_table, each.temperature, each.seeds, each.origins
        rest = each.weights_version, (), each.laws, each.block
        return _population, (self._far.sent(each), each.handle, each.origins, (*own, *rest))


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: io.BytesIO, table: dict[int, SequenceHandle], large: list[np.ndarray]
    ) -> None:
        super().__init__(data, buffers=large)
        self._table = table

    def persistent_load(self, handle: Any) -> SequenceHandle:
        number, count = handle
        if number not in self._table:
            self._table[number] = SequenceHandle(count)
        return self._table[number]


def pickled(value: object, far: FarSequences | None = None) -> Pickled:
    """Return a value as bytes. With populations, ``far`` is about the other end."""
    out, large = io.BytesIO(), list[np.ndarray]()
    _Pickler(out, far, large).dump(value)
    return (out.getvalue(), large) if large else out.getvalue()


def unpickled(data: Pickled, table: dict[int, SequenceHandle] | None = None) -> Any:
    """Return the value. ``table`` has the known handles of populations, and gets the new ones."""
    data, large = (data, []) if isinstance(data, bytes) else data
    return _Unpickler(io.BytesIO(data), {} if table is None else table, large).load()


def _tensor(numbers: np.ndarray) -> Tensor:
    """Return a copy: arrays of a channel are read-only, and keep its memory."""
    return torch.from_numpy(numbers.copy())


def _population(
    sent: Any, handle: SequenceHandle, origins: Origins | None, own: tuple[Any, ...]
) -> PopulationDraw:
    if isinstance(sent, tuple):
        rows, lengths = sent
        contexts = Contexts(rows, np.arange(len(rows)), lengths)
    else:
        before = [cast("Contexts", each.contexts) for each in cast("Origins", origins).handles]
        contexts = Contexts.grown(before, cast("Origins", origins).numbers, sent)
    if origins is not None:  # a copy: the channel frees its memory as a whole
        handle.contexts = contexts = contexts.kept()
    draw = PopulationDraw(contexts, *own)
    object.__setattr__(draw, "handle", handle)
    return draw


class Message(NamedTuple):
    """What a replica gets: questions with their tickets, tickets of questions that are withdrawn, and the
    numbers of collected populations."""

    asked: Sequence[tuple[int, Request]] = ()
    withdrawn: Sequence[int] = ()
    forgotten: Sequence[int] = ()


class Answers(NamedTuple):
    """The answers since the last message.

    Attributes:
        ends: the tickets of ended questions, each with its result or its error.
        told: the tickets of streams, each with a part.
        statistics: the counters of the engine.
    """

    ends: list[tuple[int, Any]]
    told: list[tuple[int, Told]]
    statistics: EngineStatistics
