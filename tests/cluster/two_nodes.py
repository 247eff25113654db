"""Replicas over a Ray of two nodes on this machine: a line for each thing that is seen.

Its arguments are a folder, how many replicas, and how many of them die or stop under load. The engine of
a replica writes each question into a file of that folder, which bears the number of its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import genrt
from genrt.cluster import engine
from genrt.cluster.actors import OWN_RAY, node_kind
from genrt.engines.exact import ExactEngine, NGram
from tests.cluster.ray_program import lives, tell

MODEL = NGram.random(11, order=2, seed=5)
STALL_SECONDS = 4.0
PATIENCE_SECONDS = 120.0


class WritingEngine(ExactEngine):
    """An exact engine that writes down what it is asked."""

    def __init__(self, folder: Path, model: NGram = MODEL) -> None:
        super().__init__(model)
        self._file = (folder / str(os.getpid())).open("a", buffering=1)

    def submit(self, requests: Any) -> None:
        for each in requests:
            self._file.write("".join(f"{n:x}" for n in each.token_ids) + "\n")
        super().submit(requests)


def processes(folder: Path) -> list[int]:
    """Return the processes of all replicas that have lived, the oldest first."""
    return sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())


def alive(folder: Path) -> list[int]:
    return [each for each in processes(folder) if lives(each)]


def most_asked(folder: Path) -> int:
    """Return how often replicas were asked the question that was asked most."""
    asked: Counter[str] = Counter()
    for each in processes(folder):
        asked.update((folder / str(each)).read_text().split())
    return max(asked.values())


def have_ended(several: list[int]) -> bool:
    """Wait until these processes have ended, for as long as patience lasts; end them."""
    until = time.monotonic() + PATIENCE_SECONDS
    for each in several:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(each)
            ended = select.select([handle], [], [], max(0.0, until - time.monotonic()))[0]
            if not ended:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return False
            os.close(handle)
    return True


def port() -> dict[str, int]:
    """Return an agent's port, for which a scheduler would wait else."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"runtime_env_agent_port": free.getsockname()[1], "dashboard_agent_listen_port": 0}


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """Yield a cluster of two raylets and the second of them."""
    from ray._private import node
    from ray.cluster_utils import Cluster

    node.Node = node_kind()
    quiet = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **port(), **quiet})
    try:
        yield cluster, cluster.add_node(num_cpus=1, **port(), **quiet)
    finally:
        cluster.shutdown()


async def storm(lm: genrt.AsyncLM, folder: Path, kills: int, node: Any) -> dict[str, Any]:
    """Kill and stop replicas under load, and one node in the middle; return what became of questions."""
    counts: Counter[str] = Counter()
    numbers, chosen = itertools.count(), random.Random(1)
    ended, answered = asyncio.Event(), asyncio.Event()

    async def client() -> None:
        while not ended.is_set():
            number = next(numbers)
            context = [number // 11**place % 11 for place in range(6)]
            try:
                row = await lm.token_logprobs(context, range(11), timeout=PATIENCE_SECONDS)
            except genrt.EngineFailed as error:
                counts["why not" if "replicas died" in str(error) else f"wrong: {error}"] += 1
            else:
                is_right = torch.allclose(row, MODEL.row(context), atol=1e-5)
                counts["right" if is_right else "wrong"] += 1
            answered.set()

    async def after(more: int) -> None:
        until = counts["right"] + more
        while counts["right"] < until:
            answered.clear()
            await asyncio.wait_for(answered.wait(), PATIENCE_SECONDS)

    def restarts() -> int:
        return sum(each.restarts for each in lm.statistics().replicas)

    replicas, hit = len(lm.statistics().replicas), set[int]()
    tasks = [asyncio.create_task(client()) for _ in range(2 * replicas)]
    for number in range(kills):
        await after(20)
        if number == kills // 2:
            await asyncio.to_thread(node)
        while not (there := [each for each in serving(folder) if each not in hit]):
            await after(1)
        hit.add(process := chosen.choice(there))
        os.kill(process, (signal.SIGKILL, signal.SIGSTOP)[number % 2])
    # A stopped process counts as healthy until its replica does not answer.
    while restarts() < kills or {each.state for each in lm.statistics().replicas} != {"healthy"}:
        await after(1)
    await after(20)
    ended.set()
    await asyncio.gather(*tasks)
    return dict(counts) | {"restarts": restarts()}


async def updated(lm: genrt.AsyncLM, folder: Path) -> bool:
    """Kill a replica while all get new weights; return whether every later answer is of these."""
    table = torch.randn(11, 11, 11, generator=torch.Generator().manual_seed(3))
    update = asyncio.create_task(lm.update_weights({"table": table}))
    await asyncio.sleep(0)
    os.kill(alive(folder)[0], signal.SIGKILL)
    await update
    expected = torch.stack([MODEL.with_table(table).row([n]) for n in range(11)])
    is_right, is_last = True, False
    while is_right and not is_last:
        is_last = {each.state for each in lm.statistics().replicas} == {"healthy"}
        rows = await lm.batch_next_token_logprobs([[n] for n in range(11)])
        is_right = torch.allclose(rows, expected.float(), atol=1e-5)
    return is_right


def serving(folder: Path) -> list[int]:
    """Return the replicas that have been asked: one that opens may take as long as it likes."""
    moving = [each for each in alive(folder) if not is_stopped(each)]
    return [each for each in moving if (folder / str(each)).stat().st_size]


def is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def opened(folder: Path, replicas: int, address: str) -> genrt.AsyncLM:
    make = partial(WritingEngine, folder)
    return genrt.load(engine=make, replicas=replicas, cluster=address, cache_bytes=0)


class Driver:
    """A fork of this process that drives replicas until it is killed; one with several replicas has
    forked. It is made while this process has no Ray, and no import costs it anything."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self._folder, self._replicas = folder, replicas
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._drive, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _drive(self, pipe: Connection) -> None:
        lm = opened(self._folder, self._replicas, pipe.recv())
        fork = os.fork() if self._replicas > 1 else None
        if fork == 0:
            signal.alarm(round(2 * PATIENCE_SECONDS))
            signal.pause()

        async def ask() -> None:
            for number in itertools.count():
                await lm.batch_next_token_logprobs([[number % 11, each] for each in range(11)])
                if number == 3:
                    pipe.send((alive(self._folder), fork))

        asyncio.run(ask())

    def killed(self, address: str) -> bool:
        """Have it drive replicas of a cluster, and kill it; return whether they end, also a stopped one,
        though its fork lives on."""
        self._pipe.send(address)
        found, fork = self._pipe.recv()
        os.kill(found[0], signal.SIGSTOP)
        self._process.kill()
        ended = have_ended(found)
        if fork is not None:
            ended &= lives(fork)
            os.kill(fork, signal.SIGKILL)
        return ended and len(found) == self._replicas


def main(folder: Path, replicas: int, kills: int) -> None:
    engine.STALL_SECONDS = STALL_SECONDS
    os.environ.update(OWN_RAY, RAY_health_check_period_ms="1000")  # a dead node is known after 5 s
    drivers = {name: Driver(folder / name, n) for name, n in (("driven", 1), ("forked", 2))}
    with two_nodes() as (cluster, node):
        for name, each in drivers.items():
            tell(
                f"no replica outlives a driver that is killed: {name}", each.killed(cluster.address)
            )
        began = time.monotonic()
        lm = opened(folder, replicas, cluster.address)
        tell("opened", round(time.monotonic() - began, 1))
        import ray

        before = alive(folder)
        began = time.monotonic()

        def fall() -> None:
            cluster.remove_node(node, allow_graceful=False)

        counts = asyncio.run(storm(lm, folder, kills, fall))
        tell("storm", counts | {"seconds": round(time.monotonic() - began, 1)})
        tell("asked at most", most_asked(folder))
        tell("no mixture of weights", asyncio.run(updated(lm, folder)))
        tell("nodes", sum(each["Alive"] for each in ray.nodes()))
        lm.close()
        tell("no replica is left", have_ended(processes(folder)) and len(before) == replicas)


if __name__ == "__main__":
    here = __import__("importlib").import_module("tests.cluster.two_nodes")  # as actors know it
    here.main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
