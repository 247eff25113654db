"""Streams of every kind that are cut while they are read: what clients are told, and what is logged."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")


import genrt
from genrt.errors import InvalidRequest, NotFinite
from genrt.lm import AsyncLM
from genrt.server import Server, serving
from tests.inside import engine_of, thread_of
from tests.server.conftest import OPTIONS
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = [pytest.mark.vllm, pytest.mark.promise(number=35)]

CHAT = [{"role": "user", "content": "Paris is a city."}]
LONG = 200
DRAWN = {"temperature": 1.0, "seed": 3, "ignore_eos": True}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": [5, 6], "max_tokens": LONG, **DRAWN}),
    "two": ("/v1/completions", {"prompt": [5, 6], "n": 2, "max_tokens": LONG, **DRAWN}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": LONG, **DRAWN}),
    "response": ("/v1/responses", {"input": "Paris is", "max_output_tokens": LONG, **DRAWN}),
    "message": ("/v1/messages", {"model": "tiny", "messages": CHAT, "max_tokens": LONG}),
    "tokens": (
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": LONG, **DRAWN}},
    ),
}


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=str(server.url), timeout=120) as http:
        yield http


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What is logged as an error meanwhile, by whomever."""
    records: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, vllms = Keeping(logging.ERROR), logging.getLogger("vllm")
    level = vllms.level
    vllms.setLevel(logging.ERROR)
    loggers = [vllms, logging.getLogger()]
    for each in loggers:
        each.addHandler(handler)
    yield records
    vllms.setLevel(level)
    for each in loggers:
        each.removeHandler(handler)


@dataclass
class Told:
    """What came on a stream: its events' data, and whether it came to an end."""

    events: list[Any]
    is_whole: bool

    @property
    def error(self) -> Any:
        """The error that the last event tells."""
        last = self.events[-1 if self.events[-1] != "[DONE]" else -2]
        assert [each for each in self.events if "error" in each] == [last]
        return last["error"]


async def read(
    lm: AsyncLM, http: httpx.AsyncClient, kinds: Collection[str], between: Callable[[], Any]
) -> dict[str, Told]:
    """Read streams that begin together, and do something once each has brought some of its text. Until
    then the engine draws at most half of the texts, however busy the machine is."""
    have_begun, go_on = asyncio.Barrier(len(kinds)), threading.Event()
    engine = engine_of(lm)
    step, steps = engine.step, itertools.count()

    def waits() -> object:
        assert next(steps) < LONG // 2 or go_on.wait(PATIENCE_SECONDS)
        return step()

    async def one(kind: str) -> Told:
        path, asked = KINDS[kind]
        told = Told([], False)
        async with http.stream("POST", path, json=asked | {"stream": True}) as found:
            assert found.status_code == 200
            async for line in found.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                told.events.append(data if data == "[DONE]" else json.loads(data))
                has_text = len(told.events) == 3 + 3 * (kind in ("response", "message"))
                if has_text and await have_begun.wait() == 0:
                    go_on.set()
                    await between()
            told.is_whole = True
        return told

    await lm.pause()
    reading = [asyncio.create_task(one(kind)) for kind in kinds]
    await until(lambda: lm.statistics().batcher.waiting >= len(kinds) + ("two" in kinds), lm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", waits)
        lm.resume()
        return dict(zip(kinds, await asyncio.gather(*reading), strict=True))


async def replaced(lm: AsyncLM, llama: Path) -> None:
    """Replace the weights, and let no text end before."""
    await lm.pause(pending="restart")
    try:
        await lm.update_weights(str(llama), pending="restart")
    finally:
        lm.resume()


async def restarted(lm: AsyncLM, _: Path) -> None:
    await lm.arestart()


async def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("kinds", "cut", "message"),
    [(KINDS, replaced, "ask again"), (("two", "response"), restarted, "closed")],
)
async def test_new_weights_and_a_restart_cut_streams_with_an_error(
    lm: AsyncLM,
    llama: Path,
    http: httpx.AsyncClient,
    kinds: Collection[str],
    cut: Callable[[AsyncLM, Path], Any],
    message: str,
    logged: list[Any],
) -> None:
    for kind, told in (await read(lm, http, kinds, lambda: cut(lm, llama))).items():
        check_cut(kind, told, message)
    check_log(logged)
    for told in (await read(lm, http, kinds, nothing)).values():
        assert not any("error" in each for each in told.events)


def check_cut(kind: str, told: Told, message: str) -> None:
    """See that a stream came to an end, with an error that says so."""
    assert told.is_whole
    assert message in told.error["message"]
    if kind == "message":
        assert told.events[-1]["type"] == "error"
    else:
        assert (told.error["code"], told.error["type"]) == (503, "ServiceUnavailableError")
    if kind == "response":
        numbers = [each["sequence_number"] for each in told.events[:-1]]
        assert numbers == [*range(len(numbers))]


def check_log(logged: list[Any]) -> None:
    """See that nothing was logged but what vLLM says of messages."""
    assert all("messages" in each.pathname or "anthropic" in each.pathname for each in logged)


async def test_a_pause_and_an_engines_death_are_seen_on_no_stream(
    lm: AsyncLM, http: httpx.AsyncClient, logged: list[Any]
) -> None:
    async def pause() -> None:
        await lm.pause(pending="restart", asked="raise")
        lm.resume()

    def die(_: object) -> None:
        raise genrt.EngineDied("for a test")

    async def die_once() -> None:
        with pytest.raises(genrt.EngineDied):
            await asyncio.wrap_future(thread_of(lm).call(die))

    kinds = ("two", "chat", "message")
    told = [await read(lm, http, kinds, between) for between in (nothing, pause, die_once)]
    for kind in ("two", "chat"):
        texts = [text_of(each[kind]) for each in told]
        assert texts == [texts[0]] * 3
    # A message has no seed: what can be compared is its end.
    assert [each["message"].events[-1] for each in told] == [{"type": "message_stop"}] * 3
    check_log(logged)


def text_of(told: Told) -> Any:
    """All that a stream has brought of its texts."""
    assert told.is_whole
    texts: dict[int, str] = {}
    token_ids: list[int] = []
    for event in told.events:
        assert "error" not in event
        if event == "[DONE]":
            continue
        if event.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + event["delta"]
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            token_ids += choice.get("token_ids") or ()
    assert token_ids or all(texts.values())
    return texts, token_ids


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("wrong"), 400), (NotFinite("no row"), 500), (genrt.Paused("paused"), 503)],
)
async def test_a_text_that_is_refused_is_told_by_its_status(
    lm: AsyncLM,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    error: genrt.GenrtError,
    status: int,
    logged: list[Any],
) -> None:
    def fails(*_: object) -> Any:
        raise error

    monkeypatch.setattr(lm, "_bound", fails)
    for path, asked in KINDS.values():
        found = await http.post(path, json=asked)
        assert (found.status_code, str(error) in found.text) == (status, True)
        found = await http.post(path, json=asked | {"stream": True})
        assert (found.status_code, str(error) in found.text) == (200, True)
        if path != "/v1/messages":
            assert f'"code": {status}' in found.text
    check_log(logged)


async def test_a_server_that_closes_ends_its_streams_and_the_runtime_is_free(
    lm: AsyncLM, logged: list[Any]
) -> None:
    async with serving(lm, model="tiny", options=OPTIONS, shutdown_seconds=0.01) as server:
        closing: list[asyncio.Task[None]] = []

        async def close() -> None:
            await lm.pause(pending="restart")
            closing.append(asyncio.create_task(asyncio.to_thread(server.close)))

        async with httpx.AsyncClient(base_url=str(server.url), timeout=120) as http:
            found = await read(lm, http, KINDS, close)
        await closing[0]
    lm.resume()
    for told in found.values():
        assert told.is_whole
        assert "closing" in told.error["message"]
        assert told.error.get("code", 503) == 503
    assert (await lm.generate([5, 6], max_tokens=3, ignore_eos=True)).token_ids
    assert lm.statistics().batcher.in_flight == 0
    check_log(logged)


async def test_a_server_that_closes_answers_what_is_no_stream(
    lm: AsyncLM, logged: list[Any]
) -> None:
    async with serving(lm, model="tiny", options=OPTIONS, shutdown_seconds=0.01) as server:
        await lm.pause()
        async with httpx.AsyncClient(base_url=str(server.url), timeout=120) as http:
            asked = [http.post(path, json=body) for path, body in KINDS.values()]
            waiting = [asyncio.create_task(each) for each in asked]
            await until(lambda: lm.statistics().batcher.waiting > len(waiting), lm)
            await asyncio.to_thread(server.close)
            for each in await asyncio.gather(*waiting):
                assert (each.status_code, "closing" in each.text) == (503, True)
    lm.resume()
    check_log(logged)


async def test_prompts_are_scored_where_no_adapters_are(
    lm: AsyncLM, http: httpx.AsyncClient
) -> None:
    asked = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 1, "prompt_logprobs": 0}
    answer = await http.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    of_prompt = answer.json()["choices"][0]["prompt_logprobs"][1:]
    found = [next(iter(each.values()))["logprob"] for each in of_prompt]
    assert found == pytest.approx((await lm.score([5], [6, 7, 8])).tolist(), abs=5e-4)
