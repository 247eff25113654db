"""Draws from a step's rows with one launch, a CUDA graph.

The graph copies the inputs to the device, draws with two kernels and copies the draws back. Where capture
fails, the same work is launched piece by piece. The address of the rows is copied with the masks, because
each step's rows have another address.
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
"""The most kinds of draws, by number and mask size, with allocated memory."""

MOST_DRAWS = 4096
"""The most draws in one launch; the memory for their masks stays allocated."""

MANY_BYTES = 2**18
"""Masks with more bytes are copied by all of torch's threads."""


class Draws(NamedTuple):
    """Some of the draws of a launch.

    Attributes:
        seeds: uint64 ``[n]``.
        masks: packed, uint8 ``[n, size]``; in a launch, either all draws have masks or no draw has one.
        places: int64 ``[n]``: draw ``i`` is from row ``places[i]``; ``None``: from row ``i``.
    """

    seeds: np.ndarray
    masks: np.ndarray | None
    places: np.ndarray | None


class _Kind(NamedTuple):
    """The draws that one graph can make: their number, and the shapes of their rows and masks."""

    draws: int
    mask_bytes: int
    width: int
    stride: int


class DrawGraphs:
    """Draws from rows on one GPU, for one thread. A batch must arrive before the next one starts."""

    def __init__(self) -> None:
        self._kinds: LRUCache[_Kind, _Graph] = LRUCache(MOST_KINDS)

    def drawn(self, rows: Tensor, several: Sequence[Draws]) -> tuple[Tensor, Leaving] | None:
        """Return the result of ``sampling.drawn`` for several groups of draws, and its copy to the host.

        Both are valid until the next call. The random numbers are ``sampling.seeded_uniforms``. Return
        ``None`` where there are no kernels for these rows, float32 ``[m, V]``, or if only some of the
        draws have masks.
        """
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
    """Draws of one kind. Their inputs are in one piece of memory: the address of the rows with a word of
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
            self._last.arrived()  # an interrupt may have skipped the wait for the last copy
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
    """Copy packed masks on the host; large ones use several cores."""
    if masks.flags.writeable and masks.nbytes > MANY_BYTES:
        target.copy_(torch.from_numpy(masks))
    else:
        target.numpy()[:] = masks


def _rounded(count: int) -> int:
    """Return the number of draws to allocate for; rounding limits the sizes as texts end one by one."""
    step = 16 if count <= 256 else 64
    return -(-count // step) * step
