"""Engines on CPUs that run steps ahead, as engines on GPUs do, and what tests ask of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.engines.vllm import speculation
from genrt.engines.vllm.populations import EarlyDelivery
from genrt.engines.vllm.speculation import DecodeSteps
from genrt.lm import AsyncLM
from genrt.populations import Population
from tests.apart import drawn_apart

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 2**24,
}
COUNT = 12


@contextmanager
def running_ahead() -> Iterator[None]:
    """Engines that are opened in here run steps ahead, and tell of half of them first, as on a GPU."""
    original, begin, chance = DecodeSteps.__init__, EarlyDelivery.__init__, random.Random(0)

    def begin_so(self: EarlyDelivery) -> None:
        begin(self)
        self.is_due = lambda device: chance.random() < 0.5  # type: ignore[method-assign]

    def init(self: DecodeSteps, *positional: Any, **named: Any) -> None:
        original(self, *positional, **named | {"ahead": True})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DecodeSteps, "__init__", init)
        patched.setattr(EarlyDelivery, "__init__", begin_so)
        yield


@contextmanager
def two_runtimes(model: Path) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    """One that runs steps ahead, and a quiet one that does not."""
    with running_ahead():
        lm = genrt.load(str(model), engine_options=OPTIONS, cache_bytes=0)
    with lm, genrt.load(str(model), engine_options=OPTIONS, cache_bytes=0) as quiet:
        yield lm, quiet


def run_always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every step be prepared, and run ahead, whatever came of that before."""
    monkeypatch.setattr(speculation, "MISSES", 10**9)
    steady = property(lambda _: True, lambda _, value: None)
    monkeypatch.setattr(DecodeSteps, "_is_steady", steady, raising=False)


async def all_the_same(populations: list[Population], quiet: AsyncLM, seed: int) -> None:
    """Draw for all at once, as the quiet runtime does for each sequence, and append."""
    found = await asyncio.gather(*(each.draw(seed=seed + n) for n, each in enumerate(populations)))
    for n, (population, draws) in enumerate(zip(populations, found, strict=True)):
        wanted = await drawn_apart(quiet, [*population], seed=seed + n)
        assert draws.token_ids.tolist() == wanted.token_ids.tolist()
        assert float((draws.logprobs - wanted.logprobs).abs().max()) < 1e-3
        population.append(draws.token_ids)


async def same(population: Population, quiet: AsyncLM, seed: int) -> None:
    """Do the same with one population."""
    await all_the_same([population], quiet, seed)


def halved(rng: random.Random) -> list[int]:
    """Ancestors by which half of the sequences are replaced by the other half."""
    order, ancestors = rng.sample(range(COUNT), COUNT), [*range(COUNT)]
    for survivor, replaced in zip(order[: COUNT // 2], order[COUNT // 2 :], strict=True):
        ancestors[replaced] = survivor
    return ancestors


def held(lm: AsyncLM) -> tuple[int, int]:
    """How many sequences are resident, and blocks that are not free."""

    def look(_: object) -> tuple[int, int]:
        engine: Any = lm._thread.engine
        scheduler = engine._core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert set(scheduler.parked) == set(engine._open._asked_in)
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        resident = engine.statistics().resident
        assert resident or engine._open.steps._prepared is None, "rows that nobody can ask for"
        return resident, used

    return lm._thread.call(look).result()
