"""The result of a run: weighted texts, or values of programs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference.diagnostics import ChainStatistics, Diagnosis, diagnose
from genrt.inference.display import plots, rendering
from genrt.inference.display.genealogy import Genealogy
from genrt.inference.display.summary import Summary
from genrt.inference.resampling import Ancestors, Floats
from genrt.inference.state import Deaths, Info
from genrt.numbers import check_int
from genrt.runtime.statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Result:
    r"""Weighted texts, and the history of the particles: plain data, independent of the runtime.

    ``print`` shows the posterior's table; Jupyter shows it with the genealogy of the particles and
    the runtime's statistics; ``plot`` draws the curves of the weights.

    Attributes:
        texts: the particles' bytes as UTF-8, dead ones as far as they got. A byte that is not UTF-8, as
            of a character that was cut, is U+FFFD and its number, ``�\xf0``, so that equal texts have
            equal bytes.
        token_ids: the particles' generated tokens, without the end token.
        values: the values of the posterior: the texts, or the results of a program.
        log_weights: float64 ``[N]``, unnormalised; -inf for the dead.
        log_evidence: the estimate of log Z; -inf if every particle died, NaN from an algorithm that
            has no estimate.
        infos: one for each step, ancestors included; empty from algorithms without particles that grow.
        chains: of Metropolis–Hastings, the values and the mixing of chains.
        deaths: the causes of weight 0 at the end.
        statistics: the work of the runtime during ``run``, for all its callers. ``None`` from
            ``result``, and for a model without a runtime as ``lm``.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    values: tuple[Any, ...]
    log_weights: Floats
    log_evidence: float
    infos: tuple[Info, ...] = ()
    statistics: Statistics | None = None
    chains: ChainStatistics | None = None
    deaths: Deaths = field(default_factory=Deaths)
    _tokens: Mapping[int, bytes] = field(default_factory=dict)
    """The bytes of each drawn token."""

    @property
    def ess(self) -> float:
        """The effective sample size; 0 if every particle died.

        Of weighted particles it is Kong's. Of chains it is ``ChainStatistics.ess``, a bulk ESS, NaN if
        unknown.
        """
        return self._summary.ess

    @property
    def ancestors(self) -> tuple[Ancestors, ...]:
        """The ancestors of every step, int64 ``[N]`` each."""
        return tuple(info.ancestors for info in self.infos)

    @property
    def weights(self) -> Floats:
        """The normalised weights, float64 ``[N]``; all 0 if every particle died."""
        return self._summary.weights

    def posterior(self, *, of: Callable[[Any], Any] | None = None) -> list[tuple[Any, float]]:
        """Return the distinct values with their normalised weights, heaviest first; ``[]`` if all are
        dead.

        Args:
            of: a function of a value, for the distribution of its results, which must be hashable:
                ``of=len``.

        Raises:
            InvalidRequest: values that are not hashable: give ``of``.
        """
        parts: defaultdict[Any, list[float]] = defaultdict(list)
        for value, weight in zip(self.values, self.weights.tolist(), strict=True):
            if weight > 0:
                each = value if of is None else of(value)
                try:
                    parts[each].append(weight)
                except TypeError as error:
                    raise InvalidRequest(
                        f"a {type(each).__name__} cannot be counted, it is not hashable: give of=, "
                        "a function that makes of a value what can, such as of=str"
                    ) from error
        # Exact sums, so that the posterior adds up to 1.
        whole = math.fsum(self.weights.tolist())
        total = {each: math.fsum(weights) / whole for each, weights in parts.items()}
        return sorted(total.items(), key=lambda entry: (-entry[1], str(entry[0])))

    def expectation(self, function: Callable[[Any], float]) -> float:
        """Return the posterior mean of a function of the values; NaN if every particle died.

        Raises:
            InvalidRequest: the function returns something that is not a number.
        """
        mean = 0.0 if self._summary.alive else math.nan
        for value, weight in zip(self.values, self.weights, strict=True):
            if weight > 0:
                found = function(value)
                try:
                    mean += float(weight * found)
                except (TypeError, ValueError) as error:
                    raise InvalidRequest(
                        f"expectation takes a function that gives numbers, and this one gave {found!r}"
                    ) from error
        return mean

    def sample(self, count: int, *, seed: int) -> list[Any]:
        """Draw values from the posterior, independently of each other.

        Raises:
            InvalidRequest: every particle died; ``count`` or the seed is not an integer of at least 0.
        """
        rng = np.random.default_rng(check_int("seed", seed, 0))
        size = check_int("count", count, 0)
        if not self._summary.alive:
            why = str(self.deaths) or "nothing has a positive weight"
            raise InvalidRequest(f"every particle died ({why}): there is nothing to draw from")
        chosen = rng.choice(len(self.values), size, p=self.weights)
        return [self.values[index] for index in chosen]

    def diagnose(self, function: Callable[[Any], float]) -> Diagnosis:
        """Return the mixing of the chains for a function of their values: ``ess_mean``, the effective
        sample size of ``expectation(function)``; ``ess_bulk``, the same for its ranks; R-hat.

        Raises:
            InvalidRequest: the result has no chains, or the function gives something that is no number.
        """
        if self.chains is None:
            raise InvalidRequest(
                "this result has no chains, and its particles' weights make its ess: MetropolisHastings "
                "has chains"
            )
        return diagnose(self.chains.values, function)

    def genealogy(self, *, lineages: int = 24) -> Genealogy:
        """Return the family tree of the particles, with their tokens, as a picture.

        Args:
            lineages: the most to show: survivors first, distinct texts before equal ones, and a sample
                of lineages that died or have no children.

        Raises:
            InvalidRequest: the result has no steps; or ``lineages`` is under 1.
        """
        if not self.infos:
            raise InvalidRequest(
                "this result has no steps, and so no genealogy: SMC and importance sampling keep them"
            )
        return Genealogy(self.infos, self._tokens, check_int("lineages", lineages, 1))

    def plot(self) -> Figure:
        """Draw the posterior as bars; ESS, log evidence and log-weights as curves, if there were steps.

        A notebook shows the figure; ``result.plot().savefig("run.png")`` writes it to a file.

        Raises:
            ExtraNotInstalled: matplotlib is missing.
        """
        return plots.figure_of(self._summary)

    def to_pandas(self, *, steps: bool = False) -> DataFrame:
        """Return a table with a row for each particle, or for each step.

        Args:
            steps: the steps instead of the particles: whether resampled, how many distinct ancestors,
                how many alive and unfinished, ESS and log evidence.

        Raises:
            InvalidRequest: there are no steps.
            ExtraNotInstalled: pandas is missing.
        """
        if steps:
            return plots.steps_frame(self.infos, self._summary.curves)
        return plots.particles_frame(
            self.texts, self.token_ids, self.values, self.log_weights, self.weights
        )

    def __repr__(self) -> str:
        return rendering.to_line(self._summary)

    def __str__(self) -> str:
        return rendering.to_text(self._summary)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the result in a terminal's IPython."""
        printer.text(repr(self) if cycle else str(self))

    def _repr_html_(self) -> str:
        return rendering.to_html(self._summary, self.genealogy() if self.infos else None)

    @property
    def _summary(self) -> Summary:
        return Summary(
            self.values,
            self.log_weights,
            self.log_evidence,
            self.infos,
            self.statistics,
            self.chains,
            self.deaths,
        )
