"""Who goes first: whoever asks for draws again and again, or the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genrt.engines.vllm.told_first import ToldFirst

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


def drawn(
    first_of: ToldFirst, clock: Any, told_at: float, *, absent: float, rest: float = 1.0
) -> float:
    """Ask so long after being told, or once the step is over; return when it is told again."""
    clock.now = max(clock.now, told_at + absent)
    first_of.asked()
    clock.now += 3.0  # the forward
    is_told = first_of.is_due(DEVICE)
    told_at = clock.now
    with first_of.rest(is_told=is_told):
        clock.now += rest
    return told_at if is_told else clock.now


@pytest.mark.parametrize(("absent", "is_told"), [(0.1, True), (1.9, True), (2.1, False)])
def test_who_is_back_soon_is_due_and_who_has_more_to_do_last(
    stream: list[bool], absent: float, is_told: bool
) -> None:
    first_of, told_at, first = ToldFirst(clock := Clock()), 0.0, []
    for _ in range(4):
        told_at = drawn(first_of, clock, told_at, absent=absent)
        first.append(told_at < clock.now)
    assert first == [False, *[is_told] * 3], "nothing is known of the first"


def test_a_device_that_is_at_work_goes_on(stream: list[bool]) -> None:
    first_of, told_at = ToldFirst(clock := Clock()), 0.0
    for _ in range(2):
        told_at = drawn(first_of, clock, told_at, absent=0.1)
    assert first_of.is_due(DEVICE)
    assert not first_of.is_due(torch.device("cpu"))
    stream[0] = False
    assert drawn(first_of, clock, told_at, absent=0.1) == clock.now
