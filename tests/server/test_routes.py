"""genrt's own routes: what they answer is what the runtime does, and no body makes them fail."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from typing import Any, cast

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.constraints import regex
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Finished
from genrt.inference import SMC, TextModel
from genrt.server import Server, ServerLimits, routes, serving
from genrt.server.bodies import Bodies
from tests.apart import drawn_apart_sync
from tests.scripted import Gate, ScriptedEngine
from tests.server.raw import connected, post
from tests.waiting import until

VOCABULARY = [b"a", b"b", b"c", b"ab", b" ", b"1", b"2", b""]
MODEL = NGram.random(VOCABULARY, order=2, seed=4, eos_token_id=7)
CONTEXTS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def lm() -> Iterator[genrt.AsyncLM]:
    with genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=32)) as lm:
        yield lm


@pytest.fixture(scope="module")
def server(lm: genrt.AsyncLM) -> Iterator[Server]:
    with serving(lm, limits=ServerLimits(contexts=16, answer_bytes=4096)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(server.url), timeout=60) as client:
        yield client


def number(given: float | None) -> float:
    return -math.inf if given is None else given


@settings(deadline=None, max_examples=40)
@given(contexts=CONTEXTS)
def test_rows_are_the_runtimes(
    lm: genrt.AsyncLM, client: httpx.Client, contexts: list[list[int]]
) -> None:
    rows = lm.batch_next_token_logprobs_sync(contexts)
    found = client.post("/v1/next_token_logprobs", json={"prompts": contexts})
    assert found.headers["genrt-shape"] == f"{len(contexts)},{lm.vocab_size}"
    shape = [int(each) for each in found.headers["genrt-shape"].split(",")]
    assert np.array_equal(np.frombuffer(found.content, "<f4").reshape(shape), rows.numpy())
    likeliest = client.post("/v1/next_token_logprobs", json={"prompts": contexts, "top": 3})
    for context, each in zip(contexts, likeliest.json()["data"], strict=True):
        ids, logprobs = lm.top_logprobs_sync(context, 3)
        assert each["token_ids"] == ids.tolist()
        assert [number(value) for value in each["logprobs"]] == logprobs.tolist()


@settings(deadline=None, max_examples=40)
@given(contexts=CONTEXTS, seed=st.integers(0, 2**63 - 1), data=st.data())
def test_draws_and_scores_are_the_runtimes(
    lm: genrt.AsyncLM,
    client: httpx.Client,
    contexts: list[list[int]],
    seed: int,
    data: st.DataObject,
) -> None:
    mask = st.none() | st.lists(st.integers(0, 7), max_size=4, unique=True)
    masks = data.draw(st.lists(mask, min_size=len(contexts), max_size=len(contexts)))
    heat = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    asked = {"prompts": contexts, "masks": masks, "temperature": heat, "seed": seed}
    found = client.post("/v1/draw", json=asked).json()["data"]
    drawn = drawn_apart_sync(lm, contexts, masks=masks, temperature=heat, seed=seed)
    assert [each["token_id"] for each in found] == drawn.token_ids.tolist()
    assert [number(each["logprob"]) for each in found] == drawn.logprobs.tolist()
    assert [number(each["log_mass"]) for each in found] == drawn.log_mass.tolist()

    continuations = [context[:2] for context in contexts]
    asked = {"prompts": contexts, "continuations": continuations}
    for context, own, each in zip(
        contexts, continuations, client.post("/v1/score", json=asked).json()["data"], strict=True
    ):
        scores = lm.score_sync(context, own)
        assert [number(value) for value in each["logprobs"]] == scores.tolist()


def test_prompts_may_be_texts(lm: genrt.AsyncLM, client: httpx.Client) -> None:
    found = client.post("/v1/next_token_logprobs", json={"prompts": ["ab 1"], "top": 2}).json()
    ids, _ = lm.top_logprobs_sync(lm.encode("ab 1"), 2)
    assert found["data"][0]["token_ids"] == ids.tolist()
    asked = {"prompts": ["ab"], "continuations": ["12"]}
    total = client.post("/v1/score", json=asked).json()["data"][0]["total"]
    expected = float(lm.score_sync(lm.encode("ab"), lm.encode("12")).sum())
    assert total == pytest.approx(expected)


INFER = {"prompt": "a", "regex": "[ab]{1,3}", "particles": 8, "max_tokens": 6, "seed": 5}


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_an_inference_is_the_runtimes_and_tells_its_steps(
    lm: genrt.AsyncLM, client: httpx.Client
) -> None:
    found = client.post("/v1/infer", json=INFER).json()
    model = TextModel(lm, "a", max_tokens=6, constraint=regex("[ab]{1,3}", lm))
    result = SMC(model, num_particles=8).run_sync(5)
    assert [(each["text"], each["weight"]) for each in found["posterior"]] == result.posterior()
    assert found["log_evidence"] == result.log_evidence
    assert [each["log_weight"] for each in found["particles"]] == result.log_weights.tolist()
    assert [tuple(each["token_ids"]) for each in found["particles"]] == [*result.token_ids]
    told = events(client.post("/v1/infer", json=INFER | {"stream": True}).text)
    assert [name for name, _ in told] == ["step"] * found["steps"] + ["result"]
    steps = [step for _, step in told[:-1]]
    assert [step["step"] for step in steps] == [*range(found["steps"])]
    assert told[-1][1] == found
    for name in ("ess", "log_evidence"):
        assert steps[-1][name] == found[name]


def test_an_inference_that_fails_on_the_way_says_so() -> None:
    class Loose(ExactEngine):
        def step(self) -> list[Finished]:
            if self.statistics().steps == 1:
                self._fail(RuntimeError("a wire is loose"), 0.0)
            return super().step()

    with genrt.load(engine=lambda: Loose(MODEL)) as lm, serving(lm) as server:
        asked = {"prompt": [1], "particles": 2, "max_tokens": 4, "stream": True, "seed": 1}
        found = httpx.post(f"{server.url}/v1/infer", json=asked, timeout=60)
    *steps, (name, error) = events(found.text)
    assert (found.status_code, name, len(steps)) == (200, "error", 1)
    assert "a wire is loose" in error["error"]["message"]


def test_the_json_schema_of_an_inference_is_kept(client: httpx.Client) -> None:
    schema = {"type": "integer", "minimum": 1, "maximum": 22}
    asked = {"prompt": "a", "json_schema": schema, "particles": 6, "max_tokens": 5, "seed": 2}
    found = client.post("/v1/infer", json=asked).json()
    assert found["posterior"]
    assert all(1 <= json.loads(each["text"]) <= 22 for each in found["posterior"])


def test_who_disconnects_withdraws_the_question() -> None:
    held = Gate()
    engine = ScriptedEngine(steps=lambda request: 1000, gate=held)
    with genrt.load(engine=lambda: engine) as lm, serving(lm) as server:
        with connected(server) as connection:
            connection.sendall(post("/v1/next_token_logprobs", b'{"prompts": [[1]]}'))
            held.wait_until_held()
        gate = server.gate
        assert gate is not None
        asyncio.run(until(lambda: not gate.serving))
        held.open()
        while not engine.cancelled:  # the engine steps until it is told to forget it
            assert len(engine.stepped) < 1000, "the question outlived its client"
        assert lm.statistics().batcher.cancelled == 1


async def test_a_pause_that_refuses_questions_is_told_as_unavailable(
    lm: genrt.AsyncLM, server: Server
) -> None:
    asked = {"prompts": [[1]], "top": 1}
    async with httpx.AsyncClient(base_url=str(server.url), timeout=60) as client:
        await lm.pause(asked="raise")
        try:
            found = await client.post("/v1/next_token_logprobs", json=asked)
            assert (found.status_code, "paused" in found.text) == (503, True)
            assert (await client.get("/health")).status_code == 200
            async with await genrt.AsyncLM.connect(str(server.url)) as remote:
                with pytest.raises(genrt.Paused, match="paused"):
                    await remote.next_token_logprobs([1])
        finally:
            lm.resume()
        found = await client.post("/v1/next_token_logprobs", json=asked)
        assert found.status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=9,
)
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/next_token_logprobs": {"prompts": [[1]], "top": 1, "adapter": None},
    "/v1/draw": {"prompts": [[1]], "masks": [[1]], "seed": 1, "temperature": 1.0, "adapter": None},
    "/v1/score": {"prompts": [[1]], "continuations": [[1]], "adapter": None},
    "/v1/teacher": {
        "prompts": [[1]],
        "top": 1,
        "start": 1,
        "temperature": 1.0,
        "binary": False,
        "adapter": None,
    },
    "/v1/infer": {
        "prompt": [1],
        "particles": 2,
        "max_tokens": 2,
        "seed": 1,
        "resample_when": 0.5,
        "temperature": 1.0,
        "stream": False,
        "regex": None,
        "json_schema": None,
        "grammar": None,
        "adapter": None,
    },
}


@pytest.mark.promise(number=35)
@pytest.mark.parametrize("path", [*ROUTES])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_value_in_any_place_is_answered_or_refused(
    client: httpx.Client, path: str, data: st.DataObject
) -> None:
    right = ROUTES[path]
    names = data.draw(st.lists(st.sampled_from([*right, "other"]), min_size=1, max_size=2))
    odd = JSON | st.sampled_from(
        [[[]], [[1, 2] * 40], [[99]], ["é"], [[1]] * 17, 10**30, "a" * 20_000]
    )
    body = json.dumps(right | {name: data.draw(odd) for name in names})
    found = client.post(path, content=body, headers={"content-type": "application/json"})
    assert found.status_code in (200, 400, 404), found.text
    if found.status_code != 200:
        assert found.json()["error"]["message"]


@pytest.mark.promise(number=35)
@pytest.mark.parametrize("path", [*ROUTES, "/v1/flush"])
@settings(deadline=None, max_examples=40)
@given(body=st.binary(max_size=64) | JSON.map(json.dumps).map(str.encode))
def test_any_bytes_are_answered_or_refused(client: httpx.Client, path: str, body: bytes) -> None:
    kind = "octet-stream" if path == "/v1/flush" else "json"
    found = client.post(path, content=body, headers={"content-type": f"application/{kind}"})
    assert 400 <= found.status_code < 500


@pytest.mark.promise(number=35)
def test_json_that_is_deep_or_long_or_none_is_refused(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for path in ROUTES:
        for body in (b"[" * 100_000, b'{"a":' * 50_000, b"1" * 9_000, b'{"prompts": [NaN]}'):
            assert client.post(path, content=body, headers=headers).status_code == 400
    found = client.post("/v1/next_token_logprobs", json={"prompts": [[1]] * 16})
    assert found.status_code == 200
    found = client.post("/v1/next_token_logprobs", json={"prompts": [[1]] * 17})
    assert "1 to 16 members" in found.json()["error"]["message"]


def test_a_closed_runtime_says_so_and_its_server_stays_up() -> None:
    with genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=32)) as lm:
        with serving(lm) as server:
            url = str(server.url)
            lm.close()
            assert httpx.get(f"{url}/health").status_code == 503
            found = httpx.post(f"{url}/v1/draw", json={"prompts": [[1]]})
            assert (found.status_code, found.json()["error"]["type"]) == (
                503,
                "ServiceUnavailableError",
            )
            lm.restart()
            assert httpx.get(f"{url}/health").status_code == 200
            assert httpx.post(f"{url}/v1/draw", json={"prompts": [[1]]}).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert lm.next_token_logprobs_sync([1]).shape == (8,)


def test_the_counters_are_there_for_prometheus_and_openais_routes_are_not(
    lm: genrt.AsyncLM, client: httpx.Client
) -> None:
    assert client.get("/v1/models").status_code == 404
    assert client.post("/v1/completions", json={}).status_code == 404
    lm.next_token_logprobs_sync([3, 1, 2])
    text = client.get("/metrics").text
    counted = lm.statistics()
    assert f"genrt_batcher_questions_total {counted.batcher.questions}\n" in text
    assert f"# TYPE genrt_cache_rows gauge\ngenrt_cache_rows {counted.cache.rows}\n" in text
    assert "# TYPE genrt_engine_rows_total counter" in text


async def test_long_texts_are_tokenized_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def tokenized(lm: Any, given: list[str], name: str, *, begins: bool) -> list[list[int]]:
        threads.append(threading.get_ident())
        return [[1] for _ in given]

    monkeypatch.setattr(routes, "contexts_of", tokenized)
    own = routes.OwnRoutes(cast("Any", None), "m", ServerLimits(), Bodies(9))
    for text in ("short", "long " * routes.SHORT):
        assert await own._contexts([text], "prompts") == [[1]]
    assert threads[0] == threading.get_ident() != threads[1]
