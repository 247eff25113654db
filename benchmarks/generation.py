"""How fast are whole texts, next to ``LLM.generate`` of vLLM? Ratios, taken in one process in turns.

    python -m benchmarks.generation --json generation.json

Every mode completes prompts of one length, never the same twice, with residents on. ``vllm`` is
``LLM.generate``, ``generate`` one ``batch_generate``, ``each`` a ``generate`` for each prompt, ``many``
is ``generate_many``, ``stream`` reads every text as it is drawn. ``ratio`` is vLLM's time over the
mode's: 1.0 is as fast; it is the median over the repeats, with its first and third quartiles. With
``--rows``, rows are asked one after the other while texts are drawn: ``steps_a_row`` is how many engine
steps the slowest waited, ``lost`` how many of the sequences that were resident before are not after.
With ``--repeated N``, a prompt repeats N random tokens and draws are greedy, so that texts repeat too and
the n-grams of a ``speculative_config`` in ``--options`` are often right.
Each result is one JSON object, appended to ``--json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import genrt
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.setups import append, prepared
from genrt.engines.vllm.process import undisturbed
from genrt.generation import generate_many
from genrt.lm import AsyncLM

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
}

Prompts = Sequence[list[int]]
Options = dict[str, Any]


async def generate(lm: AsyncLM, prompts: Prompts, options: Options) -> int:
    done = await lm.batch_generate(prompts, **options)
    return sum(len(each.token_ids) for each in done)


async def each(lm: AsyncLM, prompts: Prompts, options: Options) -> int:
    done = await asyncio.gather(*[lm.generate(prompt, **options) for prompt in prompts])
    return sum(len(each.token_ids) for each in done)


async def many(lm: AsyncLM, prompts: Prompts, options: Options) -> int:
    count = 0
    async for _, completion in generate_many(lm, prompts, **options):
        count += len(completion.token_ids)
    return count


async def stream(lm: AsyncLM, prompts: Prompts, options: Options) -> int:
    async def read(prompt: list[int]) -> int:
        count = 0
        async for delta in lm.stream(prompt, **options):
            count += len(delta.token_ids)
        return count

    return sum(await asyncio.gather(*map(read, prompts)))


MODES: dict[str, Callable[[AsyncLM, Prompts, Options], Coroutine[Any, Any, int]]] = {
    "generate": generate,
    "each": each,
    "many": many,
    "stream": stream,
}


def vllm(llm: Any, prompts: Prompts, options: Options) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(options)
    schema = given.pop("json_schema", None)
    if schema is not None:
        given["structured_outputs"] = StructuredOutputsParams(json=schema)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    done = llm.generate(asked, SamplingParams(**given), use_tqdm=False)
    return sum(len(each.outputs[0].token_ids) for each in done)


async def rows_meanwhile(lm: AsyncLM, prompts: Prompts, options: Options) -> dict[str, Any]:
    """How long rows wait that are asked while texts are drawn, and whether residents survive."""
    engine = lm._thread.engine
    await lm.batch_next_token_logprobs([prompt[:50] for prompt in prompts[:16]])
    resident = lm.statistics().engine.resident
    texts = asyncio.gather(*[lm.generate(prompt, **options) for prompt in prompts])
    waited: list[int] = []
    context = prompts[0][:5]
    while not texts.done() and len(waited) < 40:
        before = engine.statistics().steps
        row = await lm.next_token_logprobs(context)
        waited.append(engine.statistics().steps - before)
        context = [*context, int(row.argmax())]
        await asyncio.sleep(random.random() * 0.02)
    await texts
    after = lm.statistics().engine
    extended = after.extended + after.forked
    await lm.batch_next_token_logprobs([[*prompt[:50], 7] for prompt in prompts[:16]])
    now = lm.statistics().engine
    kept = now.extended + now.forked - extended
    return {"steps_a_row": max(waited), "rows": len(waited), "lost": min(16, resident) - kept}


def main() -> None:
    arguments = parsed()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # LLM's engine in this process, as genrt's is.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if arguments.runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(arguments.runner == "V2"))
    for result in measure(arguments):
        print(line(result), flush=True)
        append(json.dumps(result), arguments.json)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, embedded, dummy-1b, dummy-8b, or a directory")
    add("--modes", nargs="+", choices=[*MODES], default=[*MODES], metavar="MODE")
    add("--prompts", nargs="+", type=int, help="default: 16 64 256; quick: 4")
    add("--prompt-tokens", type=int, default=100)
    add("--tokens", type=int, help="drawn for each prompt; default: 100; quick: 8")
    add("--repeats", type=int, help="default: 5; quick: 2")
    add("--repeated", type=int, default=0, metavar="N", help="tokens that each prompt repeats")
    add("--schema", action="store_true", help="draw JSON of a schema; needs a tokenizer")
    add("--rows", action="store_true", help="ask rows meanwhile, too")
    add("--quick", action="store_true", help="smaller defaults")
    add("--runner", choices=["V1", "V2"], help="default: vLLM's own choice")
    add("--options", type=json.loads, default={}, help="options of all engines, as JSON")
    add("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.prompts = arguments.prompts or ([4] if quick else [16, 64, 256])
    arguments.tokens = arguments.tokens or (8 if quick else 100)
    arguments.repeats = arguments.repeats or (2 if quick else 5)
    if min(*arguments.prompts, arguments.prompt_tokens, arguments.tokens, arguments.repeats) < 1:
        parser.error("prompts, tokens and repeats must be positive")
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results for one number of prompts after the other, each when all its repeats are done."""
    with tempfile.TemporaryDirectory() as directory:
        model = checkpoint(arguments.model, Path(directory))
        has_tokenizer = arguments.model not in {"tiny", *SHAPES}
        given = {"skip_tokenizer_init": not has_tokenizer} | arguments.options
        most = max(arguments.prompts)
        setup = prepared(arguments.model, model, given, max_num_seqs=max(256, most))
        length = arguments.prompt_tokens + arguments.tokens + 2
        setup = setup.sized(length, most * (length // setup.block_size + 2) * 2)
        heat = 0.0 if arguments.repeated else 1.0
        options: Options = {"max_tokens": arguments.tokens, "temperature": heat}
        options |= {"json_schema": SCHEMA} if arguments.schema else {"ignore_eos": True}
        from vllm import LLM

        chance = random.Random(1)
        with (
            ThreadPoolExecutor(1) as thread,
            asyncio.Runner() as loop,
            genrt.load(model, engine_options=setup.options, cache_bytes=0) as lm,
        ):

            def open_llm() -> LLM:
                with (
                    undisturbed()
                ):  # vLLM's CPU build opens once in a process that looks for n-grams
                    return LLM(model, **setup.options)

            llm = thread.submit(open_llm).result()
            for count in arguments.prompts:

                def drawn_prompts(count: int = count) -> list[list[int]]:
                    length = arguments.prompt_tokens
                    own = arguments.repeated or length
                    drawn = [
                        [chance.randrange(setup.vocab_size) for _ in range(own)]
                        for _ in range(count)
                    ]
                    return [(each * (length // own + 1))[:length] for each in drawn]

                samples: dict[str, list[float]] = {}
                for repeat in range(-1, arguments.repeats):  # the first is for warming up
                    prompts = drawn_prompts()
                    began = time.perf_counter()
                    drawn = thread.submit(vllm, llm, prompts, options).result()
                    seconds = {"vllm": (time.perf_counter() - began) / drawn}
                    order = arguments.modes[repeat % 2 :: 1] + arguments.modes[: repeat % 2]
                    for mode in order:
                        prompts = drawn_prompts()  # or those before would be in the prefix cache
                        began = time.perf_counter()
                        drawn = loop.run(MODES[mode](lm, prompts, options))
                        seconds[mode] = (time.perf_counter() - began) / drawn
                    for mode, each_token in seconds.items():
                        samples.setdefault(mode, []).append(each_token)
                common = {"prompts": count, "model": arguments.model, **setup.surroundings}
                theirs = samples["vllm"][1:]
                for mode, taken in samples.items():
                    ratios = [a / b for a, b in zip(theirs, taken[1:], strict=True)]
                    quartiles = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
                    yield {
                        "mode": mode,
                        "tokens_per_second": round(1 / statistics.median(taken[1:]), 1),
                        "ratio": round(quartiles[1], 3),
                        "ratio_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
                        "schema": arguments.schema,
                    } | common
                if arguments.rows:
                    yield {"mode": "rows"} | loop.run(rows_meanwhile(lm, prompts, options)) | common


def line(result: dict[str, Any]) -> str:
    """A result for reading."""
    text = f"{result['mode']:9}{result['prompts']:6}"
    if result["mode"] == "rows":
        return text + f"   {result['steps_a_row']} steps at most, {result['lost']} residents lost"
    return text + f"{result['tokens_per_second']:12.1f} tokens/s{result['ratio']:8.2f} of vLLM"


if __name__ == "__main__":
    main()
