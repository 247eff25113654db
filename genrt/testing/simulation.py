"""Whole runs of the runtime, decided by one seed: the same seed, the same run, callback by callback."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from genrt.lm import Statistics
from genrt.testing.simulated_clients import SimulatedClients, adapter_directory
from genrt.testing.simulated_engine import Faults
from genrt.testing.simulated_model import VOCAB_SIZE, HashedModel
from genrt.testing.simulated_runtime import SimulatedRuntime
from genrt.testing.violation import Violation

__all__ = ["Report", "simulate"]

LAST_EVENTS = 40
"""How much of a failed run its message shows."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulated run was.

    Fields:
        seed: what decided it.
        operations: what its clients did: questions asked, cancellations, loops closed, …
        statistics: the runtime's counters at the end.
        trace: what happened, in order.
    """

    seed: int
    operations: int
    statistics: Statistics
    trace: tuple[str, ...]


def simulate(seed: int, *, operations: int = 100, faults: Faults | None = None) -> Report:
    """One run of the real batcher, cache and answers, with clients that ask and leave in every way, and
    an engine as inconvenient as the protocol allows.

    Args:
        seed: decides everything; the same seed gives the same run.
        operations: how many things the clients do.
        faults: what goes wrong with the engine; by default that, too, is for the seed to say.

    Raises:
        AssertionError: something did not end, or not rightly, or was left over. The message names the
            seed and shows what happened last.
    """
    chance = random.Random(seed)
    runtime = SimulatedRuntime(
        chance,
        HashedModel(),
        faults=_faults(chance) if faults is None else faults,
        cache_bytes=chance.choice([0, 3, 1000]) * 4 * VOCAB_SIZE,
        max_batch_size=chance.choice([None, None, 1, 3]),
        max_wait_seconds=chance.choice([0.0, 0.0, 0.01]),
    )
    with torch.random.fork_rng(devices=[]), adapter_directory() as directory:
        torch.manual_seed(seed)
        clients = SimulatedClients(runtime, operations, directory)
        try:
            clients.run()
            _wind_up(runtime)
            clients.check_kept()
        except Violation as violation:
            raise AssertionError(_message(seed, violation, runtime)) from violation
        finally:
            runtime.discard()
    return Report(seed, clients.done, runtime.lm.statistics(), _told(runtime.ledger.trace))


def _wind_up(runtime: SimulatedRuntime) -> None:
    """After everything: a new loop is answered, if the runtime is still there; then nothing is left."""
    for loop in [*runtime.stopped]:
        runtime.close_loop(loop)
    if runtime.thread.alive:
        loop = runtime.open_loop()
        task = loop.create_task(runtime.lm.next_token_logprobs([1, 2, 3]))
        runtime.run_until(task.done, "a new loop waits for its first answer")
        task.exception()
    runtime.settle()
    runtime.check_nothing_is_left()
    runtime.lm.close()
    runtime.settle()
    runtime.check_nothing_is_left()


def _faults(chance: random.Random) -> Faults:
    """None in half of the runs, and otherwise of every kind."""
    if chance.random() < 0.5:
        return Faults()
    return Faults(
        submit=chance.choice([0.0, 0.1]),
        step=chance.choice([0.0, 0.1]),
        cancel=chance.choice([0.0, 0.0, 0.02]),
        death=chance.choice([0.0, 0.0, 0.01]),
        not_finite=chance.choice([0.0, 0.1]),
        out_of_memory_above=chance.choice([None, None, 1, 2, 5]),
    )


def _message(seed: int, violation: Violation, runtime: SimulatedRuntime) -> str:
    last = "\n  ".join(_told(runtime.ledger.trace[-LAST_EVENTS:]))
    return (
        f"seed {seed}: {violation}\nreplay with simulate({seed}); the last that happened:\n  {last}"
    )


def _told(trace: list[tuple[object, ...]]) -> tuple[str, ...]:
    return tuple(" ".join(map(str, event)) for event in trace)
