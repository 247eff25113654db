"""Breaks of routing and renewal, each of which the walk on the virtual clock, or a test of the router,
finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genrt.cluster import routing
from genrt.cluster.engine import ReplicaEngine
from genrt.cluster.routing import Router
from genrt.errors import GenrtError
from tests.cluster import test_engine_machine, test_routing

prepared, lost = ReplicaEngine._prepared, ReplicaEngine._lost
everyone, add_adapter = ReplicaEngine.everyone, ReplicaEngine.add_adapter


def asks_the_dead(self: ReplicaEngine, replica: Any, reason: str, **how: Any) -> None:
    asked, replica.asked = replica.asked, {}
    lost(self, replica, reason, **how)
    replica.asked = asked


def asks_for_ever(self: ReplicaEngine, replica: Any, reason: str, **how: Any) -> None:
    lost(self, replica, reason, **how)
    self._moved.clear()


def loses_some(self: ReplicaEngine, replica: Any, reason: str, **how: Any) -> None:
    lost(self, replica, reason, **how)
    self._waiting.clear()


def serves_at_once(self: ReplicaEngine, wanted: Any, replica: Any, facts: Any) -> None:
    self.weights.version, version = wanted.version, self.weights.version
    self._adapters, adapters = dict(wanted.adapters), self._adapters
    prepared(self, wanted, replica, facts)
    self.weights.version, self._adapters = version, adapters


def opens_in_its_sleep(self: ReplicaEngine, replica: Any) -> None:
    if replica.state == "dead":
        self._prepare(replica)


def keeps_the_silent(self: ReplicaEngine, replica: Any) -> None:
    if replica.state == "dead" and not self.weights.asleep:
        self._prepare(replica)


def forgets_refusals(self: ReplicaEngine, name: str, *arguments: Any) -> dict[int, Any]:
    found = everyone(self, name, *arguments)
    return {n: None if isinstance(each, GenrtError) else each for n, each in found.items()}


def forgets_adapters(self: ReplicaEngine, adapter: Any, path: Path) -> None:
    add_adapter(self, adapter, path)
    self._adapters.clear()


RENEWAL: dict[str, tuple[Any, str, Any]] = {
    "a dead replica keeps its questions": (ReplicaEngine, "_lost", asks_the_dead),
    "a question is asked again and again": (ReplicaEngine, "_lost", asks_for_ever),
    "questions of a dead replica are lost": (ReplicaEngine, "_lost", loses_some),
    "it serves without the last settings": (ReplicaEngine, "_prepared", serves_at_once),
    "a replica is opened while all sleep": (ReplicaEngine, "_tick", opens_in_its_sleep),
    "a silent replica lives on": (ReplicaEngine, "_tick", keeps_the_silent),
    "a refusal of one replica is not seen": (ReplicaEngine, "everyone", forgets_refusals),
    "new weights are not given": (ReplicaEngine, "renew", lambda self: None),
    "adapters are not kept for later": (ReplicaEngine, "add_adapter", forgets_adapters),
}

ROUTING: dict[str, tuple[Any, str, Any]] = {
    "populations have no home": (Router, "_home", lambda self, population: -1),
    "lost populations keep their home": (Router, "lost", lambda self, replica: None),
    "work is never done": (Router, "done", lambda self, replica, request: None),
    "collected populations count": (Router, "left", lambda self, populations: None),
    "a flooded home is kept": (routing, "MARGIN", 1e9),
    "a population's home has no more room": (routing, "POPULATION_MARGIN", 0.0),
    "texts have no home": (routing, "_first_block", lambda request: None),
}

ROUTER_TESTS: list[Callable[[], None]] = [
    test_routing.test_a_sequence_and_a_batch_that_grow_stay_where_they_are,
    test_routing.test_a_common_beginning_stays_together_up_to_the_margin,
    test_routing.test_a_population_is_not_looked_for_where_it_was_lost,
    test_routing.test_a_population_leaves_a_replica_that_is_flooded_later_than_a_text,
    test_routing.test_new_populations_and_programs_go_where_there_is_least_to_do_and_to_keep,
    test_routing.test_a_thousand_populations_stay_put_and_are_spread,
]


@pytest.mark.parametrize("name", RENEWAL)
def test_a_walk_finds_what_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(*RENEWAL[name])
    monkeypatch.setattr(test_engine_machine, "STEPS", 600)

    def walks() -> None:
        for seed in range(8):
            test_engine_machine.walk(seed, tmp_path)

    with pytest.raises((AssertionError, GenrtError, KeyError)):
        walks()


@pytest.mark.parametrize("name", ROUTING)
def test_the_routers_tests_find_what_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*ROUTING[name])
    with pytest.raises(AssertionError):
        _ = [each() for each in ROUTER_TESTS]
