"""The router: sequences stay where they are, populations are spread, and no replica is flooded."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.cluster.routing import MARGIN, Router
from genrt.questions.draws import PopulationDraw
from genrt.questions.rows import Limits, LogprobsRequest
from genrt.questions.sequences import Sequences
from genrt.runtime.programs import ProgramRequest

LIMITS = Limits(1000, 4096)
TWO, PROMPT = [0, 1], [*range(16)]


def population(prompt: list[int], count: int) -> PopulationDraw:
    contexts = Sequences.of(LIMITS, [prompt] * count).contexts(np.arange(count))
    return PopulationDraw(contexts, None, None, 1.0, np.zeros(count, np.uint64))


def program(number: int) -> ProgramRequest:
    return ProgramRequest(b"", number)


def test_a_thousand_populations_stay_put_and_are_spread() -> None:
    router, chosen, every = Router(32, seed=1), random.Random(3), [*range(32)]
    homes = [Counter[int]() for _ in range(1_000)]
    numbers: dict[int, int] = {}
    flying: list[tuple[int, PopulationDraw]] = []
    for last in range(1, 20_001):
        who = chosen.randrange(len(homes))
        asked = population([1, 2, 3, who % 7], 4)
        extends = [numbers[who]] if who in numbers else []
        home = router.route(asked, every, extends)
        router.stays(last, home, len(asked))
        router.left(extends)
        numbers[who] = last
        homes[who][home] += 1
        flying.append((home, asked))
        while len(flying) > 64:
            router.done(*flying.pop(chosen.randrange(len(flying))))
    steps = sum(sum(each.values()) for each in homes)
    assert sum(max(each.values()) for each in homes if each) >= 0.99 * steps
    spread = Counter(each.most_common(1)[0][0] for each in homes if each)
    assert len(spread) == 32
    assert max(spread.values()) <= 2 * min(spread.values())


def test_a_sequence_and_a_batch_that_grow_stay_where_they_are() -> None:
    router, every = Router(4, seed=2), [*range(4)]
    homes: dict[int, set[int]] = {}
    for _ in range(30):
        for number in range(20):
            sequence = [number, *PROMPT, *[number] * _]
            batch = population([number, 5, *[number] * _], 3)
            for each in (LogprobsRequest(sequence), batch):
                home = router.route(each, every)
                router.done(home, each)
                homes.setdefault(number + 100 * (each is batch), set()).add(home)
    assert {len(each) for each in homes.values()} == {1}
    assert len({min(each) for each in homes.values()}) == 4


def test_a_common_beginning_stays_together_up_to_the_margin() -> None:
    router, asked = Router(2, seed=0), [LogprobsRequest([*PROMPT, 7, n]) for n in range(400)]
    homes = [router.route(each, TWO) for each in asked]
    assert len(set(homes[: int(MARGIN) // 2])) == 1
    assert abs(2 * sum(homes) - 400) <= MARGIN + 2


@settings(deadline=None)
@given(
    usable=st.lists(st.integers(0, 5), min_size=1, unique=True),
    contexts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1),
)
def test_only_usable_replicas_are_asked(usable: list[int], contexts: list[list[int]]) -> None:
    router = Router(6, seed=0)
    for number, each in enumerate(contexts):
        router.stays(number, router.route(population(each, 2), [*range(6)]), 2)
        for asked in (LogprobsRequest(each), population([*each, 1], 2), program(0)):
            assert router.route(asked, usable) in usable
        assert router.route(population([*each, 1], 2), usable, [number]) in usable


def test_a_population_is_not_looked_for_where_it_was_lost() -> None:
    router = Router(2, seed=0)
    home = router.route(population([1, 2], 8), TWO)
    router.stays(1, home, 8)
    router.lost(home)
    router.route(population([9], 1), [home])
    assert router.route(population([1, 2, 3], 8), TWO, [1]) == 1 - home


def test_a_population_leaves_a_replica_that_is_flooded_later_than_a_text() -> None:
    router = Router(2, seed=0)
    text = LogprobsRequest([*PROMPT, 1])
    home = router.route(text, TWO)
    router.stays(1, router.route(population([1], 4), [home]), 4)
    for _ in range(3):
        router.route(population([1], 64), [home])
    assert router.route(population([1, 2], 4), TWO, [1]) == home
    assert router.route(text, TWO) != home
    for _ in range(200):
        router.route(population([1], 64), [home])
    assert router.route(population([1, 2], 4), TWO, [1]) != home


def test_new_populations_and_programs_go_where_there_is_least_to_do_and_to_keep() -> None:
    router = Router(2, seed=0)
    homes = []
    for number, count in ((1, 16), (2, 8)):
        asked = population([number], count)
        home = router.route(asked, TWO)
        router.stays(number, home, count)
        router.done(home, asked)
        homes.append(home)
    assert len({*homes}) == 2
    router.left([1])
    assert router.route(population([3], 4), TWO) == homes[0]
    four = Router(4, seed=1)
    places = [four.route(program(each), [*range(4)]) for each in range(4)]
    assert {*places} == {0, 1, 2, 3}
    for number, home in enumerate(places):
        four.done(home, program(number))
    four.stays(1, places[0], 16)
    assert four.route(program(5), [*range(4)]) != places[0]
