"""Copies KV blocks in all layers at once.

vLLM copies layer by layer, with two kernels each. On a GPU this file uses one kernel for all layers. It
needs each block of a layer to be one stretch of memory, as in models with attention alone.

The parts of vLLM that this file uses are listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from genrt.launches import Staged, room_for

__all__ = ["BlockCopies"]

WORD = 8
"""The bytes in a word."""

NOTHING = 0
"""vLLM's null block: no request has it, and it may be copied onto itself."""


class _Stretches(NamedTuple):
    """Where a cache's blocks are, in words: the length of a block, and the distance between the starts of
    two blocks."""

    words: int
    stride: int


class BlockCopies:
    """Copies blocks of the KV caches of one runner. It keeps no references to the caches.

    Args:
        runner: vLLM's, with its caches; layers may share a cache.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stretches: _Stretches | None = None  # of every cache, on a GPU
        self._bases: torch.Tensor | None = None  # addresses of the distinct caches, on the device
        self._staged: dict[int, Staged] = {}
        caches = runner.kv_caches
        if caches[0].is_cuda:
            self._stretches = _alike(caches, runner.kv_cache_config.num_blocks)
            addresses = dict.fromkeys(cache.data_ptr() for cache in caches)
            self._bases = torch.tensor([*addresses], device=caches[0].device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the second block of each pair a copy of the first, one pair after the other, without
        synchronizing with the device."""
        for group in _independent(pairs):
            self._copy(group)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        caches, count = self._runner.kv_caches, self._runner.kv_cache_config.num_blocks
        if self._bases is not None and self._stretches is not None:
            most = room_for(len(pairs))
            if most not in self._staged:
                self._staged[most] = _staged(most, self._bases, self._stretches)
            numbers = self._staged[most].free()
            numbers[: len(pairs)] = pairs
            numbers[len(pairs) :] = NOTHING
            self._staged[most].launch()
        elif self._bases is not None:
            copy_kv_cache_blocks_inplace(caches, count, pairs)
        else:
            # On a CPU, gathering and scattering blocks takes five times as long as copying each block.
            for cache in {cache.data_ptr(): cache for cache in caches}.values():
                blocks = cache.view(count, -1, *cache.shape[1:])
                for source, copy in pairs:
                    blocks[copy].copy_(blocks[source])


def _independent(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split the pairs into groups that can each be copied at once: within a group, no pair writes a block
    that another pair reads or writes."""
    groups: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, copy in pairs:
        if not groups or source in written or copy in written or copy in read:
            groups.append([])
            read, written = set(), set()
        groups[-1].append((source, copy))
        read.add(source)
        written.add(copy)
    return groups


def _staged(most: int, bases: torch.Tensor, stretches: _Stretches) -> Staged:
    """Return one launch that copies up to ``most`` blocks, for caches at the addresses ``bases``, int64
    ``[layers]`` on the device."""
    from genrt.engines.block_kernels import copy_words

    return Staged((most, 2), bases.device, lambda pairs: copy_words(bases, pairs, *stretches))


def _alike(caches: Sequence[torch.Tensor], count: int) -> _Stretches | None:
    """Return where the ``count`` blocks of every cache are; ``None`` if the caches differ."""
    found = {_stretches(cache, count) for cache in caches}
    return found.pop() if len(found) == 1 else None


def _stretches(cache: torch.Tensor, count: int) -> _Stretches | None:
    """Return where the ``count`` blocks of a cache are; ``None`` unless each is a stretch of whole words.

    A block may consist of several parts, one after the other. Blocks of other layers may lie in between.
    """
    parts, rest = divmod(cache.shape[0], count)
    dense = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size > 1 and stride != dense:
            return None
        dense *= size
    if rest or (parts > 1 and cache.stride(0) != dense):
        return None
    lengths = [entries * parts * cache.element_size() for entries in (dense, cache.stride(0))]
    if any(each % WORD for each in (*lengths, cache.data_ptr())):
        return None
    words, stride = (each // WORD for each in lengths)
    return _Stretches(words, stride)
