"""What sequential Monte Carlo costs beside the draws it is made of, in one run.

    python -m benchmarks.smc --particles 64 --json smc.json

SMC runs texts of a model under a JSON schema with enumerations, integers and nested arrays, resampling
included. Beside it the same questions are asked by ``await lm.draw(token_ids, mask=...)`` alone: as many
contexts in as many steps, equally long and equally shared, under the masks of that run, which are there
before the clock starts. Contexts differ from those of the run in their first tokens alone, so that both
begin with prefixes that nobody has asked about, and grow resident sequences of their own. There is no
row cache. Both are told as wall time of a particle's step, and their ratio is that within a repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import genrt
from benchmarks.setups import taken
from genrt.constraints import abitmasks, json_schema
from genrt.inference import SMC, Info, State, TextModel
from genrt.lm import AsyncLM

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["city", "river", "mountain", "country"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "neighbours": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "direction": {"enum": ["north", "east", "south", "west"]},
                    "distances": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 3,
                        "items": {"type": "integer", "minimum": 1, "maximum": 999},
                    },
                },
                "required": ["direction", "distances"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["kind", "population", "neighbours"],
    "additionalProperties": False,
}
PROMPTS = "{number}, {mode}: a place as a JSON object with kind, population, neighbours.\n"


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of wall time a particle-step, and how many of these there were."""

    smc: float
    draw: float
    particle_steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a directory or a name; default: the embedded model")
    parser.add_argument("--particles", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--options", type=json.loads, help="the engine's options, as JSON")
    parser.add_argument("--quick", action="store_true", help="few repeats of short texts")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.max_tokens = 2, 30
    result = asyncio.run(measured(arguments))
    for name in ("smc", "draw"):
        print(f"{name:5} {result[f'{name}_us']:8.1f} us a particle-step")
    print(f"ratio {result['ratio']:8.2f} ({result['lowest']:.2f} to {result['highest']:.2f})")
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(json.dumps(result) + "\n")


async def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    async with await genrt.aload(
        arguments.model, engine_options=arguments.options, cache_bytes=0
    ) as lm:
        await repeated(lm, arguments, number=0)  # everything that is slow the first time
        costs = [
            await repeated(lm, arguments, number=number)
            for number in range(1, arguments.repeats + 1)
        ]
    ratios = [cost.smc / cost.draw for cost in costs]
    return {
        "model": arguments.model or "embedded",
        "particles": arguments.particles,
        "smc_us": 1000 * statistics.median(cost.smc for cost in costs),
        "draw_us": 1000 * statistics.median(cost.draw for cost in costs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "repeats": [asdict(cost) for cost in costs],
        **taken(),
    }


async def repeated(lm: AsyncLM, arguments: argparse.Namespace, *, number: int) -> Cost:
    constraint = json_schema(SCHEMA, lm)
    prompt, other = (
        lm.encode(PROMPTS.format(number=number, mode=mode)) for mode in ("sampled", "retried")
    )
    model = TextModel(lm, prompt, max_tokens=arguments.max_tokens, constraint=constraint)
    smc = SMC(model, num_particles=arguments.particles)
    state, taken = smc.init(number), []
    began = time.perf_counter()
    while not state.done:
        before = state
        state, info = await smc.step(before)
        taken.append((before, info))
    in_smc = time.perf_counter() - began
    asked = [
        [(other + list(p.token_ids), p.constraint_state) for p in grown(before, info)]
        for before, info in taken
    ]
    asked = [step for step in asked if step]  # none, where all that resampling left were over
    masks = [await abitmasks([constraint for _, constraint in step]) for step in asked]
    began = time.perf_counter()
    for step, packed in zip(asked, masks, strict=True):
        await asyncio.gather(
            *(lm.draw(context, mask=mask) for (context, _), mask in zip(step, packed, strict=True))
        )
    in_draws = time.perf_counter() - began
    particle_steps = sum(map(len, asked))
    return Cost(1000 * in_smc / particle_steps, 1000 * in_draws / particle_steps, particle_steps)


def grown(state: State, info: Info) -> list[Any]:
    """The particles that this step asked about: its resampled ones, but for those that were over."""
    asked = (info.token_ids >= 0) | np.isneginf(info.log_increments)
    return [state.particles[ancestor] for ancestor in info.ancestors[asked]]


if __name__ == "__main__":
    main()
