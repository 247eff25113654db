"""Holds prefixes in vLLM's KV cache by references to their full blocks.

vLLM finds full blocks by the hashes of their tokens, and does not free a block that has a reference.

Rules:
    Lost blocks are taken again after any question has computed them.
    All prefixes together leave room for the longest context, and for half of all blocks.
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


def most_kept(blocks: int, longest: int) -> int:
    """Return how many of all blocks prefixes may hold. The longest context takes ``longest`` blocks, and
    one more if it is forked; vLLM keeps one block as padding."""
    return max(0, min(blocks // 2, blocks - longest - 2))


@dataclass(slots=True, eq=False)
class _HeldPrefix:
    """The hashes of a prefix's full blocks, and the leading blocks that are held."""

    hashes: Sequence[Any] | None = None  # until the prefix is looked up
    blocks: list[Any] = field(default_factory=list)


class PrefixBlocks:
    """The prefixes that one engine holds. ``lora_of`` raises UnknownAdapter."""

    def __init__(self, core: Any, lora_of: Callable[[Adapter | None], LoRARequest | None]) -> None:
        scheduler = core.scheduler
        self._hasher = core.request_block_hasher
        self._lora_of = lora_of
        self._pool = scheduler.kv_cache_manager.block_pool
        self._block_size = scheduler.hash_block_size
        # Other models keep only some blocks of a sequence, or have several kinds of blocks.
        groups = scheduler.kv_cache_config.kv_cache_groups
        can_keep = (
            self._hasher is not None
            and len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and groups[0].kv_cache_spec.block_size == scheduler.hash_block_size
        )
        longest = -(-scheduler.max_model_len // self._block_size)
        self._most = most_kept(self._pool.num_gpu_blocks, longest) if can_keep else 0
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
        self._take(prefix, kept)

    def release(self, prefix: LogprobsRequest) -> None:
        """Stop holding a prefix; ignore unknown ones."""
        if (kept := self._kept.pop(prefix, None)) is not None:
            self._give_up(kept)

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
