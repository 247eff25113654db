"""An exact engine that keeps the sequences of populations, which go on by number, as vLLM's does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Finished
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.sequences import SequenceHandle
from genrt.tokens.rows import AsyncHostCopy

__all__ = ["KeepingEngine", "Seen"]


@dataclass(slots=True)
class Seen:
    """What the engines of all replicas have seen.

    Attributes:
        wrong: what must not be: a sequence that goes on from another one than it says.
        by_number: how many questions went on from sequences that the engine had.
        by_tokens: how many of these came as the last tokens of their sequences.
    """

    wrong: list[str] = field(default_factory=list)
    by_number: int = 0
    by_tokens: int = 0


class KeepingEngine(ExactEngine):
    """Keeps the sequences of populations, and answers those that go on from them without other rows; it
    tells of every other one before its step is over."""

    tell: Callable[[Sequence[Finished]], object] | None = None

    def __init__(self, model: NGram, seen: Seen) -> None:
        super().__init__(model)
        self._seen = seen
        self.known = WeakKeyDictionary[SequenceHandle, list[tuple[int, ...]]]()
        self._taken: dict[PopulationDraw, None] = {}

    def continue_population(self, population: PopulationDraw) -> bool:
        origins = population.origins
        if origins is None or any(each not in self.known for each in origins.handles):
            return False
        self._seen.by_tokens += population.contexts._growth is not None
        before = [each for asked in origins.handles for each in self.known[asked]]
        for number, row in zip(origins.numbers, population.rows, strict=True):
            length = len(before[number])
            if before[number] != row.token_ids[:length] or length == len(row.token_ids):
                self._seen.wrong.append(f"{row.token_ids} does not go on from {before[number]}")
        self._taken[population] = None
        return True

    def settle(self, population: PopulationDraw) -> None:
        self.known[population.handle] = [row.token_ids for row in population.rows]

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        for each in asked:
            self.known.pop(each, None)

    def step(self) -> list[Finished]:
        ends = super().step()
        taken, self._taken = self._taken, {}
        told: list[Finished] = []
        for population in taken:
            contexts = [row.token_ids for row in population.rows]
            rows = self._model.logits(contexts, population.adapter)
            end = Finished(population, AsyncHostCopy(population.draw([*rows])))
            if self.tell is not None and self._seen.by_number % 2:
                told.append(end)
            else:
                ends.append(end)
            self.settle(population)
            self._seen.by_number += 1
        if self.tell is not None and told:
            self.tell(told)
        return ends

    def cancel(self, requests: Sequence[Request]) -> None:
        kept: dict[Any, None] = self._taken
        super().cancel([each for each in requests if kept.pop(each, self) is self])
