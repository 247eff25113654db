"""One replica's health: what makes it suspect, what its death, and when it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from genrt.cluster.health import Health, ReplicaLimits, ReplicaState
from genrt.errors import InvalidRequest

LIMITS = ReplicaLimits(most_silent=3, most_failures=2, most_restarts=2, refill_seconds=100.0)


def state(health: Health) -> ReplicaState:
    """The state, which a type checker does not take to stay the same."""
    return health.state


def healthy() -> Health:
    health = Health(LIMITS)
    health.opened(1.0)
    assert state(health) is ReplicaState.STALE
    health.renewed(0, 0, 1.0)
    assert state(health) is ReplicaState.HEALTHY
    return health


def test_it_serves_with_the_current_settings_alone() -> None:
    health = Health(LIMITS)
    assert (state(health), health.serves) == (ReplicaState.RESTARTING, False)
    health.opened(1.0)
    health.renewed(3, 4, 2.0)
    assert (health.state, health.serves) == (ReplicaState.STALE, False)
    health.renewed(4, 4, 3.0)
    assert (state(health), health.serves) == (ReplicaState.HEALTHY, True)
    health.outdated(4.0)
    assert (health.state, health.serves) == (ReplicaState.STALE, False)
    health.succeeded()
    health.answered_probe()
    assert state(health) is ReplicaState.STALE


def test_probes_without_an_answer_make_it_suspect_and_then_dead() -> None:
    health = healthy()
    health.probed()
    assert state(health) is ReplicaState.SUSPECT
    health.answered_probe()
    assert state(health) is ReplicaState.HEALTHY
    for _ in range(3):
        health.probed()
    assert state(health) is ReplicaState.DEAD


def test_failures_are_a_streak_of_their_own_that_probes_do_not_end() -> None:
    health = healthy()
    health.failed()
    health.answered_probe()
    assert state(health) is ReplicaState.SUSPECT
    health.succeeded()
    assert state(health) is ReplicaState.HEALTHY
    health.failed()
    health.answered_probe()
    health.failed()
    assert state(health) is ReplicaState.DEAD


def test_a_step_that_never_ends_is_its_death_and_idleness_is_not() -> None:
    health = healthy()
    health.tick(LIMITS.stall_seconds * 3, busy=False)
    assert health.serves
    health.worked(LIMITS.stall_seconds * 3)
    health.tick(LIMITS.stall_seconds * 4, busy=True)
    assert health.serves
    health.tick(LIMITS.stall_seconds * 4 + 1, busy=True)
    assert state(health) is ReplicaState.DEAD


@pytest.mark.parametrize("opened", [False, True])
def test_it_may_not_open_or_be_renewed_for_ever(opened: bool) -> None:
    health = Health(LIMITS)
    if opened:
        health.opened(0.0)
    health.tick(LIMITS.open_seconds, busy=False)
    assert health.lives
    health.tick(LIMITS.open_seconds + 1, busy=False)
    assert state(health) is ReplicaState.DEAD


def test_restarts_have_a_budget_that_fills_up_while_it_serves() -> None:
    health = healthy()
    for restarts in (1, 2):
        health.died()
        assert health.restart(10.0)
        assert (health.state, health.settings, health.restarts) == (
            ReplicaState.RESTARTING,
            -1,
            restarts,
        )
    health.opened(11.0)
    health.renewed(0, 0, 11.0)
    health.tick(111.0, busy=False)
    health.died()
    assert health.restart(112.0)
    health.died()
    assert not health.restart(113.0)
    assert state(health) is ReplicaState.RETIRED
    health.renewed(0, 0, 114.0)
    health.opened(114.0)
    assert not health.serves
    assert not health.lives


@pytest.mark.parametrize(
    "wrong", [{"most_silent": 0}, {"probe_seconds": 0.0}, {"stall_seconds": "1"}]
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        ReplicaLimits(**wrong)
