"""The models of the benchmarks, by name: made on the spot, configurations alone, or somebody's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from genrt import models

LLAMA_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TINY = LLAMA_1B | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
LLAMA_135M = LLAMA_1B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
SHAPES: dict[str, dict[str, Any]] = {
    "dummy-135m": LLAMA_135M,
    "dummy-1b": LLAMA_1B,
    "dummy-8b": LLAMA_8B,
}


def checkpoint(name: str, directory: Path) -> str:
    """Where the model is. A dummy is a configuration alone, for weights that vLLM makes up."""
    if name not in SHAPES:
        return models.resolve(make_model(name, directory))
    from transformers import LlamaConfig

    config = LlamaConfig(**SHAPES[name], architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)
    return str(directory)


def make_model(name: str, directory: Path) -> str | None:
    """A checkpoint: random weights, scaled so that rows are far from uniform. The attention of
    ``sliding`` sees 64 tokens."""
    if name == "embedded":
        return None
    if name not in ("tiny", "1b", "sliding"):
        return name
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = LLAMA_1B if name == "1b" else TINY
    model: Any
    if name == "sliding":
        model = MistralForCausalLM(
            MistralConfig(**shape, sliding_window=64, initializer_range=0.05)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.05))
    model.to(torch.bfloat16).save_pretrained(directory)
    return str(directory)
