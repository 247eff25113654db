"""What does a step of N particles cost on two GPUs? genrt's ranks against vLLM's TP 2, and one GPU.

    python -m benchmarks.ranks --model dummy-8b --context 2048 --check --json ranks.json

A step extends every particle by one token and draws the next. Each part is a process with an engine:

decode      vLLM's own decode loop, TP 2, under its executor of several processes
ranks       genrt with ranks: ``population``, a masked draw for all a step; ``population-resample``, half
            of it replaced by the other half in every step; ``batch-draw``, one ``batch_draw`` a step
one         genrt on one GPU: the same, as ``one-gpu-…``
one-decode  vLLM's own decode loop on one GPU

The first two are open at once and take turns, then the other two do; one that fails is left out. Contexts
are the same in every repeat, but for the token that is appended first, so an engine computes them once.
What is timed begins after two steps, as in ``benchmarks.step``.

``--check`` walks: contexts grow, fork and are cut back, and so few fit that residents are evicted. It
compares ranks, one GPU, one that keeps nothing (``fresh``), and transformers' ``float32``: differences of
log-probabilities, of tokens likelier than 1e-4, and how many rows are ``crossed``, nearer to another
context's. ``drawn`` is how far an engine's draws are from its rows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import genrt
from benchmarks import fidelity, step, step_modes
from benchmarks.checkpoints import checkpoint
from benchmarks.setups import Setup, append, prepared
from benchmarks.step_modes import SHORT, Measured, Particles, ask_all, clock, packed_masks, timed

OPEN_SECONDS, ANSWER_SECONDS, CLOSE_SECONDS = 300.0, 180.0, 20.0
WARM_STEPS, WALK_STEPS, LIKELY = 4, 12, math.log(1e-4)
ROOM = 1.25  # KV memory of an engine, in that of all particles at their longest

ASKED = ("population", "population-resample", "batch-draw")
PARTS: dict[str, Sequence[str]] = {"decode": ["decode"], "ranks": ASKED}
PARTS |= {"one": [f"one-gpu-{mode}" for mode in ASKED], "one-decode": ["one-gpu-decode"]}
GROUPS = (("decode", "ranks"), ("one", "one-decode"))
CHECKS = ("check-ranks", "check-one", "check-fresh")
ON_TWO = ("decode", "ranks", "check-ranks")


def main() -> None:
    arguments = parsed()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as directory:
        run = Run(arguments, Path(directory))
        run.measure()
        if arguments.check:
            run.check()
    print("", *(line(each, run.results) for each in run.results), sep="\n")
    sys.exit(run.has_failed)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, embedded, dummy-1b, dummy-8b, or a directory")
    add("--only", nargs="*", choices=PARTS, default=list(PARTS), metavar="PART")
    add("--particles", nargs="+", type=int, default=[64, 256])
    add("--context", type=int, default=2048, help="tokens before the first step")
    add("--steps", type=int, default=32, help="timed in a repeat")
    add("--repeats", type=int, default=3)
    add("--check", action="store_true", help="compare rows: of tiny beside tiny, else of 1b")
    add("--options", type=json.loads, default={}, help="options of all engines, as JSON")
    add("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"there is no directory for {arguments.json}")
    return arguments


def serve(link: Any, log: str, environment: dict[str, str], *part: Any) -> None:
    """Open the engine of a part, then do the jobs that come, until the link is closed."""
    os.setsid()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    try:
        with opened(*part) as do, contextlib.suppress(EOFError):
            link.send(True)
            while True:
                link.send(do(**link.recv()))
    except BaseException as error:
        link.send(f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def opened(name: str, model: str, options: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Open the engine of a part; yield the function that does a job."""
    if "decode" in name:
        from vllm import LLM

        llm = LLM(model, **options)
        yield lambda mode, **job: step_modes.decode(llm, particles_of(**job), job["steps"])
        llm.llm_engine.engine_core.shutdown()  # or its process is waited for
        return
    ranked: dict[str, Any] = {"replicas": 1} if name in ON_TWO else {}
    keeps = name != "check-fresh"
    lm = genrt.load(model, engine_options=options, cache_bytes=0, residency=keeps, **ranked)
    modes = step_modes.GENRT_MODES | {"batch-draw": batch_draw}
    modes |= {f"one-gpu-{mode}": function for mode, function in modes.items()}
    with lm, asyncio.Runner() as loop:
        if name in CHECKS:
            yield lambda steps: walked(lm, steps)
        else:
            yield lambda mode, **job: loop.run(modes[mode](lm, particles_of(**job), job["steps"]))


def particles_of(count: int, context: int, steps: int, vocab_size: int) -> Particles:
    """Return particles whose contexts are always the same: those of fewer are the first of all."""
    particles = Particles(count, 0, 0, steps, vocab_size, time.time_ns() % 2**32)
    shape, generator = (count, context), torch.Generator().manual_seed(0)
    particles.contexts = torch.randint(0, vocab_size, shape, generator=generator).tolist()
    return particles


async def batch_draw(lm: genrt.AsyncLM, particles: Particles, steps: int) -> Measured:
    """Half of the vocabulary is allowed to each, as in ``population``."""
    masks = packed_masks(8, lm.vocab_size)[torch.arange(len(particles)) % 8]

    async def run(count: int) -> None:
        for _ in range(count):
            draws = await lm.batch_draw(particles.contexts, masks=masks)
            particles.tokens[0] = draws.token_ids.tolist()
            particles.extend(0)

    await ask_all(lm, particles)
    began = clock()
    particles.extend(0)
    await run(SHORT)
    return await timed(lm, particles, steps, run(steps), began)


def walked(lm: genrt.AsyncLM, steps: int) -> dict[str, Any]:
    """Return the contexts of a walk and their rows, how far draws are from rows, and what was counted."""
    contexts, rows = zip(*fidelity.walk(lm, steps=steps), strict=True)
    found = {"contexts": contexts, "rows": torch.stack(rows).cpu().numpy()}
    contexts, tokens, logprobs = zip(*fidelity.drawing(lm, steps=steps), strict=True)
    expected = lm.batch_next_token_logprobs_sync(contexts).cpu()[range(len(tokens)), tokens]
    apart = (expected - torch.tensor(logprobs)).abs()[expected > LIKELY]
    return found | {"drawn": float(apart.max()), "counted": asdict(lm.statistics().engine)}


class Part:
    """The process of a part, as seen from outside. What it and its processes print goes to a file."""

    def __init__(self, log: Path, *more: Any) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._log, (self._link, theirs) = log, spawning.Pipe()
        self._process = spawning.Process(target=serve, args=(theirs, str(log), *more))
        self._process.start()
        theirs.close()

    def answer(self, seconds: float, job: dict[str, Any]) -> Any:
        """Return its answer to a job, which is at first to open. Without one, close it and return why."""
        answer: Any = "its process ended"
        with contextlib.suppress(EOFError, OSError):
            if job:
                self._link.send(job)
            is_there = self._link.poll(seconds)
            answer = self._link.recv() if is_there else f"it said nothing for {seconds:g} s"
        if isinstance(answer, str):
            self.close()
            said = self._log.read_text(errors="replace").splitlines()
            causes = [each for each in said if "Error" in each or "genrt: " in each][:10]
            answer = "\n    ".join([answer, *causes, "...", *said[-10:]])
        return answer

    def close(self) -> None:
        """Have it end, or kill it and what it has started. Idempotent."""
        self._link.close()
        self._process.join(CLOSE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()


class Run:
    """One run: its results, and what failed in it."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self.results: list[dict[str, Any]] = []
        self.has_failed = False
        self._given, self._directory = arguments, directory
        self._samples: dict[int, dict[str, dict[int, Measured]]] = {}

    def measure(self) -> None:
        """Time the steps, in one group of parts after the other."""
        given, most = self._given, max(self._given.particles)
        longest = given.context + max(given.steps, WARM_STEPS) + SHORT + 2
        model = checkpoint(given.model, self._directory / "timed")
        setup = prepared(given.model, model, given.options, max_num_seqs=max(256, most))
        setup = setup.sized(longest, math.ceil(ROOM * most * -(-longest // setup.block_size)))
        for group in GROUPS:
            with self._opened([n for n in group if n in given.only], model, setup) as parts:
                for count in given.particles:
                    self._take_turns(parts, count, setup)

    def _take_turns(self, parts: dict[str, Part], count: int, setup: Setup) -> None:
        """Have the modes of these parts take turns, in rotating order."""
        given, samples = self._given, self._samples.setdefault(count, {})
        modes = [(part, mode) for part in parts for mode in PARTS[part]]
        job = {"count": count, "context": given.context, "vocab_size": setup.vocab_size}
        for repeat in range(-1, given.repeats):  # the first is for warming up
            steps = given.steps if repeat >= 0 else WARM_STEPS
            first = max(0, repeat) % max(1, len(modes))
            for part, mode in modes[first:] + modes[:first]:
                found = self._ask(part, parts, ANSWER_SECONDS, mode=mode, steps=steps, **job)
                if found and repeat >= 0:
                    samples.setdefault(mode, {})[repeat] = found
        facts = {each: getattr(given, each) for each in ("model", "context", "steps", "repeats")}
        for mode in [mode for _, mode in modes if mode in samples]:
            self._keep({"particles": count, **step.summary(mode, samples), **facts}, setup)

    def check(self) -> None:
        """Compare the rows of ranks with those of one GPU."""
        name = "tiny" if self._given.model == "tiny" else "1b"
        model = checkpoint(name, self._directory / "checked")
        setup = prepared(name, model, self._given.options, max_num_seqs=32)
        setup = setup.sized(512, 512 // setup.block_size + 64)
        found: dict[str, dict[str, Any]] = {}
        with self._opened(CHECKS, model, setup) as parts:
            for part in CHECKS:
                if answer := self._ask(part, parts, ANSWER_SECONDS, steps=WALK_STEPS):
                    found[part.removeprefix("check-")] = answer
        rows = {each: torch.from_numpy(it.pop("rows")) for each, it in found.items()}
        asked = [it.pop("contexts") for it in found.values()]
        if asked:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            rows["float32"] = fidelity.reference_rows(model, asked[0], device)
        apart = {f"{a}-{b}": compared(rows[a], rows[b], asked[0]) for a, b in combinations(rows, 2)}
        self._keep({"mode": "check", "model": name, **apart, "walks": found}, setup)

    def _keep(self, result: dict[str, Any], setup: Setup) -> None:
        self.results.append(result)
        print(line(result, self.results), flush=True)
        more = setup.surroundings | {"async_scheduling": None}  # it is each part's own
        append(json.dumps(result | more), self._given.json)

    def _ask(self, name: str, parts: dict[str, Part], seconds: float, **job: Any) -> Any:
        """Return a part's answer. Without one, say why and take the part out; then it has none."""
        answer = parts[name].answer(seconds, job) if name in parts else None
        if isinstance(answer, str):
            del parts[name]
            self.has_failed = True
            print(f"{name} failed: {answer}", flush=True)
            return None
        return answer

    @contextlib.contextmanager
    def _opened(self, names: Sequence[str], model: str, setup: Setup) -> Iterator[dict[str, Part]]:
        """Open these parts, all at once; close them after that."""
        started = time.perf_counter()
        parts = {name: self._part(name, place, model, setup) for place, name in enumerate(names)}
        every = list(parts.values())
        try:
            for name in names:
                if self._ask(name, parts, OPEN_SECONDS):
                    print(f"{name} is open, {time.perf_counter() - started:.0f} s", flush=True)
            yield parts
        finally:
            with ThreadPoolExecutor() as pool:
                pool.map(Part.close, every)

    def _part(self, name: str, place: int, model: str, setup: Setup) -> Part:
        """Start the process of a part. Those of one GPU get one each."""
        cache = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
        environment = {
            "VLLM_CACHE_ROOT": str(cache / name),  # or two would write one file
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        options = {k: v for k, v in setup.options.items() if k != "distributed_executor_backend"}
        options["enable_prefix_caching"] = name != "check-fresh"
        if name in ON_TWO:
            backend = "mp" if name == "decode" else "external_launcher"
            options |= {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
            options["kv_cache_memory_bytes"] //= 2
        elif torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[place % len(visible)]
        return Part(self._directory / f"{name}.log", environment, name, model, options)


def compared(one: torch.Tensor, other: torch.Tensor, contexts: Any) -> dict[str, float]:
    """Return how far the rows of these contexts are apart."""
    apart = (one - other).abs()[torch.maximum(one, other) > LIKELY]
    crossed = fidelity.crossed(one, other, contexts)
    return {"largest": float(apart.max()), "mean": float(apart.mean()), "crossed": crossed}


def line(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """Return a result for reading, beside what one GPU takes for the same."""
    if result["mode"] == "check":
        return json.dumps(result)
    mode, count, (low, high) = result["mode"], result["particles"], result["quartiles"]
    text = f"{mode:28}{count:5}{result['ms_per_step']:9.2f} ms ({low:.2f} to {high:.2f})"
    if result["ratio_to_decode"] is not None:
        text += f"{result['ratio_to_decode']:7.2f} x decode"
    if result["ms_to_begin"] is not None:
        text += f"{result['ms_to_begin']:7.0f} ms to begin"
    for other in results:
        if other["mode"] == f"one-gpu-{mode}" and other["particles"] == count:
            text += f"{result['ms_per_step'] / other['ms_per_step']:7.2f} x one GPU"
    return text


if __name__ == "__main__":
    main()
