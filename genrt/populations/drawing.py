"""One draw after the sequences of a population, as they were when it was asked: its questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from genrt.errors import GenrtError, OutOfMemory, UnknownAdapter
from genrt.numbers import check_timeout
from genrt.populations.home import Home
from genrt.questions.contexts import Adapter
from genrt.questions.masks import Masks
from genrt.questions.origins import Asked, Origins
from genrt.questions.population_draws import PopulationDraw, population_draw
from genrt.questions.sequences import Contexts
from genrt.runtime.ask import seconds_left
from genrt.tokens.sampling import BatchDraw

__all__ = ["Drawing"]

Ask: TypeAlias = Callable[..., Coroutine[Any, Any, list[Any]]]
"""Asks these requests, within ``timeout`` seconds, as ``Asker.ask`` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A draw after the sequences at ``places`` of ``count``.

    Attributes:
        adapter: a name.
        origins: where all sequences come from, those that are not asked about too.
        most: how many of them one request asks about.
    """

    home: Home
    adapter: str | None
    places: np.ndarray
    count: int
    contexts: Contexts
    origins: Origins
    temperature: float
    seed: int | None
    most: int

    async def drawn(
        self, ask: Ask, masks: Masks | None, timeout: float | None
    ) -> tuple[list[BatchDraw], list[Asked]]:
        """Return the draws, in parts, and the questions of these. Raises as ``Population.draw``."""
        seconds = check_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        most = self.most
        failed: GenrtError | None = None
        while True:
            # It is bound to the adapter, and asked, in one go: nobody can remove that in between.
            try:
                bound = self.home.adapters.bound(self.adapter)
            except UnknownAdapter:
                if failed is None:
                    raise
                raise failed from None  # it was there when the question was asked
            question = self._question(bound, masks)
            parts = [] if question is None else [*question.parts(most)]
            try:
                return await ask(parts, timeout=timeout), [part.asked for part in parts]
            except OutOfMemory as error:
                failed, largest = error, max(map(len, parts))
                if largest == 1:
                    raise
                # A flush out of memory is sent again in halves: so is a question that was all of one.
                most = (largest + 1) // 2
                timeout = seconds_left(until)

    def _question(self, bound: Adapter | None, masks: Masks | None) -> PopulationDraw | None:
        home, places, whole = self.home, self.places, self.origins
        origins = whole if len(places) == self.count else whole.take(places).needed()
        return population_draw(
            self.contexts,
            bound,
            places,
            home.nonces,
            masks,
            self.count,
            home.limits.vocab_size,
            self.temperature,
            self.seed,
            origins if origins.go_on(self.contexts.lengths) else None,
            origins.asked or whole.asked,
        )
