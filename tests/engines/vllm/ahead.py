"""Engines on CPUs that run steps ahead, as engines on GPUs do, and draws of populations on them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.engines.vllm import steps
from genrt.engines.vllm.populations import EarlyDelivery
from genrt.engines.vllm.steps import DecodeSteps
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

Runtimes = tuple[AsyncLM, AsyncLM]
"""A runtime under test, and a quiet one that answers single questions."""


@contextmanager
def running_ahead() -> Iterator[None]:
    """Engines that are opened in here run steps ahead, and deliver half of the draws early."""
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
def two_runtimes(model: Path, *, ahead: bool = True, **options: Any) -> Iterator[Runtimes]:
    """A runtime that runs steps ahead, and a quiet one, which is transformers'."""
    given: dict[str, Any] = {"engine_options": {"dtype": "float32"}, "cache_bytes": 0}
    with genrt.load(str(model), engine="transformers", **given) as quiet:
        with running_ahead() if ahead else nullcontext():
            lm = genrt.load(str(model), **given | {"engine_options": OPTIONS | options})
        with lm:
            yield lm, quiet


def run_always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare and run every step ahead, whether or not earlier ones were of use."""
    monkeypatch.setattr(steps, "MISSES", 10**9)
    steady = property(lambda _: True, lambda _, value: None)
    monkeypatch.setattr(DecodeSteps, "_is_steady", steady, raising=False)


async def all_the_same(
    populations: list[Population],
    quiet: AsyncLM,
    seed: int,
    *,
    ways: list[dict[str, Any]] | None = None,
    adapters: list[str | None] | None = None,
) -> None:
    """Draw for all at once, as the quiet runtime does for each sequence, and append."""
    ways = ways or [{} for _ in populations]
    adapters = adapters or [None for _ in populations]
    found = await asyncio.gather(
        *(each.draw(seed=seed + n, **ways[n]) for n, each in enumerate(populations))
    )
    for n, (population, draws) in enumerate(zip(populations, found, strict=True)):
        more = ways[n] | ({} if adapters[n] is None else {"adapter": adapters[n]})
        wanted = await drawn_apart(quiet, [*population], seed=seed + n, **more)
        assert draws.token_ids.tolist() == wanted.token_ids.tolist()
        assert float((draws.logprobs - wanted.logprobs).abs().max()) < 1e-3
        population.append(draws.token_ids)


async def same(population: Population, quiet: AsyncLM, seed: int, **way: Any) -> None:
    """Do the same with one population."""
    await all_the_same([population], quiet, seed, ways=[way])


def halved(rng: random.Random, count: int = COUNT) -> list[int]:
    """Ancestors by which half of the sequences are replaced by the other half."""
    order, ancestors = rng.sample(range(count), count), [*range(count)]
    for survivor, replaced in zip(order[: count // 2], order[count // 2 :], strict=False):
        ancestors[replaced] = survivor
    return ancestors
