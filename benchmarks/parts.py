"""Does each part of the vLLM engine answer right on the device at hand? Against transformers.

    python -m benchmarks.parts --json parts.json

A small random Llama answers scores, texts, structured texts, rows under adapters and rows after new
weights; ``benchmarks.fidelity`` compares rows, draws and populations. The result is one JSON object:
``scores`` and ``weights`` are the largest differences of log-probabilities over -15 from transformers';
``texts`` counts greedy texts that differ, ``structures`` those that break their structure, ``adapters``
rows that are nearer to another adapter's reference than to their own. All five should be 0, or within
float32's rounding. Adapters run in bfloat16, as vLLM's kernels need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.setups import append

RANK = 4
LIKELY = -15.0
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runner", choices=["V1", "V2"], help="default: vLLM's own")
    parser.add_argument("--options", default="{}", help="engine_options, as JSON")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if arguments.runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(arguments.runner == "V2"))
    with tempfile.TemporaryDirectory() as directory:
        result = measure(Path(directory), json.loads(arguments.options))
    print(json.dumps(result))
    append(json.dumps(result), arguments.json)


def measure(directory: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Return the result: ask one engine for each part, and compare."""
    import vllm

    import genrt

    torch.backends.cuda.matmul.allow_tf32 = False
    first, second = (make_llama(directory / f"model-{seed}", seed) for seed in (0, 1))
    adapters = {name: make_adapter(directory / name, first, name) for name in ("a", "b", "c")}
    random = Random(0)
    contexts = [
        [random.randrange(2, 320) for _ in range(random.randrange(1, 90))] for _ in range(40)
    ]
    with genrt.load(str(first), engine_options={"dtype": "float32", **more}) as lm:
        result: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "vllm": vllm.__version__,
            "runner": getattr(lm._thread.engine, "runner", None),
        }
        model = network(first, str(lm.device))
        result["scores"] = scores(lm, model, contexts)
        result["texts"] = texts(lm, model, contexts)
        result["structures"] = structures(lm)
        lm.update_weights_sync(str(second))
        asked = [(context, None) for context in contexts]
        result["weights"] = apart(
            rows_of(lm, asked), {None: network(second, str(lm.device))}, asked
        )
    options = {"dtype": "bfloat16", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with genrt.load(str(first), engine_options=options | more) as lm:
        for name, path in adapters.items():
            lm.add_adapter_sync(name, path)
        result["adapters"] = under_adapters(lm, first, adapters, contexts)
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in result.items()}


def scores(lm: Any, model: Any, contexts: Sequence[list[int]]) -> float:
    """Return how far the scores of continuations are from transformers'."""
    pairs = [
        (each[: len(each) // 2 or 1], each[len(each) // 2 :]) for each in contexts if len(each) > 3
    ]
    found = lm.batch_score_sync([a for a, _ in pairs], [b for _, b in pairs])
    worst = 0.0
    for (start, rest), score in zip(pairs, found, strict=True):
        rows = reference(model, [*start, *rest])
        expected = rows[range(len(start) - 1, len(start) - 1 + len(rest)), rest]
        likely = expected > LIKELY
        worst = max(worst, float((expected - score)[likely].abs().max()) if likely.any() else 0.0)
    return worst


def texts(lm: Any, model: Any, contexts: Sequence[list[int]]) -> int:
    """Return how many greedy texts differ from transformers', ties aside."""
    wrong = 0
    done = lm.batch_generate_sync(list(contexts), max_tokens=12, temperature=0.0)
    for context, completion in zip(contexts, done, strict=True):
        tokens = list(context)
        for token in completion.token_ids:
            row = reference(model, tokens)[-1]
            if float(row.max() - row[token]) > 1e-3:
                wrong += 1
                break
            tokens.append(token)
    return wrong


def structures(lm: Any) -> int:
    """Return how many structured texts break their structure."""
    prompts = [lm.encode("The capital")] * 16
    schemas = lm.batch_generate_sync(prompts, json_schema=SCHEMA, max_tokens=120, seed=1)
    regexes = lm.batch_generate_sync(prompts, regex="[ab]{2,6}c", max_tokens=30, seed=2)
    choices = lm.batch_generate_sync(prompts, choice=["red", "green"], max_tokens=30, seed=3)
    wrong = 0
    for each in schemas:
        try:
            wrong += json.loads(each.text).keys() != {"n", "b"}
        except ValueError:
            wrong += each.finish_reason != "length"
    wrong += sum(re.fullmatch("[ab]{2,6}c", each.text) is None for each in regexes)
    return wrong + sum(each.text not in ("red", "green") for each in choices)


def under_adapters(
    lm: Any, model: Path, adapters: dict[str, Path], contexts: Sequence[list[int]]
) -> int:
    """Return how many rows are nearer to another adapter's reference than to their own, in flushes of
    more adapters than fit a step, whose sequences go on by a token three times."""
    names = [None, *adapters]
    models = {name: network(model, str(lm.device), adapters.get(name or "")) for name in names}
    crossed = 0
    going = [(list(context), names[n % len(names)]) for n, context in enumerate(contexts)]
    for step in range(4):
        for row, (context, own) in zip(rows_of(lm, going), going, strict=True):
            far = {
                name: float((reference(each, context)[-1].exp() - row.cpu().exp()).abs().sum())
                for name, each in models.items()
            }
            crossed += min(far, key=lambda name: far[name]) != own
        going = [([*context, 2 + step], name) for context, name in going]
    return crossed


Asked = Sequence[tuple[list[int], str | None]]
"""Contexts and the adapters that they are asked under."""


def rows_of(lm: Any, asked: Asked) -> list[torch.Tensor]:
    """Return the rows of one flush."""

    async def ask() -> list[torch.Tensor]:
        rows = [lm.next_token_logprobs(context, adapter=name) for context, name in asked]
        return [*await asyncio.gather(*rows)]

    return asyncio.run(ask())


def apart(rows: Sequence[torch.Tensor], models: dict[str | None, Any], asked: Asked) -> float:
    """Return the largest difference of rows from those of each context's model."""
    worst = 0.0
    for row, (context, name) in zip(rows, asked, strict=True):
        expected = reference(models[name], context)[-1]
        worst = max(worst, float((row.cpu() - expected)[expected > LIKELY].abs().max()))
    return worst


@torch.no_grad()
def reference(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' rows after each token of a context, on the CPU."""
    logits = model(torch.tensor([list(token_ids)], device=model.device)).logits[0]
    rows: torch.Tensor = logits.float().log_softmax(dim=-1).cpu()
    return rows


def network(directory: Path, device: str, adapter: Path | None = None) -> Any:
    """Return transformers' model, with an adapter merged into its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if adapter is not None:
        weights, parameters = (
            load_file(adapter / "adapter_model.safetensors"),
            dict(model.named_parameters()),
        )
        for name, down in weights.items():
            if name.endswith("lora_A.weight"):
                target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                up = weights[name.replace("lora_A", "lora_B")]
                parameters[target].data += 2.0 * up @ down
    return model.to(device).eval()


def make_llama(directory: Path, seed: int) -> Path:
    """Write a random Llama with a tokenizer of bytes."""
    from tests.small_models import make_llama as make

    return make(directory, seed=seed, hidden_size=256, layers=2, heads=4, kv_heads=2)


def make_adapter(directory: Path, model: Path, name: str) -> Path:
    """Write a random LoRA adapter of the attention's projections, with a scale of 2."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(ord(name))
    weights = {}
    for key, weight in load_file(model / "model.safetensors").items():
        if ".self_attn." in key:
            place = f"base_model.model.{key.removesuffix('.weight')}"
            shapes = {"lora_A": (RANK, weight.shape[1]), "lora_B": (weight.shape[0], RANK)}
            for part, shape in shapes.items():
                noise = torch.randn(shape, generator=generator)
                weights[f"{place}.{part}.weight"] = 0.5 * noise / shape[1] ** 0.5
    save_file(weights, directory / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": targets,
        "base_model_name_or_path": None,
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


if __name__ == "__main__":
    main()
