"""Two hundred streams at once by clients that others use, a third of which leave, beside a sampler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import aiohttp
import openai
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    async_request_openai_completions,
)

import genrt
from genrt.engines.vllm.engine import VLLMEngine
from genrt.inference import SMC, Result, TextModel
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion
from genrt.server import Server, serving
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.promise(number=35)]

STREAMS = 200
TOKENS = 48
LEAVE_AFTER = 16
"""Tokens that a client reads who leaves in the middle."""

ON_AND_ON = 400
"""Tokens that it has asked for: it leaves in the middle, however fast the others are."""

PROMPTS = [[5 + each % 50, 6 + each // 50, 7] for each in range(STREAMS)]
LEAVING = {*range(0, STREAMS, 3)}
ASKED = [ON_AND_ON if number in LEAVING else TOKENS for number in range(STREAMS)]


@pytest.fixture(scope="module")
def lm(llama: Path) -> Iterator[AsyncLM]:
    options = {"enforce_eager": True, "max_num_seqs": 256}
    with genrt.load(str(llama), engine_options=options, seed=7) as lm:
        yield lm


@pytest.fixture(scope="module")
def server(lm: AsyncLM) -> Iterator[Server]:
    with serving(lm, model="tiny") as server:
        yield server


@pytest.fixture(scope="module")
def texts(lm: AsyncLM) -> list[str]:
    """What each stream says."""

    async def ask() -> list[Completion]:
        asked = enumerate(zip(PROMPTS, ASKED, strict=True))
        return await asyncio.gather(
            *[
                lm.generate(prompt, max_tokens=tokens, ignore_eos=True, seed=number)
                for number, (prompt, tokens) in asked
            ]
        )

    return [each.text for each in asyncio.run(ask())]


async def sampled(lm: AsyncLM) -> Result:
    model = TextModel(lm, [9, 8, 7], max_tokens=60, stop=None, twist=lambda text: len(text) % 3)
    return await SMC(model, num_particles=16, resample_when=1.0).run(seed=3)


@pytest.fixture
async def beside(lm: AsyncLM, server: Server) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Runs a sampler beside whatever the test does, and looks at what is left of all of it."""
    alone = await sampled(lm)
    free = await asyncio.to_thread(free_blocks, lm)
    before = lm.statistics()
    sampler: asyncio.Task[Result] | None = None

    async def begin() -> None:
        nonlocal sampler
        await until(lambda: lm.statistics().batcher.in_flight >= STREAMS // 2, lm)
        sampler = asyncio.create_task(sampled(lm))

    yield begin
    assert sampler is not None
    found = await sampler
    assert found.values == alone.values
    np.testing.assert_allclose(found.log_weights, alone.log_weights, atol=1e-3)
    assert found.log_evidence == pytest.approx(alone.log_evidence, abs=1e-3)
    gate = server.gate
    assert gate is not None
    await until(lambda: not gate.serving, lm)
    assert gate.held_bytes == 0
    await until(lambda: not lm.statistics().batcher.in_flight, lm)
    done = lm.statistics().since(before)
    assert (done.batcher.queued, done.batcher.waiting, done.batcher.failed) == (0, 0, 0)
    assert done.batcher.cancelled == len(LEAVING)
    engine = cast("VLLMEngine", lm._thread.engine)
    assert not engine._in_progress
    assert not lm._thread.batcher.streams.by_loop
    assert (len(engine._texts.waiting), engine._texts.running, engine._texts._streamed) == (
        0,
        0,
        {},
    )
    assert await asyncio.to_thread(free_blocks, lm) == free


def free_blocks(lm: AsyncLM) -> int:
    """How many KV blocks nobody holds, once residents are forgotten."""

    def count(answering: Any) -> int:
        engine = answering.engine
        assert engine.forget_residents()
        return int(
            engine._core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        )

    return lm._thread.call(count).result()


async def test_openais_client(
    server: Server, texts: list[str], beside: Callable[[], Awaitable[None]]
) -> None:
    async def read(number: int) -> str:
        text, tokens = "", 0
        stream = await client.completions.create(
            model="tiny",
            prompt=PROMPTS[number],
            max_tokens=ASKED[number],
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async with stream:
            async for part in stream:
                [choice] = cast("Any", part).choices
                text += choice.text
                tokens += len(choice.token_ids or ())
                if number in LEAVING and tokens >= LEAVE_AFTER:
                    break
        return text

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        reading = [asyncio.create_task(read(number)) for number in range(STREAMS)]
        await beside()
        found = await asyncio.gather(*reading)
    for number, text in enumerate(found):
        if number in LEAVING:
            assert texts[number].startswith(text)
            assert len(text) < len(texts[number])
        else:
            assert text == texts[number]


async def test_vllms_bench_client(
    lm: AsyncLM,
    server: Server,
    texts: list[str],
    beside: Callable[[], Awaitable[None]],
) -> None:
    before = lm.statistics()
    asked = [
        RequestFuncInput(
            prompt=prompt,
            api_url=f"{server.url}/v1/completions",
            prompt_len=len(prompt),
            output_len=ASKED[number],
            model="tiny",
            ignore_eos=True,
            extra_body={"seed": number, "temperature": 1.0},
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        reading = [
            asyncio.create_task(async_request_openai_completions(each, session)) for each in asked
        ]
        await beside()
        drawn = STREAMS * LEAVE_AFTER
        await until(lambda: lm.statistics().since(before).engine.sampled_tokens >= drawn, lm)
        for number in LEAVING:
            assert reading[number].cancel()
        found = await asyncio.gather(*reading, return_exceptions=True)
    for number, output in enumerate(found):
        if number in LEAVING:
            assert isinstance(output, asyncio.CancelledError)
            continue
        assert not isinstance(output, BaseException)
        assert output.success, output.error
        assert (output.generated_text, output.output_tokens) == (texts[number], TOKENS)
