"""Holds prefixes in vLLM's KV cache by references to their full blocks.

vLLM finds full blocks by the hashes of their tokens, and does not free a block that has a reference.

Rules:
    Lost blocks are taken again after any question has computed them.
    All prefixes together hold at most ``SHARE`` of the blocks.
    Before vLLM skips a step for lack of blocks, prefixes are released, the oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from genrt.engines.vllm.requests import core_request, row_params
from genrt.errors import UnknownAdapter
from genrt.questions.arguments import Adapter
from genrt.questions.rows import LogprobsRequest

SHARE = 0.5
"""The part of the KV cache that prefixes may hold; the rest is for running requests."""


@dataclass(slots=True, eq=False)
class _HeldPrefix:
    """The hashes of a prefix's full blocks, and the leading blocks that are held."""

    hashes: Sequence[Any] | None = None  # until the prefix is looked up
    blocks: list[Any] = field(default_factory=list)


class PrefixBlocks:
    """The prefixes that one engine holds. ``lora_of`` raises UnknownAdapter."""

    def __init__(self, core: Any, lora_of: Callable[[Adapter | None], LoRARequest | None]) -> None:
        self._scheduler = scheduler = core.scheduler
        self._hasher = core.request_block_hasher
        self._lora_of = lora_of
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._block_size = scheduler.hash_block_size
        # Other models keep only some blocks of a sequence, or have several kinds of blocks.
        groups = scheduler.kv_cache_config.kv_cache_groups
        can_keep = (
            self._hasher is not None
            and len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and groups[0].kv_cache_spec.block_size == scheduler.hash_block_size
        )
        self._most = int(self._pool.num_gpu_blocks * SHARE) if can_keep else 0
        self._kept: dict[LogprobsRequest, _HeldPrefix] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens held."""
        return int(self._held * self._block_size)

    @property
    def _held(self) -> int:
        return sum(len(kept.blocks) for kept in [*self._kept.values()])

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        kept = self._kept.get(prefix)
        return kept is not None and kept.hashes is not None and len(kept.blocks) == len(kept.hashes)

    def keep(self, prefix: LogprobsRequest) -> None:
        """Hold the computed blocks of a prefix, now and later. Older prefixes make room for it."""
        kept = self._kept.pop(prefix, None) or _HeldPrefix()
        others = [*self._kept.values()]
        needed = len(self._hashes(prefix, kept))
        while others and self._held + needed > self._most:
            self._give_up(others.pop(0))
        self._kept[prefix] = kept  # the newest is the last
        # Set on the instance only while prefixes are held, because every token of every text calls it.
        self._manager.allocate_slots = self._allocated
        self._take(prefix, kept)

    def release(self, prefix: LogprobsRequest) -> None:
        """Stop holding a prefix; ignore unknown ones."""
        if (kept := self._kept.pop(prefix, None)) is not None:
            self._give_up(kept)
            if not self._kept:
                del self._manager.allocate_slots

    def look(self) -> None:
        """Take newly computed blocks of incomplete prefixes, after a step."""
        for prefix, kept in self._kept.items():
            if prefix not in self:
                self._take(prefix, kept)

    def _take(self, prefix: LogprobsRequest, kept: _HeldPrefix) -> None:
        room = max(self._most - self._held, 0)
        for block_hash in self._hashes(prefix, kept)[len(kept.blocks) :][:room]:
            found = self._pool.get_cached_block(block_hash, [0])
            if found is None:
                return
            self._pool.touch(found)
            kept.blocks += found

    def give_up(self) -> None:
        """Release all blocks; ``look`` takes the ones that are computed again."""
        for kept in self._kept.values():
            self._give_up(kept)

    def _hashes(self, prefix: LogprobsRequest, kept: _HeldPrefix) -> Sequence[Any]:
        if not self._most:
            kept.hashes = ()
        if kept.hashes is None:
            try:
                lora = self._lora_of(prefix.adapter)
            except UnknownAdapter:
                return ()
            request = core_request("", prefix.token_ids, row_params(0, open_for=None), lora)
            kept.hashes = Request.from_engine_core_request(request, self._hasher).block_hashes
        return kept.hashes

    def _give_up(self, kept: _HeldPrefix) -> None:
        self._pool.free_blocks([*reversed(kept.blocks)])  # vLLM reuses the first freed first
        kept.blocks.clear()

    def _allocated(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Call ``KVCacheManager.allocate_slots``. If it finds no blocks for a request that runs alone,
        release prefixes until it does."""
        allocate = type(self._manager).allocate_slots
        blocks = allocate(self._manager, request, *args, **kwargs)
        if blocks is not None or any(each is not request for each in self._scheduler.running):
            return blocks
        for kept in [*self._kept.values()]:
            if kept.blocks:
                self._give_up(kept)
                blocks = allocate(self._manager, request, *args, **kwargs)
                if blocks is not None:
                    break
        return blocks
