"""Which sequences are resident, and which of them a context extends.

Pure bookkeeping. An engine records which sequence became resident, was extended or ended, each by the id
of the vLLM request that keeps it, and asks for the sequence whose context is a given one, or a given one
less its last token. Contexts are packed, as in ``LogprobsRequest``.

The index is updated when it is read: a sequence that only grows and is guessed costs nothing. Contexts of
a population are not read before that either (``put_later``), since a population is found by number. A
context that shares a part with a resident one starts from vLLM's prefix cache, at its last full block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from genrt.questions.contexts import TOKEN_BYTES, Adapter

__all__ = ["Packed", "Residents"]

Packed: TypeAlias = Callable[[int], bytes]
"""Returns the context of the sequence with this number."""


Resident: TypeAlias = tuple[Adapter | None, bytes]
"""An adapter and a context."""


class Residents:
    """Resident sequences by request id; a sequence is its adapter and its context."""

    def __init__(self) -> None:
        self._by_id: dict[str, Resident] = {}
        self._ids_of: dict[Resident, dict[str, None]] = {}  # all but the unfiled
        self._unfiled: dict[str, None] = {}
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
        self.remove(request_id)
        self._by_id[request_id] = adapter, context
        self._unfiled[request_id] = None

    def remove(self, request_id: str) -> None:
        """Record that a sequence is resident no more; an unknown id is ignored."""
        self._later.pop(request_id, None)
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        if request_id in self._unfiled:
            del self._unfiled[request_id]
            return
        alike = self._ids_of[sequence]
        del alike[request_id]
        if not alike:
            del self._ids_of[sequence]

    def request_ids(self) -> list[str]:
        """Return the ids of all resident sequences."""
        self._put_all()
        return list(self._by_id)

    def bound_to(self, adapter: Adapter | None) -> list[str]:
        """Return the ids of an adapter's sequences."""
        self._put_all()
        return [each for each, (other, _) in self._by_id.items() if other == adapter]

    def is_parent(self, request_id: str, adapter: Adapter | None, context: bytes) -> bool:
        """Return whether this sequence's context is the given one less its last token: to try a guess."""
        other, parent = self._by_id.get(request_id, (None, context))
        return (
            len(parent) == len(context) - TOKEN_BYTES
            and context.startswith(parent)
            and other == adapter
            and request_id not in self._later
        )

    def parent(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, of several the last put, whose context is this one less its last token."""
        return self.of_context(adapter, context[:-TOKEN_BYTES])

    def of_context(self, adapter: Adapter | None, context: bytes) -> str | None:
        """Return the sequence, of several the last put, whose context is this one."""
        self._put_all()
        for request_id in self._unfiled:
            self._ids_of.setdefault(self._by_id[request_id], {})[request_id] = None
        self._unfiled.clear()
        return next(reversed(self._ids_of.get((adapter, context), {})), None)
