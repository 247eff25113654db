"""What several test files share: small checkpoints on disk, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Continuous integration runs the same examples every time; everyone else's runs go on looking.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a tokenizer; float32, 512 positions."""
    from tests.small_models import make_llama

    return make_llama(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def loras(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random LoRA adapters of ``llama``."""
    from tests.small_models import make_lora

    root = tmp_path_factory.mktemp("loras")
    return make_lora(root / "a", llama, seed=1), make_lora(root / "b", llama, seed=2)
