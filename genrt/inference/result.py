"""Weighted texts, or values of programs, and how they came about."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference.resampling import Ancestors, Floats, effective_sample_size, normalised
from genrt.inference.state import Info

__all__ = ["Result"]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Weighted texts, and how they came about.

    Fields:
        texts: the particles' bytes as UTF-8, with U+FFFD for what is not; dead ones as far as they got.
        token_ids: the particles' generated tokens, without the end token.
        values: what the posterior is over: the texts, or what a program returned.
        log_weights: float64 ``[N]``, unnormalised; -inf for the dead.
        log_evidence: the estimate of log Z; -inf if every particle died, NaN from an algorithm that
            has no estimate.
        infos: one for each step, ancestors included; empty from algorithms without particles that grow.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    values: tuple[Any, ...]
    log_weights: Floats
    log_evidence: float
    infos: tuple[Info, ...] = ()

    @property
    def ess(self) -> float:
        """The effective sample size; 0 if every particle died."""
        return effective_sample_size(self.log_weights) if len(self.log_weights) else 0.0

    @property
    def ancestors(self) -> tuple[Ancestors, ...]:
        """The ancestors of every step, int64 ``[N]`` each."""
        return tuple(info.ancestors for info in self.infos)

    @property
    def weights(self) -> Floats:
        """The normalised weights, float64 ``[N]``; all 0 if every particle died."""
        if self.ess == 0:
            return np.zeros(len(self.log_weights))
        return normalised(self.log_weights)

    def posterior(self, *, of: Callable[[Any], Any] | None = None) -> list[tuple[Any, float]]:
        """The distinct values with their normalised weights, heaviest first; ``[]`` if all are dead.

        Args:
            of: a function of a value, whose distribution is wanted instead: ``of=json.loads`` will not
                do, what it returns is to be hashable, ``of=len`` will.

        Raises:
            InvalidRequest: values that are not hashable: give ``of``.
        """
        total: defaultdict[Any, float] = defaultdict(float)
        for value, weight in zip(self.values, self.weights, strict=True):
            if weight > 0:
                each = value if of is None else of(value)
                try:
                    total[each] += float(weight)
                except TypeError as error:
                    raise InvalidRequest(
                        f"a {type(each).__name__} cannot be counted, it is not hashable: give of=, "
                        "a function that makes of a value what can, such as of=str"
                    ) from error
        return sorted(total.items(), key=lambda entry: (-entry[1], str(entry[0])))

    def expectation(self, function: Callable[[Any], float]) -> float:
        """The posterior mean of a function of the values; NaN if every particle died."""
        if self.ess == 0:
            return math.nan
        return float(
            sum(
                weight * function(value)
                for value, weight in zip(self.values, self.weights, strict=True)
                if weight > 0
            )
        )

    def sample(self, count: int, *, seed: int) -> list[Any]:
        """Values drawn from the posterior, independently given the particles.

        Raises:
            InvalidRequest: every particle died.
        """
        if self.ess == 0:
            raise InvalidRequest("every particle died: there is nothing to draw from")
        chosen = np.random.default_rng(seed).choice(len(self.values), count, p=self.weights)
        return [self.values[index] for index in chosen]
