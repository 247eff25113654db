"""launches.py: work that repeats is launched as it is, captured, and launched as one from then on."""

from __future__ import annotations

import pytest
import torch

from genrt import launches
from genrt.launches import Repeated, Staged


class Graph:
    """As a CUDA graph of one kernel that adds to ``done``."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def replay(self) -> None:
        self._done.append("replayed")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, on a machine that has a GPU."""
    done: list[str] = []

    def captured(launch: object, graphs: object) -> Graph:
        done.append("captured")
        return Graph(done)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launches, "_captured", captured)
    return done


def test_it_is_captured_after_some_times_and_replayed_from_then_on(done: list[str]) -> None:
    repeated = Repeated(lambda: done.append("launched"), times=2)
    for _ in range(4):
        repeated()
    assert done == ["launched", "launched", "captured", "replayed", "replayed"]


def test_what_cannot_be_captured_is_launched_every_time(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_captured", lambda *_: done.append("tried"))
    repeated = Repeated(lambda: done.append("launched"), times=1)
    for _ in range(4):
        repeated()
    assert done == ["launched", "tried", "launched", "launched", "launched"]


def test_without_a_gpu_nothing_is_captured(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    repeated = Repeated(lambda: done.append("launched"), times=1)
    for _ in range(4):
        repeated()
    assert done == ["launched"] * 4


def test_numbers_are_read_as_they_are_at_the_launch() -> None:
    read: list[list[int]] = []
    staged = Staged((3,), torch.device("cpu"), lambda numbers: read.append(numbers.tolist()))
    for first in (1, 2):
        staged.free()[:] = [first, 0, -first]
        staged.launch()
    staged.launch()
    assert read == [[1, 0, -1], [2, 0, -2], [2, 0, -2]]
