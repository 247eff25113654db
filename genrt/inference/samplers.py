r"""Samplers: a state is stepped until it is done, and becomes a result.

Sequential Monte Carlo: N particles of a model grow side by side. A step grows each one by a unit and
multiplies its weight by the gain that the model returns, so that at any step

    Z_hat = (1/N) sum_i w_i,        E[Z_hat] = Z at the end,

resampled or not, because resampling is unbiased. It happens before a step, by default when the effective
sample size ESS = (sum w)^2 / sum w^2 is under half of N: never after the last, where it would only add
variance.

Gordon, Salmond & Smith (1993), *Novel approach to nonlinear/non-Gaussian Bayesian state estimation*
(the bootstrap filter). Del Moral, Doucet & Jasra (2006), *Sequential Monte Carlo samplers* (evidence,
adaptive resampling).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference import kernels
from genrt.inference.checks import check_callable, checked_state
from genrt.inference.kernels import Kernel, Rule, chain, conditional, extend
from genrt.inference.model import DEAD, Deaths, Info, Model, State, Trace, checked_model
from genrt.inference.resampling import (
    Floats,
    Resampler,
    log_mean_exp,
    multinomial,
    normalized_weights,
    systematic,
)
from genrt.inference.result import Result, shares
from genrt.lm import AsyncLM
from genrt.numbers import check_int, displayed, frozen
from genrt.progress import progress_bar
from genrt.runtime.concurrency import blocking_twin, gather_all
from genrt.runtime.programs import Unsent, run_program, runs_elsewhere


class Sampler:
    """A kernel that runs on N particles of a model until they are done.

    ::

        kernel = chain(resample(), extend(model), move(model))
        result = await Sampler(model, kernel, num_particles=64).run(seed=0)

    or, step by step, ``async for state, info in sampler.steps(sampler.init(seed)): ...``. If every
    particle dies, the result says so (log evidence -inf, ESS 0, an empty posterior). A sampler holds no
    state of a run, so it may run many times, at once and on several event loops.

    Attributes:
        model: the model that runs.
    """

    _keeps_particles = False
    """Whether the records of steps need the particles."""

    def __init__(
        self, model: Model, kernel: Kernel, *, num_particles: int, last: Kernel | None = None
    ) -> None:
        """
        Args:
            kernel: one step; see ``genrt.inference.kernels``.
            last: a last step, once no particle is alive and unfinished.
        """
        self.model = checked_model(model)
        check_callable("kernel", kernel, "a kernel, such as chain(resample(), extend(model))")
        check_callable("last", last, "a kernel, such as keep(1)", optional=True)
        self._total = model.max_steps
        self._num_particles = check_int("num_particles", num_particles, 1, 2**31)
        self._kernel, self._last = kernel, last

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"

    def init(self, seed: int) -> State:
        """Return N particles without tokens, of weight 1; the seed is an integer from 0 on."""
        return State.begin(self.model.start(), self._num_particles, check_int("seed", seed, 0))

    def is_done(self, state: State) -> bool:
        """Return whether no particle goes on, and the last step was made."""
        return checked_state(state).done and (self._last is None or state.is_final)

    async def step(self, state: State) -> tuple[State, Info]:
        """Run the kernel once, or the last step. A state that is ``done`` comes back with another step
        number. A cancelled or failed step leaves ``state`` unchanged: step it again. Raises any
        GenrtError of the model."""
        kernel = self._last if checked_state(state).done and self._last else self._kernel
        places = frozen(np.arange(len(state.particles)))
        after = state.labeled(ancestors=places, key=())
        if not self.is_done(state):
            after = await kernel(after)
        is_final = state.is_final or kernel is self._last
        after = after.labeled(step=state.step + 1, key=(), is_final=is_final)
        info = _info_of(state, after)
        return after, replace(info, particles=after.particles) if self._keeps_particles else info

    async def steps(self, state: State) -> AsyncIterator[tuple[State, Info]]:
        """Step until the state is done, from ``init(seed)`` or from any later state."""
        while not self.is_done(state):
            state, info = await self.step(state)
            yield state, info

    async def run(
        self,
        seed: int,
        *,
        on_step: Callable[[State, Info], None] | None = None,
        progress: bool = False,
    ) -> Result:
        """Make all steps from ``init(seed)`` and return the result. Equal seeds and rows give equal
        results.

        Over replicas the whole run is shipped to one of them, as by ``AsyncLM.run``. It stays here with
        ``on_step`` or ``progress``, and if it cannot be pickled, as with a second runtime.

        Args:
            on_step: called after every step.
            progress: show a bar, in a notebook or on stderr.
        """
        state, infos, lm = self.init(seed), list[Info](), runtime_of(self.model)
        if lm is not None and on_step is None and not progress and runs_elsewhere(lm):
            with contextlib.suppress(Unsent):
                shipped: Result = await run_program(lm, self, int(seed), None)
                return shipped
        before = None if lm is None else lm.statistics()
        with progress_bar(type(self).__name__, self._total, shown=progress) as show:
            async for state, info in self.steps(state):  # noqa: B020
                infos.append(info)
                going = f"{info.unfinished}/{len(state.particles)}"
                show(going=going, ESS=f"{info.ess:.1f}")
                if on_step is not None:
                    on_step(state, info)
        spent = None if lm is None or before is None else lm.statistics().since(before)
        return replace(self.result(state, infos=infos), statistics=spent)

    run_sync = blocking_twin(run)
    """``run``, blocking: in another thread, which also calls ``on_step``. An interrupt cancels it."""

    def result(self, state: State, *, infos: Sequence[Info] = ()) -> Result:
        """Return a state as a result, with the infos of the steps before it. Before the last step texts
        and evidence are those of prefixes."""
        return result_of(
            self.model,
            state.particles,
            state.log_weights,
            state.log_evidence if state.has_evidence else math.nan,
            infos=tuple(infos),
            deaths=Deaths.of(self.model, state),
            eve=state.eve,
            resamplings=state.resamplings,
        )


class SMC(Sampler):
    """Sequential Monte Carlo: ``chain(resample(), extend(model))``.

    ::

        model = TextModel(lm, "It happened on ", max_tokens=16,
                          constraint=regex(r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\\.", lm))
        result = await SMC(model, num_particles=64).run(seed=0)
    """

    def __init__(
        self,
        model: Model,
        *,
        num_particles: int,
        resample_when: float | Rule = 0.5,
        resample: Resampler = systematic,
    ) -> None:
        """
        Args:
            resample_when: resample if the effective sample size is under this share of N, or by a rule of
                your own; 0 is importance sampling.
            resample: the scheme, as for the kernel ``resample``.
        """
        kernel = chain(kernels.resample(resample, below=resample_when), extend(model))
        super().__init__(model, kernel, num_particles=num_particles)
        self.below = resample_when
        self.has_independent_ancestors = resample is multinomial or resample_when == 0


def importance_sampling(model: Model, *, num_particles: int) -> SMC:
    """Return an SMC that never resamples: N independent particles, with weights that correct for drawing
    unit by unit (Kahn & Marshall 1953)."""
    return SMC(model, num_particles=num_particles, resample_when=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Several:
    """Independent runs of a sampler, weighted by their evidences."""

    results: tuple[Result, ...]

    @property
    def log_evidence(self) -> float:
        """The logarithm of the mean evidence."""
        return log_mean_exp(self._log_evidences)

    @property
    def evidence_error(self) -> float:
        """The standard error of the mean evidence, relative to it; NaN if it is 0 in every run, or
        unknown."""
        if self.log_evidence == -math.inf:
            return math.nan
        return _mean_and_error(np.exp(self._log_evidences - self.log_evidence))[1]

    @property
    def _log_evidences(self) -> Floats:
        return np.array([each.log_evidence for each in self.results])

    @property
    def weights(self) -> Floats:
        """The share of each run, float64 ``[runs]``: all 0 if every particle of all runs died. Where no
        run has an evidence, they count alike."""
        if self.log_evidence == -math.inf:
            return np.zeros(len(self.results))
        known = self._log_evidences
        return normalized_weights(np.zeros(len(known)) if np.isnan(known).all() else known)

    def posterior(self, *, of: Callable[[Any], Any] | None = None) -> list[tuple[Any, float]]:
        """Return the distinct values with their weights, heaviest first, as ``Result.posterior``."""
        return shares(
            (value, share * weight)
            for share, result in zip(self.weights.tolist(), self.results, strict=True)
            for value, weight in (result.posterior(of=of) if share else ())
        )

    def expectation(self, function: Callable[[Any], float]) -> tuple[float, float]:
        """Return the posterior mean of a function of the values, and its standard error."""
        weights, count = self.weights, len(self.results)
        if not weights.any():
            return math.nan, math.nan
        pairs = zip(self.results, weights, strict=True)
        means = np.array([run.expectation(function) if share else 0.0 for run, share in pairs])
        mean = float(weights @ means)
        error = math.sqrt(count / (count - 1) * float(((weights * (means - mean)) ** 2).sum()))
        return mean, error

    @property
    def cost(self) -> float:
        """The mean number of tokens that the engine computed for a run; NaN if unknown."""
        known = [each.statistics.engine.computed_tokens for each in self.results if each.statistics]
        return sum(known) / len(known) if known else math.nan

    def __str__(self) -> str:
        error = f"\N{PLUS-MINUS SIGN} {100 * self.evidence_error:.0f} %"
        return f"log evidence {self.log_evidence:.3f} {error}, {len(self.results)} runs"


async def several(sampler: Any, runs: int, *, seed: int) -> Several:
    """Run a sampler ``runs`` times, at least twice, with seeds of their own, one after the other. For
    costs of its own, each begins with nothing cached: it drops the rows and the engine's prefixes."""
    if not callable(getattr(sampler, "run", None)):
        raise InvalidRequest(f"the sampler is {displayed(sampler)}: give one with run, such as SMC")
    sequence = np.random.SeedSequence(check_int("seed", seed, 0))
    seeds: Sequence[int] = sequence.generate_state(check_int("runs", runs, 2), np.uint64).tolist()
    lm, results = runtime_of(getattr(sampler, "model", None)), []
    for each in seeds:
        if lm is not None:
            lm.clear_cache()
            lm.reset_prefix_cache()
        results.append(await sampler.run(each))
    return Several(tuple(results))


several_sync = blocking_twin(several)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The runs of two samplers of one target, compared at equal cost."""

    first: Several
    second: Several

    @property
    def efficiency(self) -> float:
        """How many tokens the second sampler computes for each one of the first, for estimates of the
        evidence of equal variance; NaN if unknown."""
        work = [each.evidence_error**2 * each.cost for each in (self.first, self.second)]
        return work[1] / work[0] if work[0] > 0 else math.nan

    @property
    def efficiency_error(self) -> float:
        """The standard error of the efficiency, if estimates are nearly normal."""
        runs = [len(each.results) for each in (self.first, self.second)]
        return self.efficiency * math.sqrt(sum(2 / (each - 1) for each in runs))

    def __str__(self) -> str:
        error = f"\N{PLUS-MINUS SIGN} {self.efficiency_error:.2g}"
        return f"{self.first}\n{self.second}\nefficiency {self.efficiency:.2g} {error}"


async def compare(first: Any, second: Any, *, runs: int, seed: int) -> Comparison:
    """Run two samplers of one target several times each, with the same seeds, and compare the variances
    of their evidences at equal cost. Nobody else may use the runtimes meanwhile, because the costs are
    the engines'. Of a model on several runtimes, its ``lm`` alone counts."""
    return Comparison(await several(first, runs, seed=seed), await several(second, runs, seed=seed))


compare_sync = blocking_twin(compare)


class Bounds(NamedTuple):
    """Bounds of log Z, each a mean over independent runs with its standard error, NaN if unknown.

    Attributes:
        lower: the mean of log Z_hat; -inf if a run has no evidence.
        lower_error: its standard error.
        upper: the mean of log Z_hat over the conditional runs.
        upper_error: its standard error.
    """

    lower: float
    lower_error: float
    upper: float
    upper_error: float


async def evidence_bounds(sampler: SMC, exact: Sequence[Trace], *, runs: int, seed: int) -> Bounds:
    """Return bounds of the log evidence that hold the truth between them, up to their errors.

    Z_hat is unbiased, so E[log Z_hat] is at most log Z. Given an exact draw of the target, 1 / Z_hat of
    conditional SMC around it is unbiased for 1 / Z, so its E[log Z_hat] is at least log Z (Grosse,
    Ghahramani & Adams 2015, *Sandwiching the marginal likelihood using bidirectional Monte Carlo*). The
    gap bounds the Kullback-Leibler divergences between target and sampler (Cusumano-Towner & Mansinghka
    2017, *AIDE*).

    Args:
        sampler: SMC with ``resample=multinomial``, or ``importance_sampling``.
        exact: independent exact draws of the model's target, one for each conditional run: finished
            traces, as ``TextModel.follow`` makes them of tokens.
        runs: the unconditional runs, at least two.
    """
    if not isinstance(sampler, SMC) or not sampler.has_independent_ancestors:
        raise InvalidRequest(
            f"the sampler is {displayed(sampler)}: give SMC(…, resample=multinomial), which draws "
            "independent ancestors, or importance_sampling(…)"
        )
    traces = [*exact] if isinstance(exact, list | tuple) else []
    for trace in traces or [None]:
        if not isinstance(trace, Trace) or not trace.finished or trace.gain == -math.inf:
            raise InvalidRequest(
                f"exact has {displayed(trace)}: give a list of finished traces of positive weight, as "
                "model.follow makes them of tokens"
            )
    plain, pinned = np.random.SeedSequence(check_int("seed", seed, 0)).spawn(2)
    seeds = plain.generate_state(check_int("runs", runs, 2), np.uint64).tolist()
    lower = [each.log_evidence for each in await gather_all(map(sampler.run, seeds))]
    seeds = pinned.generate_state(len(traces), np.uint64).tolist()
    count, below = sampler._num_particles, sampler.below
    states = await gather_all(
        conditional(sampler.model, trace, count=count, seed=own, below=below)
        for trace, own in zip(traces, seeds, strict=True)
    )
    return Bounds(*_mean_and_error(lower), *_mean_and_error([each.log_evidence for each in states]))


evidence_bounds_sync = blocking_twin(evidence_bounds)


def _mean_and_error(values: Sequence[float] | Floats) -> tuple[float, float]:
    """Return the mean and its standard error, NaN if unknown."""
    mean, count = float(sum(values)) / len(values), len(values)
    if count < 2 or not math.isfinite(mean):
        return mean, math.nan
    return mean, float(np.std(values, ddof=1)) / math.sqrt(count)


def _info_of(before: State, after: State) -> Info:
    """Return the record of a step."""
    old = before.particles
    parents = [old[each] if each < len(old) else None for each in after.ancestors.tolist()]
    new = [*map(_units_after, after.particles, parents)]
    columns = zip(new, after.particles, parents, strict=True)
    moved = [not units and trace is not parent for units, trace, parent in columns]
    grown = [[token for unit in units for token in unit.tokens] for units in new]
    tokens = [*zip_longest(*grown, [DEAD], fillvalue=DEAD)]  # one of the rows has no token
    return Info(
        step=before.step,
        resampled=after.resamplings > before.resamplings,
        ancestors=after.ancestors,
        token_ids=frozen(np.array(tokens, np.int64).T[:-1]),
        log_increments=frozen(np.array([sum([unit.gain for unit in units]) for units in new])),
        log_weights=after.log_weights,
        ess=after.ess,
        log_evidence=after.log_evidence,
        unfinished=len(after.unfinished),
        moved=frozen(np.array(moved, np.bool_)),
    )


def _units_after(trace: Any, parent: Any) -> list[Any]:
    """Return the units that extended a parent to a trace; no unit if the trace was moved away from it.
    Without a parent, all units."""
    units = []
    while trace is not parent and trace.before is not None:
        units.append(trace)
        trace = trace.before
    return units[::-1] if trace is parent or parent is None else []


def result_of(
    model: Model, particles: Iterable[Any], log_weights: Floats, log_evidence: float, **fields: Any
) -> Result:
    """Return weighted particles of a model as a result with these further fields."""
    particles = tuple(particles)
    return Result(
        texts=tuple(map(model.text, particles)),
        token_ids=tuple(particle.token_ids for particle in particles),
        values=tuple(map(model.value, particles)),
        log_weights=log_weights,
        log_evidence=log_evidence,
        **fields,
    )


def runtime_of(model: Any) -> AsyncLM | None:
    """Return the model's runtime; ``None`` without one."""
    lm = getattr(model, "lm", None)
    return lm if isinstance(lm, AsyncLM) else None
