"""Flushes and their answers as values to pickle, between a runtime and its replicas, or the ranks of one.

Rules:
    Every question has a ticket, by which its answer is known.
    Handles of populations travel as numbers, and each end has a table.
    Sequences that extend sequences of the other end travel as their last tokens: see ``FarSequences``.
"""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from genrt.engines.protocol import EngineStatistics
from genrt.questions.completions import Completion, Delta, Told, weights_spans
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.sequences import Contexts, Origins, SequenceHandle
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs

Pickled: TypeAlias = "bytes | tuple[bytes, list[np.ndarray]]"
"""Bytes, and the large buffers beside them."""

LARGE = 2**16
"""The bytes of a buffer that an object store takes as it is."""


def pickled(value: object) -> Pickled:
    """Return a value as bytes, for which Ray has a short way, with its large buffers apart."""
    large: list[np.ndarray] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if is_large := buffer.raw().nbytes >= LARGE:
            large.append(np.frombuffer(buffer, np.uint8))
        return not is_large

    data = pickle.dumps(value, protocol=5, buffer_callback=stays)
    return (data, large) if large else data


def unpickled(data: Pickled) -> Any:
    """Return the value."""
    data, large = (data, []) if isinstance(data, bytes) else data
    return pickle.loads(data, buffers=large)  # noqa: S301  # between a process and its replicas


# -- handles of populations -------------------------------------------------------------------------


class HandleNumbers:
    """The numbers of populations' handles, at the end that asks.

    ``gone`` has the numbers of collected handles. The collector adds to it, from any thread.
    """

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

    def sent(self, draw: PopulationDraw) -> bool:
        """Return whether the sequences of a question can travel as their last tokens."""
        if (origins := draw.origins) is None:
            return False
        is_known = all(each in self.held for each in origins.handles)
        self.held.add(draw.handle)
        return is_known and np.array_equal(draw.contexts.lengths, origins.lengths + 1)


# -- flushes ----------------------------------------------------------------------------------------


class _SentPopulation(NamedTuple):
    """A population on its way.

    Attributes:
        number: of its handle.
        extended: the numbers of the handles that it extends, with their counts, and the numbers and the
            lengths of its origins, if it has origins.
        sequences: its last tokens, or a table and its lengths.
        rest: the adapter, masks, temperature, seeds, version, laws and block.
    """

    number: int
    extended: tuple[list[tuple[int, int]], np.ndarray, np.ndarray] | None
    sequences: np.ndarray | tuple[np.ndarray, np.ndarray]
    rest: tuple[Any, ...]


PackedFlush: TypeAlias = Sequence[tuple[int, "Request | _SentPopulation"]]


class Message(NamedTuple):
    """What a replica gets: questions, tickets of questions that are withdrawn, and the numbers of
    collected populations."""

    asked: PackedFlush = ()
    withdrawn: Sequence[int] = ()
    forgotten: Sequence[int] = ()


def packed_flush(asked: Sequence[tuple[int, Request]], far: FarSequences) -> PackedFlush:
    """Return tickets and questions as they travel. Messages with populations have to be read in the order
    in which they were made."""
    return [
        (ticket, _sent(each, far) if isinstance(each, PopulationDraw) else each)
        for ticket, each in asked
    ]


def unpacked_flush(
    message: PackedFlush, table: dict[int, SequenceHandle]
) -> Iterator[tuple[int, Request]]:
    """Yield the tickets and questions of a message. ``table`` has the known handles of populations, and
    gets the new ones."""
    for ticket, each in message:
        yield ticket, _came(each, table) if isinstance(each, _SentPopulation) else each


def _sent(draw: PopulationDraw, far: FarSequences) -> _SentPopulation:
    contexts, origins, extended = draw.contexts, draw.origins, None
    if origins is not None:
        numbers = [(far.numbers.of(each), each.count) for each in origins.handles]
        extended = numbers, origins.numbers, origins.lengths
    sequences: Any = contexts.last_tokens.astype(np.uint32)
    if not far.sent(draw):
        lengths = contexts.lengths
        sequences = contexts.table[contexts.places, : int(lengths.max())], lengths
    own = draw.adapter, draw.mask_table, draw.temperature, draw.seeds
    rest = *own, draw.weights_version, draw.laws, draw.block
    return _SentPopulation(far.numbers.of(draw.handle), extended, sequences, rest)


def _came(sent: _SentPopulation, table: dict[int, SequenceHandle]) -> PopulationDraw:
    def known(number: int, count: int) -> SequenceHandle:
        if number not in table:
            table[number] = SequenceHandle(count)
        return table[number]

    origins = None
    if sent.extended is not None:
        numbers, *places = sent.extended
        origins = Origins(tuple(known(*each) for each in numbers), *places)
    if isinstance(sent.sequences, tuple):
        rows, lengths = sent.sequences
        contexts = Contexts(rows, np.arange(len(rows)), lengths)
    else:
        before = [cast("Contexts", each.contexts) for each in cast("Origins", origins).handles]
        contexts = Contexts.grown(before, cast("Origins", origins).numbers, sent.sequences)
    handle = known(sent.number, len(contexts))
    if origins is not None:  # a copy: the channel frees its memory as a whole
        handle.contexts = contexts = contexts.kept()
    adapter, masks, temperature, seeds, version, laws, block = sent.rest
    own = contexts, adapter, masks, temperature, seeds
    draw = PopulationDraw(*own, origins, version, laws=laws, block=block)
    object.__setattr__(draw, "handle", handle)
    return draw


# -- answers ----------------------------------------------------------------------------------------


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


def packed_answers(answers: Answers) -> Answers:
    """Return answers as they travel, with arrays for tensors."""
    return answers._replace(ends=[(ticket, _result(each)) for ticket, each in answers.ends])


def _result(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.cpu().numpy()
    if isinstance(result, Completion):  # the other end has the prompt
        return replace(result, prompt_token_ids=())
    if isinstance(result, BatchDraw | TopLogprobs):
        return type(result)(*(cast("Tensor", each.numpy()) for each in result))
    return result


def unpacked_answers(message: Answers, asked: Mapping[int, Request]) -> Answers:
    """Return the answers of a message to these questions, by ticket; other answers are ignored."""
    return Answers(
        [(t, _of(each, asked[t])) for t, each in message.ends if t in asked],
        [(t, _of(each, asked[t])) for t, each in message.told if t in asked],
        message.statistics,
    )


def _of(result: Any, request: Request) -> Any:
    """Return a result with the version of a question's weights, and with its prompt."""
    if isinstance(result, Completion):
        prompt, version = request.token_ids, request.weights_version
        spans = weights_spans([(version, 0)], 0, len(result.token_ids))
        own: Any = {"weights_version": version, "weights_spans": spans}
        return replace(result, prompt_token_ids=prompt, **own)
    if isinstance(result, Delta):
        spans = weights_spans(
            [(request.weights_version, 0)], result.start, result.start + len(result.token_ids)
        )
        return replace(result, weights_spans=spans)
    if isinstance(result, np.ndarray):
        return _owned(result)
    if isinstance(result, BatchDraw | TopLogprobs):
        result = type(result)(*map(_owned, result))
    if isinstance(result, Draw | BatchDraw):
        result.weights_version = request.weights_version
    return result


def _owned(numbers: Any) -> Tensor:
    """Return a copy: arrays of a channel are read-only, and keep its memory."""
    return torch.from_numpy(np.array(numbers))
