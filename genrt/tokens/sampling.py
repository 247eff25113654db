"""Draws tokens from rows: temperature, truncation, masks and draws, batched, on the rows' device.

One distribution has three implementations: ``draw_chunk`` for every device, ``_draw_on_host`` with numpy
for untempered draws on CPUs, and ``draw_kernels.py`` with Triton for GPUs. ``DrawGraphs`` launches the
last one as a CUDA graph.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from genrt.errors import InvalidRequest
from genrt.launches import Repeated
from genrt.numbers import shown
from genrt.tokens.rows import AsyncHostCopy, log_sums

Bits = TypeVar("Bits", int, NDArray[Any])

Laws: TypeAlias = Sequence[tuple[float, float]]
"""A temperature and a power for each of several rows, whose product is drawn from; one power at least is
above 0, and no power is 0."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

BLOCK = 128
"""Tokens in a block of a draw. It divides the width of nearly every model's rows."""

LARGEST = 1.0 - 2.0**-52
"""The largest uniform number in use: its share of any total is less than the total."""

CPU_CHUNK, CHUNK = 2**20, 2**25
"""The entries of rows to process at a time: what a CPU's caches hold, or a GPU's memory has room for."""

HOSTS = ("cpu",)
"""Devices where numpy draws, and where bounding a row is faster than selecting its entries."""


def truncate(
    rows: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """Return the normalized rows that sampling with these parameters draws from.

    The order is vLLM's (``v1/sample/sampler.py``, ``ops/topk_topp_sampler.py``):

    - Rows are divided by the temperature.
    - min-p drops tokens less likely than ``min_p`` times the likeliest token.
    - top-k drops tokens less likely than the k-th likeliest; tokens tied with that one stay.
    - top-p renormalizes the remaining tokens. It drops the least likely ones while their joint mass is at
      most ``1 - top_p``; among equals, lower ids go first. The likeliest token stays.

    Each parameter is one number for all rows or a tensor ``[n]``. A row of -inf alone stays as it is.

    Args:
        rows: ``[V]`` or ``[n, V]`` log-probabilities, finite or -inf; not changed.
        temperature: at least 0; 0 puts all mass on the likeliest token, the lowest id among equals.
        top_k: 0 and values from ``V`` up turn it off.
        top_p: in (0, 1]; 1 turns it off.
        min_p: in [0, 1]; 0 turns it off.

    Raises:
        InvalidRequest: a parameter is out of its range, or shapes don't fit.
    """
    batch = _batch(rows)
    width = batch.shape[-1]
    heat = column("temperature", temperature, batch)
    floor = column("min_p", min_p, batch)
    nucleus = column("top_p", top_p, batch)
    ranks = column("top_k", top_k, batch)
    ranks = ranks.masked_fill((ranks == 0) | (ranks >= width), width)

    # Move the likeliest token to 0 first, so that no temperature, however small, overflows. Compare
    # tokens before dividing them by the temperature, because the division could make some equal.
    peak = batch.max(dim=-1, keepdim=True).values
    kept = batch - peak.masked_fill(peak == -math.inf, 0.0)
    greedy = heat < GREEDY_BELOW
    heat = heat.masked_fill(greedy, 1.0)
    if bool((floor > 0).any()):
        kept = kept.masked_fill(kept < floor.log() * heat, -math.inf)
    if bool((ranks < width).any()):
        at_most = int(ranks.masked_fill(ranks == width, 1).max())
        last = kept.topk(at_most, dim=-1).values.gather(-1, ranks.clamp(max=at_most) - 1)
        kept = kept.masked_fill((kept < last) & (ranks < width), -math.inf)
    if bool((nucleus < 1).any()):
        ascending, order = kept.sort(dim=-1, stable=True)
        dropped = (ascending / heat).softmax(dim=-1).cumsum(dim=-1) <= 1 - nucleus
        dropped[:, -1] = False
        dropped &= nucleus < 1
        kept = kept.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)
    kept = kept / _divisor(heat, batch.dtype)
    if bool(greedy.any()):
        best = _first(batch == peak)
        one = torch.full_like(kept, -math.inf).scatter(-1, best, batch.gather(-1, best))
        kept = torch.where(greedy, one, kept)
    total = log_sums(kept)
    return (kept - total.masked_fill(total == -math.inf, 0.0)).view(rows.shape)


def weighed(rows: Tensor, temperature: float, power: float) -> Tensor:
    """Return the log-weights of tokens: ``power`` times the rows ``[n, V]`` that ``truncate`` returns for
    this temperature. Only a greedy one waits for the device."""
    if temperature < GREEDY_BELOW:
        rows = truncate(rows, temperature=temperature)
    elif temperature != 1.0:
        rows = tempered(rows, min(temperature, torch.finfo(rows.dtype).max))
    return rows if power == 1.0 else power * rows


def product(factors: Sequence[Tensor], laws: Laws) -> Tensor:
    """Return the log-weights of tokens by several laws, ``[n, V]``: the sum of their ``weighed`` rows;
    -inf where a law of positive power has no probability, else +inf where one of negative power has
    none."""
    parts = [weighed(rows, *law) for rows, law in zip(factors, laws, strict=True)]
    infinite = None
    if any(power < 0 for _, power in laws):
        infinite = torch.stack([part == math.inf for part in parts]).any(dim=0)
        parts = [part.masked_fill(part == math.inf, 0.0) for part in parts]
    total = functools.reduce(torch.add, parts)
    if infinite is not None:
        total = total.masked_fill(infinite & (total > -math.inf), math.inf)
    return total


def tempered(rows: Tensor, temperature: float | Tensor) -> Tensor:
    """Return the rows ``[n, V]`` at a temperature above 0, normalized. It is a number that fits their
    dtype, or a number for each, ``[n, 1]``."""
    # Move the likeliest token to 0 first, so that no temperature, however small, overflows.
    peak = rows.amax(dim=-1, keepdim=True)
    rows = rows - peak.masked_fill_(peak == -math.inf, 0.0)
    rows /= temperature
    total = log_sums(rows)
    rows -= total.masked_fill_(total == -math.inf, 0.0)
    return rows


_RANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "temperature": (lambda x: (x >= 0) & (x < math.inf), "a finite number of at least 0"),
    "top_k": (lambda x: x >= 0, "an integer of at least 0, where 0 is off"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "a number above 0 and at most 1, where 1 is off"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "a number between 0 and 1, where 0 is off"),
}
"""For each parameter: a test whether values are in range, and the range in words."""


def column(name: str, value: float | Tensor, batch: Tensor) -> Tensor:
    """Return a parameter, read by ``_numbers_of``, as ``[n, 1]`` on the batch's device."""
    column = _numbers_of(name, value).reshape(-1, 1)
    if len(column) not in (1, len(batch)):
        raise InvalidRequest(f"{name} has {len(column)} values for {len(batch)} rows")
    return column.to(batch.device).expand(len(batch), 1)


def _numbers_of(name: str, value: float | Tensor) -> Tensor:
    """Return a parameter's values in the type that compares them: int64 for ``top_k``, else float64.
    Raises InvalidRequest unless it is a number or a tensor ``[n]`` of numbers, in its range."""
    is_sound, range_ = _RANGES[name]
    dtype = torch.int64 if name == "top_k" else torch.float64
    numbers = value.detach() if isinstance(value, Tensor) else _scalar(value, dtype)
    fitting = numbers is not None and numbers.dim() <= 1 and torch.can_cast(numbers.dtype, dtype)
    if numbers is None or not fitting or numbers.dtype == torch.bool:
        raise InvalidRequest(f"{name} is {value!r}: give {range_}, or a tensor [n] of them")
    numbers = numbers.to(dtype)
    if not bool(is_sound(numbers).all()):
        raise InvalidRequest(f"{name} is {shown(value)}: give {range_}")
    return numbers


def _scalar(value: object, dtype: torch.dtype) -> Tensor | None:
    """Return a number as a tensor, clamped to the range of the type; ``None`` for other types."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    if dtype.is_floating_point:
        try:
            return torch.tensor(float(value), dtype=dtype)
        except OverflowError:  # an int beyond every float
            return torch.tensor(math.inf if value > 0 else -math.inf, dtype=dtype)
    if not isinstance(value, int | np.integer):
        return None
    return torch.tensor(max(-1, min(int(value), torch.iinfo(dtype).max)), dtype=dtype)


class _Versioned:
    """A named tuple with one more attribute."""

    weights_version: int = 0

    @classmethod
    def of(cls, fields: Iterable[Any], weights_version: int) -> Self:
        """Return these fields with this version of the weights."""
        made: Self = cls._make(fields)  # type: ignore[attr-defined]
        if weights_version:
            made.weights_version = weights_version
        return made


class _Draw(NamedTuple):
    token_id: int
    logprob: float
    log_mass: float


class Draw(_Versioned, _Draw):
    """One token with its importance weight: ``BatchDraw``'s fields for one row, and
    ``weights_version``."""


class _BatchDraw(NamedTuple):
    token_ids: Tensor
    logprobs: Tensor
    log_mass: Tensor


class BatchDraw(_Versioned, _BatchDraw):
    """One token per row with its importance weight: three tensors.

    Attributes:
        token_ids: int64 ``[n]``; -1 where the mask leaves no mass.
        logprobs: float32 ``[n]``, the log-probability of drawing the token from the masked, tempered and
            renormalized row; -inf where there is no token.
        log_mass: float32 ``[n]``, ``logsumexp`` of the row over its mask. For the model's own row it is
            the incremental log importance weight: the target is the model, the proposal the masked model.
        weights_version: ``AsyncLM.weights_version`` of the rows; not an item of the tuple.
    """


class TopLogprobs(NamedTuple):
    """The likeliest tokens of a row, likeliest first.

    Attributes:
        token_ids: int64 ``[k]``.
        logprobs: float32 ``[k]``; -inf once no further token is possible.
    """

    token_ids: Tensor
    logprobs: Tensor


class TeacherLogprobs(NamedTuple):
    """The likeliest tokens of several rows, likeliest first, and the mass that they leave.

    Attributes:
        token_ids: int32 ``[n, top]``.
        logprobs: float32 ``[n, top]``; -inf once no further token is possible.
        tail: float32 ``[n]``, the log-probability of all other tokens; -inf without any.
    """

    token_ids: Tensor
    logprobs: Tensor
    tail: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> TeacherLogprobs:
        """Return the parts of ``top_with_tail``."""
        top = packed.shape[-1] // 2
        token_ids, logprobs, tail = torch.split(packed, [top, top, 1], dim=-1)
        numbers = (each.contiguous().view(torch.float32) for each in (logprobs, tail[..., 0]))
        return cls(token_ids.contiguous(), *numbers)


def likeliest(rows: Tensor, k: int) -> Tensor:
    """Return the ids of the ``k`` likeliest tokens of float32 rows ``[n, V]``, likeliest first: int64
    ``[n, k]``. Lower ids come first among equally likely tokens."""
    # Sort by the bits of the float, as an integer with the same order, then by the token id.
    bits = rows.view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32
    order += torch.arange(2**32 - 1, 2**32 - 1 - rows.shape[-1], -1, device=rows.device)
    keys = order.topk(k, dim=-1).values
    return 2**32 - 1 - (keys & (2**32 - 1))


def top_with_tail(rows: Tensor, k: int, temperatures: Tensor | None = None) -> Tensor:
    """Return a ``TeacherLogprobs`` of float32 rows ``[n, V]`` as one tensor on their device, int32
    ``[n, 2 * k + 1]``: the ids, and the bits of the numbers. Temperatures are float64 ``[n]``, above 0;
    the rows are divided by them and normalized again."""
    size = max(1, rows_at_once(rows) // 8)  # the sort takes much memory
    heats = itertools.repeat(None) if temperatures is None else torch.split(temperatures, size)
    parts: list[Tensor] = []
    for part, heat in zip(torch.split(rows, size), heats, strict=False):
        ids = likeliest(part, k)
        if heat is not None:
            divisors = _divisor(heat.clamp(min=1e-30), part.dtype)[:, None]
            part = (part - part.amax(dim=-1, keepdim=True)) / divisors
            part -= part.logsumexp(dim=-1, keepdim=True)
        tail = part.scatter(-1, ids, -math.inf).logsumexp(dim=-1, keepdim=True)
        numbers = torch.cat([part.gather(-1, ids), tail], dim=-1)
        parts.append(torch.cat([ids.int(), numbers.view(torch.int32)], dim=-1))
    return torch.cat(parts)


def draw(
    rows: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    generators: torch.Generator | Sequence[torch.Generator] | None = None,
    uniforms: Tensor | None = None,
) -> BatchDraw:
    """Draw one token per row, in proportion to the row's tempered probabilities under the mask.

    Two random numbers choose a block of tokens in proportion to its mass, then a token of that block.
    Probabilities are exact to float32, however small: each block is summed at its own scale. A token of
    probability zero is never drawn. A row with no mass under its mask is a dead end (token -1), not an
    error.

    Args:
        rows: ``[n, V]`` log-probabilities (``[V]`` counts as ``[1, V]``), finite or -inf, normalized or
            not; not changed.
        mask: true where a token may be drawn: bool ``[V]`` or ``[n, V]``, or packed as in ``DrawToken``,
            uint8 ``[n, 4 * ceil(V / 32)]``.
        temperature: at least 0, for all rows or ``[n]``; 0 takes the likeliest token, the lowest id among
            equals. ``log_mass`` is the untempered row's in any case.
        generators: one for the whole batch, or one per row, so that a row's draw depends on no other row.
            The default is torch's global generator.
        uniforms: the random numbers themselves, float64 ``[n, 2]`` in [0, 1), in place of generators.

    Raises:
        InvalidRequest: shapes or the mask's dtype don't fit, the temperature is out of range, or there
            are both sources of randomness.
    """
    batch = _batch(rows)
    count = len(batch)
    masks = None if mask is None else _row_masks(mask, batch)
    numbers = _random_numbers(count, batch.device, generators, uniforms)
    is_plain = isinstance(temperature, float) and temperature == 1.0
    heat = None if is_plain else column("temperature", temperature, batch)
    size = rows_at_once(batch)
    given = (batch, numbers, masks, heat)
    split = [itertools.repeat(None) if x is None else torch.split(x, size) for x in given]
    chunks = zip(*split, strict=False)  # a missing argument repeats without end
    parts = [draw_chunk(rows, pairs, mask=mask, heat=heat) for rows, pairs, mask, heat in chunks]
    token_ids, logprobs, log_mass = torch.cat(parts).unbind(dim=-1)
    return BatchDraw(token_ids.long(), logprobs.float(), log_mass.float())


def draw_chunk(
    batch: Tensor,
    numbers: Tensor,
    *,
    mask: Tensor | None = None,
    heat: Tensor | None = None,
    places: Tensor | None = None,
    laws: Laws = (),
) -> Tensor:
    """Draw for a chunk of rows on one device, without checks and without waiting for the device.

    Args:
        batch: float32 or float64 ``[n, V]``; not changed.
        numbers: float64 ``[n, 2]`` in [0, 1).
        mask: bool ``[n, V]`` or packed, as in ``draw``; by default every token is allowed.
        heat: the temperatures, float64 ``[n, 1]``; by default 1.
        places: int64 ``[n]``; draw ``i`` is then from ``batch[places[i]]``, of any number of rows.
        laws: each draw is then from as many rows or places in turn, by their ``product``. Only a greedy
            law waits for the device.

    Returns:
        float64 ``[n, 3]``: token ids, logprobs and log masses, so that one copy moves them to the host. A
        row with a weight of +inf has token -1 and log mass +inf.
    """
    is_simple = (mask is None or mask.dtype == torch.uint8) and len(numbers) > 0
    if (
        is_simple
        and not has_greedy(laws)
        and has_kernels(batch)
        and (fused := _fused()) is not None
    ):
        how = {"block": BLOCK, "largest": LARGEST, "greedy_below": GREEDY_BELOW}
        return fused(batch, numbers, mask=mask, heat=heat, places=places, laws=laws, **how)
    if places is not None:
        batch = batch.index_select(0, places)
    on_host = heat is None and batch.device.type in HOSTS and batch.dtype == torch.float32
    power = laws[0][1] if on_host and len(laws) == 1 and laws[0][0] == 1.0 else 1.0
    if laws and power == 1.0:
        batch = product([batch[turn :: len(laws)] for turn in range(len(laws))], laws)
    logarithms = batch if mask is None else _masked(batch, mask)
    if on_host:
        return _draw_on_host(logarithms, numbers.clamp(max=LARGEST), power)
    if logarithms.shape[-1] % BLOCK:
        padding = (0, -logarithms.shape[-1] % BLOCK)
        logarithms = functional.pad(logarithms, padding, value=-math.inf)
    blocks = logarithms.reshape(len(batch), logarithms.shape[-1] // BLOCK, BLOCK)
    highest = blocks.amax(dim=-1)
    peak = highest.amax(dim=-1, keepdim=True).double()
    within = blocks.softmax(dim=-1)
    masses = _masses(highest - peak, within)
    log_total = masses.sum(dim=-1, keepdim=True).log()
    log_mass = torch.where(peak == math.inf, peak, peak + log_total)
    numbers = numbers.clamp(max=LARGEST)
    if heat is None:
        block = _inverse(masses, numbers[:, :1])
        tokens = _of_block(within, block)
    else:
        greedy = heat < GREEDY_BELOW
        heat = _divisor(heat.masked_fill(greedy, 1.0), batch.dtype)
        numbers = numbers.masked_fill(greedy, 0.0)
        # Move the likeliest token to 0 first, so that no temperature, however small, overflows.
        within = blocks.sub(highest[:, :, None]).div_(heat[:, :, None]).softmax(dim=-1)
        masses = _masses((highest - peak) / heat, within)
        log_total = masses.sum(dim=-1, keepdim=True).log()
        block = _inverse(torch.where(greedy, highest == peak, masses), numbers[:, :1])
        tokens = torch.where(greedy, _of_block(blocks, block) == peak, _of_block(within, block))
    token_ids = torch.add(_inverse(tokens, numbers[:, 1:]), block, alpha=BLOCK)
    logprobs = logarithms.gather(-1, token_ids) - peak
    if heat is not None:
        logprobs = (logprobs / heat).masked_fill_(greedy, math.inf)  # the clamp below makes it 0
    dead = ~(peak.abs() < math.inf)
    logprobs = logprobs.sub_(log_total).clamp_(max=0.0).masked_fill_(dead, -math.inf)
    return torch.cat([token_ids.double().masked_fill_(dead, -1.0), logprobs, log_mass], dim=-1)


def _draw_on_host(rows: Tensor, numbers: Tensor, power: float) -> Tensor:
    """Return the result of ``draw_chunk`` for masked float32 rows at temperature 1, with numpy on one
    thread: waking torch's threads takes longer than they save.

    Rows without mass, and rows whose weights float32 cannot hold unscaled, take the other way.
    """
    logarithms, (first, second) = rows.detach().numpy(), numbers.numpy().T
    (count, width), places = rows.shape, np.arange(len(rows))
    weights = np.empty((count, width + -width % BLOCK), np.float32)
    weights[:, width:] = 0.0
    blocks = weights.reshape(count, weights.shape[1] // BLOCK, BLOCK)
    with np.errstate(all="ignore"):
        if power == 1.0:
            np.exp(logarithms, out=weights[:, :width])
        else:
            for row, own in zip(logarithms, weights[:, :width], strict=True):
                np.multiply(row, np.float32(power), out=own)
                np.exp(own, out=own)  # while a cache has the row
        chosen, mass = host_inverse(np.einsum("nbi->nb", blocks), first)
        within, _ = host_inverse(blocks[places, chosen], second)
        token_ids, log_mass = chosen * BLOCK + within, np.log(mass)
        logprobs = np.minimum(logarithms[places, token_ids] * np.float32(power) - log_mass, 0.0)
    found = torch.from_numpy(np.stack([token_ids, logprobs, log_mass], axis=1))
    # In a row of this mass, the weights that underflow in float32 are less than 2^-53 of it.
    others = np.flatnonzero(~((mass > 1e-15) & (mass < np.inf)))
    if len(others):
        heat = numbers.new_ones(len(others), 1)
        own = power * rows[others] if power != 1.0 else rows[others]
        found[others] = draw_chunk(own, numbers[others], heat=heat)
    return found


def host_inverse(weights: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first index in each row with a cumulative weight above its number's share of the total,
    and the total."""
    sums = weights.cumsum(axis=1, dtype=np.float64)
    return (sums > (sums[:, -1] * numbers)[:, None]).argmax(axis=1), sums[:, -1]


def has_greedy(laws: Laws) -> bool:
    """Return whether one of the laws is greedy: the kernels do not look for the likeliest token first."""
    return any(temperature < GREEDY_BELOW for temperature, _ in laws)


def has_kernels(batch: Tensor) -> bool:
    """Return whether the kernels are available and support these rows."""
    is_theirs = batch.is_cuda and batch.dtype == torch.float32 and batch.stride(-1) == 1
    return is_theirs and _fused() is not None


@functools.lru_cache
def _fused() -> Callable[..., Tensor] | None:
    """Return ``draw_kernels.draw_fused``; ``None`` where Triton is missing or has no compiler."""
    try:
        from genrt.tokens import draw_kernels
    except ImportError:
        return None
    return draw_kernels.draw_fused if draw_kernels.works() else None


def _masses(highest: Tensor, within: Tensor) -> Tensor:
    """Return the mass of each block, float64 ``[n, blocks]``, from the log weight of its likeliest token
    and its tokens' shares ``[n, blocks, BLOCK]``. A block without mass has shares 0 / 0."""
    return highest.exp().div_(within.amax(dim=-1)).nan_to_num_(nan=0.0)


def _of_block(blocks: Tensor, block: Tensor) -> Tensor:
    """Return one block of each row of ``[n, blocks, BLOCK]``, by the numbers ``[n, 1]``."""
    return blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index with a cumulative weight above the uniform's share of the total, ``[n, 1]``;
    0 in a row without weight. Weights are ``[n, m]``, and uniforms float64 ``[n, 1]``, at most
    ``LARGEST``.

    Parallel sums may fall by a rounding error, so only indices with a positive weight count, and the
    total is the greatest sum.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64).mul_(weights > 0)
    passed = sums > sums.amax(dim=-1, keepdim=True) * uniforms
    return _first(passed)


def _first(found: Tensor) -> Tensor:
    """Return the index of the first True of each row, ``[n, 1]``; 0 if there is no True."""
    return found.view(torch.uint8).argmax(dim=-1, keepdim=True)


def _row_masks(mask: Tensor, batch: Tensor) -> Tensor:
    """Return the mask of ``draw`` with one row for each row of the batch, on its device."""
    if mask.dtype == torch.bool and mask.shape in (batch.shape, batch.shape[1:]):
        return mask.to(batch.device).expand(batch.shape)
    packed = (len(batch), 4 * -(-batch.shape[-1] // 32))
    if mask.dtype == torch.uint8 and mask.shape == packed:
        return mask.to(batch.device)
    raise InvalidRequest(
        f"mask is {mask.dtype} {list(mask.shape)}: give torch.bool, {list(batch.shape[1:])} or "
        f"{list(batch.shape)}, or packed torch.uint8, {list(packed)}"
    )


def _masked(batch: Tensor, mask: Tensor) -> Tensor:
    """Return the rows with -inf where the mask, bool or packed, forbids a token. A packed mask is looked
    up byte by byte."""
    if mask.dtype == torch.bool:
        return torch.where(mask, batch, -math.inf)
    if batch.device.type in HOSTS:
        bounds = _EIGHT_BOUNDS.take(mask.numpy(), axis=0).reshape(len(mask), 8 * mask.shape[-1])
        return torch.from_numpy(np.minimum(bounds[:, : batch.shape[-1]], batch.detach().numpy()))
    width, bytes_ = batch.shape[-1], mask.reshape(-1).int()
    bools = _eight_bools(batch.device).index_select(0, bytes_).view(len(batch), -1)
    return torch.where(bools.view(torch.bool)[:, :width], batch, -math.inf)


_EIGHT_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""The bits of each byte, lowest first."""

_EIGHT_BOUNDS = np.where(_EIGHT_BITS, np.float32(np.inf), np.float32(-np.inf))
"""The bounds of the eight tokens of each byte of a packed mask."""


@functools.lru_cache
def _eight_bools(device: torch.device) -> Tensor:
    """Return bools for the eight tokens of each byte, as the bytes of one number: int64 ``[256]``."""
    return torch.from_numpy(_EIGHT_BITS.view(np.int64)[:, 0]).to(device)


def rows_at_once(rows: Tensor) -> int:
    """Return the best number of rows like these, ``[V]`` or ``[n, V]``, to process at a time."""
    return max(1, (CPU_CHUNK if rows.device.type == "cpu" else CHUNK) // rows.shape[-1])


def seeded_uniforms(seeds: Sequence[int] | np.ndarray) -> Tensor:
    """Return two numbers in [0, 1) for each seed in ``0 .. 2**64 - 1``: float64 ``[n, 2]``, for ``draw``.

    They are two steps of SplitMix64 (Steele, Lea & Flood 2014) from a state mixed from the seed, so
    numbers of neighboring seeds are unrelated.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = _finalised(np.array(seeds, dtype=np.uint64).reshape(-1, 1) + golden)
    bits = _finalised(states + golden * np.array([[1, 2]], dtype=np.uint64))
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def mixed(seed: int, step: int) -> int:
    """Return 32 well-mixed bits of a pair, for torch's CPU generator: SplitMix64's finalizer at the
    ``step + 1``-th state from ``seed``."""
    return _finalised((seed * 0xD1342543DE82EF95 + (step + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 32


def _finalised(bits: Bits) -> Bits:
    """Apply SplitMix64's finalizer to an array or an int; an int is ten times as fast."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    bits ^= bits >> 31
    return bits


def _random_numbers(
    count: int,
    device: torch.device,
    generators: torch.Generator | Sequence[torch.Generator] | None,
    uniforms: Tensor | None,
) -> Tensor:
    """Return the random numbers of ``count`` draws: float64 ``[count, 2]`` in [0, 1)."""
    if uniforms is not None:
        if generators is not None:
            raise InvalidRequest("generators and uniforms are both given: give one of the two")
        if uniforms.dtype != torch.float64 or uniforms.shape != (count, 2):
            raise InvalidRequest(
                f"uniforms are {uniforms.dtype} {list(uniforms.shape)}: give torch.float64 [{count}, 2]"
            )
        if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
            raise InvalidRequest("uniforms have to be in [0, 1), every one of them")
        return uniforms.to(device)
    if generators is None:
        return torch.rand(count, 2, dtype=torch.float64, device=device)
    if isinstance(generators, torch.Generator):
        return _rand(count, generators).to(device)
    if len(generators) != count:
        raise InvalidRequest(f"{len(generators)} generators for {count} rows: give one per row")
    if not count:
        return torch.empty(0, 2, dtype=torch.float64, device=device)
    return torch.cat([_rand(1, generator) for generator in generators]).to(device)


def _rand(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, 2, dtype=torch.float64, device=generator.device, generator=generator)


def _batch(rows: Tensor) -> Tensor:
    """Return the rows as ``[n, V]``, in float32 unless they are float64."""
    if rows.dim() not in (1, 2) or rows.shape[-1] == 0 or not rows.is_floating_point():
        raise InvalidRequest(
            f"rows are {rows.dtype} {list(rows.shape)}: give floating-point [V] or [n, V]"
        )
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return wide if wide.dim() == 2 else wide[None]


def _divisor(heat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return temperatures in the rows' dtype, as divisors. A temperature beyond that dtype becomes its
    greatest number: the distribution is uniform either way."""
    return heat.clamp(max=torch.finfo(dtype).max).to(dtype)


PackedMasks: TypeAlias = np.ndarray | Sequence[Tensor]
"""A packed mask for each of several draws: uint8 ``[n, size]``, or the int32 words of each. Bits beyond
the vocabulary are ignored."""


class DrawInputs(NamedTuple):
    """Some of the draws of a launch; either all draws have masks or no draw has one.

    Attributes:
        seeds: uint64 ``[n]``.
        masks: one for each.
        places: int64, the place of each row that they are from; by default the first rows.
        temperature: of all of them.
    """

    seeds: np.ndarray
    masks: PackedMasks | None
    places: np.ndarray | None
    temperature: float = 1.0


class _Kind(NamedTuple):
    """The draws that one graph can make: their number, the shapes of their rows and masks, whether they
    have temperatures, the number of laws, and whether these are tempered."""

    draws: int
    mask_bytes: int
    width: int
    stride: int
    is_heated: bool
    laws: int
    are_tempered: bool


class DrawGraphs:
    """Draws from rows on one GPU with one launch, a CUDA graph, for one thread. A batch must arrive
    before the next one starts.

    Each step's rows have another address, so the address is copied with the masks.
    """

    def __init__(self) -> None:
        self._kinds: LRUCache[_Kind, _Graph] = LRUCache(4)

    def launch(
        self, rows: Tensor, several: Sequence[DrawInputs], laws: Laws = ()
    ) -> tuple[Tensor, AsyncHostCopy] | None:
        """Return the result of ``draw_chunk`` for several groups of draws, and its copy to the host, both
        valid until the next call. With laws, each draw comes once for each of its rows.

        Return ``None`` where there are no kernels for these rows, float32 ``[m, V]``, or for a greedy
        law, or if only some of the draws have masks.
        """
        count = sum(len(each.seeds) for each in several)
        first, *others = [0 if each.masks is None else each.masks[0].nbytes for each in several]
        if not has_kernels(rows) or count > 4096 or rows.data_ptr() % 16:
            return None
        if any(mask_bytes != first for mask_bytes in others) or has_greedy(laws):
            return None
        is_heated = any(each.temperature != 1.0 for each in several)
        of_laws = len(laws), any(temperature != 1.0 for temperature, _ in laws)
        shape = _rounded(count), first, rows.shape[1], rows.stride(0)
        kind = _Kind(*shape, is_heated, *of_laws)
        if kind not in self._kinds:
            self._kinds[kind] = _Graph(kind, rows.device)
        return self._kinds[kind].launch(rows, several, laws)


class _Graph:
    """Draws of one kind. Their inputs are in one piece of memory: the address of the rows with a word of
    padding, the rows' places, the seeds, the temperatures, the laws, the masks."""

    def __init__(self, kind: _Kind, device: torch.device) -> None:
        from genrt.tokens.draw_kernels import launch, room

        count, mask_bytes, width, stride, is_heated, laws, are_tempered = kind
        turns = laws or 1
        ends = np.cumsum([2, count * turns, count, count * is_heated, 2 * laws]).tolist()
        words, pinned = 8 * ends[-1], device.type == "cuda"
        on_host = torch.empty(words + count * mask_bytes, dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty_like(on_host, device=device)
        found = torch.empty(count, turns, 3, dtype=torch.float64, device=device)
        whole = found.view(count * turns, 3)
        arriving = torch.empty(count * turns, 3, dtype=torch.float64, pin_memory=pinned)
        reduced = room(count, -(-width // BLOCK), is_heated, laws, are_tempered, device)
        inputs = there[:words].view(torch.int64).tensor_split(ends[:-1])
        address, places, seeds, heats, factors = inputs
        masks = there[words:].view(count, mask_bytes) if mask_bytes else None
        heat = heats.view(torch.float64) if is_heated else None
        own_laws = factors.view(torch.float64).view(laws, 2) if laws else None

        def go() -> None:
            there.copy_(on_host, non_blocking=True)
            own = address, stride, width, seeds, places, masks, reduced, found
            how: dict[str, Any] = {"heat": heat, "laws": own_laws}
            launch(*own, **how, block=BLOCK, largest=LARGEST, greedy_below=GREEDY_BELOW)
            arriving.copy_(whole, non_blocking=True)

        self._go = Repeated(go)
        self._found, self._arriving, self._turns = whole, arriving, turns
        numbers = np.split(on_host[:words].numpy().view(np.int64), ends[:-1])
        self._address, self._places = numbers[:2]
        self._seeds = numbers[2].view(np.uint64)
        self._heats, self._laws = (each.view(np.float64) for each in numbers[3:])
        self._masks = on_host[words:].view(count, mask_bytes) if mask_bytes else None
        self._last: AsyncHostCopy | None = None

    def launch(
        self, rows: Tensor, several: Sequence[DrawInputs], laws: Laws
    ) -> tuple[Tensor, AsyncHostCopy]:
        if self._last is not None:
            self._last.result()  # an interrupt may have skipped the wait for the last copy
        self._address[0] = rows.data_ptr()
        self._laws[:] = np.ravel(laws)
        count, turns = 0, self._turns
        for seeds, masks, places, temperature in several:
            part = slice(count, count + len(seeds))
            self._seeds[part] = seeds
            self._heats[part] = temperature
            at = slice(turns * part.start, turns * part.stop)
            self._places[at] = np.arange(turns * len(seeds)) if places is None else places
            if masks is not None and self._masks is not None:
                copy_masks(self._masks[part], masks)
            count = part.stop
        self._places[turns * count :] = 0
        self._go()
        self._last = AsyncHostCopy.lent(self._arriving[: turns * count], rows.device)
        return self._found[: turns * count], self._last


def copy_masks(target: Tensor, masks: PackedMasks) -> None:
    """Copy packed masks to ``target`` on the host, uint8 ``[n, size]``; large ones use several cores."""
    if not isinstance(masks, np.ndarray):
        torch.stack([*masks], out=target.view(torch.int32))
    elif masks.flags.writeable and masks.nbytes > 2**18:
        target.copy_(torch.from_numpy(masks))
    else:
        target.numpy()[:] = masks


def _rounded(count: int) -> int:
    """Return the number of draws to allocate for; rounding limits the sizes as texts end one by one."""
    step = 16 if count <= 256 else 64
    return -(-count // step) * step
