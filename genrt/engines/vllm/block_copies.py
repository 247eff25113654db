"""Copies of KV blocks, of all layers at once.

vLLM copies layer by layer, two kernels each. On a GPU one kernel does for all layers here, where a block
of each layer is one stretch of memory, as it is for models with attention alone.

What this touches of vLLM is listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from genrt.launches import Repeated

__all__ = ["BlockCopies"]

WORD = 8
"""The bytes in a word."""

LEAST = 16
"""How many copies are launched as one at least."""

NOTHING = 0
"""vLLM's null block, which no request has, and which may be copied onto itself."""


class _Stretches(NamedTuple):
    """Where the blocks of a cache are, in words: how long each is, and how far the next one begins after
    it."""

    words: int
    stride: int


class _Staged:
    """Copies of up to so many blocks, as one launch: their numbers go to the device, and a kernel copies.

    Args:
        bases: where the caches begin, int64 ``[layers]`` on the device.
    """

    def __init__(self, most: int, bases: torch.Tensor, stretches: _Stretches) -> None:
        from genrt.engines.block_kernels import copy_words

        on_host = torch.zeros(most, 2, dtype=torch.int64, pin_memory=True)
        there = torch.empty_like(on_host, device=bases.device)

        def go() -> None:
            there.copy_(on_host, non_blocking=True)
            copy_words(bases, there, *stretches)

        self._go = Repeated(go)
        self._pairs = on_host.numpy()
        self._read = torch.Event(bases.device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the second block of each pair a copy of the first."""
        self._read.synchronize()  # the numbers before
        self._pairs[: len(pairs)] = pairs
        self._pairs[len(pairs) :] = NOTHING
        self._go()
        self._read.record()


class BlockCopies:
    """Copies blocks of the KV caches of one runner. It does not hold them.

    Args:
        runner: vLLM's, with its caches; layers may share theirs.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stretches: _Stretches | None = None  # of every cache, on a GPU
        self._bases: torch.Tensor | None = None  # where the different caches begin, on the device
        self._staged: dict[int, _Staged] = {}
        caches = runner.kv_caches
        if caches[0].is_cuda:
            self._stretches = _alike(caches, runner.kv_cache_config.num_blocks)
            addresses = dict.fromkeys(cache.data_ptr() for cache in caches)
            self._bases = torch.tensor([*addresses], device=caches[0].device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the second block of each pair a copy of the first, without synchronizing with the device.
        No block that is copied is a copy itself."""
        if not pairs:
            return
        caches, count = self._runner.kv_caches, self._runner.kv_cache_config.num_blocks
        if self._bases is not None and self._stretches is not None:
            most = LEAST
            while most < len(pairs):
                most *= 2
            if most not in self._staged:
                self._staged[most] = _Staged(most, self._bases, self._stretches)
            self._staged[most].copy(pairs)
        elif self._bases is not None:
            copy_kv_cache_blocks_inplace(caches, count, pairs)
        else:
            # On a CPU, to gather blocks and scatter them takes five times as long as to copy each.
            for cache in {cache.data_ptr(): cache for cache in caches}.values():
                blocks = cache.view(count, -1, *cache.shape[1:])
                for source, copy in pairs:
                    blocks[copy].copy_(blocks[source])


def _alike(caches: Sequence[torch.Tensor], count: int) -> _Stretches | None:
    """Return where the ``count`` blocks of every cache are, if that is the same for all."""
    found = {_stretches(cache, count) for cache in caches}
    return found.pop() if len(found) == 1 else None


def _stretches(cache: torch.Tensor, count: int) -> _Stretches | None:
    """Return where the ``count`` blocks of a cache are, if each is one stretch of whole words. The cache
    may have each in several parts, one after the other; and those of other layers in between."""
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
