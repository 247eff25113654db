"""Draws tokens with two fused Triton kernels: a pass over the rows, then a pass over the block sums.

``sampling.draw_chunk`` uses this module where it can. Importing it needs Triton. The first kernel reduces
every block of tokens to its maximum entry and the sum of its weights relative to that maximum. The second
kernel, with one program per draw, chooses a block and one of its tokens. A program reads one row in tiles
of one size, so no draw depends on the number of draws.

Sums over a block are float32; sums over blocks and cumulative sums are float64. A maximum may or may not
propagate NaN, so NaN is excluded from maxima and detected in the sums. Some versions of Triton treat
literals in comparisons as float32, so ``tl.full`` makes float64 ones. Kernel annotations are
evaluated and may name only ``tl``. A kernel's ``tl.tensor`` is a tensor's address, an int, or None.
"""

from __future__ import annotations

import subprocess
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 32
"""Blocks per program of the first kernel."""


def works() -> bool:
    """Return whether Triton finds a device and the compiler that it needs for launches."""
    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError):
        return False
    return True


def draw_fused(
    batch: Tensor,
    numbers: Tensor,
    *,
    mask: Tensor | None,
    heat: Tensor | None,
    places: Tensor | None,
    block: int,
    largest: float,
    greedy_below: float,
) -> Tensor:
    """Return the result of ``sampling.draw_chunk`` without waiting for the device.

    ``batch`` is float32 ``[m, V]`` with contiguous rows; ``mask`` is packed. The last three arguments are
    constants of ``sampling``. There must be at least one draw.
    """
    numbers = numbers.contiguous()
    heat, places = [None if x is None else x.contiguous() for x in (heat, places)]
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    planes, width = 2 if heat is None else 3, batch.shape[-1]
    reduced = batch.new_empty(len(numbers), planes, triton.cdiv(width, block))
    found = numbers.new_empty(len(numbers), 3)
    # Triton launches on the current device.
    is_elsewhere = batch.is_cuda and batch.device.index != torch.cuda.current_device()
    with torch.cuda.device(batch.device) if is_elsewhere else nullcontext():
        launch(
            *(batch, batch.stride(0), width, numbers, places, mask, reduced, found),
            heat=heat,
            block=block,
            largest=largest,
            greedy_below=greedy_below,
        )
    return found


def launch(
    address: Tensor,
    stride: int,
    width: int,
    numbers: Tensor,
    places: Tensor | None,
    mask: Tensor | None,
    reduced: Tensor,
    found: Tensor,
    *,
    heat: Tensor | None = None,
    block: int,
    largest: float,
    greedy_below: float,
) -> None:
    """Write the result of ``draw_fused`` to ``found``; it can be launched repeatedly.

    Args:
        address: the rows, or int64 ``[2]`` whose first entry is their address, a multiple of 16.
        numbers: float64 ``[n, 2]``, or int64 ``[n]``, the bits of the seeds of ``seeded_uniforms``.
    """
    count, blocks = len(numbers), triton.cdiv(width, block)
    mask_stride = 0 if mask is None else mask.stride(0)
    rows = address, stride, width, mask, mask_stride, heat, places
    tiles, padded = triton.cdiv(blocks, TILE), max(16, triton.next_power_of_2(blocks))
    _reduce[(count, tiles)](*rows, reduced, blocks, greedy_below, TILE, block)
    _choose[(count,)](*rows, reduced, blocks, numbers, found, greedy_below, largest, padded, block)


# A missing mask, temperature or place is None, which the compiler knows. No variant depends on the number
# of draws. Scalars are loaded from any address, so their alignment makes no further variants.
_ANY_ALIGNMENT = ["mask", "heat", "places", "numbers"]


@triton.jit(do_not_specialize=_ANY_ALIGNMENT)
def _reduce(
    batch: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    mask: tl.tensor,
    mask_stride: tl.tensor,
    heat: tl.tensor,
    places: tl.tensor,
    reduced: tl.tensor,
    blocks: tl.tensor,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write each block's maximum entry and its sums of weights, untempered and tempered.

    ``reduced`` is float32 ``[n, 2 or 3, blocks]``.
    """
    draw = tl.program_id(0).to(tl.int64)
    batch = _row_address(batch)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tokens = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    entries = _load_entries(batch, stride, width, mask, mask_stride, places, draw, tokens)
    highest = _highest(entries, 1)
    distances = entries - _finite_or_zero(highest)[:, None]
    planes = 2 if heat is None else 3
    at = reduced + draw * planes * blocks + block
    tl.store(at, highest, mask=block < blocks)
    tl.store(at + blocks, tl.sum(tl.exp(distances), 1), mask=block < blocks)
    if heat is not None:
        weights = tl.exp(distances / _float32_divisor(tl.load(heat + draw), GREEDY_BELOW))
        tl.store(at + 2 * blocks, tl.sum(weights, 1), mask=block < blocks)


@triton.jit(do_not_specialize=_ANY_ALIGNMENT)
def _choose(
    batch: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    mask: tl.tensor,
    mask_stride: tl.tensor,
    heat: tl.tensor,
    places: tl.tensor,
    reduced: tl.tensor,
    blocks: tl.tensor,
    numbers: tl.tensor,
    found: tl.tensor,
    GREEDY_BELOW: tl.constexpr,
    LARGEST: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a token id, logprob and log mass per draw: ``found`` float64 ``[n, 3]``."""
    draw = tl.program_id(0).to(tl.int64)
    batch = _row_address(batch)
    largest = tl.full([], LARGEST, tl.float64)
    if numbers.dtype.element_ty == tl.int64:
        golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        state = _splitmix_finalised(tl.load(numbers + draw).to(tl.uint64, bitcast=True) + golden)
        first, second = _uniform(state + golden), _uniform(state + golden + golden)
    else:
        first = tl.load(numbers + 2 * draw)
        second = tl.load(numbers + 2 * draw + 1)
    first = tl.where(first > largest, largest, first)
    second = tl.where(second > largest, largest, second)

    block = tl.arange(0, PADDED)
    planes = 2 if heat is None else 3
    at = reduced + draw * planes * blocks + block
    highest = tl.load(at, mask=block < blocks, other=float("-inf"))
    sums = tl.load(at + blocks, mask=block < blocks, other=0.0).to(tl.float64)
    peak = tl.max(highest, 0)
    distances = highest.to(tl.float64) - _finite_or_zero(peak).to(tl.float64)
    masses = tl.exp(distances) * sums
    log_total = tl.log(tl.sum(masses, 0))
    log_mass = _finite_or_zero(peak).to(tl.float64) + log_total
    if heat is not None:
        temperature = tl.load(heat + draw)
        divisor = _float32_divisor(temperature, GREEDY_BELOW)
        is_greedy = _is_greedy(temperature, GREEDY_BELOW)
        first = tl.where(is_greedy, 0.0, first)
        second = tl.where(is_greedy, 0.0, second)
        sums = tl.load(at + 2 * blocks, mask=block < blocks, other=0.0).to(tl.float64)
        masses = tl.exp(distances / divisor.to(tl.float64)) * sums
        log_total = tl.log(tl.sum(masses, 0))
        masses = tl.where(is_greedy, (highest == peak).to(tl.float64), masses)
    chosen = _inverse_of_row(masses, first, block, PADDED)

    inside = tl.arange(0, BLOCK)
    tokens = chosen * BLOCK + inside
    entries = _load_entries(batch, stride, width, mask, mask_stride, places, draw, tokens)
    distances = entries - _finite_or_zero(_highest(entries, 0))
    if heat is None:
        weights = tl.exp(distances)
    else:
        weights = tl.exp(distances / divisor)
        weights = tl.where(is_greedy, (entries == peak).to(tl.float32), weights)
    token = _inverse_of_row(weights.to(tl.float64), second, inside, BLOCK)

    own = tl.sum(tl.where(inside == token, entries, 0.0), 0)
    logprob = own.to(tl.float64) - _finite_or_zero(peak).to(tl.float64)
    if heat is not None:
        logprob = logprob / divisor.to(tl.float64)
    logprob = logprob - log_total
    logprob = tl.where(logprob > 0, 0.0, logprob)
    if heat is not None:
        logprob = tl.where(is_greedy, 0.0, logprob)
    is_dead = (peak == float("-inf")) | (log_mass != log_mass)
    token_id = (chosen * BLOCK + token).to(tl.float64)
    tl.store(found + 3 * draw, tl.where(is_dead, -1.0, token_id))
    tl.store(found + 3 * draw + 1, tl.where(is_dead, float("-inf"), logprob))
    tl.store(found + 3 * draw + 2, log_mass)


@triton.jit
def _row_address(batch: tl.tensor) -> tl.tensor:
    """Return the start of the rows; ``batch`` may be a tensor that holds their address."""
    if batch.dtype.element_ty == tl.int64:
        batch = tl.multiple_of(tl.load(batch).to(tl.pointer_type(tl.float32)), 16)
    return batch


@triton.jit
def _splitmix_finalised(bits: tl.tensor) -> tl.tensor:
    """Apply SplitMix64's finaliser, as ``sampling._finalised`` does."""
    bits = (bits ^ (bits >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(state: tl.tensor) -> tl.tensor:
    """Return a state's number in [0, 1)."""
    bits = _splitmix_finalised(state) >> 11
    return bits.to(tl.float64) * tl.full([], 1.1102230246251565e-16, tl.float64)  # 2**-53


@triton.jit
def _load_entries(
    batch: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    mask: tl.tensor,
    mask_stride: tl.tensor,
    places: tl.tensor,
    draw: tl.tensor,
    tokens: tl.tensor,
) -> tl.tensor:
    """Load the entries of these tokens; -inf beyond the vocabulary and where the mask forbids a token."""
    row = draw if places is None else tl.load(places + draw)
    exists = tokens < width
    entries = tl.load(batch + row * stride + tokens, mask=exists, other=float("-inf"))
    if mask is not None:
        packed = tl.load(mask + draw * mask_stride + tokens // 8, mask=exists, other=0)
        is_allowed = ((packed.to(tl.int32) >> (tokens % 8)) & 1) == 1
        entries = tl.where(is_allowed, entries, float("-inf"))
    return entries


@triton.jit
def _highest(entries: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the greatest entry, ignoring NaN."""
    return tl.max(tl.where(entries == entries, entries, float("-inf")), AXIS)


@triton.jit
def _finite_or_zero(highest: tl.tensor) -> tl.tensor:
    """Return ``highest``, or 0 for -inf: subtracting it moves ``highest`` to 0 and keeps -inf."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _float32_divisor(temperature: tl.tensor, GREEDY_BELOW: tl.constexpr) -> tl.tensor:
    """Return a float64 temperature as the float32 divisor, as ``sampling._divisor`` does; 1 if greedy."""
    temperature = tl.where(_is_greedy(temperature, GREEDY_BELOW), 1.0, temperature)
    most = tl.full([], 3.4028234663852886e38, tl.float64)  # the greatest float32
    return tl.where(temperature > most, most, temperature).to(tl.float32)


@triton.jit
def _is_greedy(temperature: tl.tensor, GREEDY_BELOW: tl.constexpr) -> tl.tensor:
    """Return whether a float64 temperature is greedy."""
    return temperature < tl.full([], GREEDY_BELOW, tl.float64)


@triton.jit
def _inverse_of_row(
    weights: tl.tensor, uniform: tl.tensor, indices: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Return the result of ``sampling._inverse`` for one row."""
    sums = tl.where(weights > 0, tl.cumsum(weights, 0), 0.0)
    passed = sums > tl.max(sums, 0) * uniform
    first = tl.min(tl.where(passed, indices, SIZE), 0)
    return tl.where(first < SIZE, first, 0)
