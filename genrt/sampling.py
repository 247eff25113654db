"""Row(s) -> token(s): temperature, truncations, masks and draws, batched, on the rows' device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from genrt.errors import InvalidRequest

_RANGES = {
    "temperature": "a finite number of at least 0",
    "top_k": "an integer of at least 0, where 0 is off",
    "top_p": "a number above 0 and at most 1, where 1 is off",
    "min_p": "a number between 0 and 1, where 0 is off",
}

__all__ = ["Draw", "check_parameters", "draw", "truncate"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


def check_parameters(
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> None:
    """Refuse parameters of ``truncate`` that are out of their range.

    Raises:
        InvalidRequest: the first such parameter, its value and its range.
    """
    sound: dict[str, tuple[float | Tensor, bool | Tensor]] = {
        "temperature": (temperature, (temperature >= 0) & (temperature < math.inf)),
        "top_k": (top_k, top_k >= 0),
        "top_p": (top_p, (top_p > 0) & (top_p <= 1)),
        "min_p": (min_p, (min_p >= 0) & (min_p <= 1)),
    }
    for name, (value, is_sound) in sound.items():
        if not bool(torch.as_tensor(is_sound).all()):
            raise InvalidRequest(f"{name} is {value}: give {_RANGES[name]}")


def truncate(
    rows: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """The rows that sampling with these parameters draws from, normalised again.

    The order is vLLM's (``v1/sample/sampler.py``, ``ops/topk_topp_sampler.py``): rows are divided
    by the temperature; min-p drops what is less likely than ``min_p`` times the likeliest token; top-k
    drops what is less likely than the k-th likeliest, so that tokens tied with it all stay; top-p,
    on what is left and renormalised, drops the least likely tokens while their joint mass is at
    most ``1 - top_p``, and among equally likely ones those with lower ids first. The likeliest stays.

    Args:
        rows: ``[V]`` or ``[n, V]`` log-probabilities, finite or -inf; not changed.
        temperature: at least 0; 0 puts all mass on the likeliest token, the lowest id among equals.
        top_k: 0 and anything from ``V`` up are off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.

    Each parameter is one number for all rows or a tensor ``[n]`` with one per row. A row that is
    -inf throughout stays so.

    Raises:
        InvalidRequest: a parameter is out of its range, or shapes don't fit.
    """
    batch = _batch(rows)
    width = batch.shape[-1]
    check_parameters(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    heat = _column("temperature", temperature, batch)
    floor = _column("min_p", min_p, batch)
    nucleus = _column("top_p", top_p, batch)
    ranks = _column("top_k", top_k, batch).long()
    ranks = ranks.masked_fill((ranks <= 0) | (ranks >= width), width)

    # The likeliest token is moved to 0 first, so that no temperature, however small, overflows.
    peak = batch.max(dim=-1, keepdim=True).values
    kept = batch - peak.masked_fill(peak == -math.inf, 0.0)
    greedy = heat < GREEDY_BELOW
    kept = kept / heat.masked_fill(greedy, 1.0)
    if bool((floor > 0).any()):
        kept = kept.masked_fill(kept < floor.log(), -math.inf)
    if bool((ranks < width).any()):
        at_most = int(ranks.masked_fill(ranks == width, 1).max())
        last = kept.topk(at_most, dim=-1).values.gather(-1, ranks.clamp(max=at_most) - 1)
        kept = kept.masked_fill((kept < last) & (ranks < width), -math.inf)
    if bool((nucleus < 1).any()):
        ascending, order = kept.sort(dim=-1, stable=True)
        dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - nucleus
        dropped[:, -1] = False
        dropped &= nucleus < 1
        kept = kept.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)
    if bool(greedy.any()):
        best = torch.zeros_like(kept, dtype=torch.bool).scatter(-1, _first_argmax(batch), True)
        kept = torch.where(greedy, batch.masked_fill(~best, -math.inf), kept)
    return _normalised(kept).view(rows.shape)


class Draw(NamedTuple):
    """One token per row, with its importance weight.

    Fields:
        token_ids: int64 ``[n]``; -1 where the mask leaves no mass.
        logprobs: float32 ``[n]``, the token's log-probability under the masked, renormalised row;
            -inf where there is no token.
        log_mass: float32 ``[n]``, ``logsumexp`` of the row over its mask. If the row is the model's
            own (neither tempered nor truncated), this is the incremental log importance weight of
            drawing from the masked model in place of the model.
    """

    token_ids: Tensor
    logprobs: Tensor
    log_mass: Tensor


def draw(
    rows: Tensor,
    *,
    mask: Tensor | None = None,
    generators: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Draw:
    """One token per row, in proportion to the row's probabilities under the mask (Gumbel-max).

    The token is ``argmax(exp(row) / q)`` with independent ``q ~ Exponential(1)``, which is Gumbel-max
    without its logarithms. A token of probability zero is never drawn; a row with no mass under its
    mask is a dead end (token -1), not an error.

    Args:
        rows: ``[n, V]`` log-probabilities (``[V]`` counts as ``[1, V]``), finite or -inf,
            normalised or not; not changed.
        mask: bool ``[V]`` or ``[n, V]``, true where a token may be drawn.
        generators: one for the whole batch, or one per row, in which case a row's draw depends on
            that row and its generator alone. The noise is made on a generator's own device. Without
            any, torch's global generator is used.

    Raises:
        InvalidRequest: shapes or the mask's dtype don't fit.
    """
    batch = _batch(rows)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape not in (batch.shape, batch.shape[1:]):
            raise InvalidRequest(
                f"mask is {mask.dtype} {list(mask.shape)}: give torch.bool, "
                f"{list(batch.shape[1:])} or {list(batch.shape)}"
            )
        batch = batch.masked_fill(~mask.to(batch.device), -math.inf)
    log_mass = batch.logsumexp(dim=-1)
    alive = log_mass > -math.inf
    peak = batch.max(dim=-1, keepdim=True).values.masked_fill(~alive[:, None], 0.0)
    token_ids = ((batch - peak).exp() / _exponentials(batch, generators)).argmax(dim=-1)
    logprobs = batch.gather(-1, token_ids[:, None])[:, 0] - log_mass.masked_fill(~alive, 0.0)
    return Draw(
        token_ids.masked_fill(~alive, -1),
        logprobs.clamp(max=0.0).float(),
        log_mass.float(),
    )


def _exponentials(
    batch: Tensor, generators: torch.Generator | Sequence[torch.Generator] | None
) -> Tensor:
    """Exponential(1) noise shaped like ``batch``, neither 0 nor infinite.

    In float64, because the smallest float32 noise is about 6e-8: over 100,000 tokens that is met
    once in some two hundred rows, and there it would favour unlikely tokens.
    """
    noise = torch.empty(batch.shape, dtype=torch.float64, device=batch.device)
    if generators is None:
        noise.exponential_()
    elif isinstance(generators, torch.Generator):
        _fill(noise, generators)
    else:
        if len(generators) != len(batch):
            raise InvalidRequest(
                f"{len(generators)} generators for {len(batch)} rows: give one per row"
            )
        for row, generator in zip(noise, generators, strict=True):
            _fill(row, generator)
    # An exact 0 would make 0 / 0 = NaN of an impossible token, and NaN wins an argmax; an infinity
    # would make 0 of a possible one.
    return noise.clamp_(1e-300, 1e300)


def _fill(noise: Tensor, generator: torch.Generator) -> None:
    if generator.device == noise.device:
        noise.exponential_(generator=generator)
    else:
        made = torch.empty(noise.shape, dtype=noise.dtype, device=generator.device)
        noise.copy_(made.exponential_(generator=generator))


def _batch(rows: Tensor) -> Tensor:
    """The rows as ``[n, V]``, in float32 unless they are wider."""
    if rows.dim() not in (1, 2) or rows.shape[-1] == 0 or not rows.is_floating_point():
        raise InvalidRequest(
            f"rows are {rows.dtype} {list(rows.shape)}: give floating-point [V] or [n, V]"
        )
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return wide if wide.dim() == 2 else wide[None]


def _column(name: str, value: float | Tensor, batch: Tensor) -> Tensor:
    """A parameter as ``[n, 1]``, in the batch's dtype and on its device."""
    column = torch.as_tensor(value, device=batch.device, dtype=batch.dtype).reshape(-1, 1)
    if len(column) not in (1, len(batch)):
        raise InvalidRequest(f"{name} has {len(column)} values for {len(batch)} rows")
    return column.expand(len(batch), 1)


def _first_argmax(batch: Tensor) -> Tensor:
    """``[n, 1]``: the lowest index of each row's maximum; torch.argmax leaves ties open."""
    width = batch.shape[-1]
    indices = torch.arange(width, device=batch.device)
    peak = batch.max(dim=-1, keepdim=True).values
    return torch.where(batch == peak, indices, width).min(dim=-1, keepdim=True).values


def _normalised(batch: Tensor) -> Tensor:
    total = batch.logsumexp(dim=-1, keepdim=True)
    return batch - total.masked_fill(total == -math.inf, 0.0)
