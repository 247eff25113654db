"""Faults and crowds on vLLM itself: hardly any memory, eight threads at once, a thread that dies, a
second runtime in the process. Every row is held against transformers'."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.protocol import Engine
from genrt.errors import Closed, EngineDied
from genrt.lm import AsyncLM
from tests.scripted import PATIENCE_SECONDS, Gate

pytestmark = pytest.mark.vllm

BLOCK = 2 * 2 * 32 * 2 * 4 * 32
"""Bytes: layers, KV heads, head size, K and V, of a float32, tokens."""
BLOCKS = 20
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 300,
    "kv_cache_memory_bytes": BLOCKS * BLOCK,
}
TOLERANCE = 5e-4
Oracle = Callable[[Sequence[int]], torch.Tensor]


def load(model: Path, **arguments: Any) -> AsyncLM:
    return genrt.load(str(model), engine_options=OPTIONS, cache_bytes=0, **arguments)


@pytest.fixture(scope="module")
def tight(llama: Path) -> Iterator[AsyncLM]:
    """A runtime whose 20 blocks of 32 tokens hold few of the sequences that it is asked about."""
    with load(llama) as lm:
        yield lm


def contexts(count: int, longest: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [
        [choose.randrange(320) for _ in range(choose.randrange(1, longest + 1))]
        for _ in range(count)
    ]


def right(oracle: Oracle, asked: Sequence[Sequence[int]], rows: Sequence[torch.Tensor]) -> bool:
    return all(
        float((oracle(context) - row).abs().max()) < TOLERANCE
        for context, row in zip(asked, rows, strict=True)
    )


# -- hardly any memory ----------------------------------------------------------------------------


@pytest.mark.promise(number=4)
async def test_rows_are_right_where_a_fraction_of_the_sequences_fit(
    tight: AsyncLM, oracle: Oracle
) -> None:
    """Two hundred contexts and the samples beside them need over a thousand blocks; there are twenty."""
    asked = contexts(200, 290, seed=1)
    before = tight.statistics()
    samples = asyncio.create_task(
        tight.batch_sample([[n, 5] for n in range(12)], max_tokens=120, temperature=0.0)
    )
    rows, drawn = await asyncio.gather(
        asyncio.gather(*map(tight.next_token_logprobs, asked)),
        tight.batch_draw(asked[:50], masks=[[3]] * 50),
    )
    assert sum(-(-len(context) // 32) for context in asked) > 40 * BLOCKS
    assert right(oracle, asked, rows)
    assert drawn.token_ids.tolist() == [3] * 50
    for number, sample in enumerate(await samples):
        greedy = oracle([number, 5, *sample[:-1]])
        assert float(greedy.max() - greedy[sample[-1]]) < TOLERANCE
    after = tight.statistics()
    assert after.engine.evicted > before.engine.evicted
    assert (after.batcher.queued, after.batcher.in_flight) == (0, 0)
    assert after.batcher.failed == before.batcher.failed


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.promise(number=22)
def test_eight_threads_with_loops_of_their_own_or_blocking_are_right_at_once(
    tight: AsyncLM, oracle: Oracle
) -> None:
    """Half of what each asks is asked by all."""
    start = threading.Barrier(8)
    shared = contexts(15, 120, seed=2)

    def thread(number: int) -> tuple[list[list[int]], list[torch.Tensor]]:
        asked = shared + contexts(15, 120, seed=100 + number)
        random.Random(number).shuffle(asked)
        start.wait(PATIENCE_SECONDS)
        if number % 2:
            return asked, [tight.next_token_logprobs_sync(context) for context in asked]

        async def ask() -> list[torch.Tensor]:
            return await asyncio.gather(*map(tight.next_token_logprobs, asked))

        return asked, asyncio.run(ask())

    before = tight.statistics()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ends = [each.result(120) for each in [pool.submit(thread, n) for n in range(8)]]
    after = tight.statistics()
    assert all(right(oracle, asked, rows) for asked, rows in ends)
    assert after.batcher.questions - before.batcher.questions == 8 * 30
    assert after.engine.rows - before.engine.rows + after.batcher.deduplicated == (
        8 * 30 + before.batcher.deduplicated
    )


# -- a thread that dies ---------------------------------------------------------------------------


class Fatal(BaseException):
    """What no ``except Exception`` stops."""


@pytest.mark.promise(number=6)
@pytest.mark.parametrize("where", ["in a step", "between two steps"])
def test_when_the_engines_thread_dies_everyone_gets_the_reason(llama: Path, where: str) -> None:
    """Those in flight and queued, on loops and in threads, and whoever asks later."""
    gate = Gate()

    def dies(*_: Any) -> Any:
        gate.go_through()
        raise Fatal("the thread is gone")

    with load(llama) as lm, concurrent.futures.ThreadPoolExecutor(4) as pool:
        engine: Any = lm._thread.engine
        assert len(lm.sample_sync([1], max_tokens=2)) == 2
        dying = None
        if where == "in a step":
            engine.step = dies
        else:
            dying = lm._thread.call(dies)

        async def ask() -> list[BaseException | torch.Tensor]:
            asking = map(lm.next_token_logprobs, contexts(6, 50, seed=3))
            return await asyncio.gather(*asking, return_exceptions=True)

        on_a_loop = pool.submit(asyncio.run, ask())
        sample = pool.submit(lm.sample_sync, [1], max_tokens=9)
        gate.wait_until_held()
        row = pool.submit(lm.next_token_logprobs_sync, [4, 4])
        gate.open()
        errors: list[Any] = [*on_a_loop.result(PATIENCE_SECONDS)]
        errors += [sample.exception(PATIENCE_SECONDS), row.exception(PATIENCE_SECONDS)]
        lm._thread._thread.join(PATIENCE_SECONDS)
        assert not lm._thread._thread.is_alive()
        assert dying is None or isinstance(dying.exception(PATIENCE_SECONDS), Fatal)
        later: list[Callable[[], Any]] = [
            lambda: lm.next_token_logprobs_sync([1]),
            lambda: asyncio.run(lm.sample([1], max_tokens=2)),
            lambda: lm._thread.call(lambda _: None).result(PATIENCE_SECONDS),
        ]
        for call in later:
            with pytest.raises(EngineDied) as caught:
                call()
            errors.append(caught.value)
        assert len(errors) == 11
        assert all(isinstance(error, EngineDied) for error in errors)
        assert all("the thread is gone" in str(error) for error in errors)
        s = lm.statistics().batcher
        assert (s.queued, s.in_flight) == (0, 0)


# -- two runtimes ---------------------------------------------------------------------------------


def ask(lm: AsyncLM, asked: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The rows of these contexts, asked at once on a loop of their own."""

    async def together() -> list[torch.Tensor]:
        return await asyncio.gather(*map(lm.next_token_logprobs, asked))

    return asyncio.run(together())


@pytest.mark.promise(number=23)
def test_a_runtime_is_right_while_another_loads(
    tight: AsyncLM, llama: Path, oracle: Oracle
) -> None:
    asked = contexts(20, 100, seed=7)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, llama)
        rounds = [ask(tight, asked)]
        while not loading.done():
            rounds.append(ask(tight, asked))
        loading.result().close()
    assert all(right(oracle, asked, rows) for rows in rounds)


@pytest.mark.promise(number=23)
def test_two_runtimes_work_at_once_and_one_outlives_the_others_close(
    tight: AsyncLM, llama: Path, oracle: Oracle
) -> None:
    """What is asked of the second when it is closed ends; what the first is asked meanwhile is right."""
    mine, theirs = contexts(40, 100, seed=4), contexts(40, 100, seed=5)
    gate = Gate()
    with load(llama) as other, concurrent.futures.ThreadPoolExecutor(3) as pool:
        both = [pool.submit(ask, tight, mine), pool.submit(ask, other, theirs)]
        assert right(oracle, mine, both[0].result(PATIENCE_SECONDS))
        assert right(oracle, theirs, both[1].result(PATIENCE_SECONDS))

        engine: Any = other._thread.engine
        step = engine.step

        def held() -> Any:
            gate.go_through()
            return step()

        engine.step = held
        lost = pool.submit(ask, other, theirs)
        gate.wait_until_held()
        closing = pool.submit(other.close)
        assert isinstance(lost.exception(PATIENCE_SECONDS), Closed)
        assert right(oracle, theirs, ask(tight, theirs))
        gate.open()
        closing.result(PATIENCE_SECONDS)
        assert right(oracle, mine, ask(tight, mine))


def tensors_of(engine: Engine) -> list[weakref.ref[torch.Tensor]]:
    """vLLM's weights and KV cache."""
    owner: Any = engine
    runner = owner._core.engine_core.model_executor.driver_worker.worker.model_runner
    tensors = [*runner.model.parameters(), *runner.kv_caches]
    return [weakref.ref(tensor) for tensor in tensors]


@pytest.mark.promise(number=23)
def test_a_closed_runtimes_weights_and_blocks_are_free(llama: Path, tight: AsyncLM) -> None:
    with load(llama) as lm:
        lm.batch_next_token_logprobs_sync(contexts(10, 50, seed=6))
        held = tensors_of(lm._thread.engine)
        assert len(held) > 10
        assert all(reference() is not None for reference in held)
    gc.collect()
    assert [reference() for reference in held if reference() is not None] == []
    assert all(reference() is not None for reference in tensors_of(tight._thread.engine))
