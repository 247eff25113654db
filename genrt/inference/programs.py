r"""Particle programs: you write one particle as a coroutine, the algorithms run and resample many.

::

    async def haiku(p):
        tokens = p.lm.encode("An old silent pond")
        while len(tokens) < 20:
            tokens.append(await p.sample(tokens))
            p.observe(-abs(len(p.lm.decode(tokens)) - 60) / 10)
        return p.lm.decode(tokens)

    result = await SMC(Program(lm, haiku), num_particles=32).run(seed=0)

The target. A run of the program has the density of its choices under the laws they were drawn from, times
the product of its observations. The evidence is the normaliser: the mean, over runs of the program, of
the product of its observations. A masked ``sample`` draws from the row restricted to
the mask and observes the mask's mass, so that it counts as a draw from the row, and the mask as a
condition.

Steps. Draws are awaited: ``sample``, ``choice``, ``uniform``. A step takes a particle from one draw to
just before another, or to its end: to the next draw after its weight has changed, by ``observe``,
``condition`` or a mask, and to the next ``sample`` in any case. Particles are resampled between steps,
so a changed weight counts before the next draw.

Resampling may copy a particle, and a coroutine cannot be copied. So a particle is the list of its
choices: one child continues where its parent stopped; the others run from the beginning with the recorded
choices, without asking the model for them, before they continue. Therefore a program has to be a function
of its choices: all randomness comes from ``p``, and its side effects are repeated. The program itself
awaits its draws, not tasks that it starts, and no ``asyncio.timeout`` or task group may be open around
them, because another task continues the program afterwards.

Goodman & Stuhlmüller (2014), *The design and implementation of probabilistic programming languages*
(particle filters by replay). Lew, Zhi-Xuan, Grand & Mansinghka (2023), *Sequential Monte Carlo steering
of large language models using probabilistic programs*.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from genrt.errors import InvalidRequest
from genrt.inference import checks
from genrt.inference.model import DEAD, Growth
from genrt.inference.resampling import Floats, normalised
from genrt.inference.unawaited import Questions, check_returned, question
from genrt.lm import AsyncLM
from genrt.numbers import check_float
from genrt.questions.masks import Mask
from genrt.questions.token_ids import TokenIds
from genrt.runtime.together import together
from genrt.tokens.texts import decoded

T = TypeVar("T")

Weights: TypeAlias = Sequence[float] | NDArray[np.floating[Any]] | torch.Tensor
"""A user's own log-weights, on any device."""

Asked: TypeAlias = tuple[Any, ...]
"""A question of a program: a program that runs again has to ask the same ones."""


class Execution:
    """The argument of a program: one particle's own randomness, and its weight.

    ``lm`` is the runtime, for everything else: rows, scores, other draws with seeds.
    """

    def __init__(
        self, lm: AsyncLM, choices: Sequence[tuple[Asked, Any]], pause: Asked | None
    ) -> None:
        self.lm = lm
        self._choices = list(choices)
        self._to_replay = deque(choices)
        self._pause = pause
        """The question at which it paused, and continues; ``None`` before the first pause."""
        self._is_live = pause is None
        self._questions = Questions()
        self._task: asyncio.Task[Any] | None = None

    def _begin(self, rng: np.random.Generator) -> None:
        """Begin a step in the running task, with this randomness."""
        self._rng = rng
        self._task = asyncio.current_task()
        self._has_sampled = False
        self._has_drawn = False
        self._has_weighed = False
        """Whether the weight has changed since the last draw of this step."""
        self._log_weight = 0.0
        self._drawn = DEAD

    @question
    async def sample(
        self,
        token_ids: TokenIds,
        *,
        mask: Mask | None = None,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> int:
        """Draw a token from the row after ``token_ids``, restricted to ``mask`` if there is one.

        With a mask the log-weight gains its mass, the logarithm of the probability that the row gives it.
        A mask of no mass kills the particle, and its program does not go on.

        Args:
            mask: the tokens that may be drawn, as ``AsyncLM.draw`` takes them.
            temperature: of the row; other than 1, the tempered row is the law. Not with a mask, whose
                mass is the row's own.
            adapter: by name.

        Raises:
            InvalidRequest: a temperature with a mask, one that is not above 0, a ``sample`` in another
                task than the program's, or what ``AsyncLM.draw`` refuses.
            ContextTooLong, UnknownAdapter, EngineFailed, Closed: as ``AsyncLM.draw``.
        """
        if check_float("temperature", temperature) != 1 and mask is not None:
            raise InvalidRequest("sample takes a mask or a temperature, not both: leave one out")
        tempered = checks.check_temperature(temperature)
        asked = ("sample", _fingerprint(token_ids), tempered, adapter)
        if (recorded := await self._recorded(asked, due=self._has_sampled)) is not None:
            return int(recorded)
        self._has_sampled = True
        drawn = await self.lm.draw(
            token_ids,
            mask=mask,
            temperature=temperature,
            seed=int(self._rng.integers(2**63)),
            adapter=adapter,
        )
        if mask is not None:
            self.observe(drawn.log_mass)
        if drawn.token_id == DEAD:
            await _pause()
        self._drawn = drawn.token_id
        self._choices.append((asked, self._drawn))
        return self._drawn

    @question
    async def condition(
        self, token_ids: TokenIds, continuation: TokenIds, *, adapter: str | None = None
    ) -> None:
        """Observe that ``continuation`` follows ``token_ids``: the log-weight gains its log-probability.

        Raises:
            InvalidRequest, ContextTooLong, UnknownAdapter, EngineFailed, Closed: as ``AsyncLM.score``.
        """
        if self._is_live:
            scores = await self.lm.score(token_ids, continuation, adapter=adapter)
            self.observe(float(scores.double().sum()))

    def observe(self, log_weight: float) -> None:
        """Add to the particle's log-weight; -inf ends the particle at its next draw.

        Raises:
            InvalidRequest: NaN, +inf, or not a number.
        """
        try:
            number = checks.log_weight(log_weight)
        except InvalidRequest as error:
            raise InvalidRequest(f"observe was given {log_weight!r}: {error}") from error
        if self._is_live:
            self._log_weight += number
            self._has_weighed = self._has_drawn

    @question
    async def uniform(self) -> float:
        """Draw a number uniformly from [0, 1).

        Raises:
            InvalidRequest: awaited in another task than the program's.
        """
        return float(await self._chosen(("uniform",), lambda: float(self._rng.random())))

    @question
    async def choice(self, values: Sequence[T], *, log_weights: Weights | None = None) -> T:
        """Draw one of the values, uniformly, or in proportion to the exponentials of ``log_weights``.

        With values ``range(vocab_size)`` this draws a token by weights of your own, such as the sum of
        two rows; ``observe`` their ``logsumexp`` first.

        Raises:
            InvalidRequest: there is no value, or no order of them; there are not as many log-weights,
                none is above -inf, one is NaN or +inf; awaited in another task than the program's.
        """
        if isinstance(values, Mapping | Set) or not hasattr(values, "__getitem__"):
            raise InvalidRequest(
                f"choice got a {type(values).__name__}: give the values in a list, in a fixed order"
            )
        if self._is_live and self._log_weight == -math.inf:
            await _pause()  # for ever: a dead particle's own weights may have no sum
        count = len(values)
        shares = None if log_weights is None else _shares(log_weights, count)
        if not count:
            raise InvalidRequest("choice got no values: give at least one")
        chosen = await self._chosen(
            ("choice", count), lambda: int(self._rng.choice(count, p=shares))
        )
        return values[chosen]

    async def _chosen(self, asked: Asked, choose: Callable[[], T]) -> T:
        if (recorded := await self._recorded(asked)) is not None:
            return cast("T", recorded)
        chosen = choose()
        self._choices.append((asked, chosen))
        return chosen

    async def _recorded(self, asked: Asked, *, due: bool = False) -> Any:
        """Return what this draw gave before; ``None`` if it is new, in the next step if one is due here.
        Raises InvalidRequest in another task than the program's, or if it was another draw before."""
        if asyncio.current_task() is not self._task:
            raise InvalidRequest(
                f"{asked[0]} was awaited in another task than the program's, as gather, wait_for and "
                "create_task do: await it in the program itself, one after the other"
            )
        if self._to_replay:
            before, chosen = self._to_replay.popleft()
            if before != asked:
                raise _changed(before, asked)
            return chosen
        if not self._is_live:
            if asked != self._pause:
                raise _changed(self._pause or asked, asked)
            self._is_live = True
        elif due or self._has_weighed or self._log_weight == -math.inf:
            self._pause = asked
            await _pause()
        self._has_drawn = True
        return None


def _fingerprint(token_ids: TokenIds) -> int:
    if isinstance(token_ids, np.ndarray | torch.Tensor):
        token_ids = token_ids.tolist()
    try:
        return hash(tuple(token_ids))
    except TypeError as error:
        raise InvalidRequest(
            f"sample was given {token_ids!r}: give a flat sequence of token ids"
        ) from error


def _shares(log_weights: Any, count: int) -> Floats:
    """Return the probabilities of ``count`` values. Raises InvalidRequest if these are not their
    log-weights."""
    try:
        weighed = checks.log_weights(log_weights)
    except InvalidRequest as error:
        raise InvalidRequest(f"choice got the log-weights {log_weights!r}: {error}") from error
    if len(weighed) != count or np.all(weighed == -math.inf):
        raise InvalidRequest(
            f"choice got {count} values and the log-weights {weighed}: give one for each, one of them "
            "above -inf, or none at all"
        )
    return normalised(weighed)


def _changed(before: Asked, now: Asked) -> InvalidRequest:
    return InvalidRequest(
        f"the program asked for {now[0]} where it had asked for {before[0]} before, or with other "
        "arguments: make it a function of its choices, with all its randomness from the execution"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Trace:
    """A particle: the choices of one execution, and at most once that execution itself, to continue."""

    choices: tuple[tuple[Asked, Any], ...] = ()
    pause: Asked | None = None
    token_ids: tuple[int, ...] = ()
    finished: bool = False
    value: Any = None
    live: list[tuple[Execution, Coroutine[Any, Any, Any]]] = field(default_factory=list)


class Program:
    """A model that you write: an async function of an ``Execution``, which returns a value.

    The module's docstring says what its target is, and what it may do. A posterior is over the values,
    which have to be hashable for that; ``token_ids`` and texts are those of all ``sample`` calls.
    """

    def __init__(
        self, lm: AsyncLM, function: Callable[[Execution], Coroutine[Any, Any, Any]]
    ) -> None:
        """
        Raises:
            InvalidRequest: ``function`` cannot be called; from the first step, it is no ``async def``.
        """
        checks.check_callable("the program", function, "an async function of an execution")
        self._lm = checks.runtime(lm)
        self._function = function

    def __repr__(self) -> str:
        return f"Program({getattr(self._function, '__name__', self._function)})"

    @property
    def lm(self) -> AsyncLM:
        """The runtime that is asked."""
        return self._lm

    @property
    def max_steps(self) -> None:
        """``None``: a program ends when it returns."""
        return None

    def start(self) -> _Trace:
        """Return an execution before its first line."""
        return _Trace()

    def text(self, particle: _Trace) -> str:
        """Return what the sampled tokens say, as UTF-8; other bytes show as U+FFFD and their number.
        Without a tokenizer it is ``""``."""
        vocabulary = checks.token_bytes(self._lm)
        return decoded(b"".join(vocabulary[token_id] for token_id in particle.token_ids))

    def value(self, particle: _Trace) -> Any:
        """Return what the program returned; ``None`` before its end."""
        return particle.value

    async def grow(self, particles: Sequence[_Trace], seed: int) -> list[Growth]:
        """Run all executions at once, each to its next resampling point or to its end."""
        seeds = np.random.SeedSequence(seed).spawn(len(particles))
        return await together(
            self._grown(particle, np.random.default_rng(each))
            for particle, each in zip(particles, seeds, strict=True)
        )

    async def _grown(self, particle: _Trace, rng: np.random.Generator) -> Growth:
        try:
            execution, coroutine = particle.live.pop()
        except IndexError:
            execution = Execution(self._lm, particle.choices, particle.pause)
            coroutine = self._function(execution)
            if not inspect.iscoroutine(coroutine):
                raise InvalidRequest(
                    f"the program returned a {type(coroutine).__name__}: make it an async def"
                ) from None
        execution._begin(rng)
        try:
            finished, value = await _until_pause(coroutine)
        except (AttributeError, TypeError, ValueError) as error:
            # A forgotten await: a coroutine was used as a value.
            if (forgotten := execution._questions.forgotten()) is not None:
                raise forgotten from error
            raise
        finally:
            # Breaks the cycle: the task holds the result, which holds the execution.
            execution._task = None
        log_weight, token_id = execution._log_weight, execution._drawn
        if log_weight == -math.inf:
            coroutine.close()
            execution._questions.forgotten()
            return Growth(particle, log_weight, DEAD)
        if finished:
            if (forgotten := execution._questions.forgotten()) is not None:
                raise forgotten
            if not execution._is_live:
                raise _changed(execution._pause or ("a draw",), ("nothing",))
            check_returned(value)
        token_ids = particle.token_ids if token_id == DEAD else (*particle.token_ids, token_id)
        live = [] if finished else [(execution, coroutine)]
        choices = tuple(execution._choices)
        trace = _Trace(choices, execution._pause, token_ids, finished, value, live)
        return Growth(trace, log_weight, token_id)


_PAUSE = object()


@types.coroutine
def _pause() -> Generator[object, None, None]:
    """Stop an execution until its next step."""
    yield _PAUSE


@types.coroutine
def _until_pause(coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, None, tuple[bool, Any]]:
    """Run a coroutine in the running task until it pauses or ends; return whether it has ended, and with
    what."""
    error: BaseException | None = None
    while True:
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return True, end.value
        if awaited is _PAUSE:
            return False, None
        try:
            yield awaited
            error = None
        except BaseException as raised:
            error = raised
