"""Flushes, their answers and a tokenizer as bytes: for a server's clients, replicas, and ranks.

A message has the length of a JSON header (4 bytes, little-endian), the header, and arrays of
little-endian numbers. A flush has the token ids of its distinct contexts and lists of candidates as one
array, uint32, and distinct masks, packed as in ``DrawToken``. Answers have one array for each type of
numbers: float64 of draws, int64, int32, and float32 of rows. A tokenizer is a zip archive of its files,
in formats without code, or a list of tokens.

No code from the other end runs here. The client trusts the numbers of its server.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from genrt import errors
from genrt.engines.folders import Folder
from genrt.errors import EngineFailed, GenrtError, InvalidRequest, UnknownAdapter
from genrt.questions.arguments import TOKEN_BYTES, Adapter
from genrt.questions.draws import DrawToken, draw_request
from genrt.questions.reads import (
    Candidates,
    ReadRequest,
    TopTokens,
    TopWithTail,
    candidates_request,
    top_request,
)
from genrt.questions.rows import Limits, LogprobsRequest, row_request
from genrt.questions.scores import ScoreRequest, text_score_request
from genrt.tokens.sampling import BatchDraw, Draw, TeacherLogprobs, TopLogprobs
from genrt.tokens.vocabulary import BytesTokenizer

Question: TypeAlias = LogprobsRequest | ReadRequest | ScoreRequest
"""The requests that a connection carries."""

KINDS = frozenset({DrawToken, Candidates, TopTokens, TopWithTail})
"""The kinds of reads that a connection carries."""

U4, I4, I8, F4, F8 = (np.dtype(each) for each in ("<u4", "<i4", "<i8", "<f4", "<f8"))

COLUMNS = {"float64": F8, "int64": I8, "int32": I4, "float32": F4}
"""The types of numbers in answers, in order."""

NAMES = {getattr(torch, name): name for name in COLUMNS}

TUPLES = {"TopLogprobs": 2, "BatchDraw": 3}
"""The answers of several tensors: token ids, int64, before others, float32."""


class Packing:
    """A flush that is packed, request by request: the fields of its header, and its arrays."""

    def __init__(self) -> None:
        self._contexts: dict[bytes, int] = {}
        self._masks: dict[bytes, int] = {}
        self._bound: dict[tuple[Adapter | None, int], int] = {}
        self.questions: list[list[Any]] = []

    def add(self, request: Question) -> None:
        """Add a question, behind the others."""
        wanted = request.wanted if isinstance(request, ReadRequest) else None
        row: Any = request if wanted is None else request.row  # type: ignore[union-attr]
        kind, more = "row", list[Any]()
        if isinstance(wanted, DrawToken):
            mask = wanted.mask
            place = None if mask is None else self._masks.setdefault(mask, len(self._masks))
            seed = wanted.nonce if wanted.seed is None else wanted.seed
            kind, more = "draw", [wanted.temperature, seed if wanted.temperature else None, place]
        elif isinstance(wanted, Candidates):
            ids = np.array(wanted.token_ids, np.uint32).tobytes()
            kind, more = "candidates", [self._place(ids), wanted.temperature]
        elif isinstance(wanted, TopTokens):
            kind, more = "top", [wanted.k]
        elif isinstance(wanted, TopWithTail):
            kind, more = "tail", [wanted.k, wanted.temperature]
        elif isinstance(request, ScoreRequest):
            kind, more = "score", [request.start, request.wanted, request.temperature, request.top]
        bound = self.bound(row.adapter, row.weights_version)
        self.questions.append([kind, bound, self._place(row.packed), *more])

    def bound(self, adapter: Adapter | None, weights_version: int) -> int:
        """Return the number of an adapter with a version of the weights."""
        return self._bound.setdefault((adapter, weights_version), len(self._bound))

    def _place(self, packed: bytes) -> int:
        return self._contexts.setdefault(packed, len(self._contexts))

    def message(self, arrays: Sequence[np.ndarray] = (), **more: Any) -> bytes:
        """Return the flush as bytes, with more fields and arrays."""
        bound = [(a and a.name, a and a.version, weights) for a, weights in self._bound]
        header = {
            "contexts": [len(packed) // TOKEN_BYTES for packed in self._contexts],
            "bound": bound,
            "masks": [len(mask) for mask in self._masks],
            "questions": self.questions,
        }
        whole = np.frombuffer(b"".join(self._contexts), np.uint32).astype(U4, copy=False)
        return framed(header | more, [whole, *self._masks, *arrays])


def flush_of(asked: Sequence[Question], model: str) -> bytes:
    """Return questions as bytes, for the model of this fingerprint."""
    packing = Packing()
    for each in asked:
        packing.add(each)
    return packing.message(model=model)


class Unpacking:
    """A flush that is unpacked; its arrays are not checked.

    Args:
        most: the most questions.

    Attributes:
        header: its fields.
        reader: reads the arrays behind the questions' own.

    Raises:
        InvalidRequest: the bytes are malformed, or have too many questions.
    """

    def __init__(self, data: bytes, most: int | None = None) -> None:
        # A question takes fewer bytes of the header.
        if most is not None and int.from_bytes(data[:4], "little") > 256 * (most + 16):
            raise InvalidRequest(f"a flush has {most} questions at most")
        self.header, rest = unframed(data)
        self.reader = Reader(rest)
        try:
            lengths, self.questions = self.header["contexts"], self.header["questions"]
            if most is not None and (len(self.questions) > most or len(lengths) > 2 * most):
                raise InvalidRequest(f"a flush has {most} questions at most")
            ends = [0, *accumulate(TOKEN_BYTES * length for length in lengths)]
            if ends != sorted(ends):
                raise ValueError("a length is negative")
            whole = self.reader.take(U4, ends[-1] // TOKEN_BYTES).astype(np.uint32).tobytes()
            self._contexts = [whole[start:end] for start, end in pairwise(ends)]
            self._masks = [
                self.reader.take(U4, size // 4).tobytes() for size in self.header["masks"]
            ]
            self.bound: list[tuple[Adapter | None, int]] = [
                (None if name is None else Adapter(name, version), weights)
                for name, version, weights in self.header["bound"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the flush is malformed: {error}") from error

    def question(self, fields: Any) -> Question:
        """Return a question of these fields. Raises InvalidRequest if they are malformed."""
        try:
            kind, number, place, *more = fields
            context, (adapter, weights) = self._contexts[place], self.bound[number]
            if kind == "score":
                start, wanted, heat, top = more
                return ScoreRequest(context, start, adapter, weights, wanted, heat, top)
            row = LogprobsRequest(packed=context, adapter=adapter, weights_version=weights)
            if kind == "row" and not more:
                return row
            if kind == "draw":
                heat, seed, place = more
                mask = None if place is None else self._masks[place]
                return ReadRequest(row, DrawToken(mask, heat, seed))
            if kind == "candidates":
                place, heat = more
                ids = np.frombuffer(self._contexts[place], np.uint32)
                return ReadRequest(row, Candidates(tuple(ids.tolist()), heat))
            return ReadRequest(row, {"top": TopTokens, "tail": TopWithTail}[kind](*more))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"a question of the flush is malformed: {error}") from error


def flush_to(
    data: bytes,
    limits: Limits,
    bound: Callable[[str | None], Adapter | None],
    *,
    model: str,
    most: int,
) -> list[Question | GenrtError]:
    """Return the questions of a flush, with an error in the place of each invalid one.

    Args:
        bound: returns the adapter of a name, or raises.
        model: the fingerprint of the model that answers.
        most: the most questions of a flush.

    Raises:
        InvalidRequest: the bytes are malformed. AnotherModel: they are for another model.
    """
    flush = Unpacking(data, most)
    flush.reader.end()
    if flush.header.get("model") != model:
        raise AnotherModel
    questions = [flush.question(each) for each in flush.questions]
    found: list[Question | GenrtError] = []
    for each in questions:
        try:
            found.append(_checked(limits, each, bound))
        except GenrtError as error:
            found.append(error)
    return found


class AnotherModel(InvalidRequest):
    """The questions are for another model, or for weights that were replaced."""

    def __init__(self) -> None:
        super().__init__(
            "another model, or other weights of it, are served here now: connect again"
        )


def _checked(
    limits: Limits, each: Question, bound: Callable[[str | None], Adapter | None]
) -> Question:
    """Return a question of a client with the adapter of this end. Raises GenrtError if it is invalid."""
    asked = each.adapter
    if asked is not None and not isinstance(asked.name, str):
        raise InvalidRequest("an adapter of the flush has no name")
    adapter = bound(None if asked is None else asked.name)
    if adapter != asked:
        raise UnknownAdapter(f"adapter {asked} was replaced on the server: connect again")
    ids = np.frombuffer(
        each.row.packed if isinstance(each, ReadRequest) else each.packed, np.uint32
    )
    ids = ids.astype(np.int64)
    if isinstance(each, ScoreRequest):
        own = each.wanted, each.temperature, each.top
        return text_score_request(limits, ids, each.start, adapter, *own)
    wanted = each.wanted if isinstance(each, ReadRequest) else None
    if isinstance(wanted, DrawToken):
        if wanted.seed is None and wanted.temperature != 0:
            raise InvalidRequest("a draw over a connection needs a seed")
        mask = None if wanted.mask is None else np.frombuffer(wanted.mask, I4).astype(np.int32)
        return draw_request(limits, ids, adapter, 0, mask, wanted.temperature, wanted.seed)
    if isinstance(wanted, Candidates):
        return candidates_request(limits, ids, wanted.token_ids, adapter, wanted.temperature)
    if isinstance(wanted, TopTokens | TopWithTail):
        heat = wanted.temperature if isinstance(wanted, TopWithTail) else None
        return top_request(limits, ids, wanted.k, adapter, heat)
    return row_request(limits, ids, adapter)


def answers_of(results: Sequence[Any]) -> bytes:
    """Return results and errors as bytes."""
    header, arrays = packed_answers(results)
    return framed(header, arrays)


def packed_answers(results: Sequence[Any]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the header of results and errors, and their numbers by type: all rows are in the last
    array."""
    kinds, draws = list[Any](), list[Draw]()
    columns: dict[torch.dtype, list[Tensor]] = {getattr(torch, name): [] for name in COLUMNS}
    for result in results:
        if isinstance(result, Draw):
            kinds.append("draw")
            draws.append(result)
        elif isinstance(result, Tensor):
            kinds.append([NAMES[result.dtype], *result.shape])
            columns[result.dtype].append(result if result.ndim == 1 else result.reshape(-1))
        elif isinstance(result, GenrtError):
            kinds.append(["error", type(result).__name__, str(result)])
        else:
            kinds.append([type(result).__name__, len(result[0])])
            for part in result:
                columns[part.dtype].append(part)
    columns[torch.float64].append(torch.tensor(draws, dtype=torch.float64).reshape(-1))
    arrays = [
        (torch.cat(parts).cpu().numpy() if parts else np.empty(0)).astype(kind, copy=False)
        for kind, parts in zip(COLUMNS.values(), columns.values(), strict=True)
    ]
    return {"results": kinds, "sizes": [each.size for each in arrays]}, arrays


def unpacked_answers(
    header: dict[str, Any],
    reader: Reader,
    versions: Sequence[int],
    large: np.ndarray | None = None,
) -> Iterator[Any]:
    """Yield results, errors among them, each in memory of its own. Draws get these versions of the
    weights. ``large`` is the last array, if it is not among the bytes."""
    sizes = header["sizes"]
    arrays = [*map(reader.take, COLUMNS.values(), sizes[:-1])]
    arrays.append(reader.take(F4, sizes[-1]) if large is None else large)
    columns, at = dict(zip(COLUMNS, arrays, strict=True)), dict.fromkeys(COLUMNS, 0)

    def taken(name: str, count: int) -> np.ndarray:
        start = at[name]
        at[name] = start + count
        return columns[name][start : start + count].astype(name)

    for kind, version in zip(header["results"], versions, strict=True):
        if kind == "draw":
            number, *others = taken("float64", 3).tolist()
            token_id = int(number) if number >= -1 else -2  # also NaN
            yield Draw.of((token_id, *others), version)
        elif (name := kind[0]) == "error":
            yield error_of(*kind[1:])
        elif name in columns:
            yield torch.from_numpy(taken(name, prod(kind[1:])).reshape(kind[1:]))
        else:
            types = ("int64", "float32", "float32")[: TUPLES[name]]
            tensors = [torch.from_numpy(taken(each, kind[1])) for each in types]
            yield BatchDraw.of(tensors, version) if len(types) == 3 else TopLogprobs(*tensors)
    if any(at[name] != array.size for name, array in columns.items()):
        raise InvalidRequest("its arrays are longer than its results")


def answers_to(data: bytes, asked: Sequence[Question], vocab_size: int) -> list[Any]:
    """Return the results that bytes hold, errors among them. Raises EngineFailed if they are
    malformed."""
    try:
        header, rest = unframed(data)
        reader = Reader(rest)
        results = [*unpacked_answers(header, reader, [each.weights_version for each in asked])]
        reader.end()
        for question, result in zip(asked, results, strict=True):
            if isinstance(result, Draw) and result.token_id not in range(-1, vocab_size):
                raise ValueError("a draw's token is outside the vocabulary")
            if not isinstance(result, GenrtError) and not _fits(question, result, vocab_size):
                raise ValueError("an answer has another form than its question asks for")
    except (
        *(InvalidRequest, KeyError, TypeError, ValueError, AttributeError),
        *(IndexError, RuntimeError, StopIteration),
    ) as error:
        raise EngineFailed(f"the server's answer is malformed: {error}") from error
    return results


def _fits(question: Question, result: Any, vocab_size: int) -> bool:
    """Return whether a result has the type and the shape of an answer to this question."""
    wanted = question.wanted if isinstance(question, ReadRequest) else None
    if isinstance(wanted, DrawToken):
        return isinstance(result, Draw)
    if isinstance(wanted, TopTokens):
        return isinstance(result, TopLogprobs) and len(result.token_ids) == wanted.k
    kind, shape = torch.float32, [vocab_size]
    if isinstance(wanted, TopWithTail):
        kind, shape = torch.int32, [2 * wanted.k + 1]
    elif isinstance(wanted, Candidates):
        shape = [len(wanted.token_ids)]
    elif isinstance(question, ScoreRequest):
        shape = [2, len(question)] if question.wanted == "greedy" else [len(question)]
        if question.wanted == "top":
            kind, shape = torch.int32, [len(question), 2 * question.top + 1]
    return isinstance(result, Tensor) and result.dtype == kind and [*result.shape] == shape


def teacher_bytes(answers: Sequence[TeacherLogprobs]) -> bytes:
    """Return a teacher's answers as bytes: a header with the ``top`` and the numbers of ``rows``, and for
    each answer its ids, int32, its log-probabilities, float32, and its tails, float32."""
    tops = {each.token_ids.shape[1] for each in answers}
    header = {"top": max(tops, default=0), "rows": [len(each.tail) for each in answers]}
    pairs = (
        (part, kind) for each in answers for part, kind in zip(each, (I4, F4, F4), strict=True)
    )
    return framed(header, [part.numpy().astype(kind) for part, kind in pairs])


def error_of(kind: str, message: str) -> GenrtError:
    """Return an error from its class name and message."""
    found = getattr(errors, kind, EngineFailed) if kind in errors.__all__ else EngineFailed
    made: GenrtError = found(message)
    return made


class Reader:
    """Reads arrays from bytes, one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, kind: np.dtype[Any], count: int) -> np.ndarray:
        """Return the next ``count`` numbers. Raises InvalidRequest if there are fewer."""
        size = kind.itemsize * count
        if not 0 <= size <= len(self._data) - self._at:
            raise InvalidRequest("its arrays are shorter than its header says")
        found = np.frombuffer(self._data, kind, count, self._at) if count else np.empty(0, kind)
        self._at += size
        return found

    def array(self, kind: str, shape: Sequence[int]) -> np.ndarray:
        """Return a copy of the next array."""
        return self.take(np.dtype(kind), prod(shape)).reshape(shape).copy()

    def end(self) -> None:
        """Raise InvalidRequest unless all bytes are read."""
        if self._at != len(self._data):
            raise InvalidRequest("its arrays are longer than its header says")


def framed(header: dict[str, Any], arrays: Sequence[np.ndarray | bytes]) -> bytes:
    """Return a header and arrays as bytes."""
    encoded = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    parts = (each if isinstance(each, bytes) else each.tobytes() for each in arrays)
    return b"".join([len(encoded).to_bytes(4, "little"), encoded, *parts])


def unframed(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the bytes after it. Raises InvalidRequest if the header is malformed."""
    view = memoryview(data)
    size = int.from_bytes(view[:4], "little")
    if len(view) < 4 or size > len(view) - 4:
        raise InvalidRequest("it is cut off in its header")
    try:
        header = json.loads(bytes(view[4 : 4 + size]))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise InvalidRequest("its header is not a JSON object")
    return header, view[4 + size :]


# -- tokenizers -------------------------------------------------------------------------------------

SUFFIXES = frozenset({".json", ".txt", ".jinja", ".model"})
"""The suffixes of a tokenizer's files."""

MOST_BYTES = 2**28
"""The largest size of a tokenizer's files together."""

MOST_FILES = 64

TOKEN_LIST = "bytes_tokenizer.json"


def packed_tokenizer(tokenizer: Any) -> bytes:
    """Return a tokenizer as a zip archive; an empty archive for ``None``."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        if isinstance(tokenizer, BytesTokenizer):
            tokens = [base64.b64encode(each).decode() for each in tokenizer.byte_vocab]
            value = {"vocabulary": tokens, "eos_token_id": tokenizer.eos_token_id}
            archive.writestr(TOKEN_LIST, json.dumps(value))
        elif tokenizer is not None:
            with Folder("tokenizer") as directory:
                tokenizer.save_pretrained(directory)
                for path in sorted(directory.iterdir()):
                    if path.suffix in SUFFIXES and path.is_file():
                        archive.write(path, path.name)
    return packed.getvalue()


def unpacked_tokenizer(data: bytes) -> Any:
    """Return the tokenizer of an archive, and ``None`` for an empty archive.

    Raises:
        EngineFailed: the archive is malformed, or transformers cannot read its files.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
            if not files:
                return None
            if sum(each.file_size for each in files) > MOST_BYTES or len(files) > MOST_FILES:
                raise ValueError(f"it has over {MOST_FILES} files, or {MOST_BYTES} bytes")
            if [each.filename for each in files] == [TOKEN_LIST]:
                value = json.loads(archive.read(TOKEN_LIST))
                tokens = [base64.b64decode(each) for each in value["vocabulary"]]
                return BytesTokenizer(tokens, eos_token_id=value["eos_token_id"])
            with Folder("tokenizer") as directory:
                for each in files:
                    name = PurePosixPath(each.filename)
                    if len(name.parts) != 1 or name.suffix not in SUFFIXES or "\\" in each.filename:
                        raise ValueError(f"{each.filename} is not a file of a tokenizer")
                    (directory / name.name).write_bytes(archive.read(each))
                from transformers import AutoTokenizer

                where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
                return AutoTokenizer.from_pretrained(str(directory), **where)
    except Exception as error:  # transformers raises errors of any type
        raise EngineFailed(f"the server's tokenizer cannot be read: {error}") from error
