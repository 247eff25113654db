"""Messages between a runtime and the replicas that it started: values as bytes.

They are pickled, as nowhere else in genrt: what travels here goes between a process and those that it
has started, over sockets of which nobody else holds an end. Nothing from a file or a network is read.

Rules:
    A context's hash is made anew at the other end: every process hashes bytes in its own way.
    Questions of populations, which stand for their sequences, travel as numbers; each end has a table.
    Sequences whose beginning the other end holds travel as their last tokens: ``RemotePopulations``.
    Rows, and other arrays of any size, travel beside the bytes where these are frames; see ``frames.py``.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from genrt.cluster.frames import Outgoing
from genrt.cluster.memory import Array, Memory
from genrt.questions.draws import DrawToken, PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Contexts, Origins, SequenceHandle

__all__ = [
    "AskedNumbers",
    "Flat",
    "RemotePopulations",
    "dump_message",
    "load_message",
    "outgoing",
    "split_questions",
    "unflattened",
]

MOST_HELD = 2**28
"""How many bytes of sequences the other end of a connection holds at most."""

LEAST_APART = 2**16
"""How many bytes of an array are worth memory of its own; fewer travel in the message."""


class AskedNumbers:
    """The questions of populations by number, at the end where they are asked.

    ``gone`` has the numbers of those that nobody goes on from any more. The collector adds to it, from
    any thread.
    """

    def __init__(self) -> None:
        self.gone: deque[int] = deque()
        self._numbers: dict[weakref.ref[SequenceHandle], int] = {}
        self._last = 0

    def of(self, asked: Any) -> int:
        """Return the number of a question, a new one the first time."""
        known = weakref.ref(asked, self._forget)
        number = self._numbers.get(known)
        if number is None:
            self._last += 1
            number = self._numbers[known] = self._last
        return number

    def _forget(self, asked: weakref.ref[SequenceHandle]) -> None:
        self.gone.append(self._numbers.pop(asked))


class RemotePopulations:
    """The populations' questions whose sequences the other end of a connection holds until it is told to
    forget them: those that go on from others, as what goes on once often does so again."""

    def __init__(self) -> None:
        self._nbytes: WeakKeyDictionary[SequenceHandle, int] = WeakKeyDictionary()

    def sent(self, draw: PopulationDraw) -> tuple[bool, bool]:
        """Return whether the sequences of a question can travel as their last tokens, and whether the
        other end is to hold them from now on."""
        if (origins := draw.origins) is None:
            return False, False
        is_known = all(each in self._nbytes for each in origins.handles)
        more = 0 if draw.handle in self._nbytes else draw.contexts.nbytes
        if is_held := sum(self._nbytes.values()) + more <= MOST_HELD:
            self._nbytes[draw.handle] = draw.contexts.nbytes
        return is_known, is_held


def dump_message(
    value: object,
    numbers: Callable[[SequenceHandle], int] | None = None,
    apart: list[Array] | None = None,
    held: RemotePopulations | None = None,
) -> bytes:
    """Return a value as bytes; ``numbers`` gives those of populations' questions. Large arrays are added
    to ``apart``, where there is one, in place of being copied. What was dumped with the same ``held`` has
    to be loaded in the same order, with one table."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5, buffer_callback=_taking(apart))
    pickler.dispatch_table = copyreg.dispatch_table.copy() | _TABLE
    pickler.dispatch_table[PopulationDraw] = lambda draw: _taken_apart(draw, held)
    if numbers is not None:
        pickler.dispatch_table[SequenceHandle] = lambda asked: (
            _question_reference,
            (numbers(asked), asked.count),
        )
    pickler.dump(value)
    return out.getvalue()


def outgoing(
    value: object,
    memory: Memory,
    numbers: Callable[[SequenceHandle], int] | None = None,
    held: RemotePopulations | None = None,
    rows: Sequence[Tensor] = (),
) -> Outgoing:
    """Return a value as a frame to be sent, with its large arrays beside it, and rows of one length as
    the last of these; else as ``dump_message``."""
    arrays: list[Array] = []
    data = dump_message(value, numbers, arrays, held)
    return Outgoing(data, arrays, memory, rows)


def load_message(
    data: bytes | memoryview,
    asked: dict[int, SequenceHandle] | None = None,
    apart: Sequence[memoryview] = (),
) -> Any:
    """Return the value that ``dump_message`` wrote. ``asked`` has the earlier questions of
    populations, and gets the new ones. Arrays outside the bytes have the memory of ``apart``."""
    return _Loading(io.BytesIO(data), {} if asked is None else asked, apart).load()


def _taking(apart: list[Array] | None) -> Callable[[pickle.PickleBuffer], bool] | None:
    """Return what adds large buffers to a list, and says of the others that they stay."""
    if apart is None:
        return None

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LEAST_APART:
            return True
        apart.append([raw])
        return False

    return take


class _Loading(pickle.Unpickler):
    def __init__(
        self, data: io.BytesIO, asked: dict[int, SequenceHandle], apart: Sequence[memoryview]
    ) -> None:
        super().__init__(data, buffers=apart)
        self._asked = asked

    def find_class(self, module: str, name: str) -> Any:
        if name == _question_reference.__name__ and module == __name__:
            # No method: this would have itself in its memo, and with it what it has loaded.
            return partial(_check_known, self._asked)
        return super().find_class(module, name)


def _check_known(asked: dict[int, SequenceHandle], number: int, count: int) -> SequenceHandle:
    if number not in asked:
        asked[number] = SequenceHandle(count)
    return asked[number]


def _question_reference(number: int, count: int) -> SequenceHandle:
    """Raise NotImplementedError: this names a population's question in bytes, for ``_Loading``."""
    raise NotImplementedError


def _restore_row(packed: bytes, adapter: Any, version: int) -> LogprobsRequest:
    return LogprobsRequest(packed=packed, adapter=adapter, weights_version=version)


def _taken_apart(draw: PopulationDraw, held: RemotePopulations | None) -> tuple[Any, ...]:
    is_known, is_held = (False, False) if held is None else held.sent(draw)
    contexts = draw.contexts.last_tokens.astype(np.uint32) if is_known else draw.contexts
    more = draw.adapter, draw.masks, draw.temperature, draw.seeds, draw.origins
    return _population, (draw.handle, is_held, contexts, *more, draw.weights_version)


def _population(
    asked: SequenceHandle, is_held: bool, given: Contexts | np.ndarray, *more: Any
) -> PopulationDraw:
    if isinstance(given, np.ndarray):
        origins: Origins = more[4]
        before = [cast("Contexts", each.contexts) for each in origins.handles]
        given = Contexts.grown(before, origins.numbers, given)
    if is_held:  # others than these would keep the memory in which they came
        asked.contexts = given = given.kept()
    draw = PopulationDraw(given, *more)
    object.__setattr__(draw, "handle", asked)
    return draw


def _contexts(table: np.ndarray, lengths: np.ndarray) -> Contexts:
    return Contexts(table, np.arange(len(lengths)), lengths)


def _restore_tensor(numbers: np.ndarray) -> Tensor:
    # What was read from bytes cannot be written to, and belongs to nobody else.
    return torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())


def _required_arrays(contexts: Contexts) -> tuple[Any, ...]:
    table, longest = contexts.table, int(contexts.lengths.max(initial=0))
    if table.shape[1] > longest or not np.array_equal(contexts.places, np.arange(len(table))):
        table = table[contexts.places, :longest]
    return _contexts, (table, contexts.lengths)


_TABLE: dict[type, Callable[[Any], Any]] = {
    LogprobsRequest: lambda row: (_restore_row, (row.packed, row.adapter, row.weights_version)),
    ReadRequest: lambda read: (ReadRequest, (read.row, read.wanted)),
    ScoreRequest: lambda score: (
        ScoreRequest,
        tuple(getattr(score, each.name) for each in fields(ScoreRequest) if each.init),
    ),
    Contexts: _required_arrays,
    Tensor: lambda tensor: (_restore_tensor, (tensor.detach().cpu().numpy(),)),
}


class Flat(NamedTuple):
    """Questions as tuples of plain values, in which lengths stand for contexts, and numbers for masks.
    ``data`` has the contexts one after the other, then the different masks, whose lengths these are: that
    takes a fraction of the time."""

    values: list[Any]
    data: Any  # bytes, or as many in an array, which may travel apart
    masks: Sequence[int] = ()


def split_questions(asked: Sequence[tuple[int, Request]]) -> tuple[Flat, Flat, list[Any]]:
    """Return tickets and questions as rows, draws and all others."""
    rows: list[Any] = []
    contexts: list[bytes] = []
    draws: list[Any] = []
    drawn: list[bytes] = []
    masks: dict[bytes | None, int] = {None: -1}
    others: list[Any] = []
    for ticket, request in asked:
        if type(request) is LogprobsRequest:
            contexts.append(request.packed)
            rows.append((ticket, len(request.packed), request.adapter, request.weights_version))
        elif type(request) is ReadRequest and type(request.wanted) is DrawToken:
            row, draw = request.row, request.wanted
            drawn.append(row.packed)
            where = ticket, len(row.packed), row.adapter, row.weights_version
            mask = masks.setdefault(draw.mask, len(masks) - 1)
            draws.append((*where, mask, draw.temperature, draw.seed, draw.nonce))
        else:
            others.append((ticket, request))
    different = [mask for mask in masks if mask is not None]
    whole = _one_after_the_other([*drawn, *different])
    own = Flat(rows, _one_after_the_other(contexts)), Flat(draws, whole, [*map(len, different)])
    return *own, others


def _one_after_the_other(parts: Sequence[bytes]) -> bytes | np.ndarray:
    data = b"".join(parts)
    return np.frombuffer(data, np.uint8) if len(data) >= LEAST_APART else data


def unflattened(rows: Flat, draws: Flat, others: Sequence[Any]) -> list[tuple[int, Request]]:
    """Return the tickets and questions that ``split_questions`` has taken apart."""
    asked: list[tuple[int, Request]] = []
    data, at = memoryview(rows.data), 0
    for ticket, length, *of_row in rows.values:
        asked.append((ticket, _restore_row(bytes(data[at : at + length]), *of_row)))
        at += length
    data, at = memoryview(draws.data), 0
    starts = accumulate(draws.masks, initial=len(data) - sum(draws.masks))
    masks = [bytes(data[at : at + n]) for at, n in zip(starts, draws.masks, strict=False)]
    for ticket, length, adapter, version, mask, *of_draw in draws.values:
        row = _restore_row(bytes(data[at : at + length]), adapter, version)
        at += length
        wanted = DrawToken(None if mask < 0 else masks[mask], *of_draw)
        asked.append((ticket, ReadRequest(row, wanted)))
    return [*asked, *others]
