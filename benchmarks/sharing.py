"""Does a sampler get its share of the engine's steps beside the streams of a server?

    python -m benchmarks.sharing --model path/to/model --streams 200 --json sharing.json

One process has the runtime, a server over it and a sampler: ``particles`` sequences of a population that
draws, appends and resamples. Another has the clients. ``share`` says in how many of the engine's steps
the sampler drew, from its first question to its last answer: 1.0 is every step, as each stream does.
``tokens_a_second`` are those of the streams in that time, ``sampler_tokens_a_second`` the sampler's. Each
is measured in turns with steps that wait for a sampler that asks again at once (``waiting``, as it is)
and without (``not_waiting``). ``streams_ratio`` is one over the other for the streams' tokens a second,
``alone_ratio`` for the sampler's time while nobody else asks. Medians, with quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import genrt
from benchmarks.serving import NAME, Load, quartiles, rounds
from benchmarks.setups import append, taken
from genrt import models
from genrt.lm import AsyncLM
from genrt.runtime import batcher

RESAMPLED_EVERY = 5
"""After so many draws the particles are resampled."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened while the sampler drew."""

    share: float
    seconds: float
    tokens_a_second: float
    sampler_tokens_a_second: float


async def drawn(lm: AsyncLM, particles: int, draws: int) -> Window:
    """Run the sampler, and return what happened meanwhile."""
    before, began = lm.statistics().engine, time.perf_counter()
    with lm.population([1, 2, 3], n=particles) as population:
        for step in range(draws):
            found = await population.draw(seed=step * particles)
            population.append(found.token_ids)
            if step % RESAMPLED_EVERY == RESAMPLED_EVERY - 1:
                population.resample(np.arange(particles) // 2)
    seconds, after = time.perf_counter() - began, lm.statistics().engine
    return Window(
        draws / (after.steps - before.steps),
        seconds,
        (after.sampled_tokens - before.sampled_tokens) / seconds,
        particles * draws / seconds,
    )


async def in_turns(lm: AsyncLM, given: argparse.Namespace) -> dict[str, list[Window]]:
    """Return windows with steps that wait and without; the first of each is left out."""
    share = batcher.RETURN_SHARE
    found: dict[str, list[Window]] = {"waiting": [], "not_waiting": []}
    try:
        for repeat in range(given.windows + 1):
            for kind in sorted(found, reverse=bool(repeat % 2)):
                batcher.RETURN_SHARE = share if kind == "waiting" else 0.0
                window = await drawn(lm, given.particles, given.draws)
                if repeat:
                    found[kind].append(window)
    finally:
        batcher.RETURN_SHARE = share
    return found


async def beside_streams(lm: AsyncLM, url: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return windows while clients of another process read streams."""
    command = ["-m", "benchmarks.sharing", "--clients", url, "--streams", str(given.streams)]
    command += ["--tokens", str(given.tokens), "--vocab-size", str(lm.vocab_size)]
    clients = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        while lm.statistics().batcher.in_flight < given.streams:
            if clients.returncode is not None:
                raise RuntimeError("the clients have ended")
            await asyncio.sleep(0.05)
        found = await in_turns(lm, given)
        if lm.statistics().batcher.in_flight < given.streams:
            raise RuntimeError("streams ended before the sampler did: give more --tokens")
        return found
    finally:
        if clients.returncode is None:
            clients.kill()
        await clients.wait()


async def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Return the result."""
    options = {"max_num_seqs": given.streams + given.particles, **json.loads(given.options)}
    async with await genrt.aload(given.model, engine_options=options, seed=0) as lm:
        alone = await in_turns(lm, given)
        async with genrt.serving(lm, model=NAME) as server:
            beside = await beside_streams(lm, str(server.url), given)
    ratios = [a.tokens_a_second / b.tokens_a_second for a, b in _pairs(beside)]
    times = [a.seconds / b.seconds for a, b in _pairs(alone)]
    result: dict[str, Any] = {
        "streams": given.streams,
        "particles": given.particles,
        "draws": given.draws,
        "model": Path(models.resolve(given.model)).name,
        "options": options,
        "streams_ratio": quartiles(ratios),
        "alone_ratio": quartiles(times),
        **taken(),
    }
    for kind, windows in beside.items():
        result[kind] = {
            name: quartiles([getattr(each, name) for each in windows])
            for name in ("share", "tokens_a_second", "sampler_tokens_a_second")
        }
    return result


def _pairs(windows: dict[str, list[Window]]) -> list[tuple[Window, Window]]:
    return [*zip(windows["waiting"], windows["not_waiting"], strict=True)]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; by default the embedded model")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--particles", type=int, default=16)
    parser.add_argument("--draws", type=int, default=60, help="of a window")
    parser.add_argument("--windows", type=int, default=5, help="of each kind, after a first one")
    parser.add_argument("--tokens", type=int, default=100_000, help="of a stream, at most")
    parser.add_argument("--options", default="{}", help="vLLM's, as JSON")
    parser.add_argument("--quick", action="store_true", help="a few streams, once")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    parser.add_argument("--clients", metavar="URL", help="be the clients of a server")
    parser.add_argument("--vocab-size", type=int, default=1000, help="of the clients' prompts")
    given = parser.parse_args()
    if given.quick:
        given.streams, given.draws, given.windows = 8, 10, 1
    return given


def main() -> None:
    given = parsed()
    if given.clients is not None:
        load = Load(given.streams, 8, given.tokens, False, given.vocab_size)
        asyncio.run(rounds(given.clients, load, load.prompts(random.Random(0))))
        return
    result = asyncio.run(measured(given))
    print(json.dumps(result), flush=True)
    append(json.dumps(result), given.json)


if __name__ == "__main__":
    main()
