"""What sequential Monte Carlo costs beside the draws it is made of, in one run.

    python -m benchmarks.smc --particles 64 --json smc.json

SMC runs texts of a model under a JSON schema with enumerations, integers and nested arrays, resampling
included. Beside it the same questions are asked, under the masks of that run, which are there before the
clock starts: by a population alone, with the run's seeds, tokens and ancestors; and by ``await
lm.draw(token_ids, mask=...)`` alone, as many contexts in as many steps, equally long and equally shared.
The latter differ from those of the run in their first tokens, so that both begin with prefixes that
nobody has asked about; the population's first step alone finds a prompt that was asked about. A program
draws the same texts by ``p.text``, and another one draws them token by token. There is no row cache. All
are told as wall time of a particle's step, and a ratio is that within a repeat.
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
import torch

import genrt
from benchmarks.setups import append, taken
from genrt.constraints import MaskedConstraint, abitmasks, json_schema
from genrt.inference import SMC, Execution, Info, Program, State, TextModel
from genrt.inference.model import model_seed
from genrt.lm import AsyncLM
from genrt.populations import Population

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
BESIDE = ("population", "draw", "program", "tokens")
PROMPTS = "{number}, {mode}: a place as a JSON object with kind, population, neighbours.\n"


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of wall time a particle-step, and how many of these there were."""

    smc: float
    population: float
    draw: float
    program: float
    tokens: float
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
    print(f"{'smc':11} {result['smc_us']:8.1f} us a particle-step")
    for name in BESIDE:
        low, middle, high = result[f"of_{name}"]
        print(
            f"{name:11} {result[f'{name}_us']:8.1f}, smc is {middle:.2f} x that ({low:.2f}, {high:.2f})"
        )
    append(json.dumps(result), arguments.json)


async def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    async with await genrt.aload(
        arguments.model, engine_options=arguments.options, cache_bytes=0
    ) as lm:
        await repeated(lm, arguments, number=0)  # everything that is slow the first time
        costs = [
            await repeated(lm, arguments, number=number)
            for number in range(1, arguments.repeats + 1)
        ]
    found: dict[str, Any] = {
        "model": arguments.model or "embedded",
        "particles": arguments.particles,
    }
    for name in ("smc", *BESIDE):
        found[f"{name}_us"] = 1000 * statistics.median(getattr(cost, name) for cost in costs)
    for name in BESIDE:
        ratios = [cost.smc / getattr(cost, name) for cost in costs]
        found[f"of_{name}"] = [min(ratios), statistics.median(ratios), max(ratios)]
    return found | {"repeats": [asdict(cost) for cost in costs], **taken()}


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
    masks = [
        await abitmasks([constraint for _, constraint in step]) if step else None for step in asked
    ]
    wholes = [
        None if packed is None else spread(info, packed)
        for (_, info), packed in zip(taken, masks, strict=True)
    ]
    began = time.perf_counter()
    await drawn_by_population(lm.population(prompt, arguments.particles), taken, wholes)
    in_population = time.perf_counter() - began
    began = time.perf_counter()
    for step, packed in zip(asked, masks, strict=True):
        if packed is not None:  # none, where all that resampling left were over
            await asyncio.gather(
                *(
                    lm.draw(context, mask=mask)
                    for (context, _), mask in zip(step, packed, strict=True)
                )
            )
    in_draws = time.perf_counter() - began
    particle_steps = sum(map(len, asked))
    per_step = 1000 / particle_steps
    in_program, in_tokens = [
        await programmed(lm, constraint, arguments, number=number, whole=whole)
        for whole in (True, False)
    ]
    return Cost(
        in_smc * per_step,
        in_population * per_step,
        in_draws * per_step,
        in_program,
        in_tokens,
        particle_steps,
    )


async def programmed(
    lm: AsyncLM,
    constraint: MaskedConstraint,
    arguments: argparse.Namespace,
    *,
    number: int,
    whole: bool,
) -> float:
    """Return the milliseconds of a particle's step of SMC over a program of the same texts, which draws
    whole ones or tokens."""
    mode = "text" if whole else "tokens"
    prompt = lm.encode(PROMPTS.format(number=number, mode=mode))
    end = lm.tokenizer.eos_token_id
    only_end = torch.zeros(lm.vocab_size, dtype=torch.bool)
    only_end[end] = True

    async def record(p: Execution) -> str:
        context, state = p.context(prompt), constraint.start()
        if whole:
            return await p.text(context, max_tokens=arguments.max_tokens, constraint=constraint)
        for count in range(arguments.max_tokens):
            is_last = count == arguments.max_tokens - 1
            mask: Any = state.mask() & only_end if is_last else state
            token = await p.sample(context, mask=mask)
            if token == end:
                break
            context.append(token)
            state = state.advance(token)
        return lm.decode(context.token_ids[len(prompt) :])

    began = time.perf_counter()
    result = await SMC(Program(lm, record), num_particles=arguments.particles).run(number)
    seconds = time.perf_counter() - began
    return 1000 * seconds / sum(int(was_asked(info).sum()) for info in result.infos)


async def drawn_by_population(
    population: Population, taken: list[tuple[State, Info]], masks: list[torch.Tensor | None]
) -> None:
    """Ask what these steps asked; the particles go on with their tokens."""
    for (before, info), packed in zip(taken, masks, strict=True):
        if info.resampled:
            population.resample(info.ancestors)
        if packed is None:
            continue
        seed = model_seed(before.seed_sequence(1))  # of the second kernel of SMC
        await population.draw(masks=packed, where=was_asked(info), seed=seed)
        population.append(info.token_ids[:, 0])


def spread(info: Info, packed: torch.Tensor) -> torch.Tensor:
    """Return a mask for each particle, of those of the particles that were asked about."""
    whole = torch.zeros(len(info.token_ids), packed.shape[1], dtype=torch.int32)
    whole[torch.from_numpy(was_asked(info))] = packed
    return whole


def was_asked(info: Info) -> Any:
    """Which particles this step asked about: its resampled ones, but for those that were over."""
    return (info.token_ids[:, 0] >= 0) | np.isneginf(info.log_increments)


def grown(before: State, info: Info) -> list[Any]:
    """Those particles."""
    return [before.particles[ancestor] for ancestor in info.ancestors[was_asked(info)]]


if __name__ == "__main__":
    main()
