r"""Metropolis–Hastings over texts: chains that cut a text and grow another suffix.

The target pi is that of the model. A chain's text x has n steps, one for each token, the end token
included if it was drawn. A move cuts it before a uniformly chosen step c, grows another text x' of n'
steps from the prefix by the model's proposal, and takes it with probability

    min(1, (W' / n') / (W / n)),

where W and W' are the products of the gains of the two suffixes. Weights may be unbiased estimates, as in
adaptive weighted rejection: each text keeps its estimates, and pi is still invariant (Andrieu & Roberts
2009, the pseudo-marginal approach).

Metropolis et al. (1953), Hastings (1970). For probabilistic programs: Wingate, Stuhlmüller & Goodman
(2011), *Lightweight implementations of probabilistic programming languages via transformational
compilation*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from genrt.errors import InvalidRequest
from genrt.inference.checks import checked_state
from genrt.inference.estimates import ChainStatistics
from genrt.inference.kernels import Kernel, conditional, finished, move
from genrt.inference.model import Info, Model, State, model_seed
from genrt.inference.resampling import normalized_weights
from genrt.inference.result import Result
from genrt.inference.samplers import Sampler, result_of
from genrt.numbers import check_bool, check_int, displayed, frozen
from genrt.runtime.concurrency import gather_all


class MetropolisHastings(Sampler):
    """Chains for one model, side by side: each step makes one move of every chain, in one batch.

    ::

        result = await MetropolisHastings(model, num_chains=32, num_steps=100, warm_up=20).run(seed=0)

    A chain begins with the first importance sample of positive weight. The particles of a state are the
    chains' present texts; a chain without a first text is dead. The result has every text of every chain
    after the warm-up, with equal weights, and ``chains``; its log evidence is NaN. The model must grow
    from any prefix of its particles, as ``TextModel`` and ``Program`` do.
    """

    _keeps_particles = True

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
            num_steps: the moves of each chain; step 0 draws their first texts.
            warm_up: the first moves, which the result leaves out; less than ``num_steps``.
            attempts: the most texts to draw for a chain's first one.
        """
        count = check_int("num_chains", num_chains, 1, 2**31)
        super().__init__(model, self._one_step, num_particles=count)
        self._num_steps = check_int("num_steps", num_steps, 1)
        self._total = self._num_steps + 1
        self._warm_up = check_int("warm_up", warm_up, 0)
        self._attempts = check_int("attempts", attempts, 1)
        if self._warm_up >= self._num_steps:
            raise InvalidRequest(
                f"warm_up is {displayed(warm_up)} of num_steps={num_steps}: then nothing is counted; "
                "give fewer"
            )
        self._move: Kernel = move(model, whole=True)

    def is_done(self, state: State) -> bool:
        """Return whether each chain has made ``num_steps`` moves."""
        return checked_state(state).step > self._num_steps

    async def _one_step(self, state: State) -> State:
        return await (self._move if state.step else self._begin)(state)

    async def _begin(self, state: State) -> State:
        """Draw a first text of positive weight for every chain, in a bounded number of attempts."""
        chains, missing = list(state.particles), [*range(len(state.particles))]
        seeds = np.random.SeedSequence(model_seed(state.seed_sequence()))
        for _ in range(self._attempts):
            if not missing:
                break
            begun = await finished(self.model, [state.particles[0]] * len(missing), seeds)
            for place, trace in zip(missing, begun, strict=True):
                chains[place] = trace
            missing = [place for place in missing if chains[place].gain == -math.inf]
        log_weights = np.zeros(len(chains))
        log_weights[missing] = -math.inf
        return replace(state, particles=tuple(chains), log_weights=frozen(log_weights))

    def result(self, state: State, *, infos: Sequence[Info] = ()) -> Result:
        """Return every text after these steps of one run, weighted alike, with the chains' mixing. Moves
        of the warm-up do not count."""
        infos = [info for info in infos if info.step > self._warm_up]
        places = state.alive if state.step else []
        particles = [(info.particles or ())[place] for info in infos for place in places]
        values = tuple(map(self.model.value, particles))
        count, shape = len(places), (len(infos), len(places))
        known = {each: sum(unit.gain for unit in each.path()) for each in {*particles}}
        log_weights = np.array([known[each] for each in particles], dtype=np.float64)
        accepted = sum((info.moved[places] for info in infos), start=np.zeros(count))
        lengths = np.array([len(each.token_ids) for each in particles], dtype=np.int64)
        chains = ChainStatistics(
            values=tuple(values[place::count] for place in range(count)),
            log_weights=frozen(log_weights.reshape(shape).T.copy()),
            lengths=frozen(lengths.reshape(shape).T.copy()),
            acceptance=frozen(accepted / max(len(infos), 1)),
            missing=len(state.particles) - count,
        )
        zeros = frozen(np.zeros(len(particles)))
        return result_of(self.model, particles, zeros, math.nan, chains=chains)


class ParticleGibbs(MetropolisHastings):
    """Chains whose moves are conditional SMC: N particles, the present text among them; the next text is
    drawn from their weights (Andrieu, Doucet & Holenstein 2010). Where moves of suffixes get stuck, such
    as under a potential of whole texts, this mixes with the number of particles.

    ::

        result = await ParticleGibbs(model, num_particles=16, num_chains=8, num_steps=50).run(seed=0)
    """

    def __init__(self, model: Model, *, num_particles: int, num_chains: int, num_steps: int,
                 warm_up: int = 0, attempts: int = 100, ancestors: bool = False) -> None:  # fmt: skip
        """
        Args:
            num_particles: of each conditional SMC, at least 2; for the others see ``MetropolisHastings``.
            ancestors: whether each resampling draws a new past for the present text, so that its
                beginning changes with few particles, too (Lindsten, Jordan & Schön 2014). For a
                ``TextModel``. A text of T tokens costs up to N scores a step; under a constraint, with
                powers or several laws up to N T^2 / 2 more rows and masks.
        """
        super().__init__(
            model, num_chains=num_chains, num_steps=num_steps, warm_up=warm_up, attempts=attempts
        )
        self._num_conditional = check_int("num_particles", num_particles, 2)
        if check_bool("ancestors", ancestors) and not getattr(model, "has_exact_weights", False):
            raise InvalidRequest(
                'ancestors=True weighs known tokens: give a TextModel, proposal="mask" with predicates'
            )
        self._ancestors = ancestors
        self._move = self._conditional_smc

    async def _conditional_smc(self, state: State) -> State:
        particles, places = list(state.particles), state.alive
        seeds = np.random.SeedSequence(model_seed(state.seed_sequence())).spawn(len(places))
        new = await gather_all(map(self._next, [particles[place] for place in places], seeds))
        for place, trace in zip(places, new, strict=True):
            particles[place] = trace
        return replace(state, particles=tuple(particles))

    async def _next(self, reference: Any, seed: np.random.SeedSequence) -> Any:
        """Return a text of a conditional SMC that is pinned to the reference."""
        count, own = self._num_conditional, model_seed(seed)
        state = await conditional(
            self.model, reference, count=count, seed=own, ancestors=self._ancestors
        )
        rng = np.random.default_rng(state.seed_sequence(2))
        chosen = rng.choice(count, p=normalized_weights(state.log_weights))
        return state.particles[chosen]
