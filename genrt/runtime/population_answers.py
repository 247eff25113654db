"""How populations are answered: from rows that were asked for one by one, or from those of an engine that
knows their sequences by number.

``AnsweringEngine`` asks for the rows, shares them with whoever else wants them, and says when they are
there. A population that goes on by number shares its rows with nobody, and the cache is not asked. Of one
with rows ahead, those that are missing are asked for, and all are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from genrt.engines.protocol import Engine, Finished, Populating, survived
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest, not_finite
from genrt.questions.sequences import SequenceHandle
from genrt.tokens.rows import Leaving
from genrt.tokens.sampling import BatchDraw

__all__ = ["FoundRows", "PopulationAnswers"]


class FoundRows:
    """The rows that a population asks for, those that are found, and how many are missing."""

    def __init__(self, asked: Sequence[LogprobsRequest]) -> None:
        self.asked = asked
        self.distinct = dict.fromkeys(asked)
        self.missing = len(self.distinct)
        self._rows: dict[LogprobsRequest, Tensor] = {}

    def put(self, row: LogprobsRequest, found: Tensor) -> int:
        """Add a row; return how many are missing still."""
        self._rows[row] = found
        self.missing -= 1
        return self.missing

    def of_sequences(self) -> list[Tensor]:
        """Return the row of each sequence, in order."""
        return [self._rows[row] for row in self.asked]


class PopulationAnswers:
    """The populations in progress of one engine.

    ``found`` has those whose rows are asked for one by one; ``AnsweringEngine`` puts them there.
    ``going_on`` are the others, which the engine has taken.
    ``reads`` and ``bytes_to_host`` count what was drawn, as ``EngineStatistics`` does.

    Args:
        engine: has the rows; a ``Populating`` one is asked first.
        expect: told of tokens drawn from rows that were asked for one by one, as ``Speculating`` is.
    """

    def __init__(
        self, engine: Engine, expect: Callable[[Sequence[LogprobsRequest], Tensor], None]
    ) -> None:
        self.found: dict[PopulationDraw, FoundRows] = {}
        self.reads = 0
        self.bytes_to_host = 0
        self._engine = engine
        self._populating = engine if isinstance(engine, Populating) else None
        self._expect = expect
        self.going_on: dict[Request, None] = {}
        self._wrong: list[SequenceHandle] = []  # whose rows were not finite, to be released

    def go_on(self, populations: Sequence[PopulationDraw]) -> dict[Request, None]:
        """Have the engine take those of the populations that go on by number; return these."""
        populating = self._populating
        if populating is None:
            return {}
        going_on = [each for each in populations if each.origins]
        taken: dict[Request, None] = {}
        # Of two that go on alike, each would have its rows computed for itself: they share them.
        for each, alike in zip(going_on, _times(going_on), strict=True):
            if alike == 1 and populating.go_on(each):
                taken[each] = self.going_on[each] = None
        return taken

    def give_up(self, requests: Iterable[Request]) -> list[Request]:
        """Forget these; return those that the engine has to forget."""
        return [each for each in requests if self.going_on.pop(each, self) is None]

    def clear(self) -> None:
        """Forget everything that is in progress."""
        self.found.clear()
        self.going_on.clear()
        self._wrong.clear()

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the engine forget sequences that it knows by number."""
        if self._populating is not None:
            self._populating.release(asked)

    def ready(self) -> list[Finished]:
        """Return the ends of populations that lack no row."""
        whole = [each for each, found in self.found.items() if not found.missing]
        return [self.answered(each) for each in whole]

    def answered(self, population: PopulationDraw) -> Finished:
        """Return the end of a population whose rows were asked for one by one, and are there."""
        found = self.found.pop(population)
        try:
            rows = found.of_sequences()
            whole = population.draw(rows)
            on_host = Leaving(whole)
            # Before anything waits for the tokens.
            self._expect(population.rows, whole[:, 0])
            draws = self._arrived(population, on_host)
        except Exception as error:
            return Finished(population, error=survived(error))
        if self._populating is not None:
            self._populating.settle(population)
        return Finished(population, draws)

    def ended(self, ends: Sequence[Finished]) -> list[Finished]:
        """Return a step's ends, with draws in place of the rows of populations."""
        drawn = self.drawn(ends)
        wrong, self._wrong = self._wrong, []
        if wrong:
            self.release(wrong)
        return drawn

    def drawn(self, ends: Sequence[Finished]) -> list[Finished]:
        """Return some of the ends of a step that goes on; ``ended`` still has to be called after it."""
        return [self._drawn(end) for end in ends]

    def _drawn(self, end: Finished) -> Finished:
        population, populating = end.request, self._populating
        if populating is None or not isinstance(population, PopulationDraw):
            return end
        self.going_on.pop(population, None)
        if end.error is not None:
            return end
        try:
            draws = self._arrived(population, cast("Leaving", end.result))
        except Exception as error:
            return Finished(population, error=survived(error))
        if np.isnan(draws.log_mass.numpy()).any():
            self._wrong.append(population.handle)
            return Finished(population, error=not_finite())
        return Finished(population, draws)

    def _arrived(self, population: PopulationDraw, on_host: Leaving) -> BatchDraw:
        """Return draws, once they are on the host."""
        found = on_host.arrived().numpy()
        self.reads += len(population)
        if self._engine.device.type != "cpu":
            self.bytes_to_host += found.nbytes
        token_ids = torch.from_numpy(found[:, 0].astype(np.int64))
        numbers = torch.from_numpy(found[:, 1:].T.astype(np.float32))
        return BatchDraw.of((token_ids, *numbers), population.weights_version)


def _times(populations: Sequence[PopulationDraw]) -> list[int]:
    """Return how many of these go on from the same sequences by the same tokens as each of them."""
    if len(populations) == 1:
        return [1]
    ways = [
        (origins.handles, origins.numbers.tobytes(), each.contexts.last_tokens.tobytes())
        for each in populations
        if (origins := each.origins) is not None
    ]
    times = Counter(ways)
    return [times[way] for way in ways]
