"""genrt's own simulation: clients that leave in every way, and a ledger that knows what must become of
each question. The same seed, the same run, callback by callback."""

from __future__ import annotations

import random

from genrt.testing import Faults, Report
from genrt.testing.simulated_model import HashedModel
from genrt.testing.simulation import any_faults, any_options, close, reporting
from tests.simulation.checked_runtime import CheckedRuntime
from tests.simulation.clients import SimulatedClients, adapter_directory

UNASKED = [0] * 100
"""A context that no client asks."""


def simulate(
    seed: int,
    *,
    operations: int = 100,
    faults: Faults | None = None,
    texts: bool = True,
    populations: bool = False,
) -> Report:
    """Do what ``genrt.testing.simulate`` does, on loops that are closed and left alone, with interrupts,
    adapters, closing and restarting; and compare every question with the ledger. Without ``texts`` it is
    the run that the seed was before there were completions, without ``populations`` before those."""
    chance = random.Random(seed)
    runtime = CheckedRuntime(
        chance,
        HashedModel(),
        faults=any_faults(chance) if faults is None else faults,
        seed=abs(seed),
        **any_options(chance),
    )
    more = ("" if faults is None else f", faults={faults}") + ("" if texts else ", texts=False")
    more += ", populations=True" if populations else ""
    again = f"replay with simulate({seed}, operations={operations}{more})"
    with adapter_directory() as directory, reporting(runtime, f"seed {seed}", again):
        clients = SimulatedClients(
            runtime, operations, directory, texts=texts, populations=populations
        )
        clients.run()
        _wind_up(runtime)
        clients.check_kept()
    return Report(seed, clients.done, runtime.lm.statistics(), runtime.record.lines())


def _wind_up(runtime: CheckedRuntime) -> None:
    """Check that a new loop is answered, if the runtime is still there, and that nothing is left."""
    for loop in [*runtime.stopped]:
        runtime.close_loop(loop)
    if runtime.thread.alive:
        loop = runtime.open_loop()
        task = loop.create_task(runtime.lm.next_token_logprobs(UNASKED))
        runtime.run_until(task.done, "a new loop waits for its first answer")
        task.exception()
    runtime.settle()
    close(runtime)
