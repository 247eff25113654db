"""Seats: vLLM requests that continue as other sequences, with the tokens and KV blocks of their donors.

A fork takes over a request that is no longer needed. It shares the full blocks of its donor and owns its
last block. Blocks that the request and its donor had in common stay in place. Where sequences part late,
most blocks are common, so the cost of a fork does not grow with their length.

The parts of vLLM that this file uses are listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Fork", "Seat", "Seats", "copies", "last_seats"]


FEW = 16
"""Up to this many blocks, a fork is cheap in any seat."""


class Fork(NamedTuple):
    """A request that is to continue from the first ``length`` tokens of ``donor``, all computed."""

    request: Request
    donor: Request
    length: int


class Seat(NamedTuple):
    """A request that continues as another sequence of ``length`` tokens.

    Attributes:
        request: vLLM's, which has the tokens.
        block_ids: its blocks after the first ``kept``; the request had these first blocks before.
        copied: the source block to copy into the last one; ``None`` if the last one is empty.
    """

    request: Request
    length: int
    block_ids: list[int]
    copied: int | None
    kept: int = 0


class Seats:
    """Seats the requests of one scheduler with a single group of blocks.

    Args:
        manager: vLLM's manager of that group.
        pool: vLLM's block pool.
        hashed: tokens per block hash.
    """

    def __init__(self, manager: Any, pool: Any, hashed: int) -> None:
        self._manager, self._pool, self._hashed = manager, pool, hashed

    def have_room(self, requests: Iterable[Request], *, beside: int) -> bool:
        """Return whether these can surely be seated and leave ``beside`` blocks free."""
        requests, free = [*requests], self._pool.get_num_free_blocks()
        wanted = len(requests) + beside
        # An unshared last block is overwritten, or freed before the others are taken.
        if free < wanted:
            blocks = self._manager.req_to_blocks
            free += sum(blocks[each.request_id][-1].ref_cnt == 1 for each in requests)
        return bool(free >= wanted)

    def paired(self, requests: Sequence[Request], donors: Sequence[Request]) -> list[Request]:
        """Return one request for each donor.

        There must be at least as many requests as donors. For long sequences, it pairs requests and
        donors that have many blocks in common; it compares a few blocks of each.
        """
        tables = self._manager.req_to_blocks
        count = min((len(tables[each.request_id]) for each in donors), default=0)
        if count <= FEW or len(requests) == 1:
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

    def take(self, forks: Sequence[Fork]) -> list[Seat]:
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
        seats = []
        for (request, donor, length), kept in zip(forks, alike, strict=True):
            block_ids = [block.block_id for block in blocks[request.request_id][kept:]]
            full, rest = divmod(length, size)
            copied = blocks[donor.request_id][full].block_id if rest else None
            seats.append(Seat(request, length, block_ids, copied, kept))
        return seats

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


def copies(seats: Sequence[Seat]) -> list[tuple[int, int]]:
    """Return the ``(source, copy)`` pairs of KV blocks to copy, one after the other."""
    return [(seat.copied, seat.block_ids[-1]) for seat in seats if seat.copied is not None]


def last_seats(seats: Sequence[Seat]) -> list[Seat]:
    """Return the last seat of each request, with all blocks that changed over its seats."""
    last: dict[str, Seat] = {}
    for seat in seats:
        request_id = seat.request.request_id
        before = last.get(request_id)
        if before is not None and before.kept < seat.kept:
            block_ids = [*before.block_ids[: seat.kept - before.kept], *seat.block_ids]
            seat = Seat(seat.request, seat.length, block_ids, seat.copied, before.kept)
        last[request_id] = seat
    return [*last.values()]


def in_common(these: Sequence[Any], those: Sequence[Any], most: int) -> int:
    """Return how many of the first ``most`` blocks of two sequences are the same.

    Two sequences with a common block have all tokens before it in common, so a bisection finds it.
    """
    most = min(len(these), len(those), most)
    if most and these[most - 1] is those[most - 1]:
        return most
    return bisect(range(most), 0, key=lambda n: these[n] is not those[n])
