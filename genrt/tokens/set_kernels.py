"""The Triton kernel that describes the sets of a step's draws in one launch; importing this needs
Triton. One program reads a whole row, so no set depends on the number of rows: it reads the row twice,
without a reduction in between, since a reduction waits for all its threads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from genrt.tokens.draw_kernels import _finite_or_zero, _highest

LISTED = 4096
"""How many ids of a set are listed. A larger set is read from its bits."""


def described(laws: Tensor, rows: Tensor, divisors: Tensor | None, token_ids: Tensor) -> Tensor:
    """Return the sets of draws, int32 ``[n, 3 + ceil(V / 32) + LISTED]``, without waiting for the device.

    A row has the bits of two float32 numbers, the token's log-probability and the log mass of its set by
    the model; the set's size; its bits; and its first ids. ``divisors`` are temperatures, float32
    ``[n]``; the other arguments are of ``DescribedSets``. Rows are contiguous.
    """
    count, width = laws.shape
    words = -(-width // 32)
    found = torch.empty(count, 3 + words + LISTED, dtype=torch.int32, device=laws.device)
    _describe[(count,)](
        *(laws, laws.stride(0), rows, rows.stride(0), divisors, token_ids),
        *(found, width, words),
        LISTED=LISTED,
        WORDS=triton.next_power_of_2(words),
        BLOCK=4096,
        num_warps=8,
    )
    return found


@triton.jit
def _describe(
    laws: tl.tensor,
    laws_stride: tl.tensor,
    rows: tl.tensor,
    rows_stride: tl.tensor,
    divisors: tl.tensor,
    token_ids: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    words: tl.tensor,
    LISTED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    laws += row * laws_stride
    rows += row * rows_stride
    found += row * (3 + words + LISTED)
    divisor = tl.full([], 1.0, tl.float32)
    if divisors is not None:
        divisor = tl.load(divisors + row)
    nothing, zero = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    top, top_of_row, top_of_set = nothing, nothing, nothing
    for start in range(0, width, BLOCK):
        law, own = _entries(laws, rows, start, width, BLOCK)
        is_in = law > float("-inf")
        top, top_of_row = tl.maximum(top, law), tl.maximum(top_of_row, own)
        top_of_set = tl.maximum(top_of_set, tl.where(is_in, own, float("-inf")))
        bits = tl.reshape(is_in.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
        word = start // 32 + tl.arange(0, BLOCK // 32)
        tl.store(found + 3 + word, tl.sum(bits, 1), mask=word < words)
    highest, highest_of_row, highest_of_set = (
        _finite_or_zero(_highest(top, 0)),
        _finite_or_zero(_highest(top_of_row, 0)),
        _finite_or_zero(_highest(top_of_set, 0)),
    )
    total, total_of_row, total_of_set = zero, zero, zero
    for start in range(0, width, BLOCK):
        law, own = _entries(laws, rows, start, width, BLOCK)
        total += tl.exp(law - highest)
        total_of_row += tl.exp((own - highest_of_row) / divisor)
        inside = tl.where(law > float("-inf"), own, float("-inf"))
        total_of_set += tl.exp((inside - highest_of_set) / divisor)
    drawn = tl.load(laws + tl.load(token_ids + row)).to(tl.float64)
    logprob = drawn - (highest + _log_sum(total))
    # Relative to the row's greatest entry, whatever the temperature.
    gap = (highest_of_set - highest_of_row).to(tl.float64) / divisor
    log_mass = gap + _log_sum(total_of_set) - _log_sum(total_of_row)
    log_mass = tl.where(log_mass > 0, 0.0, log_mass)
    tl.store(found, logprob.to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(found + 1, log_mass.to(tl.float32).to(tl.int32, bitcast=True))
    tl.debug_barrier()  # the words are other threads'
    place = tl.arange(0, WORDS)
    word = tl.load(found + 3 + place, mask=place < words, other=0)
    count = tl.zeros([WORDS], tl.int32)
    for bit in range(32):
        count += (word >> bit) & 1
    at = tl.cumsum(count, 0) - count
    tl.store(found + 2, tl.sum(count, 0))
    for bit in range(32):
        number = (word >> bit) & 1
        tl.store(found + 3 + words + at, 32 * place + bit, mask=(number == 1) & (at < LISTED))
        at += number


@triton.jit
def _entries(
    laws: tl.tensor, rows: tl.tensor, start: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the entries of a block of a law and of a row, -inf beyond their end."""
    tokens = start + tl.arange(0, BLOCK)
    law = tl.load(laws + tokens, mask=tokens < width, other=float("-inf"))
    own = tl.load(rows + tokens, mask=tokens < width, other=float("-inf"))
    return law, own.to(tl.float32)


@triton.jit
def _log_sum(parts: tl.tensor) -> tl.tensor:
    """Return the logarithm of a sum, in float64."""
    return tl.log(tl.sum(parts.to(tl.float64), 0))
