"""Writes the device tables of vLLM's model runner V2 for requests that take other seats.

The tables hold each sequence's number of computed tokens, its length and its blocks. vLLM stages writes
and applies them table by table; here all writes are one launch.

The parts of vLLM that this file uses are listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genrt.engines.vllm.seats import Seat
from genrt.launches import Staged, room_for

__all__ = ["SeatTables"]


class SeatTables:
    """The tables of one runner, with one group of blocks.

    Args:
        runner: vLLM's.
    """

    def __init__(self, runner: Any) -> None:
        self._states, self._blocks = runner.req_states, runner.block_tables
        self._staged: dict[tuple[int, int], Staged] = {}

    def write(self, seats: Sequence[Seat]) -> None:
        """Make these distinct requests continue as other sequences."""
        states, blocks = self._states, self._blocks
        slots = np.array([states.req_id_to_index[seat.request.request_id] for seat in seats])
        lengths = [seat.length for seat in seats]
        for on_host in (states.prompt_len, states.prefill_len):
            on_host.np[slots] = lengths
            on_host.copy_to_uva()
        states.num_computed_prefill_tokens[slots] = states.num_computed_tokens_np[slots] = lengths
        counts = np.array([len(seat.block_ids) for seat in seats])
        kept = np.array([seat.kept for seat in seats])
        blocks.num_blocks.np[0, slots] = kept + counts
        blocks.num_blocks.copy_to_uva()
        # For each block: the place of its seat's first block, and the distance from there.
        firsts = slots * blocks.block_tables[0].gpu.shape[1] + kept
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
        block_ids = [block_id for seat in seats for block_id in seat.block_ids]
        key = room_for(len(slots)), room_for(len(places))
        if key not in self._staged:
            self._staged[key] = self._writes(*key)
        parts = np.split(self._staged[key].free(), _cuts(*key))
        columns: list[Any] = [slots, lengths, places, block_ids]
        for part, numbers in zip(parts, columns, strict=True):
            part[: len(numbers)] = numbers
            part[len(numbers) :] = numbers[-1]  # padding repeats the last write
        self._staged[key].launch()

    def _writes(self, seats: int, blocks: int) -> Staged:
        """Return one launch that writes this many seats and blocks."""
        computed, total = self._states.num_computed_tokens.gpu, self._states.total_len.gpu
        table = self._blocks.block_tables[0].gpu
        small = torch.empty(2 * (seats + blocks), dtype=table.dtype, device=table.device)

        def go(numbers: torch.Tensor) -> None:
            small.copy_(numbers)
            slots, _, places, _ = numbers.tensor_split(_cuts(seats, blocks))
            _, lengths, _, block_ids = small.tensor_split(_cuts(seats, blocks))
            computed.scatter_(0, slots, lengths)
            total.scatter_(0, slots, lengths)
            table.view(-1).scatter_(0, places, block_ids)

        return Staged((len(small),), table.device, go)


def _cuts(seats: int, blocks: int) -> list[int]:
    """Return where slots, lengths, places and blocks are split."""
    return [seats, 2 * seats, 2 * seats + blocks]
