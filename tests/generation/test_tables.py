"""Rows of JSONL, CSV and TSV: what is read, what is refused with its line, and templates over them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genrt.errors import InvalidRequest, UnknownColumn
from genrt.generation.tables import Row, RowPrompts, check_files, format_of, read_rows

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
    return list(read_rows(path, format_of(path)))


@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=4))
def test_json_lines_come_back_as_they_were_written(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    read = rows_of(tmp_path_factory.mktemp("rows"), text.encode())
    assert [row.columns for row in read] == rows
    assert [row.index for row in read] == list(range(len(rows)))


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"))


@pytest.mark.parametrize("form", ["csv", "tsv"])
@given(rows=st.lists(st.tuples(FIELDS, FIELDS), max_size=4))
def test_csv_comes_back_with_quotes_line_feeds_and_whatever_else(
    form: str, rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"in.{form}"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, "excel-tab" if form == "tsv" else "excel")
        writer.writerows([("a", "the b"), *rows])
    assert [(row.columns["a"], row.columns["the b"]) for row in read_rows(path, form)] == rows


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
    for name in ("a.parquet", "a.json", "a"):
        with pytest.raises(InvalidRequest, match=r"reads \.jsonl, \.ndjson, \.csv, \.tsv, and"):
            format_of(Path(name))
    for source, said in ((tmp_path / "none.jsonl", "there is no file"), (tmp_path, "not a file")):
        with pytest.raises(InvalidRequest, match=said):
            check_files(source, tmp_path / "out.jsonl")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        list(read_rows(tmp_path, "jsonl"))


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
