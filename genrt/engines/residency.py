"""Indexes the resident sequences of an engine, to find one that a new context can start from.

A sequence is known by the id of the request that holds it. Contexts are packed, as in
``LogprobsRequest``. A context that extends a sequence by one token, as in sampling, finds it by its hash.
Any other context, as after an edit or a backtrack, finds the nearest sequence beside its own place in the
order of all contexts. Both indexes are updated by look-ups alone: sequences that only grow and are
guessed cost nothing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from genrt.questions.arguments import TOKEN_BYTES, Adapter

Packed: TypeAlias = Callable[[int], bytes]
"""Returns the context of a sequence by number."""

SHORTEST = 16
"""The fewest common tokens with which a sequence is near."""


class Residents:
    """Resident sequences by request id; a sequence is its adapter and its context."""

    def __init__(self) -> None:
        # A context is None until it is read.
        self._known: dict[str, tuple[Adapter | None, bytes | None]] = {}
        self._unread: dict[
            str, tuple[Packed, int] | None
        ] = {}  # not indexed yet, the last put last
        self._digests: dict[str, int] = {}
        self._by_digest: dict[int, dict[str, None]] = {}
        self._sorted: dict[Adapter | None, list[tuple[bytes, str]]] | None = None

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def put(self, request_id: str, adapter: Adapter | None, context: bytes) -> None:
        """Record that a sequence is resident with this context; it may be known with a shorter one."""
        self._known[request_id] = adapter, context
        self._unread.pop(request_id, None)  # move to the end: the last one is found first
        self._unread[request_id] = None

    def put_later(
        self, numbers: Mapping[str, int], adapter: Adapter | None, contexts: Packed
    ) -> None:
        """Record resident sequences by number. The next look-up by context reads their contexts."""
        self._known.update(dict.fromkeys(numbers, (adapter, None)))
        for request_id in numbers:
            self._unread.pop(request_id, None)
        self._unread.update({each: (contexts, n) for each, n in numbers.items()})

    def remove(self, request_id: str) -> None:
        """Record that a sequence is not resident any more; ignore unknown ids."""
        if self._known.pop(request_id, None) is not None:
            self._unread.pop(request_id, None)
            self._drop(request_id)

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
        self._read()
        for request_id in reversed(self._by_digest.get(hash((adapter, context)), {})):
            if self._known[request_id] == (adapter, context):
                return request_id
        return None

    def nearest(self, adapter: Adapter | None, context: bytes) -> tuple[str, int] | None:
        """Return a sequence with the longest common prefix, and its length in tokens: at least
        ``SHORTEST``, less than the whole context. Return ``None`` if there is no such sequence."""
        self._read()
        if self._sorted is None:
            self._sorted = {}
            for request_id, (of, known) in self._known.items():
                self._sorted.setdefault(of, []).append((known or b"", request_id))
            for entries in self._sorted.values():
                entries.sort()
        entries = self._sorted.get(adapter, [])
        place = bisect(entries, (context, ""))
        beside = entries[max(place - 1, 0) : place + 1]
        common = [(_common_tokens(known, context), each) for known, each in beside]
        length, request_id = max(common, default=(0, ""))
        if length < SHORTEST:
            return None
        return request_id, min(length, len(context) // TOKEN_BYTES - 1)

    def _read(self) -> None:
        """Read and hash the contexts that were put since the last look-up."""
        unread, self._unread = self._unread, {}
        for request_id, place in unread.items():
            self._drop(request_id)
            adapter, context = self._known[request_id]
            if place is not None:
                context = place[0](place[1])
                self._known[request_id] = adapter, context
            self._digests[request_id] = digest = hash((adapter, context))
            self._by_digest.setdefault(digest, {})[request_id] = None

    def _drop(self, request_id: str) -> None:
        self._sorted = None
        if (digest := self._digests.pop(request_id, None)) is not None:
            alike = self._by_digest[digest]
            del alike[request_id]
            if not alike:
                del self._by_digest[digest]


def _common_tokens(one: bytes, other: bytes) -> int:
    most = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    return int(differ.argmax()) if differ.any() else most
