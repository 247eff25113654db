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
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference.algorithms import Algorithm, result_of
from genrt.inference.checks import frozen, model_seed, seeds_of_step, state_of
from genrt.inference.diagnostics import ChainStatistics
from genrt.inference.model import Growth, Model, checked_model, grown
from genrt.inference.result import Result
from genrt.numbers import check_int, displayed


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A chain's present text: the growths from its start to a finished particle."""

    growths: tuple[Growth, ...]

    @property
    def particle(self) -> Any:
        """The finished particle."""
        return self.growths[-1].particle


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """All chains after ``step`` moves of each. ``None`` is a chain that found no first text of positive
    weight."""

    chains: tuple[Chain | None, ...]
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
    """

    step: int
    cuts: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    log_ratios: NDArray[np.float64]


_Visits: TypeAlias = dict[int, tuple[Any, float]]
"""The chains' particles after a step, each with its log-weight, by the number of the chain."""


class MetropolisHastings(Algorithm[Model, Chains, Moves, tuple[_Visits, Moves]]):
    """Chains for one model, side by side: each step makes one move of every chain, in one batch.

    ::

        result = await MetropolisHastings(model, num_chains=32, num_steps=100, warm_up=20).run(seed=0)

    The result has every text of every chain after the warm-up, with equal weights, and ``chains``; its
    log evidence is NaN. The model must grow from any prefix of its particles, as ``TextModel`` and
    ``Program`` do.
    """

    _name = "MH"

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
            InvalidRequest: an argument is out of its range.
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
        return f"MetropolisHastings({self._model!r}, {numbers})"

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
        if state.step == 0:
            return await self._begun(state, seeds)
        chains = list(state.chains)
        here = {place: chain for place, chain in enumerate(chains) if chain is not None}
        places = list(here)
        cuts = np.zeros(len(chains), dtype=np.int64)
        cuts[places] = [rng.integers(len(chain.growths)) for chain in here.values()]
        thresholds = np.log1p(-rng.random(len(here)))
        prefixes = [chain.growths[: cuts[place]] for place, chain in here.items()]
        moved = await self._finished(prefixes, seeds)
        ratios = np.full(len(chains), -math.inf)
        ratios[places] = list(map(_log_acceptance, here.values(), moved, cuts[places]))
        accepted = np.zeros(len(chains), dtype=np.bool_)
        accepted[places] = thresholds <= ratios[places]
        for place, new in zip(places, moved, strict=True):
            if accepted[place]:
                chains[place] = Chain(new)
        moves = Moves(state.step, frozen(cuts), frozen(accepted), frozen(ratios))
        return Chains(tuple(chains), state.step + 1, state.seed), moves

    def result(self, states: Sequence[Chains], *, moves: Sequence[Moves] = ()) -> Result:
        """Return every text of these states of one run, weighted alike, with the chains' mixing.

        Args:
            states: in order, from the first step's on.
            moves: the moves before them, for the acceptance rates; without them these are NaN.

        Raises:
            InvalidRequest: the states are of different runs, or one has not begun.
        """
        visits = [_visits(state) for state in states]
        places = list(visits[0]) if visits else []
        if any(list(step) != places for step in visits):
            raise InvalidRequest(
                "the states have different chains: give those of one run, from the first step's on"
            )
        return self._made(visits, moves, of=max((len(state.chains) for state in states), default=0))

    def _kept(self, state: Chains, info: Moves) -> list[tuple[_Visits, Moves]]:
        return [(_visits(state), info)] if state.step > self._warm_up + 1 else []

    def _figures(self, state: Chains, info: Moves) -> dict[str, Any]:
        return {"accepted": f"{info.accepted.mean():.2f}"}

    def _result(self, state: Chains, kept: list[tuple[_Visits, Moves]]) -> Result:
        visits, moves = [visit for visit, _ in kept], [move for _, move in kept]
        return self._made(visits, moves, of=len(state.chains))

    def _made(self, visits: Sequence[_Visits], moves: Sequence[Moves], *, of: int) -> Result:
        """Return the result of these visits, of so many chains in all."""
        places = list(visits[0]) if visits else []
        particles = [particle for step in visits for particle, _ in step.values()]
        count, shape = len(places), (len(visits), len(places))
        log_weights = np.array([gained for step in visits for _, gained in step.values()])
        lengths = np.array([len(particle.token_ids) for particle in particles], dtype=np.int64)
        accepted = [made.accepted[places] for made in moves if made.step > 0]
        values = tuple(map(self._model.value, particles))
        chains = ChainStatistics(
            values=tuple(values[place::count] for place in range(count)),
            log_weights=frozen(log_weights.reshape(shape).T.copy()),
            lengths=frozen(lengths.reshape(shape).T.copy()),
            acceptance=frozen(np.mean(accepted, axis=0) if accepted else np.full(count, math.nan)),
            missing=of - count,
        )
        zeros = frozen(np.zeros(len(particles)))
        return result_of(self._model, particles, zeros, math.nan, chains=chains)

    async def _begun(self, state: Chains, seeds: np.random.SeedSequence) -> tuple[Chains, Moves]:
        chains: list[Chain | None] = list(state.chains)
        for _ in range(self._attempts):
            missing = [place for place, chain in enumerate(chains) if chain is None]
            if not missing:
                break
            begun = await self._finished([()] * len(missing), seeds)
            for place, growths in zip(missing, begun, strict=True):
                if growths[-1].log_weight > -math.inf:
                    chains[place] = Chain(growths)
        found = np.array([chain is not None for chain in chains])
        cuts, log_ratios = np.zeros(len(chains), np.int64), np.where(found, 0.0, -math.inf)
        moves = Moves(0, frozen(cuts), frozen(found), frozen(log_ratios))
        return Chains(tuple(chains), 1, state.seed), moves

    async def _finished(
        self, prefixes: Sequence[tuple[Growth, ...]], seeds: np.random.SeedSequence
    ) -> list[tuple[Growth, ...]]:
        """Grow each prefix to its end, or until it dies."""
        histories = [list(prefix) for prefix in prefixes]
        while True:
            places = [place for place, history in enumerate(histories) if _goes_on(history)]
            if not places:
                return [tuple(growths) for growths in histories]
            particles = [
                histories[place][-1].particle if histories[place] else self._model.start()
                for place in places
            ]
            growths = await grown(self._model, particles, model_seed(seeds.spawn(1)[0]))
            for place, growth in zip(places, growths, strict=True):
                histories[place].append(growth)


def _visits(state: Chains) -> _Visits:
    return {
        place: (chain.particle, sum(growth.log_weight for growth in chain.growths))
        for place, chain in enumerate(state.chains)
        if chain is not None
    }


def _goes_on(growths: Sequence[Growth]) -> bool:
    return not growths or (growths[-1].log_weight > -math.inf and not growths[-1].particle.finished)


def _log_acceptance(chain: Chain, new: Sequence[Growth], cut: int) -> float:
    gained = sum(growth.log_weight for growth in new[cut:])
    lost = sum(growth.log_weight for growth in chain.growths[cut:])
    return gained - lost + math.log(len(chain.growths) / len(new))
