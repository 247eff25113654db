"""Indexes the resident sequences of an engine, to find one that a new context can start from.

A sequence is known by the id of the request that holds it. Contexts are packed, as in
``LogprobsRequest``. There are two look-ups:

- A context that extends a sequence by one token, as in sampling, finds it by the hash of the sequence's
  whole context, its *digest*.
- Any other context, as after a fork, an edit or a backtrack, finds the sequence with the longest common
  prefix by chained hashes of pieces of ``PIECE`` tokens.

Found contexts are compared in full, so hash collisions are harmless. The indexes are updated by look-ups
alone, so sequences that only grow and are guessed cost nothing. The contexts of populations, which are
found by number, are read by look-ups too (*put later*). A sequence is hashed only one piece beyond its
common prefix with looked-up contexts: 256 rows of one text have about 4,000 pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from genrt.questions.contexts import TOKEN_BYTES, Adapter

__all__ = ["Packed", "Residents"]

Packed: TypeAlias = Callable[[int], bytes]
"""Returns the context of a sequence by number."""

PIECE = 16
"""The number of tokens that are hashed together. Shorter common prefixes are not found."""

PIECE_BYTES = PIECE * TOKEN_BYTES


@dataclass(slots=True)
class _Resident:
    request_id: str
    adapter: Adapter | None
    context: bytes
    digest: int | None = None
    # The hash of the adapter, then a chained hash for each piece that has been hashed so far.
    pieces: list[int] = field(default_factory=list)


class Residents:
    """Resident sequences by request id; a sequence is its adapter and its context."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Resident] = {}
        self._by_digest: dict[int, dict[str, None]] = {}
        self._by_piece: dict[int, dict[str, None]] = {}
        self._without_digest: dict[str, None] = {}
        # Sequences with unhashed pieces, by their last hashed piece.
        self._uncut: dict[int, dict[str, None]] = {}
        # Sequences that are put later: the adapter, the contexts and the number among these.
        self._later: dict[str, tuple[Adapter | None, Packed, int]] = {}

    def __len__(self) -> int:
        # Copy atomically, because other threads count while the engine's thread changes this.
        return len(self._by_id) + sum(each not in self._by_id for each in [*self._later])

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id or request_id in self._later

    def put_later(
        self, numbers: Mapping[str, int], adapter: Adapter | None, contexts: Packed
    ) -> None:
        """Record resident sequences by number. The next look-up by context reads their contexts."""
        for request_id in numbers:
            self._later.pop(request_id, None)  # move to the end, as in ``put``
        self._later.update({each: (adapter, contexts, n) for each, n in numbers.items()})

    def _put_all(self) -> None:
        later, self._later = self._later, {}
        for request_id, (adapter, contexts, number) in later.items():
            self.put(request_id, adapter, contexts(number))

    def put(self, request_id: str, adapter: Adapter | None, context: bytes) -> None:
        """Record that a sequence is resident with this context; it may be known with a shorter one."""
        self._later.pop(request_id, None)
        resident = self._by_id.get(request_id)
        if resident is None:
            resident = _Resident(request_id, adapter, context, pieces=[hash(adapter)])
            self._by_id[request_id] = resident
        else:
            if resident.digest is not None:
                self._undigest(resident)
            resident.context = context
            self._without_digest.pop(
                request_id, None
            )  # move to the end: the last one is found first
        self._without_digest[request_id] = None
        self._file(resident)

    def remove(self, request_id: str) -> None:
        """Record that a sequence is not resident any more; ignore unknown ids."""
        self._later.pop(request_id, None)
        resident = self._by_id.pop(request_id, None)
        if resident is None:
            return
        self._undigest(resident)
        self._without_digest.pop(request_id, None)
        _drop(self._uncut, resident.pieces[-1], request_id)
        for piece in resident.pieces[1:]:
            _drop(self._by_piece, piece, request_id)

    def _undigest(self, resident: _Resident) -> None:
        if resident.digest is not None:
            _drop(self._by_digest, resident.digest, resident.request_id)
            resident.digest = None

    def request_ids(self) -> list[str]:
        """Return the ids of all resident sequences."""
        self._put_all()
        return list(self._by_id)

    def bound_to(self, adapter: Adapter | None) -> list[str]:
        """Return the ids of an adapter's sequences."""
        self._put_all()
        return [
            request_id
            for request_id, resident in self._by_id.items()
            if resident.adapter == adapter
        ]

    def is_parent(self, request_id: str, adapter: Adapter | None, context: bytes) -> bool:
        """Return whether this context extends this sequence by one token."""
        resident = self._by_id.get(request_id)
        return (
            resident is not None
            and request_id not in self._later
            and len(resident.context) == len(context) - TOKEN_BYTES
            and context.startswith(resident.context)
            and resident.adapter == adapter
        )

    def parent(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, the latest of several, that this context extends by one token."""
        return self.of_context(adapter, context[:-TOKEN_BYTES])

    def of_context(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, the latest of several, with this context."""
        self._digest_all()
        for request_id in reversed(self._by_digest.get(_context_digest(adapter, context), {})):
            resident = self._by_id[request_id]
            if resident.context == context and resident.adapter == adapter:
                return request_id
        return None

    def nearest(self, adapter: Adapter | None, context: bytes) -> tuple[str, int] | None:
        """Return a sequence with the longest common prefix, and its length in tokens: at least ``PIECE``,
        less than the whole context. Return ``None`` if there is no such sequence."""
        self._put_all()
        piece = hash(adapter)
        candidates: dict[str, None] = {}
        shared = 0
        for start in range(0, len(context) - PIECE_BYTES + 1, PIECE_BYTES):
            self._cut(piece)
            piece = _chained(piece, context, start)
            found = self._by_piece.get(piece)
            if found is None:
                break
            candidates, shared = found, start + PIECE_BYTES
        most = len(context) // TOKEN_BYTES - 1
        best: tuple[str, int] | None = None
        for request_id in candidates:
            resident = self._by_id[request_id]
            if resident.adapter != adapter or not resident.context.startswith(context[:shared]):
                continue  # a hash collision
            length = _common_bytes(resident.context, context, shared) // TOKEN_BYTES
            if best is None or length > best[1]:
                best = request_id, length
            if length >= most:
                break
        return None if best is None else (best[0], min(best[1], most))

    def _digest_all(self) -> None:
        self._put_all()
        for request_id in self._without_digest:
            resident = self._by_id[request_id]
            resident.digest = digest = _context_digest(resident.adapter, resident.context)
            self._by_digest.setdefault(digest, {})[request_id] = None
        self._without_digest.clear()

    def _file(self, resident: _Resident) -> None:
        """Record whether a context has an unhashed piece."""
        pieces = resident.pieces
        if len(resident.context) >= len(pieces) * PIECE_BYTES:
            self._uncut.setdefault(pieces[-1], {})[resident.request_id] = None

    def _cut(self, piece: int) -> None:
        """Hash the next piece of every context with this last hashed piece."""
        for request_id in self._uncut.pop(piece, ()):
            resident = self._by_id[request_id]
            longer = _chained(piece, resident.context, PIECE_BYTES * (len(resident.pieces) - 1))
            resident.pieces.append(longer)
            self._by_piece.setdefault(longer, {})[request_id] = None
            self._file(resident)


def _drop(index: dict[int, dict[str, None]], key: int, request_id: str) -> None:
    alike = index.get(key, {})
    alike.pop(request_id, None)
    if not alike:
        index.pop(key, None)


def _context_digest(adapter: Adapter | None, context: bytes) -> int:
    return hash((adapter, context))


def _chained(piece: int, context: bytes, start: int) -> int:
    return hash((piece, context[start : start + PIECE_BYTES]))


def _common_bytes(one: bytes, other: bytes, known: int) -> int:
    """Return the length in bytes of the common tokens of two contexts; ``known`` of them are certain."""
    most = min(len(one), len(other))
    for start in range(known, most, TOKEN_BYTES):
        if one[start : start + TOKEN_BYTES] != other[start : start + TOKEN_BYTES]:
            return start
    return most
