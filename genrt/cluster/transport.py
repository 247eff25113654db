"""The way of messages to replicas and back, whatever they are: processes of this host, or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Came", "Gone", "Pulsed", "Transport"]


@dataclass(frozen=True, slots=True)
class Came:
    """A message of a replica: its kind, and what goes with that."""

    number: int
    life: int
    message: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Pulsed:
    """The answer to a probe: how many rounds the replica's engine has gone."""

    number: int
    life: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The end of a replica, by itself."""

    number: int
    life: int
    reason: str


class Transport(Protocol):
    """Starts replicas, by number and life, and carries messages. One thread calls all of it except
    ``interrupt``."""

    def start(self, number: int, life: int) -> None:
        """Start a replica, which first tells that it is ``opened``, or ``refused``. Do not raise."""

    def send(self, number: int, message: Sequence[Any]) -> None:
        """Send a message; lose it if the replica is gone. Do not wait, and do not raise."""

    def probe(self, number: int) -> None:
        """Ask a replica whether it goes on. Do not wait, and do not raise."""

    def kill(self, number: int) -> None:
        """End a replica at once; nothing of it comes any more."""

    def wait(self, seconds: float) -> list[Came | Pulsed | Gone]:
        """Return what has come, once anything has, or ``interrupt`` was called, or so many seconds have
        passed."""

    def interrupt(self) -> None:
        """End the present wait, or the next; from any thread, taking no lock."""

    def close(self) -> None:
        """End all replicas. Idempotent."""
