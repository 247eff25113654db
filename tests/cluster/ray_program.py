"""Two runtimes of two actors each over one local Ray: a line for each thing that is seen.

Ray changes the process that it is in: signals, warnings. So this is one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import genrt
from genrt.cluster.health import ReplicaLimits
from genrt.engines.exact import ExactEngine, NGram
from genrt.inference import SMC, TextModel
from tests.inside import engine_of

VOCABULARY = [b"a", b"b", b"c", b"ab", b" ", b"1", b"2", b""]
# A row of 8,192 tokens travels beside its message.
MODEL = NGram.random([*VOCABULARY, *(b"%d" % n for n in range(100, 8284))], order=0, seed=4)
SMALL = NGram.random(VOCABULARY, order=2, seed=4, eos_token_id=7)
LIMITS = ReplicaLimits(probe_seconds=0.2, most_silent=50, most_restarts=100)
CONTEXTS = [[a, b] for a in range(8) for b in range(8)]


def tell(name: str, found: Any = True) -> None:
    print(json.dumps([name, found]), flush=True)


def actors(lm: genrt.AsyncLM) -> dict[int, Any]:
    engine = engine_of(lm)
    return {number: each.handle for number, each in engine._transport._actors.items()}


def processes() -> set[int]:
    """Those of actors of this host."""
    found = set()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"ray::ReplicaActor" in each.read_bytes():
                found.add(int(each.parent.name))
    return found


def on_a_gpu(directory: Path) -> ExactEngine:
    """Return an engine, and leave a file by the name of the GPUs that it may use."""
    (directory / os.environ.get("CUDA_VISIBLE_DEVICES", "all")).touch()
    return ExactEngine(SMALL)


async def main() -> None:
    options: Any = {"engine": "exact", "seed": 7, "replicas": 2, "replica_limits": LIMITS}
    with genrt.load(SMALL, engine="exact", seed=7) as one:
        drawn = [each.tolist() for each in one.batch_draw_sync(CONTEXTS)[:2]]
        posterior = await SMC(TextModel(one, [0], max_tokens=6), num_particles=8).run(3)
    tell("ray is not imported", "ray" not in sys.modules)
    environment = dict(os.environ)
    lm = await genrt.aload(SMALL, cluster="auto", **options)
    import ray

    tell("the environment is as it was", dict(os.environ) == environment)
    tell("a local Ray is on 127.0.0.1", ray.get_runtime_context().gcs_address[:10] == "127.0.0.1:")
    tell("same draws", [each.tolist() for each in (await lm.batch_draw(CONTEXTS))[:2]] == drawn)
    smc = SMC(TextModel(lm, [0], max_tokens=6), num_particles=8)
    found = await lm.run(smc, seed=3)
    tell("same program", found.token_ids == posterior.token_ids)
    population = lm.population([1], 6)
    for step in range(4):
        draws = await population.draw(seed=step * 6)
        population.append(draws.token_ids)
        population.resample([0, 0, 1, 2, 3, 4])
    population.close()
    before = processes()
    with genrt.load(MODEL, cluster="local", **options) as large:
        during = processes()
        rows = await large.batch_next_token_logprobs([[1], [2]])
        tell("rows", torch.allclose(rows[1], MODEL.row([2]).float(), atol=1e-5))
        rows.add_(1.0)
        tell("own rows", torch.allclose(await large.next_token_logprobs([2]), rows[1] - 1.0))
        try:
            genrt.load(SMALL, cluster="203.0.113.1:6379", **options)
        except genrt.EngineUnsupported as error:
            tell("one cluster a process", "cannot be to" in str(error))
    tell("the second's processes have ended", len(during - before) == 2 and processes() == before)
    tell("the first goes on", (await lm.score([1], [2, 3])).shape == (2,))
    version = await lm.update_weights({"table": torch.zeros(8, 8, 8)})
    lm.clear_cache()
    row = await lm.next_token_logprobs([3])
    tell("new weights", version == 1 and torch.allclose(row, torch.full((8,), 1 / 8).log()))
    # A death in the middle of work: all of it is answered, by others, with the new weights.
    tasks = [asyncio.create_task(lm.sample([1], max_tokens=200, seed=n)) for n in range(8)]
    await lm.draw([1])
    ray.kill(actors(lm)[0])
    texts = await asyncio.gather(*tasks)
    again = await asyncio.gather(*[lm.sample([1], max_tokens=200, seed=n) for n in range(8)])
    tell("a killed actor's work is another's", texts == again and len(texts[0]) == 200)
    while sum(each.restarts for each in lm.statistics().replicas) < 1:
        await lm.draw([2])
    lm.clear_cache()
    tell("and it is started again with the new weights", float(row.std()) < 1e-6)
    lm.close()
    tell("Ray ends with the last runtime", not ray.is_initialized())
    with genrt.load(SMALL, cluster="local", **options) as lm:
        again = [each.tolist() for each in lm.batch_draw_sync(CONTEXTS)[:2]]
    tell("and begins again with the next", again == drawn and dict(os.environ) == environment)
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,5"
    with tempfile.TemporaryDirectory() as directory:
        here = importlib.import_module("tests.cluster.ray_program")  # as actors know it
        make = functools.partial(here.on_a_gpu, Path(directory))
        with genrt.load(engine=make, replicas=2, cluster="local"):
            found_gpus = sorted(os.listdir(directory))
        tell("each has a GPU of its own", found_gpus == ["3", "5"])
        try:
            genrt.load(engine=make, replicas=3, cluster="local")
        except genrt.EngineUnsupported as error:
            tell("too few GPUs", "3 replicas need 3 GPUs, and the cluster has 2" in str(error))
        tell("Ray ends where there are too few", not ray.is_initialized())


if __name__ == "__main__":
    asyncio.run(main())
