"""What one step of N particles costs: genrt's ways to ask against vLLM's own loops, in one run.

    python -m benchmarks.step --model tiny --particles 1 16 64 256 --json step.json

A step extends every particle by one token and gets the distribution after it. The modes:

fresh     vLLM directly: one LLM.generate with max_tokens=1 a step, as if nothing could be kept
decode    vLLM directly: its own decode loop; two lengths, the difference, so without the prefill
resident  one coroutine a particle, which awaits next_token_logprobs and appends a token
batch     the same by one batch_next_token_logprobs a step
resample  before every step half of the particles become copies of the other half
draw      one coroutine a particle, which awaits a masked draw and appends its token
cached    one coroutine a particle, which awaits rows that are all in the row cache
contexts             as draw, and every coroutine holds a context
contexts-rows        the same with rows, as resident
contexts-fork        the same with draws, and half of the contexts become forks of the others every step
programs             as contexts, and every coroutine is a program, run by importance sampling
population           a population: one masked draw for all a step, whose tokens it appends
population-resample  the same, and half of it becomes copies of the other half in every step
populations          four populations of a quarter of the particles each, all at once

All engines are open at once, under the same options, each on a thread of its own in this process, and
the modes take turns in every repeat, in rotating order, so that the machine's noise meets them all.
Contexts are random and new every time. What is timed begins when all of them have been asked once, and
a population has taken two steps; it includes asyncio, and ends when the device has. NOTES.md says how
to read the results.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import genrt
from benchmarks.checkpoints import checkpoint
from benchmarks.setups import Setup, Surroundings, append, prepared
from benchmarks.step_modes import GENRT_MODES, MODES, SHORT, VLLM_MODES, Measured, Particles

FRESH_STEPS = 8
"""``fresh`` is timed for no more, around the middle of a KV block. It recomputes what lies beyond the
last full one, 1 token at best and the whole block at worst, and there as many as on average."""


class Result(Surroundings):
    """One line of the JSON file; ``None`` where a mode has no such number.

    Times are medians over the repeats, with their first and third quartiles. ``ratio_to_decode`` is the
    median of this mode's time over decode's in the same repeat; ``speedup_over_fresh`` likewise
    fresh's over this mode's. ``ms_to_begin`` is what the first ``SHORT`` tokens of each took from the
    cached prompts on, where they are not timed with the others.
    """

    mode: str
    particles: int
    ms_per_step: float
    quartiles: list[float]
    ratio_to_decode: float | None
    ratio_quartiles: list[float] | None
    speedup_over_fresh: float | None
    engine_steps_per_step: float | None
    computed_tokens_per_particle_step: float | None
    host_bytes_per_step: float | None
    ms_to_begin: float | None
    model: str
    context: int
    shared: int
    steps: int
    repeats: int


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
    add("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    add("--particles", nargs="+", type=int, help="default: 1 16 64 256; quick: 16 64 256")
    add("--context", type=int, default=128, help="tokens before the first step")
    add("--shared", type=int, default=0, help="how many of them are the same for all particles")
    add("--steps", type=int, help="timed in a repeat; default: 64; quick: 32")
    add("--repeats", type=int, help="default: 9; quick: 3; fresh takes part in every other one")
    add("--quick", action="store_true", help="smaller defaults")
    add("--runner", choices=["V1", "V2"], help="default: vLLM's own choice")
    add("--options", type=json.loads, default={}, help="options of all engines, as JSON")
    add("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    quick = arguments.quick
    if arguments.particles is None:
        arguments.particles = [16, 64, 256] if quick else [1, 16, 64, 256]
    if arguments.steps is None:
        arguments.steps = 32 if quick else 64
    if arguments.repeats is None:
        arguments.repeats = 3 if quick else 9
    if min(*arguments.particles, arguments.context, arguments.steps, arguments.repeats) < 1:
        parser.error("particles, context, steps and repeats must be positive")
    if not 0 <= arguments.shared <= arguments.context:
        parser.error("--shared must be at least 0 and at most --context")
    if not isinstance(arguments.options, dict):
        parser.error("--options must be a JSON object")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"there is no directory for {arguments.json}")
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    """The results for one number of particles after the other, each when all its repeats are done."""
    modes: list[str] = arguments.modes
    with tempfile.TemporaryDirectory() as directory:
        model = checkpoint(arguments.model, Path(directory))
        setup = setup_of(arguments, model)
        middle = (setup.block_size - FRESH_STEPS) // 2
        to_the_middle = (middle - arguments.context) % setup.block_size
        seeds = itertools.count()

        def once(mode: str, count: int, context: int, steps: int) -> Measured:
            shared = min(arguments.shared, context)
            if mode == "fresh":
                context, steps = context + to_the_middle, min(steps, FRESH_STEPS)
            particles = Particles(count, context, shared, steps, setup.vocab_size, next(seeds))
            return run(mode, particles, steps)

        common = {
            "model": arguments.model,
            "context": arguments.context,
            "shared": arguments.shared,
            "steps": arguments.steps,
            "repeats": arguments.repeats,
            **setup.surroundings,
        }
        rows = 4 * setup.vocab_size * max(arguments.particles)
        with opened(model, setup.options, modes, cache_bytes=2 * rows) as run:
            for count in arguments.particles:
                for mode in modes:  # for warming up
                    once(mode, count, min(arguments.context, 16), 2)
                samples: dict[str, dict[int, Measured]] = {mode: {} for mode in modes}
                for repeat in range(arguments.repeats):
                    first = repeat % len(modes)
                    for mode in modes[first:] + modes[:first]:
                        if mode != "fresh" or repeat % 2 == 0:
                            samples[mode][repeat] = once(
                                mode, count, arguments.context, arguments.steps
                            )
                for mode in modes:
                    result = summary(mode, samples) | {"particles": count} | common
                    yield cast("Result", result)


def summary(mode: str, samples: dict[str, dict[int, Measured]]) -> dict[str, Any]:
    """What the repeats say about a mode: the part of ``Result`` that differs between modes."""
    mine = samples[mode]

    def quartiles(values: Iterable[float | None]) -> list[float] | None:
        there = [value for value in values if value is not None]
        if len(there) < 2:
            there *= 2
        cuts = statistics.quantiles(there, n=4, method="inclusive") if there else []
        return [round(cut, 3) for cut in cuts] or None

    def median(values: Iterable[float | None]) -> float | None:
        cuts = quartiles(values)
        return cuts[1] if cuts else None

    def ratios(over: str, under: str) -> list[float]:
        above, below = samples.get(over, {}), samples.get(under, {})
        return [above[repeat].ms / below[repeat].ms for repeat in above.keys() & below.keys()]

    times = quartiles(sample.ms for sample in mine.values()) or []
    to_decode = quartiles(ratios(mode, "decode"))
    return {
        "mode": mode,
        "ms_per_step": times[1],
        "quartiles": times[::2],
        "ratio_to_decode": to_decode and to_decode[1],
        "ratio_quartiles": to_decode and to_decode[::2],
        "speedup_over_fresh": median(ratios("fresh", mode)),
        "engine_steps_per_step": median(sample.engine_steps for sample in mine.values()),
        "computed_tokens_per_particle_step": median(s.computed_tokens for s in mine.values()),
        "host_bytes_per_step": median(sample.host_bytes for sample in mine.values()),
        "ms_to_begin": median(sample.begin_ms for sample in mine.values()),
    }


def setup_of(arguments: argparse.Namespace, model: str) -> Setup:
    """Each engine has KV memory for half as many sequences again as there are particles, so that what
    was asked before gets evicted."""
    most = max(arguments.particles)
    setup = prepared(arguments.model, model, arguments.options, max_num_seqs=max(256, most))
    block = setup.block_size
    longest = arguments.context + max(arguments.steps + SHORT, block + FRESH_STEPS) + 2
    own = math.ceil(longest / block) - arguments.shared // block
    return setup.sized(longest, math.ceil(longest / block) + math.ceil(1.5 * most * own))


@contextlib.contextmanager
def opened(
    model: str, options: dict[str, Any], modes: Sequence[str], *, cache_bytes: int
) -> Iterator[Callable[[str, Particles, int], Measured]]:
    """The engines that the modes need, and how to run one mode to its end."""
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner())
        thread = stack.enter_context(ThreadPoolExecutor(1))
        llm: Any = None
        if not VLLM_MODES.keys().isdisjoint(modes):
            from vllm import LLM

            llm = thread.submit(lambda: LLM(model, **options)).result()
        lms = {
            size: stack.enter_context(genrt.load(model, engine_options=options, cache_bytes=size))
            for size in dict.fromkeys(
                cache_bytes if mode == "cached" else 0 for mode in modes if mode in GENRT_MODES
            )
        }

        def run(mode: str, particles: Particles, steps: int) -> Measured:
            if mode in VLLM_MODES:
                return thread.submit(VLLM_MODES[mode], llm, particles, steps).result()
            lm = lms[cache_bytes if mode == "cached" else 0]
            return loop.run(GENRT_MODES[mode](lm, particles, steps))

        yield run


def line(result: Result) -> str:
    """A result for reading."""
    low, high = result["quartiles"]
    text = f"{result['mode']:9}{result['particles']:6}"
    text += f"{result['ms_per_step']:10.3f} ms a step ({low:.3f} to {high:.3f})"
    if result["ratio_to_decode"] is not None:
        text += f"{result['ratio_to_decode']:8.2f} x decode"
    if result["speedup_over_fresh"] is not None:
        text += f"{result['speedup_over_fresh']:8.1f} x as fast as fresh"
    return text


if __name__ == "__main__":
    main()
