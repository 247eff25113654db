"""Two papers' algorithms on the embedded model: rejection against masking, powers against best of N.

    python -m benchmarks.papers --json papers.jsonl

*Rejection* (Lipkin et al. 2025): texts without the letter e, by a predicate. Masking asks it about the
whole vocabulary after every prefix; adaptive weighted rejection about the tokens that it draws. The
particles are equally many. A run has a predicate of its own, so no answer is known beforehand.

*Power* (Karan & Du 2025): texts of equal length from p to the power 4, by blocks: each block is drawn at
temperature 1/4, then the text makes Metropolis–Hastings moves. Beside them are the model itself, a low
temperature, and the likeliest of as many texts as take a chain's drawn tokens. Computed tokens count too:
texts of one batch share prefixes, and a move computes again what it has cut. The runs of all seeds share
forwards, so only tokens are compared, not times.

A result has every seed's numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import genrt
from benchmarks.setups import append, taken
from genrt.constraints import predicate
from genrt.inference import (
    AWRS,
    SMC,
    Law,
    TextModel,
    importance_sampling,
    resample_move,
    systematic,
)
from genrt.inference.text_model import Proposal
from genrt.lm import AsyncLM

SENTENCE = "The fox ran to a river and"
PROPOSALS: dict[str, Proposal] = {
    "masking": "mask",
    "AWRS, 2 accepted": AWRS(),
    "AWRS, 4 accepted": AWRS(accepts=4),
}
PARTICLES = 4

PROMPTS = [
    "The strangest thing about the old lighthouse was that",
    "A triangle is a shape that has",
]
ALPHA = 4.0
TEXTS = 8
"""How many texts a seed draws from each prompt by each method."""

TokenIds: TypeAlias = tuple[int, ...]
Runs: TypeAlias = list[dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few seeds of short texts")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    for result in asyncio.run(measured(quick=arguments.quick)):
        append(json.dumps(result), arguments.json)
        runs = result["runs"]
        means = ", ".join(
            f"{name} {statistics.fmean(run[name] for run in runs):.4g}" for name in runs[0]
        )
        print(f"{result['method']:24} {means}")


async def measured(*, quick: bool) -> list[dict[str, Any]]:
    async with await genrt.aload(engine_options={"dtype": "float32"}, cache_bytes=0) as lm:
        rejection = await by_rejection(lm, *((2, 2, 1) if quick else (16, 64, 4)))
        power = await by_power(lm, *((2, 4, 2, 1) if quick else (6, 16, 8, 3)))
    papers = {"rejection": rejection, "power": power}
    return [
        {"paper": paper, "method": method, "runs": runs, **taken()}
        for paper, methods in papers.items()
        for method, runs in methods.items()
    ]


async def by_rejection(lm: AsyncLM, masked: int, rejected: int, length: int) -> dict[str, Runs]:
    """Return the runs of each proposal: the checks of a token, the seconds, the log evidence."""
    asked = 0

    def without_e(text: str) -> bool:
        nonlocal asked
        asked += 1
        return "e" not in text.lower()

    found: dict[str, Runs] = {}
    for name, proposal in PROPOSALS.items():
        found[name] = []
        for seed in range(-1, masked if proposal == "mask" else rejected):
            constraint = predicate(without_e, lm, max_concurrent=1)
            model = TextModel(
                lm, SENTENCE, max_tokens=length, stop=None, constraint=constraint, proposal=proposal
            )
            asked, began = 0, time.perf_counter()
            result = await SMC(model, num_particles=PARTICLES).run(max(seed, 0))
            seconds = time.perf_counter() - began
            if seed >= 0:  # everything is slow the first time
                checks = asked / (PARTICLES * length)
                numbers = {
                    "checks": checks,
                    "seconds": seconds,
                    "log_evidence": result.log_evidence,
                }
                found[name].append(numbers)
    return found


async def by_power(lm: AsyncLM, seeds: int, length: int, unit: int, moves: int) -> dict[str, Runs]:
    """Return the runs of each method: ``-log p`` of its texts, the share of different pairs among all
    pairs of adjacent tokens, the number of different texts, and the tokens drawn and computed for one."""
    cold = 1 / ALPHA

    async def plain(prompt: str, seed: int, count: int, temperature: float = 1.0) -> list[TokenIds]:
        model = TextModel(lm, prompt, max_tokens=length, stop=None, temperature=temperature)
        return [*(await importance_sampling(model, num_particles=count).run(seed)).token_ids]

    async def moved(prompt: str, seed: int, particles: int) -> list[TokenIds]:
        model = TextModel(Law(lm, prompt, power=ALPHA), max_tokens=length, stop=None, unit=unit)
        result = await resample_move(model, num_particles=particles, moves=moves).run(seed)
        chosen = systematic(np.random.default_rng(seed), result.log_weights)
        return [result.token_ids[place] for place in chosen]

    async def alone(prompt: str, seed: int) -> list[TokenIds]:
        own = range(TEXTS * seed, TEXTS * (seed + 1))
        found = await asyncio.gather(*(moved(prompt, each, particles=1) for each in own))
        return [text for [text] in found]

    async def runs(draw: Callable[[str, int], Awaitable[list[TokenIds]]]) -> Runs:
        """Draw for every seed and prompt at once; keep the likeliest of each ``len(drawn) / TEXTS``."""
        before, places = lm.statistics(), [*product(range(seeds), PROMPTS)]
        drawn = await asyncio.gather(*(draw(prompt, seed) for seed, prompt in places))
        did, count = lm.statistics().since(before), TEXTS * len(places)
        tokens = {"drawn": did.batcher.questions / count}
        tokens["computed"] = did.engine.computed_tokens / count
        found: Runs = []
        for (_, prompt), texts in zip(places, drawn, strict=True):
            rows = await lm.batch_score([lm.encode(prompt)] * len(texts), texts)
            costs = [-float(row.sum()) for row in rows]
            best = [
                min(range(first, first + len(texts) // TEXTS), key=costs.__getitem__)
                for first in range(0, len(texts), len(texts) // TEXTS)
            ]
            kept = [texts[place] for place in best]
            pairs = [pair for ids in kept for pair in pairwise(ids)]
            found.append(
                {
                    "nats": statistics.fmean(costs[place] for place in best),
                    "pairs": len({*pairs}) / len(pairs),
                    "texts": len({*kept}),
                }
                | tokens
            )
        by_seed = [
            found[first : first + len(PROMPTS)] for first in range(0, len(found), len(PROMPTS))
        ]
        return [
            {name: statistics.fmean(run[name] for run in each) for name in each[0]}
            for each in by_seed
        ]

    found = {
        "the model": await runs(partial(plain, count=TEXTS)),
        "temperature 1/4": await runs(partial(plain, count=TEXTS, temperature=cold)),
        "power 4, chains": await runs(alone),
        "power 4, particles": await runs(partial(moved, particles=TEXTS)),
    }
    many = round(found["power 4, chains"][0]["drawn"] / length)
    for name, temperature in {f"best of {many}": 1.0, f"best of {many}, 1/4": cold}.items():
        found[name] = await runs(partial(plain, count=TEXTS * many, temperature=temperature))
    return found


if __name__ == "__main__":
    main()
