"""What a score costs: one request against a row for each token, and against a prefill of the same text.

    python -m benchmarks.scores --model embedded --json scores.json

One JSON object. ``score_ms`` is the median time of ``lm.score``, ``rows_ms`` that of as many reads from
rows, asked at once, ``prefill_ms`` that of a text of one token after the same tokens, which is vLLM's own
loop; every text is new to the engine. ``score_by_prefill`` and ``rows_by_score`` are ratios of these,
``worst`` is the largest difference between the two ways. ``items`` and ``items_by_rows`` are items a
second of a benchmark's kind, four continuations of 8 to 24 tokens after a context, all asked at once.
``whole_ms`` is ``lm.prompt_logprobs`` of a long text, and ``whole_gib``, on a GPU, the device memory that
it took beside what was there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import genrt
from benchmarks.checkpoints import checkpoint
from benchmarks.setups import append, prepared
from genrt.lm import AsyncLM


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="embedded", help="as benchmarks.step's")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--whole", type=int, default=1024, help="the length of the long text")
    parser.add_argument("--items", type=int, default=32, help="of four continuations each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--options", default="{}", help="engine_options, as JSON")
    parser.add_argument("--quick", action="store_true", help="short texts, few repeats")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.context, arguments.tokens, arguments.whole, arguments.repeats = 16, 24, 64, 2
        arguments.items = 4
    with tempfile.TemporaryDirectory() as directory:
        model = checkpoint(arguments.model, Path(directory))
        given = json.loads(arguments.options)
        setup = prepared(arguments.model, model, given, max_num_seqs=256)
        with genrt.load(model, engine_options=setup.options, cache_bytes=0) as lm:
            result = setup.surroundings | asyncio.run(measured(lm, arguments))
    print(json.dumps(result, default=str))
    append(json.dumps(result, default=str), arguments.json)


async def measured(lm: AsyncLM, arguments: argparse.Namespace) -> dict[str, Any]:
    random = Random(0)

    def text(length: int) -> list[int]:
        return [random.randrange(lm.vocab_size) for _ in range(length)]

    context, count = arguments.context, arguments.tokens

    def by_rows(before: list[int], after: list[int]) -> Awaitable[list[torch.Tensor]]:
        reads = (lm.token_logprobs([*before, *after[:n]], [after[n]]) for n in range(count))
        return asyncio.gather(*reads)

    async def ms(asked: Awaitable[Any]) -> float:
        started = time.perf_counter()
        await asked
        return (time.perf_counter() - started) * 1e3

    before, after = text(context), text(count)
    score = await lm.score(before, after)
    worst = float((score - torch.cat(await by_rows(before, after))).abs().max())
    await lm.sample(text(context), max_tokens=1)
    found: dict[str, list[float]] = {"score_ms": [], "rows_ms": [], "prefill_ms": []}
    for _ in range(arguments.repeats):
        texts = [(text(context), text(count)) for _ in found]
        found["score_ms"].append(await ms(lm.score(*texts[0])))
        found["rows_ms"].append(await ms(by_rows(*texts[1])))
        whole = [*texts[2][0], *texts[2][1]]
        found["prefill_ms"].append(await ms(lm.sample(whole, max_tokens=1)))
    medians = {name: round(statistics.median(each), 2) for name, each in found.items()}
    medians |= await items(lm, text, arguments)
    on_gpu = lm.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    long = text(arguments.whole)
    medians["whole_ms"] = round(await ms(lm.prompt_logprobs(long)), 2)
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    return medians | {
        "score_by_prefill": round(medians["score_ms"] / medians["prefill_ms"], 3),
        "rows_by_score": round(medians["rows_ms"] / medians["score_ms"], 2),
        "worst": worst,
        "whole_gib": round(peak / 2**30, 3),
        "scores": lm.statistics().engine.scored_tokens,
    }


async def items(
    lm: AsyncLM, text: Callable[[int], list[int]], arguments: argparse.Namespace
) -> dict[str, float]:
    """Items a second, by scores and by rows; every item is new to the engine."""
    taken: dict[str, float] = {}
    for name in ("items", "items_by_rows"):
        contexts = [each for _ in range(arguments.items) for each in [text(arguments.context)] * 4]
        after = [text(8 + n * 5 % 17) for n in range(len(contexts))]
        started = time.perf_counter()
        if name == "items":
            await lm.batch_score(contexts, after)
        else:
            await asyncio.gather(
                *(
                    lm.token_logprobs([*before, *tokens[:n]], [tokens[n]])
                    for before, tokens in zip(contexts, after, strict=True)
                    for n in range(len(tokens))
                )
            )
        taken[name] = round(arguments.items / (time.perf_counter() - started), 2)
    return taken | {"items_ratio": round(taken["items"] / taken["items_by_rows"], 2)}


if __name__ == "__main__":
    main()
