"""Rollouts on vLLM itself: log-probabilities against scores and against transformers, beside adapters and
rows, under preemption, through restarts; what leaving leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import genrt
from genrt.generation import Rollout, rollout
from genrt.lm import AsyncLM
from genrt.tokens.sampling import truncate
from tests.scripted import passes

pytestmark = pytest.mark.vllm

BLOCK = 2 * 2 * 32 * 2 * 4 * 32
"""Layers, KV heads, head size, K and V, bytes of a float32, tokens of a block."""
HAS_LORA = not torch.cuda.is_available()
"""vLLM's LoRA kernels for CUDA take 16 bits only, and these tests are of float32."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 24 * BLOCK,
} | ({"enable_lora": True, "max_loras": 2} if HAS_LORA else {})
needs_lora = pytest.mark.skipif(not HAS_LORA, reason="vLLM's LoRA on CUDA has no float32")
TOLERANCE = 5e-4
Oracle = Callable[[Sequence[int]], Tensor]


@pytest.fixture(scope="module")
def lm(llama: Path, loras: tuple[Path, Path]) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine_options=OPTIONS, restart="auto") as opened:
        if HAS_LORA:
            opened.add_adapter_sync("a", loras[0])
        yield opened


def batch_of(count: int, longest: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random prompts of all lengths; the padding is a token that prompts have too."""
    choose = random.Random(seed)
    lengths = [choose.randint(1, longest) for _ in range(count)]
    ids = torch.full((count, longest + 2), 7)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.tensor(
            [choose.choice([7, choose.randrange(2, 320)]) for _ in range(length)]
        )
    return ids, torch.tensor(lengths)


async def scored(lm: AsyncLM, found: Rollout, lengths: Tensor, adapter: str | None = None) -> float:
    """How far a rollout's log-probabilities are from the scores of its tokens."""
    apart = 0.0
    for row, completion in enumerate(found.completions):
        length, end = int(lengths[row]), int(found.unpadded_sequence_lengths[row])
        whole = found.output_ids[row, :end].tolist()
        scores = await lm.score(whole[:length], whole[length:], adapter=adapter)
        assert whole[length:] == list(completion.token_ids)
        if end > length:
            apart = max(apart, float((found.logprobs[row, length:end] - scores).abs().max()))
    return apart


@needs_lora
async def test_raw_log_probabilities_are_the_scores_beside_adapters_and_rows(lm: AsyncLM) -> None:
    ids, lengths = batch_of(12, 40, seed=1)
    options: dict[str, Any] = {"pad_value": 7, "max_new_tokens": 12, "temperature": 0.8}
    beside = asyncio.gather(*(lm.next_token_logprobs([1, n]) for n in range(2, 12)))
    base, tuned, _ = await asyncio.gather(
        rollout(lm, ids, lengths, seed=1, top_p=0.9, **options),
        rollout(lm, ids, lengths, seed=1, adapter="a", **options),
        beside,
    )
    assert await scored(lm, base, lengths) < TOLERANCE
    assert await scored(lm, tuned, lengths, adapter="a") < TOLERANCE
    assert not torch.equal(base.output_ids, tuned.output_ids)
    again = await rollout(lm, ids, lengths, seed=1, top_p=0.9, concurrency=2, **options)
    assert torch.equal(again.output_ids, base.output_ids)


async def test_log_probabilities_of_the_law_stay_right_under_preemption(
    lm: AsyncLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = lm._thread.engine
    scheduler = engine._core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def counted(request: Any, *rest: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    ids, lengths = batch_of(8, 60, seed=2)
    law: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "min_p": 0.01}
    options: dict[str, Any] = {"pad_value": 7, "seed": 3, "ignore_eos": True, **law}
    processed: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "max_new_tokens": 120}
    found = await rollout(lm, ids, lengths, **options, **processed)
    assert preempted
    for row, completion in enumerate(found.completions):
        context = ids[row, : lengths[row]].tolist()
        for place in (0, 1, 40, 119):
            expected = truncate(oracle([*context, *completion.token_ids[:place]]), **law)
            own = completion.logprobs[place]
            assert own == pytest.approx(float(expected[completion.token_ids[place]]), abs=TOLERANCE)


async def left_over(lm: AsyncLM) -> list[int]:
    """What the engine still holds of texts, after a turn in which it forgets what was withdrawn."""
    await passes(10)
    await lm.next_token_logprobs([1, 2, random.randrange(300)])
    engine: Any = lm._thread.engine
    counters = lm.statistics().batcher
    outputs = engine._llm_engine.output_processor
    return [
        counters.queued,
        counters.in_flight,
        len(outputs.request_states),
        engine._texts.running,
    ]


async def test_two_runtimes_in_a_process_tell_each_its_own_law(lm: AsyncLM, llama: Path) -> None:
    ids, lengths = batch_of(6, 20, seed=4)
    options: dict[str, Any] = {"pad_value": 7, "seed": 2, "max_new_tokens": 8, "temperature": 0.5}
    law: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
    own = await rollout(lm, ids, lengths, **options, **law)
    async with await genrt.aload(str(llama), engine_options=OPTIONS) as other:
        first, second = await asyncio.gather(
            rollout(lm, ids, lengths, **options, **law), rollout(other, ids, lengths, **options)
        )
        assert await scored(other, second, lengths) < TOLERANCE
    assert torch.equal(first.output_ids, second.output_ids)
    assert torch.equal(first.logprobs, own.logprobs)
    assert float((first.logprobs - second.logprobs).abs().max()) > 0.1
    again = await rollout(lm, ids, lengths, **options, **law)  # the other one is closed
    assert torch.equal(again.logprobs, own.logprobs)


async def test_a_rollout_outlives_its_vllm(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, lengths = batch_of(6, 30, seed=9)
    options: dict[str, Any] = {"pad_value": 7, "seed": 5, "max_new_tokens": 20, "ignore_eos": True}
    adapter = "a" if HAS_LORA else None
    told: dict[str, Any] = {"adapter": adapter, "logprobs_mode": "processed_logprobs"}
    expected = await rollout(lm, ids, lengths, **options, **told)
    engine: Any = lm._thread.engine
    runner = engine._core.engine_core.model_executor.driver_worker.worker.model_runner
    execute, steps = runner.execute_model, []

    def fails(*arguments: Any, **named: Any) -> Any:
        steps.append(1)
        if len(steps) == 8:
            raise RuntimeError("scripted failure")
        return execute(*arguments, **named)

    monkeypatch.setattr(runner, "execute_model", fails)
    monkeypatch.setattr(engine._core, "reset_prefix_cache", lambda: False)
    found = await rollout(lm, ids, lengths, **options, **told)
    assert lm._thread.engine is not engine
    assert torch.equal(found.output_ids, expected.output_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
    assert await left_over(lm) == [0, 0, 0, 0]
