"""Rows of JSONL, CSV and TSV files: read one at a time, each an object of named columns."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from genrt.errors import InvalidRequest
from genrt.numbers import named

__all__ = [
    "FORMATS",
    "Row",
    "check_input",
    "check_output",
    "format_of",
    "parse_json",
    "read_rows",
]

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
"""The formats by the endings of files' names."""

CONVERTED = {".parquet": "read_parquet", ".json": "read_json", ".xlsx": "read_excel"}
"""Other formats by the endings of files' names, and the functions of pandas that read them."""

DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the input.

    Attributes:
        index: its place among the rows of the file, from 0; blank lines and a header do not count.
        columns: its values by name; of CSV all are str.
        digest: stands for the values, whatever their order and the white space in the file; never 0.
    """

    index: int
    columns: dict[str, Any]
    digest: int


def format_of(path: Path, chosen: str | None = None) -> str:
    """Return the format of a file, by its name unless it is chosen.

    Raises:
        InvalidRequest: no format has this name, or the file's name does not tell.
    """
    known = sorted(set(FORMATS.values()))
    ending = path.suffix.lower()
    if chosen is None and (reader := CONVERTED.get(ending)) is not None:
        raise InvalidRequest(
            f"a job reads {', '.join(known)}, and {path} is none of these: convert it, as with "
            f'pandas.{reader}("{path.name}").to_json("{path.stem}.jsonl", orient="records", lines=True)'
        )
    if chosen is None and (chosen := FORMATS.get(ending)) is None:
        raise InvalidRequest(
            f"the name of {path} does not say its format: give --input-format (input_format=), one of "
            f"{known}"
        )
    if chosen not in known:
        raise InvalidRequest(f"input_format must be one of {known}, got {named(chosen)}")
    return chosen


def read_rows(path: Path, form: str) -> Iterator[Row]:
    """Yield the rows of a file in order, in flat memory.

    Raises:
        InvalidRequest: the file cannot be read, or a line of it is no row; the message has its number,
            and nothing of what is in it.
    """
    lines = _json_lines(path) if form == "jsonl" else _csv_lines(path, form)
    try:
        for index, columns in enumerate(lines):
            yield Row(index, columns, _digest(columns))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path} is not UTF-8 ({error.reason}): convert it, for example with iconv"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, also where Python would read one: NaN, numbers beyond all floats, and
            what is nested too deeply. The message has nothing of the text.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refused)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeDecodeError:
        raise
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("it has a number beyond all floats")
    return number


def _refused(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is not JSON: write null")


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                columns = parse_json(line.decode())
            except UnicodeDecodeError:
                raise
            except ValueError as error:
                whole = (
                    "" if line.endswith(b"\n") else "; the file ends in it, and may be unfinished"
                )
                raise InvalidRequest(
                    f"line {number} of {path} is not JSON: {error}{whole}"
                ) from error
            if not isinstance(columns, dict):
                raise InvalidRequest(
                    f"line {number} of {path} is not a JSON object: each line must be one, like "
                    '{"column": "value"}'
                )
            yield columns


def _csv_lines(path: Path, form: str) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True, delimiter="\t" if form == "tsv" else ",")
        header: list[str] = []
        try:
            for fields in lines:
                if not fields:
                    continue
                if not header:
                    header = _checked_header(path, fields, form)
                    continue
                if len(fields) != len(header):
                    raise InvalidRequest(
                        f"line {lines.line_num} of {path} has {len(fields)} fields, and the header "
                        f"{len(header)}"
                    )
                yield dict(zip(header, fields, strict=True))
        except csv.Error as error:
            advice = (
                "; raise csv.field_size_limit() for longer ones" if "limit" in str(error) else ""
            )
            raise InvalidRequest(f"line {lines.line_num} of {path}: {error}{advice}") from error
    if not header:
        raise InvalidRequest(f"{path} has no header: its first line must name the columns")


def _checked_header(path: Path, names: list[str], form: str) -> list[str]:
    separators = [each for each in ";|\t," if len(names) == 1 and each in names[0]]
    if separators:
        advice = {
            "\t": "give --input-format tsv (input_format=)",
            ",": "give --input-format csv (input_format=)",
        }
        convert = f"separate them by {'tabs' if form == 'tsv' else 'commas'}"
        raise InvalidRequest(
            f"the header of {path} is one column, {names[0]!r}, with {separators[0]!r} between names: "
            f"{advice.get(separators[0], convert)}"
        )
    if empty := [place for place, name in enumerate(names, 1) if not name.strip()]:
        raise InvalidRequest(f"column {empty[0]} of {path} has no name in the header")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"the header of {path} has {twice} more than once: rename all but one")
    return names


def _digest(columns: dict[str, Any]) -> int:
    text = json.dumps(columns, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(digest, "big") or 1


def check_input(path: Path) -> Path:
    """Return the path of a file that can be read more than once. Raises InvalidRequest otherwise."""
    if not path.exists():
        raise InvalidRequest(f"there is no file {path}")
    if not path.is_file():
        raise InvalidRequest(f"{path} is not a file: a job reads its input more than once")
    if not os.access(path, os.R_OK):
        raise InvalidRequest(f"{path} cannot be read: its permissions forbid it")
    return path


def check_output(path: Path) -> Path:
    """Return the path of an output. Raises InvalidRequest if its name says that it is not JSONL."""
    ending = path.suffix.lower()
    if FORMATS.get(ending, "jsonl") != "jsonl" or ending in CONVERTED.keys() - {".json"}:
        raise InvalidRequest(
            f"the output is a line of JSON for each row, and its name says {ending}: call it "
            f"{path.with_suffix('.jsonl').name}"
        )
    return path
