"""The prefixes that a runtime keeps, whichever engine it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest

__all__ = ["MOST_PREFIXES", "PrefixesToKeep"]

MOST_PREFIXES = 64
"""The most prefixes of a runtime: an engine may look at each of them after every step."""


class PrefixesToKeep:
    """Contexts that every engine of the runtime is told to keep. Safe from any thread."""

    def __init__(self) -> None:
        self._rows: dict[LogprobsRequest, None] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[LogprobsRequest]:
        """Yield them, the newest at the end."""
        return iter(list(self._rows))

    def add(self, prefix: LogprobsRequest) -> list[LogprobsRequest]:
        """Add one, the newest now, and return those that have to go: the oldest of too many."""
        with self._lock:
            self._rows.pop(prefix, None)
            self._rows[prefix] = None
            over = list(self._rows)[:-MOST_PREFIXES]
            for each in over:
                del self._rows[each]
        return over

    def discard(self, prefix: LogprobsRequest) -> None:
        """Remove one; ignore any other."""
        with self._lock:
            self._rows.pop(prefix, None)

    def bound_to(self, adapter: Adapter) -> list[LogprobsRequest]:
        """Return those of an adapter."""
        return [each for each in self if each.adapter == adapter]
