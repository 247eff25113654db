"""Copies of KV blocks, of all layers at once.

vLLM copies layer by layer, two kernels each. On a GPU one kernel does for all layers here, where a block
of each layer is one stretch of memory, as it is for models with attention alone.

What this touches of vLLM is listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

__all__ = ["BlockCopies"]


class BlockCopies:
    """Copies blocks of the KV caches of one runner. It does not hold them.

    Args:
        runner: vLLM's, with its caches; layers may share theirs.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._bases: torch.Tensor | None = None  # where the different caches begin, on the device
        self._words: int | None = None
        if runner.kv_caches[0].is_cuda:
            count = runner.kv_cache_config.num_blocks
            words = {_words_of_a_block(cache, count) for cache in runner.kv_caches}
            self._words = words.pop() if len(words) == 1 else None
            addresses = [cache.untyped_storage().data_ptr() for cache in runner.kv_caches]
            different = list(dict.fromkeys(addresses))
            self._bases = torch.tensor(different, device=runner.kv_caches[0].device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the second block of each pair a copy of the first, without synchronizing with the device.
        No block that is copied is a copy itself."""
        if not pairs:
            return
        caches, count = self._runner.kv_caches, self._runner.kv_cache_config.num_blocks
        if self._bases is not None and self._words is not None:
            from genrt.engines.block_kernels import copy_words

            on_host = torch.tensor(pairs, pin_memory=True)
            copy_words(self._bases, on_host.to(self._bases.device, non_blocking=True), self._words)
        elif self._bases is not None:
            copy_kv_cache_blocks_inplace(caches, count, pairs)
        else:
            # On a CPU, to gather blocks and scatter them takes five times as long as to copy each.
            for cache in {cache.data_ptr(): cache for cache in caches}.values():
                blocks = cache.view(count, -1, *cache.shape[1:])
                for source, copy in pairs:
                    blocks[copy].copy_(blocks[source])


def _words_of_a_block(cache: torch.Tensor, count: int) -> int | None:
    """Return how many words of eight bytes a block has, if blocks lie one after the other in a storage
    that holds nothing else."""
    nbytes = cache.untyped_storage().nbytes()
    stride = cache.stride(0) * cache.element_size() * (cache.shape[0] // count)
    is_it = cache.shape[0] % count == 0 and stride * count == nbytes and stride % 8 == 0
    return stride // 8 if is_it else None
