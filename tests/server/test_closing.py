"""Servers that are closed while clients are in the middle of something, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.server import Server, serving
from tests.waiting import until

pytestmark = pytest.mark.promise(number=35)

INFER = {"prompt": [1], "particles": 4, "max_tokens": 60, "stream": True, "seed": 1}


@pytest.fixture
def lm() -> Iterator[genrt.AsyncLM]:
    with genrt.load(engine=lambda: ExactEngine(NGram.random(11, seed=1), max_model_len=64)) as lm:
        yield lm


def connected(server: Server) -> socket.socket:
    host, port = str(server.url).removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def post(path: str, body: bytes, *, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return (head + f"content-length: {length or len(body)}\r\n\r\n").encode() + body


def rest_of(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_an_inference_that_is_streamed_ends_with_an_error(
    lm: genrt.AsyncLM, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(lm, shutdown_seconds=0.01) as server:
        await lm.pause()
        async with (
            httpx.AsyncClient(base_url=str(server.url)) as http,
            http.stream("POST", "/v1/infer", json=INFER) as found,
        ):
            closing = asyncio.create_task(asyncio.to_thread(server.close))
            lines = [line async for line in found.aiter_lines() if line]
            await closing
    assert lines[-2] == "event: error"
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["code"], "closing" in error["message"]) == (503, True)
    lm.resume()
    await lm.next_token_logprobs([1])
    assert lm.statistics().batcher.waiting == 0
    assert errors_in(caplog) == []


async def test_questions_and_half_a_body_are_answered_with_503(
    lm: genrt.AsyncLM, caplog: pytest.LogCaptureFixture
) -> None:
    rows = json.dumps({"prompts": [[1], [2]]}).encode()
    async with serving(lm, shutdown_seconds=0.01) as server:
        await lm.pause()
        sent = [
            post("/v1/next_token_logprobs", rows),
            post("/v1/infer", json.dumps(INFER | {"stream": False}).encode()),
            post("/v1/score", b'{"prompts"', length=100),
        ]
        connections = [connected(server) for _ in sent]
        for connection, data in zip(connections, sent, strict=True):
            connection.sendall(data)
        gate = server.gate
        assert gate is not None
        await until(lambda: gate.serving == len(sent))
        await until(lambda: gate.held_bytes > len(rows))
        await asyncio.to_thread(server.close)
        for connection in connections:
            with connection:
                found = rest_of(connection)
            assert found.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in found
            assert b"closing" in found
    assert gate.held_bytes == 0
    assert errors_in(caplog) == []


async def test_who_does_not_read_is_cut_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = NGram.random(2000, order=1, seed=1)
    many = json.dumps({"prompts": [[1]] * 4096}).encode()  # 32 MB of rows
    async with (
        genrt.load(engine=lambda: ExactEngine(wide, max_model_len=8)) as lm,
        serving(lm, shutdown_seconds=0.01) as server,
    ):
        with connected(server) as connection:
            connection.sendall(post("/v1/next_token_logprobs", many))
            assert (await asyncio.to_thread(connection.recv, 4)) == b"HTTP"
            await asyncio.to_thread(server.close)
            assert server._thread is not None
            assert not server._thread.is_alive()
    assert errors_in(caplog) == []


async def test_half_a_head_and_an_idle_connection_end_with_the_server(
    lm: genrt.AsyncLM, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(lm, shutdown_seconds=60.0) as server:
        with connected(server) as idle, connected(server) as half:
            idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert idle.recv(4096).startswith(b"HTTP/1.1 200")
            half.sendall(b"GET /health HTT")
            await asyncio.to_thread(server.close)
            assert rest_of(idle) == b""
            assert rest_of(half) == b""
            assert server._thread is not None
            assert not server._thread.is_alive()
    assert errors_in(caplog) == []


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_genrt_serve_ends_its_streams_and_logs_nothing(llama: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "genrt", "serve", str(llama), "--engine", "transformers"]
    command += ["--port", "0", "--shutdown-seconds", "0.01"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line + process.communicate()[1]
            asked = INFER | {"particles": 64, "max_tokens": 400}
            with httpx.stream("POST", f"{found[0]}/v1/infer", json=asked, timeout=60) as stream:
                lines = stream.iter_lines()
                while next(lines) != "event: step":
                    pass
                process.send_signal(end)
                last = [each for each in lines if each]
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert last[-2] == "event: error"
    assert '"code": 503' in last[-1]
    assert (process.returncode, output) == (0, "genrt: closing\n")
    logged = [each for each in errors.splitlines() if each and "Loading weights" not in each]
    logged = [each for each in logged if " on engine " not in each]  # where the machine is slow
    assert logged == [f"genrt: loading {llama}"]
