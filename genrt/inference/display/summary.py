"""Weighted values in short: the heaviest of them, and how their weights came about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrt.inference.diagnostics import ChainStatistics, key_of
from genrt.inference.display.legible import label
from genrt.inference.resampling import Floats, effective_sample_size, normalised
from genrt.inference.state import Info
from genrt.runtime.statistics import Statistics

SHOWN = 10
"""The rows of a posterior's table; the rest is one row more."""

BAND = (0.05, 0.5, 0.95)
"""The quantiles of the weights that are drawn."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A distinct value as one printable line, with its normalised weight and the number of its
    particles."""

    label: str
    weight: float
    particles: int


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """How the weights developed, step by step: arrays ``[steps]``.

    Attributes:
        steps: the numbers of the steps.
        resampled: whether the step began by resampling.
        alive: how many particles have a positive weight.
        band: float64 ``[3, steps]``, the quantiles ``BAND`` of the living particles' log-weights, less
            the logarithm of the mean over all; NaN where none is alive.
        heaviest: the heaviest particle's log-weight, less the same.
    """

    steps: NDArray[np.int64]
    resampled: NDArray[np.bool_]
    ess: Floats
    log_evidence: Floats
    alive: NDArray[np.int64]
    band: Floats
    heaviest: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """Weighted values in short.

    Attributes:
        particles: how many there are, dead ones included.
        alive: how many have a positive weight.
        ess: the effective sample size; NaN if unknown.
        log_evidence: log Z_hat; NaN without an estimate.
        entries: the heaviest distinct values of positive weight.
        others: how many more distinct values there are.
        others_weight: what these weigh together.
        steps: how many there were; 0 from algorithms without particles that grow.
        resampled: how many of them began by resampling.
        curves: ``None`` without steps, or if not asked for.
        statistics: what the runtime did; ``None`` if unknown.
        chains: how chains mixed, if there are some.
    """

    particles: int
    alive: int
    ess: float
    log_evidence: float
    entries: tuple[Entry, ...]
    others: int
    others_weight: float
    steps: int
    resampled: int
    curves: Curves | None
    statistics: Statistics | None
    chains: ChainStatistics | None


def summarised(
    values: Sequence[Any],
    log_weights: Floats,
    log_evidence: float,
    infos: Sequence[Info],
    statistics: Statistics | None,
    chains: ChainStatistics | None,
    *,
    with_curves: bool,
) -> Summary:
    """Summarise a result, cheaply without the curves. Values that cannot be hashed are told apart by how
    Python writes them."""
    alive = int((log_weights > -math.inf).sum())
    ess = 0.0
    if alive:
        ess = effective_sample_size(log_weights) if chains is None else chains.ess
    weights = normalised(log_weights) if alive else np.zeros(len(log_weights))
    total: dict[Any, list[Any]] = {}
    for value, weight in zip(values, weights, strict=True):
        if weight > 0:
            entry = total.setdefault(key_of(value), [value, 0.0, 0])
            entry[1] += float(weight)
            entry[2] += 1
    heaviest = sorted(total.values(), key=lambda entry: -entry[1])
    return Summary(
        particles=len(log_weights),
        alive=alive,
        ess=ess,
        log_evidence=log_evidence,
        entries=tuple(Entry(label(value), *rest) for value, *rest in heaviest[:SHOWN]),
        others=len(heaviest[SHOWN:]),
        others_weight=sum(weight for _, weight, _ in heaviest[SHOWN:]),
        steps=len(infos),
        resampled=sum(info.resampled for info in infos),
        curves=_curves(infos) if infos and with_curves else None,
        statistics=statistics,
        chains=chains,
    )


def _curves(infos: Sequence[Info]) -> Curves:
    relative = np.array([_relative(info.log_weights) for info in infos]).T
    return Curves(
        steps=np.array([info.step for info in infos]),
        resampled=np.array([info.resampled for info in infos]),
        ess=np.array([info.ess for info in infos]),
        log_evidence=np.array([info.log_evidence for info in infos]),
        alive=np.array([(info.log_weights > -math.inf).sum() for info in infos]),
        band=relative[:-1],
        heaviest=relative[-1],
    )


def _relative(log_weights: Floats) -> Floats:
    """Return the log-weights' quantiles over the living and the largest, less the log of the mean over
    all."""
    alive = log_weights[log_weights > -math.inf]
    if not len(alive):
        return np.full(len(BAND) + 1, math.nan)
    peak = alive.max()
    mean = peak + math.log(np.exp(alive - peak).sum() / len(log_weights))
    found: Floats = np.quantile(alive, [*BAND, 1.0]) - mean
    return found
