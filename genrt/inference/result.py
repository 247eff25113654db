"""The result of a run: weighted texts, or values of programs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from genrt.errors import ExtraNotInstalled, InvalidRequest
from genrt.inference.estimates import (
    ChainStatistics,
    Diagnosis,
    diagnose,
    expectation_error,
    key_of,
    pareto_k,
    relative_error,
    tail_in_words,
)
from genrt.inference.formatting import count_of, fixed, label, number, shorten
from genrt.inference.model import Deaths, Info
from genrt.inference.resampling import (
    Ancestors,
    Floats,
    effective_sample_size,
    normalized_weights,
)
from genrt.numbers import check_int
from genrt.runtime.statistics import Statistics

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 10
"""The rows of a posterior's table; the rest is one row more."""

WIDEST = 100
"""The most characters of a value in the table."""


def shares(pairs: Iterable[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """Return the distinct values of pairs with the shares of their weights, heaviest first. Raises
    InvalidRequest for a value that is not hashable."""
    parts: defaultdict[Any, list[float]] = defaultdict(list)
    for value, weight in pairs:
        try:
            parts[value].append(weight)
        except TypeError as error:
            raise InvalidRequest(
                f"a {type(value).__name__} cannot be counted, it is not hashable: give of=, "
                "a function that makes of a value what can, such as of=str"
            ) from error
    # Exact sums, so that the shares add up to 1.
    whole = math.fsum(chain.from_iterable(parts.values()))
    total = {value: math.fsum(own) / whole for value, own in parts.items()}
    return sorted(total.items(), key=lambda entry: (-entry[1], str(entry[0])))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Result:
    r"""Weighted texts, and the records of the steps: plain data, independent of the runtime.

    ``print`` and a notebook show figures and the posterior, as a text of bounded size.

    Attributes:
        texts: the particles' bytes as UTF-8, dead ones as far as they got. A byte that is not UTF-8, as
            of a character that was cut, is U+FFFD and its number, ``�\xf0``, so that equal texts have
            equal bytes.
        token_ids: the particles' generated tokens, without the end token.
        values: the values of the posterior: the texts, or the results of a program.
        log_weights: float64 ``[N]``, unnormalized; -inf for the dead.
        log_evidence: the estimate of log Z; -inf if every particle died, NaN from an algorithm that has
            no estimate.
        infos: one for each step, ancestors included; empty from algorithms without particles that grow.
        chains: of Metropolis–Hastings, the values and the mixing of chains.
        deaths: the causes of weight 0 at the end.
        eve: int64 ``[N]``, the first particle that each one descends from; ``None`` unless ancestors were
            drawn independently of each other, as ``multinomial`` draws them.
        resamplings: how often the particles were resampled.
        statistics: the work of the runtime during ``run``, for all its callers. ``None`` from ``result``,
            and for a model without a runtime as ``lm``.
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
    eve: Ancestors | None = None
    resamplings: int = 0

    @property
    def ess(self) -> float:
        """The effective sample size, 0 if every particle died: Kong's of weighted particles,
        ``ChainStatistics.ess`` of chains."""
        if not self._alive:
            return 0.0
        return effective_sample_size(self.log_weights) if self.chains is None else self.chains.ess

    @property
    def weights(self) -> Floats:
        """The normalized weights, float64 ``[N]``; all 0 if every particle died."""
        return normalized_weights(self.log_weights) if self._alive else np.zeros(len(self.values))

    @property
    def _alive(self) -> int:
        """How many particles have a positive weight."""
        return int((self.log_weights > -math.inf).sum())

    def posterior(self, *, of: Callable[[Any], Any] | None = None) -> list[tuple[Any, float]]:
        """Return the distinct values with their normalized weights, heaviest first; ``[]`` if all are
        dead. ``of`` is a function of a value, for the distribution of its results: ``of=len``. Raises
        InvalidRequest if these, or else the values, are not hashable."""
        pairs = zip(self.values, self.weights.tolist(), strict=True)
        alive = ((value, weight) for value, weight in pairs if weight > 0)
        return shares(alive if of is None else ((of(value), weight) for value, weight in alive))

    def expectation(self, function: Callable[[Any], float]) -> float:
        """Return the posterior mean of a function of the values; NaN if every particle died. Raises
        InvalidRequest if the function returns something that is not a number."""
        numbers = self._numbers_of(function)
        return float(sum((self.weights * numbers).tolist())) if self._alive else math.nan

    def _numbers_of(self, function: Callable[[Any], float]) -> Floats:
        """Return a function of each value, 0 for the dead."""
        pairs = zip(self.values, self.weights, strict=True)
        try:
            return np.array([float(function(v)) if w > 0 else 0.0 for v, w in pairs])
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"give a function that gives numbers: {error}") from error

    @property
    def evidence_error(self) -> float:
        """The standard error of the evidence, relative to it, from this one run; NaN if unknown: see
        ``genrt.inference.estimates``."""
        return relative_error(self.log_weights, self.eve, self.resamplings)

    @property
    def pareto_k(self) -> float:
        """The shape of the tail of the weights, NaN if unknown: over 0.7, few particles have most weight.
        After resampling, it is that of the weights since then."""
        return pareto_k(self.log_weights) if self.chains is None else math.nan

    def expectation_error(self, function: Callable[[Any], float]) -> float:
        """Return the standard error of ``expectation(function)``, from this one run; NaN if unknown. Of
        chains it is the standard deviation divided by the root of ``diagnose(function).ess_mean``."""
        return self._error_of(self._numbers_of(function))

    def _error_of(self, numbers: Floats) -> float:
        """Return the standard error of the posterior mean of numbers, one for each particle."""
        centred = numbers - self.weights @ numbers
        if self.chains is None or not self._alive:
            return expectation_error(centred, self.weights, self.eve, self.resamplings)
        by_chain = numbers.reshape(-1, len(self.chains.values)).T
        return math.sqrt(float(self.weights @ centred**2) / diagnose(by_chain).ess_mean)

    def sample(self, count: int, *, seed: int) -> list[Any]:
        """Draw ``count`` values from the posterior, independently of each other. Raises InvalidRequest if
        every particle died."""
        rng = np.random.default_rng(check_int("seed", seed, 0))
        size = check_int("count", count, 0)
        if not self._alive:
            raise InvalidRequest(f"{self._explain_empty()} There is nothing to draw from.")
        chosen = rng.choice(len(self.values), size, p=self.weights)
        return [self.values[index] for index in chosen]

    def diagnose(self, function: Callable[[Any], float]) -> Diagnosis:
        """Return the mixing of the chains for a function of their values. Raises InvalidRequest if the
        result has no chains, or the function gives something that is no number."""
        if self.chains is None:
            raise InvalidRequest(
                "this result has no chains, and its particles' weights make its ess: MetropolisHastings "
                "has chains"
            )
        return diagnose(self._numbers_of(function).reshape(-1, len(self.chains.values)).T)

    def to_pandas(self, *, steps: bool = False) -> DataFrame:
        """Return a table with a row for each particle, or for each step with ``steps``: whether
        resampled, how many distinct ancestors, how many alive and unfinished, ESS, log evidence and its
        standard error, NaN if unknown. ``to_pandas(steps=True)[["ess",
        "log_evidence"]].plot(subplots=True)`` draws curves.

        Raises:
            InvalidRequest: there are no steps.
            ExtraNotInstalled: pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise ExtraNotInstalled(
                'tables need pandas, which is not installed: pip install "genrt[plot]"'
            ) from error
        if steps and not self.infos:
            raise InvalidRequest("this result has no steps: SMC and importance sampling keep them")
        if steps:
            columns = {
                "resampled": [info.resampled for info in self.infos],
                "ancestors": [len(np.unique(info.ancestors)) for info in self.infos],
                "alive": [int((info.log_weights > -math.inf).sum()) for info in self.infos],
                "unfinished": [info.unfinished for info in self.infos],
                "ess": [info.ess for info in self.infos],
                "log_evidence": [info.log_evidence for info in self.infos],
                "log_evidence_error": self._step_errors(),
            }
            numbers = pandas.Index([info.step for info in self.infos], name="step")
            return pandas.DataFrame(columns, index=numbers)
        # As objects, lists and tuples among the values stay whole, one in a cell.
        kinds = {*map(type, self.values)}
        dtype = None if kinds and kinds <= {bool, int, float} else object
        table = {
            "text": pandas.Series(self.texts, dtype=object),
            "tokens": pandas.Series(list(self.token_ids), dtype=object),
            "value": pandas.Series(list(self.values), dtype=dtype),
            "log_weight": np.array(self.log_weights),
            "weight": self.weights,
            "alive": self.log_weights > -math.inf,
        }
        return pandas.DataFrame(table).rename_axis("particle")

    def _step_errors(self) -> list[float]:
        """Return the standard error of the log evidence after each step."""
        if self.eve is None:
            return [math.nan] * len(self.infos)
        errors, eve, resamplings = list[float](), np.arange(len(self.eve)), 0
        for info in self.infos:
            eve, resamplings = eve[info.ancestors], resamplings + info.resampled
            errors.append(relative_error(info.log_weights, eve, resamplings))
        return errors

    def __repr__(self) -> str:
        particles = f"{count_of(len(self.values), 'particle')}, {self._alive:,} alive"
        return f"Result({particles}, log_evidence={fixed(self.log_evidence)}, ess={self.ess:.1f})"

    def __str__(self) -> str:
        figures = list(self._figures())
        names, numbers = (max(map(len, column)) for column in [*zip(*figures, strict=True)][:2])
        lines = [f"{a:<{names}}  {b:>{numbers}}  {note}".rstrip() for a, b, note in figures]
        rows = self._rows()
        wide = max((len(weight) for weight, _ in rows), default=0)
        lines += ["", f"{'weight':<{wide}}  value" if rows else self._explain_empty()]
        lines += [f"{weight:<{wide}}  {shorten(value, WIDEST)}" for weight, value in rows]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the result in IPython and Jupyter."""
        printer.text(repr(self) if cycle else str(self))

    def _rows(self) -> list[tuple[str, str]]:
        """Return the weights of the heaviest distinct values, with their standard errors if known, and
        each value as one printable line; all others together in one row."""
        places: defaultdict[Any, list[int]] = defaultdict(list)
        for place in np.nonzero(self.weights)[0].tolist():
            places[key_of(self.values[place])].append(place)
        weights = self.weights
        distinct = sorted(places.values(), key=lambda own: -math.fsum(weights[own]))
        named = [(label(self.values[own[0]]), own) for own in distinct[:SHOWN]]
        if others := distinct[SHOWN:]:
            named.append((f"({count_of(len(others), 'value')} more)", [*chain(*others)]))
        if len(named) == 1:  # particles that agree show no error, which is not an error of 0
            return [("1.0000", named[0][0])]
        rows = []
        for name, own in named:
            error = self._error_of(np.isin(np.arange(len(weights)), own).astype(float))
            bar = "" if math.isnan(error) else f" \N{PLUS-MINUS SIGN} {error:.4f}"
            rows.append((f"{weights[own].sum():.4f}{bar}", name))
        return rows

    def _explain_empty(self) -> str:
        """Say why there is no posterior."""
        if not self.values:
            return "There are no particles."
        return f"Every particle died: {str(self.deaths) or 'nothing has a positive weight'}."

    def _figures(self) -> Iterable[tuple[str, str, str]]:
        """Yield name, figure and note."""
        count, alive = len(self.values), self._alive
        note = f"{alive:,} {'of them alive' if self.infos else 'of positive weight'}"
        if causes := str(self.deaths):
            note += f"; died: {causes}"
        yield "particles", f"{count:,}", note * (alive < count)
        if not math.isnan(self.log_evidence):
            is_float = self.log_evidence < 700
            note = f"Z = {math.exp(self.log_evidence):.3g}" if is_float else "Z > 1e304"
            if alive and not math.isnan(error := self.evidence_error):
                note += f" \N{PLUS-MINUS SIGN} {100 * error:.0f} %"
            elif alive and self.infos:
                note += ", its error unknown: take several runs"
            yield "log evidence", number(self.log_evidence), note
        if self.chains is not None and alive:
            chains = self.chains
            missing = f"; {chains.missing:,} more found no text" if chains.missing else ""
            steps = count_of(len(chains.values[0]), "step")
            yield "chains", f"{len(chains.values):,}", f"of {steps} each{missing}"
            is_unknown = math.isnan(chains.ess)
            note = "too few steps, or all at one value" if is_unknown else "by autocorrelation"
            yield "ESS", number(chains.ess, digits=1), note
            yield "R-hat", number(chains.r_hat, digits=2), "1 if chains agree"
            yield "accepted", f"{chains.acceptance.mean():.2f}", "of the moves"
        else:
            yield "ESS", f"{self.ess:,.1f}", ""
            if not math.isnan(shape := self.pareto_k):
                yield "Pareto k", number(shape, digits=2), tail_in_words(shape, alive)
        if self.infos:
            often = sum(info.resampled for info in self.infos)
            note = f"resampled before {often:,} of them" if often else "never resampled"
            yield "steps", f"{len(self.infos):,}", note
