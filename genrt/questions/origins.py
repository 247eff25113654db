"""Where sequences come from: which sequences of earlier questions they go on from, by number.

An engine that keeps sequences finds them by their number in the question that asked about them, and need
not compare contexts. Whoever asks tells it; where it does not know them any more, the contexts decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from genrt.questions.sequences import Contexts

__all__ = ["Asked", "Origins"]


class Asked:
    """Stands for the sequences that one question was about; an engine forgets them with it.

    Attributes:
        contexts: these sequences, in a process that others tell of what goes on from them.
        users: the populations that go on from them; each adds and discards a key of its own, which is
            atomic: finalizers do it too, whatever is locked.
    """

    __slots__ = ("__weakref__", "contexts", "count", "users")

    def __init__(self, count: int) -> None:
        self.count = count
        self.users: set[object] = set()
        self.contexts: Contexts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Origins:
    """For each of several sequences the one that it goes on from.

    Attributes:
        asked: the questions that these were of.
        numbers: which sequence of ``asked``, all in order, each goes on from: int64 ``[n]``, -1 for none.
        lengths: how many tokens that sequence has, int64 ``[n]``.
    """

    asked: tuple[Asked, ...]
    numbers: np.ndarray
    lengths: np.ndarray

    @classmethod
    def none(cls, count: int) -> Self:
        """Return the origins of sequences that nobody has asked about."""
        return cls((), np.full(count, -1), np.zeros(count, np.int64))

    @classmethod
    def joined(cls, several: Sequence[Origins]) -> Self:
        """Return the origins of all sequences of several, in order."""
        asked = [each.asked for each in several]
        starts = np.cumsum([0, *[sum(one.count for one in each) for each in asked]])
        numbers = [
            np.where(each.numbers < 0, -1, each.numbers + start)
            for each, start in zip(several, starts, strict=False)
        ]
        lengths = [each.lengths for each in several]
        return cls(sum(asked, ()), np.concatenate(numbers), np.concatenate(lengths)).needed()

    def take(self, places: np.ndarray | slice) -> Self:
        """Return those of the sequences at these places, any number of times each."""
        return type(self)(self.asked, self.numbers[places], self.lengths[places])

    def needed(self) -> Self:
        """Return the same without the questions that no sequence goes on from, and each of them once:
        first the one that most go on from, which decides who is asked."""
        known = self.numbers >= 0
        if not known.any():
            return type(self).none(len(known))
        if len(self.asked) == 1:
            return self
        ends = np.cumsum([each.count for each in self.asked])
        of = np.searchsorted(ends, self.numbers, side="right")
        different, counts = np.unique(of[known], return_counts=True)
        most_first = different[np.argsort(-counts, kind="stable")]
        asked = dict.fromkeys(self.asked[n] for n in most_first.tolist())
        starts = dict(zip(asked, np.cumsum([0, *[each.count for each in asked]]), strict=False))
        moved = [
            starts.get(each, 0) - end + each.count
            for each, end in zip(self.asked, ends, strict=True)
        ]
        numbers = np.where(known, self.numbers + np.array(moved)[np.where(known, of, 0)], -1)
        return type(self)((*asked,), numbers, self.lengths)

    def cut(self, lengths: np.ndarray) -> Self:
        """Return what is left of them when the sequences are cut to at most these lengths."""
        numbers = np.where(lengths < self.lengths, -1, self.numbers)
        return type(self)(self.asked, numbers, self.lengths)

    def go_on(self, lengths: np.ndarray) -> bool:
        """Return whether every sequence, of these lengths now, has one token more than its origin."""
        return bool(((self.numbers >= 0) & (self.lengths + 1 == lengths)).all())

    def after(self, asked: Sequence[Asked], places: np.ndarray, lengths: np.ndarray) -> Self:
        """Return the origins once the sequences at these places have been asked about, in order, with
        these lengths."""
        count = len(self.numbers)
        if len(places) == count:
            return type(self)(tuple(asked), np.arange(count), lengths)
        others = np.ones(count, bool)
        others[places] = False
        kept = type(self)(self.asked, np.where(others, self.numbers, -1), self.lengths).needed()
        numbers, before = kept.numbers.copy(), kept.lengths.copy()
        numbers[places] = sum(each.count for each in kept.asked) + np.arange(len(places))
        before[places] = lengths
        return type(self)((*kept.asked, *asked), numbers, before)
