"""vLLM's routes as genrt serves them, asked what their own OpenAPI schema admits, and what it does not:
nothing but 2xx and 4xx, nothing that hangs, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")
pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from genrt.lm import AsyncLM
from genrt.server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.promise(number=35)]

ASKED = [{"role": "user", "content": "Paris is a city."}]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Paris is", "max_tokens": 4},
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 4},
    "/v1/responses": {"input": "Paris", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"messages": ASKED, "max_tokens": 4},
    "/tokenize": {"prompt": "Paris is"},
    "/detokenize": {"tokens": [5, 6]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}},
    "/v1/completions/render": {"prompt": "Paris is", "max_tokens": 4},
}
"""Bodies that are right. Others differ from them in a few members: of a body in which all are drawn
something is wrong at the first look."""

SETTINGS = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[*HealthCheck],
)
SECONDS = 60
"""After which an answer that has not come is one that never does."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(server.url), timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def schema(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


@pytest.fixture
def alive(lm: AsyncLM, server: Server, client: httpx.Client) -> Iterator[None]:
    """What is answered before is answered afterwards, and nothing else is under way."""
    asked = {"model": "tiny", "prompt": "Paris is", "max_tokens": 5, "seed": 1}
    before = client.post("/v1/completions", json=asked).json()["choices"]
    yield
    assert client.post("/v1/completions", json=asked).json()["choices"] == before
    assert lm.statistics().batcher.in_flight == 0


def members(schema: Any, found: Any) -> set[str]:
    """The names of the members that a body may have."""
    if "$ref" in found:
        found = schema["components"]["schemas"][found["$ref"].rpartition("/")[2]]
    names = set(found.get("properties", ()))
    for each in (*found.get("anyOf", ()), *found.get("oneOf", ()), *found.get("allOf", ())):
        names |= members(schema, each)
    return names


@pytest.mark.parametrize("path", BODIES)
def test_members_of_any_values_are_answered_or_refused(
    path: str, client: httpx.Client, schema: Any, alive: None
) -> None:
    right = {"model": "tiny"} | BODIES[path]
    assert client.post(path, json=right).status_code == 200
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = members(schema, body)
    operation = schemathesis.openapi.from_dict(schema)[path]["POST"]
    bodies = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    statuses: set[int] = set()

    @SETTINGS
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        drawn: Any = data.draw(bodies).body
        known = sorted(names & set(drawn)) if isinstance(drawn, dict) else []
        for name in data.draw(st.permutations(known))[:4]:
            text = json.dumps(right | {name: drawn[name]}).encode(errors="surrogatepass")
            headers = {"content-type": "application/json"}
            answer = client.post(path, content=text, headers=headers)
            statuses.add(answer.status_code)
            assert 200 <= answer.status_code < 500, (name, drawn[name], answer.text)

    ask()
    assert 200 in statuses
    assert statuses & {400, 404, 422} or path in ("/tokenize", "/v1/completions/render")


def asked_of(operation: Any, url: str) -> int:
    """How often a route was asked what its schema does not admit; without a body, what it does."""
    mode = GenerationMode.NEGATIVE if operation.body else GenerationMode.POSITIVE
    asked = 0

    @settings(SETTINGS, max_examples=4)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        answer = case.call(base_url=url, timeout=SECONDS)
        assert answer.status_code < 500, (case, answer.text)

    ask()
    return asked


@pytest.mark.proof
def test_bodies_that_no_schema_admits_are_refused_on_every_route(
    client: httpx.Client, schema: Any, alive: None
) -> None:
    whole = schemathesis.openapi.from_dict(schema)
    for path, methods in schema["paths"].items():
        for method in methods:
            assert asked_of(whole[path][method.upper()], str(client.base_url)) > 0
