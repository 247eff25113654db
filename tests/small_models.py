"""Small random checkpoints, tokenizers and LoRA adapters, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_CORPUS = (
    "The capital of France is Paris. The capital of Italy is Rome.",
    "A particle is a text that is still being written; its weight says how well it goes.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京 is a city. 12 + 30 = 42",
)


def make_llama(
    directory: Path,
    *,
    vocab_size: int = 320,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_position_embeddings: int = 512,
    tokenizer: bool = True,
    tied: bool = False,
) -> Path:
    """A random Llama in float32 safetensors, with a byte-level tokenizer if asked (``vocab_size`` of at
    least 258 then). Its weights are scaled up so that rows are far from uniform and every token of
    the context matters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    _fill(model, seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    if tokenizer:
        make_tokenizer(vocab_size).save_pretrained(directory)
    return directory


def make_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most ``vocab_size`` tokens: 0 is ``<s>``, 1 is ``</s>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def make_lora(directory: Path, model_dir: Path, *, seed: int, rank: int = 8) -> Path:
    """A random LoRA adapter over every linear layer of ``make_llama``'s model, strong enough that the
    rows with it are plainly others."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            scale = 0.5 / parameter.shape[-1] ** 0.5
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def _fill(model: torch.nn.Module, *, seed: int) -> None:
    """Matrices with entries of variance ``gain² / fan-in``; the gains were chosen by looking at the
    rows: an entropy well below the uniform's, and differences when any one token changes."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            gain = 1.0 if "embed" in name else 2.0
            fan_in = 1 if "embed" in name else parameter.shape[1]
            parameter.data = gain * fan_in**-0.5 * torch.randn(parameter.shape, generator=generator)
