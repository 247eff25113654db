"""Do two runtimes in one process answer as each does alone? Rows, draws and samples, on this device.

    python -m benchmarks.two_runtimes --json two_runtimes.json

Two models of one shape and other weights, each with two adapters; one runtime keeps sequences resident,
the other does not. Each answers alone first. Then both are open and asked in turns and at once, from two
threads; the first is restarted, the second is closed, and what is left is asked again. One JSON object:
``worst_row`` is the largest absolute difference, over log-probabilities above -15, from the rows that
the runtime gave alone; ``other_draws`` and ``other_samples`` are the shares of seeded draws and samples
that are not what it gave alone; ``freed`` is the share of a runtime's device memory that closing it gave
back. Exits with 1 if rows differ by more than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import genrt
from benchmarks.checkpoints import TINY
from benchmarks.setups import taken
from genrt.lm import AsyncLM

Answers = dict[str, Any]

LORA_RANK = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 400])
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--sample-tokens", type=int, default=12)
    parser.add_argument("--tolerance", type=float, default=0.1, help="of rows in bfloat16")
    parser.add_argument("--dtype", default="bfloat16", help="adapters on a GPU take no float32")
    parser.add_argument("--options", default="{}", help="engine_options, as JSON")
    parser.add_argument("--quick", action="store_true", help="few questions, of few sequences")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.max_num_seqs, arguments.sample_tokens = [4, 24], 16, 4
    result = measure(arguments)
    print(json.dumps(result))
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if max(phase["worst_row"] for phase in result["phases"].values()) > arguments.tolerance:
        sys.exit(1)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask alone, together, after a restart and after a close."""
    with tempfile.TemporaryDirectory() as directory:
        models = [make_model(Path(directory) / str(seed), seed=seed) for seed in (1, 2)]
        loras = [
            [make_lora(model.parent / f"{model.name}-{name}", seed=seed) for name in "ab"]
            for seed, model in enumerate(models)
        ]

        def opened(which: int) -> AsyncLM:
            options = {
                "dtype": arguments.dtype,
                "max_num_seqs": arguments.max_num_seqs,
                "max_model_len": 256,
                "skip_tokenizer_init": True,
                "enable_lora": True,
                "max_loras": 2,
                "max_lora_rank": LORA_RANK,
                # Not the bytes of KV memory on a GPU: with these, vLLM measures no graphs, which is
                # when it clears those of all others.
                **(
                    {"gpu_memory_utilization": 0.2}
                    if torch.cuda.is_available()
                    else {"kv_cache_memory_bytes": 2**28}
                ),
                **json.loads(arguments.options),
            }
            lm = genrt.load(
                str(models[which]), engine_options=options, cache_bytes=0, residency=which == 0
            )
            for name, path in zip("ab", loras[which], strict=True):
                lm.add_adapter_sync(name, path)
            return lm

        def ask(lm: AsyncLM) -> Answers:
            return dict(answers(lm, arguments.sizes, arguments.sample_tokens))

        alone, freed = [], []
        for which in (0, 1):
            before = _free()
            lm = opened(which)
            taking = before - _free()
            alone.append(ask(lm))
            lm.close()
            freed.append(1 - (before - _free()) / taking if taking > 0 else 1.0)
            _tell(f"runtime {which} alone: done")
        phases: dict[str, dict[str, float]] = {}

        def compare(phase: str, found: Sequence[Answers], expected: Sequence[Answers]) -> None:
            phases[phase] = _differences(found, expected)
            _tell(f"{phase}: {phases[phase]}")

        first, second = opened(0), opened(1)
        compare("in turns", _in_turns([first, second], arguments), alone)
        with ThreadPoolExecutor(2) as threads:
            compare("at once", list(threads.map(ask, [first, second])), alone)
        first.restart()
        compare("second, after the first restarted", [ask(second)], alone[1:])
        compare("first, restarted", [ask(first)], alone[:1])
        second.close()
        compare("first, after the second closed", [ask(first)], alone[:1])
        first.close()
    return {**taken(), "sizes": arguments.sizes, "phases": phases, "freed": freed}


def answers(lm: AsyncLM, sizes: Sequence[int], tokens: int) -> Iterator[tuple[str, Any]]:
    """Ask every kind of question with every number of sequences, base model and adapters."""
    for size in sizes:
        generator = torch.Generator().manual_seed(size)
        prompts = torch.randint(0, lm.vocab_size, (size, 24), generator=generator).tolist()
        for adapter in (None, "a", "b"):
            rows = lm.batch_next_token_logprobs_sync(prompts, adapter=adapter)
            yield f"rows {size} {adapter}", rows.cpu()
            contexts = [list(prompt) for prompt in prompts]
            for step in range(3):
                drawn = lm.batch_draw_sync(contexts, seed=1000 * step, adapter=adapter)
                for context, token_id in zip(contexts, drawn.token_ids.tolist(), strict=True):
                    context.append(token_id)
            yield f"draws {size} {adapter}", [context[-3:] for context in contexts]
            sampled = lm.batch_sample_sync(
                prompts, max_tokens=tokens, seed=5, temperature=0.7, adapter=adapter
            )
            yield f"samples {size} {adapter}", sampled


def make_model(directory: Path, *, seed: int) -> Path:
    """Write a small random Llama; other seeds have other weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.05))
    model.save_pretrained(directory)
    return directory


def make_lora(directory: Path, *, seed: int) -> Path:
    """Write a random LoRA adapter of the attention's queries and outputs."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    width, heads = TINY["hidden_size"], TINY["num_attention_heads"] * TINY["head_dim"]
    weights = {}
    for layer in range(TINY["num_hidden_layers"]):
        for name, fan_in, fan_out in (("q_proj", width, heads), ("o_proj", heads, width)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (LORA_RANK, fan_in)), ("B", (fan_out, LORA_RANK))):
                entries = 0.2 * torch.randn(shape, generator=generator)
                weights[f"{prefix}.lora_{part}.weight"] = entries
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "target_modules": ["q_proj", "o_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _in_turns(runtimes: Sequence[AsyncLM], arguments: argparse.Namespace) -> list[Answers]:
    """Ask both, question by question."""
    found: list[Answers] = [{} for _ in runtimes]
    asking = [answers(lm, arguments.sizes, arguments.sample_tokens) for lm in runtimes]
    for pair in zip(*asking, strict=True):
        for each, (name, answer) in zip(found, pair, strict=True):
            each[name] = answer
    return found


def _differences(found: Sequence[Answers], expected: Sequence[Answers]) -> dict[str, float]:
    worst, counts = 0.0, {"draws": [0, 0], "samples": [0, 0]}
    for one, other in zip(found, expected, strict=True):
        for name, answer in one.items():
            kind = name.split()[0]
            if kind == "rows":
                likely = other[name] > -15
                worst = max(worst, float((answer - other[name])[likely].abs().max()))
                continue
            counts[kind][0] += sum(map(list.__ne__, answer, other[name]))
            counts[kind][1] += len(answer)
    shares = {f"other_{kind}": wrong / asked for kind, (wrong, asked) in counts.items()}
    return {"worst_row": worst, **shares}


def _free() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
