"""Which sequences are resident, and which of them a new context can start from.

Pure bookkeeping, over names that the engine gives its sequences: an engine tells what became resident,
was extended or went, and asks, for a context, for the resident sequence that shares the longest prefix.

Two look-ups: a sequence whose whole context is the asked one less its last token is found in one
dictionary access (the step of a sampler); any other through the chained hashes of its context in pieces
of ``PIECE`` tokens, the last shared piece then compared token by token (a fork, an edit, a backtrack).
"""

from __future__ import annotations

from dataclasses import dataclass

from genrt.engine import Adapter

__all__ = ["Residents"]

PIECE = 16
"""Tokens hashed together: look-ups cost a dictionary access for each, and forks share a prefix exactly
if it is at least this long."""


@dataclass(slots=True)
class _Resident:
    adapter: Adapter | None
    token_ids: tuple[int, ...]
    pieces: list[int]


class Residents:
    """Resident sequences by name; a sequence is its adapter and its token ids."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Resident] = {}
        self._by_context: dict[tuple[Adapter | None, tuple[int, ...]], str] = {}
        self._by_piece: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def put(self, name: str, adapter: Adapter | None, token_ids: tuple[int, ...]) -> None:
        """The sequence is resident with this context; where it was, the context has grown."""
        old = self._by_name.get(name)
        if old is None:
            old = self._by_name[name] = _Resident(adapter, (), [])
        elif self._by_context.get((adapter, old.token_ids)) == name:
            del self._by_context[adapter, old.token_ids]
        old.token_ids = token_ids
        self._by_context[adapter, token_ids] = name
        for start in range(len(old.pieces) * PIECE, len(token_ids) - PIECE + 1, PIECE):
            piece = _chained(old.pieces[-1] if old.pieces else hash(adapter), token_ids, start)
            old.pieces.append(piece)
            self._by_piece.setdefault(piece, {})[name] = None

    def remove(self, name: str) -> None:
        """The sequence is resident no more; an unknown name is ignored."""
        resident = self._by_name.pop(name, None)
        if resident is None:
            return
        context = (resident.adapter, resident.token_ids)
        if self._by_context.get(context) == name:
            del self._by_context[context]
        for piece in resident.pieces:
            names = self._by_piece[piece]
            del names[name]
            if not names:
                del self._by_piece[piece]

    def names(self) -> list[str]:
        """All of them."""
        return list(self._by_name)

    def bound_to(self, adapter: Adapter | None) -> list[str]:
        """The names of an adapter's sequences."""
        return [name for name, resident in self._by_name.items() if resident.adapter == adapter]

    def parent(self, adapter: Adapter | None, token_ids: tuple[int, ...]) -> str | None:
        """The sequence whose context is ``token_ids`` less the last one."""
        return self._by_context.get((adapter, token_ids[:-1]))

    def nearest(
        self, adapter: Adapter | None, token_ids: tuple[int, ...]
    ) -> tuple[str, int] | None:
        """A sequence that shares the longest prefix with ``token_ids``, and how many tokens that is, at
        least ``PIECE`` and less than all of them; ``None`` if there is none."""
        piece = hash(adapter)
        candidates: dict[str, None] = {}
        shared = 0
        for start in range(0, len(token_ids) - PIECE + 1, PIECE):
            piece = _chained(piece, token_ids, start)
            found = self._by_piece.get(piece)
            if found is None:
                break
            candidates, shared = found, start + PIECE
        best: tuple[str, int] | None = None
        for name in candidates:
            resident = self._by_name[name]
            if resident.adapter != adapter or resident.token_ids[:shared] != token_ids[:shared]:
                continue  # equal hashes of unequal pieces
            length = shared + _common(resident.token_ids[shared:], token_ids[shared:])
            if best is None or length > best[1]:
                best = name, length
            if length >= len(token_ids) - 1:
                break
        if best is None:
            return None
        return best[0], min(best[1], len(token_ids) - 1)


def _chained(piece: int, token_ids: tuple[int, ...], start: int) -> int:
    return hash((piece, token_ids[start : start + PIECE]))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
