"""The record of a simulation: its events, and the first violation of a rule."""

from __future__ import annotations

from typing import NoReturn


class Violation(BaseException):
    """A rule was broken. It is not an ``Exception``, so that the runtime does not take it for an engine's
    failure."""


class Record:
    """The events of one simulation, in order; ``violation`` is the first violation or ``None``."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.violation: Violation | None = None

    def add(self, *event: object) -> None:
        """Append an event: its name and its subjects."""
        self.events.append(event)

    def violated(self, message: str) -> NoReturn:
        """Raise a Violation. The first one is stored, because a caller may catch the exception."""
        violation = Violation(message)
        self.violation = self.violation or violation
        raise violation

    def lines(self, start: int = 0) -> tuple[str, ...]:
        """Return the events from ``start`` on, as text."""
        return tuple(" ".join(map(str, event)) for event in self.events[start:])
