"""block_copies.py: where the blocks of KV caches lie, in every layout that vLLM has."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 3, 5, 2, 4, 6


def caches_in(order: str) -> list[torch.Tensor]:
    """The caches ``[B, H, N, C]`` of all layers, which lie in one memory with the axes in this order."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": SIZE}
    memory = torch.arange(LAYERS * BLOCKS * HEADS * TOKENS * SIZE, dtype=torch.int64)
    whole = memory.view([sizes[axis] for axis in order]).permute([order.index(a) for a in "LBHNC"])
    return list(whole.unbind())


@pytest.mark.parametrize(
    ("order", "is_one_stretch"),
    [("LBNHC", True), ("LBHNC", True), ("BLHNC", True), ("BLNHC", True), ("BHLNC", False)],
)
def test_a_block_is_found_where_it_is_one_stretch(order: str, is_one_stretch: bool) -> None:
    from genrt.engines.vllm.seats import _alike

    caches = caches_in(order)
    found = _alike(caches, BLOCKS)
    assert (found is not None) == is_one_stretch
    for cache in caches if found is not None else ():
        words, stride = found or (0, 0)
        for number in range(BLOCKS):
            start = int(cache.storage_offset()) + number * stride
            assert sorted(cache[number].flatten().tolist()) == [*range(start, start + words)]


def test_blocks_in_parts_are_one_stretch_if_the_parts_follow_each_other() -> None:
    from genrt.engines.vllm.seats import _alike

    count = BLOCKS * HEADS * TOKENS * SIZE
    assert _alike([torch.arange(count).view(2 * BLOCKS, -1)], BLOCKS) == (48, 48)
    apart = torch.arange(2 * count).view(2 * BLOCKS, 2, -1)[:, 0]
    assert _alike([apart], BLOCKS) is None
    assert _alike([torch.arange(count).view(BLOCKS, -1)], 3) is None
    assert _alike([torch.zeros(BLOCKS, 3, dtype=torch.float32)], BLOCKS) is None  # 12 bytes


def test_caches_that_differ_are_copied_one_by_one() -> None:
    from genrt.engines.vllm.seats import _alike

    assert _alike([torch.zeros(BLOCKS, 8), torch.zeros(BLOCKS, 16)], BLOCKS) is None


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
    from genrt.engines.vllm.seats import _independent

    assert _independent(pairs) == groups
