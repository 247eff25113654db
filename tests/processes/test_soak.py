"""Memory is flat and counters do not drift, however many questions were asked.

50,000 questions of every kind, on loops that come and go, with cancellations, an adapter that is loaded
anew and a cache that overflows. ``GENRT_SOAK_QUESTIONS=1000000`` makes it a million.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import genrt
from genrt.engines.exact import NGram
from genrt.lm import AsyncLM
from tests.inside import engine_of, thread_of

QUESTIONS = int(os.environ.get("GENRT_SOAK_QUESTIONS", "50000"))
VOCAB_SIZE = 40
MODEL = NGram.random(VOCAB_SIZE, order=2, seed=1)
ADAPTED = NGram.random(VOCAB_SIZE, order=2, seed=2)
CACHED_ROWS = 500
ALLOWED_BLOCKS = 2_000
"""Of Python's small objects, of which one kept for each question would be many times as many."""
ALLOWED_BYTES = 16 * 2**20
"""Of resident memory, which the allocators of C hold back some of."""


class Soak:
    """Rounds of questions, and how many of them were asked."""

    def __init__(self, lm: AsyncLM, adapter: Path) -> None:
        self.lm = lm
        self.adapter = adapter
        self.asked = 0
        self.cancelled = 0
        self.choose = random.Random(0)

    def context(self) -> list[int]:
        """Most are new, some have been asked before."""
        return [self.choose.randrange(VOCAB_SIZE) for _ in range(self.choose.choice((1, 2, 3, 9)))]

    async def round(self) -> None:
        """240 questions at once, 30 of which are cancelled, some of them in flight."""
        lm, context = self.lm, self.context
        rows = [context() for _ in range(100)]
        asking: list[Any] = [
            asyncio.gather(*map(lm.next_token_logprobs, rows)),
            asyncio.gather(*(lm.draw(context(), mask=[1, 2, 3]) for _ in range(40))),
            asyncio.gather(*(lm.top_logprobs(context(), 3) for _ in range(10))),
            asyncio.gather(*(lm.next_token_logprobs(context(), adapter="a") for _ in range(20))),
            lm.batch_next_token_logprobs([context() for _ in range(30)]),
            lm.batch_sample([context() for _ in range(10)], max_tokens=3),
        ]
        doomed = [asyncio.create_task(lm.sample(context(), max_tokens=400)) for _ in range(30)]
        self.asked += 240
        await asyncio.sleep(0)
        for task in doomed[::2]:
            task.cancel()
        results = await asyncio.gather(*asking)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        self.cancelled += len(doomed)
        position = self.choose.randrange(100)
        assert torch.allclose(results[0][position], MODEL.row(rows[position]), atol=1e-5)

    def run(self, questions: int) -> None:
        """So many questions, on a new loop every ten rounds, with the adapter loaded anew."""
        goal = self.asked + questions
        while self.asked < goal:
            self.lm.add_adapter_sync("a", self.adapter)

            async def rounds() -> None:
                for _ in range(10):
                    await self.round()

            asyncio.run(rounds())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_use() -> tuple[int, int]:
    """Small objects of Python, and bytes of resident memory."""
    gc.collect()
    return sys.getallocatedblocks(), resident_bytes()


@pytest.mark.proof
@pytest.mark.promise(number=26)
def test_memory_is_flat_and_counters_do_not_drift(tmp_path: Path) -> None:
    save_file({"table": ADAPTED.table}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    cache_bytes = CACHED_ROWS * 4 * VOCAB_SIZE
    with genrt.load(MODEL, engine="exact", cache_bytes=cache_bytes) as lm:
        soak = Soak(lm, tmp_path)
        soak.run(10_000)
        blocks, resident = in_use()
        soak.run(QUESTIONS)
        more_blocks, more_resident = in_use()
        lm.next_token_logprobs_sync([1])
        statistics = lm.statistics()
        engine = engine_of(lm)
        loaded = thread_of(lm).call(lambda _: len(engine._adapters)).result()

    assert more_blocks - blocks < ALLOWED_BLOCKS
    assert more_resident - resident < ALLOWED_BYTES

    s = statistics.batcher
    assert (s.queued, s.in_flight, s.waiting, s.failed, s.retried) == (0, 0, 0, 0, 0)
    assert s.questions == soak.asked + 1
    assert s.cancelled == soak.cancelled
    ended_here = s.questions - s.cached - s.deduplicated
    assert s.answered <= ended_here <= s.answered + s.cancelled
    assert statistics.engine.failed == 0
    assert statistics.engine.cancelled > QUESTIONS // 100
    cache = statistics.cache
    assert cache.bytes == cache.rows * 4 * VOCAB_SIZE
    assert cache.rows == CACHED_ROWS
    assert cache.evictions > CACHED_ROWS
    assert loaded == 1
