"""Whether to run ahead, by steps whose times are told: what pays is taken up, the rest costs little."""

from __future__ import annotations

import random

import numpy as np
import pytest

from genrt.inference.pace import FIRST, LEARNING, LOSS, PATIENT, SHARE, TURN, TURNS, Pace


def went(pace: Pace, steps: int, *, count: int = 8, ahead: float, without: float) -> list[bool]:
    """Which of so many steps ran ahead, if those take so long and the others so long."""
    found = []
    for _ in range(steps):
        found.append(pace.is_ahead(count))
        pace.took(count, ahead if found[-1] else without)
    return found


def test_what_pays_is_taken_up_after_one_trial() -> None:
    found = went(Pace(), 1000, ahead=0.5, without=1.0)
    assert not any(found[:FIRST])
    assert all(found[FIRST : FIRST + LEARNING])
    assert sum(not each for each in found) <= FIRST + 0.1 * 1000


@pytest.mark.parametrize("ahead", [1.2, 2.0, 10.0, 40.0])
def test_what_does_not_pay_is_tried_seldom(ahead: float) -> None:
    """It loses a share of the time that is told, after what the first trial loses."""
    found = went(Pace(), 10_000, ahead=ahead, without=1.0)
    assert sum(found) > 0
    lost = np.cumsum(found) * (ahead - 1)
    assert lost[200] <= 2 * (LOSS + ahead)
    assert lost[-1] <= lost[200] + 1.5 * SHARE * len(found)


@pytest.mark.parametrize("ahead", [2.0, 12.0])
def test_where_it_is_known_to_be_dear_its_first_trial_is_earned_before(ahead: float) -> None:
    pace = Pace(PATIENT)
    found = went(pace, PATIENT, ahead=ahead, without=1.0)
    assert not any(found)
    assert not any(went(pace, PATIENT // 2, count=2, ahead=ahead, without=1.0))
    found += went(pace, 20_000, ahead=ahead, without=1.0)
    assert any(found)
    lost = np.cumsum(found) * (ahead - 1)
    assert (lost[PATIENT + 100 :] <= 3 * SHARE * np.arange(PATIENT + 100, len(found))).all()


def test_a_first_step_that_prepares_much_does_not_end_it() -> None:
    pace = Pace()
    went(pace, FIRST, ahead=0.5, without=1.0)
    pace.took(8, 1000.0)
    assert sum(went(pace, 10_000, ahead=0.5, without=1.0)) > 5000


def test_what_changes_is_seen() -> None:
    pace = Pace()
    assert sum(went(pace, 3000, ahead=3.0, without=1.0)[2000:]) < 50
    found = went(pace, 12_000, ahead=0.4, without=1.0)
    assert sum(found[-1000:]) > 900


def test_times_that_vary_decide_as_their_means() -> None:
    """A step ahead takes 1.5 times as long, or nothing: half as long in the mean, while other work makes
    all of a stretch of steps slow."""
    for seed in range(20):
        chance, pace = random.Random(seed), Pace()
        taken = []
        for step in range(3000):
            slow = 3.0 if step // 50 % 3 == 0 else 1.0
            is_ahead = pace.is_ahead(4)
            taken.append(is_ahead)
            pace.took(4, slow * (chance.choice([0.0, 0.0, 1.5]) if is_ahead else 1.0))
        assert sum(taken[1000:]) > 1500


def test_sizes_are_apart_and_learn_from_their_neighbours() -> None:
    pace = Pace()
    went(pace, 1000, count=64, ahead=3.0, without=1.0)
    assert not any(went(pace, 60, count=32, ahead=3.0, without=1.0))
    went(pace, 1000, count=2, ahead=0.3, without=1.0)
    assert all(went(pace, 60, count=1, ahead=0.3, without=1.0))
    assert sum(went(pace, 60, count=64, ahead=3.0, without=1.0)) <= TURN * TURNS
