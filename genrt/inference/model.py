"""What algorithms run and pass on: models, their particles, weighted particles, records of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference.resampling import Ancestors, Floats, ess_and_log_mean

DEAD = -1
"""The token id that means: no token could be drawn."""

Tokens: TypeAlias = NDArray[np.int64]


@runtime_checkable
class Particle(Protocol):
    """One text, or one execution of a program, so far. A value: growing it makes another."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens drawn so far, without the end token."""

    @property
    def finished(self) -> bool:
        """True if it is complete."""


class Growth(NamedTuple):
    """A particle one token longer.

    Attributes:
        particle: the particle after it.
        log_weight: the gain of its log-weight; -inf if it died.
        token_id: the drawn token, the end token included; ``DEAD`` without one.
    """

    particle: Any
    log_weight: float
    token_id: int


@runtime_checkable
class Model(Protocol):
    """A target, and a way to propose from it token by token: ``TextModel``, ``Program``, or your own.

    Grown from ``start()`` until it is finished, a particle and its weight w, the product of its
    gains, are *properly weighted*: E[w f(particle)] = Z E[f] under the target, for every function f,
    where Z is the target's normaliser, the evidence.
    """

    @property
    def max_steps(self) -> int | None:
        """The most steps that a particle takes; ``None`` if unknown."""

    def start(self) -> Any:
        """Return a particle before its first draw."""

    async def grow(self, particles: Sequence[Any], seed: int) -> list[Growth]:
        """Grow each of these particles, unfinished and alive, by one token, in order. The seed decides
        all draws; a cancelled or failed call leaves the particles unchanged."""

    def text(self, particle: Any) -> str:
        """Return the text of the particle's tokens."""

    def value(self, particle: Any) -> Any:
        """Return the value for the posterior: the text, or a program's result."""


def checked_model(model: Any) -> Model:
    """Return the model. Raises InvalidRequest if it is not a Model."""
    if isinstance(model, type) or not isinstance(model, Model):
        raise InvalidRequest(
            f"the model is a {type(model).__name__}: give a TextModel, a Program, or another Model"
        )
    return model


async def grown(model: Model, particles: Sequence[Any], seed: int) -> list[Growth]:
    """Grow particles by the model. Raises InvalidRequest if it returns another number of growths, or a
    gain that is NaN or +inf."""
    growths = await model.grow(particles, seed)
    if len(growths) != len(particles):
        raise InvalidRequest(
            f"the model gave {len(growths)} growths of {len(particles)} particles: give one for each"
        )
    for each in growths:
        if not each.log_weight < math.inf:
            raise InvalidRequest(
                f"the model says that a particle gained {each.log_weight}: log-weights are finite, "
                "or -inf"
            )
    return growths


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
    def of(cls, model: Any, state: State) -> Self:
        """Return the deaths among a state's particles."""
        longest, ends = model.max_steps, getattr(model, "ends", None)
        if longest is None:
            longest = math.inf
        elif ends is None or not ends.never:
            longest -= 1  # the last step draws only an end
        dead = [state.particles[place] for place in np.nonzero(state.log_weights == -math.inf)[0]]
        return cls(
            **Counter(
                "potential"
                if each.finished
                else "max_tokens"
                if len(each.token_ids) >= longest
                else "dead_ends"
                for each in dead
            )
        )

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
