"""A job's output: a line for each finished row, whole or not at all, and beside it what made it.

The rules:

- A line is written by one process, the owner of the lock, and with one call. It is complete once its line
  feed is in the file.
- A process that is killed leaves at most one line without a line feed, the last. Opening cuts it off.
- Everything else is written beside its place, synchronized, and renamed: the description of the job
  (``OUTPUT.job.json``), and the output when failed rows are taken out of it.
- The description is there before the first line. Nothing is changed before all is compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import filelock

from genrt.errors import InvalidRequest, JobRefused, OutputFailed
from genrt.generation.fingerprints import Fingerprint, changes
from genrt.generation.tables import parse_json

__all__ = ["Journal"]

FORMAT = 2
"""Of the description; another one is refused."""

REMEDY = (
    "give what it was made with, name another output, or start this one over (--overwrite, "
    "overwrite=True)"
)


class Journal:
    """The output file of one job, open for appending.

    Attributes:
        path: the file itself, where links lead to.
        digests: by index of the input's rows, the digest of a row that is finished, else 0.
        finished: how many are; ``failed`` of them with an error.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.description = self.path.with_name(f"{self.path.name}.job.json")
        self.digests = array("Q")
        self.finished = self.failed = 0
        lock = self.path.with_name(f".{self.path.name}.lock")
        # Of no thread: one opens a journal, and another may close it.
        self._lock = filelock.FileLock(lock, timeout=0, thread_local=False)
        self._file: IO[bytes] | None = None
        # The length of all whole lines; the numbers of those to be taken out; what lines are made from.
        self._size = 0
        self._taken_out: set[int] = set()
        self._before: Fingerprint = {}
        self._now: Fingerprint = {}

    def lock(self) -> None:
        """Lock the output against other jobs.

        Raises:
            JobRefused: another job is.
            InvalidRequest: the path can be no output.
        """
        if not self.path.parent.is_dir():
            raise InvalidRequest(f"there is no directory {self.path.parent}: make it first")
        if self.path.exists() and not self.path.is_file():
            raise InvalidRequest(f"{self.path} is no file: name one for the output")
        with _translated(self.path):
            try:
                self._lock.acquire()
            except filelock.Timeout as error:
                raise JobRefused(
                    f"another job writes {self.path}: wait for it, or name another output"
                ) from error

    def recover(
        self, now: Fingerprint, most_rows: int, retried: Callable[[str], bool], *, overwrite: bool
    ) -> None:
        """Read what is finished, and change nothing yet.

        Args:
            now: what the job's lines are to be made from.
            most_rows: a bound for the indexes of rows.
            retried: tells by the type of a row's error whether it is to be tried again.
            overwrite: whether to start over.

        Raises:
            JobRefused: lines of the output are made from something else, or not by a job.
        """
        self._now = now
        with _translated(self.path):
            if overwrite or not self.path.exists() or not self.path.stat().st_size:
                return
            self._before = self._described()
            self._read(most_rows, retried)
        if not self.finished and not self._taken_out:
            return
        # What a later version of genrt, or a runtime that tells less, does not know stays.
        self._now = {**self._before, **now}
        if changed := list(changes(self._before, now)):
            raise JobRefused(
                f"{self.path} was made with another {', another '.join(changed)}: {REMEDY}"
            )

    def begin(self) -> None:
        """Open the file where its next line goes: cut off a partial one, take out the rows that are to be
        retried, and say what lines are made from."""
        with _translated(self.path):
            if self._taken_out:
                self._take_out(self._taken_out)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            os.ftruncate(self._file.fileno(), self._size)
            if self._now != self._before:
                with whole_file(self.description) as file:
                    text = json.dumps({"format": FORMAT, "parts": self._now}, indent=1)
                    file.write(text.encode() + b"\n")
            sync_directory(self.path.parent)

    def _described(self) -> Fingerprint:
        """Return what the lines were made from."""
        try:
            read = parse_json(self.description.read_bytes())
        except FileNotFoundError as error:
            raise JobRefused(
                f"{self.path} was not written by a job, for there is no {self.description.name}: name "
                "another output, or overwrite it (--overwrite, overwrite=True)"
            ) from error
        except ValueError as error:
            raise JobRefused(f"{self.description} is damaged ({error}): {REMEDY}") from error
        if not isinstance(read, dict) or read.get("format") != FORMAT or not _has_parts(read):
            raise JobRefused(
                f"{self.description} is not of this version of genrt: go on with the one that wrote it, "
                f"or {REMEDY}"
            )
        parts: Fingerprint = read["parts"]
        return parts

    def _read(self, most_rows: int, retried: Callable[[str], bool]) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # of a process that was killed; opening cuts it off
                self._size += len(line)
                index, digest, error_type = self._entry(number + 1, line)
                if index >= most_rows:
                    raise JobRefused(
                        f"{self.path} has row {index}, which the input is too short for: {REMEDY}"
                    )
                if error_type is not None and retried(error_type):
                    self._taken_out.add(number)
                    continue
                if index >= len(self.digests):
                    self.digests.frombytes(bytes(8 * (index + 1 - len(self.digests))))
                if self.digests[index]:
                    raise JobRefused(f"{self.path} has row {index} twice: {REMEDY}")
                self.digests[index] = digest
                self.finished += 1
                self.failed += error_type is not None

    def _entry(self, number: int, line: bytes) -> tuple[int, int, str | None]:
        try:
            entry = parse_json(line)
            index, digest, error_type = (
                entry["index"],
                int(entry["digest"], 16),
                entry["error_type"],
            )
            if type(index) is int and index >= 0 and 0 < digest < 2**64:
                return index, digest, None if error_type is None else str(error_type)
        except (ValueError, TypeError, KeyError):
            pass
        raise JobRefused(
            f"line {number} of {self.path} is none that a job has written: mend it, or {REMEDY}"
        )

    def _take_out(self, numbers: set[int]) -> None:
        """Write the file again without these lines."""
        with whole_file(self.path) as kept, self.path.open("rb") as file:
            for number, line in enumerate(file):
                if number not in numbers and line.endswith(b"\n"):
                    kept.write(line)
        self._size = self.path.stat().st_size

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            OutputFailed: it cannot be written; then nothing of it is in the file, unless that cannot be
                written either.
        """
        if self._file is None:
            raise OutputFailed(f"{self.path} is closed")
        line = as_line(entry)
        with _translated(self.path):
            try:
                # One call, as a rule: a full disk takes a part, and fails with the next.
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._size)
                raise
        self._size += len(line)

    def sync(self) -> None:
        """Have what is written survive the machine's end, too; from any thread."""
        with contextlib.suppress(ValueError), _translated(self.path):  # closed meanwhile
            if (file := self._file) is not None:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file once it is on the disk, and let others write. Idempotent."""
        try:
            self.sync()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            if self._lock.is_locked:
                # Before it is released: a lock on a file without a name is none, and is taken anew.
                with contextlib.suppress(OSError):
                    os.unlink(self._lock.lock_file)
                self._lock.release()


def _has_parts(described: dict[str, Any]) -> bool:
    parts = described.get("parts")
    return isinstance(parts, dict) and all(
        isinstance(part, dict) and "digest" in part for part in parts.values()
    )


def as_line(entry: Mapping[str, Any]) -> bytes:
    """Return a value as a line of JSON, in UTF-8; escaped if there are lone surrogates in it.

    What some readers take for the end of a line, and JSON does not, is escaped."""
    text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
    for separator in "\x85\u2028\u2029":
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(entry, allow_nan=False).encode() + b"\n"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that is there whole, or as it was before."""
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
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Have the names in a directory survive the machine's end."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OutputFailed:
        raise
    except OSError as error:
        raise OutputFailed(
            f"{path} cannot be written: {error.strerror or error}. What is in it stays; run the job "
            "again to go on"
        ) from error
