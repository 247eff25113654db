"""Holds prefixes in vLLM's KV cache by references to their blocks, as if a request went on using them.

vLLM finds full blocks by the hashes of their tokens. The last tokens of a prefix are in a block of the
open request that computed them; under ``OpenScheduler`` new requests start with a copy of that block.

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

from genrt.engines.residency import Residents
from genrt.engines.vllm.requests import core_request, row_params
from genrt.errors import UnknownAdapter
from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest

SHARE = 0.5
"""The part of the KV cache that prefixes may hold; the rest is for running requests."""


@dataclass(slots=True, eq=False)
class _HeldPrefix:
    """The hashes of a prefix's full blocks, and the leading blocks that are held."""

    hashes: Sequence[Any] | None = None  # until the prefix is looked up
    blocks: list[Any] = field(default_factory=list)
    lora: LoRARequest | None = None
    # The partly filled last block, if it is held, and the prefix's tokens in it.
    tail: list[Any] = field(default_factory=list)
    tail_ids: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.hashes is not None and len(self.blocks) == len(self.hashes)


class PrefixBlocks:
    """The prefixes that one engine holds. ``lora_of`` raises UnknownAdapter. The engine sets
    ``residents``, its open requests' contexts, if it has any."""

    def __init__(self, core: Any, lora_of: Callable[[Adapter | None], LoRARequest | None]) -> None:
        self.residents = Residents()
        self._scheduler = scheduler = core.scheduler
        self._hasher = core.request_block_hasher
        self._lora_of = lora_of
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._block_size = scheduler.hash_block_size
        # Other models keep only some blocks of a sequence, or have several kinds of blocks.
        groups = scheduler.kv_cache_config.kv_cache_groups
        self._can_keep = (
            self._hasher is not None
            and len(groups) == 1
            and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
            and groups[0].kv_cache_spec.block_size == scheduler.hash_block_size
        )
        self._most = int(self._pool.num_gpu_blocks * SHARE) if self._can_keep else 0
        self._kept: dict[LogprobsRequest, _HeldPrefix] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens held."""
        return sum(
            len(prefix) if kept.tail else len(kept.blocks) * self._block_size
            for prefix, kept in [*self._kept.items()]
        )

    @property
    def _held(self) -> int:
        return sum(len(kept.blocks) + len(kept.tail) for kept in self._kept.values())

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        kept = self._kept.get(prefix)
        return kept is not None and kept.is_whole

    def keep(self, prefix: LogprobsRequest) -> None:
        """Hold the computed blocks of a prefix, now and later. Older prefixes make room for it."""
        kept = self._kept.get(prefix, _HeldPrefix())
        self._kept.pop(prefix, None)
        others = [*self._kept.values()]
        self._hashes(prefix, kept)
        needed = -(-len(prefix) // self._block_size)
        while others and self._held + needed > self._most:
            self._give_up(others.pop(0))
        self._kept[prefix] = kept  # the newest is the last
        # Set on the instance only while prefixes are held, because every token of every text calls it.
        self._manager.allocate_slots = self._allocated
        self._take(prefix, kept)
        self._take_tail(prefix, kept)

    def release(self, prefix: LogprobsRequest) -> None:
        """Stop holding a prefix; ignore unknown ones."""
        if (kept := self._kept.pop(prefix, None)) is not None:
            self._give_up(kept)
            if not self._kept:
                del self._manager.allocate_slots

    def look(self) -> None:
        """Take newly computed blocks of incomplete prefixes, after a step."""
        for prefix, kept in self._kept.items():
            if not kept.is_whole:
                self._take(prefix, kept)

    def give_up(self) -> None:
        """Release all blocks; ``look`` takes the ones that are computed again."""
        for kept in self._kept.values():
            self._give_up(kept)

    def shared(self, request: Request) -> int:
        """Return how many blocks of a request are already held for a prefix that it starts with."""
        most = 0
        for kept in self._kept.values():
            count = min(len(kept.blocks), len(request.block_hashes))
            # Each hash covers all tokens up to its block's end.
            if kept.hashes is None or count <= most:
                continue
            if request.block_hashes[count - 1] == kept.hashes[count - 1]:
                most = count
        return most

    def start_of(self, request: Request) -> tuple[list[Any], int] | None:
        """Return the blocks with which a request can start, and the number of its tokens in them;
        ``None`` unless it starts with a prefix whose partly filled last block is held."""
        token_ids, found = request._all_token_ids, None
        for prefix, kept in self._kept.items():
            full = len(kept.blocks)
            begin, end = full * self._block_size, min(len(prefix), request.num_tokens - 1)
            if (
                kept.tail
                and kept.hashes is not None
                and end > (begin if found is None else found[1])
                and request.lora_request == kept.lora
                and list(request.block_hashes[:full][-1:]) == list(kept.hashes[:full][-1:])
                and token_ids[begin:end] == kept.tail_ids[: end - begin]
            ):
                found = [*kept.blocks, *kept.tail], end
        return found

    def _hashes(self, prefix: LogprobsRequest, kept: _HeldPrefix) -> Sequence[Any]:
        if not self._can_keep:
            kept.hashes = ()
        if kept.hashes is None:
            try:
                kept.lora = lora = self._lora_of(prefix.adapter)
            except UnknownAdapter:
                return ()
            params = row_params(0, open_for=None)
            request = core_request("", prefix.token_ids, params, lora)
            kept.hashes = Request.from_engine_core_request(request, self._hasher).block_hashes
        return kept.hashes

    def _take(self, prefix: LogprobsRequest, kept: _HeldPrefix) -> None:
        room = self._most - self._held
        for block_hash in self._hashes(prefix, kept)[len(kept.blocks) :][: max(room, 0)]:
            found = self._pool.get_cached_block(block_hash, [0])
            if found is None:
                return
            self._pool.touch(found)
            kept.blocks += found

    def _take_tail(self, prefix: LogprobsRequest, kept: _HeldPrefix) -> None:
        """Hold the partly filled block of the open request that has just computed the prefix. The request
        continues behind the prefix's tokens."""
        full = len(kept.blocks)
        request_id = self.residents.of_context(prefix.adapter, prefix.packed)
        if request_id is None or kept.tail or not kept.is_whole or self._held >= self._most:
            return
        blocks = self._manager.get_blocks(request_id).blocks[0]
        computed = self._scheduler.requests[request_id].num_computed_tokens
        if len(prefix) > full * self._block_size and full < len(blocks) and computed >= len(prefix):
            kept.tail.append(blocks[full])
            kept.tail_ids = list(prefix.token_ids[full * self._block_size :])
            self._pool.touch(kept.tail)

    def _give_up(self, kept: _HeldPrefix) -> None:
        self._pool.free_blocks(
            [*kept.tail, *reversed(kept.blocks)]
        )  # vLLM reuses the first freed first
        kept.blocks.clear()
        kept.tail.clear()

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
