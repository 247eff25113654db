"""What an algorithm runs: how one particle begins, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from genrt.errors import InvalidRequest

__all__ = ["DEAD", "Growth", "Model", "Particle", "checked_model", "grown"]

DEAD = -1
"""In place of a token: none could be drawn."""


@runtime_checkable
class Particle(Protocol):
    """One text, or one execution of a program, as far as it got. A value: growing it makes another."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens drawn so far, without the end token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing is left to draw."""
        ...


class Growth(NamedTuple):
    """A particle one token longer.

    Attributes:
        particle: what became of it.
        log_weight: what its log-weight gained; -inf if it died.
        token_id: the token it drew, the end token included; ``DEAD`` if it drew none.
    """

    particle: Any
    log_weight: float
    token_id: int


@runtime_checkable
class Model(Protocol):
    """A target, and a way to propose from it token by token: ``TextModel``, ``Program``, or your own.

    Grown from ``start()`` until it is finished, a particle and its weight w, the product of what it
    gained, are *properly weighted*: E[w f(particle)] = Z E[f] under the target, for every function f,
    where Z is the target's normaliser, the evidence.
    """

    @property
    def max_steps(self) -> int | None:
        """The most steps that a particle takes; ``None`` if that is not known."""
        ...

    def start(self) -> Any:
        """A particle that has drawn nothing yet."""
        ...

    async def grow(self, particles: Sequence[Any], seed: int) -> list[Growth]:
        """Each of these, unfinished and alive, one token longer, in order. The seed decides all that is
        drawn; cancelling or failing leaves the particles as good as they were."""
        ...

    def text(self, particle: Any) -> str:
        """What its tokens say."""
        ...

    def value(self, particle: Any) -> Any:
        """What a posterior is over: the text, or what a program returned."""
        ...


def checked_model(model: Any) -> Model:
    """The model.

    Raises:
        InvalidRequest: it is none.
    """
    if isinstance(model, type) or not isinstance(model, Model):
        raise InvalidRequest(
            f"the model is a {type(model).__name__}: give a TextModel, a Program, or another Model"
        )
    return model


async def grown(model: Model, particles: Sequence[Any], seed: int) -> list[Growth]:
    """Return what the model makes of these particles.

    Raises:
        InvalidRequest: it gives another number of growths, or a gain that is NaN or +inf.
        GenrtError: whatever else the model raised.
    """
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
