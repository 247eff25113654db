"""What a filter and a beam search by a reward cost beside the same by ``generate`` calls, in one run.

    python -m benchmarks.rewards --particles 32 --json rewards.json

A step extends every text by a unit of tokens and asks the model for a reward of each text. The filter
resamples; the beam search copies the texts before a step and keeps the best after it. Both run as
genrt's samplers, and as a loop that has a ``generate`` call for each text's next unit and a question for
its reward: one after the other, or all of a step together. All draw equally many tokens, because no text
ends early. Results are tokens a second; a ratio is that within a repeat. There is no row cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import genrt
from benchmarks.setups import append, taken
from genrt.inference import SMC, Sampler, TextModel, beam_search, multinomial
from genrt.lm import AsyncLM
from genrt.tokens.texts import Text

WAYS = ("together", "one_by_one")
PROMPT = "Review {number} of the small hotel by the sea, {way}: we stayed for a week, and"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a directory or a name; default: the embedded model")
    parser.add_argument("--particles", type=int, default=32, help="texts that a step extends")
    parser.add_argument("--branches", type=int, default=4, help="copies in the beam search")
    parser.add_argument("--unit", type=int, default=8, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--options", type=json.loads, help="the engine's options, as JSON")
    parser.add_argument("--quick", action="store_true", help="few repeats of few steps")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.steps = 2, 2
    result = asyncio.run(measured(arguments))
    for name in ("filter", "beam"):
        print(f"{name:7} {result[f'{name}_tokens_per_second']:8.1f} tokens a second")
        for way in WAYS:
            low, middle, high = result[f"{name}_of_{way}"]
            print(f"        {middle:.2f} x that of generate {way} ({low:.2f}, {high:.2f})")
    append(json.dumps(result), arguments.json)


async def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    async with await genrt.aload(
        arguments.model, engine_options=arguments.options, cache_bytes=0
    ) as lm:
        await repeated(lm, arguments, 0)  # everything that is slow the first time
        speeds = [
            await repeated(lm, arguments, number) for number in range(1, arguments.repeats + 1)
        ]
    found: dict[str, Any] = {"model": arguments.model or "embedded"}
    found |= {name: getattr(arguments, name) for name in ("particles", "unit", "steps")}
    for name in ("filter", "beam"):
        own = [each[name]["genrt"] for each in speeds]
        found[f"{name}_tokens_per_second"] = statistics.median(own)
        for way in WAYS:
            ratios = [each[name]["genrt"] / each[name][way] for each in speeds]
            found[f"{name}_of_{way}"] = [min(ratios), statistics.median(ratios), max(ratios)]
    return found | {"repeats": speeds, **taken()}


async def repeated(
    lm: AsyncLM, arguments: argparse.Namespace, number: int
) -> dict[str, dict[str, float]]:
    """Return tokens a second of every way, for the filter and the beam search."""
    particles, branches = arguments.particles, arguments.branches
    tokens = particles * arguments.unit * arguments.steps
    speeds: dict[str, dict[str, float]] = {"filter": {}, "beam": {}}
    for name, found in speeds.items():
        for way in ("genrt", *WAYS):
            prompt = lm.encode(PROMPT.format(number=number, way=f"{name} {way}"))
            rewards = Rewards(lm, prompt)
            began = time.perf_counter()
            if way == "genrt":
                sampler = sampler_of(name, lm, prompt, arguments, rewards)
                await sampler.run(number)
            else:
                copies = branches if name == "beam" else 1
                await by_calls(lm, prompt, arguments, rewards, way, copies, number)
            found[way] = tokens / (time.perf_counter() - began)
            expected = particles * arguments.steps
            if not expected / 2 < rewards.asked <= expected:  # equal texts are asked once
                raise RuntimeError(f"{name} {way} asked for {rewards.asked} rewards")
    return speeds


class Rewards:
    """The reward of a text: the log-probability that the model calls it good. ``asked`` counts."""

    def __init__(self, lm: AsyncLM, prompt: list[int]) -> None:
        self._lm, self._prompt, self.asked = lm, prompt, 0
        self._before, self._after = lm.encode('Review: "'), lm.encode('" Verdict:')
        self._good = lm.encode(" good")

    async def of(self, text: Text) -> float:
        return await self.of_tokens(text.token_ids)

    async def of_tokens(self, tokens: Iterable[int]) -> float:
        self.asked += 1
        asked = [*self._before, *self._prompt, *tokens, *self._after]
        return float((await self._lm.token_logprobs(asked, self._good))[0])


def sampler_of(
    name: str, lm: AsyncLM, prompt: list[int], arguments: argparse.Namespace, rewards: Rewards
) -> Sampler:
    unit, steps, particles = arguments.unit, arguments.steps, arguments.particles
    options: dict[str, Any] = {"max_tokens": unit * steps, "unit": unit, "stop": None}
    if name == "filter":
        model = TextModel(lm, prompt, twist=rewards.of, potential=rewards.of, **options)
        return SMC(model, num_particles=particles, resample_when=1.0, resample=multinomial)
    width = particles // arguments.branches
    model = TextModel(lm, prompt, **options)
    return beam_search(model, width=width, branches=arguments.branches, reward=rewards.of)


async def by_calls(
    lm: AsyncLM,
    prompt: list[int],
    arguments: argparse.Namespace,
    rewards: Rewards,
    way: str,
    copies: int,
    seed: int,
) -> None:
    """Filter, or with copies search by a beam, by a call for each text's unit and for its reward."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"max_tokens": arguments.unit, "ignore_eos": True}
    texts = [list[int]()] * (arguments.particles // copies)
    for _ in range(arguments.steps):
        texts = [text for text in texts for _ in range(copies)]
        seeds = rng.integers(2**31, size=len(texts)).tolist()
        calls = (
            lm.generate([*prompt, *text], seed=each, **options)
            for text, each in zip(texts, seeds, strict=True)
        )
        drawn = await answered(calls, way)
        texts = [[*text, *new.token_ids] for text, new in zip(texts, drawn, strict=True)]
        found = np.array(await answered(map(rewards.of_tokens, texts), way))
        if copies > 1:
            chosen = np.argsort(-found)[: len(texts) // copies]
        else:
            weights = np.exp(found - found.max())
            chosen = rng.choice(len(texts), len(texts), p=weights / weights.sum())
        texts = [texts[place] for place in chosen]


async def answered(calls: Iterable[Awaitable[Any]], way: str) -> list[Any]:
    """Await calls one after the other, or all together."""
    if way == "one_by_one":
        return [await call for call in calls]
    return await asyncio.gather(*calls)


if __name__ == "__main__":
    main()
