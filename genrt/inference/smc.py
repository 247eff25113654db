r"""Sequential Monte Carlo: N weighted particles, resampled when their weights have grown apart.

N particles of a model grow side by side. A step grows each one by a token and multiplies its weight by
the gain that the model returns. Weights are unnormalised and carried along, so at any step

    Z_hat = (1/N) sum_i w_i,        E[Z_hat] = Z at the end,

resampled or not, because resampling is unbiased: ancestor i gets N w_i / sum_j w_j children in
expectation, each of weight Z_hat. It happens before a step, by default when the effective sample size
ESS = (sum w)^2 / sum w^2 is under half of N: never after the last, where it would only add variance. The
weighted particles estimate the target consistently as N grows.

Gordon, Salmond & Smith (1993), *Novel approach to nonlinear/non-Gaussian Bayesian state estimation*
(the bootstrap filter). Del Moral, Doucet & Jasra (2006), *Sequential Monte Carlo samplers* (evidence,
adaptive resampling). Lew, Zhi-Xuan, Grand & Mansinghka (2023), *Sequential Monte Carlo steering of large
language models using probabilistic programs*. Loula et al. (2025), *Syntactic and semantic control of
large language models via sequential Monte Carlo*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference.algorithms import Algorithm, result_of, runtime_of
from genrt.inference.checks import check_callable, frozen, seeds_of_step, state_of, token_bytes
from genrt.inference.model import DEAD, Deaths, Info, Model, State, checked_model, grown
from genrt.inference.resampling import Ancestors, Floats, Resampler, systematic
from genrt.inference.result import Result
from genrt.numbers import check_float, check_int, displayed

Rule: TypeAlias = Callable[[State], bool]
"""Returns whether to resample before the next step."""


class SMC(Algorithm[Model, State, Info]):
    """Sequential Monte Carlo for one model; the module's docstring has the mathematics.

    ::

        model = TextModel(lm, "It happened on ", max_tokens=16,
                          constraint=regex(r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\\.", lm))
        result = await SMC(model, num_particles=64).run(seed=0)

    or, step by step, ``async for state, info in smc.steps(smc.init(seed)): ...``. If every particle
    dies, the result says so (log evidence -inf, ESS 0, an empty posterior).
    """

    _name = "SMC"
    _needs_infos = True

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
            resample_when: resample when the effective sample size is under this share of N: 0 is
                importance sampling, 1 resamples whenever weights differ. Or a rule of your own, called
                before every step that has a particle alive.
            resample: the scheme; ``partial`` keeps the weights of most particles. Or your own.

        Raises:
            InvalidRequest: an argument is out of its range.
        """
        super().__init__(checked_model(model))
        self._total = model.max_steps
        self._num_particles = check_int("num_particles", num_particles, 1, 2**31)
        given = resample_when
        if not callable(given) and not 0 <= check_float("resample_when", given) <= 1:
            raise InvalidRequest(
                f"resample_when is {displayed(resample_when)}: give a share from 0 to 1, or a rule"
            )
        check_callable("resample", resample, "a resampler, such as genrt.inference.systematic")
        self._resample_when = resample_when
        self._resample = resample

    def __repr__(self) -> str:
        return f"SMC({self.model!r}, num_particles={self._num_particles})"

    def init(self, seed: int) -> State:
        """Return N particles without tokens, of weight 1; the seed is an integer from 0 on."""
        return State(
            particles=(self.model.start(),) * self._num_particles,
            log_weights=frozen(np.zeros(self._num_particles)),
            step=0,
            seed=check_int("seed", seed, 0),
        )

    def is_done(self, state: State) -> bool:
        """Return ``state.done``."""
        return state_of(State, state).done

    async def step(self, state: State) -> tuple[State, Info]:
        """Resample if it is due, then grow every particle that is alive and unfinished by one token.

        A state that is ``done`` comes back with another step number. A cancelled or failed step leaves
        ``state`` unchanged: step it again.

        Raises:
            GenrtError: any error of the model.
        """
        own, seed = seeds_of_step(state_of(State, state).seed, state.step)
        before, particles, unfinished = state.log_weights, list(state.particles), state.unfinished
        ancestors = np.arange(len(before))
        resampled = bool(unfinished) and self._is_due(state)
        if resampled:
            ancestors, before = self._resampled(np.random.default_rng(own), state)
            particles = [state.particles[ancestor] for ancestor in ancestors.tolist()]
            unfinished = State(tuple(particles), before, state.step, state.seed).unfinished
        increments, token_ids = np.zeros(len(before)), np.full(len(before), DEAD)
        if unfinished:
            growing, places = [particles[index] for index in unfinished], np.array(unfinished)
            growths = await grown(self.model, growing, seed)
            longer, increments[places], token_ids[places] = zip(*growths, strict=True)
            for index, particle in zip(unfinished, longer, strict=True):
                particles[index] = particle
        after = State(tuple(particles), frozen(before + increments), state.step + 1, state.seed)
        return after, Info(
            step=state.step,
            resampled=resampled,
            ancestors=frozen(ancestors),
            token_ids=frozen(token_ids),
            log_increments=frozen(increments),
            log_weights=after.log_weights,
            ess=after.ess,
            log_evidence=after.log_evidence,
            unfinished=len(after.unfinished),
        )

    def result(self, state: State, *, infos: Sequence[Info] = ()) -> Result:
        """Return a state as a result, with the infos of the steps before it. Before the last step the
        texts are prefixes, and so the evidence is that of prefixes."""
        return result_of(
            self.model,
            state.particles,
            state.log_weights,
            state.log_evidence,
            infos=tuple(infos),
            deaths=Deaths.of(self.model, state),
            _tokens=self._drawn_tokens(infos),
        )

    def _drawn_tokens(self, infos: Sequence[Info]) -> dict[int, bytes]:
        """Return the bytes of every token that was drawn, by its id; ``{}`` without a runtime."""
        if (lm := runtime_of(self.model)) is None:
            return {}
        drawn = set().union(*(np.unique(info.token_ids).tolist() for info in infos)) - {DEAD}
        vocabulary = token_bytes(lm)
        return {each: vocabulary[each] for each in sorted(drawn)}

    def _figures(self, state: State, info: Info) -> dict[str, Any]:
        return {"going": f"{info.unfinished}/{len(state.particles)}", "ESS": f"{info.ess:.1f}"}

    def _is_due(self, state: State) -> bool:
        if callable(self._resample_when):
            answer: Any = self._resample_when(state)
            if not isinstance(answer, bool | np.bool_ | int):
                raise InvalidRequest(
                    f"resample_when gave a {type(answer).__name__}: give a rule that returns True or "
                    "False"
                )
            return bool(answer)
        return state.ess < self._resample_when * len(state.particles)

    def _resampled(self, rng: np.random.Generator, state: State) -> tuple[Ancestors, Floats]:
        """Return the ancestors of the next particles, and their log-weights."""
        count = len(state.log_weights)
        chosen = self._resample(rng, state.log_weights)
        is_pair = isinstance(chosen, tuple) and len(chosen) == 2
        indices, weights = chosen if is_pair else (chosen, np.full(count, state.log_evidence))
        try:
            ancestors, log_weights = np.array(indices), np.array(weights, dtype=np.float64)
            is_right = (
                (ancestors.shape, log_weights.shape) == ((count,), (count,))
                and ancestors.dtype.kind in "iu"
                and 0 <= ancestors.min() <= ancestors.max() < count
                and (log_weights < np.inf).all()
            )
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise InvalidRequest(
                f"the resampler gave {displayed(chosen)}: give {count} integers from 0 to {count - 1}, "
                f"or these and {count} log-weights, finite or -inf"
            )
        return ancestors.astype(np.int64), log_weights


def importance_sampling(model: Model, *, num_particles: int) -> SMC:
    """Return an SMC that never resamples: N independent particles, whose weights correct for drawing
    token by token (Kahn & Marshall 1953)."""
    return SMC(model, num_particles=num_particles, resample_when=0.0)
