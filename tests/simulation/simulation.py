"""genrt's own simulation: clients that leave in every way, and a ledger that knows what must become of
each question. The same seed, the same run, callback by callback."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from genrt.runtime.statistics import Statistics
from tests.simulation.clients import SimulatedClients, adapter_directory
from tests.simulation.engine import VOCAB_SIZE, Faults, HashedModel, Violation
from tests.simulation.runtime import SimulatedRuntime

UNASKED = [0] * 100
"""A context that no client asks."""


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
    seed: int,
    *,
    operations: int = 100,
    faults: Faults | None = None,
    texts: bool = True,
    populations: bool = False,
    contexts: bool = False,
    updates: bool = False,
) -> Report:
    """Run the real batcher, cache and answers once, and compare every question with the ledger.

    Clients on several event loops ask, time out, cancel, interrupt, close and restart. The engine is as
    inconvenient as the protocol allows.

    Args:
        seed: decides everything; the same seed gives the same run.
        operations: the number of client operations.
        faults: the engine's faults; by default the seed decides them too.
        texts, populations, contexts: whether clients ask for them.
        updates: whether clients also replace the weights. The ledger does not follow that: the runtime
            compares each answer with those of the versions that it may be of.

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
        updates=updates,
        **any_options(chance),
    )
    more = ("" if faults is None else f", faults={faults}") + ("" if texts else ", texts=False")
    others = {"populations": populations, "contexts": contexts, "updates": updates}
    more += "".join(f", {name}=True" for name, is_on in others.items() if is_on)
    again = f"replay with simulate({seed}, operations={operations}{more})"
    with adapter_directory() as directory, reporting(runtime, f"seed {seed}", again):
        clients = SimulatedClients(
            runtime,
            operations,
            directory,
            texts=texts,
            populations=populations,
            contexts=contexts,
            updates=updates,
        )
        clients.run()
        _wind_up(runtime, clients)
        clients.check_kept()
    return Report(
        seed, clients.done, runtime.lm.statistics(), runtime.record.lines(), clients.updated
    )


def _wind_up(runtime: SimulatedRuntime, clients: SimulatedClients) -> None:
    """Check that a new loop is answered, if the runtime is still there, and that nothing is left."""
    for loop in [*runtime.stopped]:
        runtime.close_loop(loop)
    if runtime.thread.alive:
        loop = runtime.open_loop()
        task = loop.create_task(runtime.lm.next_token_logprobs(UNASKED))
        runtime.run_until(task.done, "a new loop waits for its first answer")
        task.exception()
    runtime.collect_lost()
    if clients.contexts is not None:
        clients.contexts.close_all()
    runtime.settle()
    if clients.contexts is not None:
        clients.contexts.check_nothing_is_held()
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
