"""Reassigns vLLM requests: they continue as other sequences, with tokens and KV blocks of their donors.

A fork takes over a request that is no longer needed. It shares the full blocks of its donor and owns its
last block; blocks that both had in common stay in place. On a GPU all layers, and all tables, take one
launch each.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from genrt.launches import Staged, room_for

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Fork(NamedTuple):
    """A request that is to continue from the first ``length`` tokens of ``donor``, all computed."""

    request: Request
    donor: Request
    length: int


class Reassignment(NamedTuple):
    """A vLLM request that continues as another sequence of ``length`` tokens."""

    request: Request  # vLLM's, which has the tokens
    length: int
    block_ids: list[int]  # after the first ``kept``, which the request had before
    copied: int | None  # the block to copy into the last one; ``None`` if the last one is empty
    kept: int = 0


class Reassigner:
    """Reassigns the requests of one scheduler with a single group of blocks.

    Args:
        manager: vLLM's manager of that group.
        pool: vLLM's block pool.
        hashed: tokens per block hash.
    """

    def __init__(self, manager: Any, pool: Any, hashed: int) -> None:
        self._manager, self._pool, self._hashed = manager, pool, hashed

    def have_room(self, requests: Iterable[Request], *, beside: int) -> bool:
        """Return whether these can surely be reassigned and leave ``beside`` blocks free."""
        requests, free = [*requests], self._pool.get_num_free_blocks()
        wanted = len(requests) + beside
        # An unshared last block is overwritten, or freed before the others are taken.
        if free < wanted:
            blocks = self._manager.req_to_blocks
            free += sum(blocks[each.request_id][-1].ref_cnt == 1 for each in requests)
        return bool(free >= wanted)

    def paired(self, requests: Sequence[Request], donors: Sequence[Request]) -> list[Request]:
        """Return one of the requests for each donor; of long ones, one with many common blocks."""
        tables = self._manager.req_to_blocks
        count = min((len(tables[each.request_id]) for each in donors), default=0)
        if count <= 16 or len(requests) == 1:  # a fork is cheap in any request
            return [*requests[: len(donors)]]
        found: dict[int, Request] = {}
        left = [(each, tables[each.request_id]) for each in requests]
        donated = [tables[each.request_id] for each in donors]
        behind = 1
        while len(found) < len(donors) and behind < 4 * count:
            at = max(count - 1 - behind, 0)  # look first for sequences that part late
            wanted: dict[int, list[int]] = {}
            for place, blocks in enumerate(donated):
                if place not in found:
                    wanted.setdefault(blocks[at].block_id, []).append(place)
            others = []
            for request, blocks in left:
                if at < len(blocks) and (places := wanted.get(blocks[at].block_id)):
                    found[places.pop()] = request
                else:
                    others.append((request, blocks))
            left = others
            behind *= 4
        return [found[n] if n in found else left.pop()[0] for n in range(len(donors))]

    def take(self, forks: Sequence[Fork]) -> list[Reassignment]:
        """Make these requests continue as forks, for which there is room. No request may be a donor."""
        blocks, size = self._manager.req_to_blocks, self._manager.block_size
        touched: list[Any] = []
        freed: list[Any] = []
        lacking: list[list[Any]] = []
        alike: list[int] = []
        for request, donor, length in forks:
            before, donated = blocks[request.request_id], blocks[donor.request_id]
            full = length // size
            same = in_common(before, donated, full)
            # The request's own last block is overwritten, unless it is shared or cached by its hash.
            stays = len(before) > full and self._pool.is_block_writable(before[full])
            touched += donated[same:full]
            freed += reversed([*before[same:full], *before[full + stays :]])
            before[same:] = [*donated[same:full], *([before[full]] if stays else ())]
            if not stays:
                lacking.append(before)
            alike.append(same)
            self._manager.num_cached_block[request.request_id] = full
            self._take_tokens(request, donor, same * size, length)
        # Sequences may have further blocks in common, so touch all blocks before freeing any.
        self._pool.touch(touched)
        self._pool.free_blocks(freed)
        for before, own in zip(lacking, self._pool.get_new_blocks(len(lacking)), strict=True):
            before.append(own)
        reassignments = []
        for (request, donor, length), kept in zip(forks, alike, strict=True):
            block_ids = [block.block_id for block in blocks[request.request_id][kept:]]
            full, rest = divmod(length, size)
            copied = blocks[donor.request_id][full].block_id if rest else None
            reassignments.append(Reassignment(request, length, block_ids, copied, kept))
        return reassignments

    def _take_tokens(self, request: Request, donor: Request, start: int, length: int) -> None:
        """Copy the first ``length`` tokens of the donor to a request that already has ``start``."""
        hashed = start // self._hashed
        request._all_token_ids[start:] = donor._all_token_ids[start:length]
        request.block_hashes[hashed:] = donor.block_hashes[hashed : length // self._hashed]
        prompt = donor.num_prompt_tokens
        if length < prompt:
            request.prompt_token_ids = donor._all_token_ids[:length]
            request._output_token_ids.clear()
        else:
            shared = request.prompt_token_ids is donor.prompt_token_ids
            first = max(start - prompt, 0) if shared else 0
            request._output_token_ids[first:] = donor._output_token_ids[first : length - prompt]
            request.prompt_token_ids = donor.prompt_token_ids
        request.num_prompt_tokens = min(length, prompt)
        request.max_tokens = prompt + donor.max_tokens - request.num_prompt_tokens
        request.num_computed_tokens = length


def copies(reassignments: Sequence[Reassignment]) -> list[tuple[int, int]]:
    """Return the ``(source, copy)`` pairs of KV blocks to copy, one after the other."""
    return [(each.copied, each.block_ids[-1]) for each in reassignments if each.copied is not None]


def last_reassignments(reassignments: Sequence[Reassignment]) -> list[Reassignment]:
    """Return the last reassignment of each request, with all blocks that changed."""
    last: dict[str, Reassignment] = {}
    for each in reassignments:
        request_id = each.request.request_id
        before = last.get(request_id)
        if before is not None and before.kept < each.kept:
            block_ids = [*before.block_ids[: each.kept - before.kept], *each.block_ids]
            each = Reassignment(each.request, each.length, block_ids, each.copied, before.kept)
        last[request_id] = each
    return [*last.values()]


def in_common(these: Sequence[Any], those: Sequence[Any], most: int) -> int:
    """Return how many of the first ``most`` blocks of two sequences are the same."""
    # Sequences with a common block have all tokens before it in common.
    most = min(len(these), len(those), most)
    if most and these[most - 1] is those[most - 1]:
        return most
    return bisect(range(most), 0, key=lambda n: these[n] is not those[n])


class ReassignedTables:
    """The tables of one runner V2, with one group of blocks."""

    def __init__(self, runner: Any) -> None:
        self._states, self._blocks = runner.req_states, runner.block_tables
        self._staged: dict[tuple[int, int], Staged] = {}

    def write(self, reassignments: Sequence[Reassignment]) -> None:
        """Make these distinct requests continue as other sequences."""
        states, blocks = self._states, self._blocks
        slots = np.array(
            [states.req_id_to_index[each.request.request_id] for each in reassignments]
        )
        lengths = [each.length for each in reassignments]
        for on_host in (states.prompt_len, states.prefill_len):
            on_host.np[slots] = lengths
            on_host.copy_to_uva()
        states.num_computed_prefill_tokens[slots] = states.num_computed_tokens_np[slots] = lengths
        counts = np.array([len(each.block_ids) for each in reassignments])
        kept = np.array([each.kept for each in reassignments])
        blocks.num_blocks.np[0, slots] = kept + counts
        blocks.num_blocks.copy_to_uva()
        # For each block: the place of the request's first block, and the distance from there.
        firsts = slots * blocks.block_tables[0].gpu.shape[1] + kept
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
        block_ids = [block_id for each in reassignments for block_id in each.block_ids]
        key = room_for(len(slots)), room_for(len(places))
        if key not in self._staged:
            self._staged[key] = self._writes(*key)
        parts = np.split(self._staged[key].free(), _cuts(*key))
        columns: list[Any] = [slots, lengths, places, block_ids]
        for part, numbers in zip(parts, columns, strict=True):
            part[: len(numbers)] = numbers
            part[len(numbers) :] = numbers[-1]  # padding repeats the last write
        self._staged[key].launch()

    def _writes(self, count: int, blocks: int) -> Staged:
        computed, total = self._states.num_computed_tokens.gpu, self._states.total_len.gpu
        table = self._blocks.block_tables[0].gpu
        small = torch.empty(2 * (count + blocks), dtype=table.dtype, device=table.device)

        def go(numbers: torch.Tensor) -> None:
            small.copy_(numbers)
            slots, _, places, _ = numbers.tensor_split(_cuts(count, blocks))
            _, lengths, _, block_ids = small.tensor_split(_cuts(count, blocks))
            computed.scatter_(0, slots, lengths)
            total.scatter_(0, slots, lengths)
            table.view(-1).scatter_(0, places, block_ids)

        return Staged((len(small),), table.device, go)


def _cuts(count: int, blocks: int) -> list[int]:
    """Return where the numbers of a launch are split into slots, lengths, places and blocks."""
    return [count, 2 * count, 2 * count + blocks]


class BlockCopies:
    """Copies blocks of the KV caches of one runner. It keeps no references to the caches."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stretches: tuple[int, int] | None = None  # of every cache, on a GPU
        self._bases: torch.Tensor | None = None  # addresses of the distinct caches, on the device
        self._staged: dict[int, Staged] = {}
        caches = runner.kv_caches  # layers may share a cache
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
            numbers[len(pairs) :] = 0  # vLLM's null block may be copied onto itself
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
    """Split the pairs into groups in which no pair writes a block that another one reads or writes."""
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


def _staged(most: int, bases: torch.Tensor, stretches: tuple[int, int]) -> Staged:
    """Return one launch that copies up to ``most`` blocks."""
    from genrt.engines.vllm.block_kernels import copy_words

    return Staged((most, 2), bases.device, lambda pairs: copy_words(bases, pairs, *stretches))


def _alike(caches: Sequence[torch.Tensor], count: int) -> tuple[int, int] | None:
    """Return the words of eight bytes in each of the ``count`` blocks of every cache, and between the
    starts of two blocks; ``None`` if caches differ, or a block is no stretch of whole words."""
    found = {_stretches(cache, count) for cache in caches}
    return found.pop() if len(found) == 1 else None


def _stretches(cache: torch.Tensor, count: int) -> tuple[int, int] | None:
    parts, rest = divmod(cache.shape[0], count)
    dense = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size > 1 and stride != dense:
            return None
        dense *= size
    if rest or (parts > 1 and cache.stride(0) != dense):
        return None
    lengths = [entries * parts * cache.element_size() for entries in (dense, cache.stride(0))]
    if any(each % 8 for each in (*lengths, cache.data_ptr())):
        return None
    return lengths[0] // 8, lengths[1] // 8
