"""llm-annotator's offline client: the cases of its public unit tests as data, on jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.engines.exact import ExactEngine
from genrt.errors import (
    Closed,
    EngineFailed,
    InvalidRequest,
    JobRefused,
    OutOfMemory,
    UnknownColumn,
)
from genrt.generation import Job
from genrt.lm import AsyncLM
from tests.generation.job_cases import MODEL, lines_of, write_rows
from tests.generation.test_jobs import Scripted, unchecked

AGAIN = 2**40
"""The distance between the seeds of two draws of a row."""

SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string"}},
    "required": ["label"],
}


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 64}) as opened:
        yield opened


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    unchecked(monkeypatch)
    return Scripted(monkeypatch)


def job(folder: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> Job:
    """A job over rows with a text each, or over the same rows as before."""
    if rows is not None:
        write_rows(folder / "in.jsonl", rows)
    given: dict[str, Any] = {"prompt_template": "q: {text}", "max_tokens": 4}
    return Job(folder / "in.jsonl", folder / "out.jsonl", **(given | options))


TWO = [{"text": "a"}, {"text": "b"}]

TEXTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("x", {}, {"text": "x", "error": None}),
    ('{"label":"good"}', {"json_schema": SCHEMA}, {"output": {"label": "good"}, "valid": True}),
    ("not-json", {"json_schema": SCHEMA}, {"output": None, "valid": False}),
    ('{"other": "x"}', {"json_schema": SCHEMA}, {"output": None, "valid": False}),
    ("  hi  ", {"validate": str.strip}, {"text": "  hi  ", "output": "hi", "valid": True}),
    ("hi", {"validate": lambda text: text == "ok"}, {"output": None, "valid": False}),
    ("ok", {"validate": lambda text: text == "ok"}, {"output": "ok", "valid": True}),
    ("ok", {"validate": lambda text: {"post": text}}, {"output": {"post": "ok"}, "valid": True}),
    # The reference looks for required keys only.
    ('{"label": 3}', {"json_schema": SCHEMA}, {"output": None, "valid": False}),
]


@pytest.mark.parametrize(("text", "options", "expected"), TEXTS)
def test_a_text_is_judged_and_postprocessed(
    text: str,
    options: dict[str, Any],
    expected: dict[str, Any],
    lm: AsyncLM,
    tmp_path: Path,
    scripted: Scripted,
) -> None:
    scripted.texts = {0: text, 1: text}
    report = job(tmp_path, TWO, **options).run_sync(lm)
    assert report.complete
    for line in lines_of(tmp_path):
        assert {name: line[name] for name in expected} == expected
        assert (line["finish_reason"], line["completion_tokens"]) == ("stop", 2)


def test_failed_rows_stay_with_their_errors_and_are_not_valid(
    lm: AsyncLM, tmp_path: Path, scripted: Scripted
) -> None:
    scripted.texts = {0: '{"label": "ok"}'}
    scripted.errors = {1: EngineFailed("boom")}
    report = job(tmp_path, TWO, json_schema=SCHEMA).run_sync(lm)
    done, failed = lines_of(tmp_path)
    assert (done["error"], done["valid"]) == (None, True)
    assert (failed["error"], failed["error_type"], failed["text"]) == ("boom", "EngineFailed", None)
    assert (failed.get("output"), failed.get("valid")) == (None, None)
    assert (report.done, report.failed) == (1, {"EngineFailed": 1})


def test_invalid_rows_alone_are_drawn_again(
    lm: AsyncLM, tmp_path: Path, scripted: Scripted
) -> None:
    scripted.texts = {0: "good", 1: "bad", 1 + AGAIN: "bad", 1 + 2 * AGAIN: "good"}
    options: dict[str, Any] = {"validate": lambda text: text == "good"}
    report = job(tmp_path, TWO, num_retries_invalid=2, **options).run_sync(lm)
    assert [line["valid"] for line in lines_of(tmp_path)] == [True, True]
    assert sorted(scripted.asked) == [0, 1, 1 + AGAIN, 1 + 2 * AGAIN]
    assert report.complete
    job(tmp_path, num_retries_invalid=1, overwrite=True, **options).run_sync(lm)
    assert [line["valid"] for line in lines_of(tmp_path)] == [True, False]  # the last draw stays
    scripted.asked.clear()
    job(tmp_path, overwrite=True, **options).run_sync(lm)
    assert sorted(scripted.asked) == [0, 1]


MESSAGES: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
    (
        {"text": "hello"},
        {"prompt_template": "say {text}", "system_message": "sys"},
        [{"role": "system", "content": "sys"}, {"role": "user", "content": "say hello"}],
    ),
    ({"text": "hello"}, {"chat": True}, [{"role": "user", "content": "q: hello"}]),
    # Prepared rows, and rows of prompts alone, need no template.
    (
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt_template": None},
        [{"role": "user", "content": "a"}],
    ),
    ({"prompt": "tell"}, {"prompt_template": None}, "tell"),
]


@pytest.mark.parametrize(("row", "options", "expected"), MESSAGES)
def test_rows_become_conversations(
    row: dict[str, Any], options: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    assert job(tmp_path, [row], **options)._prompts.of(row) == expected


def test_finished_rows_are_not_asked_again(lm: AsyncLM, tmp_path: Path, scripted: Scripted) -> None:
    job(tmp_path, TWO, limit=1).run_sync(lm)
    report = job(tmp_path).run_sync(lm)
    assert (report.skipped, report.done) == (1, 1)
    assert scripted.asked == [0, 1]
    assert job(tmp_path).run_sync(lm).skipped == 2
    assert len(scripted.asked) == 2


def test_a_line_that_was_cut_off_is_removed_and_its_row_asked_again(
    lm: AsyncLM, tmp_path: Path, scripted: Scripted
) -> None:
    job(tmp_path, [*TWO, {"text": "c"}]).run_sync(lm)
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    scripted.asked.clear()
    output.write_bytes(whole[:-20])
    assert (job(tmp_path).run_sync(lm).skipped, len(scripted.asked)) == (2, 1)
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())


@pytest.mark.parametrize("line", ['{"idx": 0, "respo', '{"response": "a"}'])
def test_other_damage_is_refused(line: str, lm: AsyncLM, tmp_path: Path) -> None:
    job(tmp_path, TWO).run_sync(lm)
    output = tmp_path / "out.jsonl"
    output.write_text(f"{line}\n{output.read_text()}")
    with pytest.raises(JobRefused, match="line 1 of"):
        job(tmp_path).run_sync(lm)


def test_a_row_has_one_line(lm: AsyncLM, tmp_path: Path) -> None:
    """The reference removes repeated rows at the end; a job never writes them, and refuses others'."""
    with job(tmp_path, TWO).begin(), pytest.raises(JobRefused, match="another job"):
        job(tmp_path).run_sync(lm)
    job(tmp_path).run_sync(lm)
    output = tmp_path / "out.jsonl"
    output.write_text(output.read_text() * 2)
    with pytest.raises(JobRefused, match=r"has row \d twice"):
        job(tmp_path).run_sync(lm)


COLUMNS: list[tuple[Any, list[str]]] = [
    (None, ["text", "label"]),
    (["text"], ["text"]),
    ([], []),
]


@pytest.mark.parametrize(("keep", "expected"), COLUMNS)
def test_lines_repeat_columns(keep: Any, expected: list[str], lm: AsyncLM, tmp_path: Path) -> None:
    job(tmp_path, [{"text": "a", "label": 0}], keep_columns=keep).run_sync(lm)
    [line] = lines_of(tmp_path)
    assert [*line["input"]] == expected


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"keep_columns": 1}, "keep_columns"),
    ({"json_schema": "[]"}, "json_schema must be an object"),
    ({"limit": 0}, "limit"),
    ({"num_retries_invalid": 5}, "to judge texts by"),
    ({"unknown": 1}, "no option 'unknown'"),
    ({"messages_column": "text"}, "give one of prompt_template"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_mistakes_are_refused_before_a_row_is_asked(
    options: dict[str, Any], message: str, lm: AsyncLM, tmp_path: Path, scripted: Scripted
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        job(tmp_path, TWO, **options).run_sync(lm)
    assert scripted.asked == []


def test_a_template_names_columns_of_the_rows(
    lm: AsyncLM, tmp_path: Path, scripted: Scripted
) -> None:
    with pytest.raises(UnknownColumn, match="'missing': there are 'text'"):
        job(tmp_path, TWO, prompt_template="q: {missing}").run_sync(lm)
    assert scripted.asked == []


def test_a_text_at_its_limit_is_truncated_and_no_error(lm: AsyncLM, tmp_path: Path) -> None:
    job(tmp_path, TWO, max_tokens=1, ignore_eos=True).run_sync(lm)
    for line in lines_of(tmp_path):
        assert (line["finish_reason"], line["truncated"]) == ("length", True)
        assert (line["error"], line["completion_tokens"]) == (None, 1)


class SmallMemory(ExactEngine):
    """An engine with memory for so many rows a step."""

    def __init__(self, rows: int) -> None:
        super().__init__(MODEL, max_model_len=64)
        self.rows = rows
        self.sizes: list[int] = []

    def submit(self, requests: Any) -> None:
        self.sizes.append(len(requests))
        if len(requests) > self.rows:
            raise OutOfMemory("there is no memory for so many rows")
        super().submit(requests)


def test_rows_without_memory_are_halved_and_asked_again(tmp_path: Path) -> None:
    engine = SmallMemory(2)
    with genrt.load(engine=lambda: engine) as lm:
        report = job(tmp_path, [{"text": letter} for letter in "abcde"], concurrency=4).run_sync(lm)
    assert report.complete
    assert max(engine.sizes) > 2
    engine = SmallMemory(0)
    with genrt.load(engine=lambda: engine) as lm:
        report = job(tmp_path, TWO, overwrite=True).run_sync(lm)
    assert report.failed == {"OutOfMemory": 2}


def test_a_closed_runtime_is_refused_and_closes_twice(lm: AsyncLM, tmp_path: Path) -> None:
    lm.close()
    lm.close()
    with pytest.raises(Closed):
        job(tmp_path, TWO).run_sync(lm)


def test_a_table_is_in_the_order_of_the_rows_with_their_columns(
    lm: AsyncLM, tmp_path: Path, scripted: Scripted
) -> None:
    import pandas

    write_rows(tmp_path / "in.jsonl", TWO)
    scripted.texts = {0: "first", 1: "second"}
    table = Job(
        tmp_path / "in.jsonl", tmp_path / "out.csv", prompt_template="q: {text}", max_tokens=4
    )
    assert table.run_sync(lm).complete
    frame = pandas.read_csv(tmp_path / "out.csv")
    assert frame["index"].tolist() == [0, 1]
    assert frame["text"].tolist() == ["first", "second"]
    assert frame["input.text"].tolist() == ["a", "b"]
    lines = (tmp_path / "out.csv.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["text"] for line in lines) == ["first", "second"]
