"""Batches of contexts that callers give anew in every step, found again: ``AsyncLM.batch_draw``.

A caller who appends a token to each context and draws again holds no population, but asks as one does.
The last batches are remembered, so that the next one is asked by the numbers of the sequences that it
goes on from, as a population's draw is.

Rules:
    A key proposes which context a new one goes on from; their tokens decide.
    Lists that hold the very objects of the last time are compared, not read: a quarter of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from genrt.populations.drawing import Ask, Drawing
from genrt.populations.home import Home
from genrt.questions.contexts import Limits
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

MOST_BYTES = 2**27
"""What the contexts of remembered batches take at most."""

HELD_BYTES = 2**24
"""The largest contexts of which the lists are held too, which take twice as much."""

PROBES = 8
"""So many objects of a list are looked at before all of them are."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Contexts in order, each with a key, uint64 ``[n]``; and the sequences that they go on from.

    Attributes:
        held: the contexts as a table that may grow, and as the lists that they came as: whoever goes on
            takes both. Empty after that, and for contexts that came otherwise.
        known: where contexts that go on from these come from, once these have been answered.
        numbers: which context has a key.
    """

    adapter: str | None
    contexts: Contexts
    keys: np.ndarray
    origins: Origins
    held: list[tuple[Sequences, list[list[int]]]]
    known: Origins = field(init=False)
    numbers: dict[int, int] = field(init=False)

    def take(self) -> tuple[Sequences, list[list[int]]] | None:
        """Return what is held to one caller alone, of any thread."""
        try:
            return self.held.pop()
        except IndexError:
            return None

    def answered(self, asked: Sequence[Asked], places: np.ndarray) -> None:
        """Note the questions, which were about the contexts at ``places``, in that order."""
        numbers = np.empty_like(places)
        numbers[places] = np.arange(len(places))
        self.known = Origins((*asked,), numbers, self.contexts.lengths)
        self.numbers = dict(zip(self.keys.tolist(), range(len(self.keys)), strict=True))


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
        batch = self._grown(contexts, adapter) or self._begun(contexts, adapter)
        whole, count = batch.contexts, len(batch.contexts)
        check_length(home.limits, int(whole.lengths.max(initial=0)))
        packed = packed_masks(masks, count, home.limits.vocab_size, copies=True)
        words = None if packed is None else packed.view(np.int32)
        places, origins = np.arange(count), batch.origins
        if len(origins.asked) > 1:  # those of one question go on where it was answered
            places = np.argsort(origins.numbers, kind="stable")
            whole, origins = whole.part(places), origins.take(places)
            words = None if words is None else words[places]
        drawing = Drawing(
            home=home,
            adapter=adapter,
            places=places,
            count=count,
            contexts=whole,
            origins=origins,
            temperature=temperature,
            seed=seed,
            drafts=None,
            known=(),
            most=home.most_of(count),
        )
        found, answered = await drawing.drawn(ask, words, timeout)
        if answered:
            batch.answered(answered, places)
            self._remember(batch)
        return joined_draws(found, places, count)

    def _remember(self, batch: _Batch) -> None:
        last = (batch, *self._last)[:MOST_BATCHES]
        kept = np.cumsum([each.contexts.table.nbytes for each in last])
        self._last = last[: int((kept <= MOST_BYTES).sum())]

    def _begun(self, contexts: Sequence[TokenIds], adapter: str | None) -> _Batch:
        """Return a batch of contexts that are read. Raises InvalidRequest for bad ones."""
        sequences = Sequences.of(self._home.limits, contexts)
        whole = sequences.contexts(np.arange(len(sequences)))
        table, ends = whole.table, whole.lengths - 1
        factors = _factors(table.shape[1])
        keys = np.einsum("nt,t->n", table, factors, dtype=np.uint64)
        before = keys - whole.last_tokens.astype(np.uint64) * factors[ends]
        lists = [each.copy() for each in contexts if type(each) is list]
        is_held = len(lists) == len(whole) and table.nbytes <= HELD_BYTES
        origins = self._origins(whole, before, adapter)
        return _Batch(adapter, whole, keys, origins, [(sequences, lists)] if is_held else [])

    def _origins(self, contexts: Contexts, before: np.ndarray, adapter: str | None) -> Origins:
        """Return where contexts come from that have these keys without their last token, if that is one
        batch."""
        first = int(before[0]) if len(before) else 0
        for batch in self._last:
            if batch.adapter == adapter and first in batch.numbers:
                numbers = _numbers(batch, before)
                if numbers is not None and _go_on(batch.contexts, contexts, numbers):
                    return batch.known.take(numbers)
        return Origins.none(len(contexts))

    def _grown(self, contexts: Sequence[TokenIds], adapter: str | None) -> _Batch | None:
        """Return a batch of the lists of an earlier one, each with one token more; ``None`` where they
        have to be read, as what is wrong with them has."""
        for batch in self._last:
            if batch.adapter == adapter and len(batch.contexts) == len(contexts):
                held = batch.take()
                tokens = None if held is None else _new_tokens(held[1], contexts, self._home.limits)
                if held is None:
                    continue
                if tokens is None:
                    batch.held.append(held)
                    continue
                ends = batch.contexts.lengths
                factors = _factors(int(ends.max()) + 1)
                keys = batch.keys + tokens.astype(np.uint64) * factors[ends]
                held[0].append(tokens)
                whole = held[0].contexts(np.arange(len(tokens)))
                return _Batch(adapter, whole, keys, batch.known, [held])
        return None


def _new_tokens(
    lists: list[list[int]], contexts: Sequence[TokenIds], limits: Limits
) -> np.ndarray | None:
    """Add to each list the last token of its context, int64 ``[n]``, and return these, if that makes all
    of them equal; else change none. No number but the last is touched."""
    longer = 0
    for before, context in zip(lists, contexts, strict=True):
        if type(context) is not list or len(context) != len(before) + 1:
            break
        token, step = context[-1], len(before) // PROBES or 1
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            break
        # Equal objects that are others would be read one by one: that takes longer than to read them.
        if any(a is not b for a, b in zip(before[::step], context[::step], strict=False)):
            break
        before.append(token)
        longer += 1
        if before != context:
            break
    else:
        return np.array([each[-1] for each in lists])
    for each in lists[:longer]:
        each.pop()
    return None


def _numbers(batch: _Batch, before: np.ndarray) -> np.ndarray | None:
    """Return which of a batch's contexts have these keys, the one at the same place if it has; ``None``
    unless all are there."""
    given = (batch.numbers.get(key, -1) for key in before.tolist())
    found = np.fromiter(given, np.int64, len(before))
    if (found < 0).any():
        return None
    both = min(len(before), len(batch.keys))
    found[:both] = np.where(batch.keys[:both] == before[:both], np.arange(both), found[:both])
    return found


def _go_on(earlier: Contexts, contexts: Contexts, numbers: np.ndarray) -> bool:
    """Return whether each context is the earlier one of that number and one token more."""
    ends = contexts.lengths - 1
    if not np.array_equal(earlier.lengths[numbers], ends):
        return False
    width = int(ends.max(initial=0))
    differ = contexts.table[:, :width] != earlier.table[numbers, :width]
    differ &= np.arange(width) < ends[:, None]
    return not differ.any()


def _factors(count: int) -> np.ndarray:
    """Return what a token counts in a key, by its position: odd, uint64 ``[count]``."""
    return np.random.default_rng(0).integers(0, 2**64, count, np.uint64) | np.uint64(1)
