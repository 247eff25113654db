"""The record of a simulation: what happened in it, and the first thing that was wrong."""

from __future__ import annotations

from typing import NoReturn


class Violation(BaseException):
    """A rule was broken. No ``Exception``: nothing of the runtime may take it for an engine's failure."""


class Record:
    """The events of one simulation, in order; ``violation`` is the first, if there was one."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.violation: Violation | None = None

    def add(self, *event: object) -> None:
        """Append an event: what happened, and to whom."""
        self.events.append(event)

    def violated(self, message: str) -> NoReturn:
        """Raise a Violation. The first is kept, as whoever is called here may catch what this raises."""
        violation = Violation(message)
        self.violation = self.violation or violation
        raise violation

    def lines(self, start: int = 0) -> tuple[str, ...]:
        """Return the events from the given one on, as text."""
        return tuple(" ".join(map(str, event)) for event in self.events[start:])
