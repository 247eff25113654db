"""Draws tokens with two fused Triton kernels: a pass over the rows, then a pass over the block sums.

``sampling.draw_chunk`` uses this module where it can. Importing it needs Triton. The first kernel reduces
every block of tokens to its maximum entry and the sum of its weights relative to that maximum. The second
kernel, with one program per draw, chooses a block and one of its tokens. A program reads one row in tiles
of one size, so no draw depends on the number of draws.

An entry of a product of rows is a sum of their entries. Sums over a block are float32; sums over rows and
over blocks and cumulative sums are float64. A maximum may or may not propagate NaN, so NaN is excluded
from maxima and detected in the sums. Some versions of Triton treat literals in comparisons as float32, so
``tl.full`` makes float64 ones. Kernel annotations are evaluated and may name only ``tl``. A kernel's
``tl.tensor`` is a tensor's address, an int, or None.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from genrt.tokens.rows import moved

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
    laws: Sequence[tuple[float, float]],
    block: int,
    largest: float,
    greedy_below: float,
) -> Tensor:
    """Return the result of ``sampling.draw_chunk`` without waiting for the device.

    ``batch`` is float32 ``[m, V]`` with contiguous rows; ``mask`` is packed; no law is greedy. The last
    three arguments are constants of ``sampling``. There must be at least one draw.
    """
    numbers = numbers.contiguous()
    heat, places = [None if x is None else x.contiguous() for x in (heat, places)]
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    width, kind = batch.shape[-1], (len(laws), any(heat != 1.0 for heat, _ in laws))
    reduced = room(len(numbers), triton.cdiv(width, block), heat is not None, *kind, batch.device)
    found = numbers.new_empty(len(numbers), len(laws) or 1, 3)
    factors = torch.tensor([*laws], dtype=torch.float64) if laws else None
    # Triton launches on the current device.
    is_elsewhere = batch.is_cuda and batch.device.index != torch.cuda.current_device()
    with torch.cuda.device(batch.device) if is_elsewhere else nullcontext():
        launch(
            *(batch, batch.stride(0), width, numbers, places, mask, reduced, found),
            heat=heat,
            laws=None if factors is None else moved(factors, batch.device),
            block=block,
            largest=largest,
            greedy_below=greedy_below,
        )
    return found[:, 0]


def room(
    count: int, blocks: int, is_heated: bool, laws: int, are_tempered: bool, device: torch.device
) -> Tensor:
    """Return memory for what the first kernel makes of the rows of ``count`` draws: float64
    ``[count, planes, blocks]``.

    Planes are maxima and sums of weights; with ``are_tempered`` both of each law's own row; and, the
    last if there are temperatures of draws, sums of heated weights.
    """
    planes = 2 + 2 * laws * are_tempered + is_heated
    return torch.empty(count, planes, blocks, dtype=torch.float64, device=device)


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
    heat: Tensor | None,
    laws: Tensor | None,
    block: int,
    largest: float,
    greedy_below: float,
) -> None:
    """Write the draws to ``found``, float64 ``[n, k, 3]``, each of them k times. The launch can be
    repeated.

    Args:
        address: the rows, or int64 ``[2]`` whose first entry is their address, a multiple of 16.
        numbers: float64 ``[n, 2]``, or int64 ``[n]``, the bits of the seeds of ``seeded_uniforms``.
        reduced: from ``room``.
        laws: float64 ``[k, 2]``, the temperature and the power of each of k rows of a draw; without
            them, a draw has one row.
    """
    (count, planes, blocks), turns = reduced.shape, found.shape[1]
    mask_stride = 0 if mask is None else mask.stride(0)
    rows = address, stride, width, mask, mask_stride, heat, laws, turns, places, reduced, blocks
    tiles, padded = triton.cdiv(blocks, TILE), max(16, triton.next_power_of_2(blocks))
    _reduce[(count, tiles)](*rows, planes, greedy_below, TILE, block)
    _choose[(count,)](*rows, numbers, found, planes, greedy_below, largest, padded, block)


# A missing mask, temperature, law or place is None, which the compiler knows. No variant depends on the
# number of draws. Scalars are loaded from any address, so their alignment makes no further variants.
_ANY_ALIGNMENT = ["mask", "heat", "laws", "places", "numbers"]


@triton.jit(do_not_specialize=_ANY_ALIGNMENT)
def _reduce(
    batch: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    mask: tl.tensor,
    mask_stride: tl.tensor,
    heat: tl.tensor,
    laws: tl.tensor,
    turns: tl.tensor,
    places: tl.tensor,
    reduced: tl.tensor,
    blocks: tl.tensor,
    PLANES: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the planes of ``room``: of each block, its maximum entry and its sums of weights."""
    draw = tl.program_id(0).to(tl.int64)
    batch = _row_address(batch)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tokens = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    entries = _load_entries(
        batch, stride, width, mask, mask_stride, laws, turns, places, draw, tokens
    )
    highest = _highest(entries, 1)
    distances = (entries - _finite_or_zero(highest)[:, None]).to(tl.float32)
    at, exists = reduced + draw * PLANES * blocks + block, block < blocks
    tl.store(at, highest, mask=exists)
    tl.store(at + blocks, tl.sum(tl.exp(distances), 1), mask=exists)
    if heat is not None:
        weights = tl.exp(distances / _float32_divisor(tl.load(heat + draw), GREEDY_BELOW))
        tl.store(at + (PLANES - 1) * blocks, tl.sum(weights, 1), mask=exists)
    if PLANES > 3:  # the laws are tempered
        for turn in range(turns):
            own = _load_row(batch, stride, width, places, draw * turns + turn, tokens)
            top = _highest(own, 1)
            divisor = _float32_divisor(tl.load(laws + 2 * turn), 0.0)
            weights = tl.exp((own - _finite_or_zero(top)[:, None]) / divisor)
            at += 2 * blocks
            tl.store(at, top, mask=exists)
            tl.store(at + blocks, tl.sum(weights, 1), mask=exists)


@triton.jit(do_not_specialize=_ANY_ALIGNMENT)
def _choose(
    batch: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    mask: tl.tensor,
    mask_stride: tl.tensor,
    heat: tl.tensor,
    laws: tl.tensor,
    turns: tl.tensor,
    places: tl.tensor,
    reduced: tl.tensor,
    blocks: tl.tensor,
    numbers: tl.tensor,
    found: tl.tensor,
    PLANES: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    LARGEST: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a token id, logprob and log mass for each row of a draw to ``found``."""
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
    at, exists = reduced + draw * PLANES * blocks + block, block < blocks
    highest = tl.load(at, mask=exists, other=float("-inf"))
    peak = tl.max(highest, 0)
    distances = highest - _finite_or_zero(peak)
    masses = tl.exp(distances) * tl.load(at + blocks, mask=exists, other=0.0)
    log_total = tl.log(tl.sum(masses, 0))
    log_mass = tl.where(peak == float("inf"), peak, _finite_or_zero(peak) + log_total)
    if PLANES > 3:  # a tempered row is normalized
        for turn in range(turns):
            divisor = _float32_divisor(tl.load(laws + 2 * turn), 0.0).to(tl.float64)
            tops = tl.load(at + (2 + 2 * turn) * blocks, mask=exists, other=float("-inf"))
            top = _finite_or_zero(tl.max(tops, 0))
            sums = tl.load(at + (3 + 2 * turn) * blocks, mask=exists, other=0.0)
            own = _finite_or_zero(tl.log(tl.sum(tl.exp((tops - top) / divisor) * sums, 0)))
            is_needed = (divisor != 1.0) & (peak != float("-inf")) & (peak != float("inf"))
            total = tl.where(is_needed, top / divisor + own, 0.0)
            log_mass -= tl.load(laws + 2 * turn + 1) * total
    if heat is not None:
        temperature = tl.load(heat + draw)
        divisor = _float32_divisor(temperature, GREEDY_BELOW)
        is_greedy = _is_greedy(temperature, GREEDY_BELOW)
        first = tl.where(is_greedy, 0.0, first)
        second = tl.where(is_greedy, 0.0, second)
        sums = tl.load(at + (PLANES - 1) * blocks, mask=exists, other=0.0)
        masses = tl.exp(distances / divisor.to(tl.float64)) * sums
        log_total = tl.log(tl.sum(masses, 0))
        masses = tl.where(is_greedy, (highest == peak).to(tl.float64), masses)
    chosen = _inverse_of_row(masses, first, block, PADDED)

    inside = tl.arange(0, BLOCK)
    tokens = chosen * BLOCK + inside
    entries = _load_entries(
        batch, stride, width, mask, mask_stride, laws, turns, places, draw, tokens
    )
    distances = (entries - _finite_or_zero(_highest(entries, 0))).to(tl.float32)
    if heat is None:
        weights = tl.exp(distances)
    else:
        weights = tl.exp(distances / divisor)
        weights = tl.where(is_greedy, (entries == peak).to(tl.float32), weights)
    token = _inverse_of_row(weights.to(tl.float64), second, inside, BLOCK)

    own = tl.sum(tl.where(inside == token, entries, 0.0), 0)
    logprob = own.to(tl.float64) - _finite_or_zero(peak)
    if heat is not None:
        logprob = logprob / divisor.to(tl.float64)
    logprob = logprob - log_total
    logprob = tl.where(logprob > 0, 0.0, logprob)
    if heat is not None:
        logprob = tl.where(is_greedy, 0.0, logprob)
    is_dead = (peak == float("-inf")) | (peak == float("inf")) | (log_mass != log_mass)
    token_id = (chosen * BLOCK + token).to(tl.float64)
    found += 3 * draw * turns
    for turn in range(turns):
        tl.store(found + 3 * turn, tl.where(is_dead, -1.0, token_id))
        tl.store(found + 3 * turn + 1, tl.where(is_dead, float("-inf"), logprob))
        tl.store(found + 3 * turn + 2, log_mass)


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
    laws: tl.tensor,
    turns: tl.tensor,
    places: tl.tensor,
    draw: tl.tensor,
    tokens: tl.tensor,
) -> tl.tensor:
    """Return the entries of these tokens, float64 with laws; -inf beyond the vocabulary and where the
    mask forbids a token."""
    if laws is None:
        entries = _load_row(batch, stride, width, places, draw, tokens)
    else:
        entries, is_infinite = tl.zeros(tokens.shape, tl.float64), tokens < 0
        for turn in range(turns):
            own = _load_row(batch, stride, width, places, draw * turns + turn, tokens)
            power = tl.load(laws + 2 * turn + 1)
            is_inverse_of_0 = tl.where(power < 0, own == float("-inf"), False)
            own = tl.where(is_inverse_of_0, 0.0, own).to(tl.float64)
            entries += power / _float32_divisor(tl.load(laws + 2 * turn), 0.0).to(tl.float64) * own
            is_infinite |= is_inverse_of_0
        entries = tl.where(is_infinite & (entries > float("-inf")), float("inf"), entries)
    if mask is not None:
        at = mask + draw * mask_stride + tokens // 8
        packed = tl.load(at, mask=tokens < width, other=0)
        is_allowed = ((packed.to(tl.int32) >> (tokens % 8)) & 1) == 1
        entries = tl.where(is_allowed, entries, float("-inf"))
    return entries


@triton.jit
def _load_row(
    batch: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    number: tl.tensor,
    tokens: tl.tensor,
) -> tl.tensor:
    """Return the entries of these tokens in a row, by its number among the rows of all draws; -inf
    beyond the vocabulary."""
    row = number if places is None else tl.load(places + number)
    return tl.load(batch + row * stride + tokens, mask=tokens < width, other=float("-inf"))


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
