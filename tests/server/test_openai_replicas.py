"""OpenAI's clients over two replicas of vLLM: answers as of one engine, also when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai

import genrt
from genrt.lm import AsyncLM
from genrt.server import serving
from tests.cluster.ray_program import identity
from tests.server.test_openai import ASKED, OPTIONS
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.proof]

ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_seqs": 8,
    "enable_lora": True,
    "max_lora_rank": 8,
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**26,
}
CHOICE = {"choice": ["yes", "no"]}
LONG = 150


@asynccontextmanager
async def served(
    llama: Path, adapter: Path, **options: Any
) -> AsyncIterator[tuple[AsyncLM, openai.AsyncOpenAI]]:
    async with genrt.load(str(llama), engine_options=ENGINE, seed=7, **options) as lm:
        await lm.add_adapter("style", adapter)
        async with (
            serving(lm, model="tiny", options=OPTIONS) as server,
            openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
            ) as client,
        ):
            yield lm, client


async def answers(client: openai.AsyncOpenAI) -> tuple[list[Any], list[float]]:
    """Texts, and their log-probabilities, asked for at once: several of one prompt, an adapter's, chat, a
    choice."""
    chat = client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        max_tokens=9,
        seed=3,
        extra_body={"structured_outputs": CHOICE},
    )
    completions = asyncio.gather(
        *(
            client.completions.create(
                model=model, prompt="Paris is", max_tokens=9, seed=seed, logprobs=2, n=n
            )
            for seed, (model, n) in enumerate([("tiny", 1), ("style", 1), ("tiny", 3)])
        )
    )
    texts: list[Any] = [(await chat).choices[0].message.content]
    assert texts[0] in CHOICE["choice"]
    numbers: list[float] = []
    for completion in await completions:
        for choice in sorted(completion.choices, key=lambda each: each.index):
            texts.append(choice.text)
            assert choice.logprobs is not None
            numbers += [float(each or 0.0) for each in choice.logprobs.token_logprobs or ()]
    return texts, numbers


async def whole(client: openai.AsyncOpenAI, seed: int) -> str:
    completion = await client.completions.create(
        model="tiny", prompt="Paris", max_tokens=LONG, seed=seed, extra_body={"ignore_eos": True}
    )
    return completion.choices[0].text


async def begun(client: openai.AsyncOpenAI, seed: int) -> tuple[Any, list[str]]:
    """A stream, and the parts that it began with."""
    stream = await client.completions.create(
        model="tiny",
        prompt="Paris",
        max_tokens=LONG,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return stream, [(await anext(stream)).choices[0].text for _ in range(3)]


async def rest(stream: Any, parts: list[str]) -> str:
    async for part in stream:
        parts += [each.text for each in part.choices]
    return "".join(parts)


@pytest.mark.promise(number=39)
async def test_clients_are_served_over_replicas_as_over_one_engine(
    llama: Path, loras: tuple[Path, Path]
) -> None:
    async with served(llama, loras[0]) as (_, client):
        chosen, numbers = await answers(client)
        texts = [await whole(client, seed) for seed in range(8)]
    async with served(llama, loras[0], replicas=2) as (lm, client):
        found, close = await answers(client)
        assert found == chosen
        assert close == pytest.approx(numbers, abs=1e-4)
        assert [each.id async for each in client.models.list()] == ["tiny", "style"]

        # A replica is lost: its texts are drawn by the other one, and nothing is told twice.
        streams = await asyncio.gather(*(begun(client, seed) for seed in range(8)))
        os.kill(await lm.run(identity), signal.SIGKILL)
        found = await asyncio.gather(*(rest(*each) for each in streams))
        assert found == texts
        assert sum(each.restarts for each in lm.statistics().replicas) == 1

        # Readers that leave take nothing of those that stay, and leave nothing.
        streams = await asyncio.gather(*(begun(client, seed) for seed in range(8)))
        for stream, _ in streams[::2]:
            await stream.close()
        assert await asyncio.gather(*(rest(*each) for each in streams[1::2])) == texts[1::2]
        engine: Any = lm._thread.engine
        await until(lambda: not lm.statistics().batcher.in_flight and not engine.is_busy)
        assert not engine._streams
