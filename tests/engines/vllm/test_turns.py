"""Who goes first: whoever asks for draws again and again, or the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genrt.engines.vllm.turns import Turns

DEVICE = torch.device("cuda")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the device has done all it was given."""
    idle = [True]

    class Stream:
        def query(self) -> bool:
            return idle[0]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    return idle


def drawn(turns: Turns, clock: Any, *, absent: float, rest: float) -> bool:
    """Ask after an absence, draw, and take so long for the rest of the step; return who was told first."""
    clock.now += absent
    turns.asked()
    is_told = turns.is_told_first(DEVICE)
    with turns.rest(is_told=is_told):
        clock.now += rest
    return is_told


@pytest.mark.parametrize(("absent", "is_told"), [(0.5, True), (1.9, True), (2.1, False)])
def test_who_is_back_soon_is_told_first_and_who_has_more_to_do_last(
    stream: list[bool], absent: float, is_told: bool
) -> None:
    turns = Turns(clock := Clock())
    found = [drawn(turns, clock, absent=absent, rest=1.0) for _ in range(3)]
    assert found == [False, is_told, is_told], "of the first nothing is known"


def test_the_time_of_one_who_was_told_first_counts_from_then(stream: list[bool]) -> None:
    """What is left of the step is part of it."""
    turns = Turns(clock := Clock())
    assert [drawn(turns, clock, absent=0.2, rest=1.0) for _ in range(2)] == [False, True]
    assert not drawn(turns, clock, absent=1.1, rest=1.0), "it was away for 2.1"


def test_a_device_that_is_at_work_goes_on(stream: list[bool]) -> None:
    turns = Turns(clock := Clock())
    drawn(turns, clock, absent=0.1, rest=1.0)
    stream[0] = False
    assert not drawn(turns, clock, absent=0.1, rest=1.0)
    assert not turns.is_told_first(torch.device("cpu"))
