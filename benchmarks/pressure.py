"""Far more sequences than fit: does every question end, at what cost, and is memory flat?

    python -m benchmarks.pressure --model tiny --json pressure.json

KV memory has room for a share (``--kv-share``) of N sequences, and vLLM runs ``--max-num-seqs`` at once.

particles    N particles at once: in a round, each is a coroutine that a few times (``--steps``) appends
             a token and awaits next_token_logprobs
alternating  M contexts in groups, each as large as fits: a round goes through the groups one after the
             other, appends a token to each context of a group, and asks about them together

One JSON object a case; times and counters begin when every context has been asked once. Memory is
sampled then and after each round, in MiB: ``resident_mib`` is the resident set of the process once the
allocator has given back what is free, ``device_mib`` what torch has allocated on the GPU. It is flat
if from the second round to the last it grows by less than 1 % or 64 MiB.

16 of the last rows of each case are compared with a second load's, without residency, asked in another
order: ``largest_difference`` is that of two log-probabilities over -15, and ``between_contexts`` the
smallest difference between rows of two contexts. The first should be far below the second, but for
dummy weights, whose rows are all alike.

The exit status is 1 if memory is not flat or an answer is missing: failed, of the wrong shape, or not
there when its round has taken ``--patience`` seconds, which ends the case.

On a CPU, oneDNN keeps up to 1,024 compiled kernels, one or more for every number of tokens that a step
had: some 250 MiB, until they are all there. Here it may keep 64, unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import genrt
from benchmarks.checkpoints import checkpoint
from benchmarks.setups import Setup, append, prepared
from benchmarks.step_modes import Particles, clock

CASES = ("particles", "alternating")
COMPARED = 16
"""How many rows of a case are compared with fresh ones."""
LIKELY = -15.0
FLAT_SHARE, FLAT_MIB = 0.01, 64.0


# -- memory -----------------------------------------------------------------------------------


def resident_mib() -> float:
    """The resident set of this process, less what glibc's allocator keeps for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def device_mib() -> float | None:
    """What torch has allocated on the GPU, if there is one."""
    return torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else None


@dataclass(slots=True)
class Memory:
    """Samples in MiB: one before the first round, then one after each."""

    resident: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)

    def sample(self) -> None:
        gc.collect()
        self.resident.append(round(resident_mib(), 1))
        on_device = device_mib()
        if on_device is not None:
            self.device.append(round(on_device, 1))

    def report(self) -> dict[str, Any]:
        return {
            "resident_mib": self.resident,
            "resident_growth_mib": growth(self.resident),
            "device_mib": self.device or None,
            "device_growth_mib": growth(self.device),
            "flat": is_flat(self.resident) and (not self.device or is_flat(self.device)),
        }


def growth(samples: Sequence[float]) -> float | None:
    """From the end of the second round to that of the last; ``None`` if there was no third."""
    return round(samples[-1] - samples[2], 1) if len(samples) > 3 else None


def is_flat(samples: Sequence[float]) -> bool:
    """Whether the growth is no more than an allocator's whims."""
    grown = growth(samples)
    return grown is not None and grown < max(FLAT_MIB, FLAT_SHARE * samples[2])


# -- a case -----------------------------------------------------------------------------------


class Asked:
    """What was asked and answered; of some particles also the last context and row, on the host."""

    def __init__(self, particles: Particles) -> None:
        everyone = range(len(particles))
        self.questions = self.answers = 0
        self.error: str | None = None
        self.last: dict[int, tuple[list[int], torch.Tensor]] = {}
        self._particles = particles
        self._watched = set(random.Random(0).sample(everyone, min(COMPARED, len(particles))))

    async def ask(self, lm: genrt.AsyncLM, number: int) -> None:
        """One question about one particle. An error of it is kept, not raised: others go on."""
        context = self._particles.contexts[number]
        self.questions += 1
        try:
            row = await lm.next_token_logprobs(context)
        except genrt.GenrtError as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
            return
        if row.shape != (lm.vocab_size,):
            return
        self.answers += 1
        if number in self._watched:
            self.last[number] = list(context), row.cpu()


async def run(
    lm: genrt.AsyncLM,
    particles: Particles,
    *,
    group: int,
    rounds: int,
    steps: int,
    patience: float,
) -> tuple[dict[str, Any], Asked]:
    """All rounds, or those up to the first that takes longer than ``patience`` seconds.

    In a round the groups of particles take turns, and each particle of a group goes ``steps`` steps.
    """
    asked, memory = Asked(particles), Memory()
    done = [0] * len(particles)

    async def go(number: int, count: int) -> None:
        for _ in range(count):
            particles.contexts[number].append(particles.tokens[done[number]][number])
            done[number] += 1
            await asked.ask(lm, number)

    async def in_groups(count: int) -> None:
        for first in range(0, len(particles), group):
            numbers = range(first, min(first + group, len(particles)))
            work = (go(n, count) if count else asked.ask(lm, n) for n in numbers)
            await asyncio.gather(*work)

    async def in_time(count: int) -> bool:
        try:
            await asyncio.wait_for(in_groups(count), patience)
        except TimeoutError:
            asked.error = f"a round was not over in {patience:g} s"
            return False
        return True

    finished = await in_time(0)
    memory.sample()
    begun, before, seconds = asked.questions, lm.statistics().engine, 0.0
    for _ in range(rounds):
        if finished:
            started = clock()
            finished = await in_time(steps)
            seconds += clock() - started
            memory.sample()
    after, questions = lm.statistics().engine, max(1, asked.questions - begun)
    computed = after.computed_tokens - before.computed_tokens
    return {
        "questions": asked.questions,
        "missing": asked.questions - asked.answers,
        "finished": finished,
        "error": asked.error,
        "ms_per_question": round(seconds * 1e3 / questions, 4),
        "engine_steps": after.steps - before.steps,
        "computed_tokens_per_question": round(computed / questions, 2),
        "extended": after.extended - before.extended,
        "forked": after.forked - before.forked,
        "evicted": after.evicted - before.evicted,
        "resident": after.resident,
    } | memory.report(), asked


# -- against fresh answers --------------------------------------------------------------------


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two rows, where either is likely."""
    likely = (one > LIKELY) | (other > LIKELY)
    return float((one - other)[likely].abs().max())


def compared(lm: genrt.AsyncLM, asked: Asked) -> dict[str, Any]:
    """The rows that were kept, beside those of a runtime that keeps nothing."""
    kept = list(reversed(asked.last.values()))
    if not kept:
        return {"compared": 0, "largest_difference": None, "between_contexts": None}
    fresh = lm.batch_next_token_logprobs_sync([context for context, _ in kept], device="cpu")
    return {
        "compared": len(kept),
        "largest_difference": max(map(apart, fresh, (row for _, row in kept))),
        "between_contexts": min((apart(*two) for two in combinations(fresh, 2)), default=None),
    }


# -- the run ----------------------------------------------------------------------------------


def main() -> None:
    arguments = parsed()
    if arguments.runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(arguments.runner == "V2"))
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    passed = True
    for result in measure(arguments):
        print(line(result), flush=True)
        append(json.dumps(result), arguments.json)
        passed = passed and result["flat"] and not result["missing"]
    if not passed:
        sys.exit(1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="tiny, embedded, dummy-1b, dummy-8b, or a directory")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--particles", type=int, help="N; default: 4096; quick: 256")
    add("--contexts", type=int, help="M; default: 10000; quick: 640")
    add("--max-num-seqs", type=int, help="default: 256; quick: 16")
    add("--kv-share", type=float, default=0.5, help="default: 0.5")
    add("--context", type=int, default=128, help="tokens at first; default: 128")
    add("--rounds", type=int, help="default: 6; quick: 4")
    add("--steps", type=int, default=2, help="of a particle in a round; default: 2")
    add("--patience", type=float, default=600.0, help="seconds for a round; default: 600")
    add("--quick", action="store_true", help="smaller defaults, under the same pressure")
    add("--runner", choices=["V1", "V2"], help="default: vLLM's own choice")
    add("--options", type=json.loads, default={}, help="options of the engines, as JSON")
    add("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.particles = arguments.particles or (256 if quick else 4096)
    arguments.contexts = arguments.contexts or (640 if quick else 10_000)
    arguments.max_num_seqs = arguments.max_num_seqs or (16 if quick else 256)
    arguments.rounds = arguments.rounds or (4 if quick else 6)
    sizes = (arguments.particles, arguments.contexts, arguments.max_num_seqs, arguments.context)
    if min(*sizes, arguments.steps) < 1 or arguments.patience <= 0.0:
        parser.error("numbers, steps and patience must be positive")
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3: memory is compared from the second to the last")
    if not 0.0 < arguments.kv_share < 1.0:
        parser.error("--kv-share must be between 0 and 1")
    if not isinstance(arguments.options, dict):
        parser.error("--options must be a JSON object")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"there is no directory for {arguments.json}")
    return arguments


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cases, one after the other on the same engine."""
    longest = arguments.context + arguments.rounds * arguments.steps + 1
    fits = max(1, int(arguments.kv_share * arguments.particles))
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = checkpoint(arguments.model, Path(directory))
        setup = prepared(
            arguments.model, model, arguments.options, max_num_seqs=arguments.max_num_seqs
        )
        blocks = math.ceil(longest / setup.block_size)
        crowded, fresh = setup.sized(longest + 1, fits * blocks + 1), few(setup, longest + 1)
        loop = stack.enter_context(asyncio.Runner())
        fresh_lm = stack.enter_context(
            genrt.load(model, engine_options=fresh.options, cache_bytes=0, residency=False)
        )
        lm = stack.enter_context(genrt.load(model, engine_options=crowded.options, cache_bytes=0))
        for seed, case in enumerate(arguments.cases):
            alone = case == "particles"
            count = arguments.particles if alone else arguments.contexts
            steps = arguments.steps if alone else 1
            particles = Particles(
                count, arguments.context, 0, arguments.rounds * steps, setup.vocab_size, seed
            )
            result, asked = loop.run(
                run(
                    lm,
                    particles,
                    group=count if alone else fits,
                    rounds=arguments.rounds,
                    steps=steps,
                    patience=arguments.patience,
                )
            )
            yield {
                "case": case,
                "contexts": count,
                **result,
                **compared(fresh_lm, asked),
                "model": arguments.model,
                "context": arguments.context,
                "rounds": arguments.rounds,
                "steps": steps,
                "fits": fits,
                **crowded.surroundings,
            }


def few(setup: Setup, max_model_len: int) -> Setup:
    """Room for no more than is compared."""
    blocks = math.ceil(max_model_len / setup.block_size) * COMPARED + 1
    small = setup.sized(max_model_len, blocks)
    small.options["max_num_seqs"] = COMPARED
    return small


def line(result: dict[str, Any]) -> str:
    """A result for reading."""
    text = f"{result['case']}: {result['questions']} questions about {result['contexts']} contexts"
    text += f", room for {result['fits']}; {result['missing']} answers missing\n"
    text += f"    {result['ms_per_question']} ms and {result['computed_tokens_per_question']} "
    text += f"computed tokens a question, {result['engine_steps']} engine steps\n"
    counted = (f"{result[name]} {name}" for name in ("extended", "forked", "evicted", "resident"))
    text += f"    {', '.join(counted)}\n"
    for where in ("resident", "device"):
        if result[f"{where}_mib"]:
            samples = ", ".join(f"{sample:.0f}" for sample in result[f"{where}_mib"])
            text += f"    {where} MiB: {samples}; grown by {result[f'{where}_growth_mib']}\n"
    text += f"    memory is {'flat' if result['flat'] else 'NOT FLAT'}; "
    text += f"{result['compared']} rows differ from fresh ones by {result['largest_difference']}"
    text += f" (two contexts' by {result['between_contexts']} or more)"
    return text + (f"\n    {result['error']}" if result["error"] else "")


if __name__ == "__main__":
    main()
