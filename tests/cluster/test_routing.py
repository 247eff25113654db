"""Who is asked: sequences stay where they are, populations are spread, and no replica is flooded."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.cluster.programs import ProgramRequest
from genrt.cluster.routing import MARGIN, Router
from genrt.questions.contexts import Limits
from genrt.questions.draws import PopulationDraw
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import Sequences

LIMITS = Limits(1000, 4096)


def population(prompt: list[int], count: int) -> PopulationDraw:
    contexts = Sequences.of(LIMITS, [prompt] * count).contexts(np.arange(count))
    return PopulationDraw(contexts, None, None, 1.0, np.zeros(count, np.uint64))


def walk(router: Router, count: int, replicas: int, steps: int) -> tuple[list[Counter[int]], int]:
    """Have populations take steps at random, of which some are in flight at once; return how often each
    was where, and the most work that a replica had more than another."""
    chosen = random.Random(3)
    homes = [Counter[int]() for _ in range(count)]
    numbers: dict[int, int] = {}
    flying: list[tuple[int, float]] = []
    worst = 0
    for last in range(1, steps + 1):
        who = chosen.randrange(count)
        asked = population([1, 2, 3, who % 7], 4)
        goes_on = [numbers[who]] if who in numbers else []
        home, work = router.route(asked, goes_on=goes_on)
        router.stays(last, home, len(asked))
        router.left(goes_on)
        numbers[who] = last
        homes[who][home] += 1
        flying.append((home, work))
        while len(flying) > 64:
            router.done(*flying.pop(chosen.randrange(len(flying))))
        works = [router.work(each) for each in range(replicas)]
        worst = max(worst, int(max(works) - min(works)))
    return homes, worst


def test_a_thousand_populations_stay_put_and_are_spread() -> None:
    homes, _ = walk(Router(32, seed=1), 1_000, 32, 20_000)
    steps = sum(sum(each.values()) for each in homes)
    stayed = sum(max(each.values()) for each in homes if each)
    assert stayed >= 0.99 * steps
    spread = Counter(each.most_common(1)[0][0] for each in homes if each)
    assert len(spread) == 32
    assert max(spread.values()) <= 2 * min(spread.values())


def test_a_sequence_that_grows_stays_where_it_is() -> None:
    router = Router(4, seed=2)
    sequences = [[each, 5] for each in range(20)]
    homes: dict[int, set[int]] = {}
    for _ in range(30):
        for number, each in enumerate(sequences):
            home, work = router.route(LogprobsRequest(each))
            router.done(home, work)
            homes.setdefault(number, set()).add(home)
            each.append(number)
    assert {len(each) for each in homes.values()} == {1}


def test_what_begins_alike_stays_together_up_to_the_margin() -> None:
    router = Router(2, seed=0)
    prompt = [*range(16)]
    routed = [router.route(LogprobsRequest([*prompt, 7, each])) for each in range(400)]
    homes = [home for home, _ in routed]
    assert len(set(homes[: int(MARGIN) // 2])) == 1
    works = [router.work(each) for each in range(2)]
    assert max(works) - min(works) <= MARGIN + 2
    for home, work in routed:
        router.done(home, work)
    assert [router.work(each) for each in range(2)] == [0.0, 0.0]


def test_ties_are_broken_at_random_and_by_the_routers_own_generator() -> None:
    state = random.getstate()
    routes = [
        [Router(8, seed=seed).route(LogprobsRequest([1]))[0] for seed in range(40)]
        for _ in range(2)
    ]
    assert routes[0] == routes[1]
    assert len(set(routes[0])) > 4
    assert random.getstate() == state


@settings(deadline=None)
@given(
    usable=st.sets(st.integers(0, 5), min_size=1),
    contexts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1),
)
def test_only_usable_replicas_are_asked(usable: set[int], contexts: list[list[int]]) -> None:
    router = Router(6, seed=0)
    for each in contexts:
        router.use({*range(6)})
        router.route(LogprobsRequest(each))
        router.use(usable)
        assert router.route(LogprobsRequest(each))[0] in usable


def test_a_population_is_not_looked_for_where_it_was_lost() -> None:
    router = Router(3, seed=0)
    first = population([1, 2], 8)
    home, _ = router.route(first)
    router.stays(1, home, 8)
    router.lost(home)
    others = {*range(3)} - {home}
    assert router.work(home) == 0.0
    router.use(others)
    assert router.route(population([1, 2, 3], 8), goes_on=[1])[0] in others


def test_a_population_leaves_a_replica_that_is_flooded() -> None:
    router = Router(2, seed=0)
    home, _ = router.route(population([1], 4))
    router.stays(1, home, 4)
    assert router.route(population([1, 2], 4), goes_on=[1])[0] == home
    router.use({home})
    for _ in range(200):
        router.route(population([1], 64))
    router.use({0, 1})
    assert router.route(population([1, 2], 4), goes_on=[1])[0] != home


def test_a_population_stays_where_a_text_would_not() -> None:
    router = Router(2, seed=0)
    home, _ = router.route(population([1], 4))
    router.stays(1, home, 4)
    router.use({home})
    for _ in range(3):
        router.route(population([1], 64))
    router.use({0, 1})
    assert router.route(population([1, 2], 4), goes_on=[1])[0] == home
    assert router.route(LogprobsRequest([1, 2]))[0] != home


def test_populations_that_are_gone_take_no_room() -> None:
    router = Router(2, seed=0)
    homes = []
    for number, count in ((1, 16), (2, 8)):
        home, work = router.route(population([number], count))
        router.stays(number, home, count)
        router.done(home, work)
        homes.append(home)
    assert len({*homes}) == 2
    router.left([1])
    assert router.route(population([3], 4))[0] == homes[0]


def test_programs_go_where_there_is_least_to_do_and_to_keep() -> None:
    for seed in range(8):
        router = Router(4, seed=seed)
        homes = [router.route(ProgramRequest(b"", object, each)) for each in range(4)]
        assert {home for home, _ in homes} == {0, 1, 2, 3}
        for each in homes:
            router.done(*each)
        router.stays(1, homes[-1][0], 16)
        assert router.route(ProgramRequest(b"", object, 4))[0] != homes[-1][0]


def test_a_new_life_of_a_replica_has_no_work() -> None:
    router = Router(2, seed=0)
    router.use({0})
    router.route(population([1], 64))
    router.lost(0)
    router.use({0, 1})
    router.route(population([2], 8), goes_on=[])
    assert {router.work(0), router.work(1)} == {0.0, 8.0 + 8 / 64}
    assert len({router.route(ProgramRequest(b"", object, 0))[0] for _ in range(2)}) == 2
