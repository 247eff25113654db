"""Hundreds of replicas on a virtual clock: texts stay where they are, and nothing is lost."""

from __future__ import annotations

from benchmarks.scaling import simulated


def test_texts_over_many_replicas_stay_and_none_is_lost() -> None:
    found = simulated(100, 300, 60, 0.5)
    assert found["asked"] == found["ended"] + found["in_flight"]
    assert found["moved"] > 0
    assert found["given_up"] == 0
    assert found["stayed"] >= 0.95
    assert 0 < found["silent_seconds"] <= 8
    assert found["serving"] >= 60
