"""Flushes and their answers as JSON and arrays, between a runtime and its replicas, or the ranks of one.

Rows, reads and scores travel in the wire format of ``AsyncLM.connect``, populations as arrays. Texts and
programs travel as objects, which the channel serializes.

Rules:
    Every question has a ticket, by which its answer is known.
    Handles of populations travel as numbers, and each end has a table.
    Sequences that extend sequences of the other end travel as their last tokens: see ``FarSequences``.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from genrt.engines.protocol import EngineStatistics
from genrt.engines.remote.wire import KINDS, error_of, flush_of, flush_to
from genrt.errors import GenrtError
from genrt.questions.completions import Completion, Told
from genrt.questions.contexts import Adapter, Limits
from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.questions.sequences import Contexts, Origins, SequenceHandle
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs

MOST_HELD = 2**28
"""The most bytes of sequences that the other end of a connection holds."""

MOST_QUESTIONS = 2**31


class Packed(NamedTuple):
    """A message: JSON, arrays, and objects that the channel serializes."""

    header: bytes
    arrays: Sequence[np.ndarray] = ()
    objects: Sequence[Any] = ()


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
    """The handles of sequences that the other end of a connection holds. They belong to populations that
    extended others, which will probably happen again."""

    def __init__(self, numbers: HandleNumbers) -> None:
        self.numbers = numbers
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


# -- flushes ----------------------------------------------------------------------------------------


def packed_flush(asked: Sequence[tuple[int, Request]], far: FarSequences) -> Packed:
    """Return tickets and questions as a message. Messages with populations have to be read in the order
    in which they were made."""
    plain: list[tuple[int, Any]] = []
    populations: list[dict[str, Any]] = []
    arrays: list[np.ndarray] = []
    objects: list[tuple[int, Request]] = []
    for ticket, request in asked:
        if isinstance(request, PopulationDraw):
            entry = _packed_population(request, far, arrays)
            populations.append(
                {"ticket": ticket, "adapter": _versioned_name(request.adapter), **entry}
            )
        else:
            (plain if _is_simple(request) else objects).append((ticket, request))
    wire = flush_of([request for _, request in plain], "", name_of=_versioned_name)
    header = {
        "tickets": [ticket for ticket, _ in plain],
        "populations": populations,
        "version": asked[0][1].weights_version if asked else 0,
    }
    arrays.append(np.frombuffer(wire, np.uint8))
    return Packed(json.dumps(header).encode(), arrays, objects)


def unpacked_flush(
    message: Packed, table: dict[int, SequenceHandle], limits: Limits
) -> Iterator[tuple[int, Request | GenrtError]]:
    """Yield the tickets and questions of a message, an error in place of one that is wrong. ``table`` has
    the known handles of populations, and gets the new ones."""
    header = json.loads(message.header)
    version, arrays = header["version"], iter(message.arrays)
    for entry in header["populations"]:
        ticket, adapter = entry["ticket"], _adapter(entry["adapter"])
        yield ticket, _population(entry, adapter, arrays, table).of_weights(version)
    wire = next(arrays).tobytes()
    found = flush_to(wire, limits, _adapter, model="", most=MOST_QUESTIONS)
    for ticket, plain in zip(header["tickets"], found, strict=True):
        yield ticket, plain if isinstance(plain, GenrtError) else plain.of_weights(version)
    yield from message.objects


def place_of(request: Request) -> int:
    """Return the place of a question's kind in a message."""
    return 0 if isinstance(request, PopulationDraw) else 1 if _is_simple(request) else 2


def _is_simple(request: Request) -> bool:
    """Return whether the wire format has this question."""
    if isinstance(request, ReadRequest):
        return type(request.wanted) in KINDS
    is_score = isinstance(request, ScoreRequest) and request.wanted != "rows"
    return is_score or isinstance(request, LogprobsRequest)


def _versioned_name(adapter: Adapter | None) -> str | None:
    """Return an adapter and its version as one name."""
    return None if adapter is None else f"{adapter.version} {adapter.name}"


def _adapter(name: str | None) -> Adapter | None:
    if name is None:
        return None
    version, _, own = name.partition(" ")
    return Adapter(own, int(version))


def _packed_population(
    draw: PopulationDraw, far: FarSequences, arrays: list[np.ndarray]
) -> dict[str, Any]:
    """Return a population as a JSON value; add its arrays."""
    is_known, is_held = far.sent(draw)
    contexts, masks, origins = draw.contexts, draw.masks, draw.origins
    arrays.append(cast("np.ndarray", draw.seeds))
    if masks is not None:
        arrays.append(masks)
    if origins is not None:
        arrays += [origins.numbers, origins.lengths]
    if is_known:
        arrays.append(contexts.last_tokens.astype(np.uint32))
    else:
        lengths = contexts.lengths
        rows = contexts.table[contexts.places, : int(lengths.max())]
        arrays += [lengths, rows]
    handles = () if origins is None else origins.handles
    return {
        "number": far.numbers.of(draw.handle),
        "temperature": draw.temperature,
        "has_masks": masks is not None,
        "is_known": is_known,
        "is_held": is_held,
        "has_origins": origins is not None,
        "handles": [(far.numbers.of(each), each.count) for each in handles],
    }


def _population(
    entry: dict[str, Any],
    adapter: Adapter | None,
    arrays: Iterator[np.ndarray],
    table: dict[int, SequenceHandle],
) -> PopulationDraw:
    def known(number: int, count: int) -> SequenceHandle:
        if number not in table:
            table[number] = SequenceHandle(count)
        return table[number]

    seeds, origins = next(arrays), None
    masks = next(arrays) if entry["has_masks"] else None
    if entry["has_origins"]:
        handles = tuple(known(*each) for each in entry["handles"])
        origins = Origins(handles, next(arrays), next(arrays))
    if origins is not None and entry["is_known"]:
        before = [cast("Contexts", each.contexts) for each in origins.handles]
        contexts = Contexts.grown(before, origins.numbers, next(arrays))
    else:
        lengths, rows = next(arrays), next(arrays)
        contexts = Contexts(rows, np.arange(len(rows)), lengths)
    handle = known(entry["number"], len(contexts))
    if entry["is_held"]:  # a copy: the channel frees its memory as a whole
        handle.contexts = contexts = contexts.kept()
    draw = PopulationDraw(contexts, adapter, masks, entry["temperature"], seeds, origins)
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


def packed_answers(answers: Answers) -> Packed:
    """Return answers as a message. Tensors of one shape, such as rows, are one array."""
    header: dict[str, Any] = {"errors": [], "draws": [], "columns": []}
    tensors: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}  # by shape and device
    draws: list[Draw] = []
    columns: list[Tensor] = []
    objects: list[tuple[bool, int, Any]] = []
    for ticket, result in answers.ends:
        if isinstance(result, GenrtError):
            header["errors"].append((ticket, type(result).__name__, str(result)))
        elif isinstance(result, Tensor):
            tensors.setdefault((*result.shape, result.device), []).append((ticket, result))
        elif isinstance(result, Draw):
            header["draws"].append(ticket)
            draws.append(result)
        elif isinstance(result, BatchDraw | TopLogprobs):
            kind = "populations" if isinstance(result, BatchDraw) else "tops"
            header["columns"].append((kind, ticket))
            columns += result
        else:
            if isinstance(result, Completion):  # the other end has the prompt
                result = replace(result, prompt_token_ids=())
            objects.append((True, ticket, result))
    objects += [(False, *each) for each in answers.told]
    header["tensors"] = [[ticket for ticket, _ in each] for each in tensors.values()]
    header["statistics"] = astuple(answers.statistics)
    arrays = [torch.stack([t for _, t in each]).cpu().numpy() for each in tensors.values()]
    arrays += [np.array(draws, np.float64), *(each.numpy() for each in columns)]
    return Packed(json.dumps(header).encode(), arrays, objects)


def unpacked_answers(message: Packed, asked: Mapping[int, Request]) -> Answers:
    """Return the answers of a message to these questions, by ticket; other answers are ignored."""
    header = json.loads(message.header)
    # Arrays of the channel are read-only, and keep its memory.
    arrays = iter([torch.from_numpy(np.array(each)) for each in message.arrays])
    ends: list[tuple[int, Any]] = [(t, error_of(*each)) for t, *each in header["errors"]]
    for tickets in header["tensors"]:
        ends += zip(tickets, next(arrays), strict=True)
    for ticket, (token, *weights) in zip(header["draws"], next(arrays).tolist(), strict=True):
        ends.append((ticket, Draw(int(token), *weights)))
    for kind, ticket in header["columns"]:
        found: Any = BatchDraw if kind == "populations" else TopLogprobs
        ends.append((ticket, found(*(next(arrays) for _ in found._fields))))
    told: list[tuple[int, Told]] = []
    for is_end, ticket, value in message.objects:
        (ends if is_end else told).append((ticket, value))
    return Answers(
        [(t, _of(each, asked[t])) for t, each in ends if t in asked],
        [(t, each) for t, each in told if t in asked],
        EngineStatistics(*header["statistics"]),
    )


def _of(result: Any, request: Request) -> Any:
    """Return a result with the version of a question's weights, and with its prompt."""
    if isinstance(result, Completion):
        prompt, version = request.token_ids, request.weights_version
        return replace(result, prompt_token_ids=prompt, weights_version=version)
    if isinstance(result, Draw | BatchDraw):
        result.weights_version = request.weights_version
    return result
