"""Weighted particles between two steps, and a record of each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genrt.inference.resampling import Ancestors, Floats, ess_and_log_mean

Tokens: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class State:
    """N weighted particles after ``step`` steps. A value: stepping makes a new one, and stepping the same
    one again gives the same, since the randomness of step t comes from ``(seed, t)`` alone.

    ``log_weights`` is float64 ``[N]``, unnormalised, read-only; a dead particle has -inf.
    """

    particles: tuple[Any, ...]
    log_weights: Floats
    step: int
    seed: int

    @cached_property
    def _summed(self) -> tuple[float, float]:
        return ess_and_log_mean(self.log_weights)

    @property
    def ess(self) -> float:
        """The effective sample size of the weights; 0 if all particles are dead."""
        return self._summed[0]

    @property
    def log_evidence(self) -> float:
        """log Z_hat so far: of the present weights, for the present prefixes."""
        return self._summed[1]

    @cached_property
    def unfinished(self) -> tuple[int, ...]:
        """The indices of the particles that the next step extends: alive and not finished."""
        [alive] = np.nonzero(self.log_weights > -math.inf)
        return tuple([index for index in alive.tolist() if not self.particles[index].finished])

    @property
    def done(self) -> bool:
        """True if no particle is alive and unfinished."""
        return not self.unfinished


@dataclass(frozen=True, slots=True)
class Deaths:
    """The numbers of particles that died, by cause.

    Attributes:
        max_tokens: they reached ``max_tokens`` before the constraint let them end.
        dead_ends: no token could follow, or a twist or an observation ruled out a prefix.
        potential: the potential or the score ruled out a complete text.
    """

    max_tokens: int = 0
    dead_ends: int = 0
    potential: int = 0

    @classmethod
    def of(cls, model: Any, dead: Iterable[tuple[int, bool]]) -> Self:
        """Return the deaths among particles, as their numbers of tokens and whether they ended."""
        longest, ends = model.max_steps, getattr(model, "ends", None)
        if longest is None:
            longest = math.inf
        elif ends is None or not ends.never:
            longest -= 1  # the last step draws only an end
        causes = [
            "potential" if ended else "max_tokens" if count >= longest else "dead_ends"
            for count, ended in dead
        ]
        return cls(**Counter(causes))

    def __str__(self) -> str:
        counts = {
            "at max_tokens": self.max_tokens,
            "at dead ends": self.dead_ends,
            "by the potential": self.potential,
        }
        return ", ".join(f"{count:,} {cause}" for cause, count in counts.items() if count)


@dataclass(frozen=True, slots=True, eq=False)
class Info:
    """The record of one step.

    Attributes:
        step: its number, from 0.
        resampled: whether it began by resampling.
        ancestors: int64 ``[N]``, the index in the step before of the particle that each one grew from.
        token_ids: int64 ``[N]``, the token that each one drew, the end token included; -1 for a
            particle that was not extended, that died, or whose program drew another value.
        log_increments: float64 ``[N]``, the gain of each log-weight after any resampling: 0 for
            a particle that was not extended, -inf for one that died.
        log_weights: float64 ``[N]``, after the step.
        ess: the effective sample size after the step.
        log_evidence: log Z_hat after the step.
        unfinished: the number of particles that the next step extends.
    """

    step: int
    resampled: bool
    ancestors: Ancestors
    token_ids: Tokens
    log_increments: Floats
    log_weights: Floats
    ess: float
    log_evidence: float
    unfinished: int
