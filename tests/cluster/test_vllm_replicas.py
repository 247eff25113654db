"""Two vLLM engines in processes: rows, weights, adapters and populations as of one, a death included."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import genrt
from tests.cluster.ray_program import identity
from tests.cluster.test_replicas import until

pytestmark = [pytest.mark.vllm, pytest.mark.proof]

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 16,
    "enable_lora": True,
    "max_lora_rank": 8,
    "kv_cache_memory_bytes": 2**26,
}
CONTEXTS = [[3 + (n * k) % 200 for n in range(length)] for k in (1, 7) for length in (1, 5, 40)]


@pytest.mark.promise(number=39)
@pytest.mark.promise(number=40)
def test_two_replicas_answer_as_one_engine_does(
    llama: Path, loras: tuple[Path, Path], tmp_path: Path
) -> None:
    from tests.small_models import make_llama

    other = make_llama(tmp_path / "other", seed=7)

    def answers(lm: genrt.AsyncLM) -> list[torch.Tensor]:
        lm.clear_cache()
        population = lm.population(CONTEXTS[2], 8)
        drawn = []
        for step in range(4):
            draws = population.draw_sync(seed=100 * step)
            population.append(draws.token_ids)
            drawn.append(draws.token_ids)
        return [
            lm.batch_next_token_logprobs_sync(CONTEXTS),
            lm.batch_next_token_logprobs_sync(CONTEXTS, adapter="a"),
            torch.stack(drawn).float(),
            torch.cat(lm.batch_score_sync(CONTEXTS, [[7, 8, 9, 10]] * len(CONTEXTS), adapter="a")),
            torch.tensor(lm.sample_sync([5, 6], max_tokens=6, seed=4)).float(),
        ]

    with genrt.load(llama, engine_options=OPTIONS, seed=1) as one:
        one.add_adapter_sync("a", loras[0])
        expected = answers(one)
        one.update_weights_sync(load_file(other / "model.safetensors"))
        renewed = answers(one)
    with genrt.load(llama, engine_options=OPTIONS, seed=1, replicas=2) as two:
        two.add_adapter_sync("a", loras[0])
        for mine, theirs in zip(answers(two), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)
        two.update_weights_sync(load_file(other / "model.safetensors"))
        for mine, theirs in zip(answers(two), renewed, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)
        os.kill(two.run_sync(identity), signal.SIGKILL)
        for mine, theirs in zip(answers(two), renewed, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)
        until(two, "healthy", restarts=1)
        for mine, theirs in zip(answers(two), renewed, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)
