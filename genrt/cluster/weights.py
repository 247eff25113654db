"""New weights for replicas: written to files first, then given to all of them at once.

Rules:
    No replica is told before all tensors are there: what fails until then has changed nothing.
    Once they are told, none is asked until it has said that it has them all. One that fails is started
    again, and given these before it is asked.
    The files stay until there are others, or the engine is closed: for replicas that are started later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from genrt.engines.weights import (
    SLEEPING_PARTS,
    KeptWeights,
    Layout,
    NamedTensors,
    SavedWeights,
    SleepingPart,
)
from genrt.errors import EngineFailed, EngineUnsupported

__all__ = ["ReplicaWeights"]


class Sharing(Protocol):
    """An engine with replicas, as its weights need it."""

    sleep_refused: str | None

    @property
    def is_busy(self) -> bool:
        """True if something is in progress."""

    def all_open(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Return what every replica that is open returns, errors among them."""
        ...

    def put_off(self) -> None:
        """Have the replicas that are being opened be opened later."""

    def give_up(self, number: int, reason: str) -> None:
        """Do without a replica until it has been started again."""

    def awoke(self) -> None:
        """Start the replicas that died in the sleep."""

    def anyone(self, name: str) -> Any:
        """Return what a replica returns, or raise what it raises."""
        ...

    def renew(self) -> None:
        """Give every replica the present weights."""


class ReplicaWeights:
    """The weights of an engine with replicas, which can sleep where their engines can.

    Attributes:
        version: how often they were replaced.
        files: the present ones, unless they are those that the replicas were opened with.
        asleep: the parts of the replicas' memory that are given back.
    """

    def __init__(self, engine: Sharing) -> None:
        self.version = 0
        self.files: tuple[str, ...] = ()
        self.asleep: frozenset[SleepingPart] = frozenset()
        self._engine = engine
        self._kept = KeptWeights()
        self._coming: SavedWeights | None = None

    def layout(self) -> Layout:
        """Return what one of the replicas' engines has."""
        return cast("Layout", self._engine.anyone("layout"))

    def checkpoint(self) -> list[Path]:
        """Return the files that one of the replicas was opened with."""
        return cast("list[Path]", self._engine.anyone("checkpoint"))

    def begin(self) -> None:
        """Have a place for new weights. Raises EngineFailed while something is in progress."""
        if self._engine.is_busy:
            raise EngineFailed("not all questions have ended yet")
        self._drop()
        self._coming = self._kept.begin()

    def load(self, tensors: NamedTensors) -> None:
        """Write some to files. Raises InvalidWeights if there is no room."""
        if self._coming is not None:
            self._coming.add(tensors)

    def finish(self) -> None:
        """Give them to all replicas; raises as ``ReplicaEngine.renew``."""
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        self.version += 1
        self.files = tuple(map(str, coming.files()))
        self._engine.renew()
        self._kept.replace(self.version, coming)

    def check_sleep(self) -> None:
        """Raise EngineUnsupported unless the replicas' engines can sleep."""
        if (reason := self._engine.sleep_refused) is not None:
            raise EngineUnsupported(f"the engines of these replicas cannot sleep: {reason}")

    def sleep(self, level: int) -> int:
        """Have all of them sleep; return how many bytes became free together. One that dies from now on
        is started again once all is awake."""
        self.asleep = SLEEPING_PARTS
        self._engine.put_off()
        found = self._engine.all_open("sleep", level)
        refused = [each for each in found.values() if isinstance(each, Exception)]
        if refused:
            self.wake_up(SLEEPING_PARTS)
            raise refused[0]
        return sum(found.values())

    def wake_up(self, parts: frozenset[SleepingPart]) -> None:
        """Have these parts of all of them awake. One that does not wake up is given up, unless none does:
        then this raises why, and all sleep on."""
        before = self.asleep
        self.asleep -= parts
        found = self._engine.all_open("wake_up", parts)
        refused = {n: each for n, each in found.items() if isinstance(each, Exception)}
        if refused and len(refused) == len(found):
            self.asleep = before
            raise next(iter(refused.values()))
        for number, reason in refused.items():
            self._engine.give_up(number, str(reason))
        self._engine.awoke()

    def close(self) -> None:
        """Remove the files."""
        self._drop()
        self._kept.replace(self.version, None)

    def _drop(self) -> None:
        if self._coming is not None:
            self._coming.drop()
            self._coming = None
