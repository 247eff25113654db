"""A runtime of two actors over one local Ray: a line for each thing that is seen.

Ray changes the process that it is in: signals, warnings. So this is one of its own. In the end it waits
to be killed, with another local Ray, a fork of it alive, and one replica stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import genrt
from genrt.cluster import engine
from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME
from genrt.engines.exact import NGram
from genrt.inference import SMC, TextModel

VOCABULARY = [b"a", b"b", b"c", b"ab", b" ", b"1", b"2", b""]
MODEL = NGram.random(VOCABULARY, order=2, seed=4, eos_token_id=7)
CONTEXTS = [[a, b] for a in range(8) for b in range(8)]
OPTIONS: Any = {"engine": "exact", "seed": 7}


def tell(name: str, found: Any = True) -> None:
    print(json.dumps([name, found]), flush=True)


async def identity(lm: genrt.AsyncLM) -> int:
    return os.getpid()


async def rows_there(lm: genrt.AsyncLM) -> tuple[int, torch.Tensor, torch.Tensor]:
    row = await lm.next_token_logprobs([1, 2])
    return os.getpid(), row, await lm.next_token_logprobs([1, 2], adapter="a")


async def processes(lm: genrt.AsyncLM) -> list[int]:
    """Return the replicas' processes, all of which are up."""
    from tests.waiting import until_replicas  # not in replicas, which do without pytest

    await asyncio.to_thread(until_replicas, lm, "healthy")
    found: set[int] = set()
    while len(found) < 2:
        found |= {*await asyncio.gather(*[lm.run(identity) for _ in range(2)])}
    return sorted(found)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def started_by(process: int) -> list[int]:
    """Return the processes that one has started, and those that these have started."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    own = [int(each) for children in tasks for each in children.read_text().split()]
    return [*own, *(each for child in own for each in started_by(child))]


def without_agents(several: list[int]) -> list[int]:
    """Return these processes but for Ray's agents, which try to reach a dead Ray for a minute."""
    agents = b"ray::RuntimeEnvAgent", b"ray::DashboardAgent"
    commands = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in several}
    return [each for each, command in commands.items() if not command.startswith(agents)]


def adapter_in(folder: Path, table: torch.Tensor) -> Path:
    from safetensors.torch import save_file

    save_file({"table": table}, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text("{}")
    return folder


async def main() -> None:
    with genrt.load(MODEL, **OPTIONS) as one:
        drawn = [each.tolist() for each in one.batch_draw_sync(CONTEXTS)[:2]]
        posterior = await SMC(TextModel(one, [0], max_tokens=6), num_particles=8).run(3)
    tell("ray is not imported", "ray" not in sys.modules)
    environment = dict(os.environ)
    engine.STALL_SECONDS = 8.0
    lm = await genrt.aload(MODEL, replicas=2, **OPTIONS)
    import ray

    tell("the environment is as it was", dict(os.environ) == environment)
    tell("a local Ray is on 127.0.0.1", ray.get_runtime_context().gcs_address[:10] == "127.0.0.1:")
    tell("same draws", [each.tolist() for each in (await lm.batch_draw(CONTEXTS))[:2]] == drawn)
    smc = SMC(TextModel(lm, [0], max_tokens=6), num_particles=8)
    tell("same program", (await lm.run(smc, seed=3)).token_ids == posterior.token_ids)
    population = lm.population([1], 6)
    for step in range(4):
        population.append((await population.draw(seed=step * 6)).token_ids)
        population.resample([0, 0, 1, 2, 3, 4])
    population.close()
    rows = await lm.batch_next_token_logprobs([[1], [2]])
    tell("rows", torch.allclose(rows[1], MODEL.row([2]).float(), atol=1e-5))
    try:
        genrt.load(MODEL, cluster="203.0.113.1:6379", replicas=1, **OPTIONS)
    except genrt.EngineUnsupported as error:
        tell("one cluster a process", "cannot be to" in str(error))
    table = torch.randn(8, 8, 8)
    with tempfile.TemporaryDirectory() as directory:
        await lm.add_adapter("a", adapter_in(Path(directory), table))
    version = await lm.update_weights({"table": torch.zeros(8, 8, 8)})
    lm.clear_cache()
    row = await lm.next_token_logprobs([3])
    tell("new weights", version == 1 and torch.allclose(row, torch.full((8,), 1 / 8).log()))

    # A death in the middle of work: all of it is answered, by others, with the new weights.
    before = await processes(lm)
    tasks = [asyncio.create_task(lm.sample([1], max_tokens=200, seed=n)) for n in range(8)]
    await lm.draw([1])
    os.kill(before[0], signal.SIGKILL)
    texts = await asyncio.gather(*tasks)
    again = await asyncio.gather(*[lm.sample([1], max_tokens=200, seed=n) for n in range(8)])
    tell("a killed actor's work is another's", texts == again and len(texts[0]) == 200)
    after = await processes(lm)
    tell("it is started again", before[0] not in after and before[1] in after)
    process = before[1]
    while process == before[1]:
        process, row, adapted = await lm.run(rows_there)
    tell("with the new weights", float(row.std()) < 1e-6)
    expected = MODEL.with_table(table).row([1, 2]).float()
    tell("and adapters", torch.allclose(adapted, expected, atol=1e-5))

    # One that hangs is killed.
    stopped = after[0]
    os.kill(stopped, signal.SIGSTOP)
    found = await asyncio.gather(*[lm.sample([n], max_tokens=5, seed=n) for n in range(8)])
    tell("a stopped actor's work is another's", len(found) == 8)
    last = await processes(lm)
    tell("a stopped actor is gone", stopped not in last and not lives(stopped))
    lm.close()
    tell("Ray ends with the last runtime", not ray.is_initialized())
    tell("no process is left", not any(map(lives, {*before, *after, *last})))
    kinds = "genrt-adapters-", "genrt-weights-"  # of this process, and removed with it
    left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("genrt", "ray"))]
    tell("no file of Ray's is left", all(name.startswith(kinds) for name in left))


async def wait_to_be_killed() -> None:
    lm = await genrt.aload(MODEL, replicas=2, **OPTIONS)
    found = await processes(lm)
    rays = without_agents(started_by(os.getpid()))
    if not (fork := os.fork()):
        os.read(0, 1)
        os._exit(0)
    os.kill(found[0], signal.SIGSTOP)
    print(json.dumps(["processes", rays, fork]), flush=True)
    signal.pause()


if __name__ == "__main__":
    here = __import__("importlib").import_module("tests.cluster.ray_program")  # as actors know it
    asyncio.run(here.main())
    asyncio.run(here.wait_to_be_killed())
