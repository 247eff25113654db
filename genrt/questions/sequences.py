"""Sequences of token ids that grow together, as arrays, and the earlier sequences that they extend.

Rule:
    A request reads the sequences of its own time: a table is copied before a token is overwritten that a
    request may still read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from genrt.errors import InvalidRequest
from genrt.numbers import check_int, shown
from genrt.questions.arguments import (
    TOKEN_BYTES,
    Adapter,
    Table,
    TokenIds,
    check_contexts,
    host_array,
    is_plain_sequence,
)
from genrt.questions.rows import Limits, LogprobsRequest, id_words

Integers: TypeAlias = Sequence[int] | np.ndarray | torch.Tensor
"""An integer for each sequence."""

Flags: TypeAlias = Sequence[bool] | np.ndarray | torch.Tensor
"""A bool for each sequence."""

MOST_SEQUENCES = 2**20
"""The most sequences in one table."""

EXTENSION_BYTES = 20
"""The memory of a growth for each sequence: its length, its number and its token."""


class Sequences:
    """Sequences of at least one token each, in a table with room for the longest. Only the owner changes
    it.

    Attributes:
        lengths: int64 ``[n]``.
        origins: the sequences of earlier requests that these extend.
    """

    def __init__(
        self, table: np.ndarray, lengths: np.ndarray, origins: Origins | None = None
    ) -> None:
        self._table = table  # uint32 [n, room], undefined beyond a sequence's length
        self.lengths = lengths
        self.origins = Origins.none(len(lengths)) if origins is None else origins
        self._read = np.zeros_like(lengths)  # how many tokens of each row a request may still read

    @classmethod
    def copies(cls, limits: Limits, prompt: TokenIds, count: int) -> Self:
        """Return ``count`` copies of one sequence. Raises InvalidRequest for bad token ids."""
        words = np.frombuffer(id_words(prompt, limits.vocab_size), np.uint32)
        return cls(np.tile(words, (count, 1)), np.full(count, len(words)))

    @classmethod
    def of(cls, limits: Limits, contexts: Sequence[TokenIds] | Table) -> Self:
        """Return sequences with these token ids. Raises InvalidRequest for bad token ids or too many
        sequences."""
        if (table := _table(contexts, limits.vocab_size)) is not None:
            return cls(table, np.full(len(table), table.shape[1]))
        each_one = check_contexts(contexts)
        check_int("the number of contexts", len(each_one), 0, MOST_SEQUENCES)
        words = [np.frombuffer(id_words(each, limits.vocab_size), np.uint32) for each in each_one]
        return cls(*_padded_table(words))

    @classmethod
    def joined(cls, several: Sequence[Sequences]) -> Self:
        """Return all sequences of several, in order."""
        room = max(each._table.shape[1] for each in several)
        tables = [
            np.pad(each._table, ((0, 0), (0, room - each._table.shape[1]))) for each in several
        ]
        lengths = np.concatenate([each.lengths for each in several])
        origins = Origins.joined([each.origins for each in several])
        return cls(np.concatenate(tables), lengths, origins)

    def __len__(self) -> int:
        return len(self.lengths)

    def contexts(self, places: np.ndarray) -> Contexts:
        """Return the present sequences at these places, without a copy."""
        np.maximum(self._read, self.lengths, out=self._read)
        return Contexts(self._table, places, self.lengths[places])

    def token_ids(self, place: int) -> list[int]:
        """Return one sequence."""
        found: list[int] = self._table[place, : self.lengths[place]].tolist()
        return found

    def padded(self) -> np.ndarray:
        """Return all token ids, int64 ``[n, longest]``, with -1 after the end of each sequence."""
        longest = int(self.lengths.max(initial=0))
        behind = np.arange(longest) >= self.lengths[:, None]
        return np.where(behind, -1, self._table[:, :longest].astype(np.int64))

    def append(self, token_ids: np.ndarray) -> None:
        """Add a token to each sequence, int64 ``[n]``; -1 adds no token."""
        places = np.flatnonzero(token_ids >= 0)
        self._write(places, self.lengths[places], token_ids[places])
        self.lengths[places] += 1

    def extend(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Add any number of checked tokens to each sequence."""
        counts = np.array([*map(len, token_ids)], np.int64)
        starts = np.repeat(self.lengths - (counts.cumsum() - counts), counts)
        flat = np.fromiter(chain.from_iterable(token_ids), np.uint32, len(starts))
        self._write(np.repeat(np.arange(len(counts)), counts), starts + np.arange(len(flat)), flat)
        self.lengths += counts

    def _write(self, places: np.ndarray, columns: np.ndarray, token_ids: np.ndarray) -> None:
        """Write tokens to places of the table that no request reads."""
        needed, room = int(columns.max(initial=-1)) + 1, self._table.shape[1]
        if needed > room or (columns < self._read[places]).any():
            more = max(room, 16, needed - room) if needed > room else 0
            self._table = np.pad(self._table, ((0, 0), (0, more)))
            self._read[:] = 0
        self._table[places, columns] = token_ids

    def are(self, contexts: Contexts) -> bool:
        """Return whether these contexts, which had all of the sequences, still have them."""
        return contexts._table is self._table and np.array_equal(contexts.lengths, self.lengths)

    def followed_by(self, block: np.ndarray) -> Contexts:
        """Return the sequences that the block follows, each with its tokens of the block but the last.

        The sequences do not change: ``lengthen`` adds the block. Sequences without a token in the block
        are left out.
        """
        counts = token_counts(block)
        places, columns = np.nonzero(block >= 0)
        self._write(places, self.lengths[places] + columns, block[places, columns])
        ends, followed = self.lengths + counts, np.flatnonzero(counts)
        np.maximum(self._read, ends, out=self._read)
        return Contexts(self._table, followed, ends[followed] - 1)

    def lengthen(self, contexts: Contexts, block: np.ndarray) -> bool:
        """Add a block for which ``followed_by`` has returned these contexts. Return False, without a
        change, if the sequences have changed since then."""
        counts = token_counts(block)
        followed = np.flatnonzero(counts)
        before = contexts.lengths + 1 - counts[followed]
        is_same = len(counts) == len(self) and np.array_equal(before, self.lengths[followed])
        if contexts._table is not self._table or not is_same:
            return False
        self.lengths = self.lengths + counts
        return True

    def take(self, places: np.ndarray) -> Self:
        """Return a copy of the sequences at these places, any number of times each."""
        origins = self.origins.take(places)
        return type(self)(self._table[places], self.lengths[places], origins)

    def cut(self, lengths: np.ndarray) -> None:
        """Drop the tokens beyond these lengths, int64 ``[n]``."""
        self.lengths = np.minimum(self.lengths, lengths)
        self.origins = self.origins.cut(lengths)


class Contexts:
    """The sequences of a request; they do not change.

    Contexts that extend others, or have those of several, share their memory until the first read of more
    than their ends.

    Attributes:
        lengths: int64 ``[n]``.
    """

    __slots__ = ("_growth", "_places", "_several", "_table", "lengths")

    def __init__(self, table: np.ndarray, places: np.ndarray, lengths: np.ndarray) -> None:
        self._table, self._places, self.lengths = table, places, lengths
        self._growth: _Extension | None = None
        self._several: Sequence[Contexts] = ()

    @classmethod
    def of(cls, words: Sequence[np.ndarray]) -> Self:
        """Return these sequences, each uint32 ``[length]``."""
        table, lengths = _padded_table(words)
        return cls(table, np.arange(len(words)), lengths)

    @classmethod
    def joined(cls, several: Sequence[Contexts], places: np.ndarray | None = None) -> Self:
        """Return all sequences of several, in order, or those at these places."""
        lengths = np.concatenate([each.lengths for each in several])
        places = np.arange(len(lengths)) if places is None else places
        found = cls(np.empty((0, 0), np.uint32), places, lengths[places])
        found._several = several
        return found

    @classmethod
    def grown(cls, before: Sequence[Contexts], numbers: np.ndarray, tokens: np.ndarray) -> Self:
        """Return sequences ``numbers`` of several contexts, numbered in order, each with one more
        token."""
        nothing = np.empty(0, np.int64)
        one = before[0] if len(before) == 1 else cls.joined(before)
        found = cls(nothing, nothing, one.lengths[numbers] + 1)
        kept = EXTENSION_BYTES * len(numbers) + (one._growth.kept if one._growth else one.nbytes)
        found._growth = _Extension(one, numbers, tokens, kept)
        if 2 * kept > 3 * found.nbytes:  # few of many sequences are extended
            found._put_together()
        return found

    def _put_together(self) -> None:
        if several := self._several:
            parts = [Sequences(each.table[each.places], each.lengths) for each in several]
            self._table, self._several = Sequences.joined(parts)._table, ()
        if self._growth is None:
            return
        every, ends = np.arange(len(self)), list[np.ndarray]()
        earlier, at = self, every
        while (growth := earlier._growth) is not None:
            ends.append(growth.tokens[at])
            earlier, at = growth.before, growth.numbers[at]
        table = np.zeros((len(self), int(self.lengths.max())), np.uint32)
        rows = earlier.table[earlier._places[at], : table.shape[1]]
        table[:, : rows.shape[1]] = rows
        for back, tokens in enumerate(ends, 1):
            table[every, self.lengths - back] = tokens
        self._table, self._places, self._growth = table, every, None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def table(self) -> np.ndarray:
        """Rows of token ids, uint32 ``[m, room]``, undefined beyond a sequence's length."""
        self._put_together()
        return self._table

    @property
    def places(self) -> np.ndarray:
        """The sequences' rows in the table, int64 ``[n]``."""
        self._put_together()
        return self._places

    @property
    def nbytes(self) -> int:
        """The memory of the sequences."""
        return TOKEN_BYTES * int(self.lengths.sum())

    @property
    def last_tokens(self) -> np.ndarray:
        """The last token of each, int64 ``[n]``."""
        found: np.ndarray
        if several := self._several:
            found = np.concatenate([each.last_tokens for each in several])[self._places]
        elif self._growth is not None:
            found = self._growth.tokens
        else:
            found = self._table[self._places, self.lengths - 1]
        return found.astype(np.int64)

    def after(self, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens of each sequence beyond these lengths: int64 ``[n, most]``, with -1 after the
        last."""
        columns = lengths[:, None] + np.arange(int((self.lengths - lengths).max(initial=0)))
        within = columns < self.lengths[:, None]
        tokens = self.table[self.places[:, None], np.where(within, columns, 0)]
        return np.where(within, tokens.astype(np.int64), -1)

    def packed(self, number: int) -> bytes:
        """Return one sequence, packed as in a ``LogprobsRequest``."""
        return self.table[self.places[number], : self.lengths[number]].tobytes()

    def rows(self, adapter: Adapter | None, weights_version: int = 0) -> list[LogprobsRequest]:
        """Return the requests for the rows after the sequences, in order."""
        return [
            LogprobsRequest(packed=self.packed(n), adapter=adapter, weights_version=weights_version)
            for n in range(len(self))
        ]

    def part(self, part: slice | np.ndarray) -> Contexts:
        """Return the sequences at these places."""
        return Contexts(self.table, self.places[part], self.lengths[part])

    def kept(self) -> Contexts:
        """Return a copy in memory of its own, unless the sequences extend others."""
        if self._growth is not None:
            return self
        return Contexts(self.table[self.places], np.arange(len(self)), self.lengths.copy())


class _Extension(NamedTuple):
    """Contexts as extensions: sequences ``numbers`` of ``before``, each with one of ``tokens``, uint32
    ``[n]``. All earlier sequences take ``kept`` bytes."""

    before: Contexts
    numbers: np.ndarray
    tokens: np.ndarray
    kept: int


class SequenceHandle:
    """Stands for the sequences of one request; an engine frees them with it.

    Attributes:
        count: the number of sequences.
        contexts: the sequences, in a process that receives extensions of them.
        users: a key for each population that extends them, added and discarded without a lock, also in
            finalizers.
        idle: how many contexts extend them that did not ask with the others.
    """

    __slots__ = ("__weakref__", "contexts", "count", "idle", "users")

    def __init__(self, count: int) -> None:
        self.count = count
        self.users: set[object] = set()
        self.idle = 0
        self.contexts: Contexts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Origins:
    """For each of several sequences, the earlier sequence that it extends.

    An engine finds resident sequences by these numbers; it compares contexts only if it no longer knows
    them.

    Attributes:
        handles: the handles of earlier requests.
        numbers: the number of the extended sequence, int64 ``[n]``, counted over all handles in order; -1
            if it is unknown.
        lengths: the number of tokens of that sequence, int64 ``[n]``.
    """

    handles: tuple[SequenceHandle, ...]
    numbers: np.ndarray
    lengths: np.ndarray

    @classmethod
    def none(cls, count: int) -> Self:
        """Return the origins of new sequences."""
        return cls((), np.full(count, -1), np.zeros(count, np.int64))

    @classmethod
    def joined(cls, several: Sequence[Origins]) -> Self:
        """Return the origins of all sequences of several, in order."""
        handles = [each.handles for each in several]
        starts = np.cumsum([0, *[sum(one.count for one in each) for each in handles]])
        numbers = [
            np.where(each.numbers < 0, -1, each.numbers + start)
            for each, start in zip(several, starts, strict=False)
        ]
        lengths = [each.lengths for each in several]
        return cls(sum(handles, ()), np.concatenate(numbers), np.concatenate(lengths)).needed()

    def take(self, places: np.ndarray | slice) -> Self:
        """Return the origins of the sequences at these places, in any number and order."""
        return type(self)(self.handles, self.numbers[places], self.lengths[places])

    def needed(self) -> Self:
        """Return the same origins, with each handle once and without unused handles. The handle with the
        most sequences comes first: it decides the replica."""
        known = self.numbers >= 0
        if not known.any():
            return type(self).none(len(known))
        if len(self.handles) == 1:
            return self
        ends = np.cumsum([each.count for each in self.handles])
        of = np.searchsorted(ends, self.numbers, side="right")
        different, counts = np.unique(of[known], return_counts=True)
        most_first = different[np.argsort(-counts, kind="stable")]
        handles = dict.fromkeys(self.handles[n] for n in most_first.tolist())
        ends_of = np.cumsum([0, *[each.count for each in handles]])
        starts = dict(zip(handles, ends_of, strict=False))
        moved = [
            starts.get(each, 0) - end + each.count
            for each, end in zip(self.handles, ends, strict=True)
        ]
        numbers = np.where(known, self.numbers + np.array(moved)[np.where(known, of, 0)], -1)
        return type(self)((*handles,), numbers, self.lengths)

    def cut(self, lengths: np.ndarray) -> Self:
        """Return the origins after a cut to these lengths; a sequence cut below its origin has none."""
        numbers = np.where(lengths < self.lengths, -1, self.numbers)
        return type(self)(self.handles, numbers, self.lengths)

    def can_continue(self, lengths: np.ndarray) -> bool:
        """Return whether every sequence, with these lengths, has more tokens than its origin."""
        return bool(((self.numbers >= 0) & (self.lengths < lengths)).all())

    def after(
        self,
        handles: Sequence[SequenceHandle],
        places: np.ndarray,
        lengths: np.ndarray,
        turn: int = 0,
        turns: int = 1,
    ) -> Self:
        """Return the origins after requests with these handles for the sequences at these places, of
        these lengths; with ``turns``, the requests have so many for each place, one after another."""
        count, own = len(self.numbers), np.arange(turn, turns * len(places), turns)
        if len(places) == count:
            return type(self)(tuple(handles), own, lengths)
        others = np.ones(count, bool)
        others[places] = False
        kept = type(self)(self.handles, np.where(others, self.numbers, -1), self.lengths).needed()
        numbers, before = kept.numbers.copy(), kept.lengths.copy()
        numbers[places] = sum(each.count for each in kept.handles) + own
        before[places] = lengths
        return type(self)((*kept.handles, *handles), numbers, before)


# -- arguments ----------------------------------------------------------------------------------


def check_integers(
    name: str, given: Integers, low: int, high: int, count: int | None = None
) -> np.ndarray:
    """Return integers as int64 ``[count]``; without a ``count``, any number of them. Raises
    InvalidRequest unless they are one flat sequence of integers from ``low`` to ``high``."""
    found = _flat_array(name, given, "iu", "integers", count)
    wrong = (found < low) | (found > high)
    if wrong.any():
        first = int(wrong.argmax())
        raise InvalidRequest(
            f"{name} must be from {low} to {high}, but at place {first} there is {found[first]}"
        )
    return found.astype(np.int64)


def check_block(token_ids: Sequence[TokenIds] | Table, count: int, vocab_size: int) -> np.ndarray:
    """Return the tokens that follow each of ``count`` sequences: int64 ``[count, k]``, with -1 after the
    last. Raises InvalidRequest unless they are such a table, or a sequence of token ids for each."""
    if isinstance(token_ids, torch.Tensor | np.ndarray) and token_ids.ndim == 2:
        found = host_array(token_ids, "token_ids")
        _check_count(found, count)
        if found.dtype.kind not in "iu":
            raise InvalidRequest(f"token_ids must be integers, got {shown(token_ids)}")
        flat = check_integers("token_ids", found.ravel(), -1, vocab_size - 1)
        block = flat.reshape(found.shape)
        if (block[:, 1:] > np.where(block[:, :-1] < 0, -1, vocab_size)).any():
            raise InvalidRequest(
                "a token follows -1 in token_ids: -1 is for places after the last token"
            )
        return block
    return padded_block(check_extensions(token_ids, count, vocab_size))


def padded_block(words: Sequence[array[int]]) -> np.ndarray:
    """Return the tokens that follow each of several sequences, int64 ``[n, k]``, with -1 after the
    last."""
    block = np.full((len(words), max(map(len, words), default=0)), -1)
    for row, each in zip(block, words, strict=True):
        row[: len(each)] = each
    return block


def check_extensions(
    token_ids: Sequence[TokenIds] | Table, count: int, vocab_size: int
) -> list[array[int]]:
    """Return the packed tokens that follow each of ``count`` sequences. Raises InvalidRequest unless they
    are token ids for each."""
    given = check_contexts(token_ids, "token_ids")
    _check_count(given, count)
    return [id_words(each, vocab_size, allow_empty=True) for each in given]


def _check_count(given: Sequence[Any] | np.ndarray, count: int) -> None:
    if len(given) != count:
        raise InvalidRequest(f"token_ids has length {len(given)}, not {count}: give ids for each")


def token_counts(block: np.ndarray) -> np.ndarray:
    """Return the number of tokens in each row of a block, int64 ``[n]``."""
    found: np.ndarray = (block >= 0).sum(axis=1)
    return found


def check_flags(name: str, given: Flags, count: int) -> np.ndarray:
    """Return bools as an array ``[count]``. Raises InvalidRequest for other types or another number."""
    return _flat_array(name, given, "b", "bools", count).astype(bool)


def _flat_array(
    name: str, given: Table | Sequence[object], kinds: str, what: str, count: int | None
) -> np.ndarray:
    if isinstance(given, torch.Tensor | np.ndarray):
        found = host_array(given, name)
    elif not is_plain_sequence(given):
        raise InvalidRequest(f"{name} must be a sequence, got {shown(given)}")
    else:
        try:
            found = np.array(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise InvalidRequest(f"{name} must be a flat sequence, got {shown(given)}") from None
    if found.ndim != 1:
        raise InvalidRequest(f"{name} must be one flat sequence, got shape {list(found.shape)}")
    if len(found) and found.dtype.kind not in kinds:
        raise InvalidRequest(f"{name} must be {what}, got {shown(given)}")
    if count is not None and len(found) != count:
        raise InvalidRequest(f"{name} has length {len(found)}, not {count}: give one for each")
    return found if len(found) else found.astype(np.int64)


def _padded_table(words: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences as a table, uint32 ``[n, longest]``, and their lengths, int64 ``[n]``."""
    lengths = np.array([len(each) for each in words], np.int64)
    table = np.zeros((len(words), int(lengths.max(initial=0))), np.uint32)
    for row, each in zip(table, words, strict=True):
        row[: len(each)] = each
    return table, lengths


def _table(contexts: Sequence[TokenIds] | Table, vocab_size: int) -> np.ndarray | None:
    """Return a valid matrix of token ids as uint32 ``[n, length]``; ``None`` for other sequences."""
    if not isinstance(contexts, torch.Tensor | np.ndarray) or contexts.ndim != 2:
        return None
    table = host_array(contexts, "contexts")
    if table.dtype.kind not in "iu" or not table.size or len(table) > MOST_SEQUENCES:
        return None
    return table.astype(np.uint32) if table.min() >= 0 and table.max() < vocab_size else None
