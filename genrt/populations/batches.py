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
from itertools import chain

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
"""What remembered batches take at most, with the lists that are held."""

HELD_BYTES = 2**25
"""What the lists of one batch take at most, or they are not held."""

MOST_ROOM = 8
"""Contexts in a table of more than so many places a token are not remembered: one is far longer than the
rest, and to look at the table would take longer than to find each context."""

LIST_BYTES = 80
"""What a list takes besides its numbers."""

PROBES = 8
"""So many objects of a list are looked at before all of them are."""


@dataclass(slots=True, eq=False)
class _Held:
    """Contexts as a table that may grow, and as the lists that they came as.

    Attributes:
        are_ints: the lists are known to hold ints alone. An id of another type, as a tensor, may become
            another number where it is.
    """

    table: Sequences
    lists: list[list[int]]
    are_ints: bool = False

    @property
    def nbytes(self) -> int:
        """The memory that the lists take, about."""
        return 8 * int(self.table.lengths.sum()) + LIST_BYTES * len(self.lists)

    def grown(self, contexts: Sequence[TokenIds], limits: Limits) -> np.ndarray | None:
        """Add the last token of each context to table and lists, and return these tokens, int64 ``[n]``,
        if the contexts are the lists and one token more each; else change none."""
        tokens = _new_tokens(self.lists, contexts, limits)
        if tokens is None:
            return None
        self.are_ints = self.are_ints or {int}.issuperset(map(type, chain(*self.lists)))
        if not self.are_ints:
            _take_back(self.lists)
            return None
        self.table.append(tokens)
        return tokens


@dataclass(slots=True, eq=False)
class _Batch:
    """Contexts in order, each with a key, uint64 ``[n]``; and the sequences that they go on from.

    Attributes:
        keys: none if the batch is not to be remembered.
        held: whoever goes on takes it. Empty after that, and for contexts that came otherwise.
        known: where contexts that go on from these come from, once these have been answered.
        order: the places of the keys from the smallest to the largest, once they are looked for.
    """

    adapter: str | None
    contexts: Contexts
    keys: np.ndarray
    origins: Origins
    held: list[_Held]
    known: Origins = field(init=False)
    order: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """The memory that it takes, about; contexts that share a table count as if they did not."""
        held = sum(each.nbytes for each in [*self.held])
        return self.contexts.table.nbytes + 48 * len(self.keys) + held

    def take(self) -> _Held | None:
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

    def numbers(self, keys: np.ndarray) -> np.ndarray | None:
        """Return which contexts have these keys, each the one at the same place if it has; ``None``
        unless all are there."""
        order = self.order
        if order is None:
            self.order = order = np.argsort(self.keys, kind="stable")
        at = np.searchsorted(self.keys, keys, sorter=order)
        found: np.ndarray = order[np.minimum(at, len(order) - 1)]
        if (self.keys[found] != keys).any():
            return None
        both = min(len(keys), len(order))
        found[:both] = np.where(self.keys[:both] == keys[:both], np.arange(both), found[:both])
        return found

    def equals(self, other: _Batch) -> bool:
        """Return whether these are the contexts of another batch, in the same order."""
        if self.adapter != other.adapter or not np.array_equal(self.keys, other.keys):
            return False
        return _are_equal(self.contexts, other.contexts, other.contexts.lengths)


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
            most=home.most_of(count),
        )
        found, answered = await drawing.drawn(ask, words, timeout)
        if answered and len(batch.keys):
            batch.answered(answered, places)
            self._remember(batch)
        return joined_draws(found, places, count)

    def _remember(self, batch: _Batch) -> None:
        last = (batch, *self._last)[:MOST_BATCHES]
        for each in last[1:]:
            # What goes on from either goes on from the last one, and shares its rows with what else does.
            if each.equals(batch):
                each.known = batch.known
        kept = np.cumsum([each.nbytes for each in last])
        self._last = last[: int((kept <= MOST_BYTES).sum())]

    def _begun(self, contexts: Sequence[TokenIds], adapter: str | None) -> _Batch:
        """Return a batch of contexts that are read. Raises InvalidRequest for bad ones."""
        lists: list[list[int]] = []
        if _may_be_held(contexts):
            # Copied before they are read: another thread may append to them.
            contexts = [each.copy() if type(each) is list else each for each in contexts]
            lists = [each for each in contexts if type(each) is list]
        sequences = Sequences.of(self._home.limits, contexts)
        whole = sequences.contexts(np.arange(len(sequences)))
        table, ends = whole.table, whole.lengths - 1
        if table.nbytes > MOST_BYTES or table.size > MOST_ROOM * max(
            int(whole.lengths.sum()), 2**16
        ):
            return _Batch(adapter, whole, np.empty(0, np.uint64), Origins.none(len(whole)), [])
        factors = _factors(table.shape[1])
        keys = np.einsum("nt,t->n", table, factors, dtype=np.uint64) + factors.cumsum()[ends]
        before = keys - (whole.last_tokens.astype(np.uint64) + np.uint64(1)) * factors[ends]
        held = _Held(sequences, lists)
        is_held = len(lists) == len(whole) and held.nbytes <= HELD_BYTES
        origins = self._origins(whole, before, adapter)
        return _Batch(adapter, whole, keys, origins, [held] if is_held else [])

    def _origins(self, contexts: Contexts, before: np.ndarray, adapter: str | None) -> Origins:
        """Return where contexts come from that have these keys without their last token, if that is one
        batch."""
        for batch in self._last if len(before) else ():
            if batch.adapter == adapter and batch.numbers(before[:1]) is not None:
                numbers = batch.numbers(before)
                if numbers is not None and _go_on(batch.contexts, contexts, numbers):
                    return batch.known.take(numbers)
        return Origins.none(len(contexts))

    def _grown(self, contexts: Sequence[TokenIds], adapter: str | None) -> _Batch | None:
        """Return a batch of the lists of an earlier one, each with one token more; ``None`` where they
        have to be read, as what is wrong with them has."""
        for batch in self._last if _may_be_held(contexts) else ():
            if batch.adapter == adapter and len(batch.contexts) == len(contexts):
                held = batch.take()
                tokens = None if held is None else held.grown(contexts, self._home.limits)
                if held is None:
                    continue
                if tokens is None:
                    batch.held.append(held)
                    continue
                ends = batch.contexts.lengths
                factors = _factors(int(ends.max()) + 1)
                keys = batch.keys + (tokens.astype(np.uint64) + np.uint64(1)) * factors[ends]
                whole = held.table.contexts(np.arange(len(tokens)))
                is_held = held.nbytes <= HELD_BYTES
                return _Batch(adapter, whole, keys, batch.known, [held] if is_held else [])
        return None


def _may_be_held(contexts: object) -> bool:
    """Return whether these may be lists that are held; anything else may have no length."""
    return type(contexts) is list or type(contexts) is tuple


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
        try:
            if before != context:
                break
        except Exception:  # an array among the numbers has no one answer
            break
    else:
        return np.array([each[-1] for each in lists])
    _take_back(lists[:longer])
    return None


def _take_back(lists: list[list[int]]) -> None:
    for each in lists:
        each.pop()


def _go_on(earlier: Contexts, contexts: Contexts, numbers: np.ndarray) -> bool:
    """Return whether each context is the earlier one of that number and one token more."""
    ends = contexts.lengths - 1
    return _are_equal(earlier.part(numbers), contexts, ends)


def _are_equal(some: Contexts, others: Contexts, ends: np.ndarray) -> bool:
    """Return whether the first are the other ones up to these ends. Both have a row for each place."""
    if not np.array_equal(some.lengths, ends):
        return False
    width = int(ends.max(initial=0))
    differ = some.table[some.places, :width] != others.table[:, :width]
    differ &= np.arange(width) < ends[:, None]
    return not differ.any()


def _factors(count: int) -> np.ndarray:
    """Return what a token counts in a key, by its position: odd, uint64 ``[count]``."""
    return np.random.default_rng(0).integers(0, 2**64, count, np.uint64) | np.uint64(1)
