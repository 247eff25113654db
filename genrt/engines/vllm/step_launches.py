"""Writes tokens to the forward of a prepared step, and makes rows from it: one launch each on a GPU.

The parts of vLLM that this file uses are listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cachetools import LRUCache

from genrt.engines.vllm.capture import log_probabilities
from genrt.launches import Graphs, Repeated, Staged

__all__ = ["InputTokens", "Rows", "read_elsewhere", "rows_of"]

MOST_SIZES = 4
"""The most step sizes with allocated rows."""


def rows_of(logits: torch.Tensor) -> torch.Tensor:
    """Return the rows of a step's logits, without synchronizing with the device."""
    return read_elsewhere(log_probabilities(logits, may_overwrite=True))


def read_elsewhere(rows: torch.Tensor) -> torch.Tensor:
    """Mark rows of vLLM's stream as read on the default stream, and return them."""
    if rows.is_cuda:
        rows.record_stream(torch.cuda.default_stream(rows.device))
    return rows


class Rows:
    """Makes rows from hidden states that have the same address whenever there are as many.

    Args:
        compute_logits: the model's.
    """

    def __init__(self, compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute_logits = compute_logits
        self._graphs = Graphs()
        self._sizes: LRUCache[tuple[int, int], _OfSize] = LRUCache(MOST_SIZES)

    def of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows. They are valid until rows of the same size are made again."""
        key = hidden_states.data_ptr(), len(hidden_states)
        if key not in self._sizes:
            self._sizes[key] = _OfSize(hidden_states, self._compute_logits, self._graphs)
        return self._sizes[key].made()


class _OfSize:
    """The rows of one number of hidden states."""

    def __init__(
        self,
        hidden_states: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        graphs: Graphs,
    ) -> None:
        self._rows = hidden_states

        def make() -> None:
            self._rows = rows_of(compute_logits(hidden_states))

        self._make = Repeated(make, graphs=graphs)

    def made(self) -> torch.Tensor:
        self._make()
        return self._rows


class InputTokens:
    """Writes the tokens of prepared steps to the runner's input buffer, int32."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        self._input_ids = input_ids
        self._several: dict[int, _Several] = {}

    def put(self, token_ids: torch.Tensor, order: Sequence[int] | None) -> None:
        """Write token ``order[i]``, or ``i``, at place ``i``; a negative number becomes token 0."""
        count = len(token_ids)
        if count not in self._several:
            self._several[count] = _Several(self._input_ids[:count])
        self._several[count].put(token_ids, order)


class _Several:
    """``InputTokens`` for one number of tokens."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        given, taken = torch.zeros(2, len(input_ids), dtype=torch.float64, device=input_ids.device)
        self._given = given

        def take(order: torch.Tensor) -> None:
            torch.index_select(given, 0, order, out=taken)
            input_ids.copy_(taken.clamp_(min=0.0))

        self._take = Staged((len(input_ids),), input_ids.device, take)
        self._order: Sequence[int] | None = ()

    def put(self, token_ids: torch.Tensor, order: Sequence[int] | None) -> None:
        self._given.copy_(token_ids, non_blocking=True)
        if order != self._order:
            self._take.free()[:] = range(len(token_ids)) if order is None else order
            self._order = order
        self._take.launch()
