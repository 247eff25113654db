"""Flushes between processes of one runtime, to replicas and ranks, and the answers of replicas.

Both are bytes of ``wire.py``. Their flushes have populations too. Texts and programs travel beside the
bytes, as Python objects that Ray, or the pipe of a rank, pickles: programs are code of users, and native
texts have parameters of vLLM's own.

Rules:
    Every question has a ticket, by which its answer is known.
    Handles of populations travel as numbers, and each end has a table. Flushes have to be read in the
    order in which they were made.
    Sequences that extend sequences of the other end travel as their last tokens.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import numpy as np
import torch

from genrt.engines.remote.wire import (
    Packing,
    Reader,
    Unpacking,
    framed,
    packed_answers,
    unframed,
    unpacked_answers,
)
from genrt.errors import GenrtError
from genrt.questions.completions import Told
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Contexts, Origins, SequenceHandle
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs

Flush: TypeAlias = tuple[bytes, Sequence[Request]]
"""The bytes of a flush, and the requests beside them."""

ASKED = LogprobsRequest, ReadRequest, ScoreRequest
WIRED = torch.Tensor, Draw, BatchDraw, TopLogprobs, GenrtError
"""The requests, beside populations, and the results that travel as bytes."""

LARGE = 2**17
"""The bytes of numbers that an object store takes as they are."""


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


class FarEnd:
    """One receiver of flushes, and the sequences that it holds: of populations that extended others,
    which will probably happen again."""

    def __init__(self, numbers: HandleNumbers) -> None:
        self.numbers = numbers
        self.held: WeakSet[SequenceHandle] = WeakSet()

    def flush(self, asked: Sequence[Request], **more: Any) -> Flush:
        """Return requests as a flush with more fields."""
        packing, arrays, others = Packing(), list[np.ndarray](), list[Request]()
        for each in asked:
            if isinstance(each, ASKED):
                packing.add(each)
            elif isinstance(each, PopulationDraw):
                packing.questions.append(self._population(each, packing, arrays))
            else:
                packing.questions.append(["other"])
                others.append(each)
        return packing.message(arrays, **more), others

    def _population(
        self, draw: PopulationDraw, packing: Packing, arrays: list[np.ndarray]
    ) -> list[Any]:
        """Return the fields of a population, with the type and the shape of each array that this adds."""
        contexts, origins, is_known = draw.contexts, draw.origins, False
        handles, own = None, [draw.mask_table, draw.seeds, draw.block]
        if origins is not None:
            is_known = all(each in self.held for each in origins.handles)
            is_known &= np.array_equal(contexts.lengths, origins.lengths + 1)
            self.held.add(draw.handle)
            handles = [self.number(each) for each in origins.handles]
            own += [origins.numbers, origins.lengths]
        if is_known:
            own.append(contexts.last_tokens.astype(np.uint32))
        else:
            own += [contexts.lengths, contexts.table[contexts.places, : contexts.lengths.max()]]
        arrays += [each for each in own if each is not None]
        forms = [None if each is None else (each.dtype.str, each.shape) for each in own]
        bound = packing.bound(draw.adapter, draw.weights_version)
        rest = draw.temperature, [*draw.laws], self.number(draw.handle), handles, is_known
        return ["population", bound, *rest, forms]

    def number(self, handle: SequenceHandle) -> tuple[int, int]:
        """Return a handle as it travels."""
        return self.numbers.of(handle), handle.count


class NearEnd:
    """The receiver of flushes; ``handles`` has the populations of the other end by number."""

    def __init__(self) -> None:
        self.handles: dict[int, SequenceHandle] = {}

    def requests(self, flush: Unpacking, others: Sequence[Request]) -> list[Request]:
        """Return the requests of a flush, from its bytes and beside them."""
        found, beside = list[Request](), iter(others)
        for each in flush.questions:
            if each[0] == "other":
                found.append(next(beside))
            elif each[0] == "population":
                found.append(self._population(flush, *each[1:]))
            else:
                found.append(flush.question(each))
        return found

    def forget(self, numbers: Sequence[int]) -> list[SequenceHandle]:
        """Forget these handles; return the known ones."""
        return [self.handles.pop(each) for each in numbers if each in self.handles]

    def handle(self, number: int, count: int) -> SequenceHandle:
        """Return the handle of a number."""
        if number not in self.handles:
            self.handles[number] = SequenceHandle(count)
        return self.handles[number]

    def _population(
        self,
        flush: Unpacking,
        bound: int,
        temperature: float,
        laws: Any,
        own: tuple[int, int],
        handles: Any,
        is_known: bool,
        forms: Any,
    ) -> PopulationDraw:
        arrays: list[Any] = [each and flush.reader.array(*each) for each in forms]
        masks, seeds, block, *rest = arrays
        handle, origins = self.handle(*own), None
        if handles is not None:
            numbers, before, *rest = rest
            origins = Origins(tuple(self.handle(*each) for each in handles), numbers, before)
        if is_known:
            held: Any = [each.contexts for each in origins.handles]  # type: ignore[union-attr]
            contexts = Contexts.grown(held, numbers, *rest)
        else:
            lengths, table = rest
            contexts = Contexts(table, np.arange(len(table)), lengths)
        if origins is not None:
            handle.contexts = contexts
        adapter, weights = flush.bound[bound]
        rules = tuple((float(heat), float(power)) for heat, power in laws)
        more = temperature, seeds, origins, weights, (), rules, block
        draw = PopulationDraw(contexts, adapter, masks, *more)
        object.__setattr__(draw, "handle", handle)
        return draw


class Answers(NamedTuple):
    """The answers of a replica since the last ones.

    Attributes:
        data: their number, from 0, the tickets of ended questions with their results and errors, and
            counters of the engine.
        large: all numbers of rows, if they are many.
        others: results that no bytes stand for.
        told: the tickets of streams, each with a part.
    """

    data: bytes
    large: np.ndarray | None
    others: list[Any]
    told: list[tuple[int, Told]]


def packed_ends(
    number: int,
    ends: Sequence[tuple[int, Any]],
    told: list[tuple[int, Told]],
    counters: Sequence[float],
) -> bytes | Answers:
    """Return the results of tickets: as bytes, which Ray sends fastest, if there is nothing else."""
    tickets, wired, others = list[int](), list[Any](), list[tuple[int, Any]]()
    for end in ends:
        if isinstance(end[1], WIRED):
            tickets.append(end[0])
            wired.append(end[1])
        else:
            others.append(end)
    header, arrays = packed_answers(wired)
    large = arrays.pop() if arrays[-1].nbytes >= LARGE else None
    data = framed(header | {"number": number, "tickets": tickets, "counters": [*counters]}, arrays)
    return data if large is None and not others and not told else Answers(data, large, others, told)


def unpacked_ends(
    message: bytes | Answers, version_of: Callable[[int], int]
) -> tuple[int, list[tuple[int, Any]], list[tuple[int, Told]], list[Any]]:
    """Return the number of a message, the results by ticket, the parts of streams by ticket, and the
    counters. ``version_of`` returns the version of the weights of a ticket."""
    answers = Answers(message, None, [], []) if isinstance(message, bytes) else message
    header, rest = unframed(answers.data)
    tickets = header["tickets"]
    versions = [*map(version_of, tickets)]
    results = unpacked_answers(header, Reader(rest), versions, answers.large)
    ends = [*zip(tickets, results, strict=True), *answers.others]
    return header["number"], ends, answers.told, header["counters"]
