"""Rows we still have: least recently used out, bounded in bytes.

Rules:
    A stored row is nobody else's: it is copied in, and never written to. Who borrows one copies it
    before anybody else sees it.
    The bound counts the storage that is really held, not the tensor's own length.
    The lock is held for dictionary work only, never while a row is copied.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from cachetools import LRUCache

from genrt.engine import Adapter, LogprobsRequest

__all__ = ["CacheStatistics", "RowCache"]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """``hits`` and ``misses`` of look-ups, ``evictions`` for want of room, and the ``rows`` and
    ``bytes`` held now, of ``max_bytes``."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rows: int = 0
    bytes: int = 0
    max_bytes: int = 0


class RowCache:
    """Rows by request. Safe from any thread; ``max_bytes=0`` keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._rows: LRUCache[LogprobsRequest, torch.Tensor] = LRUCache(
            max_bytes, getsizeof=_storage_bytes
        )
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    def __contains__(self, request: LogprobsRequest) -> bool:
        with self._lock:
            return request in self._rows

    def borrow(self, request: LogprobsRequest) -> torch.Tensor | None:
        """The stored row itself, to be copied and not written to, or ``None``; counts a hit or a miss."""
        with self._lock:
            row = self._rows.get(request)
            if row is None:
                self._misses += 1
            else:
                self._hits += 1
            return row

    def put(self, request: LogprobsRequest, row: torch.Tensor) -> None:
        """Keep a copy of the row; one that is larger than the whole cache is not kept."""
        if row.numel() * row.element_size() > self._rows.maxsize:
            return
        own = row.clone()
        with self._lock:
            before = len(self._rows) + (request not in self._rows)
            self._rows[request] = own
            self._evictions += before - len(self._rows)

    def forget(self, adapter: Adapter) -> None:
        """Drop the rows of an adapter that no later request can name."""
        with self._lock:
            for request in [r for r in self._rows if r.adapter == adapter]:
                del self._rows[request]

    def clear(self) -> None:
        """Drop every row. The counters stay."""
        with self._lock:
            self._rows.clear()

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return CacheStatistics(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                rows=len(self._rows),
                bytes=int(self._rows.currsize),
                max_bytes=int(self._rows.maxsize),
            )

    def __repr__(self) -> str:
        s = self.statistics()
        return f"RowCache({s.rows} rows, {s.bytes} of {s.max_bytes} bytes, {s.hits} hits)"


def _storage_bytes(row: torch.Tensor) -> int:
    return row.untyped_storage().nbytes()
