"""OpenAI's client over two replicas of vLLM: texts go on when a replica dies; readers may leave."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai

import genrt
from genrt.server import serving
from tests.cluster.ray_program import identity
from tests.inside import engine_of
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.proof]

ENGINE: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 8, "dtype": "float32"}
ENGINE |= {"kv_cache_memory_bytes": 2**26, "enable_lora": True, "max_lora_rank": 8}
LONG = 150


async def begun(client: openai.AsyncOpenAI, seed: int) -> tuple[Any, list[str]]:
    """A stream, and the parts that it began with."""
    stream = await client.completions.create(
        model="tiny" if seed % 2 else "style",
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
    options: Any = {"max_tokens": LONG, "ignore_eos": True}
    async with genrt.load(str(llama), engine_options=ENGINE, seed=7) as lm:
        await lm.add_adapter("style", loras[0])
        texts = [
            (await lm.generate("Paris", seed=seed, adapter=name, **options)).text
            for seed, name in enumerate(("style", None) * 4)
        ]
    async with genrt.load(str(llama), engine_options=ENGINE, seed=7, replicas=2) as lm:
        await lm.add_adapter("style", loras[0])
        async with (
            serving(lm, model="tiny") as server,
            openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
            ) as client,
        ):
            assert [each.id async for each in client.models.list()] == ["tiny", "style"]
            # A replica is lost: its texts are drawn by the other one, and nothing is told twice.
            streams = await asyncio.gather(*(begun(client, seed) for seed in range(8)))
            os.kill(await lm.run(identity), signal.SIGKILL)
            assert await asyncio.gather(*(rest(*each) for each in streams)) == texts
            assert sum(each.restarts for each in lm.statistics().replicas) == 1

            # Readers that leave take nothing of those that stay, and leave nothing.
            streams = await asyncio.gather(*(begun(client, seed) for seed in range(8)))
            for stream, _ in streams[::2]:
                await stream.close()
            assert await asyncio.gather(*(rest(*each) for each in streams[1::2])) == texts[1::2]
            engine = engine_of(lm)
            await until(lambda: not lm.statistics().batcher.in_flight and not engine.is_busy)
            assert not engine._streams
