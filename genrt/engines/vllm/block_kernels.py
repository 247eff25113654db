"""The Triton kernel that copies blocks of memory; importing this needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def copy_words(bases: torch.Tensor, pairs: torch.Tensor, words: int, stride: int) -> None:
    """Copy block ``pairs[i, 0]`` to block ``pairs[i, 1]`` in every layer, without synchronizing.

    Args:
        bases: the address of each layer's first block, int64 ``[layers]``.
        pairs: int64 ``[n, 2]``; no block is both a source and a target.
        words: the words of eight bytes in a block.
        stride: the words between the starts of two blocks.
    """
    grid = (len(pairs), len(bases), triton.cdiv(words, 1024))  # words that one program copies
    _copy[grid](bases, pairs, words, stride, BLOCK=1024)


@triton.jit
def _copy(
    bases: tl.tensor, pairs: tl.tensor, words: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    pair, layer, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(bases + layer).to(tl.pointer_type(tl.int64))
    source, copy = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    word = part * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    numbers = tl.load(base + source * stride + word, mask=inside)
    tl.store(base + copy * stride + word, numbers, mask=inside)
