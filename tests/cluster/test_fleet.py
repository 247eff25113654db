"""The fleet by itself: who is asked, what is moved, who is told what, without processes or a clock."""

from __future__ import annotations

from genrt.cluster.fleet import MOST_MOVES, Fleet, Replica
from genrt.cluster.health import ReplicaLimits, ReplicaState
from genrt.cluster.routing import Router
from genrt.engines.protocol import Finished
from genrt.errors import EngineFailed, OutOfMemory
from genrt.questions.rows import LogprobsRequest

LIMITS = ReplicaLimits(most_silent=3, most_failures=9, most_restarts=9)


def fleet_of(count: int) -> Fleet:
    fleet = Fleet(count, LIMITS, Router(count, seed=0))
    for number in range(count):
        fleet.opened(number, 0, 0.0)
        fleet.renewed(number, 0, 0, 0.0)
    return fleet


def asked(fleet: Fleet, count: int = 40, first: int = 0) -> dict[int, list[LogprobsRequest]]:
    """Ask questions of no common beginning; return who got which."""
    fleet.submit([LogprobsRequest([first + each, 1]) for each in range(count)])
    return fleet.place()  # type: ignore[return-value]


def suspect(fleet: Fleet, replica: Replica) -> None:
    for _ in range(2):
        fleet.to_probe()
        for each in fleet.replicas:
            if each is not replica:
                fleet.answered_probe(each.number, each.life)
    assert replica.health.state is ReplicaState.SUSPECT


def test_a_suspect_replica_is_asked_if_there_is_no_other() -> None:
    fleet = fleet_of(2)
    suspect(fleet, fleet.replicas[0])
    assert asked(fleet).keys() == {1}
    fleet.died(1, 0, "killed")
    assert fleet.place().keys() == {0}
    fleet.answered_probe(0, 0)
    for each in fleet.to_start(1.0):
        fleet.opened(each.number, each.life, 2.0)
        fleet.renewed(each.number, each.life, 0, 2.0)
    assert asked(fleet, first=100).keys() == {0, 1}


def test_a_question_at_which_an_engine_fails_goes_to_another() -> None:
    fleet = fleet_of(2)
    [(number, [request])] = asked(fleet, 1).items()
    failed = Finished(request, error=EngineFailed("the device fell off"))
    for moves in range(MOST_MOVES):
        assert fleet.ended(number, 0, [failed]) == []
        assert fleet.moved == moves + 1
        [(number, [again])] = fleet.place().items()
        assert again is request
    assert fleet.ended(number, 0, [failed]) == [failed]
    assert len(fleet) == 0


def test_what_is_the_questions_own_fault_or_has_nowhere_to_go_ends() -> None:
    for fleet, error in (
        (fleet_of(2), OutOfMemory("too long")),
        (fleet_of(1), EngineFailed("the device fell off")),
    ):
        [(number, [request])] = asked(fleet, 1).items()
        failed = Finished(request, error=error)
        assert fleet.ended(number, 0, [failed]) == [failed]
        assert fleet.moved == 0


def test_what_another_life_of_a_replica_tells_is_ignored() -> None:
    fleet = fleet_of(1)
    [(_, [request])] = asked(fleet, 1).items()
    assert fleet.ended(0, 1, [Finished(request, result=1)]) == []
    fleet.died(0, 1, "killed")
    assert request in fleet.replicas[0].work
    assert fleet.ended(0, 0, [Finished(request, result=1)])


def test_work_is_taken_off_a_replica_with_its_questions() -> None:
    router = Router(1, seed=0)
    fleet = Fleet(1, LIMITS, router)
    fleet.opened(0, 0, 0.0)
    fleet.renewed(0, 0, 0, 0.0)
    requests = asked(fleet, 3)[0]
    assert router.work(0) == 3.0
    assert fleet.cancel(requests[:1]) == {0: requests[:1]}
    assert router.work(0) == 2.0
    fleet.ended(0, 0, [Finished(each, result=1) for each in requests[1:]])
    assert router.work(0) == 0.0


def test_each_replica_is_told_once_of_new_settings_and_serves_with_those_alone() -> None:
    fleet = fleet_of(2)
    fleet.has_changed()
    fleet.change(1.0)
    assert fleet.has_changed()
    assert not fleet.has_changed()
    assert len(fleet.to_renew()) == 2
    assert fleet.to_renew() == []
    assert asked(fleet) == {}
    fleet.change(2.0)  # while they are still given those before
    assert fleet.has_changed()
    assert len(fleet.to_renew()) == 2
    fleet.renewed(0, 0, 1, 3.0)
    fleet.renewed(1, 0, 2, 3.0)
    assert fleet.place().keys() == {1}
