"""A model in two stages of a pipeline, each a process of vLLM's: slower, and right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import genrt
from tests.cluster.test_vllm_replicas import answers, assert_equal
from tests.small_models import make_llama

pytestmark = [pytest.mark.vllm, pytest.mark.proof]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**24,
    "enable_lora": True,
    "max_lora_rank": 8,
}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def stages_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would have a NUMA node for each worker."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def test_two_stages_answer_as_one_engine_does(
    llama: Path, loras: tuple[Path, Path], tmp_path: Path
) -> None:
    other = load_file(make_llama(tmp_path / "other", seed=7) / "model.safetensors")
    with genrt.load(llama, engine_options=OPTIONS, seed=1) as one:
        one.add_adapter_sync("a", loras[0])
        expected = answers(one)
        one.update_weights_sync(other)
        renewed = answers(one)
    with genrt.load(llama, engine_options=OPTIONS | STAGES, seed=1) as two:
        two.add_adapter_sync("a", loras[0])
        assert_equal(answers(two), expected)
        two.update_weights_sync(other)
        assert_equal(answers(two), renewed)
        assert two.statistics().engine.resident == 0, "nothing stays where workers are processes"
