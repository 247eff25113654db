"""The walk of populations on vLLM, also with steps run ahead, and what ended populations give back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.lm import AsyncLM
from genrt.populations import Population
from tests.engines.vllm import ahead
from tests.engines.vllm.ahead import COUNT, run_always_ahead, running_ahead
from tests.population_walk import EVENTS, Runtime, walk
from tests.small_models import make_llama

pytestmark = pytest.mark.vllm

OPTIONS = ahead.OPTIONS | {"max_num_seqs": 24}
BLOCK = 2 * 2 * 32 * 2 * 4 * 16
"""Bytes: layers, KV heads, head size, K and V, of a float32, tokens."""


@contextlib.contextmanager
def opened(llama: Path, way: str) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    """One that is walked on, also with steps run ahead of the question, as on a GPU; and a quiet one."""
    options = OPTIONS | ({"kv_cache_memory_bytes": 100 * BLOCK} if way == "tight" else {})
    with (
        genrt.load(str(llama), engine_options=OPTIONS, cache_bytes=0) as quiet,
        # Also while the engine is opened again.
        running_ahead() if way == "ahead" else contextlib.nullcontext(),
        genrt.load(str(llama), engine_options=options, cache_bytes=0) as lm,
    ):
        yield lm, quiet


@pytest.fixture(scope="module", params=["at once", "ahead"])
def runtimes(llama: Path, request: pytest.FixtureRequest) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    with opened(llama, request.param) as both:
        yield both


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for ``llama``."""
    return make_llama(tmp_path_factory.mktemp("other") / "model", seed=7)


@contextlib.contextmanager
def broken(how: str) -> Iterator[None]:
    """Have the steps of all engines fail, or a row of theirs be not finite."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from genrt.engines.vllm import capture, step_launches

    log_probabilities = capture.log_probabilities

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("scripted failure")

    def poisoned(logits: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = log_probabilities(logits, **options).clone()
        rows[-1, 0] = float("nan")
        return rows

    with pytest.MonkeyPatch.context() as patch:
        if how == "fails":
            patch.setattr(GPUModelRunner, "_model_forward", fails)
        else:
            patch.setattr(step_launches, "log_probabilities", poisoned)
        yield


def left(lm: AsyncLM) -> tuple[int, int]:
    """How many vLLM requests and populations are in progress."""
    engine: Any = lm._thread.engine
    look = lambda _: (len(engine._in_progress), len(engine._populations))
    return lm._thread.call(look).result()


async def walked(both: tuple[AsyncLM, AsyncLM], paths: list[Path], seed: int, steps: int) -> None:
    lm, quiet = both

    async def update() -> None:
        paths.reverse()
        for each in both:
            await each.update_weights(paths[0])

    runtime = Runtime(lm, quiet, EVENTS, longest=80, tolerance=1e-3, update=update, breaks=broken)
    made = await walk(runtime, seed, steps, most=4)
    if made.counts["updated"] % 2:
        await update()
    assert left(lm) == (0, 0)
    statistics = lm.statistics().engine
    assert statistics.forked > 0  # since the last restart
    assert statistics.extended > 0


PROOF = [pytest.param(seed, 150, marks=pytest.mark.proof) for seed in range(1, 4)]


@pytest.mark.promise(number=36)
@pytest.mark.parametrize(("seed", "steps"), [(0, 40), *PROOF])
async def test_each_draw_is_its_own_context_s_on_vllm(
    runtimes: tuple[AsyncLM, AsyncLM], llama: Path, other: Path, seed: int, steps: int
) -> None:
    await walked(runtimes, [llama, other], seed, steps)


@pytest.mark.parametrize(("seed", "steps"), PROOF)
async def test_and_with_hardly_any_memory(llama: Path, other: Path, seed: int, steps: int) -> None:
    with opened(llama, "tight") as both:
        await walked(both, [llama, other], seed, steps)
        assert both[0].statistics().engine.evicted > 0


@pytest.mark.parametrize(("seed", "steps"), [(0, 40), *PROOF])
async def test_and_with_every_step_run_ahead(
    llama: Path, other: Path, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_always_ahead(monkeypatch)
    with opened(llama, "ahead") as both:
        await walked(both, [llama, other], seed, steps)
        assert both[0].statistics().engine.speculated > 0


# -- what is given back -------------------------------------------------------------------------


def held(lm: AsyncLM) -> tuple[int, int, int]:
    """How many sequences are resident, questions known by number, and blocks that are not free."""

    def look(_: object) -> tuple[int, int, int]:
        engine: Any = lm._thread.engine
        pool = engine._core.engine_core.scheduler.kv_cache_manager.block_pool
        free, known = pool.get_num_free_blocks(), engine._populations._known
        return engine.statistics().resident, len(known), pool.num_gpu_blocks - 1 - free

    return lm._thread.call(look).result()


@pytest.fixture
def empty(runtimes: tuple[AsyncLM, AsyncLM]) -> AsyncLM:
    lm = runtimes[0]
    engine: Any = lm._thread.engine
    lm._thread.call(lambda _: engine.forget_residents()).result()
    gc.collect()
    assert held(lm)[0] == 0
    return lm


async def grown(population: Population, steps: int) -> None:
    for seed in range(steps):
        population.append((await population.draw(seed=100 * seed)).token_ids)


async def test_a_closed_population_gives_back_all_it_took(empty: AsyncLM) -> None:
    for steps in (1, 2, 20):
        with empty.population([1, 2, 3], COUNT) as population:
            await grown(population, steps)
            population.resample([0, 1] * (COUNT // 2))
            await population.draw()
            assert held(empty)[0] >= 1
        assert held(empty) == (0, 0, 0)


async def test_what_a_copy_goes_on_from_is_given_back_with_the_copy(empty: AsyncLM) -> None:
    with empty.population([1, 2, 3], COUNT) as population:
        await grown(population, 4)
        copy = population.take(range(4))
    before = empty.statistics().engine
    assert before.resident >= 4
    await grown(copy, 2)
    after = empty.statistics().engine
    assert after.computed_tokens - before.computed_tokens == 8
    copy.close()
    copy.close()
    assert held(empty) == (0, 0, 0)


async def test_closed_in_the_middle_of_a_draw_it_gives_back_what_that_took(empty: AsyncLM) -> None:
    population = empty.population([1, 2, 3], COUNT)
    await grown(population, 3)
    draw = asyncio.ensure_future(population.draw())
    await asyncio.sleep(0)
    population.close()
    assert len((await draw).token_ids) == COUNT
    assert held(empty)[0] <= 1  # the questions before it, whose sequences went on
    assert held(empty)[1] == 0


async def test_closing_after_a_restart_and_after_the_runtime_is_quiet(
    empty: AsyncLM, llama: Path
) -> None:
    with empty.population([1, 2, 3], COUNT) as population:
        await grown(population, 3)
        await empty.arestart()
    assert held(empty) == (0, 0, 0)
    async with await genrt.aload(str(llama), engine_options=OPTIONS) as lm:
        late = lm.population([1, 2, 3], 4)
        await late.draw()
    late.close()


@pytest.mark.proof
async def test_ten_thousand_short_lived_populations_leave_nothing(empty: AsyncLM) -> None:
    for number in range(500):
        several = [empty.population([number % 300, number // 300, 2, n], 2) for n in range(20)]
        await asyncio.gather(*(grown(population, 1) for population in several))
        for population in several[::2]:
            population.close()
        del population, several
    gc.collect()
    resident, known, _ = held(empty)
    assert resident <= 200
    assert known <= 1
