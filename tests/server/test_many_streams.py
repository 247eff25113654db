"""Sixty streams at once of OpenAI's client, a third of which leave, beside a sampler."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai

from genrt.inference import SMC, Result, TextModel
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion
from genrt.server import Server
from tests.inside import core_of, thread_of
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.promise(number=35)]

STREAMS = 60
TOKENS = 24
LEAVE_AFTER = 8
"""Tokens that a client reads who leaves in the middle."""

ON_AND_ON = 200
"""Tokens that it has asked for: it leaves in the middle, however fast the others are."""

PROMPTS = [[5 + each % 50, 6 + each // 50, 7] for each in range(STREAMS)]
LEAVING = {*range(0, STREAMS, 3)}
ASKED = [ON_AND_ON if number in LEAVING else TOKENS for number in range(STREAMS)]


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
    model = TextModel(lm, [9, 8, 7], max_tokens=24, stop=None, twist=lambda text: len(text) % 3)
    return await SMC(model, num_particles=16, resample_when=1.0).run(seed=3)


def free_blocks(lm: AsyncLM) -> int:
    """How many KV blocks nobody holds, once residents are forgotten."""

    def count(answering: Any) -> int:
        engine = answering.engine
        assert engine.forget_residents()
        return int(core_of(engine).scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    return thread_of(lm).call(count).result()


async def test_openais_client(lm: AsyncLM, server: Server, texts: list[str]) -> None:
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

    alone = await sampled(lm)
    free = await asyncio.to_thread(free_blocks, lm)
    before = lm.statistics()
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        whole: Any = {"model": "tiny", "prompt": "a", "max_tokens": ON_AND_ON}
        gone = asyncio.create_task(client.completions.create(**whole))
        await until(lambda: lm.statistics().batcher.in_flight, lm)
        gone.cancel()
        reading = [asyncio.create_task(read(number)) for number in range(STREAMS)]
        await until(lambda: lm.statistics().batcher.in_flight >= STREAMS // 2, lm)
        found = await sampled(lm)
        told = await asyncio.gather(*reading)
    for number, text in enumerate(told):
        if number in LEAVING:
            assert texts[number].startswith(text)
            assert len(text) < len(texts[number])
        else:
            assert text == texts[number]
    assert found.values == alone.values
    np.testing.assert_allclose(found.log_weights, alone.log_weights, atol=1e-3)
    assert found.log_evidence == pytest.approx(alone.log_evidence, abs=1e-3)
    gate = server.gate
    assert gate is not None
    await until(lambda: not gate.serving, lm)
    await until(lambda: not lm.statistics().batcher.in_flight, lm)
    done = lm.statistics().since(before)
    assert (done.batcher.queued, done.batcher.waiting, done.batcher.failed) == (0, 0, 0)
    assert done.batcher.cancelled == len(LEAVING) + 1
    assert await asyncio.to_thread(free_blocks, lm) == free
