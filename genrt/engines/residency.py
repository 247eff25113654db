"""Which sequences are resident, and which of them a new context can start from.

Pure bookkeeping: an engine tells which sequence became resident, was extended or went, each by the id of
the request that keeps it, and asks for the sequence that a context can start from.

There are two look-ups. The sequence whose whole context is the given one less its last token (the step of
a sampler) is found by the hash of its context, its *digest*. Any other is found by the chained hashes of
its context in pieces of ``PIECE`` tokens (a fork, an edit, a backtrack). The contexts found are compared
as a whole, so equal hashes do no harm. Contexts are packed, as in ``LogprobsRequest``. Both indexes are
brought up to date when they are asked: sequences that only grow, and are guessed, cost nothing. Nor are
contexts read before that, where they are *put later*: those of a population, which is found by number.
And a sequence is cut no further than a piece behind what it shares with contexts that are asked about:
256 rows of one text have some 4,000 pieces, for all of which the next question would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from genrt.questions.contexts import TOKEN_BYTES, Adapter

__all__ = ["Packed", "Residents"]

Packed: TypeAlias = Callable[[int], bytes]
"""Returns the context of the sequence with this number."""

PIECE = 16
"""How many tokens are hashed together: a look-up costs a dictionary access for each piece, and a prefix
that is shorter than one is not shared."""

PIECE_BYTES = PIECE * TOKEN_BYTES


@dataclass(slots=True)
class _Resident:
    request_id: str
    adapter: Adapter | None
    context: bytes
    digest: int | None = None
    # The hash of the adapter, and of all up to the end of each piece that the context is cut into so far.
    pieces: list[int] = field(default_factory=list)


class Residents:
    """Resident sequences by request id; a sequence is its adapter and its context."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Resident] = {}
        self._by_digest: dict[int, dict[str, None]] = {}
        self._by_piece: dict[int, dict[str, None]] = {}
        self._without_digest: dict[str, None] = {}
        # Those whose contexts have another piece, by the last that they are cut into.
        self._uncut: dict[int, dict[str, None]] = {}
        # Those put later, with their adapter, whose contexts are and which of these is theirs.
        self._later: dict[str, tuple[Adapter | None, Packed, int]] = {}

    def __len__(self) -> int:
        # A copy, made at once: other threads count while the engine's changes this.
        return len(self._by_id) + sum(each not in self._by_id for each in [*self._later])

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id or request_id in self._later

    def put_later(
        self, numbers: Mapping[str, int], adapter: Adapter | None, contexts: Packed
    ) -> None:
        """Record that sequences are resident, each with a number, and that number ``i`` has the context
        ``contexts(i)``, which is asked for when somebody looks for contexts. Only then are they put."""
        for request_id in numbers:
            self._later.pop(request_id, None)  # to the end, as in ``put``
        self._later.update({each: (adapter, contexts, n) for each, n in numbers.items()})

    def _put_all(self) -> None:
        later, self._later = self._later, {}
        for request_id, (adapter, contexts, number) in later.items():
            self.put(request_id, adapter, contexts(number))

    def put(self, request_id: str, adapter: Adapter | None, context: bytes) -> None:
        """Record that a sequence is resident with this context, which it may have grown to."""
        self._later.pop(request_id, None)
        resident = self._by_id.get(request_id)
        if resident is None:
            resident = _Resident(request_id, adapter, context, pieces=[hash(adapter)])
            self._by_id[request_id] = resident
        else:
            if resident.digest is not None:
                self._undigest(resident)
            resident.context = context
            self._without_digest.pop(request_id, None)  # to the end: the last put is found first
        self._without_digest[request_id] = None
        self._file(resident)

    def remove(self, request_id: str) -> None:
        """Record that a sequence is resident no more; an unknown id is ignored."""
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
        """Return whether this sequence's context is the given one less its last token: to try a guess."""
        resident = self._by_id.get(request_id)
        return (
            resident is not None
            and request_id not in self._later
            and len(resident.context) == len(context) - TOKEN_BYTES
            and context.startswith(resident.context)
            and resident.adapter == adapter
        )

    def parent(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, of several the last put, whose context is this one less its last token."""
        return self.of_context(adapter, context[:-TOKEN_BYTES])

    def of_context(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, of several the last put, whose context is this one."""
        self._digest_all()
        for request_id in reversed(self._by_digest.get(_digest(adapter, context), {})):
            resident = self._by_id[request_id]
            if resident.context == context and resident.adapter == adapter:
                return request_id
        return None

    def nearest(self, adapter: Adapter | None, context: bytes) -> tuple[str, int] | None:
        """Return a sequence that shares the longest prefix with this context, and how many tokens that
        is: at least ``PIECE``, and not the whole context. Return ``None`` if there is none."""
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
                continue  # equal hashes of unequal pieces
            length = _common(resident.context, context, shared) // TOKEN_BYTES
            if best is None or length > best[1]:
                best = request_id, length
            if length >= most:
                break
        return None if best is None else (best[0], min(best[1], most))

    def _digest_all(self) -> None:
        self._put_all()
        for request_id in self._without_digest:
            resident = self._by_id[request_id]
            resident.digest = digest = _digest(resident.adapter, resident.context)
            self._by_digest.setdefault(digest, {})[request_id] = None
        self._without_digest.clear()

    def _file(self, resident: _Resident) -> None:
        """Note that a context has another piece, if it has."""
        pieces = resident.pieces
        if len(resident.context) >= len(pieces) * PIECE_BYTES:
            self._uncut.setdefault(pieces[-1], {})[resident.request_id] = None

    def _cut(self, piece: int) -> None:
        """Cut the next piece of all contexts whose last one so far is this."""
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


def _digest(adapter: Adapter | None, context: bytes) -> int:
    return hash((adapter, context))


def _chained(piece: int, context: bytes, start: int) -> int:
    return hash((piece, context[start : start + PIECE_BYTES]))


def _common(one: bytes, other: bytes, known: int) -> int:
    """Return how many bytes of whole tokens two contexts share, known to be at least ``known``."""
    most = min(len(one), len(other))
    for start in range(known, most, TOKEN_BYTES):
        if one[start : start + TOKEN_BYTES] != other[start : start + TOKEN_BYTES]:
            return start
    return most
