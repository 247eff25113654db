"""``genrt serve``: what it refuses before it loads anything, and a server in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from genrt.__main__ import main
from genrt.cluster.health import ReplicaLimits
from genrt.errors import Closed
from genrt.server import command

KEY = "open-sesame-42"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "give an api_key"),
        (["--api-key", "short"], "8 characters"),
        (["--max-requests", "0"], "requests must be at least 1"),
        (["--adapter", "style"], "NAME=DIRECTORY"),
        (["--adapter", "style=a", "--adapter", "style=b"], "'style' is given twice"),
        (["--port", "65536"], "port must be"),
        (["--port", "-1"], "port must be"),
        (["--shutdown-seconds", "nan"], "shutdown_seconds must be"),
        (["--shutdown-seconds", "-1"], "shutdown_seconds must be"),
        (["--seed", "-1"], "seed must be"),
        (["--max-body-seconds", "inf"], "body_seconds must be"),
        (["--", "--port", "1"], "give --port before --"),
        (["--engine", "transformers", "--", "--max-num-seqs", "3"], "the engine is transformers"),
        (["--replicas", "0"], "replicas must be from 1"),
        (["--replicas", "2", "--trainers"], "leave out --replicas"),
        (["--cluster", "auto"], "say how many with --replicas N"),
        (["--replica-limits", "{}"], "say how many with --replicas N"),
        (["--replicas", "2", "--cluster", ""], "cluster must be"),
        (["--replicas", "2", "--replica-limits", "{"], "--replica-limits is not JSON"),
        (["--replicas", "2", "--replica-limits", "[1]"], "must be a JSON object"),
        (
            ["--replicas", "2", "--replica-limits", '{"patience": 1}'],
            "has no 'patience': there are",
        ),
        (["--replicas", "2", "--replica-limits", '{"most_silent": 0}'], "most_silent must be"),
    ],
)
def test_wrong_arguments_are_told_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no/such/model", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--no-such"], ["--port", "x"], ["a", "b"]])
def test_unknown_arguments_end_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_model_is_served_until_it_is_told_to_end(llama: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "genrt", "serve", str(llama), "--engine", "transformers"]
    command += ["--port", "0", "--name", "tiny"]
    environment = os.environ | {"GENRT_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line + process.communicate()[1]
            asked = {"prompts": [[5, 6]], "top": 2}
            path = f"{found[0]}/v1/next_token_logprobs"
            assert httpx.post(path, json=asked).status_code == 401
            headers = {"authorization": f"Bearer {KEY}"}
            answer = httpx.post(path, json=asked, headers=headers, timeout=60)
            assert len(answer.json()["data"][0]["token_ids"]) == 2
            process.send_signal(end)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "genrt: closing\n"), errors
    assert KEY not in line + output + errors
    assert "Traceback" not in errors


def test_replicas_are_loaded_as_the_arguments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[dict[str, Any]] = []

    def load(model: str, **options: Any) -> None:
        loaded.append(options)
        raise Closed("no more than this")

    monkeypatch.setattr(command, "load", load)
    limits = ["--replica-limits", '{"most_restarts": 1, "stall_seconds": 60}']
    for arguments in ([], ["--replicas", "3", "--cluster", "local", *limits]):
        assert main(["serve", "a/model", *arguments]) == 1
    names = ("replicas", "cluster", "replica_limits")
    assert [loaded[0][each] for each in names] == [None] * 3
    found = ReplicaLimits(most_restarts=1, stall_seconds=60)
    assert [loaded[1][each] for each in names] == [3, "local", found]


@pytest.mark.proof
def test_a_model_is_served_over_replicas(llama: Path) -> None:
    command = [sys.executable, "-m", "genrt", "serve", str(llama), "--engine", "transformers"]
    command += ["--port", "0", "--replicas", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            assert "OpenAI" not in line
            draws = httpx.post(f"{found[0]}/v1/draw", json={"prompts": [[5, 6]]}, timeout=60)
            assert len(draws.json()["data"]) == 1
            status = httpx.get(f"{found[0]}/v1/status", timeout=60).json()
            assert len(status["statistics"]["replicas"]) == 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
