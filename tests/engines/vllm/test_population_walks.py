"""The walk of populations on vLLM, and what ended populations give back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from genrt.contexts import Context
from genrt.lm import AsyncLM
from genrt.populations import Population
from tests.apart import drawn_apart
from tests.engines.vllm.ahead import (
    COUNT,
    Runtimes,
    run_always_ahead,
    running_ahead,
    two_runtimes,
)
from tests.engines.vllm.small import BLOCK_BYTES, forget, held, left_over
from tests.inside import engine_of
from tests.population_walk import EVENTS, HeldContexts, expect_equal, walk
from tests.population_walk import Runtime as WalkedRuntime

pytestmark = pytest.mark.vllm

TIGHT = {"max_num_seqs": 12, "block_size": 32, "kv_cache_memory_bytes": 34 * BLOCK_BYTES}
BREAKS = ("fails", "not_finite")
HELD = (AsyncLM.population, HeldContexts.begin)


@pytest.fixture(scope="module")
def at_once(llama: Path) -> Iterator[Runtimes]:
    with two_runtimes(llama, ahead=False, max_num_seqs=24) as both:
        yield both


@pytest.fixture(params=["at once", "ahead"])
def runtimes(request: pytest.FixtureRequest) -> Iterator[Runtimes]:
    with running_ahead() if request.param == "ahead" else contextlib.nullcontext():
        yield request.getfixturevalue(request.param.replace(" ", "_"))


@contextlib.contextmanager
def broken(how: str) -> Iterator[None]:
    """Have the steps of engines fail, or a row of theirs be not finite."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from genrt.engines.vllm import capture, runners

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
            patch.setattr(runners, "log_probabilities", poisoned)
        yield


async def walked(
    both: Runtimes,
    paths: list[Path],
    seed: int,
    steps: int,
    without: Sequence[str] = (),
    *,
    begin: Sequence[Callable[..., Any]] = HELD[:1],
) -> None:
    """Walk on vLLM, between the weights of two checkpoints, and end with the first one's."""
    lm, quiet = both

    async def update() -> None:
        paths.reverse()
        for each in both:
            await each.update_weights(paths[0])

    runtime = WalkedRuntime(
        lm,
        quiet,
        [each for each in EVENTS if each not in (*without, "replaced")],
        longest=90,
        tolerance=1e-3,
        update=update,
        breaks=broken,
        begin=begin,
    )
    made = await walk(runtime, seed, steps, most=4)
    if made.counts.get("updated", 0) % 2:
        await update()
    assert left_over(engine_of(lm)) == {}
    statistics = lm.statistics().engine
    assert statistics.forked > 0  # since the last restart
    assert statistics.extended > 0


@pytest.mark.parametrize("several", [0, 2])
async def test_sequences_that_wait_for_the_next_step_keep_their_tokens(
    at_once: Runtimes, several: int
) -> None:
    """More sequences than a step holds, one population with several tokens each: the first to go, or the
    last, whose tokens then wait too."""
    lm, quiet = at_once
    forget(lm)
    populations = [lm.population([[n, k] for k in range(12)]) for n in range(3)]
    await asyncio.gather(*(each.draw() for each in populations))
    for n, each in enumerate(populations):
        each.extend([[5 + n, k, 9] if n == several else [k] for k in range(12)])
    found = await asyncio.gather(*(each.draw(seed=n) for n, each in enumerate(populations)))
    for n, (each, draws) in enumerate(zip(populations, found, strict=True)):
        expect_equal(draws, await drawn_apart(quiet, [*each], seed=n), 1e-3)
        each.close()


WALKS = [(0, 24), pytest.param(1, 40, marks=pytest.mark.proof)]


@pytest.mark.promise(number=36)
@pytest.mark.parametrize(("seed", "steps"), WALKS)
async def test_each_draw_is_its_own_context_s_on_vllm(
    runtimes: Runtimes,
    llama: Path,
    other: Path,
    seed: int,
    steps: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await walked(runtimes, [llama, other], seed, steps, BREAKS)
    if "ahead" in request.node.callspec.id:
        await walked(runtimes, [llama, other], seed + 100, steps, BREAKS, begin=HELD[1:])
        run_always_ahead(monkeypatch)
        await walked(runtimes, [llama, other], seed, steps, (*BREAKS, "restarted"))


@pytest.mark.parametrize(("seed", "steps"), WALKS)
async def test_and_with_hardly_any_memory_and_steps_that_fail(
    llama: Path, other: Path, seed: int, steps: int
) -> None:
    with two_runtimes(llama, ahead=False, **TIGHT) as both:
        await walked(both, [llama, other], seed, steps, begin=HELD)
        assert both[0].statistics().engine.evicted > 0


# -- what is given back -------------------------------------------------------------------------


@pytest.fixture
def empty(runtimes: Runtimes) -> AsyncLM:
    lm = runtimes[0]
    forget(lm)
    gc.collect()
    assert held(lm) == (0, 0, 0)
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


async def test_closed_contexts_give_back_all_they_took(empty: AsyncLM) -> None:
    """Closed by hand, by ``with``, as garbage, in the middle of a question, and beside another's."""

    async def grow(context: Context, steps: int) -> None:
        for seed in range(steps):
            context.append((await context.draw(seed=seed)).token_id)

    first = empty.context([1, 2, 3])
    several = [first, *(first.fork() for _ in range(COUNT - 1))]
    await asyncio.gather(*(grow(each, 6) for each in several))
    several[2:4] = [several[0].fork(), several[1].fork()]
    await asyncio.gather(*(grow(each, 2) for each in several))
    for each in several[: COUNT // 2]:
        each.close()
    with several.pop():
        pass
    del several[:-1], first, each
    gc.collect()
    await grow(several[0], 1)
    question = asyncio.ensure_future(several[0].draw())
    await asyncio.sleep(0)
    several[0].close()
    assert (await question).token_id >= 0
    assert held(empty) == (0, 0, 0)

    one, other = empty.context([1, 2, 3]), empty.context([4, 5])
    await asyncio.gather(grow(one, 1), grow(other, 1))
    question = asyncio.ensure_future(one.draw())
    for _ in range(4):  # the question is sent, with one idle sequence
        await asyncio.sleep(0)
    other.close()
    await question
    assert held(empty)[0] == 1
    one.close()
    assert held(empty) == (0, 0, 0)


async def test_a_context_computes_a_token_a_step_beside_idle_ones_and_forks(
    empty: AsyncLM,
) -> None:
    """Idle contexts keep their sequences when others fork."""
    several = [empty.context([n, *range(30)]) for n in range(COUNT)]

    async def step(asked: Sequence[Context]) -> tuple[int, int]:
        before = empty.statistics().engine
        for each, drawn in zip(
            asked, await asyncio.gather(*(each.draw() for each in asked)), strict=True
        ):
            each.append(drawn.token_id)
        after = empty.statistics().engine
        assert after.steps - before.steps == 1
        return after.computed_tokens - before.computed_tokens, after.extended - before.extended

    for _ in range(3):
        await step(several)
    half = COUNT // 2
    assert await step(several[:half]) == (half, half)
    assert await step(several[half:]) == (COUNT - half, COUNT - half)
    await step(several)
    forks = [each.fork() for each in several[: half // 2]]
    await step([*several[: half // 2], *forks])  # of one request with the idle ones
    idle = several[half // 2 :]
    assert await step(idle) == (len(idle), len(idle))
