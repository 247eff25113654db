"""Runs the whole runtime deterministically: the same seed gives the same run, callback by callback."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Engine
from genrt.lm import AsyncLM
from genrt.runtime.statistics import Statistics
from genrt.testing.record import Violation
from genrt.testing.simulated_clients import Clients
from genrt.testing.simulated_engine import Faults
from genrt.testing.simulated_model import VOCAB_SIZE, EngineModel, HashedModel
from genrt.testing.simulated_runtime import SimulatedRuntime

__all__ = ["Report", "run_simulated", "simulate"]

T = TypeVar("T")

LAST_EVENTS = 40
"""The number of events that the message of a failed run shows."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a simulated run.

    Attributes:
        seed: the seed of the run.
        operations: the number of client operations: questions, cancellations, …
        statistics: the runtime's counters at the end.
        updates: the number of weight updates.
        trace: the events, in order.
    """

    seed: int
    operations: int
    statistics: Statistics
    trace: tuple[str, ...]
    updates: int = 0


def simulate(
    seed: int, *, operations: int = 100, faults: Faults | None = None, updates: bool = False
) -> Report:
    """Run the real batcher, cache and answers once in a simulation.

    Clients on up to three event loops ask, time out and cancel. The engine is as inconvenient as the
    protocol allows.

    Args:
        seed: decides everything; the same seed gives the same run.
        operations: the number of client operations.
        faults: the engine's faults; by default the seed decides them too.
        updates: whether clients also replace the weights, in every possible way.

    Raises:
        AssertionError: a request did not end, ended wrongly, or left state behind. The message has the
            seed and the last events.
    """
    chance = random.Random(seed)
    runtime = SimulatedRuntime(
        chance,
        HashedModel(),
        faults=any_faults(chance, updates=updates) if faults is None else faults,
        seed=abs(seed),
        **any_options(chance),
    )
    loops = chance.randint(1, 3)
    clients = [
        Clients(runtime.lm, chance, len(range(number, operations, loops)), updates=updates)
        for number in range(loops)
    ]
    more = ", updates=True" if updates else ""
    again = f"replay with simulate({seed}, operations={operations}{more})"
    with reporting(runtime, f"seed {seed}", again):
        tasks = [runtime.open_loop().create_task(each.run()) for each in clients]
        _finish(runtime, tasks, "the clients wait")
        for task in tasks:
            task.result()
    done = sum(each.done for each in clients)
    updated = sum(each.updated for each in clients)
    return Report(seed, done, runtime.lm.statistics(), runtime.record.lines(), updated)


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
    """Return the result of your own sampler on a simulated runtime.

    The sampler gets a real ``AsyncLM``. Its engine answers in any order, in as many steps and with as
    many restarts as the seed decides. Time on its event loop is virtual: ``asyncio.sleep`` takes no time.
    The seed fixes the whole run, including torch's global generator, if the sampler has no other source
    of randomness. The runtime is closed when the sampler has ended.

    Args:
        sampler: an async function of the runtime.
        seed: decides everything that is not specified.
        model: the source of the rows: an ``NGram``, a function that opens an engine, or ``None`` for
            eight tokens and unrelated rows for all contexts.
        faults: the engine's faults; no faults by default.
        cancel_after: the number of events (callbacks, engine steps, …) after which the sampler is
            cancelled if it has not ended; ``None``: never.
        cache_bytes: as for ``genrt.load``.
        max_batch_size: as for ``genrt.load``.

    Raises:
        AssertionError: an answer was wrong, the sampler waits forever, or it left tasks or questions
            behind. The message has the seed.
        CancelledError: the sampler was cancelled.

    The sampler's own exceptions pass through unchanged.
    """
    open_engine = partial(ExactEngine, model) if isinstance(model, NGram) else model
    runtime = SimulatedRuntime(
        random.Random(seed),
        HashedModel() if open_engine is None else EngineModel(open_engine),
        faults=faults or Faults(),
        cache_bytes=cache_bytes,
        max_batch_size=max_batch_size,
        seed=abs(seed),
    )
    with torch.random.fork_rng(devices=[]), reporting(runtime, f"seed {seed}"):
        torch.manual_seed(seed)
        task = runtime.open_loop().create_task(sampler(runtime.lm))
        if cancel_after is not None:
            for _ in range(cancel_after):
                if task.done() or not runtime.step():
                    break
            task.cancel()
        _finish(runtime, [task], "the sampler waits")
    return task.result()


def _finish(runtime: SimulatedRuntime, tasks: Sequence[asyncio.Task[Any]], what: str) -> None:
    """Run these tasks to their end and close the runtime; neither may leave work behind."""
    runtime.run_until(lambda: all(task.done() for task in tasks), what)
    runtime.settle()
    left = [each for loop in runtime.loops for each in asyncio.all_tasks(loop) if not each.done()]
    if left:
        raise Violation(f"the sampler has ended and left these waiting: {left}")
    close(runtime)


def close(runtime: SimulatedRuntime) -> None:
    """Close a runtime. Raise a Violation if any work is left, before or after that."""
    runtime.check_nothing_is_left()
    runtime.lm.close()
    runtime.settle()
    runtime.check_nothing_is_left()


@contextmanager
def reporting(runtime: SimulatedRuntime, name: str, again: str = "") -> Iterator[None]:
    """Turn a Violation into an AssertionError with the last events; discard the runtime in the end."""
    try:
        yield
    except Violation as violation:
        what = "\n".join(filter(None, [f"{name}: {violation}", again]))
        last = "\n  ".join(runtime.record.lines(-LAST_EVENTS))
        raise AssertionError(f"{what}; the last that happened:\n  {last}") from violation
    finally:
        runtime.discard()


def any_options(chance: random.Random) -> dict[str, Any]:
    """Return random options of a SimulatedRuntime."""
    return {
        "cache_bytes": chance.choice([0, 3, 1000]) * 4 * VOCAB_SIZE,
        "max_batch_size": chance.choice([None, None, 1, 3]),
        "max_wait_seconds": chance.choice([0.0, 0.0, 0.01]),
        "max_queued_requests": chance.choice([sys.maxsize, sys.maxsize, 1, 4]),
        "restarts": chance.random() < 0.5,
    }


def any_faults(chance: random.Random, *, updates: bool = False) -> Faults:
    """Return no faults in half of the runs, and otherwise some of every kind; faults of weight updates
    only with ``updates``."""
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
        load=chance.choice([0.0, 0.2]) if updates else 0.0,
    )
