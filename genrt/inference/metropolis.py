r"""Metropolis–Hastings over texts: chains that cut a text somewhere and grow another suffix.

The target pi is the model's: of a ``TextModel``, the constrained and weighted law of its texts. A
chain's text x has n steps, one for each token, the end token included if it was drawn. A move cuts it
before a step c, uniformly chosen among the n, grows another text x' of n' steps from the prefix, by the
model's proposal, and takes it with probability

    min(1, (W' / n') / (W / n)),

where W and W' are the products of what the two suffixes gain on the way, by the model. For a masked
proposal q(x_t) = p(x_t) 1[x_t in A_t] / p(A_t) that is exp(phi(x)) prod_{t >= c} p(A_t), so that the
ratio is pi(x') q(x, c) / (pi(x) q(x', c)) in full. With weights that are unbiased estimates, as in
adaptive weighted rejection, each text keeps the estimates it was drawn with, and pi is still invariant
(Andrieu & Roberts 2009, the pseudo-marginal approach).

A chain begins with an importance sample of the model: with the first text whose weight is positive.
Texts of later steps follow pi ever more closely; there is no estimate of the evidence. How many
independent texts they are worth, and whether the chains agree, ``genrt.inference.diagnostics`` estimates.

Metropolis et al. (1953), Hastings (1970). For probabilistic programs: Wingate, Stuhlmüller & Goodman
(2011), *Lightweight implementations of probabilistic programming languages via transformational
compilation*.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference.checks import frozen, model_seed, seeds_of_step, state_of
from genrt.inference.counting import start_counting
from genrt.inference.diagnostics import ChainStatistics
from genrt.inference.model import Growth, Model, checked_model, grown
from genrt.inference.result import Result
from genrt.numbers import check_int, displayed
from genrt.progress import progress_bar
from genrt.runtime.concurrency import blocking_twin


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A chain's present text: a finished particle, and the growths that made it, from the start."""

    growths: tuple[Growth, ...]

    @property
    def particle(self) -> Any:
        """The particle, as the model made it."""
        return self.growths[-1].particle


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """All chains after ``step`` moves of each. A value: stepping the same one again gives the same.

    ``chains`` holds ``None`` for a chain that found no text of positive weight to begin with.
    """

    chains: tuple[Chain | None, ...]
    step: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The moves of one step.

    Attributes:
        step: its number; step 0 found texts to begin with.
        cuts: int64 ``[chains]``, before which step each text was cut.
        accepted: bool ``[chains]``, whether its new suffix was taken.
        log_ratios: float64 ``[chains]``, the logarithms of the acceptance ratios, above 0 too.
    """

    step: int
    cuts: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    log_ratios: NDArray[np.float64]


_Visits: TypeAlias = dict[int, tuple[Any, float]]
"""The chains' particles after a step, each with its log-weight, by the number of the chain."""


class MetropolisHastings:
    """Chains for one model, side by side: each step makes one move of each and asks all questions
    together.

    ::

        result = await MetropolisHastings(model, num_chains=32, num_steps=100, warm_up=20).run(seed=0)

    The model has to be able to grow from any prefix of its particles, as ``TextModel`` and ``Program``
    are.
    """

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
            num_steps: how many moves each chain makes.
            warm_up: how many of these are not counted in the result, less than ``num_steps``.
            attempts: how many texts to try to begin a chain with.

        Raises:
            InvalidRequest: an argument is out of its range.
        """
        self._model = checked_model(model)
        self._num_chains = check_int("num_chains", num_chains, 1)
        self._num_steps = check_int("num_steps", num_steps, 1)
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

    @property
    def model(self) -> Model:
        """The model that is run."""
        return self._model

    def init(self, seed: int) -> Chains:
        """Return chains that the first step will begin; the seed is an integer from 0 on."""
        return Chains((None,) * self._num_chains, 0, check_int("seed", seed, 0))

    async def step(self, state: Chains) -> tuple[Chains, Moves]:
        """Find every chain a text to begin with in the first step; make a move of each in all later ones.

        Cancelling it, or an error, leaves ``state`` as good as it was.

        Raises:
            GenrtError: whatever the model raised.
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

    async def steps(self, state: Chains) -> AsyncIterator[tuple[Chains, Moves]]:
        """Step without end, from ``init(seed)`` or from any later state."""
        while True:
            state, moves = await self.step(state)
            yield state, moves

    async def run(
        self,
        seed: int,
        *,
        on_step: Callable[[Chains, Moves], None] | None = None,
        progress: bool = False,
    ) -> Result:
        """Make all moves, and return every text of every chain after the warm-up, weighted alike, with
        how well the chains mixed; the log evidence is NaN. The same seed and rows give the same result.

        Args:
            on_step: called after every step.
            progress: show a bar, in a notebook or on stderr.
        """
        state, counted = self.init(seed), start_counting(self._model)
        visits: list[_Visits] = []
        made: list[Moves] = []
        with progress_bar("MH", self._num_steps + 1, shown=progress) as show:
            while state.step <= self._num_steps:
                state, moves = await self.step(state)
                if state.step > self._warm_up + 1:
                    visits.append(_visits(state))
                    made.append(moves)
                show(accepted=f"{moves.accepted.mean():.2f}")
                if on_step is not None:
                    on_step(state, moves)
        result = self._result(visits, made, of=len(state.chains))
        return replace(result, statistics=counted())

    run_sync = blocking_twin(run)
    """``run``, blocking: in another thread, where it calls ``on_step``. An interrupt cancels it."""

    def result(self, states: Sequence[Chains], *, moves: Sequence[Moves] = ()) -> Result:
        """Return every text of these states of one run, weighted alike, with how well the chains mixed.

        Args:
            states: in order, from the first step's on.
            moves: the moves that led to them, for the acceptance rates; without them these are NaN.

        Raises:
            InvalidRequest: the states are of different runs, or one has not begun.
        """
        count = max((len(state.chains) for state in states), default=0)
        return self._result([_visits(state) for state in states], moves, of=count)

    def _result(self, visits: Sequence[_Visits], moves: Sequence[Moves], *, of: int) -> Result:
        """Return the result of these visits, of so many chains in all."""
        places = list(visits[0]) if visits else []
        if any(list(step) != places for step in visits):
            raise InvalidRequest(
                "the states have different chains: give those of one run, from the first step's on"
            )
        particles = [particle for step in visits for particle, _ in step.values()]
        values = tuple(map(self._model.value, particles))
        count = len(places)
        shape = len(visits), count
        log_weights = np.array([gained for step in visits for _, gained in step.values()])
        lengths = np.array([len(particle.token_ids) for particle in particles], dtype=np.int64)
        accepted = [made.accepted[places] for made in moves if made.step > 0]
        return Result(
            texts=tuple(map(self._model.text, particles)),
            token_ids=tuple(particle.token_ids for particle in particles),
            values=values,
            log_weights=frozen(np.zeros(len(particles))),
            log_evidence=math.nan,
            chains=ChainStatistics(
                values=tuple(values[place::count] for place in range(count)),
                log_weights=frozen(log_weights.reshape(shape).T.copy()),
                lengths=frozen(lengths.reshape(shape).T.copy()),
                acceptance=frozen(
                    np.mean(accepted, axis=0) if accepted else np.full(count, math.nan)
                ),
                missing=of - count,
            ),
        )

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
