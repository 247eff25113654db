"""Jobs: each row once, whatever interrupts them; what changed is refused; failures, tables, logs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pydantic
import pytest

import genrt
from genrt.engines.exact import NGram
from genrt.errors import (
    Closed,
    EngineFailed,
    InvalidRequest,
    JobRefused,
    OutputFailed,
    TimedOut,
    UnknownAdapter,
    UnknownColumn,
)
from genrt.generation import jobs, journal, many
from genrt.generation.jobs import Job, JobReport, JobRun
from genrt.generation.journal import Journal
from genrt.generation.many import Failed
from genrt.generation.tables import read_rows
from genrt.generation.validators import JSONSchema
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion
from tests.generation.job_cases import (
    MODEL,
    VOCABULARY,
    job,
    lines_of,
    rows,
    write_adapter,
    write_rows,
)

ROWS = rows(12)


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 64}) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the rows in ``in.jsonl``."""
    write_rows(tmp_path / "in.jsonl", ROWS)
    return tmp_path


class Scripted:
    """What ``lm.generate`` does instead of asking, for some rows; and what was asked of it, by seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.errors: dict[int, Exception] = {}
        self.texts: dict[int, str] = {}
        original = AsyncLM.generate

        async def generate(lm: AsyncLM, prompt: Any, **options: Any) -> Completion:
            seed = options.get("seed")
            options.pop("json_schema", None)
            if seed is None:
                return await original(lm, prompt, **options)
            self.asked.append(seed)
            if seed in self.errors:
                await asyncio.sleep(0)
                raise self.errors[seed]
            completion = await original(lm, prompt, **options)
            if seed not in self.texts:
                return completion
            return Completion(self.texts[seed], (1, 2), (1,), (), (), "stop", None, 0.0, 0.0)

        monkeypatch.setattr(AsyncLM, "generate", generate)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)


# -- what is written ----------------------------------------------------------------------------


async def test_each_row_has_the_text_that_its_seed_decides(lm: AsyncLM, folder: Path) -> None:
    report = await job(folder, seed=7, concurrency=3).run(lm)
    for line, row in zip(lines_of(folder), ROWS, strict=True):
        prompt, seed = f"say {row['text']}", 7 + line["index"]
        alone = await lm.generate(prompt, max_tokens=6, seed=seed)
        assert (line["text"], line["truncated"]) == (alone.text, alone.truncated)
        assert line["finish_reason"] == alone.finish_reason
        assert line["completion_tokens"] == len(alone.token_ids)
        assert line["prompt_tokens"] == len(alone.prompt_token_ids)
        assert (line["seed"], line["input"], line["error"]) == (seed, row, None)
    assert report.complete
    assert (report.rows, report.done, report.skipped) == (12, 12, 0)
    assert report.completion_tokens == sum(line["completion_tokens"] for line in lines_of(folder))
    assert report.truncated == sum(line["truncated"] for line in lines_of(folder))


def test_a_finished_job_has_nothing_left_to_do(lm: AsyncLM, folder: Path) -> None:
    with pytest.raises(UnknownColumn, match="'absent': there are 'text', 'number'"):
        job(folder, prompt_template="{text} {absent}").run_sync(lm)
    assert lm.statistics().engine.steps == 0
    assert job(folder).run_sync(lm).done == 12
    before = (folder / "out.jsonl").read_bytes()
    steps = lm.statistics().engine.steps
    report = job(folder).run_sync(lm)
    assert (report.done, report.skipped, report.complete) == (0, 12, True)
    assert (folder / "out.jsonl").read_bytes() == before
    assert lm.statistics().engine.steps == steps
    assert sorted(os.listdir(folder)) == ["in.jsonl", "out.jsonl", "out.jsonl.job.json"]
    (folder / "in.jsonl").write_bytes(b"")
    report = job(folder, overwrite=True).run_sync(lm)
    assert (report.rows, report.complete) == (0, True)
    assert (folder / "out.jsonl").read_bytes() == b""


def test_lines_repeat_the_columns_that_are_wanted(lm: AsyncLM, folder: Path) -> None:
    job(folder, keep_columns=["number"]).run_sync(lm)
    assert [line["input"] for line in lines_of(folder)] == [{"number": i} for i in range(12)]
    job(folder, keep_columns=[], overwrite=True).run_sync(lm)
    assert [line["input"] for line in lines_of(folder)] == [{}] * 12
    with pytest.raises(UnknownColumn, match="'absent'"):
        job(folder, keep_columns=["absent"], overwrite=True).run_sync(lm)


def test_log_probabilities_are_in_the_lines_if_they_are_asked_for(
    lm: AsyncLM, folder: Path
) -> None:
    job(folder, logprobs=2, limit=2).run_sync(lm)
    for line in lines_of(folder):
        assert len(line["logprobs"]) == len(line["token_ids"]) == len(line["top_logprobs"])
        assert all(len(top) in (2, 3) for top in line["top_logprobs"])


def test_texts_of_any_characters_make_lines_that_are_json(lm: AsyncLM, tmp_path: Path) -> None:
    odd = ["\ud800", "\u2028", "\x85", "\n", '"', "é", "\0", "🎲"]
    write_rows(tmp_path / "in.jsonl", [{"text": "a", "odd": each} for each in odd])
    assert job(tmp_path).run_sync(lm).complete
    assert [line["input"]["odd"] for line in lines_of(tmp_path)] == odd


async def test_without_a_seed_every_run_draws_anew(lm: AsyncLM, folder: Path) -> None:
    await job(folder, seed=None).run(lm)
    first = [line["text"] for line in lines_of(folder)]
    await job(folder, seed=None, overwrite=True).run(lm)
    assert first != [line["text"] for line in lines_of(folder)]
    assert {line["seed"] for line in lines_of(folder)} == {None}


# -- resuming -----------------------------------------------------------------------------------


def test_after_a_kill_at_any_byte_the_rest_is_asked_and_nothing_else(
    lm: AsyncLM, folder: Path, scripted: Scripted
) -> None:
    """A killed process leaves a prefix of its output: here those about the ends of lines, and others."""
    write_rows(folder / "in.jsonl", ROWS[:3])
    path = folder / "out.jsonl"
    job(folder, max_tokens=2).run_sync(lm)
    whole, finished = path.read_bytes(), lines_of(folder)
    ends = [place for place, byte in enumerate(whole, 1) if byte == ord("\n")]
    sizes = {end + beside for end in ends for beside in (-2, -1, 0, 1)} | {
        *range(0, len(whole), 23)
    }
    for size in sorted(sizes):
        path.write_bytes(whole[:size])
        kept = [json.loads(line)["index"] for line in whole[:size].split(b"\n")[:-1]]
        scripted.asked.clear()
        report = job(folder, max_tokens=2).run_sync(lm)
        assert lines_of(folder) == finished
        assert sorted(scripted.asked) == sorted({0, 1, 2} - {*kept})
        assert report.skipped == len(kept)


async def test_what_ends_with_a_cancellation_is_written_too(
    lm: AsyncLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await job(folder).run(lm)
    whole = lines_of(folder)
    original = AsyncLM.generate

    async def generate(lm: AsyncLM, *args: Any, **options: Any) -> Completion:
        completion = await original(lm, *args, **options)
        if options["seed"] == 3:
            running.cancel()
        return completion

    with monkeypatch.context() as patched:
        patched.setattr(AsyncLM, "generate", generate)
        running = asyncio.create_task(job(folder, concurrency=1, overwrite=True).run(lm))
        with pytest.raises(asyncio.CancelledError):
            await running
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert lines_of(folder) == whole[:4]
    report = await job(folder).run(lm)
    assert (report.skipped, report.done) == (4, 8)
    assert lines_of(folder) == whole


class Disk:
    """A disk that is done once the loop has gone round meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self.meanwhile: Callable[[], object] = bool
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, number: int) -> None:
        went_round = threading.Event()

        def go_round() -> None:
            self.meanwhile()
            went_round.set()

        self._loop.call_soon_threadsafe(go_round)
        self.waits += 1
        assert went_round.wait(5), "the loop stands still"


async def test_the_loop_goes_on_while_a_job_waits_for_the_disk(
    lm: AsyncLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    assert (await job(folder).run(lm)).complete
    waits = disk.waits
    assert waits > 1
    original, beaten = AsyncLM.generate, asyncio.Event()

    async def generate(lm: AsyncLM, *args: Any, **options: Any) -> Completion:
        disk.meanwhile = beaten.set
        await beaten.wait()
        return await original(lm, *args, **options)

    monkeypatch.setattr(AsyncLM, "generate", generate)
    monkeypatch.setattr(jobs, "BEAT_SECONDS", 1e-9)
    assert (await job(folder, overwrite=True).run(lm)).complete
    assert disk.waits > 2 * waits


def test_rows_added_at_the_end_are_asked_and_no_others(
    lm: AsyncLM, folder: Path, scripted: Scripted
) -> None:
    job(folder, limit=5).run_sync(lm)
    assert sorted(scripted.asked) == list(range(5))
    write_rows(folder / "in.jsonl", [*ROWS[:5], {"text": "other"}, *rows(15)[6:]])
    report = job(folder).run_sync(lm)
    assert (report.skipped, report.done) == (5, 10)
    assert sorted(scripted.asked) == list(range(15))
    assert lines_of(folder)[5]["input"] == {"text": "other"}
    assert job(folder, limit=4).run_sync(lm).complete  # it may also be about fewer


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


INTEGER = schema(a={"type": "integer"}) | {"required": ["a"]}

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"prompt_template": "tell {text}"}, "another prompt_template:"),
    ({"temperature": 0.5}, r"another temperature \(was 1.0, is 0.5\)"),
    ({"max_tokens": 5}, r"max_tokens \(was 6, is 5\)"),
    ({"stop": "a"}, r"stop \(was \[\], is \[\"a\"\]\)"),
    ({"json_schema": schema(b={})}, "json_schema"),
    ({"keep_columns": ["text"]}, "keep_columns"),
    ({"system_message": "Be kind."}, "another system_message, another chat"),
    ({"validate": INTEGER}, "another validate"),
    ({"model": "other"}, r"model \(was \"one\", is \"other\"\)"),
    ({"model_options": {"dtype": "half"}}, r'model_options \(was {"dtype": "float"}'),
    ({"tools": [print, {"type": "function"}]}, "another tools"),
    ({"chat_template_kwargs": {"a": 1}}, "another chat_template_kwargs"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_what_a_job_is_made_from_may_not_change(
    change: dict[str, Any], named: str, lm: AsyncLM, folder: Path
) -> None:
    same: dict[str, Any] = {"model": "one", "model_options": {"dtype": "float"}}
    job(folder, limit=3, **same).run_sync(lm)
    before = (folder / "out.jsonl").read_bytes(), (folder / "out.jsonl.job.json").read_bytes()
    with pytest.raises(JobRefused, match=named) as refused:
        job(folder, **(same | change)).run_sync(lm)
    assert "--overwrite" in str(refused.value)
    assert "say" not in str(refused.value)
    assert "kind" not in str(refused.value)
    after = (folder / "out.jsonl").read_bytes(), (folder / "out.jsonl.job.json").read_bytes()
    assert after == before
    assert job(folder, **same).run_sync(lm).complete


def test_what_does_not_touch_the_texts_may_change(lm: AsyncLM, folder: Path) -> None:
    given: dict[str, Any] = {"temperature": np.float32(1), "seed": np.uint8(0), "limit": np.int8(3)}
    job(folder, **given, max_tokens=np.int64(6), concurrency=np.int16(2)).run_sync(lm)
    changed = {"timeout": 60, "concurrency": 1}
    assert job(folder, **changed, temperature=1.0, top_p=1).run_sync(lm).skipped == 3


class Model:
    """What pydantic's models look like."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "array", "maxItems": 2}


class NoSchema(pydantic.BaseModel):
    call: Callable[[], int]


def test_a_schema_is_judged_by_however_it_is_given() -> None:
    schema = Model.model_json_schema()
    for given in (schema, json.dumps(schema), types.MappingProxyType(schema), Model):
        assert JSONSchema(given).schema == schema
        with pytest.raises(Exception, match="too long"):
            JSONSchema(given).check("[1, 2, 3]")
    wrong: dict[str, Any] = {
        "must be a dict, a JSON text or a pydantic model, got 5": 5,
        "must be an object": "[]",
        "is not JSON: Expecting": "{",
        "is not JSON: it has NaN": '{"maximum": NaN}',
        "is not JSON: Out of range float": {"maximum": float("nan")},
        "is not JSON: Cannot generate a JsonSchema": NoSchema,
        "is not a JSON schema": {"type": "nothing"},
    }
    for message, given in wrong.items():
        with pytest.raises(InvalidRequest, match=f"^json_schema {message}"):
            JSONSchema(given)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ([*ROWS[:2], {"text": "SECRET", "number": 2}, *ROWS[3:]], "row 2 of .* has changed"),
        (ROWS[1:], "row 0 of .* has changed"),
        (ROWS[:3], "has 3 rows, and .* an answer to row 4"),
        ([], "has 0 rows|too short for"),
    ],
)
def test_an_input_that_changed_where_it_was_answered_is_refused(
    changed: list[dict[str, Any]], said: str, lm: AsyncLM, folder: Path
) -> None:
    job(folder, limit=5).run_sync(lm)
    before = (folder / "out.jsonl").read_bytes()
    write_rows(folder / "in.jsonl", changed)
    with pytest.raises(JobRefused, match=said) as refused:
        job(folder).run_sync(lm)
    assert "SECRET" not in str(refused.value)
    assert (folder / "out.jsonl").read_bytes() == before


async def test_an_adapter_is_compared_by_its_files(lm: AsyncLM, folder: Path) -> None:
    one, other = write_adapter(folder / "one", 5), write_adapter(folder / "other", 6)
    await lm.add_adapter("a", one)
    await job(folder, limit=3, adapter="a").run(lm)
    await lm.add_adapter("a", other)
    with pytest.raises(JobRefused, match="another adapter_files:"):
        await job(folder, adapter="a").run(lm)
    with job(folder, adapter="a").begin(adapter=one):
        pass
    (folder / "one").rename(folder / "moved")
    await lm.add_adapter("a", folder / "moved")
    assert (await job(folder, adapter="a").run(lm)).skipped == 3


def test_a_directory_is_known_by_every_byte_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, digest, reads = tmp_path / "model.safetensors", hashlib.file_digest, list[Any]()

    def counted(file: Any, name: Any) -> Any:
        reads.append(file)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    weights.touch()
    os.truncate(weights, 2**26 + 2**20)
    digests = set()
    for place in (0, 2**20 + 100_000, 2**26 + 2**20 - 1):
        stat = weights.stat()
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        digests |= {journal.directory_digest(tmp_path) for _ in range(2)}
    assert len(digests) == len(reads) == 3


# -- outputs that are not the job's ---------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "mine",
        "[]",
        '{"index": 1}',
        '{"index": -1, "digest": "1", "error_type": null}',
        '{"index": true, "digest": "1", "error_type": null}',
        '{"index": 1, "digest": "0", "error_type": null}',
        '{"index": 1, "digest": 5, "error_type": null}',
        '{"index": 1e3, "digest": "1", "error_type": null}',
        '{"index": 987654321987, "digest": "1", "error_type": null}',
        "\0\0\0",
        "twice",
    ],
)
def test_a_line_that_no_job_has_written_is_refused(line: str, lm: AsyncLM, folder: Path) -> None:
    job(folder, limit=2).run_sync(lm)
    path = folder / "out.jsonl"
    path.write_bytes(
        path.read_bytes() * 2 if line == "twice" else path.read_bytes() + line.encode() + b"\n"
    )
    with pytest.raises(JobRefused, match=r"line 3 of|row 987654321987|has row . twice"):
        job(folder).run_sync(lm)


@pytest.mark.parametrize(
    "described",
    [
        None,
        "",
        "{}",
        "[1]",
        '{"format": 1, "parts": {}}',
        '{"format": 3, "parts": [1]}',
        "\xff",
    ],
)
def test_a_damaged_description_is_refused_unless_nothing_was_written(
    described: str | None, lm: AsyncLM, folder: Path
) -> None:
    def describe() -> None:
        path = folder / "out.jsonl.job.json"
        path.unlink(missing_ok=True)
        if described is not None:
            path.write_text(described, encoding="latin-1")

    describe()
    assert job(folder, limit=2).run_sync(lm).done == 2
    describe()
    before = (folder / "out.jsonl").read_bytes()
    with pytest.raises(JobRefused, match=r"damaged|not of this version|not written by a job"):
        job(folder).run_sync(lm)
    assert (folder / "out.jsonl").read_bytes() == before
    assert job(folder, overwrite=True).run_sync(lm).done == 12


def test_the_input_is_no_output(lm: AsyncLM, folder: Path) -> None:
    before = (folder / "in.jsonl").read_bytes()
    (folder / "link.jsonl").symlink_to(folder / "in.jsonl")
    os.link(folder / "in.jsonl", folder / "hard.jsonl")
    os.link(folder / "in.jsonl", folder / "out.csv.jsonl")
    os.mkfifo(folder / "fifo.jsonl")
    for name in ("folder.jsonl", "folder.csv", "other.csv.jsonl"):
        (folder / name).mkdir()
    for name, said in {
        **dict.fromkeys(("in.jsonl", "link.jsonl", "hard.jsonl", "out.csv"), "is the input"),
        **dict.fromkeys(("folder.jsonl", "folder.csv", "other.csv", "fifo.jsonl"), "is no file"),
        **dict.fromkeys((".", "out", "out.xlsx"), "another suffix"),
        "none/out.jsonl": "no directory",
        **dict.fromkeys(("x" * 300, "\ud800", "\0"), "output must be a path that a file can have"),
    }.items():
        with pytest.raises(InvalidRequest, match=said):
            Job(
                folder / "in.jsonl", folder / name, prompt_template="{text}", overwrite=True
            ).run_sync(lm)
    assert (folder / "in.jsonl").read_bytes() == before
    with pytest.raises(InvalidRequest, match="input must be a path that a file can have"):
        Job("~nobody-has-this-home/rows.jsonl", folder / "out.jsonl", prompt_template="{text}")


@pytest.mark.parametrize("wrong", ["column", "line"])
def test_what_is_refused_is_refused_before_anything_is_overwritten(
    wrong: str, lm: AsyncLM, folder: Path, scripted: Scripted
) -> None:
    scripted.errors = {3: TimedOut("too late")}
    job(folder).run_sync(lm)
    before = (folder / "out.jsonl").read_bytes()
    if wrong == "line":
        write_rows(folder / "in.jsonl", [*ROWS, {}])
        with (folder / "in.jsonl").open("a") as file:
            file.write("no row\n")
    template = "{absent}" if wrong == "column" else "say {text}"
    for options in ({"overwrite": True}, {"retry_errors": True}):
        with pytest.raises((InvalidRequest, JobRefused)):
            job(folder, **options, prompt_template=template).run_sync(lm)
        assert (folder / "out.jsonl").read_bytes() == before


async def test_a_run_runs_once(lm: AsyncLM, folder: Path) -> None:
    with job(folder).begin() as running:
        assert (await running.run(lm)).complete
        with pytest.raises(InvalidRequest, match="begin another"):
            await running.run(lm)
    closed = job(folder, overwrite=True).begin()
    closed.close()
    with pytest.raises(InvalidRequest, match="begin another"):
        await closed.run(lm)


def test_an_output_behind_a_link_stays_behind_it(lm: AsyncLM, folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "out.jsonl").symlink_to(folder / "elsewhere" / "out.jsonl")
    job(folder, limit=2).run_sync(lm)
    assert job(folder).run_sync(lm).skipped == 2
    assert (folder / "out.jsonl").is_symlink()
    assert len((folder / "elsewhere" / "out.jsonl").read_text().splitlines()) == 12


async def test_two_jobs_do_not_write_one_output(lm: AsyncLM, folder: Path) -> None:
    with job(folder).begin():
        with pytest.raises(JobRefused, match="another job"):
            await job(folder).run(lm)
        with pytest.raises(JobRefused, match="another job"):
            await job(folder, overwrite=True).run(lm)
    assert (await job(folder).run(lm)).complete


def test_a_disk_that_is_full_leaves_whole_lines_and_the_job_goes_on_later(
    lm: AsyncLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(folder).run_sync(lm)
    whole = lines_of(folder)
    (folder / "out.jsonl").write_bytes(b"")
    room = [1000]

    class Full:
        """A file on a disk that has little room: a write takes a part, and the next one fails."""

        def __init__(self, file: Any) -> None:
            self.file = file
            self.fileno, self.close = file.fileno, file.close

        def write(self, data: bytes) -> int:
            if not room[0]:
                raise OSError(28, "No space left on device")
            taken = min(room[0], len(data))
            room[0] -= taken
            return int(self.file.write(data[:taken]))

    original = Journal.start

    def start(journal: Journal) -> None:
        original(journal)
        journal._file = Full(journal._file)  # type: ignore[assignment]

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "start", start)
        with pytest.raises(OutputFailed, match="No space left"):
            job(folder).run_sync(lm)
    had = lines_of(folder)
    assert 0 < len(had) < 12
    assert job(folder).run_sync(lm).skipped == len(had)
    assert lines_of(folder) == whole


# -- tables -------------------------------------------------------------------------------------

TABLES = ["out.csv", "out.tsv", "out.parquet"]


def table_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table; ``input.text`` and the numbers of tokens, as a job reads them."""
    return [row.columns for row in read_rows(folder / name)]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_lines_in_the_order_of_the_rows(
    name: str, lm: AsyncLM, folder: Path, scripted: Scripted
) -> None:
    scripted.errors = {3: EngineFailed('broken,\n"')}
    job(folder).run_sync(lm)
    assert job(folder, output=name, concurrency=5).run_sync(lm).left == 0
    table, lines = table_of(folder, name), lines_of(folder)
    own = name == "out.parquet"  # other formats have texts only
    for line, row in zip(lines, table, strict=True):
        fields = {field: value for field, value in line.items() if field not in ("digest", "input")}
        text, number = line["input"].values()
        wanted = {"input.text": text, "number": number, **fields}
        if not own:
            wanted = {
                field: ""
                if value is None
                else value
                if isinstance(value, str)
                else json.dumps(value)
                for field, value in wanted.items()
            }
        assert row == wanted
    assert [row["error"] for row in table if row["error"]] == ['broken,\n"']
    names = [name, f"{name}.jsonl", f"{name}.jsonl.job.json"]
    assert sorted(os.listdir(folder)) == sorted(
        ["in.jsonl", "out.jsonl", "out.jsonl.job.json", *names]
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_table_comes_with_the_last_row_and_after_every_run(
    name: str, lm: AsyncLM, folder: Path, scripted: Scripted
) -> None:
    """A job ends after each number of rows; the rows are asked once."""
    job(folder).run_sync(lm)
    texts = [line["text"] for line in lines_of(folder)]
    path, lines = folder / name, folder / f"{name}.jsonl"
    job(folder, output=name).run_sync(lm)
    whole = lines.read_bytes()
    ends = [place for place, byte in enumerate(whole, 1) if byte == ord("\n")]
    for size in (0, ends[0] - 1, ends[0], ends[5] + 9, ends[10], ends[11]):
        lines.write_bytes(whole[:size])
        path.unlink(missing_ok=True)
        (folder / f".{name}.partial").write_bytes(b"of a kill while the table was written")
        scripted.asked.clear()
        report = job(folder, output=name).run_sync(lm)
        assert (report.complete, len(scripted.asked)) == (True, 12 - whole[:size].count(b"\n"))
        assert [row["text"] for row in table_of(folder, name)] == texts
        assert not list(folder.glob(".*"))
    path.unlink()
    with job(folder, output=name).begin():  # nothing is left to do
        pass
    assert len(table_of(folder, name)) == 12
    write_rows(folder / "in.jsonl", rows(15))
    assert job(folder, output=name).run_sync(lm).done == 3
    assert [row["number"] for row in table_of(folder, name)][-1] in (14, "14")


async def test_a_table_is_only_written_when_it_is_complete(
    lm: AsyncLM, folder: Path, scripted: Scripted
) -> None:
    path = folder / "out.csv"
    scripted.errors = dict.fromkeys(range(4, 12), EngineFailed("broken"))
    options: dict[str, Any] = {"output": "out.csv", "concurrency": 1}
    report = await job(folder, **options, max_consecutive_failures=3).run(lm)
    assert report.left == 5
    assert not path.exists()
    scripted.errors = {}
    assert (await job(folder, **options, retry_errors=True).run(lm)).complete
    complete = path.read_bytes()
    with pytest.raises(JobRefused, match="another max_tokens"):
        await job(folder, **options, max_tokens=5).run(lm)
    assert path.read_bytes() == complete
    with job(folder, **options, overwrite=True).begin():
        assert not path.exists()  # its lines are gone
    assert not path.exists()


@pytest.mark.parametrize("lacks", ["out.csv.jsonl", "out.csv.jsonl.job.json"])
def test_a_table_that_no_job_has_written_is_refused(lacks: str, lm: AsyncLM, folder: Path) -> None:
    job(folder, output="out.csv").run_sync(lm)
    (folder / lacks).unlink()
    (folder / "out.csv").write_text("mine")
    with pytest.raises(JobRefused, match=f"out.csv was not written by a job.* no {lacks}:"):
        job(folder, output="out.csv").run_sync(lm)
    assert (folder / "out.csv").read_text() == "mine"
    assert job(folder, output="out.csv", overwrite=True).run_sync(lm).complete
    assert len(table_of(folder, "out.csv")) == 12


def test_a_table_that_cannot_be_written_leaves_the_lines(
    lm: AsyncLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journal, "write_table", full)
        with pytest.raises(OutputFailed, match=r"out\.csv cannot be written: No space left"):
            job(folder, output="out.csv").run_sync(lm)
    assert sorted(os.listdir(folder)) == ["in.jsonl", "out.csv.jsonl", "out.csv.jsonl.job.json"]
    assert job(folder, output="out.csv").run_sync(lm).skipped == 12
    assert len(table_of(folder, "out.csv")) == 12


@pytest.mark.parametrize("source", ["in.csv", "in.tsv", "in.parquet"])
def test_a_table_may_be_the_input(source: str, lm: AsyncLM, folder: Path) -> None:
    given: dict[str, Any] = {"prompt_template": "say {text}", "max_tokens": 6}
    job(folder).run_sync(lm)
    table = pandas.DataFrame(ROWS)
    if source == "in.parquet":
        table.to_parquet(folder / source)
    else:
        table.to_csv(folder / source, sep="\t" if source == "in.tsv" else ";", index=False)
    delimiter = ";" if source == "in.csv" else ","
    for limit in (5, None):
        for output in ("two.jsonl", "two.parquet"):
            again = Job(folder / source, folder / output, delimiter=delimiter, limit=limit, **given)
            assert again.run_sync(lm).complete
    texts = [line["text"] for line in lines_of(folder)]
    assert [*pandas.read_parquet(folder / "two.parquet")["text"]] == texts


def test_another_delimiter_than_the_files_is_told_with_the_columns(
    lm: AsyncLM, folder: Path
) -> None:
    (folder / "in.csv").write_text("text;number\na;1\n")
    with pytest.raises(UnknownColumn, match="'text': there are 'text;number'"):
        Job(folder / "in.csv", folder / "out.csv", prompt_template="{text}").run_sync(lm)
    assert os.listdir(folder).count("out.csv") == 0


# -- failures -----------------------------------------------------------------------------------


def test_rows_with_errors_are_asked_again_if_that_is_wanted(
    lm: AsyncLM, folder: Path, scripted: Scripted
) -> None:
    scripted.errors = {3: TimedOut("too late"), 5: EngineFailed("broken")}
    job(folder).run_sync(lm)
    scripted.errors.clear()
    scripted.asked.clear()
    report = job(folder, retry_errors=True).run_sync(lm)
    assert {*scripted.asked} == {3, 5}
    assert report.complete
    assert [line["index"] for line in lines_of(folder)] == list(range(12))
    assert not any(line["error"] for line in lines_of(folder))
    assert not list(folder.glob(".*"))


def test_what_was_drawn_until_a_timeout_is_written(
    lm: AsyncLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = Completion("drawn", (1, 2), (1,), (), (), "abort", None, 0.0, 0.0)

    async def ask(asked: Any, number: int, item: Any) -> Failed:
        return Failed(TimedOut("too late"), partial)

    monkeypatch.setattr(many.ItemRunner, "run", ask)
    job(folder, timeout=1, limit=1).run_sync(lm)
    [line] = lines_of(folder)
    assert (line["text"], line["finish_reason"], line["truncated"]) == ("drawn", "abort", True)
    assert (line["completion_tokens"], line["error_type"]) == (2, "TimedOut")


def test_a_row_that_failed_may_be_mended(lm: AsyncLM, folder: Path) -> None:
    write_rows(folder / "in.jsonl", [ROWS[0], {"text": "a" * 99}, {"number": 3}, ROWS[3]])
    report = job(folder).run_sync(lm)
    assert report.failed == {"ContextTooLong": 1, "UnknownColumn": 1}
    write_rows(folder / "in.jsonl", [ROWS[0], ROWS[1], ROWS[2], ROWS[3]])
    with pytest.raises(JobRefused, match=r"row 1 .* may be mended, .* --retry-errors"):
        job(folder).run_sync(lm)
    assert job(folder, retry_errors=True).run_sync(lm).complete


BROKEN = EngineFailed("broken SECRET")
FAILURES: list[tuple[dict[int, Exception], dict[str, Any], list[int], str | None]] = [
    # The errors by row, the options, the failed rows, and why the run stops.
    (
        {3: TimedOut("too late"), 5: BROKEN, 7: ZeroDivisionError()},
        {"concurrency": 1},
        [3, 5, 7],
        None,
    ),
    (dict.fromkeys(range(4, 12), BROKEN), {"concurrency": 1}, [4, 5, 6], "with EngineFailed: "),
    (dict.fromkeys(range(12), BROKEN), {"concurrency": 12}, [0, 1, 2], "3 rows failed one after"),
    (dict.fromkeys((0, 1, 3, 4, 6, 11), BROKEN), {"concurrency": 1}, [0, 1, 3, 4, 6, 11], None),
    (dict.fromkeys(range(12), BROKEN), {"max_consecutive_failures": 0}, [*range(12)], None),
    (
        dict.fromkeys(range(12), UnknownAdapter("it was removed")),
        {"concurrency": 1},
        [0, 1, 2],
        "with UnknownAdapter: ",
    ),
]


@pytest.mark.parametrize(("errors", "options", "failed", "stopped"), FAILURES)
def test_rows_fail_alone_or_stop_the_job_and_are_asked_again(
    errors: dict[int, Exception],
    options: dict[str, Any],
    failed: list[int],
    stopped: str | None,
    lm: AsyncLM,
    folder: Path,
    scripted: Scripted,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scripted.errors = errors
    given = {"max_consecutive_failures": 3} | options
    report = job(folder, **given).run_sync(lm)
    lines = {line["index"]: line for line in lines_of(folder)}
    for index in failed:
        assert lines[index]["error_type"] == type(errors[index]).__name__
        assert lines[index]["error"] == str(errors[index])
        assert lines[index]["text"] is lines[index]["truncated"] is None
        assert lines[index]["input"] == ROWS[index]
    assert report.failed == Counter(type(errors[index]).__name__ for index in failed)
    assert (report.done, report.complete) == (len(lines) - len(failed), False)
    assert report.left == 12 - len(lines)
    assert caplog.text.count(" failed with ") == len(failed)
    assert "SECRET" not in caplog.text
    assert (stopped or "") in (report.stopped or "")
    assert (report.stopped is None) == (stopped is None)
    table = dict(line.rsplit(maxsplit=1) for line in str(report).splitlines()[:-1])
    table = {name.strip(): value for name, value in table.items()}
    assert (table["rows"], table["failed"]) == ("12", str(len(failed)))
    assert {"truncated", "invalid", "tokens per second", "not asked", *report.failed} <= {*table}
    scripted.errors = {}
    again = job(folder).run_sync(lm)
    assert (again.skipped, again.failed_before) == (len(lines), len(failed))
    assert job(folder, retry_errors=True).run_sync(lm).complete


@pytest.mark.parametrize("most", [0, 3])
def test_rows_that_are_wrong_themselves_stop_nothing(
    most: int, lm: AsyncLM, tmp_path: Path
) -> None:
    refused = [{"text": "NO TOKENS"}] * 12  # for capital letters
    wrong = [{"text": "a" * 99}] * 6 + [{"other": "a"}] * 6
    write_rows(tmp_path / "in.jsonl", [*refused, *wrong, ROWS[0]])
    report = job(tmp_path, max_consecutive_failures=most).run_sync(lm)
    assert (report.done, report.stopped) == (1, None)
    assert report.failed == {"InvalidRequest": 12, "ContextTooLong": 6, "UnknownColumn": 6}


@pytest.mark.parametrize(
    ("options", "said"),
    [({"regex": "a"}, "end token|this"), ({"max_tokens": 64}, "leaves no room for a prompt")],
)
def test_what_no_row_can_have_ends_the_job_before_its_first_row(
    options: dict[str, Any], said: str, folder: Path
) -> None:
    model = NGram.random(VOCABULARY, order=1, seed=1)  # it has no end token
    with (
        genrt.load(model, engine="exact", engine_options={"max_model_len": 64}) as lm,
        pytest.raises(InvalidRequest, match=said),
    ):
        job(folder, **options).run_sync(lm)
    assert not (folder / "out.jsonl").exists() or lines_of(folder) == []


def test_a_runtime_that_is_closed_ends_the_job(lm: AsyncLM, folder: Path) -> None:
    job(folder, limit=4).run_sync(lm)
    lm.close()
    with pytest.raises(Closed):
        job(folder).run_sync(lm)
    assert len(lines_of(folder)) == 4


# -- schemas ------------------------------------------------------------------------------------


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact engine may have no structures; what becomes of texts does not depend on it."""

    async def batch_generate(lm: AsyncLM, prompts: Any, **options: Any) -> list[Completion]:
        return []

    monkeypatch.setattr(AsyncLM, "batch_generate", batch_generate)


def test_texts_are_judged_by_the_schema(
    lm: AsyncLM, folder: Path, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    texts = ['{"a": 1}', '{"a": "1"}', '{"a": ', '{"a": NaN}', "[" * 9999, "1e999"]
    scripted.texts = dict(enumerate(texts))
    report = job(folder, json_schema=INTEGER, limit=7).run_sync(lm)
    judged = [(line["output"], line["valid"]) for line in lines_of(folder)]
    assert judged[:3] == [({"a": 1}, True), (None, False), (None, False)]
    assert judged[3:6] == [(None, False)] * 3
    faults = [line["fault"] for line in lines_of(folder)]
    assert faults[0] is None
    assert faults[1] == "a: type ($.a: '1' is not of type 'integer')"
    assert report.invalid["a: type"] == 1
    assert sum(report.invalid.values()) == 5 + (not lines_of(folder)[6]["truncated"])
    assert report.complete
    assert "a: type " in str(report)


def test_invalid_texts_are_drawn_again_with_other_seeds(
    lm: AsyncLM, folder: Path, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    again = 2**40
    scripted.texts = {index + again * time: "no" for index in range(12) for time in range(3)}
    scripted.texts |= {0: '{"a": 1}', 1 + again: '{"a": 2}', 2 + 2 * again: '{"a": 3}'}
    report = job(folder, json_schema=INTEGER, num_retries_invalid=2, concurrency=2).run_sync(lm)
    lines = lines_of(folder)
    assert [line["output"] for line in lines[:4]] == [{"a": 1}, {"a": 2}, {"a": 3}, None]
    assert [line["seed"] for line in lines[:4]] == [0, 1 + again, 2 + 2 * again, 3 + 2 * again]
    assert (report.done, sum(report.invalid.values())) == (12, 9)
    assert len(scripted.asked) == 1 + 2 + 3 + 9 * 3
    assert report.completion_tokens == 2 * len(scripted.asked)


class City(pydantic.BaseModel):
    name: str


def length(text: str) -> int:
    if text == "no":
        raise ValueError("it says no")
    return len(text)


def test_values_of_texts_are_written(lm: AsyncLM, folder: Path, scripted: Scripted) -> None:
    scripted.texts = {0: "no", 1: "some"}
    report = job(folder, validate=length, limit=2).run_sync(lm)
    lines = lines_of(folder)
    assert [(line["output"], line["valid"]) for line in lines] == [(None, False), (4, True)]
    assert lines[0]["fault"] == "ValueError (it says no)"
    assert report.invalid == {"ValueError": 1}
    assert job(folder, validate=length, limit=2).run_sync(lm).skipped == 2
    with pytest.raises(JobRefused, match="another validate:"):
        job(folder, validate=lambda text: True).run_sync(lm)
    city = job(folder, validate=City, limit=1, overwrite=True)
    scripted.texts = {0: '{"name": "Paris"}'}
    city.run_sync(lm)
    assert lines_of(folder)[0]["output"] == {"name": "Paris"}
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        job(folder, validate=lambda text: object(), overwrite=True).run_sync(lm)
    assert lines_of(folder) == []


# -- heartbeat and logs -------------------------------------------------------------------------


async def test_a_heartbeat_tells_how_far_the_job_is(
    lm: AsyncLM, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AsyncLM.generate

    async def generate(lm: AsyncLM, *args: Any, **options: Any) -> Completion:
        for _ in range(100):  # passes of the loop: the beat comes with one of the first
            await asyncio.sleep(0)
        return await original(lm, *args, **options)

    monkeypatch.setattr(AsyncLM, "generate", generate)
    monkeypatch.setattr(jobs, "BEAT_SECONDS", 1e-9)
    with caplog.at_level("INFO", "genrt.generation"):
        await job(folder, limit=1).run(lm)
    assert "out.jsonl: 0 of 1 rows, 0 failed" in caplog.records[0].getMessage()
    assert "0:00:00 elapsed, unknown left" in caplog.records[0].getMessage()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    report = JobReport(rows=100, skipped=40, done=10, failed=Counter(a=5), seconds=30.0)
    assert report.progress == "50 of 100 rows, 5 failed, 0 tokens/s, 0:00:30 elapsed, 0:01:30 left"


def test_the_estimate_follows_the_clock(
    lm: AsyncLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row takes a second of this clock."""
    job(folder, limit=2).run_sync(lm)
    clock, said = [100.0], list[str]()
    monkeypatch.setattr(jobs, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    original = JobRun._settle

    def settle(run: JobRun, *args: Any) -> None:
        clock[0] += 1
        original(run, *args)
        said.append(run.report().progress)

    monkeypatch.setattr(JobRun, "_settle", settle)
    report = job(folder, concurrency=1).run_sync(lm)
    assert report.seconds == 10
    for number, line in enumerate(said, 1):
        assert line.startswith(f"{number + 2} of 12 rows, 0 failed")
        assert line.endswith(f"0:00:{number:02} elapsed, 0:00:{10 - number:02} left")


def test_a_bar_counts_the_rows_of_this_run(
    lm: AsyncLM, folder: Path, scripted: Scripted, capfd: pytest.CaptureFixture[str]
) -> None:
    scripted.errors = {5: EngineFailed("broken")}
    job(folder, limit=2).run_sync(lm)
    assert capfd.readouterr() == ("", "")
    job(folder).run_sync(lm, progress=True)
    out, err = capfd.readouterr()
    last = err.rstrip().rsplit("\r", 1)[-1]
    assert out == ""
    assert "rows: 100%" in last
    assert "10/10" in last
    assert "failed=1" in last
    with job(folder).begin() as running:
        with pytest.raises(InvalidRequest, match="progress"):
            running.run_sync(lm, progress=2)  # type: ignore[arg-type]
        assert running.run_sync(lm).skipped == 12


# -- arguments ----------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused(folder: Path) -> None:
    for wrong in (
        {"messages_column": "m", "prompt_template": "{text}"},
        {"num_retries_invalid": 1},
        {"num_retries_invalid": 1, "json_schema": INTEGER, "temperature": 0},
        {"json_schema": INTEGER, "regex": "a"},
        {"json_schema": {"type": "nothing"}},
        {"json_schema": "{"},
        {"unknown": 1},
        {"min_tokens": 7},
        {"regex": "("},
        {"grammar": "no grammar"},
        {"output": folder / "out.xlsx"},
        {"delimiter": ";"},
    ):
        given: dict[str, Any] = {"prompt_template": "{text}", "max_tokens": 6} | wrong
        with pytest.raises(InvalidRequest):
            Job(folder / "in.jsonl", given.pop("output", folder / "out.jsonl"), **given)


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        ({"prompt": "a", "other": 1}, "{prompt}"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"messages": "[]", "text": "a"}, "messages"),
        ({"text": "a"}, None),
        ({"prompt": "a", "messages": []}, None),
        (None, None),
    ],
)
def test_a_column_named_prompt_or_messages_is_what_is_asked(
    columns: dict[str, Any] | None, chosen: str | None, tmp_path: Path
) -> None:
    write_rows(tmp_path / "in.jsonl", [] if columns is None else [columns])
    if chosen is None:
        with pytest.raises(InvalidRequest, match=r"--prompt-template .* the rows have "):
            Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        return
    with Job(tmp_path / "in.jsonl", tmp_path / "out.jsonl").begin():
        parts = json.loads((tmp_path / "out.jsonl.job.json").read_bytes())["parts"]
    wanted = ("messages_column", "prompt_template")["{" in chosen]
    assert parts[wanted] == journal.describe({wanted: chosen})[wanted]


def test_a_checkpoint_is_known_by_where_its_tokenizer_is_from(llama: Path, folder: Path) -> None:
    with genrt.load(llama, engine="transformers") as lm:
        job(folder, limit=1).run_sync(lm)
    parts = json.loads((folder / "out.jsonl.job.json").read_bytes())["parts"]
    assert parts["model"] == journal.directory_digest(llama)
    with job(folder).begin(str(llama)):
        pass
    with pytest.raises(JobRefused, match="another model"):
        job(folder).begin("another/model")


# -- new weights ----------------------------------------------------------------------------------

OTHER = {"table": NGram.random([*VOCABULARY, b""], order=1, seed=2).table}


def test_a_job_is_not_resumed_with_other_weights(folder: Path) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        job(folder, limit=3).run_sync(lm)
        lm.update_weights_sync(OTHER)
        before = (folder / "out.jsonl").read_bytes()
        with pytest.raises(JobRefused, match=r"another weights_version \(was 0, is 1\)"):
            job(folder).run_sync(lm)
        assert (folder / "out.jsonl").read_bytes() == before
        with (
            job(folder).begin() as begun,
            pytest.raises(JobRefused, match=r"has new weights, and .* was made before"),
        ):
            begun.run_sync(lm)
        assert job(folder, overwrite=True).run_sync(lm).complete


def test_weights_of_another_runtime_may_be_others(folder: Path) -> None:
    def run(**options: Any) -> Any:
        with genrt.load(MODEL, engine="exact") as lm:
            lm.update_weights_sync(OTHER)
            job(folder, limit=3, **options).run_sync(lm)
            return job(folder, limit=4, **options).run_sync(lm)

    assert run().skipped == 3  # in one runtime the version tells
    with pytest.raises(JobRefused, match="another runtime"):
        run()
    for name in ("one", "copy", "other"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(name[-3:].encode())
    (folder / "copy" / "model.safetensors").write_bytes(b"one")
    assert run(model=folder / "one", overwrite=True).done == 4
    assert run(model=folder / "copy").skipped == 4
    with pytest.raises(JobRefused, match="another model"):
        run(model=folder / "other")


@pytest.mark.parametrize("what", ["weights", "adapter"])
async def test_texts_by_what_came_meanwhile_are_not_written(
    what: str, lm: AsyncLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, other = AsyncLM.generate, write_adapter(folder / "other", 6)
    await lm.add_adapter("a", write_adapter(folder / "one", 5))

    async def replacing(lm: AsyncLM, prompt: Any, **options: Any) -> Completion:
        if options["seed"] == 3 and options["max_tokens"] > 1:
            await (lm.update_weights(OTHER) if what == "weights" else lm.add_adapter("a", other))
        return await generate(lm, prompt, **options)

    monkeypatch.setattr(AsyncLM, "generate", replacing)
    adapter = None if what == "weights" else "a"
    with pytest.raises(JobRefused, match=r"has (new weights|another adapter 'a')"):
        await job(folder, concurrency=1, adapter=adapter).run(lm)
    # The text before the change may end together with it, and is then drawn again by the next run.
    assert [line["index"] for line in lines_of(folder)] in ([0, 1], [0, 1, 2])
