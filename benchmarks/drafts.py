"""What drafts are worth: tokens a second of SMC with and without them, in one run.

    python -m benchmarks.drafts --particles 4 16 64 --json drafts.json

``schema`` are texts under the JSON schema of ``benchmarks.smc``, ``free`` ones without a constraint. The
modes take turns, with equal prompts and seeds:

off       TextModel(drafts="off")
always    drafts="auto" that does not ask whether they pay
auto      drafts="auto"
decode    vLLM directly: its own decode loop, of as many sequences without a constraint

A model runs several times after one prompt, with other seeds: in its first run it knows no text yet.
``auto`` and ``always`` differ in nothing but whether steps run ahead, which ``auto`` decides by their
time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import genrt
from benchmarks.checkpoints import checkpoint
from benchmarks.setups import Setup, append, prepared
from benchmarks.smc import PROMPTS, SCHEMA
from benchmarks.step_modes import Particles, clock, decode
from genrt.constraints import json_schema
from genrt.inference import SMC, TextModel
from genrt.inference.drafting import Drafting

MODES = ("off", "always", "auto", "decode")
TEXTS = ("schema", "free")
LONGEST_PROMPT = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="embedded", help="embedded, tiny, a shape or a directory")
    add("--particles", nargs="+", type=int, default=[1, 4, 16, 64])
    add("--texts", nargs="+", choices=TEXTS, default=["schema"], metavar="TEXTS")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    add("--max-tokens", type=int, default=80)
    add("--repeats", type=int, default=3, help="prompts, each with models of its own")
    add("--runs", type=int, default=3, help="of each model")
    add("--options", type=json.loads, default={}, help="options of the engines, as JSON")
    add("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # decode's engine in this process, too
    with tempfile.TemporaryDirectory() as directory:
        model = checkpoint(arguments.model, Path(directory))
        # Texts under a schema are byte-level: genrt reads the tokenizer.
        options = {"skip_tokenizer_init": False} | arguments.options
        setup = prepared(arguments.model, model, options, max_num_seqs=256)
        asyncio.run(measure(arguments, model, setup))


async def measure(arguments: argparse.Namespace, model: str, setup: Setup) -> None:
    """Print the results for one number of particles after the other."""
    modes: list[str] = arguments.modes
    longest = LONGEST_PROMPT + arguments.max_tokens + 1
    each = math.ceil(longest / setup.block_size)
    sized = setup.sized(longest, (1 + 2 * max(arguments.particles)) * each)
    with contextlib.ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1))
        llm: Any = None
        if "decode" in modes:
            from vllm import LLM

            llm = await asyncio.wrap_future(thread.submit(lambda: LLM(model, **sized.options)))
        lm = stack.enter_context(genrt.load(model, engine_options=sized.options, cache_bytes=0))
        number = 0
        for texts in arguments.texts:
            for count in arguments.particles:
                found: list[dict[str, Any]] = []
                for repeat in range(-1, arguments.repeats):  # the first for warming up
                    number += 1
                    taken = await asked(lm, arguments, texts, count, number)
                    if llm is not None:
                        particles = Particles(count, 32, 0, arguments.max_tokens, lm.vocab_size, 0)
                        # Nothing else runs meanwhile.
                        measured = await asyncio.wrap_future(
                            thread.submit(decode, llm, particles, arguments.max_tokens)
                        )
                        rate = 1e3 * count / measured.ms
                        taken += [{"mode": "decode", "run": 1, "tokens_a_second": rate}]
                    found += [{"repeat": repeat} | each for each in taken if repeat >= 0]
                about = {"texts": texts, "particles": count, "model": arguments.model}
                report(arguments, setup, about, found)


async def asked(
    lm: genrt.AsyncLM, arguments: argparse.Namespace, texts: str, count: int, number: int
) -> list[dict[str, Any]]:
    """Run each mode's model as many times as asked, in turns."""
    prompt = lm.encode(PROMPTS.format(number=number, mode="drafted"))
    constraint = json_schema(SCHEMA, lm) if texts == "schema" else None
    models = {
        mode: TextModel(
            lm,
            prompt,
            max_tokens=arguments.max_tokens,
            constraint=constraint,
            drafts="off" if mode == "off" else "auto",
        )
        for mode in arguments.modes
        if mode != "decode"
    }
    if "always" in models:
        models["always"] = always(models["always"])
    found = []
    for run in range(arguments.runs):
        names = [*models]
        first = (number + run) % len(names)
        for mode in names[first:] + names[:first]:
            gc.collect()
            before, began = lm.statistics(), clock()
            result = await SMC(models[mode], num_particles=count).run(seed=1000 * number + run)
            seconds = clock() - began
            spent = lm.statistics().since(before)
            tokens = sum(int((info.token_ids >= 0).sum()) for info in result.infos)
            drafted = models[mode].drafted
            found.append(
                {
                    "mode": mode,
                    "run": run,
                    "tokens_a_second": tokens / seconds,
                    "steps": len(result.infos),
                    "engine_steps": spent.engine.steps / len(result.infos),
                    "computed_tokens": spent.engine.computed_tokens / tokens,
                    "guessed": dict(drafted.guessed),
                    "right": dict(drafted.right),
                    "forwards": drafted.forwards,
                }
            )
    return found


def always(model: TextModel) -> TextModel:
    """Have a model draft, whatever time that takes; return it."""
    drafting = model._proposals.drafting
    assert isinstance(drafting, Drafting)
    vars(drafting._pace)["is_ahead"] = lambda count: True
    return model


def report(
    arguments: argparse.Namespace,
    setup: Setup,
    about: dict[str, Any],
    found: Sequence[dict[str, Any]],
) -> None:
    """Print a line a mode, and append them to the file."""
    plain = {
        (each["repeat"], each["run"]): each["tokens_a_second"]
        for each in found
        if each["mode"] == "off"
    }
    for mode in arguments.modes:
        mine = [each for each in found if each["mode"] == mode]
        ratios: dict[str, list[float]] = {"first": [], "later": []}
        for each in mine:
            base = plain.get((each["repeat"], each["run"]))
            if base is not None:
                ratios["later" if each["run"] else "first"].append(each["tokens_a_second"] / base)
        last = [each for each in mine if "guessed" in each and each["run"] == arguments.runs - 1]
        result = about | {
            "mode": mode,
            "tokens_a_second": statistics.median(each["tokens_a_second"] for each in mine),
            **{f"ratio_{name}": spread(values) for name, values in ratios.items()},
            "engine_steps": mean(mine, "engine_steps"),
            "computed_tokens": mean(mine, "computed_tokens"),
            "right_a_forward": {
                source: sum(each["right"].get(source, 0) for each in last)
                / max(1, sum(each["forwards"] for each in last))
                for source in ("forced", "texts")
            },
            "right": {
                source: sum(each["right"].get(source, 0) for each in last)
                / max(1, sum(each["guessed"].get(source, 0) for each in last))
                for source in ("forced", "texts")
            },
            **setup.surroundings,
        }
        text = "{texts:7}{particles:5} {mode:7}{tokens_a_second:9.0f} tokens/s".format(**result)
        for name in ratios:
            if result[f"ratio_{name}"] is not None:
                low, middle, high = result[f"ratio_{name}"]
                text += f"  {name} {middle:.2f} x off ({low:.2f} to {high:.2f})"
        if result["engine_steps"] is not None:
            text += "  {engine_steps:.2f} forwards a step, {computed_tokens:.2f} positions".format(
                **result
            )
            text += f", right {result['right_a_forward']} a forward, {result['right']}"
        print(text, flush=True)
        append(json.dumps(result), arguments.json)


def spread(values: Sequence[float]) -> list[float] | None:
    """The least, the median and the largest."""
    return [min(values), statistics.median(values), max(values)] if values else None


def mean(found: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [each[name] for each in found if name in each]
    return statistics.fmean(values) if values else None


if __name__ == "__main__":
    main()
