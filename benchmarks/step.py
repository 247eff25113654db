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

All engines are open at once, under the same options, each on a thread of its own in this process, and
the modes take turns in every repeat, in rotating order, so that the machine's noise meets them all.
Contexts are random and new every time. What is timed begins when all of them have been asked once,
includes asyncio, and ends when the device has. NOTES.md says how to read the results.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import gc
import importlib
import importlib.util
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

import genrt
from benchmarks.fidelity import LLAMA_1B, make_model
from genrt import models

LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {"dummy-1b": LLAMA_1B, "dummy-8b": LLAMA_8B}
FRESH_STEPS = 8
"""``fresh`` is timed for no more, around the middle of a KV block. It recomputes what lies beyond the
last full one, 1 token at best and the whole block at worst, and there as many as on average."""
SHORT = 2
"""Tokens of the shorter of ``decode``'s two generations."""


class Result(TypedDict):
    """One line of the JSON file; ``None`` where a mode has no such number.

    Times are medians over the repeats, with their first and third quartiles. ``ratio_to_decode`` is the
    median of this mode's time over decode's in the same repeat; ``speedup_over_fresh`` likewise
    fresh's over this mode's. ``runner`` and ``async_scheduling`` are what vLLM chose by default.
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
    model: str
    context: int
    shared: int
    steps: int
    repeats: int
    device: str
    date: str
    versions: dict[str, str]
    runner: str
    async_scheduling: bool
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """A mode in one repeat: milliseconds and engine steps a step, tokens put through the model for a
    particle and step, bytes copied to the host a step."""

    ms: float
    engine_steps: float | None = None
    computed_tokens: float | None = None
    host_bytes: float | None = None


class Particles:
    """N contexts, and everything random that happens to them, decided beforehand.

    Step ``s`` appends ``tokens[s][n]`` to particle ``n``. Resampling copies the first half of
    ``orders[s]`` onto the second.
    """

    def __init__(
        self, count: int, context: int, shared: int, steps: int, vocab_size: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, vocab_size, (count, context + steps), generator=generator)
        drawn[:, :shared] = drawn[0, :shared].clone()
        self.contexts: list[list[int]] = drawn[:, :context].tolist()
        self.tokens: list[list[int]] = drawn[:, context:].T.tolist()
        self.orders = [torch.randperm(count, generator=generator).tolist() for _ in range(steps)]

    def __len__(self) -> int:
        return len(self.contexts)

    def extend(self, step: int) -> None:
        for context, token in zip(self.contexts, self.tokens[step], strict=True):
            context.append(token)

    def resample(self, step: int) -> None:
        half = len(self) // 2
        order = self.orders[step]
        for survivor, replaced in zip(order[:half], order[len(self) - half :], strict=True):
            self.contexts[replaced] = list(self.contexts[survivor])


def clock() -> float:
    """Seconds, once the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# -- vLLM's modes -----------------------------------------------------------------------------


def fresh(llm: Any, particles: Particles, steps: int) -> Measured:
    """What a runtime does that keeps nothing from one step to the next, with nothing around it."""
    generate(llm, particles.contexts, 1)
    gc.collect()
    computed, started = 0, clock()
    for step in range(steps):
        particles.extend(step)
        for output in generate(llm, particles.contexts, 1):
            computed += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
    ms = (clock() - started) * 1e3 / steps
    return Measured(ms, computed_tokens=computed / steps / len(particles))


def decode(llm: Any, particles: Particles, steps: int) -> Measured:
    """The untimed generation leaves the prompts in the prefix cache, alike for the two timed ones."""
    generate(llm, particles.contexts, 1)
    seconds = []
    for length in (SHORT, SHORT + steps):
        gc.collect()
        started = clock()
        generate(llm, particles.contexts, length)
        seconds.append(clock() - started)
    return Measured((seconds[1] - seconds[0]) * 1e3 / steps)


def generate(llm: Any, contexts: Sequence[list[int]], max_tokens: int) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": context} for context in contexts]
    return cast("list[Any]", llm.generate(prompts, params, use_tqdm=False))


# -- genrt's modes ----------------------------------------------------------------------------


async def resident(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Particles know nothing of each other: one may be a step ahead."""

    async def run(number: int) -> None:
        context = particles.contexts[number]
        for step in range(steps):
            context.append(particles.tokens[step][number])
            await lm.next_token_logprobs(context)

    return await metered(lm, particles, steps, together(run, particles))


async def draw(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Every mask allows about half of the vocabulary, packed as a constraint packs it."""
    masks = packed_masks(8, lm.vocab_size)
    ask = cast("Any", lm).draw

    async def run(number: int) -> None:
        context = particles.contexts[number]
        context.append(particles.tokens[0][number])
        for step in range(steps):
            drawn = await ask(context, mask=masks[(number + step) % len(masks)])
            context.append(drawn.token_id)

    return await metered(lm, particles, steps, together(run, particles))


async def cached(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """The contexts stay as they are, so that their rows are there from the first time on."""

    async def run(number: int) -> None:
        for _ in range(steps):
            await lm.next_token_logprobs(particles.contexts[number])

    return await metered(lm, particles, steps, together(run, particles))


async def batch(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    async def run() -> None:
        for step in range(steps):
            particles.extend(step)
            await lm.batch_next_token_logprobs(particles.contexts)

    return await metered(lm, particles, steps, run())


async def resample(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Resampling needs the weights of all, so a step begins when the last one has ended for all."""

    async def run() -> None:
        for step in range(steps):
            particles.resample(step)
            particles.extend(step)
            await asyncio.gather(*map(lm.next_token_logprobs, particles.contexts))

    return await metered(lm, particles, steps, run())


async def together(run: Callable[[int], Coroutine[Any, Any, None]], particles: Particles) -> None:
    await asyncio.gather(*map(run, range(len(particles))))


async def metered(
    lm: genrt.AsyncLM, particles: Particles, steps: int, work: Coroutine[Any, Any, None]
) -> Measured:
    """Ask every context once, then time the work and take what the engine counted meanwhile."""
    await asyncio.gather(*map(lm.next_token_logprobs, particles.contexts))
    gc.collect()
    before, started = lm.statistics().engine, clock()
    await work
    ms, after = (clock() - started) * 1e3 / steps, lm.statistics().engine
    return Measured(
        ms,
        engine_steps=(after.steps - before.steps) / steps,
        computed_tokens=(after.computed_tokens - before.computed_tokens) / steps / len(particles),
        host_bytes=(after.bytes_to_host - before.bytes_to_host) / steps,
    )


def packed_masks(count: int, vocab_size: int) -> torch.Tensor:
    """Random masks, int32 ``[count, ceil(vocab_size / 32)]``, no bit set beyond the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, math.ceil(vocab_size / 32))
    masks = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
    masks[:, -1] &= (1 << (vocab_size - 1) % 32) - 1
    return masks


VLLM_MODES = {"fresh": fresh, "decode": decode}
GENRT_MODES = {
    "resident": resident,
    "batch": batch,
    "resample": resample,
    "draw": draw,
    "cached": cached,
}
MODES = (*VLLM_MODES, *GENRT_MODES)


# -- the run ----------------------------------------------------------------------------------


def main() -> None:
    arguments = parsed()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # LLM's engine in this process, as genrt's is
    )
    if arguments.runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(arguments.runner == "V2"))
    results: list[Result] = []
    for result in measure(arguments):
        results.append(result)
        print(line(result), flush=True)
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(json.dumps(result) + "\n")
    if arguments.plot is not None:
        if arguments.json is not None:
            results = [json.loads(text) for text in arguments.json.read_text().splitlines()]
        plot(results, arguments.plot)


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
    add("--plot", type=Path, help="draw the ratios of this run, or of all that --json holds: PNG")
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
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    """The results for one number of particles after the other, each when all its repeats are done."""
    modes = [mode for mode in arguments.modes if mode != "draw" or hasattr(genrt.AsyncLM, "draw")]
    for mode in sorted(set(arguments.modes) - set(modes)):
        print(f"{mode:9}absent: this version of genrt has none", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        model = checkpoint(arguments.model, Path(directory))
        setup = prepared(arguments, model)
        middle = (setup.block_size - FRESH_STEPS) // 2
        to_the_middle = (middle - arguments.context) % setup.block_size
        seeds = itertools.count()

        def once(mode: str, count: int, context: int, steps: int) -> Measured:
            shared = min(arguments.shared, context)
            if mode == "fresh":
                context, steps = context + to_the_middle, min(steps, FRESH_STEPS)
            particles = Particles(count, context, shared, steps, setup.vocab_size, next(seeds))
            return run(mode, particles, steps)

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
                    result = summary(mode, samples) | {"particles": count} | setup.common
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
    }


def checkpoint(name: str, directory: Path) -> str:
    """Where the model is. A dummy is a configuration alone, for weights that vLLM makes up."""
    if name not in SHAPES:
        return models.resolve(make_model(name, directory))
    from transformers import LlamaConfig

    config = LlamaConfig(**SHAPES[name], architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)
    return str(directory)


@dataclass(frozen=True, slots=True)
class Setup:
    """The options of all engines, what vLLM's configuration says, what all results have in common."""

    options: dict[str, Any]
    vocab_size: int
    block_size: int
    common: dict[str, Any]


def prepared(arguments: argparse.Namespace, model: str) -> Setup:
    """vLLM's own options but for what keeps the engines alike and small: each has KV memory for half
    as many sequences again as there are particles, so that what was asked before gets evicted."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    on_gpu = torch.cuda.is_available()
    most = max(arguments.particles)
    options: dict[str, Any] = {
        "dtype": "float32" if arguments.model == "tiny" else "auto",
        "load_format": "dummy" if arguments.model in SHAPES else "auto",
        "skip_tokenizer_init": True,
        "max_num_seqs": max(256, most),
        "enforce_eager": not on_gpu,
    }
    if on_gpu:
        # vLLM wants so much to be free when it opens; it takes kv_cache_memory_bytes beside the weights.
        options["gpu_memory_utilization"] = 0.3
    options |= arguments.options
    in_process = {"distributed_executor_backend": UniProcExecutor}
    config = EngineArgs(model=model, **options, **in_process).create_engine_config()
    shape, block = config.model_config, int(config.cache_config.block_size)
    longest = arguments.context + max(arguments.steps + SHORT, block + FRESH_STEPS) + 1
    options.setdefault("max_model_len", longest)
    heads = shape.get_num_kv_heads(config.parallel_config)
    width = shape.get_num_layers(config.parallel_config) * heads * shape.get_head_size()
    own = math.ceil(longest / block) - arguments.shared // block
    blocks = math.ceil(longest / block) + math.ceil(1.5 * most * own)
    options.setdefault("kv_cache_memory_bytes", blocks * block * 2 * width * shape.dtype.itemsize)
    common = {
        "model": arguments.model,
        "context": arguments.context,
        "shared": arguments.shared,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "versions": {
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "genrt": genrt.__version__,
        },
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "options": dict(options),
    }
    return Setup(options | in_process, int(shape.get_vocab_size()), block, common)


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


def plot(results: Sequence[Result], path: Path) -> None:
    """The ratio to decode over the number of particles: a panel a model and device, a line a mode.
    Of results that differ in nothing else, the last one counts."""
    figures = importlib.import_module("matplotlib.figure")
    panels = list(dict.fromkeys((r["model"], r["device"], r["context"]) for r in results))
    figure = figures.Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for mode in MODES:
            ratios = {
                r["particles"]: r["ratio_to_decode"]
                for r in results
                if (r["model"], r["device"], r["context"]) == panel
                and r["mode"] == mode
                and r["ratio_to_decode"] is not None
            }
            if ratios:
                axes.plot(sorted(ratios), [ratios[n] for n in sorted(ratios)], "o-", label=mode)
        axes.set(
            xscale="log", yscale="log", xlabel="particles", ylabel="time of a step, decode = 1"
        )
        axes.set_title("{}, {}\ncontext {}".format(*panel))
        axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
