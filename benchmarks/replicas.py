"""What do replicas cost, and what do they give? Added latency of a flush, draws a second.

    python -m benchmarks.replicas --json replicas.json                        # exact engines, on CPUs
    python -m benchmarks.replicas --model dummy-8b --replicas 2 --json replicas.json   # by vLLM, on GPUs

A runtime in this process and ones over replicas are asked the same, one after the other. One JSON
object: ``flush`` has, for 1 and 64 draws and for 64 rows, where they are computed and on the host, the
median milliseconds of a call ``alone``, over ``one`` replica, and what that ``adds``; ``draws`` has, for
each length of the contexts, the draws a second of so many populations at once: alone, over ``several``
replicas, and their ratio to alone. ``texts`` has the same of the tokens a second that as many prompts of
the first length generate. ``smc`` has the median seconds of an inference of so many particles and steps:
``alone``, and over ``one`` replica, ``shipped`` as it is by default and with its ``steps`` asked here, in
turns; and the ratio of alone to shipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import genrt
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.setups import append
from genrt.engines.exact import NGram
from genrt.inference import SMC, TextModel
from genrt.lm import AsyncLM


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a checkpoint or a shape for vLLM; none: exact engines")
    parser.add_argument("--options", type=json.loads, default={}, help="engine_options, as JSON")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cluster", help="the Ray cluster; a local one")
    parser.add_argument("--populations", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="sequences of a population")
    parser.add_argument("--contexts", type=int, nargs="+", help="their lengths; 128")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.repeats, arguments.populations = 5, 10, 2
        arguments.size = 8
    arguments.contexts = arguments.contexts or [16 if arguments.quick else 128]
    name = arguments.model or "exact"
    with tempfile.TemporaryDirectory() as directory:
        if arguments.model in SHAPES:
            arguments.options = {"load_format": "dummy", "skip_tokenizer_init": True} | (
                arguments.options
            )
            arguments.model = checkpoint(arguments.model, Path(directory))
        result = {"model": name} | measure(arguments)
    print(json.dumps(result))
    append(json.dumps(result), arguments.json)


def opened(arguments: argparse.Namespace, name: str) -> AsyncLM:
    """Open a runtime whose every answer is computed."""
    replicas = {"alone": None, "one": 1}.get(name, arguments.replicas)
    more: dict[str, Any] = {"cache_bytes": 0, "seed": 1, "replicas": replicas}
    if replicas is not None:
        more["cluster"] = arguments.cluster
    if arguments.model:
        return genrt.load(arguments.model, engine_options=arguments.options, **more)
    model = NGram.random(256, order=1, seed=0)
    options = {"max_batch_size": 512, **arguments.options}
    return genrt.load(model, engine="exact", engine_options=options, **more)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one after the other: replicas and this process's engine are never open at once on a GPU."""
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "replicas": arguments.replicas,
        "cluster": arguments.cluster,
    }
    flush: dict[str, dict[str, float]] = {}
    draws: dict[str, dict[str, float]] = {str(each): {} for each in arguments.contexts}
    texts: dict[str, float] = {}
    smc = inferred(arguments)
    for name in ("alone", "one", "several"):
        with opened(arguments, name) as lm:
            if name in ("alone", "one"):
                for kind, milliseconds in flushes(lm, arguments).items():
                    flush.setdefault(kind, {})[name] = milliseconds
            if name != "one":
                for context in arguments.contexts:
                    found = asyncio.run(draws_a_second(lm, arguments, context))
                    draws[str(context)][name] = found
                texts[name] = asyncio.run(tokens_a_second(lm, arguments, arguments.contexts[0]))
        print(f"{name}: {flush} {draws} {texts}", file=sys.stderr, flush=True)
    for each in (*draws.values(), texts):
        each["several_ratio"] = each["several"] / each["alone"]
    for each in flush.values():
        each["adds"] = each["one"] - each["alone"]
    return result | {"flush": flush, "draws": draws, "texts": texts, "smc": smc}


def inferred(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of an inference, alone and over a replica; both are open on a CPU."""
    times: dict[str, list[float]] = {"alone": [], "shipped": [], "steps": []}
    if arguments.model:
        return {}
    with opened(arguments, "alone") as alone, opened(arguments, "one") as one:
        for number in range(3 + max(5, arguments.repeats // 10)):
            for name, lm in (("alone", alone), ("shipped", one), ("steps", one)):
                model = TextModel(lm, [1, 2], max_tokens=arguments.steps, stop=None)
                smc = SMC(model, num_particles=arguments.size)
                seen: dict[str, Any] = {"on_step": lambda *_: None} if name == "steps" else {}
                began = time.perf_counter()
                smc.run_sync(number, **seen)
                times[name].append(time.perf_counter() - began)
    found = {name: statistics.median(each[3:]) for name, each in times.items()}
    return found | {"shipped_ratio": found["alone"] / found["shipped"]}


def flushes(lm: AsyncLM, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median milliseconds of a call, by what is asked."""
    vocab_size = lm.vocab_size

    def contexts(number: int, count: int) -> list[list[int]]:
        return [[(number * 7 + each) % vocab_size, each] for each in range(count)]

    asked: dict[str, Callable[[int], Any]] = {
        "1 draw": lambda number: lm.batch_draw_sync(contexts(number, 1)),
        "64 draws": lambda number: lm.batch_draw_sync(contexts(number, 64)),
        "64 rows": lambda number: lm.batch_next_token_logprobs_sync(contexts(number, 64)),
        "64 rows on the host": lambda number: lm.batch_next_token_logprobs_sync(
            contexts(number, 64), device="cpu"
        ),
    }
    medians = {}
    for kind, ask in asked.items():
        times = []
        for number in range(arguments.repeats + 5):
            began = time.perf_counter()
            ask(number)
            times.append(1000 * (time.perf_counter() - began))
        medians[kind] = statistics.median(times[5:])
    return medians


async def draws_a_second(lm: AsyncLM, arguments: argparse.Namespace, context: int) -> float:
    """Return how many tokens populations draw, each going on by itself, the first steps left out."""
    prompts = [
        [(number * 31 + place) % lm.vocab_size for place in range(context)]
        for number in range(arguments.populations)
    ]
    populations = [lm.population(prompt, arguments.size) for prompt in prompts]

    async def go_on(population: genrt.Population, steps: int) -> None:
        for _ in range(steps):
            population.append((await population.draw()).token_ids)

    await asyncio.gather(*(go_on(each, 3) for each in populations))
    began = time.perf_counter()
    await asyncio.gather(*(go_on(each, arguments.steps) for each in populations))
    seconds = time.perf_counter() - began
    drawn: int = arguments.populations * arguments.size * arguments.steps
    return drawn / seconds


async def tokens_a_second(lm: AsyncLM, arguments: argparse.Namespace, context: int) -> float:
    """Return how many tokens whole texts draw, after as many prompts as populations have sequences."""
    count, chance = arguments.populations * arguments.size, random.Random(arguments.replicas)

    async def generated(steps: int) -> int:
        prompts = [[chance.randrange(lm.vocab_size) for _ in range(context)] for _ in range(count)]
        options: dict[str, Any] = {"max_tokens": steps, "ignore_eos": True, "stop": [], "seed": 1}
        return sum(len(each.token_ids) for each in await lm.batch_generate(prompts, **options))

    await generated(3)
    began = time.perf_counter()
    tokens = await generated(arguments.steps)
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
