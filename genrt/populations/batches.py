"""Batches of contexts that callers give anew in every step, found again: ``AsyncLM.batch_draw``.

A caller who appends a token to each context and draws again holds no population, but asks as one does.
The last batches are remembered, so that the next one is asked by the numbers of the sequences that it
goes on from, as a population's draw is.

Rule:
    A key proposes which context a new one goes on from; their tokens decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from genrt.populations.drawing import Ask, Drawing
from genrt.populations.home import Home
from genrt.questions.masks import Masks, packed_masks
from genrt.questions.origins import Asked, Origins
from genrt.questions.population_draws import joined_draws
from genrt.questions.rows import check_length
from genrt.questions.sequences import Contexts, Sequences
from genrt.questions.token_ids import TokenIds
from genrt.tokens.sampling import BatchDraw

__all__ = ["Batches"]

MOST_BATCHES = 16
"""How many batches are remembered: the last ones."""

MOST_BYTES = 2**26
"""What the contexts of remembered batches take at most."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """A batch that was drawn after: its contexts, their keys, and the questions they are known by."""

    contexts: Contexts
    keys: np.ndarray
    numbers: dict[int, int]
    asked: tuple[Asked, ...]
    adapter: str | None


class Batches:
    """The batches that one runtime has drawn after; any thread and loop may draw."""

    def __init__(self, home: Home) -> None:
        self._home = home
        # The newest first. Exchanged as a whole, so that no lock is needed: of two batches that are
        # answered at once, one may be forgotten.
        self._last: tuple[_Batch, ...] = ()

    async def draw(
        self,
        ask: Ask,
        contexts: Sequence[TokenIds],
        masks: Masks | None,
        temperature: float,
        seed: int | None,
        adapter: str | None,
        timeout: float | None,
    ) -> BatchDraw:
        """Return a draw after each context. Raises as ``AsyncLM.batch_draw``."""
        home = self._home
        home.adapters.bound(adapter)
        given = Sequences.of(home.limits, contexts)
        check_length(home.limits, int(given.lengths.max(initial=0)))
        count = len(given)
        packed = packed_masks(masks, count, home.limits.vocab_size, copies=True)
        whole = given.contexts(np.arange(count))
        keys, before = _keys(whole)
        origins = self._origins(whole, before, adapter)
        # Those of one question are put together: each part goes on where it is.
        places = (
            np.argsort(origins.numbers, kind="stable") if len(origins.asked) > 1 else whole.places
        )
        drawing = Drawing(
            home=home,
            adapter=adapter,
            places=places,
            count=count,
            contexts=given.contexts(places),
            origins=origins.take(places),
            temperature=temperature,
            seed=seed,
            drafts=None,
            known=(),
            most=home.most_of(count),
        )
        words = None if packed is None else packed.view(np.int32)
        if words is not None and places is not whole.places:
            words = words[places]
        found, answered = await drawing.drawn(ask, words, timeout)
        if answered:
            self._remember(drawing.contexts, keys[places], answered, adapter)
        return joined_draws(found, places, count)

    def _origins(self, contexts: Contexts, before: np.ndarray, adapter: str | None) -> Origins:
        """Return where these come from, if they are one batch's, each a token longer."""
        first = int(before[0]) if len(before) else 0
        for batch in self._last:
            if batch.adapter == adapter and first in batch.numbers:
                numbers = _numbers(batch, before)
                if numbers is not None and _go_on(batch.contexts, contexts, numbers):
                    return Origins(batch.asked, numbers, batch.contexts.lengths[numbers])
        return Origins.none(len(contexts))

    def _remember(
        self, contexts: Contexts, keys: np.ndarray, asked: Sequence[Asked], adapter: str | None
    ) -> None:
        numbers = dict(zip(keys.tolist(), range(len(keys)), strict=True))
        last = (_Batch(contexts, keys, numbers, (*asked,), adapter), *self._last)[:MOST_BATCHES]
        kept = np.cumsum([each.contexts.table.nbytes for each in last])
        self._last = last[: max(1, int((kept <= MOST_BYTES).sum()))]


def _keys(contexts: Contexts) -> tuple[np.ndarray, np.ndarray]:
    """Return a number for each context, and one for the same without its last token: uint64 ``[n]``."""
    table, ends = contexts.table, contexts.lengths - 1
    factors = np.random.default_rng(0).integers(0, 2**64, table.shape[1], np.uint64) | np.uint64(1)
    whole = np.einsum("nt,t->n", table, factors, dtype=np.uint64)[contexts.places]
    return whole, whole - contexts.last_tokens.astype(np.uint64) * factors[ends]


def _numbers(batch: _Batch, before: np.ndarray) -> np.ndarray | None:
    """Return which of a batch's contexts have these keys, the one at the same place if it has; ``None``
    unless all are there."""
    found = np.fromiter(
        (batch.numbers.get(key, -1) for key in before.tolist()), np.int64, len(before)
    )
    if (found < 0).any():
        return None
    both = min(len(before), len(batch.keys))
    places = np.arange(both)
    found[:both] = np.where(batch.keys[:both] == before[:both], places, found[:both])
    return found


def _go_on(earlier: Contexts, contexts: Contexts, numbers: np.ndarray) -> bool:
    """Return whether each context is the earlier one of that number and one token more."""
    if (earlier.lengths[numbers] + 1 != contexts.lengths).any():
        return False
    now, before = contexts.table[contexts.places], earlier.table[earlier.places[numbers]]
    width = min(now.shape[1], before.shape[1])  # beyond their ends both are 0
    now[np.arange(len(now)), contexts.lengths - 1] = 0
    return np.array_equal(now[:, :width], before[:, :width])
