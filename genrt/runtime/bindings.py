"""Which requests are bound to which adapter, counted, so that a retired one goes after the last of them.

Pure bookkeeping, under the batcher's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from genrt.questions.contexts import Adapter
from genrt.questions.request import Request

__all__ = ["Bindings"]


class Bindings:
    """How many requests are bound to each adapter, queued, in flight or waiting for room; and the
    adapters that are retired, whose weights are still loaded."""

    def __init__(self) -> None:
        self._bound: Counter[Adapter] = Counter()
        self._retired: list[Adapter] = []

    def bind(self, requests: Iterable[Request], times: int = 1) -> None:
        """Count these for their adapters; -1 times undoes it."""
        for request in requests:
            adapter = request.adapter
            if adapter is not None:
                self._bound[adapter] += times
                if not self._bound[adapter]:
                    del self._bound[adapter]

    def clear(self) -> None:
        """Forget every request; what is retired stays so."""
        self._bound.clear()

    def retire(self, adapter: Adapter) -> None:
        """Have this one go once no request is bound to it."""
        self._retired.append(adapter)

    def gone(self, adapter: Adapter) -> None:
        """Forget a retired adapter: its weights are loaded no more."""
        self._retired.remove(adapter)

    def free(self) -> list[Adapter]:
        """Return the retired adapters that no request is bound to."""
        return [adapter for adapter in self._retired if adapter not in self._bound]

    def __bool__(self) -> bool:
        return bool(self._retired)
