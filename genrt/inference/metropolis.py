r"""Metropolis–Hastings over texts: chains that cut a text and grow another suffix.

The target pi is that of the model. A chain's text x has n steps, one for each token, the end token
included if it was drawn. A move cuts it before a uniformly chosen step c, grows another text x' of n'
steps from the prefix by the model's proposal, and takes it with probability

    min(1, (W' / n') / (W / n)),

where W and W' are the products of the gains of the two suffixes. For a masked proposal
q(x_t) = p(x_t) 1[x_t in A_t] / p(A_t) this is exp(phi(x)) prod_{t >= c} p(A_t), so that the ratio is
pi(x') q(x, c) / (pi(x) q(x', c)) in full. Weights may be unbiased estimates, as in adaptive weighted
rejection: each text keeps its estimates, and pi is still invariant (Andrieu & Roberts 2009, the
pseudo-marginal approach).

A chain begins with the first importance sample of positive weight. Later texts follow pi ever more
closely; there is no estimate of the evidence. ``genrt.inference.diagnostics`` estimates the effective
sample size, and whether the chains agree.

Metropolis et al. (1953), Hastings (1970). For probabilistic programs: Wingate, Stuhlmüller & Goodman
(2011), *Lightweight implementations of probabilistic programming languages via transformational
compilation*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference.checks import state_of
from genrt.inference.diagnostics import ChainStatistics
from genrt.inference.kernels import finished, propose
from genrt.inference.model import Model, Trace, checked_model, frozen, seeds_of_step
from genrt.inference.resampling import Floats
from genrt.inference.result import Result
from genrt.inference.samplers import Algorithm, result_of
from genrt.numbers import check_int, displayed


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """All chains after ``step`` moves of each: their present texts, or ``None`` where a chain found no
    first text of positive weight."""

    chains: tuple[Any, ...]
    step: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The moves of one step.

    Attributes:
        step: its number; step 0 draws the first texts.
        cuts: int64 ``[chains]``, the step before which each text was cut.
        accepted: bool ``[chains]``, whether the new suffix was taken.
        log_ratios: float64 ``[chains]``, the logarithms of the acceptance ratios; they may exceed 0.
        particles: the finished particle of each chain after the step; ``None`` without a text.
        log_weights: float64 ``[chains]``, the gains of each text; NaN without a text.
    """

    step: int
    cuts: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    log_ratios: NDArray[np.float64]
    particles: tuple[Any, ...]
    log_weights: NDArray[np.float64]


class MetropolisHastings(Algorithm[Model, Chains, Moves]):
    """Chains for one model, side by side: each step makes one move of every chain, in one batch.

    ::

        result = await MetropolisHastings(model, num_chains=32, num_steps=100, warm_up=20).run(seed=0)

    The result has every text of every chain after the warm-up, with equal weights, and ``chains``; its
    log evidence is NaN. The model must grow from any prefix of its particles, as ``TextModel`` and
    ``Program`` do.
    """

    _name = "MH"
    _needs_infos = True

    def __init__(
        self,
        model: Model,
        *,
        num_chains: int,
        num_steps: int,
        warm_up: int = 0,
        attempts: int = 100,
    ) -> None:
        """
        Args:
            num_steps: the moves of each chain.
            warm_up: the first moves, which the result leaves out; less than ``num_steps``.
            attempts: the most texts to draw for a chain's first one.

        Raises:
            InvalidRequest: an argument is out of range.
        """
        super().__init__(checked_model(model))
        self._num_chains = check_int("num_chains", num_chains, 1)
        self._num_steps = check_int("num_steps", num_steps, 1)
        self._total = self._num_steps + 1
        self._warm_up = check_int("warm_up", warm_up, 0)
        self._attempts = check_int("attempts", attempts, 1)
        if self._warm_up >= self._num_steps:
            raise InvalidRequest(
                f"warm_up is {displayed(warm_up)} of num_steps={num_steps}: then nothing is counted; "
                "give fewer"
            )

    def __repr__(self) -> str:
        numbers = f"num_chains={self._num_chains}, num_steps={self._num_steps}"
        return f"MetropolisHastings({self.model!r}, {numbers})"

    def init(self, seed: int) -> Chains:
        """Return chains without texts; the seed is an integer from 0 on."""
        return Chains((None,) * self._num_chains, 0, check_int("seed", seed, 0))

    def is_done(self, state: Chains) -> bool:
        """Return whether each chain has made ``num_steps`` moves."""
        return state_of(Chains, state).step > self._num_steps

    async def step(self, state: Chains) -> tuple[Chains, Moves]:
        """Draw every chain's first text in the first step; make a move of each chain in later steps.

        A cancelled or failed step leaves ``state`` unchanged.

        Raises:
            GenrtError: any error of the model.
        """
        own, models = seeds_of_step(state_of(Chains, state).seed, state.step)
        rng, seeds = np.random.default_rng(own), np.random.SeedSequence(models)
        chains, cuts = list(state.chains), np.zeros(len(state.chains), dtype=np.int64)
        if state.step == 0:
            await self._begin(chains, seeds)
            accepted = np.array([chain is not None for chain in chains])
            ratios = np.where(accepted, 0.0, -math.inf)
        else:
            present = {place: chain for place, chain in enumerate(chains) if chain is not None}
            places = [*present]
            accepted, ratios = np.zeros(len(chains), np.bool_), np.full(len(chains), -math.inf)
            old = [*present.values()]
            cuts[places], new, ratios[places] = await self._moved(old, rng, seeds)
            accepted[places] = np.log1p(-rng.random(len(places))) <= ratios[places]
            for place, trace in zip(places, new, strict=True):
                if accepted[place]:
                    chains[place] = trace
        moves = Moves(
            state.step,
            frozen(cuts),
            frozen(accepted),
            frozen(ratios),
            tuple(chains),
            frozen(np.array([math.nan if each is None else _log_weight(each) for each in chains])),
        )
        return Chains(tuple(chains), state.step + 1, state.seed), moves

    def result(self, state: Chains, *, infos: Sequence[Moves] = ()) -> Result:
        """Return every text after these moves of one run, weighted alike, with the chains' mixing. Moves
        of the warm-up do not count."""
        infos = [info for info in infos if info.step > self._warm_up]
        places = [place for place, chain in enumerate(state.chains) if chain is not None]
        particles = [info.particles[place] for info in infos for place in places]
        values = tuple(map(self.model.value, particles))
        count, shape = len(places), (len(infos), len(places))
        log_weights = np.array([info.log_weights[places] for info in infos])
        accepted = sum((info.accepted[places] for info in infos), start=np.zeros(count))
        lengths = np.array([len(particle.token_ids) for particle in particles], dtype=np.int64)
        chains = ChainStatistics(
            values=tuple(values[place::count] for place in range(count)),
            log_weights=frozen(log_weights.reshape(shape).T.copy()),
            lengths=frozen(lengths.reshape(shape).T.copy()),
            acceptance=frozen(accepted / max(len(infos), 1)),
            missing=len(state.chains) - count,
        )
        zeros = frozen(np.zeros(len(particles)))
        return result_of(self.model, particles, zeros, math.nan, chains=chains)

    def _figures(self, state: Chains, info: Moves) -> dict[str, Any]:
        return {"accepted": f"{info.accepted.mean():.2f}"}

    async def _moved(
        self, old: Sequence[Any], rng: np.random.Generator, seeds: np.random.SeedSequence
    ) -> tuple[list[int], list[Any], Floats]:
        """Return the cuts of one move of each text, the other texts, and the log acceptance ratios."""
        return await propose(self.model, old, rng, seeds)

    async def _begin(self, chains: list[Trace | None], seeds: np.random.SeedSequence) -> None:
        """Draw first texts of positive weight, for the chains without one, in a bounded number of
        attempts."""
        for _ in range(self._attempts):
            missing = [place for place, chain in enumerate(chains) if chain is None]
            if not missing:
                break
            begun = await finished(self.model, [self.model.start()] * len(missing), seeds)
            for place, trace in zip(missing, begun, strict=True):
                if trace.gain > -math.inf:
                    chains[place] = trace


def _log_weight(trace: Trace) -> float:
    return float(sum(each.gain for each in trace.path()))
