"""Servers that are closed while clients are in the middle of something, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator

import httpx
import pytest

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.server import serving
from tests.server.raw import connected, post, rest_of
from tests.waiting import until

pytestmark = pytest.mark.promise(number=35)

INFER = {"prompt": [1], "particles": 4, "max_tokens": 60, "stream": True, "seed": 1}


@pytest.fixture
def lm() -> Iterator[genrt.AsyncLM]:
    with genrt.load(engine=lambda: ExactEngine(NGram.random(11, seed=1), max_model_len=64)) as lm:
        yield lm


def serving_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "genrt-server"}


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
        await asyncio.to_thread(server.close)
        for connection in connections:
            with connection:
                found = rest_of(connection)
            assert found.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in found
            assert b"closing" in found
    assert errors_in(caplog) == []


async def test_who_does_not_read_is_cut_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = NGram.random(2000, order=1, seed=1)
    many = json.dumps({"prompts": [[1]] * 4096}).encode()  # 32 MB of rows
    others = serving_threads()
    async with (
        genrt.load(engine=lambda: ExactEngine(wide, max_model_len=8)) as lm,
        serving(lm, shutdown_seconds=0.01) as server,
    ):
        with connected(server) as connection:
            connection.sendall(post("/v1/next_token_logprobs", many))
            assert (await asyncio.to_thread(connection.recv, 4)) == b"HTTP"
            await asyncio.to_thread(server.close)
            assert serving_threads() == others
    assert errors_in(caplog) == []


async def test_half_a_head_and_an_idle_connection_end_with_the_server(
    lm: genrt.AsyncLM, caplog: pytest.LogCaptureFixture
) -> None:
    others = serving_threads()
    async with serving(lm, shutdown_seconds=60.0) as server:
        with connected(server) as idle, connected(server) as half:
            idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert idle.recv(4096).startswith(b"HTTP/1.1 200")
            half.sendall(b"GET /health HTT")
            await asyncio.to_thread(server.close)
            assert rest_of(idle) == b""
            assert rest_of(half) == b""
            assert serving_threads() == others
    assert errors_in(caplog) == []
