"""The wire format of a connection, for both ends: flushes, their answers, and a tokenizer as bytes.

Flushes and answers have the length of a JSON header (4 bytes, little-endian), the header, and arrays of
little-endian numbers. A flush has token ids of the distinct contexts and lists of candidates, uint32;
distinct masks, packed as in ``DrawToken``. The answers have, in order: rows, candidates' entries and
scores, float32; draws, 3 float64; top tokens, int64, and their entries, float32; the answers of
``top_with_tail``, int32. A tokenizer is a zip
archive of its files, in formats without code, or a list of tokens.

No code from the other end runs here. The client trusts the numbers of its server.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from genrt import errors
from genrt.engines.folders import Folder
from genrt.errors import EngineFailed, GenrtError, InvalidRequest
from genrt.numbers import check_int
from genrt.questions.arguments import Adapter
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
from genrt.tokens.sampling import Draw, TeacherLogprobs, TopLogprobs
from genrt.tokens.vocabulary import BytesTokenizer

Question: TypeAlias = LogprobsRequest | ReadRequest | ScoreRequest
"""The requests that a connection carries."""

KINDS = frozenset({DrawToken, Candidates, TopTokens, TopWithTail})
"""The kinds of reads that a connection carries."""

T = TypeVar("T")

U4, I4, I8, F4, F8 = (np.dtype(each) for each in ("<u4", "<i4", "<i8", "<f4", "<f8"))


def flush_of(asked: Sequence[Question], model: str) -> bytes:
    """Return questions as bytes, for the model of this fingerprint."""
    contexts: dict[bytes, int] = {}
    masks: dict[bytes, int] = {}
    adapters: dict[str | None, int] = {}
    questions: list[list[Any]] = []
    for each in asked:
        row = each.row if isinstance(each, ReadRequest) else each
        name = row.adapter.name if row.adapter else None
        kind, more = "row", list[Any]()
        wanted = each.wanted if isinstance(each, ReadRequest) else None
        if isinstance(wanted, DrawToken):
            mask = None if wanted.mask is None else masks.setdefault(wanted.mask, len(masks))
            seed = wanted.nonce if wanted.seed is None else wanted.seed
            kind, more = "draw", [wanted.temperature, seed if wanted.temperature else None, mask]
        elif isinstance(wanted, Candidates):
            ids = np.array(wanted.token_ids, np.uint32).tobytes()
            kind, more = "candidates", [contexts.setdefault(ids, len(contexts)), wanted.temperature]
        elif isinstance(wanted, TopTokens):
            kind, more = "top", [wanted.k]
        elif isinstance(wanted, TopWithTail):
            kind, more = "tail", [wanted.k, wanted.temperature]
        elif isinstance(each, ScoreRequest):
            kind, more = "score", [each.start, each.wanted, each.temperature, each.top]
        context = contexts.setdefault(row.packed, len(contexts))
        questions.append([kind, context, adapters.setdefault(name, len(adapters)), *more])
    header = {
        "model": model,
        "contexts": [len(packed) // U4.itemsize for packed in contexts],
        "adapters": [*adapters],
        "masks": len(masks),
        "questions": questions,
    }
    arrays = [np.frombuffer(packed, np.uint32).astype(U4).tobytes() for packed in contexts]
    return _framed(header, [*arrays, *masks])


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
    if int.from_bytes(data[:4], "little") > 256 * (most + 16):  # a question takes less
        raise InvalidRequest(f"a flush has {most} questions at most")
    header, rest = _unframed(data)
    if header.get("model") != model:
        raise AnotherModel
    lengths, names, count, questions = (
        header.get(name) for name in ("contexts", "adapters", "masks", "questions")
    )
    if not (isinstance(lengths, list) and isinstance(names, list) and isinstance(questions, list)):
        raise InvalidRequest("the flush has no contexts, no adapters or no questions")
    if len(questions) > most or len(lengths) > 2 * most:
        raise InvalidRequest(f"a flush has {most} questions at most")
    if not all(name is None or isinstance(name, str) for name in names):
        raise InvalidRequest("an adapter of the flush has no name")
    reader = _Reader(rest)
    contexts = [
        reader.take(U4, check_int("a context's length", length, 0, len(rest))).astype(np.int64)
        for length in lengths
    ]
    words = -(-limits.vocab_size // 32)
    masks = [
        reader.take(U4, words).view("<i4").astype(np.int32)
        for _ in range(check_int("masks", count, 0, len(questions)))
    ]
    reader.end()
    adapters = [_tried(partial(bound, name)) for name in names]
    return [_request_of(limits, each, contexts, adapters, masks) for each in questions]


class AnotherModel(InvalidRequest):
    """The questions are for another model, or for weights that were replaced."""

    def __init__(self) -> None:
        super().__init__(
            "another model, or other weights of it, are served here now: connect again"
        )


def _tried(make: Callable[[], T]) -> T | GenrtError:
    """Return the result of a function, or the GenrtError that it raises."""
    try:
        return make()
    except GenrtError as error:
        return error


def _request_of(
    limits: Limits,
    question: Any,
    contexts: Sequence[np.ndarray],
    adapters: Sequence[Adapter | GenrtError | None],
    masks: Sequence[np.ndarray],
) -> Question | GenrtError:
    fields = {"row": 3, "draw": 6, "candidates": 5, "top": 4, "tail": 5, "score": 7}
    if (
        not isinstance(question, list)
        or not question
        or fields.get(str(question[0])) != len(question)
    ):
        raise InvalidRequest("a question of the flush is malformed")

    def one(of: Sequence[T], place: Any) -> T:
        return of[check_int("a place in a question", place, 0, len(of) - 1)]

    kind, place, number, *more = question
    context, adapter = one(contexts, place), one(adapters, number)
    if isinstance(adapter, GenrtError):
        return adapter
    make: Callable[[], Question] = partial(row_request, limits, context, adapter)
    if kind == "candidates":
        make = partial(
            candidates_request, limits, context, one(contexts, more[0]), adapter, more[1]
        )
    elif kind in ("top", "tail"):
        make = partial(top_request, limits, context, more[0], adapter, *more[1:])
    elif kind == "score":
        make = partial(text_score_request, limits, context, more[0], adapter, *more[1:])
    elif kind == "draw":
        heat, seed, place = more
        if seed is None and heat != 0:
            raise InvalidRequest("a draw over a connection needs a seed")
        mask = None if place is None else one(masks, place)
        make = partial(draw_request, limits, context, adapter, 0, mask, heat, seed)
    return _tried(make)


def answers_of(results: Sequence[Any], versions: dict[str, int]) -> bytes:
    """Return results and errors as bytes, with the versions of the adapters in use."""
    failed: dict[str, list[str]] = {}
    parts: list[bytes] = []
    for place, result in enumerate(results):
        if isinstance(result, GenrtError):
            failed[str(place)] = [type(result).__name__, str(result)]
        elif isinstance(result, Draw):
            parts.append(np.array(result, F8).tobytes())
        elif isinstance(result, TopLogprobs):
            parts.append(result.token_ids.numpy().astype(I8).tobytes())
            parts.append(result.logprobs.numpy().astype(F4).tobytes())
        else:
            kind = I4 if result.dtype == torch.int32 else F4
            parts.append(result.numpy().astype(kind, copy=False).tobytes())
    return _framed({"errors": failed, "adapters": versions}, parts)


def answers_to(
    data: bytes, asked: Sequence[Question], vocab_size: int
) -> tuple[list[Any], dict[str, int]]:
    """Return the results that bytes hold, errors among them, and the versions of the adapters. Raises
    EngineFailed if they are malformed."""
    try:
        header, rest = _unframed(data)
        reader, failed = _Reader(rest), header["errors"]
        results: list[Any] = [
            error_of(*failed[str(place)])
            if str(place) in failed
            else _read_result(request, reader, vocab_size)
            for place, request in enumerate(asked)
        ]
        reader.end()
        versions = {str(name): int(version) for name, version in header["adapters"].items()}
    except (InvalidRequest, KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineFailed(f"the server's answer is malformed: {error}") from error
    return results, versions


def _read_result(request: Question, reader: _Reader, vocab_size: int) -> Any:
    wanted = request.wanted if isinstance(request, ReadRequest) else None
    if isinstance(wanted, DrawToken):
        token_id, logprob, log_mass = reader.take(F8, 3).tolist()
        if token_id not in range(-1, vocab_size):
            raise InvalidRequest("a draw's token is outside the vocabulary")
        return Draw(int(token_id), logprob, log_mass)
    if isinstance(wanted, TopTokens):
        return TopLogprobs(
            _to_tensor(reader.take(I8, wanted.k)), _to_tensor(reader.take(F4, wanted.k))
        )
    if isinstance(wanted, TopWithTail):
        return _to_tensor(reader.take(I4, 2 * wanted.k + 1))
    if isinstance(request, ScoreRequest) and request.wanted == "top":
        width = 2 * request.top + 1
        return _to_tensor(reader.take(I4, len(request) * width)).view(-1, width)
    if isinstance(request, ScoreRequest):
        found = _to_tensor(reader.take(F4, len(request) * (1 + (request.wanted == "greedy"))))
        return found.view(2, -1) if request.wanted == "greedy" else found
    count = vocab_size if wanted is None else len(wanted.token_ids)  # type: ignore[attr-defined]
    return _to_tensor(reader.take(F4, count))


def teacher_bytes(answers: Sequence[TeacherLogprobs]) -> bytes:
    """Return a teacher's answers as bytes: a header with the ``top`` and the numbers of ``rows``, and for
    each answer its ids, int32, its log-probabilities, float32, and its tails, float32."""
    tops = {each.token_ids.shape[1] for each in answers}
    header = {"top": max(tops, default=0), "rows": [len(each.tail) for each in answers]}
    pairs = (
        (part, kind) for each in answers for part, kind in zip(each, (I4, F4, F4), strict=True)
    )
    return _framed(header, [part.numpy().astype(kind).tobytes() for part, kind in pairs])


def _to_tensor(numbers: np.ndarray) -> Tensor:
    """Return a copy of the numbers in the byte order of this machine."""
    return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("=")))


def error_of(kind: str, message: str) -> GenrtError:
    """Return an error from its class name and message."""
    found = getattr(errors, kind, EngineFailed) if kind in errors.__all__ else EngineFailed
    made: GenrtError = found(message)
    return made


class _Reader:
    """Reads arrays from bytes, one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, kind: np.dtype[Any], count: int) -> np.ndarray:
        """Return the next ``count`` numbers. Raises InvalidRequest if there are fewer."""
        size = kind.itemsize * count
        if size > len(self._data) - self._at:
            raise InvalidRequest("its arrays are shorter than its header says")
        found = np.frombuffer(self._data, kind, count, self._at) if count else np.empty(0, kind)
        self._at += size
        return found

    def end(self) -> None:
        """Raise InvalidRequest unless all bytes are read."""
        if self._at != len(self._data):
            raise InvalidRequest("its arrays are longer than its header says")


def _framed(header: dict[str, Any], parts: Sequence[Any]) -> bytes:
    encoded = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    return b"".join([len(encoded).to_bytes(4, "little"), encoded, *parts])


def _unframed(data: bytes) -> tuple[dict[str, Any], memoryview]:
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
                return _token_list(json.loads(archive.read(TOKEN_LIST)))
            with Folder("tokenizer") as directory:
                for each in files:
                    name = PurePosixPath(each.filename)
                    if len(name.parts) != 1 or name.suffix not in SUFFIXES or "\\" in each.filename:
                        raise ValueError(f"{each.filename} is not a file of a tokenizer")
                    (directory / name.name).write_bytes(archive.read(each))
                return _read_tokenizer(str(directory))
    except Exception as error:  # transformers raises errors of any type
        raise EngineFailed(f"the server's tokenizer cannot be read: {error}") from error


def _token_list(value: dict[str, Any]) -> BytesTokenizer:
    tokens = [base64.b64decode(each) for each in value["vocabulary"]]
    return BytesTokenizer(tokens, eos_token_id=value["eos_token_id"])


def _read_tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
