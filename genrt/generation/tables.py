"""The files of a job: rows of JSONL, CSV, TSV and Parquet, read one at a time, their prompts, and output
tables."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from genrt.errors import ExtraNotInstalled, InvalidRequest, UnknownColumn
from genrt.numbers import check_bool, named, shown

FORMATS = {".ndjson": "jsonl"} | {f".{form}": form for form in ("jsonl", "csv", "tsv", "parquet")}
"""The formats by file suffix."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the input.

    Attributes:
        index: its position among the rows of the file, from 0, without blank lines and the header.
        columns: its values by name; in CSV files all are str.
        digest: a hash of the values, independent of their order and of white space; never 0.
    """

    index: int
    columns: dict[str, Any]
    digest: int


def format_of(path: Path) -> str:
    """Return the format of a file, by its suffix. Raises InvalidRequest if it is unknown, and
    ExtraNotInstalled if its package is missing."""
    if (found := FORMATS.get(path.suffix.lower())) is None:
        raise InvalidRequest(
            f"a job reads and writes {', '.join(FORMATS)}, and {path} has another suffix: rename or "
            "convert it"
        )
    if found == "parquet":
        _import_pyarrow()
    return found


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ExtraNotInstalled("Parquet needs pyarrow: pip install 'genrt[parquet]'") from error
    return pyarrow


def read_rows(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a file in order, in flat memory. InvalidRequest names the line that is not a row,
    but not its content."""
    lines = {
        "jsonl": lambda: _json_lines(path),
        "parquet": lambda: _parquet_rows(path),
        "csv": lambda: _csv_lines(path, delimiter),
        "tsv": lambda: _csv_lines(path, "\t"),
    }[format_of(path)]()
    try:
        for index, columns in enumerate(lines):
            yield Row(index, columns, _digest_row(columns))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path} is not UTF-8 ({error.reason}): convert it, for example with iconv"
        ) from error


def max_rows(path: Path) -> int:
    """Return a bound on the number of rows of a file, without reading them."""
    if format_of(path) != "parquet":
        return path.stat().st_size
    with _open_parquet(path) as file:
        return int(file.metadata.num_rows)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. ValueError, for NaN, numbers beyond all floats and deep nesting
    too, does not quote it."""
    try:
        return json.loads(text, parse_float=_finite_float, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error


def _finite_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("it has a number beyond all floats")
    return number


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"it has {name}, which is not JSON: write null")


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                columns = parse_json(line)
            except ValueError as error:
                whole = (
                    "" if line.endswith("\n") else "; the file ends in it, and may be unfinished"
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


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    pyarrow = _import_pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _checked_header(path, file.schema_arrow.names)
            yield file
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    with _open_parquet(path) as file:
        for batch in file.iter_batches(1024):
            text = json.dumps(batch.to_pylist(), default=_as_text)
            yield from json.loads(text, parse_constant=lambda name: None)


def _as_text(value: Any) -> str:
    """Return a date, a time or a decimal number as text."""
    if isinstance(value, bytes):
        raise ValueError("it has binary values: leave their column out, or convert them to text")
    return str(value)


def _csv_lines(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True, delimiter=delimiter)
        header: list[str] = []
        try:
            for fields in filter(None, lines):
                if not header:
                    header = _checked_header(path, fields)
                elif len(fields) != len(header):
                    raise InvalidRequest(
                        f"line {lines.line_num} of {path} has {len(fields)} fields, and the header "
                        f"{len(header)}"
                    )
                else:
                    yield dict(zip(header, fields, strict=True))
        except csv.Error as error:
            advice = (
                "; raise csv.field_size_limit() for longer ones" if "limit" in str(error) else ""
            )
            raise InvalidRequest(f"line {lines.line_num} of {path}: {error}{advice}") from error
    if not header:
        raise InvalidRequest(f"{path} has no header: its first line must name the columns")


def _checked_header(path: Path, names: list[str]) -> list[str]:
    if empty := [place for place, name in enumerate(names, 1) if not name.strip()]:
        raise InvalidRequest(f"column {empty[0]} of {path} has no name in the header")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"the header of {path} has {twice} more than once: rename all but one")
    return names


def _digest_row(columns: dict[str, Any]) -> int:
    text = json.dumps(columns, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


def write_table(
    file: IO[bytes], form: str, delimiter: str, lines: Callable[[], Iterator[dict[str, Any]]]
) -> None:
    """Write the lines of a job as a CSV, TSV or Parquet file, in flat memory.

    The columns are those of ``input``, then the other fields without ``digest``. An input column with the
    name of a field gets the prefix ``input.``. A column of Parquet has the type of its values, if all are
    bool, int, float or str. All other values are written as JSON.
    """
    types: dict[tuple[bool, str], set[type]] = {}
    for line in lines():
        for column, value in _cells(line).items():
            types.setdefault(column, set()).add(_type_of(value))
    columns = sorted(types, key=lambda column: column[0])
    names = []
    for is_field, name in columns:
        is_taken = not is_field and ((True, name) in types or name.startswith("input."))
        names.append(_as_cell(f"input.{name}" if is_taken else name))
    rows = ([cells.get(column) for column in columns] for cells in map(_cells, lines()))
    if form != "parquet":
        text = io.TextIOWrapper(file, "utf-8", newline="")
        writer = csv.writer(text, delimiter="\t" if form == "tsv" else delimiter)
        writer.writerow(names)
        writer.writerows(map(_as_cell, row) for row in rows)
        text.detach()
        return
    pyarrow = _import_pyarrow()
    arrow = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64()}
    kinds = [_common_type(types[column]) for column in columns]
    fields = [arrow.get(kind, pyarrow.string()) for kind in kinds]
    schema = pyarrow.schema([*zip(names, fields, strict=True)])
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        while batch := [*itertools.islice(rows, 4096)]:
            values = zip(*(map(_as_cell, row, kinds) for row in batch), strict=True)
            arrays = [*map(pyarrow.array, values, fields)]
            writer.write_batch(pyarrow.record_batch(arrays, schema))


def _cells(line: dict[str, Any]) -> dict[tuple[bool, str], Any]:
    """Return the values of a line by (whether it is a field of the job, its name)."""
    fields = {(True, name): line[name] for name in line if name not in ("input", "digest")}
    return {(False, name): value for name, value in line["input"].items()} | fields


def _type_of(value: Any) -> type:
    is_too_big = isinstance(value, int) and not -(2**63) <= value < 2**63
    return str if is_too_big or isinstance(value, list | dict) else type(value)


def _common_type(types: set[type]) -> type:
    types = types - {type(None)}
    if types == {int, float}:
        return float
    return types.pop() if len(types) == 1 else str


def _as_cell(value: Any, kind: type = str) -> Any:
    """Return a value as this type; str is text that UTF-8 can represent, or JSON."""
    if value is None or kind is not str:
        return None if value is None else kind(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()


def check_files(source: Path, output: Path, delimiter: str) -> None:
    """Raise InvalidRequest unless the input is a readable file, the formats are known, and the delimiter
    is a character for a ``.csv`` file."""
    if not source.exists():
        raise InvalidRequest(f"there is no file {source}")
    if not source.is_file():
        raise InvalidRequest(f"{source} is not a file: a job reads its input more than once")
    if not os.access(source, os.R_OK):
        raise InvalidRequest(f"{source} cannot be read: its permissions forbid it")
    forms = format_of(source), format_of(output)
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise InvalidRequest(
            f"delimiter must be one character, and no quote or end of line, got {shown(delimiter)}; for "
            "tabs call the file .tsv"
        )
    if delimiter != "," and "csv" not in forms:
        raise InvalidRequest(
            f"delimiter is for .csv files, and neither {source} nor {output} is one"
        )


_MARK = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class RowPrompts:
    """Makes the prompt or the conversation of each row, from the arguments of ``Job``.

    Names in a template are only looked up among the columns. Without a template and a column, the column
    ``prompt`` or ``messages`` of the first row is used.

    Attributes:
        columns: the names of the required columns.
        parts: the arguments that decide the prompts, by name.

    Raises:
        InvalidRequest: an argument is wrong, or it is not clear which column to use.
    """

    def __init__(
        self,
        template: str | None,
        messages_column: str | None,
        *,
        chat: bool,
        system_message: str | None,
        first: Row | None = None,
    ) -> None:
        if template is None and messages_column is None:
            template, messages_column = _default_columns(first)
        elif template is not None and messages_column is not None:
            raise InvalidRequest(
                "give one of prompt_template (--prompt-template) and messages_column "
                "(--messages-column)"
            )
        if messages_column is not None and (
            not isinstance(messages_column, str) or not messages_column
        ):
            raise InvalidRequest(f"messages_column must be a name, got {named(messages_column)}")
        if system_message is not None and not isinstance(system_message, str):
            raise InvalidRequest(f"system_message must be a str, got {shown(system_message)}")
        self._template = template
        self._messages_column = str(messages_column)
        self._system_message = system_message
        self._is_chat = check_bool("chat", chat) or system_message is not None
        self.columns = (self._messages_column,) if template is None else _columns_of(template)
        self.parts = {
            "prompt_template": template,
            "messages_column": messages_column,
            "system_message": system_message,
            "chat": self._is_chat,
        }

    def of(self, columns: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Return the prompt or the conversation of a row. Raises UnknownColumn if it lacks a column, and
        InvalidRequest if the column has no conversation."""
        if self._template is None:
            messages = _conversation(self._messages_column, columns)
        else:

            def value(mark: re.Match[str]) -> str:
                if mark[1] is None:
                    return mark[0][0]
                found = value_of(columns, mark[1])
                return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

            text = _MARK.sub(value, self._template)
            if not self._is_chat:
                return text
            messages = [{"role": "user", "content": text}]
        if self._system_message is not None:
            messages = [{"role": "system", "content": self._system_message}, *messages]
        return messages


def _columns_of(template: str) -> tuple[str, ...]:
    """Return the names of columns in a template. Raises InvalidRequest if it is not one, or has none."""
    if not isinstance(template, str):
        raise InvalidRequest(f"a template must be a str, got {shown(template)}")
    names = dict[str, None]()
    for found in _MARK.finditer(template):
        mark, name = found[0], found[1]
        if name == "" or mark in ("{", "}"):
            raise InvalidRequest(
                f"the template has {'{}' if name == '' else mark} at character {found.start()}: "
                "write a column's name in braces, and {{ and }} for braces that are text"
            )
        names |= {} if name is None else {name: None}
    if not names:
        raise InvalidRequest(
            "the template names no column, so that all rows would be asked the same: write one as "
            "{column}"
        )
    return tuple(names)


def _default_columns(first: Row | None) -> tuple[str | None, str | None]:
    """Return the template and the column of messages for rows like this one."""
    columns = {} if first is None else first.columns
    found = [name for name in ("prompt", "messages") if name in columns]
    if len(found) != 1:
        among = "both 'prompt' and 'messages'" if found else f"the columns {_column_names(columns)}"
        raise InvalidRequest(
            "say what is asked: give --prompt-template (prompt_template=) or --messages-column "
            f"(messages_column=); the rows have {among}"
        )
    [name] = found
    is_conversation = name == "messages" or isinstance(columns[name], list)
    return (None, name) if is_conversation else (f"{{{name}}}", None)


def value_of(columns: Mapping[str, Any], name: str) -> Any:
    """Return a row's value. Raises UnknownColumn with the known columns."""
    if name not in columns:
        raise UnknownColumn(f"there is no column {name!r}: there are {_column_names(columns)}")
    return columns[name]


def _column_names(columns: Mapping[str, Any]) -> str:
    return ", ".join([repr(name) for name in columns][:20]) or "none"


def _conversation(name: str, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = value_of(columns, name)
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise InvalidRequest(f"column {name!r} is not a JSON text: {error}") from error
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(each, dict) and "role" in each for each in value)
    ):
        raise InvalidRequest(
            f"column {name!r} has no conversation: it must be a list like "
            "[{'role': 'user', 'content': 'Hello!'}]"
        )
    return value
