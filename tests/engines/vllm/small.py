"""Small vLLM engines, and their rows against transformers'."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.lm import AsyncLM
from tests.inside import (
    core_of,
    engine_of,
    in_progress,
    open_of,
    populations_of,
    texts_of,
    thread_of,
)

BLOCK = 32
BLOCK_BYTES = 2 * 2 * 32 * 2 * 4 * BLOCK
"""Layers, KV heads, head size, K and V, bytes of a float32, tokens of a block."""
TIGHT_BLOCKS = 24
TOLERANCE = 5e-4
LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 4,
    "max_lora_rank": 8,
}
Oracle = Callable[[Sequence[int]], torch.Tensor]


def load(model: Path, *, blocks: int, max_num_seqs: int, **given: Any) -> AsyncLM:
    """Open an engine with so many blocks of the KV cache, and no cache of rows."""
    options = {
        "dtype": "float32",
        "block_size": BLOCK,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 256,
        "max_model_len": 400,
        "kv_cache_memory_bytes": blocks * BLOCK_BYTES,
    } | given.pop("engine_options", {})
    return genrt.load(str(model), engine_options=options, **{"cache_bytes": 0} | given)


def tokens(count: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(320) for _ in range(count)]


def contexts_of(count: int, longest: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [tokens(choose.randint(1, longest), choose.randrange(10**9)) for _ in range(count)]


def expect_rows(oracle: Oracle, contexts: Sequence[Sequence[int]], rows: Any) -> None:
    """Each row is the model's after its context."""
    for context, row in zip(contexts, rows, strict=True):
        assert float((oracle(context) - row).abs().max()) < TOLERANCE


def runner_of(lm: AsyncLM) -> Any:
    """vLLM's model runner."""
    return core_of(lm).model_executor.driver_worker.worker.model_runner


def decode_steps_of(lm: AsyncLM) -> Any:
    """What runs an engine's decode steps."""
    return open_of(engine_of(lm)).steps


def on_engine(lm: AsyncLM, look: Callable[[Any], Any]) -> Any:
    """Call a function with the engine, on its thread."""
    return thread_of(lm).call(lambda answers: look(answers.engine)).result()


def forget(lm: AsyncLM) -> None:
    """Have the engine forget every sequence and block."""
    on_engine(lm, lambda engine: engine.forget_residents())


def begin(lm: AsyncLM, *, ahead: bool) -> Any:
    """Have an engine begin again; return what runs its decode steps."""
    forget(lm)
    steps = decode_steps_of(lm)
    steps.ahead = ahead
    vars(steps).update(_steps=0, _unused=0, _mistaken=0, _last=[])
    return steps


def left_over(engine: Any) -> dict[str, int]:
    """How much an engine holds of requests in progress, by name; nothing once all have ended."""
    scheduler, texts = core_of(engine).scheduler, texts_of(engine)
    held = {
        "in progress": in_progress(engine),
        "populations": populations_of(engine),
        "rows": engine._store,
        "waiting": texts.waiting,
        "streams": texts._streamed,
        "adapters": engine._adapters._users,
        "vLLM's texts": engine._llm_engine.output_processor.request_states,
        "woken": scheduler._waking,
        "unscored": scheduler._unscored,
    }
    found = {name: len(each) for name, each in held.items() if len(each)}
    return found | ({"scores": 1} if engine._positions else {})


def held(lm: AsyncLM) -> tuple[int, int, int]:
    """The numbers of resident sequences, of blocks that are not free, and of questions that the engine
    knows by number."""

    def look(engine: Any) -> tuple[int, int, int]:
        scheduler, resident = core_of(engine).scheduler, engine.statistics().resident
        pool = scheduler.kv_cache_manager.block_pool
        assert len(scheduler.parked) == resident
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return resident, used, len(populations_of(engine)._known)

    return on_engine(lm, look)  # type: ignore[no-any-return]


@contextlib.contextmanager
def failing(
    lm: AsyncLM, name: str = "_model_forward", error: Exception | None = None
) -> Iterator[None]:
    """Have a method of vLLM's model runner raise."""

    def fails(*_: Any, **__: Any) -> None:
        raise error or RuntimeError("scripted failure")

    runner = runner_of(lm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runner) if hasattr(type(runner), name) else runner, name, fails)
        yield


@contextlib.contextmanager
def preemptions(lm: AsyncLM) -> Iterator[list[str]]:
    """The ids of the requests that vLLM preempts in here."""
    scheduler, preempted = core_of(lm).scheduler, list[str]()
    preempt = scheduler._preempt_request

    def noted(request: Any, *rest: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_preempt_request", noted)
        yield preempted
