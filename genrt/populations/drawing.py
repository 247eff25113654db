"""One draw after the sequences of a population, as they were when it was asked: its questions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from genrt.errors import GenrtError, NotFinite, OutOfMemory, UnknownAdapter
from genrt.numbers import check_timeout
from genrt.populations.home import Home
from genrt.questions.contexts import Adapter
from genrt.questions.masks import Masks
from genrt.questions.origins import Asked, Origins
from genrt.questions.population_draws import PopulationDraw, population_draw
from genrt.questions.rows_ahead import Draft, RowsAhead
from genrt.questions.sequences import Contexts
from genrt.runtime.ask import seconds_left, within
from genrt.runtime.together import Ending
from genrt.tokens.sampling import BatchDraw

__all__ = ["Drawing", "rows_ahead"]

Ask: TypeAlias = Callable[..., Coroutine[Any, Any, list[Any]]]
"""Asks these requests, within ``timeout`` seconds, as ``Asker.ask`` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A draw after the sequences at ``places`` of ``count``.

    Attributes:
        adapter: a name.
        origins: where all sequences come from, those that are not asked about too.
        drafts, known: of the sequences at these places, as ``PopulationDraw`` has them.
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
    drafts: tuple[Draft, ...] | None
    known: tuple[RowsAhead | None, ...]
    most: int

    async def drawn(
        self, ask: Ask, masks: Masks | Awaitable[Masks | None] | None, timeout: float | None
    ) -> tuple[list[BatchDraw], list[Asked]]:
        """Return the draws, in parts, and the questions of these. Raises as ``Population.draw``."""
        seconds = check_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        if not isinstance(masks, Awaitable):
            return await self._answered(ask, masks, self.drafts, self.known, timeout, until)
        if not self.home.keeps_rows:
            given = await within(seconds, masks, until=until)
            return await self._answered(
                ask, given, self.drafts, self.known, seconds_left(until), until
            )
        # The rows are computed, and kept, while the masks are awaited; then they are drawn from. The
        # question is asked at once, as any other, so it is the masks that get a task.
        drafts = ((),) * len(self.places) if self.drafts is None else self.drafts
        awaited = asyncio.ensure_future(masks)
        async with Ending([awaited]):
            found, _ = await self._answered(ask, None, drafts, self.known, timeout, until)
            given = await within(seconds, awaited, until=until)
        known = tuple(rows_ahead(found)) or self.known
        return await self._answered(
            ask, given, None, known, seconds_left(until), until, goes_on=True
        )

    async def _answered(
        self,
        ask: Ask,
        masks: Masks | None,
        drafts: tuple[Draft, ...] | None,
        known: tuple[RowsAhead | None, ...],
        timeout: float | None,
        until: float | None,
        *,
        goes_on: bool = False,
    ) -> tuple[list[Any], list[Asked]]:
        most = self.most
        failed: GenrtError | None = None
        while True:
            # It is bound to the adapter, and asked, in one go: nobody can remove that in between.
            try:
                bound = self._bound(known if goes_on else ())
            except UnknownAdapter:
                if failed is None:
                    raise
                raise failed from None  # it was there when the question was asked
            question = self._question(bound, masks, drafts, known)
            parts = [] if question is None else [*question.parts(most)]
            try:
                return await ask(parts, timeout=timeout), [part.asked for part in parts]
            except (NotFinite, OutOfMemory) as error:
                failed, largest = error, max(map(len, parts))
                if drafts is not None and any(drafts):
                    drafts = ((),) * len(drafts)  # they may be what failed; nobody asked for those
                elif isinstance(error, NotFinite) or largest == 1:
                    raise
                else:
                    # A flush out of memory is sent again in halves: so is a question that was all of one.
                    most = (largest + 1) // 2
                timeout = seconds_left(until)

    def _bound(self, known: Sequence[RowsAhead | None]) -> Adapter | None:
        """Return the adapter to ask: that of rows which are all there, and which may be gone by now; else
        the one of this name."""
        home = self.home
        if known and all(rows and rows.weights_version == home.weights_version for rows in known):
            return next(rows.adapter for rows in known if rows)
        return home.adapters.bound(self.adapter)

    def _question(
        self,
        bound: Adapter | None,
        masks: Masks | None,
        drafts: tuple[Draft, ...] | None,
        known: tuple[RowsAhead | None, ...],
    ) -> PopulationDraw | None:
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
            drafts,
            known,
        )


def rows_ahead(found: Sequence[BatchDraw]) -> list[RowsAhead]:
    """Return the rows that were told with draws, in order; none if there were none to be told."""
    return [*chain.from_iterable(each.rows_ahead for each in found)]
