"""The row cache drops the least recently used rows, and is bounded in bytes of storage.

A stored row is a copy that is never written to; a borrower copies it before a caller sees it. The lock is
held for dictionary work only, never while rows are copied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from genrt.engines.protocol import Finished, failure
from genrt.errors import GenrtError
from genrt.questions.arguments import Adapter
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.tokens.rows import separate_copies


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The counters of the row cache.

    Attributes:
        hits: look-ups that found their row.
        misses: look-ups without a row.
        evictions: rows dropped to make room.
        rows: the present number of rows.
        bytes: the present size of the rows.
        max_bytes: the maximum size.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rows: int = 0
    bytes: int = 0
    max_bytes: int = 0


class RowCache:
    """Rows by request. Safe from any thread; ``max_bytes=0`` stores no rows."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._rows: OrderedDict[LogprobsRequest, Tensor] = OrderedDict()  # the newest use last
        self._bytes = 0
        # Signal handlers and finalizers read statistics, and may interrupt its holder.
        self._lock = threading.RLock()
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    def __contains__(self, request: Request) -> bool:
        with self._lock:
            return request in self._rows

    def borrow(self, request: LogprobsRequest) -> Tensor | None:
        """Return the stored row itself, which must not be written to; count a hit or a miss."""
        with self._lock:
            row = self._rows.get(request) if self._rows else None
            if row is None:
                self._misses += 1
            else:
                self._hits += 1
                self._rows.move_to_end(request)
            return row

    def put(self, request: LogprobsRequest, row: Tensor) -> None:
        """Store a copy of the row, unless it is larger than the cache."""
        for error in self.put_all({request: row}).values():
            raise error

    def keep(self, finished: Sequence[Finished]) -> dict[Request, GenrtError]:
        """Store the rows among these results; return the errors of rows without memory for a copy."""
        rows = {}
        for end in finished:
            if isinstance(end.request, LogprobsRequest) and isinstance(end.result, Tensor):
                rows[end.request] = end.result
        return self.put_all(rows)

    def put_all(self, rows: dict[LogprobsRequest, Tensor]) -> dict[Request, GenrtError]:
        """Store rows of one width, copied together; return the errors of rows without memory for a
        copy."""
        kept, room = [], self.max_bytes
        for request, row in reversed(rows.items()):  # those that these would evict are not copied
            if row.nbytes > room:
                break
            room -= row.nbytes
            kept.append((request, row))
        if not kept:
            return {}
        kept.reverse()
        try:
            copies = separate_copies([row for _, row in kept])
        except Exception as error:
            if len(kept) == 1:
                return {kept[0][0]: failure(error)}
            failed: dict[Request, GenrtError] = {}
            for request, row in kept:
                failed |= self.put_all({request: row})
            return failed
        dropped = []
        with self._lock:
            for (request, _), copy in zip(kept, copies, strict=True):
                if (before := self._rows.pop(request, None)) is not None:
                    dropped.append(before)
                    self._bytes -= before.nbytes
                self._rows[request] = copy
                self._bytes += copy.nbytes
            while self._bytes > self.max_bytes:
                _, row = self._rows.popitem(last=False)
                self._bytes -= row.nbytes
                self._evictions += 1
                dropped.append(row)
        return {}

    def forget(self, adapter: Adapter) -> None:
        """Drop the rows of an adapter."""
        with self._lock:
            requests = [*self._rows]
        for request in requests:  # the lock is not held for the whole look
            if request.adapter == adapter:
                with self._lock:
                    if (row := self._rows.pop(request, None)) is not None:
                        self._bytes -= row.nbytes

    def clear(self) -> None:
        """Drop every row. The counters stay."""
        with self._lock:
            dropped, self._rows, self._bytes = self._rows, OrderedDict(), 0
        del dropped  # without the lock: that takes longer

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return CacheStatistics(
                self._hits,
                self._misses,
                self._evictions,
                len(self._rows),
                self._bytes,
                self.max_bytes,
            )

    def __repr__(self) -> str:
        s = self.statistics()
        return f"RowCache({s.rows} rows, {s.bytes} of {s.max_bytes} bytes, {s.hits} hits)"
