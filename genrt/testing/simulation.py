"""Whole runs of the runtime, decided by one seed: the same seed, the same run, callback by callback."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Engine
from genrt.lm import AsyncLM
from genrt.runtime.statistics import Statistics
from genrt.testing.simulated_clients import SimulatedClients, adapter_directory
from genrt.testing.simulated_engine import Faults
from genrt.testing.simulated_model import VOCAB_SIZE, EngineModel, HashedModel
from genrt.testing.simulated_runtime import SimulatedRuntime
from genrt.testing.violation import Violation

__all__ = ["Report", "run_simulated", "simulate"]

T = TypeVar("T")

UNASKED = [0] * 100
"""A context that no client asks."""

LAST_EVENTS = 40
"""How much of a failed run its message shows."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulated run was.

    Attributes:
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
        max_queued_requests=chance.choice([sys.maxsize, sys.maxsize, 1, 4]),
        restarts=chance.random() < 0.5,
        seed=abs(seed),
    )
    with adapter_directory() as directory:
        clients = SimulatedClients(runtime, operations, directory)
        try:
            clients.run()
            _wind_up(runtime)
            clients.check_kept()
        except Violation as violation:
            again = f"replay with simulate({seed}, operations={operations})"
            _report(f"seed {seed}: {violation}\n{again}", violation, runtime)
        finally:
            runtime.discard()
    return Report(seed, clients.done, runtime.lm.statistics(), _told(runtime.ledger.trace))


def run_simulated(
    sampler: Callable[[AsyncLM], Coroutine[Any, Any, T]],
    *,
    seed: int,
    model: NGram | Callable[[], Engine] | None = None,
    faults: Faults | None = None,
    cancel_after: int | None = None,
    cache_bytes: int = 2**20,
    max_batch_size: int | None = None,
) -> T:
    """What a sampler of your own returns on a simulated runtime.

    It gets a real ``AsyncLM``, over an engine that answers in whatever order, in as many steps and with
    as many restarts as the seed decides, on an event loop whose time is virtual: ``asyncio.sleep`` takes
    none. The seed fixes the whole run, with torch's global generator, as long as the sampler has no other
    source of chance. The runtime is closed when the sampler has ended.

    Args:
        sampler: an async function of the runtime.
        seed: decides everything that is left open.
        model: whose rows the answers are: an ``NGram``, a function that opens an engine, or ``None`` for
            eight tokens and a row for every context that has nothing to do with any other.
        faults: what goes wrong with the engine; nothing by default.
        cancel_after: after how many events (callbacks, engine steps, …) the sampler is cancelled, if it
            has not ended by then; ``None`` is never.
        cache_bytes: as for ``genrt.load``.
        max_batch_size: as for ``genrt.load``.

    Raises:
        AssertionError: an answer was wrong, the sampler waits for something that never comes, or left
            tasks or questions behind when it ended. The message names the seed.
        CancelledError: it was cancelled.

    What the sampler itself raises comes out as it is.
    """
    runtime = SimulatedRuntime(
        random.Random(seed),
        _model(model),
        faults=faults or Faults(),
        cache_bytes=cache_bytes,
        max_batch_size=max_batch_size,
        seed=abs(seed),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            task = _started(sampler, runtime, cancel_after)
            runtime.run_until(task.done, "the sampler waits")
            runtime.settle()
            left = [each for each in asyncio.all_tasks(runtime.loops[0]) if not each.done()]
            if left:
                raise Violation(f"the sampler has ended and left these waiting: {left}")
            _close(runtime)
        except Violation as violation:
            _report(f"seed {seed}: {violation}", violation, runtime)
        finally:
            runtime.discard()
    return task.result()


def _started(
    sampler: Callable[[AsyncLM], Coroutine[Any, Any, T]],
    runtime: SimulatedRuntime,
    cancel_after: int | None,
) -> asyncio.Task[T]:
    task = runtime.open_loop().create_task(sampler(runtime.lm))
    for _ in range(0 if cancel_after is None else cancel_after):
        if task.done() or not runtime.step():
            break
    if cancel_after is not None:
        task.cancel()
    return task


def _model(model: NGram | Callable[[], Engine] | None) -> HashedModel | EngineModel:
    if model is None:
        return HashedModel()
    if isinstance(model, NGram):
        return EngineModel(lambda: ExactEngine(model))
    return EngineModel(model)


def _wind_up(runtime: SimulatedRuntime) -> None:
    """After everything: a new loop is answered, if the runtime is still there; then nothing is left."""
    for loop in [*runtime.stopped]:
        runtime.close_loop(loop)
    if runtime.thread.alive:
        loop = runtime.open_loop()
        task = loop.create_task(runtime.lm.next_token_logprobs(UNASKED))
        runtime.run_until(task.done, "a new loop waits for its first answer")
        task.exception()
    runtime.settle()
    _close(runtime)


def _close(runtime: SimulatedRuntime) -> None:
    """Nothing is left before the runtime is closed, nor afterwards."""
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
        cancel=chance.choice([0.0, 0.0, 0.3]),
        remove=chance.choice([0.0, 0.5]),
        death=chance.choice([0.0, 0.0, 0.01]),
        not_finite=chance.choice([0.0, 0.1]),
        out_of_memory_above=chance.choice([None, None, 1, 2, 5]),
    )


def _report(what: str, violation: Violation, runtime: SimulatedRuntime) -> NoReturn:
    last = "\n  ".join(_told(runtime.ledger.trace[-LAST_EVENTS:]))
    raise AssertionError(f"{what}; the last that happened:\n  {last}") from violation


def _told(trace: list[tuple[object, ...]]) -> tuple[str, ...]:
    return tuple(" ".join(map(str, event)) for event in trace)
