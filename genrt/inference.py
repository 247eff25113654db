r"""Sequential Monte Carlo over texts: importance sampling, resampling, evidence and posterior.

The model is the language model's own law of a text after a prompt, token by token, ended by the end
token. The target is that law *given* that the text satisfies the constraint and ends within
``max_tokens`` tokens, the end token counted. Its normaliser, the evidence Z, is the probability that a
text drawn from the model does both. Without a constraint nothing is conditioned on: a text that is cut
at ``max_tokens`` is an outcome like any other, and Z = 1.

N particles grow side by side. A step draws each one's next token from the row p(. | text) restricted to
the tokens A(text) that the constraint lets follow, and multiplies its weight by what that proposal left
out, the mass of A under the row:

    q(x) = p(x) 1[x in A] / p(A),        w <- w p(x) / q(x) = w p(A).

At the last step only the end token completes a constrained text, so A is the end token alone. A text
with p(A) = 0 is dead: its weight is 0. Weights are unnormalised and carried along, so at any step

    Z_hat = (1/N) sum_i w_i,        E[Z_hat] = Z at the end,

resampled or not, because resampling is unbiased: ancestor i gets N w_i / sum_j w_j children in
expectation, each of weight Z_hat. It happens before a step, when the effective sample size
ESS = (sum w)^2 / sum w^2 is under ``ess_threshold`` N: never after the last, where it would only add
variance. The weighted texts estimate the target consistently as N grows.

Gordon, Salmond & Smith (1993), *Novel approach to nonlinear/non-Gaussian Bayesian state estimation*
(the bootstrap filter). Del Moral, Doucet & Jasra (2006), *Sequential Monte Carlo samplers* (evidence,
adaptive resampling). Lew, Zhi-Xuan, Grand & Mansinghka (2023), *Sequential Monte Carlo steering of large
language models using probabilistic programs*. Loula et al. (2025), *Syntactic and semantic control of
large language models via sequential Monte Carlo*.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrt import sampling
from genrt.constraints import ConstraintState, masks
from genrt.constraints import MaskedConstraint as Constraint
from genrt.errors import ContextTooLong, InvalidRequest
from genrt.lm import AsyncLM
from genrt.resampling import (
    Ancestors,
    Floats,
    Resampler,
    effective_sample_size,
    log_mean_exp,
    multinomial,
    normalised,
    residual,
    stratified,
    systematic,
)

__all__ = [
    "SMC",
    "Info",
    "Particle",
    "Resampler",
    "Result",
    "State",
    "effective_sample_size",
    "importance_sampling",
    "log_mean_exp",
    "multinomial",
    "residual",
    "stratified",
    "systematic",
]


@dataclass(frozen=True, slots=True)
class Particle:
    """One text as it grows: its generated tokens, without the prompt and without the end token.

    ``constraint_state`` is where the constraint is after them, ``None`` without a constraint.
    ``finished`` says that the end token was drawn, or ``max_tokens`` reached where that may be.
    """

    token_ids: tuple[int, ...]
    constraint_state: ConstraintState | None
    finished: bool


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """N weighted particles after ``step`` steps. A value: stepping makes a new one, and stepping the same
    one again gives the same, since the randomness of step t comes from ``(seed, t)`` alone.

    ``log_weights`` is float64 ``[N]``, unnormalised, read-only; a dead particle has -inf.
    """

    particles: tuple[Particle, ...]
    log_weights: Floats
    step: int
    seed: int

    @property
    def log_evidence(self) -> float:
        """log Z_hat so far: of the weights as they are, for the prefixes as they are."""
        return log_mean_exp(self.log_weights)

    @property
    def ess(self) -> float:
        """The effective sample size of the weights; 0 if all particles are dead."""
        return effective_sample_size(self.log_weights)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The indices of the particles that the next step extends: alive and not finished."""
        return tuple(
            index
            for index, (particle, log_weight) in enumerate(
                zip(self.particles, self.log_weights, strict=True)
            )
            if not particle.finished and log_weight > -math.inf
        )

    @property
    def done(self) -> bool:
        """Whether nothing is left to extend."""
        return not self.unfinished


@dataclass(frozen=True, slots=True, eq=False)
class Info:
    """What one step did.

    Fields:
        step: its number, from 0.
        resampled: whether it began by resampling.
        ancestors: int64 ``[N]``, the index in the step before of the particle that each one grew from.
        log_increments: float64 ``[N]``, what was added to each log-weight after any resampling: 0 for
            a particle that was not extended, -inf for one that died.
        ess: the effective sample size after the step.
        log_evidence: log Z_hat after the step.
        unfinished: how many particles the next step extends.
    """

    step: int
    resampled: bool
    ancestors: Ancestors
    log_increments: Floats
    ess: float
    log_evidence: float
    unfinished: int


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Weighted texts, and how they came about.

    Fields:
        texts: the particles' bytes as UTF-8, with U+FFFD for what is not; dead ones as far as they got.
        token_ids: the particles' generated tokens, without the end token.
        log_weights: float64 ``[N]``, unnormalised; -inf for the dead.
        log_evidence: the estimate of log Z; -inf if every particle died.
        ess: the effective sample size; 0 if every particle died.
        infos: one for each step, ancestors included.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    log_weights: Floats
    log_evidence: float
    ess: float
    infos: tuple[Info, ...]

    @property
    def ancestors(self) -> tuple[Ancestors, ...]:
        """The ancestors of every step, int64 ``[N]`` each."""
        return tuple(info.ancestors for info in self.infos)

    def posterior(self) -> list[tuple[str, float]]:
        """The distinct texts with their normalised weights, heaviest first; ``[]`` if all are dead."""
        if self.log_evidence == -math.inf:
            return []
        total: defaultdict[str, float] = defaultdict(float)
        for text, weight in zip(self.texts, normalised(self.log_weights), strict=True):
            if weight > 0:
                total[text] += float(weight)
        return sorted(total.items(), key=lambda entry: (-entry[1], entry[0]))


class SMC:
    """Sequential Monte Carlo for one prompt; the module's docstring has the mathematics.

    ::

        smc = SMC(lm, lm.encode("It happened on "), num_particles=64, max_tokens=16,
                  constraint=regex(r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\\.", lm))
        result = await smc.run(seed=0)

    or, step by step, ``async for state, info in smc.steps(smc.init(seed)): ...``. It holds no state of
    a run, so one may run many times, at once and on several event loops.
    """

    def __init__(
        self,
        lm: AsyncLM,
        prompt_token_ids: Sequence[int],
        *,
        num_particles: int,
        max_tokens: int,
        constraint: Constraint | None = None,
        ess_threshold: float = 0.5,
        resample: Resampler = systematic,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> None:
        """
        Args:
            max_tokens: the longest text, in tokens with its end token; at least 1.
            ess_threshold: resample when the effective sample size is under this share of N; 0 is
                importance sampling, 1 resamples whenever weights differ.
            temperature: above 0; other than 1, the model is the one whose rows are tempered (and
                normalised again), in the target and in the evidence too.

        Raises:
            InvalidRequest: an argument is out of its range.
            ContextTooLong: prompt and text exceed ``lm.max_model_len``.
        """
        self._lm = lm
        self._prompt = tuple(_integer("a token id", token_id) for token_id in prompt_token_ids)
        self._num_particles = _integer("num_particles", num_particles)
        self._max_tokens = _integer("max_tokens", max_tokens)
        if not self._prompt:
            raise InvalidRequest("the prompt is empty: give at least one token id")
        if self._num_particles < 1 or self._max_tokens < 1:
            raise InvalidRequest(
                f"num_particles={num_particles} and max_tokens={max_tokens}: both are at least 1"
            )
        if not 0 <= ess_threshold <= 1:
            raise InvalidRequest(f"ess_threshold is {ess_threshold}: give a share from 0 to 1")
        if not 0 < temperature < math.inf:
            raise InvalidRequest(f"temperature is {temperature}: give a positive, finite number")
        longest = len(self._prompt) + self._max_tokens - 1
        if longest > lm.max_model_len:
            raise ContextTooLong(
                f"a prompt of {len(self._prompt)} tokens and a text of {self._max_tokens} need a context "
                f"of {longest}, and the model's is {lm.max_model_len}: shorten one of them"
            )
        self._eos_token_id: int | None = getattr(lm.tokenizer, "eos_token_id", None)
        if constraint is not None and self._eos_token_id is None:
            raise InvalidRequest(
                "a constrained text ends with the end token, and the model's tokenizer names none: "
                "set its eos_token_id"
            )
        self._constraint = constraint
        self._ess_threshold = ess_threshold
        self._resample = resample
        self._temperature = temperature
        self._adapter = adapter
        self._byte_vocab = lm.byte_vocab

    @property
    def max_tokens(self) -> int:
        """The most steps that a run takes."""
        return self._max_tokens

    def init(self, seed: int) -> State:
        """N empty texts of weight 1.

        Raises:
            InvalidRequest: the seed is not an integer of at least 0.
        """
        if _integer("seed", seed) < 0:
            raise InvalidRequest(f"seed is {seed}: give an integer of at least 0")
        start = None if self._constraint is None else self._constraint.start()
        return State(
            particles=(Particle((), start, False),) * self._num_particles,
            log_weights=_frozen(np.zeros(self._num_particles)),
            step=0,
            seed=int(seed),
        )

    async def step(self, state: State) -> tuple[State, Info]:
        """Resample if it is due, then extend every particle that is alive and unfinished by one token:
        one question to the model for all of them, masks computed meanwhile, in another thread.

        Cancelling it, or an error, leaves ``state`` as good as it was: step it again. A state that is
        ``done`` comes back unchanged but for its step number, and nothing is asked.

        Raises:
            GenrtError: whatever the model or the constraint raised.
        """
        randomness = np.random.SeedSequence(state.seed, spawn_key=(state.step,))
        for_resampling, for_tokens = randomness.spawn(2)
        before = state.log_weights
        ancestors = np.arange(len(before))
        unfinished = state.unfinished
        resampled = bool(unfinished) and state.ess < self._ess_threshold * len(before)
        particles = state.particles
        if resampled:
            chosen = self._resample(np.random.default_rng(for_resampling), before)
            ancestors = np.array(chosen, dtype=np.int64)
            particles = tuple(particles[ancestor] for ancestor in ancestors)
            before = np.full(len(before), state.log_evidence)
            unfinished = State(particles, before, state.step, state.seed).unfinished
        increments = np.zeros(len(before))
        if unfinished:
            grown, gained = await self._extend(
                [particles[index] for index in unfinished],
                last=state.step == self._max_tokens - 1,
                seed=int(for_tokens.generate_state(1, np.uint64)[0] >> 1),
            )
            new = dict(zip(unfinished, grown, strict=True))
            particles = tuple(new.get(index, old) for index, old in enumerate(particles))
            increments[list(unfinished)] = gained
        after = State(particles, _frozen(before + increments), state.step + 1, state.seed)
        return after, Info(
            step=state.step,
            resampled=resampled,
            ancestors=_frozen(ancestors),
            log_increments=_frozen(increments),
            ess=after.ess,
            log_evidence=after.log_evidence,
            unfinished=len(after.unfinished),
        )

    async def steps(self, state: State) -> AsyncIterator[tuple[State, Info]]:
        """Step until nothing is left to extend, from ``init(seed)`` or from any later state."""
        while not state.done:
            state, info = await self.step(state)
            yield state, info

    async def run(
        self, seed: int, *, on_step: Callable[[State, Info], None] | None = None
    ) -> Result:
        """All steps from ``init(seed)``. The same seed and rows give the same result.

        If every particle dies, the result says so (log evidence -inf, ESS 0, an empty posterior).
        """
        state = self.init(seed)
        infos = []
        while not state.done:
            state, info = await self.step(state)
            infos.append(info)
            if on_step is not None:
                on_step(state, info)
        return self.result(state, infos=infos)

    def result(self, state: State, *, infos: Sequence[Info] = ()) -> Result:
        """A state as a result, with the infos of the steps that led to it. Before the last step the texts
        are prefixes, and the evidence is theirs."""
        token_ids = tuple(particle.token_ids for particle in state.particles)
        return Result(
            texts=tuple(self._text(ids) for ids in token_ids),
            token_ids=token_ids,
            log_weights=state.log_weights,
            log_evidence=state.log_evidence,
            ess=state.ess,
            infos=tuple(infos),
        )

    async def _extend(
        self, particles: Sequence[Particle], *, last: bool, seed: int
    ) -> tuple[list[Particle], Floats]:
        """The particles one token longer, and their incremental log-weights."""
        asking = self._lm.batch_next_token_logprobs(
            [self._prompt + particle.token_ids for particle in particles], adapter=self._adapter
        )
        rows, mask = await asyncio.gather(asking, asyncio.to_thread(self._mask, particles, last))
        return await asyncio.to_thread(self._draw, particles, rows, mask, last, seed)

    def _mask(self, particles: Sequence[Particle], last: bool) -> Tensor | None:
        states = [
            state for particle in particles if (state := particle.constraint_state) is not None
        ]
        if not states:
            return None
        if not last:
            return masks(states)
        ending = torch.zeros(len(states), self._lm.vocab_size, dtype=torch.bool)
        ending[:, self._eos_token_id] = torch.tensor([state.accepting for state in states])
        return ending

    def _draw(
        self,
        particles: Sequence[Particle],
        rows: Tensor,
        mask: Tensor | None,
        last: bool,
        seed: int,
    ) -> tuple[list[Particle], Floats]:
        if self._temperature != 1:
            rows = sampling.truncate(rows, temperature=self._temperature)
        columns = torch.arange(rows.shape[1])
        if mask is not None:
            # What no particle may draw needs no noise: most of the vocabulary, under most constraints.
            columns = (mask.any(dim=0) | (columns == self._eos_token_id)).nonzero()[:, 0]
            mask = mask[:, columns]
            rows = rows[:, columns.to(rows.device)]
        generator = torch.Generator(device=rows.device)
        generator.manual_seed(seed)
        drawn = sampling.draw(rows, mask=mask, generators=generator)
        # Equal prefixes share their constraint's state, and so the computation of its mask.
        advanced: dict[tuple[int, int], ConstraintState] = {}
        grown = []
        for particle, column in zip(particles, drawn.token_ids.tolist(), strict=True):
            state = particle.constraint_state
            if column == -1:
                grown.append(particle)
                continue
            token_id = int(columns[column])
            if token_id == self._eos_token_id:
                grown.append(Particle(particle.token_ids, state, True))
                continue
            if state is not None:
                key = (id(state), token_id)
                if key not in advanced:
                    advanced[key] = state.advance(token_id)
                state = advanced[key]
            grown.append(Particle((*particle.token_ids, token_id), state, last))
        if mask is None:
            return grown, np.zeros(len(particles))
        return grown, drawn.log_mass.double().cpu().numpy()

    def _text(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._byte_vocab[token_id] for token_id in token_ids).decode(
            errors="replace"
        )


def importance_sampling(
    lm: AsyncLM,
    prompt_token_ids: Sequence[int],
    *,
    num_particles: int,
    max_tokens: int,
    constraint: Constraint | None = None,
    temperature: float = 1.0,
    adapter: str | None = None,
) -> SMC:
    """SMC that never resamples: N independent texts, each from the locally masked model, with weights
    that put right what masking token by token gets wrong. The arguments are SMC's."""
    return SMC(
        lm,
        prompt_token_ids,
        num_particles=num_particles,
        max_tokens=max_tokens,
        constraint=constraint,
        ess_threshold=0.0,
        temperature=temperature,
        adapter=adapter,
    )


def _frozen(array: NDArray[np.generic]) -> Any:
    array.flags.writeable = False
    return array


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidRequest(f"{name} is {value!r}: give an integer") from error
