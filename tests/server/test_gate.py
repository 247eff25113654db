"""The gate of a server: keys, paths, hosts, and what is too much, too large or too slow."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import ContextTooLong, InvalidRequest
from genrt.server import Server, ServerLimits, serving
from genrt.server.bodies import Bodies, check_front_end_body, contexts_of
from genrt.server.gate import check_key
from tests.scripted import Gate, ScriptedEngine
from tests.server.raw import answer_to, connected

KEY = "open-sesame-42"
LIMITS = ServerLimits(body_bytes=4096, body_seconds=0.2, requests=4, contexts=8)
ROW = {"prompts": [[1]], "top": 1}
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def lm() -> Iterator[genrt.AsyncLM]:
    with genrt.load(engine=lambda: ExactEngine(NGram.random(11, seed=1), max_model_len=64)) as lm:
        yield lm


@pytest.fixture(scope="module")
def locked(lm: genrt.AsyncLM) -> Iterator[Server]:
    """A server with a key and narrow limits."""
    with serving(lm, api_key=KEY, limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def free(lm: genrt.AsyncLM) -> Iterator[Server]:
    """A server without a key."""
    with serving(lm, limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def outside(locked: Server) -> Iterator[httpx.Client]:
    """A client of the locked server that has no key of its own."""
    with httpx.Client(base_url=str(locked.url)) as client:
        yield client


@pytest.fixture(scope="module")
def inside(free: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(free.url)) as client:
        yield client


PATHS = (
    "/ /status.js /v1/status /v1/runtime /v1/tokenizer /metrics /docs /nope /health/ //health "
    "/health/.. /health/../v1/status /health%2f..%2fv1%2fstatus /HEALTH /health;x /v1/../health "
    "/./health /health%00 /%68ealth/ /v1//status"
)


@pytest.mark.promise(number=35)
def test_nothing_but_the_health_of_a_server_is_told_without_the_key(
    locked: Server, outside: httpx.Client
) -> None:
    for path, method in product(PATHS.split(), ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS")):
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        found = answer_to(locked, f"{head}content-length: 0\r\n\r\n".encode())
        assert int(found.split(b" ")[1]) == 401, (method, path)
    statuses = [outside.request(each, "/health").status_code for each in ("GET", "HEAD", "POST")]
    assert statuses == [200, 200, 401]


@pytest.mark.promise(number=35)
@settings(deadline=None)
@given(
    header=st.one_of(
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60),
        st.sampled_from([KEY[:-1], KEY + "x", KEY.upper(), f"{KEY},{KEY}", f'"{KEY}"', ""]).map(
            lambda key: f"Bearer {key}".strip()
        ),
        st.sampled_from(["Basic", "Digest", "Token", "bearer:"]).map(lambda kind: f"{kind} {KEY}"),
    )
)
def test_whatever_else_is_shown_for_a_key_is_refused(outside: httpx.Client, header: str) -> None:
    found = outside.post("/v1/draw", json=ROW, headers={"authorization": header})
    assert found.status_code == 401
    assert KEY not in found.text


@pytest.mark.promise(number=35)
def test_the_key_lets_in_a_client_and_a_browser_that_reads(outside: httpx.Client) -> None:
    password = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    browser = {"authorization": f"Basic {password}"}
    twice = [*BEARER.items()] * 2
    for method, path, headers, status in (
        ("GET", "/", browser, 200),
        ("GET", "/v1/status", BEARER, 200),
        ("POST", "/v1/next_token_logprobs", BEARER, 200),
        # A browser sends a password it knows along with whatever a page of another site asks for.
        ("POST", "/v1/next_token_logprobs", browser, 401),
        ("GET", "/v1/status", twice, 401),
    ):
        json = ROW if method == "POST" else None
        assert outside.request(method, path, json=json, headers=headers).status_code == status


def test_without_a_key_this_machine_is_answered_by_its_own_names(free: Server) -> None:
    """And a page of another name gets nothing."""
    for host, status in (
        *((host, 200) for host in ("localhost", "localhost:1", "127.0.0.1", "127.0.0.1:9")),
        *((host, 403) for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example")),
        *(("[::1]:7", 200), ("", 403)),
    ):
        head = f"GET /v1/status HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        assert answer_to(free, head.encode()).startswith(f"HTTP/1.1 {status}".encode()), host


def test_a_body_that_pages_may_send_unasked_or_that_is_compressed_is_refused(
    inside: httpx.Client,
) -> None:
    kinds = ("text/plain", "application/x-www-form-urlencoded", "", "application/json")
    for kind in kinds:
        headers = {"content-type": kind} | ({"content-encoding": "gzip"} if "json" in kind else {})
        found = inside.post("/v1/draw", content=b'{"prompts": [[1]]}', headers=headers)
        assert found.status_code == 415


GET = b"GET / HTTP/1.1\r\n"
POST = f"POST /v1/draw HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n".encode()


@pytest.mark.promise(number=35)
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (POST + b"content-length: %d\r\nconnection: close\r\n\r\n" % 10**15, 413),
        (POST + b"content-length: 9\r\n\r\n{", 408),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),
        (b"GET / HTTP/9.9\r\nconnection: close\r\n\r\n", 400),
        (b"POST /v1/draw HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v1/draw HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_what_is_slow_or_no_http_ends_the_connection(
    locked: Server, data: bytes, status: int
) -> None:
    found = int(answer_to(locked, data).split(b" ")[1])
    assert found == status or (status == 400 and 400 < found < 500)


@pytest.mark.promise(number=35)
def test_giant_bodies_and_heads_are_refused(locked: Server, outside: httpx.Client) -> None:
    giant = b" " * (LIMITS.body_bytes + 1)
    headers = BEARER | {"content-type": "application/json"}
    for content in (giant, iter([giant])):
        found = outside.post("/v1/draw", content=content, headers=headers)
        assert found.status_code == 413
    for line in (b"x: " + b"y" * 400_000, b"x: y\r\n" * 40_000, b"x" * 400_000):
        answer = b""
        with contextlib.suppress(ConnectionError):  # it is closed while the rest is being sent
            answer = answer_to(locked, GET + b"host: x\r\n" + line)
        assert answer == b"" or 400 <= int(answer.split(b" ")[1]) < 500


@pytest.mark.promise(number=35)
def test_more_requests_than_are_served_at_once_are_told_to_come_again() -> None:
    held = Gate()
    with (
        genrt.load(engine=lambda: ScriptedEngine(gate=held)) as lm,
        serving(lm, limits=LIMITS) as server,
        httpx.Client(base_url=str(server.url), timeout=60) as client,
        ThreadPoolExecutor(LIMITS.requests) as pool,
    ):
        path = "/v1/next_token_logprobs"
        asking = [pool.submit(client.post, path, json=ROW) for _ in range(LIMITS.requests)]
        gate = server.gate
        assert gate is not None
        held.wait_until_held()
        while gate.serving < LIMITS.requests:  # which a lack of one would leave at three
            assert client.get("/health").status_code == 200
        found = client.get("/v1/status")
        assert (found.status_code, found.headers["retry-after"]) == (429, "1")
        held.open()
        assert [each.result(60).status_code for each in asking] == [200] * LIMITS.requests
        assert client.get("/v1/status").status_code == 200


def test_arguments_are_checked(lm: genrt.AsyncLM) -> None:
    """Other machines need a key, and a key is long and plain."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(InvalidRequest, match=r"api_key|host"):
            serving(lm, host=host)
    for name in ("host", "model"):
        with pytest.raises(InvalidRequest, match=f"{name} must be an? .*, got ''"):
            serving(lm, **{name: ""})  # type: ignore[arg-type]
    for key in ("short", "", "has space in it", "ümläut-key", "new\nline-key", 12345678):
        with pytest.raises(InvalidRequest, match="api_key"):
            check_key(key, "127.0.0.1")  # type: ignore[arg-type]
    names = ("body_bytes", "requests", "contexts", "body_seconds")
    values: list[Any] = [0, -1, None, "8", float("nan")]
    for name, value in product(names, values):
        with pytest.raises(InvalidRequest, match=name):
            ServerLimits(**{name: value})


@pytest.mark.promise(number=35)
def test_requests_of_more_connections_are_refused(lm: genrt.AsyncLM) -> None:
    with serving(lm, limits=ServerLimits(connections=2)) as server, connected(server):
        health = f"{server.url}/health"
        with httpx.Client() as other:
            assert other.get(health).status_code == 200
            # Its answer ends when the server has forgotten the connection.
            refused = answer_to(
                server, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            )
            assert refused.startswith(b"HTTP/1.1 503")
            assert other.get(health).status_code == 200


# -- bodies that take long to read --------------------------------------------------------------------

LISTS = b"[" + b"[]," * 2**21 + b"[]]"
IDS = b"[" + b"1," * 2**22 + b"1]"
KEYS = b"{" + b'"0":1,' * 2_400_000 + b'"0":1}'
DEEP = b"[" * 900 + b"]" * 900
LONG = b"[" + b",".join([b"9" * 4000] * 2000) + b"]"


@pytest.mark.promise(number=35)
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(lm: genrt.AsyncLM) -> None:
    headers = {"content-type": "application/json"}
    with serving(lm) as server, httpx.Client(base_url=str(server.url), timeout=60) as client:
        for data in (LISTS, IDS, KEYS, DEEP, LONG):
            body = b'{"prompts": [[1]], "more": ' + data + b"}"
            found = client.post("/v1/draw", content=body, headers=headers)
            assert found.status_code == 400
            assert "over" in found.text or "recursion limit" in found.text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((LISTS, "values"), (IDS, "values"), (KEYS, "values"), (DEEP, "deep")),
        (b"{" + b",".join(b'"%d":1' % each for each in range(2**15)) + b"}", "members of objects"),
        (b'{"n": ' + b"9" * 4000 + b', "user": "' + b"x" * 2**18 + b'"}', "over 100 digits"),
        (b'{"prompt": "' + b"x" * (2**18 + 1) + b'"}', "'prompt' has over 262144 characters"),
        (b'{"a": [{"stop": ["' + b"x" * (2**18 + 1) + b'"]}]}', "'stop' has over 262144"),
        (b'{"' + b"x" * (2**18 + 1) + b'": NaN}', "over 262144 characters"),
        (b'{"tokens": [' + b"1," * 2**18 + b"1]}", "'tokens' has over 200000 members"),
        (b'{"stop_token_ids": [' + b"1," * 4096 + b"1]}", "'stop_token_ids' has over 4096"),
        (b'{"messages": [' + b"{}," * 4096 + b"{}]}", "'messages' has over 4096 members"),
        (b'{"messages": [' + b"1," * 4096 + b"1]}", "'messages' has over 4096 members"),
        (b'{"prompt": [' + b"1," * 4096 + b'"a"]}', "'prompt' has over 4096 members"),
        (b"{" + b",".join(b'"%d":1' % each for each in range(4098)) + b"}", "'body' has over"),
        (b"[" * 101 + b"]" * 101, "over 100 deep"),
        (b'"' * 2**23 + b"," * 2**21, "values"),
    ],
)
def test_what_the_front_end_would_be_busy_with_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_front_end_body(data, Bodies(2**20, ids=200_000))


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": [' + b"1," * 2**17 + b"1]}",
        b'{"prompt": [[' + b"1," * 2**17 + b"1], [2]]}",
        b'{"token_ids": [' + b"1," * 2**17 + b'1], "stop": [3]}',
        b'{"prompt": "' + b"[{,}" * 2**16 + b'"}',
        b'{"prompt": "' + b'\\\\\\"[{,}' * 2**18 + b'"}',
        *(b"no json" + b"," * 5000, b"{" * 200, b"", b'"', b'"' + b"," * 4096 + b'"'),
    ],
)
def test_what_is_long_and_quickly_read_is_not(data: bytes) -> None:
    found = check_front_end_body(data, Bodies(2**20, text=2**21))
    assert found is None or found == json.loads(data)


def test_the_first_text_that_is_too_long_ends_the_tokenizing(lm: genrt.AsyncLM) -> None:
    for texts in (["a" * 2**18], ["a" * (2**18 + 1)]):
        with pytest.raises(ContextTooLong, match="prompts: a text of 26214"):
            contexts_of(lm, [*texts, "€"], "prompts")  # which the tokenizer cannot spell


async def test_long_bodies_are_read_one_at_a_time_in_another_thread() -> None:
    bodies, here = Bodies(99), threading.get_ident()
    running: list[int] = []

    def make(data: bytes) -> int:
        running.append(threading.get_ident())
        assert len(running) == 1
        return running.pop()

    assert await bodies.read(b"short", make) == here
    found = await asyncio.gather(*(bodies.read(b" " * 2**15, make) for _ in range(5)))
    assert here not in found
