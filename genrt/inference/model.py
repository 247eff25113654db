"""Models, their traces, weighted particles, and records of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, Self, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference.resampling import Ancestors, Floats, ess_and_log_mean
from genrt.numbers import frozen

DEAD = -1
"""The token id that means: no token could be drawn."""

Tokens: TypeAlias = NDArray[np.int64]


def model_seed(sequence: np.random.SeedSequence) -> int:
    """Return the seed of a step for its model, below 2^63."""
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


@dataclass(slots=True, eq=False, repr=False)
class Trace:
    """One text, or one execution of a program, so far: a value, which shares its beginning with others.
    It is its last unit and the trace before it; a model's own traces are a subclass, with the data that
    the next unit needs.

    Attributes:
        before: the trace without its last unit; ``None`` at the beginning.
        units: how many units it has.
        tokens: the tokens that the last unit drew, with an end token.
        log_weight: log target - log proposal of the last unit, or an unbiased estimate's logarithm; -inf
            if the trace is dead.
        log_proposal: the log-probability with which the last unit was drawn.
        log_twist: the twist's part in the log-weight of the whole trace.
        finished: true if it is complete.
    """

    before: Trace | None = None
    tokens: tuple[int, ...] = ()
    log_weight: float = 0.0
    log_proposal: float = 0.0
    log_twist: float = 0.0
    finished: bool = False
    units: int = field(init=False)

    def __post_init__(self) -> None:
        self.units = 0 if self.before is None else self.before.units + 1

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens drawn so far, without an end token."""
        return tuple(chain.from_iterable(each.tokens for each in self.path()))

    @property
    def log_target(self) -> float:
        """The log target of the last unit."""
        return self.log_weight + self.log_proposal

    @property
    def gain(self) -> float:
        """The gain of a particle's log-weight by the last unit: -inf if it died."""
        before = self.before
        if before is None or self.log_twist == before.log_twist:
            return self.log_weight
        return self.log_weight + (self.log_twist - before.log_twist)

    @property
    def is_open(self) -> bool:
        """Whether it is neither finished nor dead."""
        return not self.finished and self.gain > -math.inf

    def path(self) -> list[Self]:
        """Return the trace after every unit, the first one first."""
        found, trace = list[Self](), self
        while trace.before is not None:
            found.append(trace)
            trace = cast("Self", trace.before)
        found.reverse()
        return found

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Return a copy's parts, unit by unit: a long trace is no deep structure for pickle."""
        return _restored, (type(self), [each._parts() for each in (self.cut(0), *self.path())])

    def _parts(self) -> dict[str, Any]:
        """Return the attributes that a copy has."""
        own, slots = cast("tuple[Any, dict[str, Any]]", object.__getstate__(self))
        return slots | (own or {}) | {"before": None}

    def cut(self, units: int) -> Self:
        """Return the trace without its units after the first ``units``."""
        trace = self
        while trace.units > units and trace.before is not None:
            trace = cast("Self", trace.before)
        return trace


def _restored(kind: type[Trace], parts: list[dict[str, Any]]) -> Trace | None:
    """Return the trace with these parts, unit by unit."""
    trace = None
    for each in parts:
        before, trace = trace, kind.__new__(kind)
        for name, value in each.items():
            setattr(trace, name, value)
        trace.before = before
    return trace


@runtime_checkable
class Model(Protocol):
    """A target, and a way to propose from it unit by unit: ``TextModel``, ``Program``, or your own.

    Grown from ``start()`` until it is finished, a trace and its weight w, the product over units,
    are *properly weighted*: E[w f(trace)] = Z E[f] under the target, for every function f, where
    Z is the target's normalizer, the evidence.
    """

    @property
    def max_steps(self) -> int | None:
        """The most units of a trace; ``None`` if unknown."""

    def start(self) -> Any:
        """Return the trace before its first unit."""

    async def extend(self, traces: Sequence[Any], seed: int) -> list[Any]:
        """Return the traces, unfinished and alive, one unit longer, in order. The seed decides
        all draws; a cancelled or failed call leaves the traces unchanged."""

    def text(self, trace: Any) -> str:
        """Return the text of the trace's tokens."""

    def value(self, trace: Any) -> Any:
        """Return the value for the posterior: the text, or a program's result."""


def checked_model(model: Any) -> Model:
    """Return the model. Raises InvalidRequest if it is not a Model."""
    if isinstance(model, type) or not isinstance(model, Model):
        raise InvalidRequest(
            f"the model is a {type(model).__name__}: give a TextModel, a Program, or another Model"
        )
    return model


async def extended(model: Model, traces: Sequence[Any], seed: int) -> tuple[list[Any], Floats]:
    """Extend traces by the model; return them with their gains. Raises InvalidRequest if it returns
    another number of traces, or a weight that is NaN or +inf."""
    longer = await model.extend(traces, seed)
    if len(longer) != len(traces):
        raise InvalidRequest(
            f"the model made {len(longer)} of {len(traces)} traces: return one for each"
        )
    gains = np.array([each.gain for each in longer])
    if (wrong := gains[~(gains < math.inf)]).size:
        raise InvalidRequest(
            f"the model says that a trace gained {wrong[0]}: log-weights are finite, or -inf"
        )
    return longer, gains


@dataclass(frozen=True, eq=False)
class State:
    """N weighted particles after ``step`` steps. A value: stepping makes a new one, and stepping the same
    one again gives the same, since the randomness of step t comes from ``(seed, t)`` alone.

    Attributes:
        particles: the traces.
        log_weights: float64 ``[N]``, unnormalized, read-only; a dead particle has -inf.
        step: the number of steps made.
        seed: the seed of the run.
        eve: int64 ``[N]``, the index in the first state of the particle that each one descends from;
            ``None`` once ancestors were not drawn independently, as error bars need it.
        resamplings: how often the particles were resampled.
        ancestors: int64 ``[N]``, the index before the present step of each one's ancestor.
        units: how often the particles were extended: no trace has more units.
        key: the place of a kernel in a step, from which its randomness comes.
        has_evidence: whether ``log_evidence`` estimates an evidence; particles that were chosen by their
            weights have none.
        is_final: whether the last step of a sampler with one was made.
    """

    particles: tuple[Any, ...]
    log_weights: Floats
    step: int
    seed: int
    eve: Ancestors | None = None
    resamplings: int = 0
    ancestors: Ancestors = None  # type: ignore[assignment]
    units: int = 0
    key: tuple[int, ...] = ()
    has_evidence: bool = True
    is_final: bool = False

    @classmethod
    def begin(cls, start: Any, count: int, seed: int) -> Self:
        """Return ``count`` particles of weight 1 at the beginning."""
        return cls((start,) * count, frozen(np.zeros(count)), 0, seed, frozen(np.arange(count)))

    def __post_init__(self) -> None:
        if cast("Any", self.ancestors) is None:
            object.__setattr__(self, "ancestors", frozen(np.arange(len(self.log_weights))))

    @cached_property
    def _summed(self) -> tuple[float, float]:
        return ess_and_log_mean(self.log_weights)

    @property
    def ess(self) -> float:
        """The effective sample size of the weights; 0 if all particles are dead."""
        return self._summed[0]

    @property
    def log_evidence(self) -> float:
        """log Z_hat so far: of the present weights, for the present prefixes."""
        return self._summed[1]

    @property
    def alive(self) -> list[int]:
        """The indices of the particles of positive weight."""
        found: list[int] = np.nonzero(self.log_weights > -math.inf)[0].tolist()
        return found

    @cached_property
    def unfinished(self) -> tuple[int, ...]:
        """The indices of the particles that the next step extends: alive and not finished."""
        return tuple([index for index in self.alive if not self.particles[index].finished])

    @property
    def done(self) -> bool:
        """Whether no particle is alive and unfinished."""
        return not self.unfinished

    def at(self, *key: int) -> State:
        """Return the state with the randomness of another place in the step."""
        return self.labeled(key=key)

    def labeled(self, **fields: Any) -> State:
        """Return the same particles and weights with other labels; sums that are known stay."""
        made = object.__new__(State)
        vars(made).update(vars(self), **fields)
        return made

    def seed_sequence(self, *key: int) -> np.random.SeedSequence:
        """Return the source of randomness for a kernel, or for a part with this key."""
        return np.random.SeedSequence(self.seed, spawn_key=(self.step, *self.key, *key))

    def take(
        self,
        ancestors: Ancestors,
        log_weights: Floats,
        *,
        resampled: bool = True,
        independent: bool = False,
    ) -> State:
        """Return the particles at these indices, with these log-weights; any number of them."""
        return replace(
            self,
            particles=tuple([self.particles[each] for each in ancestors.tolist()]),
            log_weights=frozen(log_weights),
            eve=frozen(self.eve[ancestors]) if independent and self.eve is not None else None,
            resamplings=self.resamplings + resampled,
            ancestors=frozen(self.ancestors[ancestors]),
        )


@dataclass(frozen=True, slots=True)
class Deaths:
    """The numbers of particles that died, by cause.

    Attributes:
        max_tokens: they reached ``max_tokens`` before the constraint let them end.
        dead_ends: no token could follow, or a twist or an observation ruled out a prefix.
        potential: the potential or the score ruled out a complete text.
    """

    max_tokens: int = 0
    dead_ends: int = 0
    potential: int = 0

    @classmethod
    def of(cls, model: Any, state: State) -> Self:
        """Return the deaths among a state's particles."""
        longest, ends = getattr(model, "max_tokens", model.max_steps), getattr(model, "ends", None)
        if longest is None or getattr(model, "constraint", ends) is None:
            longest = math.inf  # without a constraint a text may be cut
        elif ends is None or not ends.never:
            longest -= 1  # the last step draws only an end
        dead = [state.particles[place] for place in np.nonzero(state.log_weights == -math.inf)[0]]
        ruled_out = sum(each.finished for each in dead)
        cut = sum(not each.finished and len(each.token_ids) >= longest for each in dead)
        return cls(cut, len(dead) - ruled_out - cut, ruled_out)

    def __str__(self) -> str:
        counts = {
            "at max_tokens (raise it, or see stop=)": self.max_tokens,
            "at dead ends": self.dead_ends,
            "by the potential": self.potential,
        }
        return ", ".join(f"{count:,} {cause}" for cause, count in counts.items() if count)


@dataclass(frozen=True, slots=True, eq=False)
class Info:
    """The record of one step.

    Attributes:
        step: its number, from 0.
        resampled: whether it began by resampling.
        ancestors: int64 ``[N]``, the index in the step before of the particle that each one grew from.
        token_ids: int64 ``[N, longest]``, the tokens that each one drew, the end token included, then -1.
        log_increments: float64 ``[N]``, the gain of each log-weight by the units that extended its
            ancestor: 0 for a particle that was not extended, or moved; -inf for one that died.
        log_weights: float64 ``[N]``, after the step.
        ess: the effective sample size after the step.
        log_evidence: log Z_hat after the step.
        unfinished: the number of particles that the next step extends.
        moved: bool ``[N]``, whether a move took the particle away from its ancestor's text.
        particles: the particles after the step, from samplers whose results need them.
    """

    step: int
    resampled: bool
    ancestors: Ancestors
    token_ids: Tokens
    log_increments: Floats
    log_weights: Floats
    ess: float
    log_evidence: float
    unfinished: int
    moved: NDArray[np.bool_]
    particles: tuple[Any, ...] | None = None
