"""Which sequences are resident, and which of them a new context can start from.

Pure bookkeeping, over names that the engine gives its sequences: an engine tells what became resident,
was extended or went, and asks, for a context, for the resident sequence that it can start from.

Two look-ups: a sequence whose whole context is the asked one less its last token (the step of a sampler)
is found by the hash of its context, its *digest*; any other through the chained hashes of its context in
pieces of ``PIECE`` tokens (a fork, an edit, a backtrack). What is found is compared as a whole. Contexts
are packed, as in ``LogprobsRequest``. Both indexes are brought up to date when they are asked:
sequences that only grow, and are guessed, cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from genrt.questions.contexts import TOKEN_BYTES, Adapter

__all__ = ["Residents"]

PIECE = 16
"""Tokens hashed together: look-ups cost a dictionary access for each, and forks share a prefix exactly
if it is at least this long."""

PIECE_BYTES = PIECE * TOKEN_BYTES


@dataclass(slots=True)
class _Resident:
    name: str
    adapter: Adapter | None
    context: bytes
    digest: int | None = None
    pieces: list[int] = field(default_factory=list)


class Residents:
    """Resident sequences by name; a sequence is its adapter and its context."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Resident] = {}
        self._by_digest: dict[int, list[_Resident]] = {}
        self._by_piece: dict[int, dict[str, None]] = {}
        self._without_digest: dict[str, None] = {}
        self._without_pieces: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def put(self, name: str, adapter: Adapter | None, context: bytes) -> None:
        """The sequence is resident with this context; where it was, the context has grown."""
        resident = self._by_name.get(name)
        if resident is None:
            resident = self._by_name[name] = _Resident(name, adapter, context)
        else:
            if resident.digest is not None:
                self._undigest(resident)
            resident.context = context
            self._without_digest.pop(name, None)  # to the end: the last put is found first
        self._without_digest[name] = None
        if len(context) >= (len(resident.pieces) + 1) * PIECE_BYTES:
            self._without_pieces[name] = None

    def remove(self, name: str) -> None:
        """The sequence is resident no more; an unknown name is ignored."""
        resident = self._by_name.pop(name, None)
        if resident is None:
            return
        self._undigest(resident)
        self._without_digest.pop(name, None)
        self._without_pieces.pop(name, None)
        for piece in resident.pieces:
            names = self._by_piece[piece]
            del names[name]
            if not names:
                del self._by_piece[piece]

    def _undigest(self, resident: _Resident) -> None:
        if resident.digest is None:
            return
        alike = self._by_digest[resident.digest]
        if len(alike) == 1:
            del self._by_digest[resident.digest]
        else:
            self._by_digest[resident.digest] = [one for one in alike if one is not resident]
        resident.digest = None

    def names(self) -> list[str]:
        """All of them."""
        return list(self._by_name)

    def bound_to(self, adapter: Adapter | None) -> list[str]:
        """The names of an adapter's sequences."""
        return [name for name, resident in self._by_name.items() if resident.adapter == adapter]

    def is_parent(self, name: str, adapter: Adapter | None, context: bytes) -> bool:
        """Whether this sequence's context is this one less its last token: to try a guess."""
        resident = self._by_name.get(name)
        return (
            resident is not None
            and len(resident.context) == len(context) - TOKEN_BYTES
            and context.startswith(resident.context)
            and resident.adapter == adapter
        )

    def parent(self, adapter: Adapter | None, context: bytes) -> str | None:
        """The sequence whose context is this one less its last token; of several, the last put."""
        self._digest_all()
        before = context[:-TOKEN_BYTES]
        for resident in reversed(self._by_digest.get(_digest(adapter, before), ())):
            if resident.context == before and resident.adapter == adapter:
                return resident.name
        return None

    def nearest(self, adapter: Adapter | None, context: bytes) -> tuple[str, int] | None:
        """A sequence that shares the longest prefix with this context, and how many tokens that is, at
        least ``PIECE`` and less than all of them; ``None`` if there is none."""
        self._cut_pieces()
        piece = hash(adapter)
        candidates: dict[str, None] = {}
        shared = 0
        for start in range(0, len(context) - PIECE_BYTES + 1, PIECE_BYTES):
            piece = _chained(piece, context, start)
            found = self._by_piece.get(piece)
            if found is None:
                break
            candidates, shared = found, start + PIECE_BYTES
        most = len(context) // TOKEN_BYTES - 1
        best: tuple[str, int] | None = None
        for name in candidates:
            resident = self._by_name[name]
            if resident.adapter != adapter or not resident.context.startswith(context[:shared]):
                continue  # equal hashes of unequal pieces
            length = _common(resident.context, context, shared) // TOKEN_BYTES
            if best is None or length > best[1]:
                best = name, length
            if length >= most:
                break
        return None if best is None else (best[0], min(best[1], most))

    def _digest_all(self) -> None:
        for name in self._without_digest:
            resident = self._by_name[name]
            resident.digest = digest = _digest(resident.adapter, resident.context)
            self._by_digest.setdefault(digest, []).append(resident)
        self._without_digest.clear()

    def _cut_pieces(self) -> None:
        for name in self._without_pieces:
            resident = self._by_name[name]
            pieces, context = resident.pieces, resident.context
            for start in range(
                len(pieces) * PIECE_BYTES, len(context) - PIECE_BYTES + 1, PIECE_BYTES
            ):
                piece = _chained(pieces[-1] if pieces else hash(resident.adapter), context, start)
                pieces.append(piece)
                self._by_piece.setdefault(piece, {})[name] = None
        self._without_pieces.clear()


def _digest(adapter: Adapter | None, context: bytes) -> int:
    return hash((adapter, context))


def _chained(piece: int, context: bytes, start: int) -> int:
    return hash((piece, context[start : start + PIECE_BYTES]))


def _common(one: bytes, other: bytes, known: int) -> int:
    """How many bytes of whole tokens two contexts share, the first ``known`` of which they do."""
    most = min(len(one), len(other))
    for start in range(known, most, TOKEN_BYTES):
        if one[start : start + TOKEN_BYTES] != other[start : start + TOKEN_BYTES]:
            return start
    return most
