"""The least loaded replica, found without a scan: the same one, whatever a router decides by it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Set
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.cluster import routing
from genrt.cluster.loads import MOST_UNUSED, Loads
from genrt.cluster.programs import ProgramRequest
from genrt.cluster.routing import Router
from genrt.questions.completions import SampleRequest
from genrt.questions.contexts import Limits
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import Sequences

COUNT = 7


class Scan:
    """What ``Loads`` is, by looking at each. Of several it takes the first, whatever the generator."""

    def __init__(self, count: int) -> None:
        self.loads = [0.0] * count
        self.usable: Set[int] = {*range(count)}

    def __getitem__(self, number: int) -> float:
        return self.loads[number]

    def compare(self, numbers: Set[int]) -> None:
        self.usable = numbers

    def put(self, number: int, load: float) -> None:
        self.loads[number] = load

    def least(self) -> float:
        return min(self.loads[each] for each in self.usable)

    def ties(self) -> list[int]:
        return [each for each in sorted(self.usable) if self.loads[each] == self.least()]

    def any_least(self, chosen: random.Random) -> int:
        return self.ties()[0]


class First(Loads):
    """Takes the first of several, too."""

    def any_least(self, chosen: random.Random) -> int:
        least = self.least()
        return min(self._buckets[least])


USABLE = st.sets(st.integers(0, COUNT - 1), min_size=1)
PUT = st.tuples(st.integers(0, COUNT - 1), st.integers(0, 6).map(lambda n: n / 64))


@settings(deadline=None)
@given(st.lists(st.one_of(PUT, USABLE), max_size=200))
def test_the_least_is_what_a_scan_finds(changes: list[Any]) -> None:
    loads, scan, chosen = Loads(COUNT), Scan(COUNT), random.Random(0)
    for each in changes:
        for one in (loads, scan):
            if isinstance(each, set):
                one.compare(each)
            else:
                one.put(*each)
        assert loads.least() == scan.least()
        assert loads.any_least(chosen) in scan.ties()
        assert [n in loads for n in range(COUNT)] == [n in scan.usable for n in range(COUNT)]
        assert [loads[n] for n in range(COUNT)] == scan.loads


def test_equally_loaded_replicas_are_equally_likely() -> None:
    loads, chosen = Loads(5), random.Random(4)
    loads.put(3, 1.0)
    found = Counter(loads.any_least(chosen) for _ in range(4000))
    assert found.keys() == {0, 1, 2, 4}
    assert all(abs(each - 1000) < 150 for each in found.values())  # 5 standard deviations


def test_loads_that_nobody_has_any_more_are_forgotten() -> None:
    loads = Loads(3)
    for step in range(10_000):
        loads.put(1, step + 1.0)
        assert len(loads._heap) == len(loads._buckets) <= 4 * 3 + MOST_UNUSED + 1
    assert loads.least() == 0.0
    loads.compare({1})
    assert loads.least() == 10_000.0


LIMITS = Limits(1000, 4096)


def questions(chosen: random.Random, asked: dict[int, list[int]]) -> tuple[Request, list[int]]:
    """Return a question of any kind, and the populations that it goes on from."""
    ids = [chosen.randrange(3) for _ in range(chosen.randrange(1, 40))]
    kind = chosen.randrange(10)
    if kind == 0:
        return ProgramRequest(b"", object, chosen.randrange(3)), []
    if kind == 1:
        return SampleRequest((*ids,), chosen.randrange(1, 90), seed=0), []
    if kind < 6:
        return LogprobsRequest(ids), []
    goes_on: list[int] = []
    if asked and chosen.random() < 0.8:
        number, ids = chosen.choice([*asked.items()])
        goes_on = [number]
    count = chosen.randrange(1, 20)
    contexts = Sequences.of(LIMITS, [[*ids, 1]] * count).contexts(np.arange(count))
    return PopulationDraw(contexts, None, None, 1.0, np.zeros(count, np.uint64)), goes_on


@pytest.mark.parametrize("seed", range(4))
def test_the_router_decides_as_it_does_by_a_scan(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    routers = []
    for kind in (First, Scan):
        monkeypatch.setattr(routing, "Loads", kind)
        routers.append(Router(COUNT, seed=seed))
    chosen, flying = random.Random(seed), []
    populations: dict[int, list[int]] = {}
    homes = Counter[int]()
    for number in range(3_000):
        request, goes_on = questions(chosen, populations)
        routes = [each.route(request, goes_on=goes_on) for each in routers]
        assert routes[0] == routes[1]
        homes[routes[0][0]] += 1
        flying.append(routes[0])
        if isinstance(request, PopulationDraw):
            populations[number] = [*request.token_ids]
        ended = [flying.pop(chosen.randrange(len(flying))) for _ in range(len(flying) - 50)]
        gone = [n for n in populations if len(populations) > 20 and chosen.random() < 0.2]
        populations = {n: each for n, each in populations.items() if n not in gone}
        usable = {*chosen.sample(range(COUNT), chosen.randrange(1, COUNT + 1))}
        lost = chosen.randrange(COUNT)
        changes, dies = chosen.random() < 0.05, chosen.random() < 0.01
        for router in routers:
            if isinstance(request, PopulationDraw):
                router.stays(number, routes[0][0], len(request))
            for each in ended:
                router.done(*each)
            router.left(gone)
            if changes:
                router.use(usable)
            if dies:
                router.lost(lost)
        flying = [each for each in flying if not (dies and each[0] == lost)]
    assert len(homes) == COUNT
