"""What genrt itself costs beside the engine's step: microseconds a question, and the loop's gaps.

    python -m benchmarks.overheads --json overheads.json

On the exact engine: ``cached_us``, a question that the cache answers, at 512 tokens of context;
``deduplicated_us``, one that joins an equal one; ``batched_us``, asyncio, batcher and delivery together
for one of 256 distinct questions, less the engine's own time; ``latency_us``, one of 200 questions that
follow each other, alone in its step, less the engine's own time; ``contexts_gap_ms``, the gaps in the
event loop, as below, while 10,000 coroutines draw from a context each, five times, without Python's
garbage collector, whose full collection takes 100 ms beside so many objects.

On vLLM and a tiny model made on the spot: ``vllm_cached_us``, as above; ``vllm_latency_us``, one
particle's question, less ``vllm_step_us``, the engine's own time for it; ``loop_gap_ms``, the largest and
the 99th percentile of the time between two beats of a 1 ms heartbeat while a long ``sample`` runs, and
``idle_gap_ms``, the same on a loop beside which nothing runs. ``busy`` is the largest processor time of
the loop's thread between two beats, which other threads and processes do not lengthen.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import genrt
from benchmarks.checkpoints import make_model
from benchmarks.setups import append
from genrt.engines.exact import NGram


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sample-tokens", type=int, default=600)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.sample_tokens = 5, 100
    result: dict[str, Any] = {"torch": torch.__version__, **asyncio.run(costs(arguments.repeats))}
    result |= asyncio.run(on_vllm(arguments.repeats, arguments.sample_tokens))
    print(json.dumps(result))
    append(json.dumps(result), arguments.json)


async def costs(repeats: int) -> dict[str, Any]:
    model = NGram.random(64, seed=0)
    context = [token % 64 for token in range(512)]
    async with await genrt.aload(
        model, engine="exact", engine_options={"max_batch_size": 256}
    ) as lm:

        async def ask(count: int, contexts: Callable[[int], list[int]]) -> None:
            await asyncio.gather(*(lm.next_token_logprobs(contexts(n)) for n in range(count)))

        async def microseconds(work: Callable[[], Awaitable[None]], count: int) -> float:
            """A question's time, less what the engine spent on it."""
            times = []
            for _ in range(repeats):
                lm.clear_cache()
                await lm.next_token_logprobs(context)
                gc.collect()
                engine, started = lm.statistics().engine.seconds, time.perf_counter()
                await work()
                spent = time.perf_counter() - started
                times.append((spent - (lm.statistics().engine.seconds - engine)) / count * 1e6)
            return round(statistics.median(times), 2)

        async def one_by_one() -> None:
            for _ in range(200):
                await lm.next_token_logprobs(context)

        async def alone() -> None:
            for number in range(200):
                await lm.next_token_logprobs([number % 64, number // 64, 1])

        held = [
            lm.context([number % 64, number // 64 % 64, number // 4096]) for number in range(10_000)
        ]

        async def grow(context: genrt.Context) -> None:
            for _ in range(5):
                context.append((await context.draw(seed=0)).token_id)

        async def grow_all() -> None:
            tasks = []
            for number, each in enumerate(held):
                tasks.append(asyncio.ensure_future(grow(each)))
                if number % 100 == 99:
                    await asyncio.sleep(0)
            for task in tasks:
                await task

        await grow_all()
        gc.collect()
        gc.disable()
        contexts_gap = await heartbeat(grow_all())
        gc.enable()
        return {
            "contexts_gap_ms": contexts_gap,
            "cached_us": await microseconds(one_by_one, 200),
            "deduplicated_us": await microseconds(lambda: ask(1000, lambda n: [1, 2]), 1000),
            "batched_us": await microseconds(lambda: ask(256, lambda n: [n % 64, n // 64]), 256),
            "latency_us": await microseconds(alone, 200),
        }


async def on_vllm(repeats: int, sample_tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        options = {"skip_tokenizer_init": True, "dtype": "float32"}
        model = make_model("tiny", Path(directory))
        async with await genrt.aload(model, engine_options=options) as lm:
            alone = await particle(lm, repeats)
            idle = await heartbeat(asyncio.sleep(1.0))
            busy = await heartbeat(
                lm.batch_sample([[1, n] for n in range(16)], max_tokens=sample_tokens)
            )
    return {**alone, "idle_gap_ms": idle, "loop_gap_ms": busy}


async def particle(lm: genrt.AsyncLM, repeats: int) -> dict[str, float]:
    """One particle from 512 tokens on, 16 steps a repeat, and then as many questions about the last."""
    steps, latencies, cached = [], [], []
    for repeat in range(repeats):
        context = [repeat % lm.vocab_size, *range(511)]
        await lm.next_token_logprobs(context)
        gc.collect()
        engine, started = lm.statistics().engine.seconds, time.perf_counter()
        for token in range(16):
            context.append(token)
            await lm.next_token_logprobs(context)
        spent = (time.perf_counter() - started) / 16 * 1e6
        steps.append((lm.statistics().engine.seconds - engine) / 16 * 1e6)
        latencies.append(spent - steps[-1])
        started = time.perf_counter()
        for _ in range(16):
            await lm.next_token_logprobs(context)
        cached.append((time.perf_counter() - started) / 16 * 1e6)
    return {
        "vllm_cached_us": round(statistics.median(cached), 2),
        "vllm_latency_us": round(statistics.median(latencies), 2),
        "vllm_step_us": round(statistics.median(steps), 2),
    }


async def heartbeat(work: Awaitable[Any]) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    future = asyncio.ensure_future(work)
    beats: list[tuple[float, float]] = []

    def beat() -> None:
        beats.append((time.perf_counter(), time.thread_time()))
        if not future.done():
            loop.call_later(0.001, beat)

    beat()
    await future
    between = sorted(b - a for (a, _), (b, _) in pairwise(beats))
    busy = max(b - a for (_, a), (_, b) in pairwise(beats))
    return {
        "largest": round(between[-1] * 1e3, 2),
        "p99": round(between[int(len(between) * 0.99)] * 1e3, 2),
        "busy": round(busy * 1e3, 2),
        "beats": len(beats),
    }


if __name__ == "__main__":
    main()
