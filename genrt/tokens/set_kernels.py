"""The Triton kernel that describes the sets of a step's draws in one launch; importing this needs
Triton. One program reads a whole row, so no set depends on the number of rows."""

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
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    laws += row * laws_stride
    rows += row * rows_stride
    found += row * (3 + words + LISTED)
    divisor = tl.full([], 1.0, tl.float32)
    if divisors is not None:
        divisor = tl.load(divisors + row)
    one = tl.full([], 1.0, tl.float32)
    nothing, zero = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float64)
    top, top_of_row, top_of_set = nothing, nothing, nothing
    total, total_of_row, total_of_set = zero, zero, zero
    size = tl.zeros([], tl.int32)
    for start in range(0, width, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        law = tl.load(laws + tokens, mask=tokens < width, other=float("-inf"))
        own = tl.load(rows + tokens, mask=tokens < width, other=float("-inf")).to(tl.float32)
        is_in = law > float("-inf")
        top, total = _added(top, total, law, one)
        top_of_row, total_of_row = _added(top_of_row, total_of_row, own, divisor)
        inside = tl.where(is_in, own, float("-inf"))
        top_of_set, total_of_set = _added(top_of_set, total_of_set, inside, divisor)
        number = is_in.to(tl.int32)
        at = size + tl.cumsum(number, 0) - number
        tl.store(found + 3 + words + at, tokens, mask=is_in & (at < LISTED))
        size += tl.sum(number, 0)
        bits = tl.reshape(number, (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
        word = start // 32 + tl.arange(0, BLOCK // 32)
        tl.store(found + 3 + word, tl.sum(bits, 1), mask=word < words)
    drawn = tl.load(laws + tl.load(token_ids + row)).to(tl.float64)
    logprob = drawn - (top + tl.log(total))
    # Relative to the row's greatest entry, whatever the temperature.
    gap = (top_of_set - top_of_row).to(tl.float64) / divisor
    log_mass = gap + tl.log(total_of_set) - tl.log(total_of_row)
    log_mass = tl.where(log_mass > 0, 0.0, log_mass)
    tl.store(found, logprob.to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(found + 1, log_mass.to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(found + 2, size)


@triton.jit
def _added(
    top: tl.tensor, total: tl.tensor, entries: tl.tensor, divisor: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return a greatest entry, and a sum of ``exp((entry - greatest) / divisor)``, with these entries."""
    new = tl.maximum(top, _highest(entries, 0))
    zero = _finite_or_zero(new)
    weights = tl.exp((entries - zero) / divisor)
    total = total * tl.exp(((top - zero) / divisor).to(tl.float64)) + tl.sum(weights, 0)
    return new, total
