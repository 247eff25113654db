"""``genrt serve``: what it refuses before it loads anything, and a server in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import genrt
from genrt.__main__ import main
from genrt.engines.exact import NGram
from genrt.errors import Closed
from genrt.server import command

KEY = "open-sesame-42"

NOTHING = [
    *(["--ssl-keyfile", "key.pem"], ["--ssl-certfile", "cert.pem"], ["--ssl-ca-certs", "ca.pem"]),
    *(["--enable-ssl-refresh"], ["--headless"], ["--api-server-count", "2"], ["--uds", "socket"]),
    *(["--tool-parser-plugin", "parser.py"], ["--middleware", "a.b"], ["--grpc"]),
    *(["--uvicorn-log-level", "debug"], ["--h11-max-header-count", "9"]),
    *(["--enable-per-request-metrics"], ["--trust-request-mm-kwargs"]),
]
"""Options of ``vllm serve`` for its own server, or for what a runtime does not do."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "give an api_key"),
        (["--api-key", "short"], "8 characters"),
        (["--api-key", ""], "api_key is empty"),
        (["--host", "203.0.113.1", "--api-key", KEY], "cannot listen on 203.0.113.1:8000"),
        (["--max-requests", "0"], "requests must be at least 1"),
        (["--adapter", "style"], "NAME=DIRECTORY"),
        (["--adapter", "style=a", "--adapter", "style=b"], "'style' is given twice"),
        (["--adapter", "style=/no/such"], "/no/such is not a directory"),
        (["--max-connections", "0"], "connections must be at least 1"),
        *((["--", *each], f"does nothing with {each[0]}") for each in NOTHING),
        (["--", "--config", "no.yaml"], "no --config"),
        (["--", "--served-model-name", "x"], "give --name before --"),
        (["--", "--lora-modules", "a=b"], "give --adapter before --"),
        (["--", "--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (
            ["--", "--enable-auto-tool-choice", "--tool-call-parser", "x"],
            "invalid tool call parser",
        ),
        (["--", "--chat-template", "no.jinja"], "no.jinja"),
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
        (["--cluster", "auto"], "say how many with replicas=…"),
        (["--replicas", "2", "--cluster", ""], "cluster must be"),
    ],
)
def test_wrong_arguments_are_told_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no/such/model", *arguments]) == 2
    assert message in capsys.readouterr().err


@contextlib.contextmanager
def served(llama: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``genrt serve`` in a process of its own, with a key."""
    command = [sys.executable, "-m", "genrt", "serve", str(llama), "--engine", "transformers"]
    environment = os.environ | {"GENRT_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.match(r"genrt: serving \S+ on (http://127\.0\.0\.1:\d+),", line)
    assert found, line + process.communicate()[1]
    assert KEY not in line
    return found[1]


@pytest.mark.promise(number=35)
def test_a_model_is_served_until_it_is_told_to_end(llama: Path) -> None:
    """Its streams end with an error, and nothing is logged."""
    asked = {"prompt": [1], "particles": 64, "max_tokens": 400, "stream": True, "seed": 1}
    with (
        served(llama, "--name", "tiny", "--shutdown-seconds", "0.01") as process,
        httpx.Client(base_url=address_of(process), timeout=60) as http,
    ):
        row = {"prompts": [[5, 6]], "top": 2}
        assert http.post("/v1/next_token_logprobs", json=row).status_code == 401
        http.headers = httpx.Headers({"authorization": f"Bearer {KEY}"})
        answer = http.post("/v1/next_token_logprobs", json=row)
        assert len(answer.json()["data"][0]["token_ids"]) == 2
        with http.stream("POST", "/v1/infer", json=asked) as stream:
            lines = stream.iter_lines()
            while next(lines) != "event: step":
                pass
            process.send_signal(signal.SIGTERM)
            last = [each for each in lines if each]
        output, errors = process.communicate(timeout=60)
    assert last[-2] == "event: error"
    assert '"code": 503' in last[-1]
    assert (process.returncode, output) == (0, "genrt: closing\n"), errors
    assert KEY not in errors
    logged = [each for each in errors.splitlines() if each and "Loading weights" not in each]
    logged = [each for each in logged if " on engine " not in each]  # where the machine is slow
    assert logged == [f"genrt: loading {llama}"]


def test_an_interrupt_ends_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = genrt.load(NGram.random(5), engine="exact")
    monkeypatch.setattr(command, "load", lambda *_, **__: opened)
    waits = threading.Event.wait

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            printed.append(capsys.readouterr().out)
            if "serving" in printed[-1]:
                signal.raise_signal(signal.SIGINT)
        return waits(event, timeout)

    printed: list[str] = []
    monkeypatch.setattr(threading.Event, "wait", wait)
    assert main(["serve", "a/model", "--port", "0", "--engine", "transformers"]) == 0
    assert capsys.readouterr().out == "genrt: closing\n"
    assert sum("serving" in each for each in printed) == 1
    with pytest.raises(Closed):
        opened.next_token_logprobs_sync([1])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be loaded, and is not."""
    options: list[dict[str, Any]] = []

    def load(model: str, **given: Any) -> None:
        options.append(given)
        raise Closed("no more than this")

    monkeypatch.setattr(command, "load", load)
    return options


def test_adapters_are_looked_at_before_a_model_is_loaded(
    loaded: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rank in (("small", 4), ("large", 40), ("none", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").touch()
        config = {} if rank is None else {"r": rank}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    small, large, none = (f"{each}={tmp_path / each}" for each in ("small", "large", "none"))
    port = ["--port", "0"]
    assert main(["serve", "a/model", *port, "--adapter", small, "--adapter", large]) == 1
    assert main(["serve", "a/model", *port, "--adapter", small]) == 1
    assert [each["engine_options"] for each in loaded] == [
        {"enable_lora": True, "max_loras": count, "max_lora_rank": rank}
        for count, rank in ((2, 64), (1, 8))
    ]
    assert main(["serve", "a/model", *port, "--adapter", none]) != 0
    assert "adapter_config.json has no rank" in capsys.readouterr().err
    assert len(loaded) == 2


def test_an_address_is_taken_before_a_model_is_loaded(
    loaded: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "a/model", "--port", port]) != 0
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert loaded == []
    assert main(["serve", "a/model", "--port", port]) == 1
    assert len(loaded) == 1
    with socket.create_server(("127.0.0.1", int(port))):  # which is free again
        pass


def test_a_missing_extra_and_an_empty_key_are_told_before_a_model_is_loaded(
    loaded: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "genrt.server.server", None)
    assert main(["serve", "a/model"]) == 1
    assert "pip install 'genrt[serve]'" in capsys.readouterr().err
    monkeypatch.setenv("GENRT_API_KEY", "")
    assert main(["serve", "a/model"]) != 0
    assert "api_key is empty" in capsys.readouterr().err
    assert loaded == []


def test_a_server_that_still_loads_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "a/model", "--port", "0", "--engine", "transformers"])
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_replicas_are_loaded_as_the_arguments_say(loaded: list[dict[str, Any]]) -> None:
    for arguments in ([], ["--replicas", "3", "--cluster", "local"]):
        assert main(["serve", "a/model", "--port", "0", *arguments]) == 1
    found = [(each["replicas"], each["cluster"]) for each in loaded]
    assert found == [(None, None), (3, "local")]
