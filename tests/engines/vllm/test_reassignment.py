"""Requests that continue as forks: their blocks, and copies of blocks in every layout of the caches."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from genrt.engines.vllm.reassignment import (
    Fork,
    Reassigner,
    Reassignment,
    _alike,
    _independent,
    copies,
    last_reassignments,
)

pytestmark = pytest.mark.vllm


SIZE = 4
MOST = 40
"""Tokens of a context; what vLLM is told a request may have."""


class Sequences:
    """Requests with blocks of vLLM's own pool, as its scheduler leaves them after a step."""

    def __init__(self, blocks: int = 200, hashed: int = SIZE) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool = BlockPool(blocks, True, hashed)
        self.hashed = hashed
        self.manager = SimpleNamespace(req_to_blocks={}, num_cached_block={}, block_size=SIZE)
        self.reassigner = Reassigner(self.manager, self.pool, hashed)
        self.requests: list[Any] = []

    def add(self, tokens: list[int], *, grown: int = 0, like: Any = None, shared: int = 0) -> Any:
        """A request of these tokens, the last ``grown`` of which are no prompt; the first ``shared``
        blocks are those of ``like``."""
        prompt = tokens[: len(tokens) - grown]
        everything, drawn = [*tokens], tokens[len(prompt) :]
        request = SimpleNamespace(
            request_id=str(len(self.requests)),
            prompt_token_ids=prompt,
            num_prompt_tokens=len(prompt),
            num_computed_tokens=len(tokens),
            max_tokens=MOST - len(prompt),
            all_token_ids=everything,
            output_token_ids=drawn,
            _all_token_ids=everything,  # vLLM's, which can be written
            _output_token_ids=drawn,
            block_hashes=self.hashes(tokens),
        )
        blocks = [] if like is None else self.blocks(like)[:shared]
        self.pool.touch(blocks)
        blocks += self.pool.get_new_blocks(-(-len(tokens) // SIZE) - len(blocks))
        self.manager.req_to_blocks[request.request_id] = blocks
        self.requests.append(request)
        return request

    def hashes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        full = len(tokens) // self.hashed
        return [tuple(tokens[: self.hashed * (n + 1)]) for n in range(full)]

    def blocks(self, request: Any) -> list[Any]:
        return [*self.manager.req_to_blocks[request.request_id]]

    def check(self) -> None:
        """Every request is whole, and every block held as often as requests have it."""
        held: dict[int, int] = {}
        for request in self.requests:
            tokens = request.all_token_ids
            assert request.prompt_token_ids + request.output_token_ids == tokens
            assert request.num_prompt_tokens == len(request.prompt_token_ids)
            assert request.num_prompt_tokens + request.max_tokens == MOST
            assert request.block_hashes == self.hashes(tokens)
            for block in self.blocks(request):
                held[block.block_id] = held.get(block.block_id, 0) + 1
        pool = self.pool.blocks
        assert {block.block_id: block.ref_cnt for block in pool if block.ref_cnt > 0} == held
        assert self.pool.get_num_free_blocks() == len(pool) - 1 - len(held)


def fork(request: Any, donor: Any, length: int | None = None) -> Fork:
    return Fork(request, donor, donor.num_computed_tokens if length is None else length)


@pytest.mark.parametrize("why", ["shared", "cached"])
def test_a_last_block_that_others_have_or_may_find_is_not_overwritten(why: str) -> None:
    all_of = Sequences()
    donor = all_of.add([1, 2, 3, 4, 5, 6])
    request = all_of.add([1, 2, 3, 4, 9, 9], like=donor, shared=1)
    last = all_of.blocks(request)[1]
    if why == "shared":
        all_of.add([1, 2, 3, 4, 9, 9], like=request, shared=2)
    else:
        last.set_block_hash(b"of these tokens, and of a group", SIZE)
    [reassignment] = all_of.reassigner.take([fork(request, donor)])
    assert all_of.blocks(request)[1] is not last
    assert reassignment.block_ids == [all_of.blocks(request)[1].block_id]
    all_of.check()


def test_blocks_that_both_have_beyond_where_they_part_survive() -> None:
    """They are freed by the one and touched by the other: in that order they would be lost."""
    all_of = Sequences(blocks=8)
    donor = all_of.add([*range(10)])
    request = all_of.add([*range(10)])
    blocks = all_of.manager.req_to_blocks
    all_of.pool.free_blocks([blocks["1"][1]])
    blocks["1"][1] = blocks["0"][1]
    all_of.pool.touch([blocks["0"][1]])
    all_of.reassigner.take([fork(request, donor)])
    assert all_of.blocks(request)[:2] == [all_of.blocks(request)[0], all_of.blocks(donor)[1]]
    all_of.check()


def test_there_is_room_for_what_can_be_freed() -> None:
    all_of = Sequences(blocks=8)
    donor = all_of.add([1, 2, 3, 4, 5])
    requests = [all_of.add([1, 2, 3, 4, n], like=donor, shared=1) for n in (8, 9)]
    twin = all_of.add([1, 2, 3, 4, 9], like=requests[1], shared=2)
    assert all_of.reassigner.have_room(requests, beside=1)
    assert not all_of.reassigner.have_room(requests, beside=3)
    all_of.pool.get_new_blocks(3)
    assert all_of.reassigner.have_room(requests[:1], beside=0), "its own last block"
    assert not all_of.reassigner.have_room(requests[:1], beside=1)
    assert not all_of.reassigner.have_room([requests[1]], beside=0), "its twin has that too"
    assert not all_of.reassigner.have_room([twin], beside=0)


def test_a_request_that_is_reassigned_twice_has_the_blocks_of_the_last() -> None:
    one, other = (SimpleNamespace(request_id=name) for name in "ab")
    reassignments = [
        Reassignment(one, 9, [5, 6, 7], copied=1, kept=0),
        Reassignment(other, 3, [2], copied=None),
        Reassignment(one, 11, [8], copied=3, kept=2),
    ]
    assert last_reassignments(reassignments) == [
        Reassignment(one, 11, [5, 6, 8], 3, 0),
        reassignments[1],
    ]
    assert last_reassignments([reassignments[2], reassignments[0]]) == [reassignments[0]]
    assert copies(reassignments) == [(1, 7), (3, 8)]


@pytest.mark.parametrize("shared", [0, 3, 10, 15, 18])
def test_a_fork_takes_over_the_request_of_the_most_similar_sequence(shared: int) -> None:
    """Of four families of three, each with ``shared`` blocks that are the same for all."""
    all_of = Sequences(blocks=400)
    root = all_of.add([0] * 80)
    families: list[list[Any]] = []
    for family in range(4):
        first = all_of.add(
            [0] * SIZE * shared + [family] * (80 - SIZE * shared), like=root, shared=shared
        )
        families.append(
            [first] + [all_of.add([*first.all_token_ids], like=first, shared=19) for _ in "ab"]
        )
    requests = [family[n] for n in (1, 2) for family in families]
    donors = [families[n][0] for n in (2, 0, 3, 1, 2, 2)]
    found = all_of.reassigner.paired(requests, donors)
    assert len({each.request_id for each in found}) == 6
    alike = [
        request.all_token_ids == donor.all_token_ids
        for donor, request in zip(donors, found, strict=True)
    ]
    assert sum(alike) == 5, "the third of one family finds none of its own"
    assert all(each in requests for each in found)
    assert all_of.reassigner.paired(requests, []) == []
    short = [all_of.add([n] * 9) for n in range(4)]
    assert all_of.reassigner.paired(short, short[3:]) == short[:1], (
        "among short ones any request will do"
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("hashed", [SIZE, 2])
def test_many_generations_leave_every_block_with_whom_it_belongs(seed: int, hashed: int) -> None:
    """Half are replaced in every step, of sequences that begin alike or not; then all grow."""
    rng, all_of = random.Random(seed), Sequences(hashed=hashed)
    first = all_of.add([rng.randrange(9) for _ in range(9)])
    for number in range(7):
        shared = rng.randrange(3)
        tokens = first.all_token_ids[: SIZE * shared] + [number] * (9 - SIZE * shared)
        all_of.add(tokens, grown=rng.randrange(3), like=first, shared=shared)
    for _ in range(20):
        order = rng.sample(all_of.requests, 8)
        forks = [fork(*pair) for pair in zip(order[:4], order[4:], strict=True)]
        wanted = [list(each.donor.all_token_ids) for each in forks]
        assert all_of.reassigner.have_room([each.request for each in forks], beside=0)
        reassignments = all_of.reassigner.take(forks)
        assert [each.request.all_token_ids for each in forks] == wanted
        for reassignment in reassignments:
            ids = [block.block_id for block in all_of.blocks(reassignment.request)]
            assert ids[reassignment.kept :] == reassignment.block_ids
        all_of.check()
        for request in all_of.requests:
            token = rng.randrange(9)
            for tokens in (request.all_token_ids, request.output_token_ids):
                tokens.append(token)
            request.num_computed_tokens += 1
            request.block_hashes[:] = all_of.hashes(request.all_token_ids)
            blocks = all_of.manager.req_to_blocks[request.request_id]
            if len(blocks) * SIZE < len(request.all_token_ids):
                blocks += all_of.pool.get_new_blocks(1)


LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 5, 2, 4, 6


def caches_in(order: str) -> list[torch.Tensor]:
    """The caches ``[B, H, N, C]`` of all layers, which lie in one memory with the axes in this order."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH}
    memory = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * WIDTH, dtype=torch.int64)
    whole = memory.view([sizes[axis] for axis in order]).permute([order.index(a) for a in "LBHNC"])
    return list(whole.unbind())


@pytest.mark.parametrize(
    ("order", "is_one_stretch"),
    [("LBNHC", True), ("LBHNC", True), ("BLHNC", True), ("BLNHC", True), ("BHLNC", False)],
)
def test_a_block_is_found_where_it_is_one_stretch(order: str, is_one_stretch: bool) -> None:
    caches = caches_in(order)
    found = _alike(caches, BLOCKS)
    assert (found is not None) == is_one_stretch
    for cache in caches if found is not None else ():
        words, stride = found or (0, 0)
        for number in range(BLOCKS):
            start = int(cache.storage_offset()) + number * stride
            assert sorted(cache[number].flatten().tolist()) == [*range(start, start + words)]


def test_blocks_in_parts_are_one_stretch_if_the_parts_follow_each_other() -> None:
    count = BLOCKS * HEADS * TOKENS * WIDTH
    assert _alike([torch.arange(count).view(2 * BLOCKS, -1)], BLOCKS) == (48, 48)
    apart = torch.arange(2 * count).view(2 * BLOCKS, 2, -1)[:, 0]
    assert _alike([apart], BLOCKS) is None
    assert _alike([torch.arange(count).view(BLOCKS, -1)], 3) is None
    assert _alike([torch.zeros(BLOCKS, 3, dtype=torch.float32)], BLOCKS) is None  # 12 bytes
    assert _alike([torch.zeros(BLOCKS, 8), torch.zeros(BLOCKS, 16)], BLOCKS) is None  # they differ


@pytest.mark.parametrize(
    ("pairs", "groups"),
    [
        ([], []),
        ([(0, 1), (0, 2), (3, 4)], [[(0, 1), (0, 2), (3, 4)]]),
        ([(0, 1), (1, 2), (0, 3)], [[(0, 1)], [(1, 2), (0, 3)]]),  # a copy of a copy
        ([(0, 1), (2, 1)], [[(0, 1)], [(2, 1)]]),  # the last one counts
        ([(0, 1), (2, 0)], [[(0, 1)], [(2, 0)]]),  # read before it is written
    ],
)
def test_what_is_copied_at_once_is_as_one_after_the_other(
    pairs: list[tuple[int, int]], groups: list[list[tuple[int, int]]]
) -> None:
    assert _independent(pairs) == groups
