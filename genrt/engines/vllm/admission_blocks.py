"""How many KV blocks the next step takes from the pool, which decides whether sequences are evicted.

Prompts that begin alike share blocks, so their lengths alone are far too many: 256 contexts of 2,048
tokens, 1,920 of them common, take a tenth of what 256 unlike ones do. To count what is shared is a
look-up for each full block of a prompt, which is why it is done only where the lengths don't fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.request import Request


def most_blocks(scheduler: Any, waiting: Iterable[Request]) -> int:
    """Return an upper bound: as if nothing were shared but kept prefixes."""
    # Two more than a waiting request has full blocks: for its last tokens, and for a copied block.
    size, prefixes = scheduler.block_size, scheduler.prefixes
    blocks: int = len(scheduler.running)
    for request in waiting:
        blocks += request.num_tokens // size + 2
        if prefixes is not None:
            blocks -= prefixes.shared(request)
    return blocks


def needed_blocks(
    scheduler: Any, waiting: Iterable[Request], donors: Mapping[str, tuple[str, int]]
) -> int:
    """Return how many blocks the requests take that one step has tokens for, less those that they
    share with others who hold them. Blocks that are cached but held by nobody are taken as well."""
    size, prefixes = scheduler.block_size, scheduler.prefixes
    blocks, tokens_left = 0, int(scheduler.max_num_scheduled_tokens)
    for request in scheduler.running:  # the rest of a prompt, or the next token
        blocks += max(request.num_tokens // size + 1 - request.num_computed_tokens // size, 1)
        tokens_left -= 1
    for request in waiting:
        if tokens_left <= 0:
            break
        cached = scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
        held = sum(block.ref_cnt > 0 for block in cached)
        tokens = len(cached) * size
        if prefixes is not None:
            held = max(held, prefixes.shared(request))
        donor_id, of_donor = donors.get(request.request_id, ("", 0))
        donor = scheduler.requests.get(donor_id)
        if donor is not None:
            of_donor = min(of_donor, donor.num_computed_tokens)
            held, tokens = max(held, of_donor // size), max(tokens, of_donor)
        blocks += request.num_tokens // size + 2 - held
        tokens_left -= max(request.num_tokens - tokens, 1)
    return blocks
