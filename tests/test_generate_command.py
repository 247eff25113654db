"""generate.py: ``genrt generate`` from its arguments to its exit code, on the exact engine."""

from __future__ import annotations

import asyncio
import csv
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt import loading
from genrt.__main__ import main
from genrt.engines.adapters import least_lora_rank
from genrt.errors import EngineFailed, InvalidRequest
from genrt.generate import OPTIONS
from genrt.generation.jobs import Job
from genrt.lm import AsyncLM
from tests.generation.job_cases import MODEL, job, lines_of, rows, write_adapter, write_rows

ROWS = rows(6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rows and a model."""
    write_rows(tmp_path / "in.jsonl", ROWS)
    MODEL.save(tmp_path / "model")
    return tmp_path


def generate(folder: Path, *arguments: str, template: str | None = "say {text}") -> int:
    """The exit code of the command over the files of the folder."""
    given = [] if template is None else ["--prompt-template", template]
    if not any(each.startswith("--max-tokens") for each in arguments):
        given += ["--max-tokens", "6"]
    exact = ["--engine", "exact", "--model", str(folder / "model")]
    files = [str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    return main(["generate", *files, *exact, *given, *arguments])


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the message."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("genrt generate: ")
    return err


def test_rows_become_lines_and_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["rows", "6"]
    assert "loading" in err
    with genrt.load(MODEL, engine="exact") as lm:
        texts = [
            lm.generate_sync(f"say {row['text']}", max_tokens=6, seed=index).text
            for index, row in enumerate(ROWS)
        ]
        assert [line["text"] for line in lines_of(folder)] == texts
        assert job(folder).run_sync(lm).skipped == 6  # what the command wrote, Python goes on with


def test_a_second_run_opens_no_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate(folder) == 0
    monkeypatch.delattr(loading, "load")
    monkeypatch.setattr(genrt, "load", None, raising=False)
    capsys.readouterr()
    assert generate(folder) == 0
    out, err = capsys.readouterr()
    assert ["finished", "before", "6"] in map(str.split, out.splitlines())
    assert err == ""


def test_a_job_goes_on_with_another_number_of_replicas(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load(*arguments: Any, **options: Any) -> AsyncLM:
        loaded.append([options.pop(each) for each in ("replicas", "cluster")])
        return loading.load(*arguments, **options)

    monkeypatch.setattr(genrt, "load", load, raising=False)
    assert generate(folder, "--limit", "2") == 0
    assert generate(folder, "--replicas", "2", "--cluster", "10.0.0.1:6379") == 0
    assert len(lines_of(folder)) == 6
    assert loaded == [[None, None], [2, "10.0.0.1:6379"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens", "5"], "another max_tokens (was 6, is 5)"),
        (["--temperature", "0.5"], "another temperature"),
        (["--prompt-template", "tell {text}"], "another prompt_template"),
        (["--engine-options", '{"max_model_len": 50}'], "another model_options"),
        (["--prompt-template", "{absent}", "--overwrite"], "no column 'absent'"),
        (["--prompt-template", "{text", "--overwrite"], "the template has {"),
        (["--seed", "-1"], "seed"),
        (["--options", '{"min_tokens": -1}'], "min_tokens"),
        (["--options", '{"min_token": 1}'], "did you mean min_tokens?"),
        (["--options", '{"logit_bias": {"a": 1}}'], "must map token ids"),
        (["--engine", "other"], "engine must be one of"),
        (["--limit", "0"], "limit"),
        (["--replicas", "0"], "replicas must be from 1"),
        (["--cluster", "auto"], "say how many with replicas=…"),
        (["--regex", "("], "regex: "),
        (["--grammar", "start: ("], "grammar: "),
        (["--schema", "SCHEMA"], "json_schema: "),
    ],
)
def test_what_is_refused_opens_no_model_and_changes_nothing(
    arguments: list[str],
    said: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "schema").write_text('{"type": "integer", "minimum": 2, "maximum": 1}')
    arguments = [str(folder / "schema") if each == "SCHEMA" else each for each in arguments]
    assert generate(folder, "--limit", "2") == 0
    before = (folder / "out.jsonl").read_bytes()
    monkeypatch.setattr(genrt, "load", None, raising=False)
    capsys.readouterr()
    assert generate(folder, *arguments) == 2
    assert said in refusal(capsys)
    assert (folder / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--schema", "no/such/file"],
        ["--prompt-template", "@no/such/file"],
        ["--engine-options", "["],
        ["--engine-options", "[]"],
        ["--options", "[]"],
        ["--temperature", "hot"],
        ["--unknown"],
    ],
)
def test_arguments_that_cannot_be_read_end_with_code_2(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        generate(folder, *arguments)
    assert ended.value.code == 2
    assert not (folder / "out.jsonl").exists()


REACHED: list[tuple[list[str], Any]] = [
    *(([name], True) for name in ("overwrite", "chat", "retry-errors")),
    *(([name, "2"], 2) for name in ("limit", "top-k", "logprobs", "concurrency")),
    *(([name, "2"], 2) for name in ("max-consecutive-failures", "num-retries-invalid", "seed")),
    *(([name, "0.5"], 0.5) for name in ("top-p", "min-p", "timeout", "temperature")),
    *(([name, "a"], "a") for name in ("system-message", "messages-column", "regex", "grammar")),
    (["delimiter", ";"], ";"),
    *(([name, "a", "b"], ["a", "b"]) for name in ("choice", "keep-columns")),
    (["choice", "a", "--choice", "b"], ["a", "b"]),
    (["keep-columns"], []),
    (["stop", "a"], ["a"]),
    (["prompt-template", "@FOLDER/template"], "say\n{text}"),
    (["schema", "FOLDER/schema"], '{"type": "object"}'),
]


def test_every_option_reaches_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def init(job: Job, *args: Any, **options: Any) -> None:
        given.clear()
        given.update(options)
        raise InvalidRequest("made")

    monkeypatch.setattr(Job, "__init__", init)
    (folder / "template").write_text("say\n{text}")
    (folder / "schema").write_text('{"type": "object"}')
    options = set[str]()
    for (option, *values), value in REACHED:
        values = [each.replace("FOLDER", str(folder)) for each in values]
        assert generate(folder, f"--{option}", *values) == 2
        name = "json_schema" if option == "schema" else option.replace("-", "_")
        assert given[name] == value
        options.add(option)
    assert generate(folder, "--options", '{"ignore_eos": true, "logit_bias": {"3": 1.5}}') == 2
    assert (given["ignore_eos"], given["logit_bias"]) == (True, {3: 1.5})
    assert "temperature" not in given
    lines = [line.split() for line in OPTIONS.splitlines() if line[:1].islower()]
    names = {words[0] for words in lines if words[1:] and words[1].strip("+*").isupper()}
    names |= {words[0] for words in lines if words[1:2] == ["flag"]}
    names -= {"max-tokens", "model", "engine", "engine-options", "adapter", "options"}
    assert names == options


def test_texts_may_be_an_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, other = write_adapter(folder / "one", 5), write_adapter(folder / "other", 6)
    assert least_lora_rank(adapter, other) == 16  # for vLLM
    with pytest.raises(InvalidRequest, match="is not a LoRA adapter"):
        least_lora_rank(folder)
    assert generate(folder, "--adapter", str(adapter), "--limit", "3") == 0
    with genrt.load(MODEL, engine="exact") as lm:
        lm.add_adapter_sync("a", adapter)
        prompts = [f"say {row['text']}" for row in ROWS[:3]]
        texts = lm.batch_generate_sync(prompts, max_tokens=6, seed=0, adapter="a")
    assert [line["text"] for line in lines_of(folder)] == [each.text for each in texts]
    shutil.copytree(adapter, folder / "copy")
    assert generate(folder, "--adapter", str(folder / "copy"), "--limit", "4") == 0
    for changed in (["--adapter", str(other)], []):
        capsys.readouterr()
        assert generate(folder, *changed) == 2
        assert "another adapter" in refusal(capsys)
    capsys.readouterr()
    assert generate(folder, "--adapter", str(folder / "absent")) == 2
    assert "absent" in refusal(capsys)


def test_rows_that_fail_are_told_by_the_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder / "in.jsonl", [ROWS[0], {"text": "a" * 2000}])
    assert generate(folder) == 3
    out, err = capsys.readouterr()
    assert ["ContextTooLong", "1"] in map(str.split, out.splitlines())
    assert "row 1 failed with ContextTooLong\n" in err
    write_rows(folder / "in.jsonl", ROWS)
    assert generate(folder, "--retry-errors") == 0


def test_a_job_that_stops_is_told_by_the_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(lm: AsyncLM, *args: Any, **options: Any) -> Any:
        raise EngineFailed("broken")

    with monkeypatch.context() as patched:
        patched.setattr(AsyncLM, "generate", failing)
        assert generate(folder, "--max-consecutive-failures", "3") == 3
    assert "stopped: 3 rows failed one after another" in capsys.readouterr().out
    assert generate(folder) == 3
    assert generate(folder, "--retry-errors") == 0


def test_an_error_of_the_engine_ends_with_code_1_after_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise EngineFailed("no memory")

    monkeypatch.setattr(genrt, "load", load, raising=False)
    assert generate(folder) == 1
    out, err = capsys.readouterr()
    assert ["not", "asked", "6"] in map(str.split, out.splitlines())
    assert err.endswith("genrt generate: no memory\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_code_130_and_leaves_what_is_written(
    number: int, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AsyncLM.generate

    async def interrupted(lm: AsyncLM, *args: Any, **options: Any) -> Any:
        if options["seed"] == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            await asyncio.Event().wait()
        return await original(lm, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(AsyncLM, "generate", interrupted)
        assert generate(folder, "--concurrency", "1") == 130
    out, err = capsys.readouterr()
    assert "run it again to go on" in err
    assert ["rows", "6"] in map(str.split, out.splitlines())
    assert [line["index"] for line in lines_of(folder)] == [0, 1, 2]
    assert generate(folder) == 0


def test_loggers_and_signals_are_left_as_they_were(folder: Path) -> None:
    log = logging.getLogger("genrt")

    def state() -> Any:
        terminated = signal.getsignal(signal.SIGTERM)
        return log.level, [*log.handlers], terminated, csv.field_size_limit()

    before = state()
    (folder / "in.csv").write_text("text\n" + "a" * 200_000 + "\n")
    files = [str(folder / "in.csv"), str(folder / "out.jsonl")]
    exact = ["--engine", "exact", "--model", str(folder / "model")]
    assert main(["generate", *files, *exact, "--prompt-template", "{text}"]) == 3
    assert [line["error_type"] for line in lines_of(folder)] == ["ContextTooLong"]
    assert state() == before


def test_help_imports_neither_torch_nor_vllm() -> None:
    program = """
        import json, sys
        from genrt.__main__ import main
        try:
            main(["generate", "--help"])
        except SystemExit:
            print(json.dumps(sorted(sys.modules)))
    """
    code = "\n".join(line.removeprefix(" " * 8) for line in program.splitlines())
    root = Path(genrt.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    shown, modules = done.stdout.rsplit("\n", 2)[0], json.loads(done.stdout.splitlines()[-1])
    assert {"torch", "vllm", "numpy", "transformers"}.isdisjoint(modules)
    assert all(word in shown for word in ("INPUT", "--prompt-template", "--schema", "exit codes"))
