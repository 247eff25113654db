"""The lines of a job, with a description (``FILE.job.json``) of how they were made. A killed process
leaves at most one incomplete line at the end, which the next run cuts off. When each row has a line, a
CSV or Parquet output is written from them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import filelock

from genrt.errors import InvalidRequest, JobRefused, OutputFailed
from genrt.generation.tables import format_of, parse_json, write_table

log = logging.getLogger("genrt.generation")

FORMAT = 3
"""The version of the description. Others are refused."""

PRIVATE = frozenset({"prompt_template", "system_message", "chat_template_kwargs", "validate"})
"""Parts of a description that may quote prompts: only their digest is stored."""

DIGEST = "sha256:"

REMEDY = (
    "give what it was made with, name another output, or start this one over (--overwrite, "
    "overwrite=True)"
)


def describe(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that JSON can represent, the long and private ones as digests."""
    description = {}
    for name, value in parts.items():
        text = json.dumps(value, sort_keys=True)
        description[name] = json.loads(text)
        if value is not None and (len(text) > 80 or name in PRIVATE):
            description[name] = DIGEST + hashlib.sha256(text.encode()).hexdigest()
    return description


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of changed parts, with their values. Parts of only one side are skipped."""
    for name, new in now.items():
        if (old := before.get(name, new)) == new:
            continue
        has_digest = any(isinstance(each, str) and each.startswith(DIGEST) for each in (old, new))
        yield name if has_digest else f"{name} (was {json.dumps(old)}, is {json.dumps(new)})"


class Journal:
    """The output of one job.

    Attributes:
        output: the output, with links resolved.
        path: the file of lines: the output, or ``OUTPUT.jsonl`` if the output is a table.
        digests: the digest of each finished row of the input, by index; 0 for other rows.
        finished: the number of finished rows; ``failed`` of them with an error.
    """

    def __init__(self, output: Path, delimiter: str = ",") -> None:
        self.output = self.path = Path(os.path.realpath(output))
        self._form, self._delimiter = format_of(output), delimiter
        if self._form != "jsonl":
            self.path = Path(os.path.realpath(f"{self.output}.jsonl"))
        self.description = self.path.with_name(f"{self.path.name}.job.json")
        self.digests = array("Q")
        self.finished = self.failed = 0
        lock = self.path.with_name(f".{self.path.name}.lock")
        # One thread opens a journal, and another one may close it.
        self._lock = filelock.FileLock(lock, timeout=0, thread_local=False)
        self._file: IO[bytes] | None = None
        self._size = 0  # of all complete lines
        self._retried: set[int] = set()  # numbers of lines to remove
        self._parts: dict[str, Any] = {}

    def read(
        self,
        description: Mapping[str, Any],
        max_rows: int,
        *,
        retry_errors: bool,
        overwrite: bool,
    ) -> None:
        """Lock the output and read the finished rows, below ``max_rows``. Nothing is changed yet.

        Raises:
            JobRefused: another job writes the output; or its lines were made in another way, or not by
                a job.
            InvalidRequest: the path cannot be an output.
        """
        if not self.path.parent.is_dir():
            raise InvalidRequest(f"there is no directory {self.path.parent}: make it first")
        for path in (self.output, self.path):
            if path.exists() and not path.is_file():
                raise InvalidRequest(f"{path} is no file: name one for the output")
        before = self._parts = {**description}
        with _translate_os_errors(self.path):
            try:
                self._lock.acquire()
            except filelock.Timeout as error:
                raise JobRefused(
                    f"another job writes {self.path}: wait for it, or name another output"
                ) from error
            written = [path for path in (self.output, self.path) if path.exists()]
            if not overwrite and any(path.stat().st_size for path in written):
                before = self._read_description()
                self._read_lines(max_rows, retry_errors=retry_errors)
        if self.finished or self._retried:
            self._parts = {**before, **description}  # parts that this runtime does not know stay
            if changed := list(_changes(before, description)):
                raise JobRefused(
                    f"{self.path} was made with another {', another '.join(changed)}: {REMEDY}"
                )

    def _read_description(self) -> dict[str, Any]:
        for path in (self.path, self.description):
            if not path.exists():
                raise JobRefused(
                    f"{self.output} was not written by a job, for there is no {path.name}: name another "
                    "output, or overwrite it (--overwrite, overwrite=True)"
                )
        try:
            read = parse_json(self.description.read_bytes())
        except ValueError as error:
            raise JobRefused(f"{self.description} is damaged ({error}): {REMEDY}") from error
        parts = read.get("parts") if isinstance(read, dict) else None
        if not isinstance(parts, dict) or read["format"] != FORMAT:
            raise JobRefused(
                f"{self.description} is not of this version of genrt: go on with the one that wrote it, "
                f"or {REMEDY}"
            )
        return parts

    def _read_lines(self, max_rows: int, *, retry_errors: bool) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # of a killed process; start cuts it off
                self._size += len(line)
                index, digest, is_error = self._parse_line(number + 1, line)
                if index >= max_rows:
                    raise JobRefused(
                        f"{self.path} has row {index}, which the input is too short for: {REMEDY}"
                    )
                if is_error and retry_errors:
                    self._retried.add(number)
                    continue
                if index >= len(self.digests):
                    self.digests.frombytes(bytes(8 * (index + 1 - len(self.digests))))
                if self.digests[index]:
                    raise JobRefused(f"{self.path} has row {index} twice: {REMEDY}")
                self.digests[index] = digest
                self.finished += 1
                self.failed += is_error

    def _parse_line(self, number: int, line: bytes) -> tuple[int, int, bool]:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = parse_json(line)
            index, digest = entry["index"], int(entry["digest"], 16)
            if type(index) is int and index >= 0 and 0 < digest < 2**64:
                return index, digest, entry["error_type"] is not None
        raise JobRefused(
            f"line {number} of {self.path} was not written by a job: fix or delete it, or {REMEDY}"
        )

    def has(self, index: int) -> bool:
        """Tell whether a row is finished."""
        return index < len(self.digests) and self.digests[index] != 0

    def start(self) -> None:
        """Open the file for the next line: cut off an incomplete one, remove the rows that run again, and
        write the description. A table whose lines start over is removed."""
        with _translate_os_errors(self.path):
            if self.output != self.path and not self._size:
                self.output.unlink(missing_ok=True)
            if self._retried:
                with _replaced(self.path) as kept, self.path.open("rb") as file:
                    for number, line in enumerate(file):
                        if number not in self._retried and line.endswith(b"\n"):
                            kept.write(line)
                self._size = self.path.stat().st_size
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            os.ftruncate(self._file.fileno(), self._size)
            with _replaced(self.description) as described:
                text = json.dumps({"format": FORMAT, "parts": self._parts}, indent=1)
                described.write(text.encode() + b"\n")

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a line. If it cannot be written (OutputFailed), no part of it is in the file."""
        if self._file is None:
            raise OutputFailed(f"{self.path} is closed")
        line = _as_line(entry)
        with _translate_os_errors(self.path):
            try:
                # Usually one call: a full disk takes a part, and fails with the next call.
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._size)
                raise
        self._size += len(line)

    def sync(self) -> None:
        """Write the file through to the disk. Safe from any thread."""
        with contextlib.suppress(ValueError), _translate_os_errors(self.path):  # closed meanwhile
            if (file := self._file) is not None:
                os.fsync(file.fileno())

    def _write_table(self) -> None:
        """Replace the output by a table of the lines, in the order of the rows."""
        indexes, places = array("Q"), array("Q", [0])
        with _translate_os_errors(self.output), self.path.open("rb") as file:
            for line in file:
                indexes.append(parse_json(line)["index"])
                places.append(places[-1] + len(line))
            order = sorted(range(len(indexes)), key=indexes.__getitem__)

            def lines() -> Iterator[dict[str, Any]]:
                for number in order:
                    file.seek(places[number])
                    yield parse_json(file.readline())

            with _replaced(self.output) as table:
                write_table(table, self._form, self._delimiter, lines)

    def close(self, *, is_complete: bool) -> None:
        """Synchronize the lines, write a table if they are complete, and release the lock. Idempotent."""
        try:
            self.sync()
            if is_complete and self._file is not None and self.output != self.path:
                self._write_table()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            if self._lock.is_locked:
                # Before the release: a lock on an unlinked file is not shared with later owners.
                with contextlib.suppress(OSError):
                    os.unlink(self._lock.lock_file)
                self._lock.release()


def _as_line(entry: Mapping[str, Any]) -> bytes:
    """Return a line of JSON in UTF-8, or in ASCII if there is a lone surrogate."""
    text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
    for separator in "\x85\u2028\u2029":
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(entry, allow_nan=False).encode() + b"\n"


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """Write a file and rename it to ``path`` when it is complete."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _translate_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OutputFailed:
        raise
    except OSError as error:
        raise OutputFailed(
            f"{path} cannot be written: {error.strerror or error}. What is in it stays; run the job "
            "again to go on"
        ) from error


def directory_digest(directory: Path, *, is_adapter: bool = False) -> str:
    """Return a digest of the files of a checkpoint, or of a LoRA adapter, that decide its answers."""
    kinds = (".json", ".safetensors", ".jinja", ".model", ".txt")
    files = sorted(path for path in directory.iterdir() if path.suffix in kinds and path.is_file())
    if is_adapter:
        files = [
            each
            for each in files
            if each.suffix == ".json" or each.name == "adapter_model.safetensors"
        ]
    states = [file.stat() for file in files]
    if (total := sum(each.st_size for each in states)) >= 2**32:
        log.info("hashing %s, %.0f GB, to identify it", directory, total / 1e9)
    with ThreadPoolExecutor() as readers:  # hashing releases the interpreter lock
        identities = [(each.st_size, each.st_mtime_ns, each.st_ino) for each in states]
        digests = readers.map(lambda file, identity: _sha256_of(file, *identity), files, identities)
        found = {file.name: digest for file, digest in zip(files, digests, strict=True)}
    return DIGEST + hashlib.sha256(json.dumps(found).encode()).hexdigest()


@lru_cache(1024)
def _sha256_of(file: Path, size: int, mtime_ns: int, inode: int) -> str:
    """Return the digest of a file. An unchanged file is read once."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
