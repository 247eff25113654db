"""The heaviest values of a result, and the history of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrt.inference.diagnostics import ChainStatistics, key_of
from genrt.inference.display.formatting import count_of, label
from genrt.inference.resampling import (
    Floats,
    effective_sample_size,
    log_mean_exp,
    normalized_weights,
)
from genrt.inference.state import Deaths, Info
from genrt.runtime.statistics import Statistics

SHOWN = 10
"""The rows of a posterior's table; the rest is one row more."""

BAND = (0.05, 0.5, 0.95)
"""The quantiles of the weights that are drawn."""


@dataclass(frozen=True, slots=True)
class PosteriorEntry:
    """A distinct value, or all that are not shown, as one printable line, with the normalised weight and
    the number of particles."""

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
            the logarithm of the mean over all; NaN where all are dead.
        heaviest: the heaviest particle's log-weight, less the same.
    """

    steps: NDArray[np.int64]
    resampled: NDArray[np.bool_]
    ess: Floats
    log_evidence: Floats
    alive: NDArray[np.int64]
    band: Floats
    heaviest: Floats


@dataclass(frozen=True, eq=False)
class Summary:
    """A result's fields, and the figures that are shown."""

    values: Sequence[Any]
    log_weights: Floats
    log_evidence: float
    infos: Sequence[Info]
    statistics: Statistics | None
    chains: ChainStatistics | None
    deaths: Deaths

    @property
    def particles(self) -> int:
        """How many there are, dead ones included."""
        return len(self.log_weights)

    @property
    def alive(self) -> int:
        """How many particles have a positive weight."""
        return int((self.log_weights > -math.inf).sum())

    @property
    def weights(self) -> Floats:
        """The normalised weights; all 0 if every particle died."""
        return normalized_weights(self.log_weights) if self.alive else np.zeros(self.particles)

    @property
    def ess(self) -> float:
        """The effective sample size, of chains theirs; 0 if every particle died, NaN if unknown."""
        if not self.alive:
            return 0.0
        return effective_sample_size(self.log_weights) if self.chains is None else self.chains.ess

    @property
    def resampled(self) -> int:
        """How many steps began by resampling."""
        return sum(info.resampled for info in self.infos)

    @cached_property
    def _distinct(self) -> list[list[Any]]:
        """The distinct values of positive weight, each with its weight and its number of particles, the
        heaviest first. Values that cannot be hashed are compared by their repr."""
        total: dict[Any, list[Any]] = {}
        for value, weight in zip(self.values, self.weights, strict=True):
            if weight > 0:
                entry = total.setdefault(key_of(value), [value, 0.0, 0])
                entry[1] += float(weight)
                entry[2] += 1
        return sorted(total.values(), key=lambda entry: -entry[1])

    @cached_property
    def entries(self) -> list[PosteriorEntry]:
        """The heaviest distinct values."""
        return [PosteriorEntry(label(value), *rest) for value, *rest in self._distinct[:SHOWN]]

    @property
    def others(self) -> PosteriorEntry | None:
        """All other values together; ``None`` without others."""
        if not (others := self._distinct[SHOWN:]):
            return None
        _, weights, particles = zip(*others, strict=True)
        return PosteriorEntry(
            f"{count_of(len(others), 'value')} more", sum(weights), sum(particles)
        )

    @cached_property
    def curves(self) -> Curves | None:
        """The weights by step; ``None`` without steps."""
        if not self.infos:
            return None
        relative = np.array([_relative(info.log_weights) for info in self.infos]).T
        return Curves(
            steps=np.array([info.step for info in self.infos]),
            resampled=np.array([info.resampled for info in self.infos]),
            ess=np.array([info.ess for info in self.infos]),
            log_evidence=np.array([info.log_evidence for info in self.infos]),
            alive=np.array([(info.log_weights > -math.inf).sum() for info in self.infos]),
            band=relative[:-1],
            heaviest=relative[-1],
        )


def _relative(log_weights: Floats) -> Floats:
    """Return the log-weights' quantiles over the living and the largest, less the log of the mean over
    all."""
    alive = log_weights[log_weights > -math.inf]
    if not len(alive):
        return np.full(len(BAND) + 1, math.nan)
    quantiles = np.quantile(alive, [*BAND, 1.0])
    return (quantiles - log_mean_exp(log_weights)).astype(np.float64)
