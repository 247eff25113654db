"""The model protocol that algorithms run: the start and the growth of one particle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from genrt.errors import InvalidRequest

DEAD = -1
"""The token id that means: no token could be drawn."""


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
