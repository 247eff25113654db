"""Event loops that ask again as soon as they are answered, and how long a step waits for them.

A sampler draws a token, appends it and asks for the next one. That question follows the answer by what a
few passes of an event loop take. With texts of others in flight, the next step would have begun by then,
and the sampler would be in every other step only.

Rules:
    A step waits only if it would be one of other requests: an idle engine waits for nobody.
    A loop is waited for once it has come back in time ``HABIT`` times in a row, and for ``SHARE`` of a
    step at most. One that did not come back in time has to show that again.
    The loop's next question ends the wait: nothing here sleeps, or looks again and again.
    All of it happens under the batcher's lock, but for the time of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from genrt.questions.draws import PopulationDraw
from genrt.questions.reads import ReadRequest
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.waiters import Waiter

__all__ = ["HABIT", "SHARE", "Returning"]

HABIT = 2
"""After so many answers in a row that were followed in time by a question, a loop is waited for."""

SHARE = 0.1
"""The longest wait, as a share of the time that a step takes. A loop that draws again and again takes
about half a millisecond; what it takes, everyone else in flight loses."""

OLD_STEPS = 0.75
"""How much of the average time of a step is that of the steps before the last."""

OF_ONE_STEP = LogprobsRequest | ReadRequest | PopulationDraw
"""The requests whose answers a sampler goes on from. A text takes many steps: one more is nothing."""


@dataclass(slots=True, eq=False)
class _Habit:
    """One loop's answers: how many in a row were followed ``in_time``, and when it was last ``told_at``,
    if it has not asked since."""

    in_time: int = 0
    told_at: float | None = None


class Returning:
    """The loops that have been answered, and are likely to ask again before the next step.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step_seconds = self._longest = 0.0
        # Weakly: a loop may end without being closed, and nobody would tell.
        self._habits: WeakKeyDictionary[asyncio.AbstractEventLoop, _Habit] = WeakKeyDictionary()
        self._expected: dict[_Habit, None] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Note how long a step takes; on the engine's thread, without the lock."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        old = OLD_STEPS if self._step_seconds else 0.0
        self._step_seconds = old * self._step_seconds + (1.0 - old) * seconds
        self._longest = SHARE * self._step_seconds

    def told(self, answered: Iterable[Waiter]) -> None:
        """Note that these are about to be told of what a step has brought."""
        loops: set[asyncio.AbstractEventLoop | None] = {None}  # a thread's next question is its own
        for waiter in answered:
            loop = waiter.loop
            if loop in loops or loop is None or not isinstance(waiter.requests[0], OF_ONE_STEP):
                continue
            loops.add(loop)
            habit = self._habits.setdefault(loop, _Habit())
            if habit.told_at is not None:  # it did not ask since it was last told
                habit.in_time = 0
            habit.told_at = self._clock()
            if habit.in_time >= HABIT:
                self._expected[habit] = None

    def asked(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note that all that a loop asks at this time is ready to be sent."""
        habit = self._habits.get(loop)
        if habit is None or habit.told_at is None:
            return
        is_in_time = self._clock() - habit.told_at <= self._longest
        habit.in_time = habit.in_time + 1 if is_in_time else 0
        habit.told_at = None
        self._expected.pop(habit, None)

    def seconds(self) -> float:
        """Return how long the next step waits."""
        if not self._expected:
            return 0.0
        last = max(habit.told_at or 0.0 for habit in self._expected)
        left = last + self._longest - self._clock()
        if left <= 0.0:
            self._expected.clear()
        return max(0.0, left)

    def clear(self) -> None:
        """Wait for nobody."""
        self._expected.clear()
