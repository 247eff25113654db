"""The health of one replica: what it may be asked for, and when it is given up, as a clock-free machine.

::

    RESTARTING ── opened ──▶ STALE ── renewed ──▶ HEALTHY ◀── answers ──▶ SUSPECT
        ▲                      ▲                     │                       │
        │                      └──── outdated ───────┴───────────────────────┤
        └───── restarted ───── DEAD ◀────── died, silent, failing ───────────┘
                                └── budget spent ──▶ RETIRED

Rules:
    Only HEALTHY and SUSPECT replicas are asked anything: these alone have the present settings.
    Probes that go unanswered and work that fails are two streaks: a wedged engine may answer probes.
    Either makes it SUSPECT at once, and DEAD at its bound; a right answer ends the streak of failures.
    A replica is restarted within a budget, which fills up again while it serves; then it is RETIRED.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from genrt.numbers import check_float, check_int

__all__ = ["Health", "ReplicaLimits", "ReplicaState"]


class ReplicaState(Enum):
    """The states of a replica."""

    RESTARTING = "restarting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The bounds of what a replica may do.

    Attributes:
        probe_seconds: how often each is probed.
        most_silent: so many probes in a row unanswered are its death.
        stall_seconds: how long a step may take; one that takes longer is its death.
        most_failures: so many failures of its work in a row are its death.
        open_seconds: how long it may take to open, or to be given weights and adapters.
        most_restarts: how often it is restarted at most, until it has served for a while.
        refill_seconds: how long it serves until it may be restarted once more.

    Raises:
        InvalidRequest: one is out of range.
    """

    probe_seconds: float = 1.0
    most_silent: int = 10
    stall_seconds: float = 600.0
    most_failures: int = 3
    open_seconds: float = 3600.0
    most_restarts: int = 5
    refill_seconds: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, int):
                check_int(field.name, value, 0 if field.name == "most_restarts" else 1)
            else:
                check_float(field.name, value, 0.001, math.inf)


class Health:
    """The health of one replica. Each method is told what happened, and when in seconds of any clock.

    Args:
        changed: called after each change of ``state``.
    """

    def __init__(
        self, limits: ReplicaLimits, now: float = 0.0, changed: Callable[[], object] = lambda: None
    ) -> None:
        self._changed = changed
        self._state = ReplicaState.RESTARTING
        self.restarts = 0
        self.settings = -1  # which settings it has: weights and adapters
        self._limits = limits
        self._since = now  # of what it is waited for: to open, or to be renewed
        self._worked = now
        self._silent = 0
        self._failures = 0
        self._budget = float(limits.most_restarts)
        self._served = now  # until when the budget was filled up

    @property
    def state(self) -> ReplicaState:
        """The state, which says what it may be asked for."""
        return self._state

    @state.setter
    def state(self, state: ReplicaState) -> None:
        if state is not self._state:
            self._state = state
            self._changed()

    @property
    def serves(self) -> bool:
        """True if it may be asked."""
        return self.state in (ReplicaState.HEALTHY, ReplicaState.SUSPECT)

    @property
    def lives(self) -> bool:
        """True if there is a process, or one is being started."""
        return self.state not in (ReplicaState.DEAD, ReplicaState.RETIRED)

    @property
    def is_open(self) -> bool:
        """True if its engine is open."""
        return self.lives and self.state is not ReplicaState.RESTARTING

    def opened(self, now: float) -> None:
        """Note that its engine is open: it lacks weights and adapters still."""
        if self.state is ReplicaState.RESTARTING:
            self.state = ReplicaState.STALE
            self._since = now

    def renewed(self, settings: int, current: int, now: float) -> None:
        """Note which settings it has; it serves if these are the current ones."""
        if not self.lives:
            return
        self.settings, self._since = settings, now
        if settings == current:
            if not self.serves:
                self.state, self._served, self._worked = ReplicaState.HEALTHY, now, now
        else:
            self.state = ReplicaState.STALE

    def outdated(self, now: float) -> None:
        """Note that there are new settings."""
        if self.serves:
            self.state, self._since = ReplicaState.STALE, now

    def probed(self) -> None:
        """Note that it is probed once more, before it has answered the last probe."""
        self._silent += 1
        if self._silent >= self._limits.most_silent:
            self.died()
        elif self.state is ReplicaState.HEALTHY:
            self.state = ReplicaState.SUSPECT

    def answered_probe(self) -> None:
        """Note that it has answered a probe."""
        self._silent = 0
        self._recover()

    def worked(self, now: float) -> None:
        """Note that its engine goes on: a step has ended, or it had nothing to do."""
        self._worked = now

    def succeeded(self) -> None:
        """Note a right answer."""
        self._failures = 0
        self._recover()

    def failed(self) -> None:
        """Note that its engine failed at its work."""
        self._failures += 1
        if self._failures >= self._limits.most_failures:
            self.died()
        elif self.state is ReplicaState.HEALTHY:
            self.state = ReplicaState.SUSPECT

    def tick(self, now: float, *, busy: bool) -> None:
        """Let time pass; ``busy`` is a replica that has something to answer."""
        limits = self._limits
        if self.serves:
            filled = (now - self._served) / limits.refill_seconds
            self._budget = min(float(limits.most_restarts), self._budget + filled)
            self._served = now
            if busy and now - self._worked > limits.stall_seconds:
                self.died()
        elif self.lives and now - self._since > limits.open_seconds:
            self.died()

    def died(self) -> None:
        """Note its death, by itself or because it is given up."""
        if self.lives:
            self.state = ReplicaState.DEAD

    def restart(self, now: float) -> bool:
        """Return whether a dead replica is started again; it is retired otherwise."""
        if self.state is not ReplicaState.DEAD:
            return False
        if self._budget < 1.0:
            self.state = ReplicaState.RETIRED
            return False
        self._budget -= 1.0
        self.restarts += 1
        self.state, self.settings = ReplicaState.RESTARTING, -1
        self._silent = self._failures = 0
        self._since = self._worked = now
        return True

    def put_off(self) -> bool:
        """Give up an opening, which does not count as a restart then; return whether there was one."""
        if is_opening := self.state is ReplicaState.RESTARTING:
            self._budget += 1.0
            self.restarts -= 1
            self.died()
        return is_opening

    def _recover(self) -> None:
        if self.state is ReplicaState.SUSPECT and not self._silent and not self._failures:
            self.state = ReplicaState.HEALTHY

    def __repr__(self) -> str:
        return f"Health({self.state.value}, settings {self.settings}, {self.restarts} restarts)"
