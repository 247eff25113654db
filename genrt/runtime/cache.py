"""Rows we still have: least recently used out, bounded in bytes.

Rules:
    A stored row is nobody else's: it is copied in, and never written to. Who borrows one copies it
    before anybody else sees it.
    The bound counts the storage that is really held, not the tensor's own length.
    The lock is held for dictionary work only, never while a row is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from cachetools import LRUCache
from torch import Tensor

from genrt.engines.protocol import Finished, failure
from genrt.errors import GenrtError
from genrt.questions.contexts import Adapter
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.tokens.rows import separate_copies

__all__ = ["CacheStatistics", "RowCache"]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters of the row cache, and its size.

    Attributes:
        hits: look-ups that found their row.
        misses: look-ups that did not.
        evictions: rows dropped to make room.
        rows: rows held at this moment.
        bytes: what they take.
        max_bytes: the bound of that.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rows: int = 0
    bytes: int = 0
    max_bytes: int = 0


class RowCache:
    """Rows by request. Safe from any thread; ``max_bytes=0`` keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows = self._empty()
        # Statistics are also read by signal handlers and finalizers, which may interrupt whoever has it.
        self._lock = threading.RLock()
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    @property
    def max_bytes(self) -> int:
        """The bound; 0 keeps nothing."""
        return self._max_bytes

    def __contains__(self, request: Request) -> bool:
        with self._lock:
            return request in self._rows

    def borrow(self, request: LogprobsRequest) -> Tensor | None:
        """Return the stored row itself, which is not to be written to; count a hit or a miss."""
        with self._lock:
            row = self._rows.get(request) if self._max_bytes else None
            if row is None:
                self._misses += 1
            else:
                self._hits += 1
            return row

    def put(self, request: LogprobsRequest, row: Tensor) -> None:
        """Keep a copy of the row; one that is larger than the whole cache is not kept."""
        for error in self.put_all({request: row}).values():
            raise error

    def keep(self, finished: Sequence[Finished]) -> dict[Request, GenrtError]:
        """Put the rows that are among these ends; return the errors of those there is no memory for."""
        rows = {
            end.request: end.result
            for end in (finished if self._max_bytes else ())
            if isinstance(end.request, LogprobsRequest) and isinstance(end.result, Tensor)
        }
        return {each: failure(error) for each, error in self.put_all(rows).items()}

    def put_all(self, rows: dict[LogprobsRequest, Tensor]) -> dict[LogprobsRequest, Exception]:
        """Put each in turn, all copied at once; those that the ones after them drive out again are not
        copied at all. Return the errors of those for whose copies there is no memory."""
        try:
            self._put(rows)
        except Exception as error:
            if len(rows) == 1:
                return dict.fromkeys(rows, error)
        else:
            return {}
        failed: dict[LogprobsRequest, Exception] = {}
        for request, row in rows.items():
            failed |= self.put_all({request: row})
        return failed

    def _put(self, rows: dict[LogprobsRequest, Tensor]) -> None:
        kept, passing = self._divided(rows)
        if not kept:
            return
        copies = separate_copies(list(kept.values()))
        with self._lock:
            self._evictions += sum(request not in self._rows for request in passing)
            for request, copy in zip(kept, copies, strict=True):
                before = len(self._rows) + (request not in self._rows)
                self._rows[request] = copy
                self._evictions += before - len(self._rows)

    def _divided(
        self, rows: dict[LogprobsRequest, Tensor]
    ) -> tuple[dict[LogprobsRequest, Tensor], list[LogprobsRequest]]:
        """Return the last rows, as many as fit at once, and the requests of those before them."""
        fitting = [(each, row) for each, row in rows.items() if row.nbytes <= self._max_bytes]
        room, first = self._max_bytes, len(fitting)
        while first and room >= fitting[first - 1][1].nbytes:
            first -= 1
            room -= fitting[first][1].nbytes
        return dict(fitting[first:]), [request for request, _ in fitting[:first]]

    def forget(self, adapter: Adapter) -> None:
        """Drop the rows of an adapter that no later request can name."""
        with self._lock:
            requests = [*self._rows]
        for request in requests:  # a look at each takes too long for others to wait
            if request.adapter == adapter:
                with self._lock:
                    self._rows.pop(request, None)

    def clear(self) -> None:
        """Drop every row. The counters stay."""
        empty = self._empty()
        with self._lock:
            dropped, self._rows = self._rows, empty
        del dropped  # without the lock: that takes longer

    def _empty(self) -> LRUCache[LogprobsRequest, Tensor]:
        return LRUCache(self._max_bytes, getsizeof=_storage_bytes)

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return CacheStatistics(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                rows=len(self._rows),
                bytes=int(self._rows.currsize),
                max_bytes=self._max_bytes,
            )

    def __repr__(self) -> str:
        s = self.statistics()
        return f"RowCache({s.rows} rows, {s.bytes} of {s.max_bytes} bytes, {s.hits} hits)"


def _storage_bytes(row: Tensor) -> int:
    return row.untyped_storage().nbytes()
