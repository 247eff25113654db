"""What blocks of known tokens cost, and what a draft model's blocks give, on this device.

    python -m benchmarks.blocks --model dummy-8b --draft dummy-1b --context 256 --json blocks.json

decode      a step of vLLM's own loop, two lengths, the difference
draw        a step of a population of the model: one draw for all, whose tokens it appends
draft       the same of the draft model
advance     one ``Population.advance`` by k random tokens of each sequence
score       the same by ``score`` and ``extend``
block       a ``draw_block`` of the draft model, an ``advance`` of the model, and half of both resampled

One JSON object for each number of particles and each k: milliseconds, medians over the repeats;
``of_draw``, ``advance`` over ``draw``; ``gain``, the tokens a second of blocks over those of ``draw``;
``advance_steps``, the engine's steps in one ``advance``. The contexts are random and asked once before
a repeat is timed.

vLLM captures its graphs for steps of up to 512 tokens if ``max_num_seqs`` is at least 256.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import genrt
from benchmarks.checkpoints import checkpoint
from benchmarks.setups import append, prepared
from benchmarks.step_modes import Particles, clock, decode

Step = Callable[[], Awaitable[None]]


def main() -> None:
    arguments = parsed()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # LLM's engine in this process
    print(f"{'particles x k':>14}" + "".join(f"{name:>9.9}" for name in COLUMNS), flush=True)
    for result in measure(arguments):
        place = f"{result['particles']} x {result['k']}"
        numbers = "".join(f"{result[name] or 0:9.2f}" for name in COLUMNS)
        print(f"{place:>14}{numbers}", flush=True)
        append(json.dumps(result), arguments.json)


COLUMNS = ("decode", "draw", "draft", "advance", "score", "block", "of_draw", "gain")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, dummy-1b, dummy-8b, or a directory")
    add("--draft", default="tiny", help="the same, with the same vocabulary")
    add("--particles", nargs="+", type=int, default=[8, 64])
    add("--units", nargs="+", type=int, default=[4, 8], help="the tokens of a block")
    add("--context", type=int, default=256, help="tokens before the first step")
    add("--steps", type=int, default=12, help="timed in a repeat")
    add("--repeats", type=int, default=7)
    add("--quick", action="store_true", help="few and short")
    add("--without-decode", action="store_true", help="open no LLM")
    add("--options", type=json.loads, default={}, help="options of all engines, as JSON")
    add("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.particles, arguments.units = [3], [2]
        arguments.context, arguments.steps, arguments.repeats = 40, 3, 2
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results for one number of particles and one k after the other."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner())
        thread = stack.enter_context(ThreadPoolExecutor(1))
        most = max(arguments.particles)
        longest = arguments.context + (arguments.steps + 4) * max(*arguments.units, 2)
        paths, setups = list[str](), list[Any]()
        for name in (arguments.model, arguments.draft):
            folder = Path(directory) / str(len(paths))
            folder.mkdir()
            paths.append(checkpoint(name, folder))
            setup = prepared(name, paths[-1], arguments.options, max_num_seqs=max(most, 256))
            setups.append(setup.sized(longest, 4 * most * (longest // setup.block_size + 1)))
        llm: Any = None
        if not arguments.without_decode:
            from vllm import LLM

            llm = thread.submit(lambda: LLM(paths[0], **setups[0].options)).result()
        model, draft = [
            stack.enter_context(genrt.load(path, engine_options=setup.options, cache_bytes=0))
            for path, setup in zip(paths, setups, strict=True)
        ]
        seeds, common = iter(range(10**9)), setups[0].surroundings | {"context": arguments.context}
        names = {"model": arguments.model, "draft_model": arguments.draft}

        def particles(count: int) -> Particles:
            own = arguments.context, 0, arguments.steps, model.vocab_size, next(seeds)
            return Particles(count, *own)

        def median(make: Callable[[], float]) -> float:
            make()  # for warming up
            gc.collect()
            return round(statistics.median(make() for _ in range(arguments.repeats)), 3)

        for count in arguments.particles:

            def timed(kind: Callable[..., Any], *more: Any, count: int = count) -> float:
                contexts = particles(count).contexts
                return median(lambda: loop.run(run(kind, contexts, arguments.steps, *more)))

            found: dict[str, Any] = {"particles": count, "decode": None}
            if llm is not None:

                def loop_of_vllm(count: int = count) -> float:
                    return thread.submit(decode, llm, particles(count), arguments.steps).result().ms

                found["decode"] = median(loop_of_vllm)
            found["draw"], found["draft"] = timed(draws, model), timed(draws, draft)
            for k in arguments.units:
                found |= {
                    "k": k,
                    "advance": timed(advances, model, k),
                    "score": timed(scores, model, k),
                    "block": timed(blocks, model, draft, k),
                }
                steps = loop.run(engine_steps(model, particles(count).contexts, k))
                found |= {
                    "advance_steps": steps,
                    "of_draw": round(found["advance"] / found["draw"], 3),
                    "gain": round(k * found["draw"] / found["block"], 3),
                }
                yield found | names | common


async def run(kind: Callable[..., Any], contexts: list[list[int]], steps: int, *more: Any) -> float:
    """Return the milliseconds of a step of this kind."""
    with ExitStack() as stack:
        step: Step = await kind(stack, contexts, *more)
        await step()
        started = clock()
        for _ in range(steps):
            await step()
        return (clock() - started) * 1e3 / steps


async def begun(stack: ExitStack, lm: genrt.AsyncLM, contexts: list[list[int]]) -> genrt.Population:
    """Return a population of these contexts and a token each, which were asked once."""
    population = stack.enter_context(lm.population(contexts))
    population.append((await population.draw()).token_ids)
    return population


async def draws(stack: ExitStack, contexts: list[list[int]], lm: genrt.AsyncLM) -> Step:
    population = await begun(stack, lm, contexts)

    async def step() -> None:
        population.append((await population.draw()).token_ids)

    return step


async def advances(stack: ExitStack, contexts: list[list[int]], lm: genrt.AsyncLM, k: int) -> Step:
    population = await begun(stack, lm, contexts)

    async def step() -> None:
        await population.advance(torch.randint(0, lm.vocab_size, (len(contexts), k)))

    return step


async def scores(stack: ExitStack, contexts: list[list[int]], lm: genrt.AsyncLM, k: int) -> Step:
    population = await begun(stack, lm, contexts)

    async def step() -> None:
        tokens = torch.randint(0, lm.vocab_size, (len(contexts), k)).tolist()
        await population.score(tokens)
        population.extend(tokens)

    return step


async def blocks(
    stack: ExitStack,
    contexts: list[list[int]],
    lm: genrt.AsyncLM,
    draft: genrt.AsyncLM,
    k: int,
) -> Step:
    target, proposal = [await begun(stack, each, contexts) for each in (lm, draft)]
    half = len(contexts) // 2

    async def step() -> None:
        await target.advance((await proposal.draw_block(k)).token_ids)
        order, ancestors = torch.randperm(len(contexts)), torch.arange(len(contexts))
        ancestors[order[:half]] = order[-half:]
        for each in (target, proposal):
            each.resample(ancestors)

    return step


async def engine_steps(lm: genrt.AsyncLM, contexts: list[list[int]], k: int) -> int:
    """Return the steps of the engine in one ``advance``."""
    with ExitStack() as stack:
        step = await advances(stack, contexts, lm, k)
        before = lm.statistics().engine.steps
        await step()
        return lm.statistics().engine.steps - before


if __name__ == "__main__":
    main()
