"""The index of resident sequences beside a plain list of them: every answer of the one is compared with
the other's."""

from __future__ import annotations

import random

from genrt.engines.residency import PIECE, Residents
from genrt.questions.contexts import TOKEN_BYTES, Adapter
from genrt.testing.record import Violation


class CheckedResidents:
    """Resident sequences as an engine uses them: extended, forked, opened; the longest unused go first.

    Args:
        random: decides which of several possible starts is taken.
        most: how many sequences are resident at most.
    """

    def __init__(self, random: random.Random, most: int) -> None:
        self.extended = self.forked = self.evicted = 0
        self._random = random
        self._most = most
        self._residents = Residents()
        self._plain: dict[str, tuple[Adapter | None, bytes]] = {}  # the longest unused first
        self._count = 0

    def __len__(self) -> int:
        return len(self._plain)

    def start(self, adapter: Adapter | None, context: bytes) -> None:
        """Compute a context: from its parent or the nearest sequence, if there is one."""
        parent, nearest = self._parent(adapter, context), self._nearest(adapter, context)
        if parent is not None and self._random.random() < 0.6:
            self.extended += 1
            self._put(parent, adapter, context)
        else:
            self.forked += parent is not None or nearest is not None
            self._put(str(self._count), adapter, context)
        while len(self._plain) > self._most:
            self.evicted += 1
            self._remove(next(iter(self._plain)))
        self._compare_names()

    def forget(self, adapter: Adapter | None) -> None:
        """Remove an adapter's sequences."""
        bound = [name for name, (other, _) in self._plain.items() if other == adapter]
        found = self._residents.bound_to(adapter)
        if sorted(found) != sorted(bound):
            raise Violation(f"bound_to({adapter}) is {found}, not {bound}")
        for name in bound:
            self._remove(name)
        self._compare_names()

    def clear(self) -> None:
        """Remove every sequence."""
        for name in list(self._plain):
            self._remove(name)
        self._compare_names()

    def _put(self, name: str, adapter: Adapter | None, context: bytes) -> None:
        self._count += 1
        self._plain.pop(name, None)
        self._plain[name] = adapter, context
        self._residents.put(name, adapter, context)

    def _remove(self, name: str) -> None:
        del self._plain[name]
        self._residents.remove(name)

    def _compare_names(self) -> None:
        if sorted(self._residents.request_ids()) != sorted(self._plain):
            raise Violation(
                f"resident are {self._residents.request_ids()}, not {list(self._plain)}"
            )

    def _parent(self, adapter: Adapter | None, context: bytes) -> str | None:
        before = context[:-TOKEN_BYTES]
        alike = [name for name, known in self._plain.items() if known == (adapter, before)]
        parent = self._residents.parent(adapter, context)
        if parent != (alike[-1] if alike else None):
            raise Violation(f"the parent of {context!r} is {parent}, not the last of {alike}")
        if any(self._residents.is_parent(name, adapter, context) for name in alike) != bool(alike):
            raise Violation(f"is_parent does not know {alike} as parents of {context!r}")
        return parent

    def _nearest(self, adapter: Adapter | None, context: bytes) -> tuple[str, int] | None:
        most = len(context) // TOKEN_BYTES - 1
        shared = {
            name: _shared(known, context)
            for name, (other, known) in self._plain.items()
            if other == adapter
        }
        best = max(shared.values(), default=0)
        found = self._residents.nearest(adapter, context)
        if best < PIECE:
            if found is not None:
                raise Violation(f"nearest finds {found}, but nothing shares {PIECE} tokens")
            return None
        if found is None or found[1] != min(best, most) or shared.get(found[0], 0) < found[1]:
            raise Violation(f"nearest finds {found}, not the {best} tokens that are shared")
        return found


def _shared(one: bytes, other: bytes) -> int:
    """Return how many tokens two contexts begin with together."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // TOKEN_BYTES
    starts = range(0, most, TOKEN_BYTES)
    return next(s for s in starts if one[s : s + TOKEN_BYTES] != other[s : s + TOKEN_BYTES]) // (
        TOKEN_BYTES
    )
