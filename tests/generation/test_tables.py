"""Rows of JSONL, CSV, TSV and Parquet: what is read, what is refused with its line, and templates over
them; lines written as tables."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.errors import ExtraNotInstalled, InvalidRequest, UnknownColumn
from genrt.generation.tables import (
    Row,
    RowPrompts,
    check_files,
    format_of,
    max_rows,
    read_rows,
    write_table,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def rows_of(directory: Path, content: bytes, name: str = "in.jsonl") -> list[Row]:
    path = directory / name
    path.write_bytes(content)
    return list(read_rows(path))


@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=4))
def test_json_lines_come_back_as_they_were_written(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    read = rows_of(tmp_path_factory.mktemp("rows"), text.encode())
    assert [row.columns for row in read] == rows
    assert [row.index for row in read] == list(range(len(rows)))


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"))


@pytest.mark.parametrize(("form", "delimiter"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
@given(rows=st.lists(st.tuples(FIELDS, FIELDS), max_size=4))
def test_csv_comes_back_with_quotes_line_feeds_and_whatever_else(
    form: str,
    delimiter: str,
    rows: list[tuple[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"in.{form}"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([("a", "the b"), *rows])
    read = read_rows(path, "," if form == "tsv" else delimiter)
    assert [(row.columns["a"], row.columns["the b"]) for row in read] == rows


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@settings(deadline=None)  # the first use imports pyarrow
@given(rows=st.lists(st.tuples(st.none() | FIELDS, st.none() | st.lists(FIELDS)), max_size=4))
def test_parquet_comes_back_with_nulls_and_lists(
    rows: list[tuple[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / "in.parquet"
    texts = pyarrow.array([row[0] for row in rows], pyarrow.string())
    lists = pyarrow.array([row[1] for row in rows], pyarrow.list_(pyarrow.string()))
    write_parquet(path, {"a": texts, "b": lists})
    assert [(row.columns["a"], row.columns["b"]) for row in read_rows(path)] == rows
    assert max_rows(path) == len(rows)


def test_values_of_parquet_are_those_of_json(tmp_path: Path) -> None:
    columns = {
        "day": [datetime.date(2020, 1, 2)],
        "price": [decimal.Decimal("1.50")],
        "score": [float("nan")],
        "messages": [[{"role": "user", "content": "a"}]],
        "label": pyarrow.array(["a"]).dictionary_encode(),
    }
    [row] = read_rows(write_parquet(tmp_path / "in.parquet", columns))
    assert row.columns == {
        "day": "2020-01-02",
        "price": "1.50",
        "score": None,
        "messages": [HELLO | {"content": "a"}],
        "label": "a",
    }


def test_a_parquet_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array([1])] * 2, names=["a", "a"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    write_parquet(tmp_path / "bytes.parquet", {"a": [b"SECRET"]})
    (tmp_path / "text.parquet").write_text("a,b\n")
    for name, said in (
        ("twice", "more than once"),
        ("bytes", "binary"),
        ("text", "cannot be read"),
    ):
        with pytest.raises(InvalidRequest, match=said) as refused:
            list(read_rows(tmp_path / f"{name}.parquet"))
        assert SECRET not in str(refused.value)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        max_rows(tmp_path / "text.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ExtraNotInstalled, match=r"genrt\[parquet\]"):
        format_of(Path("in.parquet"))


def table_of(path: Path, lines: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("wb") as file:
        write_table(file, format_of(path), delimiter, lambda: iter(lines))
        assert not file.closed
    return path


LINES = st.lists(
    st.tuples(
        st.dictionaries(FIELDS.filter(str.strip), JSON, max_size=3),
        JSON | st.integers(-(2**70), 2**70),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.parquet"])
@settings(deadline=None)
@given(values=LINES, delimiter=st.sampled_from(",;|\t é"))
def test_every_value_of_a_line_is_in_its_table(
    name: str,
    values: list[tuple[dict[str, Any], Any]],
    delimiter: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    lines = [
        {"index": index, "digest": "f", "input": columns, "text": value}
        for index, (columns, value) in enumerate(values)
    ]
    path = table_of(tmp_path_factory.mktemp("table") / name, lines, delimiter)
    read = [row.columns for row in read_rows(path, delimiter)]
    names = {key: key for columns, _ in values for key in columns}
    prefixed = {key for key in names if key in ("index", "text") or key.startswith("input.")}
    names |= {key: f"input.{key}" for key in prefixed}
    assert [*read[0]] == [*names.values(), "index", "text"]
    for line, row in zip(lines, read, strict=True):
        written = {names[key]: value for key, value in line["input"].items()}
        written = dict.fromkeys(row) | written | {"index": line["index"], "text": line["text"]}
        for key, value in written.items():
            wanted = value
            if value is None:
                wanted = None if name == "out.parquet" else ""
            elif isinstance(row[key], str) and not isinstance(value, str):
                wanted = json.dumps(value, ensure_ascii=False)
            elif isinstance(row[key], float):  # its column has int too
                wanted = float(value)
            assert row[key] == wanted


def test_columns_of_a_parquet_table_have_the_types_of_their_values(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "bool": [True, None],
        "int": [1, -(2**63)],
        "float": [1, 0.5],
        "huge": [1, 2**63],
        "mixed": ["1", 1],
        "list": [[1], None],
        "null": [None, None],
        "odd": ["\ud800", "a"],
    }
    lines = [
        {"index": index, "input": {name: values[index] for name, values in columns.items()}}
        for index in (0, 1)
    ]
    table = pyarrow.parquet.read_table(table_of(tmp_path / "out.parquet", lines))
    types = dict(zip(table.column_names, map(str, table.schema.types), strict=True))
    assert types == dict.fromkeys(columns, "string") | {
        "bool": "bool",
        "int": "int64",
        "float": "double",
        "index": "int64",
    }
    assert table.to_pydict() == columns | {
        "float": [1.0, 0.5],
        "huge": ["1", str(2**63)],
        "mixed": ["1", "1"],
        "list": ["[1]", None],
        "odd": ["\\ud800", "a"],
        "index": [0, 1],
    }


def test_marks_blank_lines_and_ends_of_lines_do_not_count(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xc3\xa9\xe2\x80\xa8"}'
    assert [row.columns["a"] for row in rows_of(tmp_path, content)] == [1, "é\u2028"]
    content = b"\xef\xbb\xbfa,b\r\n\r\n1,2\r\n\r\n"
    assert [row.columns for row in rows_of(tmp_path, content, "in.CSV")] == [{"a": "1", "b": "2"}]
    assert rows_of(tmp_path, b"") == []


def test_a_rows_digest_is_that_of_its_values(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, b'{"a":1,"b":2}\n{ "b": 2, "a": 1}\n{"a":1,"b":3}\n{"a":"1","b":2}\n')
    digests = [row.digest for row in rows]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert 0 not in digests


SECRET = "SECRET"
BAD_LINES = [
    (b"[1]", "not a JSON object"),
    (b'"SECRET"', "not a JSON object"),
    (b'{"a": "SECRET}', "not JSON"),
    (b'{"a": NaN, "b": "SECRET"}', "NaN"),
    (b'{"a": -Infinity}', "Infinity"),
    (b'{"a": 1e999}', "beyond all floats"),
    (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"a": "\xff SECRET"}', "not UTF-8"),
    ('{"a": "SECRET"}'.encode("utf-16"), "not UTF-8"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
def test_a_line_that_is_no_row_is_refused_without_being_shown(
    line: bytes, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        rows_of(tmp_path, b'{"a": 1}\n' + line + b"\n")
    assert SECRET not in str(refused.value)
    assert said == "not UTF-8" or "line 2" in str(refused.value)


def test_an_unfinished_last_line_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the file ends in it"):
        rows_of(tmp_path, b'{"a": 1}\n{"a":')


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no header"),
        (b"\n\n", "no header"),
        (b"a,,b\n1,2,3\n", "column 2 of .* has no name"),
        (b"a,b,a\n1,2,3\n", r"has \['a'\] more than once"),
        (b"a,b\n1,2\n3\n", "line 3 of .* has 1 fields, and the header 2"),
        (b"a,b\n1,2,3\n", "line 2 of .* has 3 fields"),
        (b'a,b\n1,"SECRET\n', "line 2"),
        (b'a,b\n1,"SEC"RET\n', "line 2"),
        (b"a,b\n1,\xff\n", "not UTF-8"),
        (b"a\n" + b"x" * 200_000 + b"\n", "field_size_limit"),
    ],
)
def test_a_csv_that_is_none_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    before = csv.field_size_limit()
    with pytest.raises(InvalidRequest, match=said) as refused:
        rows_of(tmp_path, content, "in.csv")
    assert "SEC" not in str(refused.value)
    assert csv.field_size_limit() == before


def test_files_have_a_format_that_is_read(tmp_path: Path) -> None:
    assert format_of(Path("a.ndjson")) == "jsonl"
    for name in ("a.xlsx", "a.json", "a.csv.gz", "a"):
        with pytest.raises(
            InvalidRequest, match=r"\.jsonl, \.csv, \.tsv, \.parquet, and .* convert"
        ):
            format_of(Path(name))
    for source, said in ((tmp_path / "none.jsonl", "there is no file"), (tmp_path, "not a file")):
        with pytest.raises(InvalidRequest, match=said):
            check_files(source, tmp_path / "out.jsonl", ",")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        list(read_rows(tmp_path / "folder.jsonl"))


@pytest.mark.parametrize("delimiter", ["", ";;", "\n", "\r", '"', "\0", None, 1])
def test_a_delimiter_is_one_character(delimiter: Any, tmp_path: Path) -> None:
    (tmp_path / "in.csv").touch()
    with pytest.raises(InvalidRequest, match=r"must be one character.*call the file \.tsv"):
        check_files(tmp_path / "in.csv", tmp_path / "out.csv", delimiter)


def test_a_delimiter_is_for_csv_files(tmp_path: Path) -> None:
    for name in ("in.csv", "in.tsv"):
        (tmp_path / name).touch()
    with pytest.raises(InvalidRequest, match=r"delimiter is for \.csv files"):
        check_files(tmp_path / "in.tsv", tmp_path / "out.jsonl", ";")
    check_files(tmp_path / "in.csv", tmp_path / "out.jsonl", ";")
    check_files(tmp_path / "in.tsv", tmp_path / "out.csv", ";")


# -- templates ----------------------------------------------------------------------------------


def prompts(**given: Any) -> RowPrompts:
    arguments = {"template": None, "messages_column": None, "chat": False, "system_message": None}
    return RowPrompts(**(arguments | given))


NAMES = st.text(st.characters(exclude_characters="{}"), min_size=1)


@given(columns=st.dictionaries(NAMES, st.text(), min_size=1, max_size=4), between=st.text())
def test_a_template_has_every_name_replaced_by_its_value(
    columns: dict[str, str], between: str
) -> None:
    literal = between.replace("{", "{{").replace("}", "}}")
    template = prompts(template=literal.join(f"{{{name}}}" for name in columns))
    assert template.columns == tuple(columns)
    assert template.of(columns) == between.join(columns.values())


def test_a_template_reaches_into_nothing() -> None:
    class Secret:
        value = SECRET

    for name in ("a.value", "a[0]", "a.__class__.__init__.__globals__", "0", "a!r", "a:>9"):
        with pytest.raises(UnknownColumn, match="there is no column"):
            prompts(template=f"{{{name}}}").of({"a": Secret()})
        assert prompts(template=f"{{{name}}}").of({name: "as it is"}) == "as it is"


def test_values_that_are_no_texts_are_written_as_json() -> None:
    row = {"a": None, "b": [1, "é"], "c": 1.5, "d": {"e": True}, "f": "{a}"}
    filled = prompts(template="{a} {b} {c} {d} {f} {{a}}").of(row)
    assert filled == 'null [1, "é"] 1.5 {"e": true} {a} {a}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "{} at character 0"),
        ("{a:>{b}}", "{ at character 0"),
        ("{a", "write a column's name"),
        ("{b} a}", "} at character 5"),
        ("", "names no column"),
        ("{{a}}", "names no column"),
        (b"{a}", "must be a str"),
    ],
)
def test_a_template_that_is_none_is_refused(text: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        prompts(template=text)


def test_an_unknown_column_is_told_with_some_of_those_there_are() -> None:
    with pytest.raises(UnknownColumn, match=r"'b': there are 'a', 'c'") as refused:
        prompts(template="{b}").of({"a": SECRET, "c": SECRET})
    assert SECRET not in str(refused.value)


HELLO = {"role": "user", "content": "Hello!"}


def test_prompts_are_texts_or_conversations() -> None:
    system = {"role": "system", "content": "Be kind."}
    row = {"a": "Hello!", "m": [HELLO], "t": json.dumps([HELLO])}
    assert prompts(template="{a}").of(row) == "Hello!"
    assert prompts(template="{a}", chat=True).of(row) == [HELLO]
    assert prompts(template="{a}", system_message="Be kind.").of(row) == [system, HELLO]
    assert prompts(messages_column="m").of(row) == [HELLO]
    assert prompts(messages_column="t", system_message="Be kind.").of(row) == [system, HELLO]


@pytest.mark.parametrize(
    "value", [None, 1, [], {}, HELLO, [1], [{}], "text", "[", "[]", "[1]", '"SECRET"', ["SECRET"]]
)
def test_what_is_no_conversation_is_refused_without_being_shown(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="column 'm'") as refused:
        prompts(messages_column="m").of({"m": value})
    assert SECRET not in str(refused.value)
