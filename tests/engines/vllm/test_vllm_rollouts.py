"""Rollouts on vLLM itself: log-probabilities against scores, beside adapters and rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import genrt
from genrt.generation import Conversation, Rollout, rollout
from genrt.lm import AsyncLM
from tests.generation.test_conversations import TEMPLATE

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


@pytest.fixture(scope="module")
def lm(llama: Path, loras: tuple[Path, Path]) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine_options=OPTIONS) as opened:
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


async def test_every_turn_of_a_conversation_has_the_scores_of_its_tokens(lm: AsyncLM) -> None:
    template = {"chat_template": TEMPLATE}
    talk = Conversation(lm, [{"role": "user", "content": "ab"}], chat_template_kwargs=template)
    await talk.ask(max_new_tokens=12, seed=1)
    other = talk.fork()
    for turn, each in ((1, talk), (2, other), (3, talk)):
        each.add({"role": "tool", "content": "42"}, {"role": "user", "content": f"and {turn}"})
        adapter = "a" if each is other and HAS_LORA else None
        answer = await each.ask(max_new_tokens=9, seed=turn, adapter=adapter)
        assert len(answer.token_ids) <= 9
    found = talk.trajectory()
    whole, mask = found.token_ids.tolist(), found.loss_mask
    scores = await lm.score(whole[:1], whole[1:])
    assert mask.sum() > 9
    torch.testing.assert_close(
        found.logprobs[1:][mask[1:]], scores[mask[1:]], atol=TOLERANCE, rtol=0
    )
    assert not found.logprobs[~mask].any()
    ends = (found.token_ids == lm.tokenizer.eos_token_id).sum()
    assert int(ends) >= 4  # of two answers and two tools, whether they were cut off or not
