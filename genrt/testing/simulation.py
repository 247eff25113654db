"""Whole runs of the runtime, decided by one seed: the same seed, the same run, callback by callback."""

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
"""How much of a failed run its message shows."""


@dataclass(frozen=True, slots=True)
class Report:
    """A simulated run, and what became of it.

    Attributes:
        seed: what decided it.
        operations: how many things its clients did: questions asked, cancellations, …
        statistics: the runtime's counters at the end.
        updates: how often the weights were replaced.
        trace: what happened, in order.
    """

    seed: int
    operations: int
    statistics: Statistics
    trace: tuple[str, ...]
    updates: int = 0


def simulate(
    seed: int, *, operations: int = 100, faults: Faults | None = None, updates: bool = False
) -> Report:
    """Run the real batcher, cache and answers once, with clients on up to three event loops that ask,
    time out and cancel, and an engine as inconvenient as the protocol allows.

    Args:
        seed: decides everything; the same seed gives the same run.
        operations: how many things the clients do.
        faults: what goes wrong with the engine; by default that, too, is for the seed to say.
        updates: whether clients replace the weights, too, in every way that there is.

    Raises:
        AssertionError: something did not end, or not rightly, or was left over. The message names the
            seed and shows what happened last.
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
    """Return what a sampler of your own returns on a simulated runtime.

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
        AssertionError: an answer was wrong, the sampler waits for something that never comes, or
            left tasks or questions behind when it ended. The message names the seed.
        CancelledError: it was cancelled.

    What the sampler itself raises comes out as it is.
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
    """Have these tasks end, and close the runtime; nothing may be left of them before and after that."""
    runtime.run_until(lambda: all(task.done() for task in tasks), what)
    runtime.settle()
    left = [each for loop in runtime.loops for each in asyncio.all_tasks(loop) if not each.done()]
    if left:
        raise Violation(f"the sampler has ended and left these waiting: {left}")
    close(runtime)


def close(runtime: SimulatedRuntime) -> None:
    """Close a runtime. Raises a Violation if anything is left of what was asked, before or after that."""
    runtime.check_nothing_is_left()
    runtime.lm.close()
    runtime.settle()
    runtime.check_nothing_is_left()


@contextmanager
def reporting(runtime: SimulatedRuntime, name: str, again: str = "") -> Iterator[None]:
    """Raise AssertionError for a Violation, with what happened last; discard the runtime in the end."""
    try:
        yield
    except Violation as violation:
        what = "\n".join(filter(None, [f"{name}: {violation}", again]))
        last = "\n  ".join(runtime.record.lines(-LAST_EVENTS))
        raise AssertionError(f"{what}; the last that happened:\n  {last}") from violation
    finally:
        runtime.discard()


def any_options(chance: random.Random) -> dict[str, Any]:
    """Return options of a SimulatedRuntime, as chance decides."""
    return {
        "cache_bytes": chance.choice([0, 3, 1000]) * 4 * VOCAB_SIZE,
        "max_batch_size": chance.choice([None, None, 1, 3]),
        "max_wait_seconds": chance.choice([0.0, 0.0, 0.01]),
        "max_queued_requests": chance.choice([sys.maxsize, sys.maxsize, 1, 4]),
        "restarts": chance.random() < 0.5,
    }


def any_faults(chance: random.Random, *, updates: bool = False) -> Faults:
    """Return no faults in half of the runs, and otherwise some of every kind; with ``updates`` of those,
    too."""
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
