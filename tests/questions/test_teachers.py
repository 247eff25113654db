"""A teacher's likeliest tokens of every position, with the mass that they leave: against rows, on the
exact engine and over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import Closed, ContextTooLong, InvalidRequest, TimedOut, UnknownAdapter
from genrt.lm import AsyncLM
from genrt.questions import scores
from genrt.server import ServerLimits, serving
from genrt.tokens.sampling import TeacherLogprobs, top_with_tail
from tests.scoring_engine import ScoringEngine

MODEL = NGram.random(11, order=2, seed=2, zeros=0.2)
LENGTH = 16


def opened(engine: type[ExactEngine]) -> AsyncLM:
    return genrt.load(engine=lambda: engine(MODEL, max_model_len=LENGTH))


@pytest.fixture(scope="module", params=[ExactEngine, ScoringEngine])
def lm(request: Any) -> Iterator[AsyncLM]:
    """Engines that answer by rows, and by one request for a text."""
    with opened(request.param) as lm:
        yield lm


TEXTS = st.lists(st.integers(0, 3), min_size=2, max_size=LENGTH)


def check(found: TeacherLogprobs, text: list[int], start: int, top: int, heat: float) -> None:
    """The answer is that of the rows: likeliest first, by id among equals, the tail in float64."""
    assert found.token_ids.shape == found.logprobs.shape == (len(text) + 1 - start, top)
    for place, (ids, own, tail) in enumerate(zip(*found, strict=True)):
        row = MODEL.row(text[: start + place])
        expected = sorted(range(11), key=lambda each: (-float(row[each]), each))[:top]
        assert ids.tolist() == expected
        law = (row.double() / heat).log_softmax(-1)
        assert own.tolist() == pytest.approx(law[expected].tolist(), abs=1e-5)
        rest = [each for each in range(11) if each not in expected]
        mass = float(law[rest].logsumexp(-1)) if rest else -math.inf
        assert float(tail) == pytest.approx(mass, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(TEXTS, max_size=5),
    start=st.integers(1, 2),
    top=st.integers(1, 11),
    heat=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_every_position_of_a_group_is_as_its_row(
    lm: AsyncLM, texts: list[list[int]], start: int, top: int, heat: float
) -> None:
    """With texts that begin others, and equal ones: few letters."""
    before = lm.statistics().engine
    options: dict[str, Any] = {"top": top, "start": start, "temperature": heat}
    found = lm.batch_teacher_sync(texts, **options)
    assert len(found) == len(texts)
    for text, each in zip(texts, found, strict=True):
        check(each, text, start, top, heat)
    begun = {tuple(text[:n]) for text in texts for n in range(start, len(text) + 1)}
    since = lm.statistics().engine
    assert since.scored_tokens - before.scored_tokens in (0, len(begun))
    if texts:
        check(lm.teacher_sync(texts[0], **options), texts[0], start, top, heat)


def test_a_tail_is_exact_however_small_it_is() -> None:
    row = torch.tensor([[0.0, -40.0, -50.0, -torch.inf, -60.0]])
    found = TeacherLogprobs.of(top_with_tail(row, 2))
    assert float(found.tail) == pytest.approx(-50 + math.log1p(math.exp(-10)), abs=1e-5)
    assert float(TeacherLogprobs.of(top_with_tail(row, 4)).tail) == -math.inf
    heated = TeacherLogprobs.of(top_with_tail(row, 1, torch.tensor([1e-300], dtype=torch.float64)))
    assert heated.logprobs.tolist() == [[0.0]]
    assert float(heated.tail) < -1e30
    whole = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    heats = torch.linspace(0.5, 2.0, 50, dtype=torch.float64)
    together = top_with_tail(whole, 7, heats)
    apart = [top_with_tail(whole[n : n + 1], 7, heats[n : n + 1]) for n in range(50)]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"top": 0}, InvalidRequest, "top"),
        ({"top": 12}, InvalidRequest, "top"),
        ({"top": True}, InvalidRequest, "top"),
        ({"start": 0}, InvalidRequest, "start"),
        ({"start": 4}, InvalidRequest, "a text has length 3, less than start=4"),
        ({"temperature": 0.0}, InvalidRequest, "positive"),
        ({"adapter": "none"}, UnknownAdapter, "none"),
        ({"timeout": -1.0}, InvalidRequest, "timeout"),
        ({"token_ids": []}, InvalidRequest, "empty"),
        ({"token_ids": [11]}, InvalidRequest, "11"),
        ({"token_ids": [1] * (LENGTH + 1)}, ContextTooLong, "max_model_len"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(
    lm: AsyncLM, options: Any, kind: Any, message: str
) -> None:
    given = {"token_ids": [1, 2, 3], "top": 2} | options
    with pytest.raises(kind, match=message):
        lm.teacher_sync(**given)
    text = given.pop("token_ids")
    with pytest.raises(kind, match=message):
        lm.batch_teacher_sync([[1, 2, 3, 4], text], **given)


def test_an_answer_of_unbounded_size_is_refused(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "ENTRIES", 20)
    assert len(lm.teacher_sync([1, 2, 3, 4], top=5).tail) == 4
    with pytest.raises(InvalidRequest, match="5 positions with top=5 are over 20 tokens"):
        lm.teacher_sync([1, 2, 3, 4, 5], top=5)
    with pytest.raises(InvalidRequest, match="lower top, or begin later with start"):
        lm.batch_teacher_sync([[1, 2, 3], [1, 2, 3]], top=5)


async def test_a_teacher_that_leaves_withdraws_its_question_alone(lm: AsyncLM) -> None:
    leaving = asyncio.create_task(lm.teacher([1, 2, 3], top=2))
    staying = asyncio.create_task(lm.teacher([1, 2, 3], top=2))
    await asyncio.sleep(0)
    leaving.cancel()
    check(await staying, [1, 2, 3], 1, 2, 1.0)
    with pytest.raises(TimedOut):
        await lm.teacher([1, 2, 3, 1, 2, 3], top=2, timeout=0.0)
    first, second = await asyncio.gather(lm.teacher([5, 6], top=3), lm.teacher([5, 6], top=3))
    first.logprobs.zero_()
    check(second, [5, 6], 1, 3, 1.0)
    assert await lm.batch_teacher([], top=1) == []


async def test_a_closed_runtime_says_so() -> None:
    lm = opened(ScoringEngine)
    lm.close()
    for texts in ([], [[1, 2]]):
        with pytest.raises(Closed):
            await lm.batch_teacher(texts, top=2)


def of_bytes(data: bytes) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The answers of the binary form, by its documentation."""
    size = int.from_bytes(data[:4], "little")
    header, at = json.loads(data[4 : 4 + size]), 4 + size
    found = []
    for rows in header["rows"]:
        count = rows * header["top"]
        ids = np.frombuffer(data, "<i4", count, at).reshape(rows, -1)
        logprobs = np.frombuffer(data, "<f4", count, at + 4 * count).reshape(rows, -1)
        tail = np.frombuffer(data, "<f4", rows, at + 8 * count)
        found.append((ids, logprobs, tail))
        at += 8 * count + 4 * rows
    assert at == len(data)
    return found


def test_the_route_answers_in_json_and_in_bytes(lm: AsyncLM) -> None:
    texts = [[1, 2, 3], [1, 2, 7, 7], [4]]
    body: dict[str, Any] = {"prompts": texts, "top": 4, "temperature": 0.5}
    expected = lm.batch_teacher_sync(texts, top=4, temperature=0.5)
    limits = ServerLimits(contexts=8, answer_bytes=2000)
    with serving(lm, limits=limits) as server, httpx.Client(base_url=str(server.url)) as client:
        plain = client.post("/v1/teacher", json=body).json()["data"]
        packed = client.post("/v1/teacher", json=body | {"binary": True})
        assert packed.headers["content-type"] == "application/octet-stream"
        whole = lm.teacher_sync([1, 2], top=11)
        [every] = client.post("/v1/teacher", json={"prompts": [[1, 2]], "top": 11}).json()["data"]
        assert every["tail"] == [None, None]  # of a mass of 0
        assert every["token_ids"] == whole.token_ids.tolist()
        for wrong in (
            {"top": 0},
            {"top": 12},
            {"start": 2},
            {"top": 11, "prompts": [[1] * 16] * 8},
        ):
            found = client.post("/v1/teacher", json=body | wrong)
            assert found.status_code == 400, wrong
            assert found.json()["error"]["message"]
    for each, of_json, of_binary in zip(expected, plain, of_bytes(packed.content), strict=True):
        for number, (name, part) in enumerate(each._asdict().items()):
            known = [[-math.inf if x is None else x for x in r] if isinstance(r, list) else r
                     for r in of_json[name]]  # fmt: skip
            assert torch.equal(torch.tensor(known, dtype=part.dtype), part)
            assert np.array_equal(of_binary[number], part.numpy())


async def test_a_connected_runtime_sends_no_rows(lm: AsyncLM) -> None:
    texts = [[1, 2, 3, 4], [1, 2, 5], [6]]
    with serving(lm) as server:
        async with await AsyncLM.connect(str(server.url), cache_bytes=0) as remote:
            found = await remote.batch_teacher(texts, top=3, temperature=0.7)
            assert remote.statistics().engine.rows == 0
            with pytest.raises(InvalidRequest, match="top"):
                await remote.teacher([1, 2], top=12)
    for text, each in zip(texts, found, strict=True):
        check(each, text, 1, 3, 0.7)
