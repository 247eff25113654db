"""Draws from a step's rows as one launch: what they need goes to the device, two kernels draw, and the
draws come back, all of it one CUDA graph. Where it can't be, the same is launched piece by piece.

The kernels find the rows by an address that goes with the masks: a step's rows lie elsewhere each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from genrt.launches import Repeated
from genrt.tokens.rows import Leaving
from genrt.tokens.sampling import BLOCK, GREEDY_BELOW, LARGEST, has_kernels

__all__ = ["DrawGraphs", "Draws", "fill"]

MOST_KINDS = 4
"""How many kinds of draws, by their number and masks, have their memory at once."""

MOST_DRAWS = 4096
"""How many draws are one launch at most: the memory for their masks stays."""

MANY_BYTES = 2**18
"""Masks of so many bytes are copied by all of torch's threads."""


class Draws(NamedTuple):
    """Some of the draws of a launch.

    Attributes:
        seeds: uint64 ``[n]``.
        masks: packed, uint8 ``[n, size]``; of all in a launch, or of none.
        places: int64 ``[n]``: draw ``i`` is from row ``places[i]``; ``None``: from row ``i``.
    """

    seeds: np.ndarray
    masks: np.ndarray | None
    places: np.ndarray | None


class _Kind(NamedTuple):
    """The draws that one graph can make: so many, and the shapes of their rows and masks."""

    draws: int
    mask_bytes: int
    width: int
    stride: int


class DrawGraphs:
    """Draws from rows on one GPU, for one thread: each batch once the one before has arrived."""

    def __init__(self) -> None:
        self._kinds: LRUCache[_Kind, _Graph] = LRUCache(MOST_KINDS)

    def drawn(self, rows: Tensor, several: Sequence[Draws]) -> tuple[Tensor, Leaving] | None:
        """Return what ``sampling.drawn`` does, by ``sampling.seeded_uniforms``, of several draws one
        after the other, and the same on its way to the host: valid until the next call. Return ``None``
        where there are no kernels for these rows, float32 ``[m, V]``, or only some have masks."""
        count = sum(len(each.seeds) for each in several)
        first, *others = [0 if each.masks is None else each.masks.shape[1] for each in several]
        if not has_kernels(rows) or count > MOST_DRAWS or rows.data_ptr() % 16:
            return None
        if any(mask_bytes != first for mask_bytes in others):
            return None
        kind = _Kind(_rounded(count), first, rows.shape[1], rows.stride(0))
        if kind not in self._kinds:
            self._kinds[kind] = _Graph(kind, rows.device)
        return self._kinds[kind].drawn(rows, several)


class _Graph:
    """Draws of one kind. They stand in one piece of memory: the address of the rows and a word of
    padding, the rows' places, the seeds, the masks."""

    def __init__(self, kind: _Kind, device: torch.device) -> None:
        from genrt.tokens.draw_kernels import launch

        count, mask_bytes, width, stride = kind
        words = 2 + 2 * count
        pinned = device.type == "cuda"
        on_host = torch.empty(8 * words + count * mask_bytes, dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty_like(on_host, device=device)
        found = torch.empty(count, 3, dtype=torch.float64, device=device)
        arriving = torch.empty(count, 3, dtype=torch.float64, pin_memory=pinned)
        reduced = torch.empty(count, 2, -(-width // BLOCK), device=device)
        numbers, bits = there[: 8 * words].view(torch.int64), there[8 * words :]
        address, places, seeds = numbers[:2], numbers[2 : 2 + count], numbers[2 + count :]
        masks = bits.view(count, mask_bytes) if mask_bytes else None

        def go() -> None:
            there.copy_(on_host, non_blocking=True)
            launch(
                address,
                stride,
                width,
                seeds,
                places,
                masks,
                reduced,
                found,
                block=BLOCK,
                largest=LARGEST,
                greedy_below=GREEDY_BELOW,
            )
            arriving.copy_(found, non_blocking=True)

        self._go = Repeated(go)
        self._found, self._arriving = found, arriving
        self._numbers = on_host[: 8 * words].view(torch.int64).numpy()
        self._places = self._numbers[2 : 2 + count]
        self._seeds = self._numbers[2 + count :].view(np.uint64)
        self._masks = on_host[8 * words :].view(count, mask_bytes) if mask_bytes else None
        self._last: Leaving | None = None

    def drawn(self, rows: Tensor, several: Sequence[Draws]) -> tuple[Tensor, Leaving]:
        if self._last is not None:
            self._last.arrived()  # or an interrupt has left its copy under way
        self._numbers[0] = rows.data_ptr()
        count = 0
        for seeds, masks, places in several:
            part = slice(count, count + len(seeds))
            self._seeds[part] = seeds
            self._places[part] = np.arange(len(seeds)) if places is None else places
            if masks is not None and self._masks is not None:
                fill(self._masks[part], masks)
            count = part.stop
        self._places[count:] = 0
        self._go()
        self._last = Leaving.lent(self._arriving[:count], rows.device)
        return self._found[:count], self._last


def fill(target: Tensor, masks: np.ndarray) -> None:
    """Copy packed masks on the host: many of them on several cores."""
    if masks.flags.writeable and masks.nbytes > MANY_BYTES:
        target.copy_(torch.from_numpy(masks))
    else:
        target.numpy()[:] = masks


def _rounded(count: int) -> int:
    """Return for how many draws memory is taken: as texts end they become fewer, step by step."""
    step = 16 if count <= 256 else 64
    return -(-count // step) * step
