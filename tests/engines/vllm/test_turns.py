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


def drawn(turns: Turns, clock: Any, told_at: float, *, absent: float, rest: float = 1.0) -> float:
    """Ask so long after being told, or once the step is over; return when it is told again."""
    clock.now = max(clock.now, told_at + absent)
    turns.asked()
    clock.now += 3.0  # the forward
    is_told = turns.is_told_first(DEVICE)
    told_at = clock.now
    with turns.rest(is_told=is_told):
        clock.now += rest
    return told_at if is_told else clock.now


@pytest.mark.parametrize(("absent", "is_told"), [(0.1, True), (1.9, True), (2.1, False)])
def test_who_is_back_soon_is_told_first_and_who_has_more_to_do_last(
    stream: list[bool], absent: float, is_told: bool
) -> None:
    turns, told_at, first = Turns(clock := Clock()), 0.0, []
    for _ in range(4):
        told_at = drawn(turns, clock, told_at, absent=absent)
        first.append(told_at < clock.now)
    assert first == [False, *[is_told] * 3], "nothing is known of the first"


def test_a_device_that_is_at_work_goes_on(stream: list[bool]) -> None:
    turns, told_at = Turns(clock := Clock()), 0.0
    for _ in range(2):
        told_at = drawn(turns, clock, told_at, absent=0.1)
    assert turns.is_told_first(DEVICE)
    assert not turns.is_told_first(torch.device("cpu"))
    stream[0] = False
    assert drawn(turns, clock, told_at, absent=0.1) == clock.now
