"""Counts the KV blocks that the next step takes from the pool, to decide whether sequences are evicted.

Prompts with a common prefix share blocks, so their lengths alone count far too many. For example, 256
contexts of 2,048 tokens may have 1,920 tokens in common. They take a tenth of the blocks of 256 distinct
contexts. Counting shared blocks needs a look-up for each full block of a prompt. So they are counted only
where the lengths do not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.request import Request


def most_blocks(scheduler: Any, waiting: Iterable[Request]) -> int:
    """Return an upper bound of the blocks, as if requests shared only kept prefixes."""
    # Two blocks more than a waiting request's full ones: one for its last tokens, one for a copied block.
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
    """Return the number of blocks for the requests that fit into one step's tokens.

    Blocks that they share with a holder are not counted. Cached blocks without a holder are counted,
    because they are taken from the pool too.
    """
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
