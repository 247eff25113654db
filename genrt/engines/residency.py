"""Indexes the resident sequences of an engine, to find one that a new context can start from.

A sequence is known by the id of the request that holds it. Contexts are packed, as in
``LogprobsRequest``. Each adapter has a list of its sequences in the order of their contexts, so that
sequences with a common prefix are neighbors. A sequence enters the list when a look-up needs it:
sequences that only grow and are guessed cost nothing.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from genrt.questions.contexts import TOKEN_BYTES, Adapter

__all__ = ["Packed", "Residents"]

Packed: TypeAlias = Callable[[int], bytes]
"""Returns the context of a sequence by number."""

SHORTEST = 16
"""The fewest common tokens with which a sequence is near."""


class Residents:
    """Resident sequences by request id; a sequence is its adapter and its context."""

    def __init__(self) -> None:
        # A context is None until it is read.
        self._known: dict[str, tuple[Adapter | None, bytes | None]] = {}
        self._unfiled: dict[str, tuple[Packed, int] | None] = {}  # in the order of ``put``
        self._filed: dict[str, tuple[Adapter | None, tuple[bytes, int, str]]] = {}
        self._index: dict[Adapter | None, list[tuple[bytes, float, str]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def put(self, request_id: str, adapter: Adapter | None, context: bytes) -> None:
        """Record that a sequence is resident with this context; it may be known with a shorter one."""
        self._known[request_id] = adapter, context
        self._unfiled.pop(request_id, None)  # move to the end: the last one is found first
        self._unfiled[request_id] = None

    def put_later(
        self, numbers: Mapping[str, int], adapter: Adapter | None, contexts: Packed
    ) -> None:
        """Record resident sequences by number. The next look-up by context reads their contexts."""
        self._known.update(dict.fromkeys(numbers, (adapter, None)))
        for request_id in numbers:
            self._unfiled.pop(request_id, None)
        self._unfiled.update({each: (contexts, n) for each, n in numbers.items()})

    def remove(self, request_id: str) -> None:
        """Record that a sequence is not resident any more; ignore unknown ids."""
        self._known.pop(request_id, None)
        self._unfiled.pop(request_id, None)
        self._unfile(request_id)

    def request_ids(self) -> list[str]:
        """Return the ids of all resident sequences."""
        return list(self._known)

    def bound_to(self, adapter: Adapter | None) -> list[str]:
        """Return the ids of an adapter's sequences."""
        return [each for each, (other, _) in self._known.items() if other == adapter]

    def is_parent(self, request_id: str, adapter: Adapter | None, context: bytes) -> bool:
        """Return whether this context extends this sequence, whose context was read, by one token."""
        of, known = self._known.get(request_id, (None, None))
        return (
            known is not None
            and len(known) == len(context) - TOKEN_BYTES
            and context.startswith(known)
            and of == adapter
        )

    def parent(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, the latest of several, that this context extends by one token."""
        return self.of_context(adapter, context[:-TOKEN_BYTES])

    def of_context(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, the latest of several, with this context."""
        entries = self._sorted(adapter)
        place = bisect_left(entries, (context, math.inf, ""))
        found = entries[place - 1] if place else None
        return found[2] if found is not None and found[0] == context else None

    def nearest(self, adapter: Adapter | None, context: bytes) -> tuple[str, int] | None:
        """Return a sequence with the longest common prefix, and its length in tokens: at least
        ``SHORTEST``, less than the whole context. Return ``None`` if there is no such sequence."""
        entries = self._sorted(adapter)
        place = bisect_left(entries, (context, math.inf, ""))
        beside = entries[max(place - 1, 0) : place + 1]
        common = [(_common_tokens(known, context), each) for known, _, each in beside]
        length, request_id = max(common, default=(0, ""))
        if length < SHORTEST:
            return None
        return request_id, min(length, len(context) // TOKEN_BYTES - 1)

    def _sorted(self, adapter: Adapter | None) -> list[tuple[bytes, float, str]]:
        unfiled, self._unfiled = self._unfiled, {}
        for request_id, place in unfiled.items():
            self._unfile(request_id)
            of, context = self._known[request_id]
            if place is not None:
                context = place[0](place[1])
                self._known[request_id] = of, context
            entry: Any = context, next(self._numbers), request_id
            insort(self._index.setdefault(of, []), entry)
            self._filed[request_id] = of, entry
        return self._index.get(adapter, [])

    def _unfile(self, request_id: str) -> None:
        if (filed := self._filed.pop(request_id, None)) is not None:
            adapter, entry = filed
            entries = self._index[adapter]
            del entries[bisect_left(entries, entry)]
            if not entries:
                del self._index[adapter]


def _common_tokens(one: bytes, other: bytes) -> int:
    most = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    return int(differ.argmax()) if differ.any() else most
