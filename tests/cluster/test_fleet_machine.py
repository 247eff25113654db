"""Replicas that die, hang, fail and start slowly, while they are asked and refitted: nothing is lost."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from genrt.engines.weights import SLEEPING_PARTS, SleepingPart
from genrt.errors import EngineFailed
from tests.cluster.simulated_replicas import Simulation


class FleetMachine(RuleBasedStateMachine):
    """Any order of questions, faults and changes; ``Simulation`` judges every answer."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.simulation = Simulation(Path(self._folder.name), 3)

    @rule(count=st.integers(1, 8))
    def ask(self, count: int) -> None:
        self.simulation.ask(count)

    @rule()
    def cancel(self) -> None:
        self.simulation.cancel()

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()

    @rule(times=st.integers(1, 3))
    def disturb(self, times: int) -> None:
        for _ in range(times):
            self.simulation.disturb()

    @rule(times=st.integers(1, 4))
    def draw(self, times: int) -> None:
        for _ in range(times):
            self.simulation.draw()

    @rule(times=st.integers(1, 4))
    def change_populations(self, times: int) -> None:
        for _ in range(times):
            self.simulation.populations.change()

    @rule()
    def refit(self) -> None:
        self.simulation.refit()

    @rule()
    def add_adapter(self) -> None:
        self.simulation.add_adapter()

    @rule()
    def sleep(self) -> None:
        self.simulation.sleep()

    @rule(parts=st.sampled_from([{"weights"}, {"kv_cache"}, {"weights", "kv_cache"}]))
    def wake_up(self, parts: set[SleepingPart]) -> None:
        self.simulation.wake_up(frozenset(parts))

    @invariant()
    def all_sleep_or_none(self) -> None:
        self.simulation.check_sleep()

    @invariant()
    def what_waits_is_in_the_fleet(self) -> None:
        waiting, fleet = self.simulation.waiting, self.simulation.engine.fleet
        at = [request for replica in fleet.replicas for request in replica.work]
        assert len(at) == len(set(at)), "a question is with two replicas"
        ended = {end.request for end in self.simulation.engine._ends}
        assert {each for each in waiting if each not in fleet} <= ended

    def teardown(self) -> None:
        try:
            self.simulation.settle()
        finally:
            self.simulation.close()
            self._folder.cleanup()


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(
    max_examples=20,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestFleetMachine.pytestmark = [pytest.mark.promise(number=39)]  # type: ignore[attr-defined]


def wakes(simulation: Simulation, number: int) -> None:
    """Have a replica's memory be somebody else's for good."""
    worker = simulation.transport.alive[number].worker
    assert worker is not None
    worker.answering.engine.weights.wakes = False  # type: ignore[attr-defined]


def test_a_replica_that_does_not_wake_up_is_another_one_then(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, 3)
    simulation.engine.weights.sleep(1)
    wakes(simulation, 1)
    simulation.wake_up()
    assert [each.life for each in simulation.engine.fleet.replicas] == [0, 1, 0]
    simulation.ask(40)
    simulation.settle()
    simulation.close()


def test_replicas_none_of_which_wakes_up_sleep_on(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, 2)
    weights = simulation.engine.weights
    weights.sleep(1)
    for number in range(2):
        wakes(simulation, number)
    with pytest.raises(EngineFailed, match="no memory any more"):
        weights.wake_up(SLEEPING_PARTS)
    assert weights.asleep == SLEEPING_PARTS
    simulation.check_sleep()
    simulation.close()


def test_a_sleep_does_not_wait_for_who_is_being_opened_nor_count_it_twice(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, 2)
    transport, weights = simulation.transport, simulation.engine.weights
    transport.opening_seconds = 20.0
    transport.die(0)
    simulation.ask(1)
    simulation.settle()
    assert transport.started[-1] == (0, 1)
    began = simulation.clock()
    weights.sleep(1)
    assert simulation.clock() - began < 5.0
    simulation.check_sleep()
    assert [*transport.alive] == [1]
    weights.wake_up(SLEEPING_PARTS)
    simulation.ask(40)
    simulation.settle()
    found = simulation.engine.fleet.replicas[0]
    assert (found.life, found.health.restarts) == (2, 1)
    simulation.close()


def test_what_needs_a_replica_when_all_died_in_their_sleep_says_so(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, 2)
    weights = simulation.engine.weights
    weights.sleep(1)
    for number in range(2):
        simulation.transport.die(number)
    with pytest.raises(EngineFailed, match="wake the runtime up"):
        weights.layout()
    weights.wake_up(frozenset({"weights"}))
    assert not simulation.transport.alive
    # New weights are for those that will be started.
    table = torch.zeros(5, 5, dtype=torch.float64)
    weights.begin()
    weights.load([("table", table)])
    weights.finish()
    simulation.model = simulation.model.with_table(table)
    simulation._version = 1
    simulation.wake_up()
    simulation.ask(40)
    simulation.settle()
    simulation.close()


def walk(folder: Path, operations: int, seed: int) -> Simulation:
    """Take so many operations at random."""
    chosen = random.Random(seed)
    simulation = Simulation(folder, 6, seed=seed)
    for _ in range(operations):
        operation = chosen.choices(
            [
                simulation.step,
                simulation.cancel,
                simulation.disturb,
                simulation.refit,
                simulation.draw,
                simulation.populations.change,
                simulation.sleep,
                simulation.wake_up,
            ],
            [50, 5, 10, 0.5, 30, 10, 0.5, 5],
        )[0]
        if chosen.random() < 0.3:
            simulation.ask(chosen.randrange(1, 12))
        elif chosen.random() < 0.005:
            simulation.add_adapter()
        else:
            operation()
    simulation.settle()
    return simulation


def judge(simulation: Simulation, operations: int) -> None:
    """See that a walk went through everything, and that populations stayed where they were."""
    fleet, populations = simulation.engine.fleet, simulation.populations
    assert simulation.ended > operations / 2
    assert fleet.moved > operations / 100
    assert sum(each.health.restarts for each in fleet.replicas) > operations / 200
    assert simulation.refits > operations / 1000
    assert simulation.given_up < simulation.ended / 10
    assert populations.steps > operations / 20
    assert simulation.seen.by_number > operations / 20
    assert simulation.seen.by_tokens > operations / 100
    walkers = [*populations.walkers, *populations.ended]
    assert all(each.stayed >= 0.99 * each.could_stay for each in walkers)
    assert sum(each.could_stay for each in walkers) > operations / 20
    assert len(simulation.transport.alive) > 1
    assert not simulation.remembered()


@pytest.mark.promise(number=39)
def test_a_walk_through_every_fault_loses_nothing(tmp_path: Path) -> None:
    simulation = walk(tmp_path, 3_000, seed=1)
    judge(simulation, 3_000)
    simulation.close()


@pytest.mark.proof
@pytest.mark.promise(number=39)
@pytest.mark.parametrize(("operations", "seed"), [(100_000, 2), (20_000, 3), (20_000, 4)])
def test_a_long_walk_loses_nothing(tmp_path: Path, operations: int, seed: int) -> None:
    simulation = walk(tmp_path, operations, seed)
    judge(simulation, operations)
    simulation.close()
