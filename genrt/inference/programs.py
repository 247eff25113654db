r"""Particle programs: you write one particle as a coroutine, the algorithms run and resample many.

::

    async def haiku(p):
        context = p.context("An old silent pond")
        while len(context) < 20:
            context.append(await p.sample(context))
            p.observe(-abs(len(context.text) - 60) / 10)
        return context.text, await p.text(context, max_tokens=20, stop="\n")

    result = await SMC(Program(lm, haiku), num_particles=32).run(seed=0)

The target. A run of the program has the density that its choices have under their laws, times the
product over all observations. The evidence is the normalizer: the mean of this product over runs of the
program. A masked ``sample`` draws from the row restricted to the mask and observes the mask's mass, so it
is a draw from the row under the condition of the mask.

A step takes a particle to the next draw after its weight has changed, to the next ``sample`` in any case,
or to its end. A ``text`` has a step for each token. The guide to programs has the rules.

A coroutine cannot be copied. So a particle is a list of choices and answers: one child continues where
its parent stopped; the others first replay the record, without questions to the model, and their contexts
then become forks of the parent's. A copy inside a ``text`` replays nothing before its end. A replay must
repeat the kinds of the draws and of the questions, in order.

Goodman & Stuhlmüller (2014), *The design and implementation of probabilistic programming languages*
(particle filters by replay).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping, Sequence, Set
from itertools import count
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from genrt.constraints.protocols import Constraint, prompt_tokens
from genrt.contexts import Context, begin_context, take_over
from genrt.errors import EngineUnsupported, GenrtError, InvalidRequest
from genrt.inference import checks
from genrt.inference.laws import Law
from genrt.inference.model import DEAD, Trace, model_seed
from genrt.inference.resampling import Floats, normalized_weights
from genrt.inference.text_model import TextModel
from genrt.inference.texts import END_TOKEN, Stop, TextTrace
from genrt.lm import AsyncLM
from genrt.numbers import check_int, displayed
from genrt.questions.arguments import TokenIds, seed_at
from genrt.questions.masks import Mask, packed_words
from genrt.runtime.concurrency import gather_all
from genrt.runtime.streams import Stream
from genrt.structures.matching import has_bit
from genrt.tokens.sampling import Draw
from genrt.tokens.texts import Text, decoded

T = TypeVar("T")

Weights: TypeAlias = Sequence[float] | NDArray[np.floating[Any]] | torch.Tensor
"""A user's own log-weights, on any device."""

Computed: TypeAlias = Sequence[Context | None]
"""Forks of an execution's contexts; ``None`` for a closed one."""

Live: TypeAlias = "tuple[Execution, Coroutine[Any, Any, Any]]"
"""An execution that can go on."""

SEEDED = frozenset(
    ("draw", "batch_draw", "sample", "batch_sample", "generate", "batch_generate", "chat", "run")
)
"""The questions of a runtime or a context that draw; ``run`` is inference inside of inference."""

RECORDED = SEEDED | {"batch_score", "prompt_logprobs", "score", "token_logprobs", "top_logprobs"}
"""The questions whose answers are recorded."""

MOST_TEXT_MODELS = 16
"""The models of texts that a program keeps."""


class _Choice(NamedTuple):
    """A recorded draw: its method; the token, text, number or index; the name, and the value then."""

    kind: str
    outcome: Any
    name: str | None = None
    drawn: Any = None


def _record_questions(kind: Any) -> Any:
    """Decorate a class so that the answers to its ``RECORDED`` questions are recorded."""

    def recorded(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def ask(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            asked = functools.partial(method, getattr(self, "of_program", self), *args)
            execution = self._asking()
            if execution is None:  # it makes no step
                return asked(**kwargs)
            return execution._question(name, asked, kwargs)

        return ask

    for name in RECORDED:
        if (method := getattr(kind, name, None)) is not None:
            setattr(kind, name, recorded(name, method))
    return kind


@_record_questions
class ParticleContext(Context):
    """A ``Context`` of a program, made by ``Execution.context``. Its answers are recorded."""

    __slots__ = ("_execution",)

    _execution: Execution

    def _asking(self) -> Execution | None:
        return self._execution if self._execution._task is not None else None

    def _belong(self, execution: Execution) -> Self:
        self._execution = execution
        execution._contexts.append(weakref.ref(self))
        return self

    async def advance(
        self, token_ids: TokenIds, *, temperature: float = 1.0, timeout: float | None = None
    ) -> torch.Tensor:
        length, ask = len(self), functools.partial(Context.advance, self, token_ids)
        options: Any = {"temperature": temperature, "timeout": timeout}
        if (execution := self._asking()) is None:
            return await ask(**options)
        found: torch.Tensor = await execution._question("advance", ask, options)
        if len(self) == length:  # a recorded answer
            self.extend(token_ids)
        return found

    def fork(self) -> Self:
        return super().fork()._belong(self._execution)


@_record_questions
class _ParticleRuntime(AsyncLM):
    """A runtime as a program has it, equal to the model's. Its answers are recorded, except rows; a
    question that draws has a seed of the particle."""

    _execution: weakref.ref[Execution]
    of_program: AsyncLM

    def __init__(self, execution: Execution, lm: AsyncLM) -> None:
        vars(self).update(vars(lm), _execution=weakref.ref(execution), of_program=lm)

    def _asking(self) -> Execution | None:
        execution = self._execution()
        return None if execution is None or execution._task is None else execution

    def context(self, prompt: str | TokenIds | Context, *, adapter: str | None = None) -> Context:
        """Return a context of the program, as ``Execution.context`` does."""
        if (execution := self._asking()) is None:
            return super().context(prompt, adapter=adapter)
        return execution.context(prompt, adapter=adapter)

    def stream(self, *_: Any, **__: Any) -> Stream:
        """Refuse to stream in a program."""
        raise InvalidRequest("a program cannot record a stream: await p.lm.generate(…) or chat(…)")

    stream_chat = stream


class Execution:
    """The argument of a program: one particle's own randomness, and its weight.

    ``lm`` is the runtime, for everything else: rows, scores, texts. Its answers are recorded, except
    rows, and a draw without a seed has one of the particle.
    """

    def __init__(self, program: Program, trace: ProgramTrace, computed: Computed) -> None:
        """Begin to replay a trace, whose execution had the ``computed`` contexts at its pause."""
        self._lm, self._given = program.lm, program._given
        self._text_model = program._text_model
        self.lm: AsyncLM = _ParticleRuntime(self, program.lm)
        self._names = set[str | None]()
        self._numbers = count()
        """Of the questions, in the order of their calls."""
        self._answers = {
            number: answer for each in trace.path() for number, *answer in each.answers
        }
        self._contexts: list[weakref.ref[ParticleContext]] = []
        self._computed = computed
        self._to_replay = deque(trace._recorded())
        self._is_live = trace.pause is None
        self._task: asyncio.Task[Any] | None = None
        self._trace: Any = None
        """The new trace, in a step."""

    def _begin(self, trace: ProgramTrace, seed: int, place: int, text: Text | None) -> None:
        """Begin a step of this seed in the running task, as the particle at this place, with the text at
        which it paused. It adds to the trace."""
        self._trace, self._answered = trace, trace.answers
        self._seed, self._place, self._grown = seed, place, text
        self._rng = functools.cache(functools.partial(np.random.default_rng, (seed, place)))
        self._task = asyncio.current_task()
        self._has_sampled = self._has_drawn = self._has_weighed = False
        """In this step; weighed: since the last draw."""
        self._seeds = count(1)

    def _question(
        self, name: str, ask: Callable[..., Coroutine[Any, Any, Any]], kwargs: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        """Return the recorded answer to a question, or else its answer, which is recorded."""
        is_seeded = name not in SEEDED or kwargs.get("seed") is not None
        if asyncio.current_task() is not self._task:  # a replay cannot repeat the order of tasks
            if is_seeded:
                return ask(**kwargs)
            raise InvalidRequest(
                f"{name} was called in another task than the program's: call it in the program itself, "
                "and gather the calls, or give it a seed"
            )
        number = next(self._numbers)
        if not is_seeded and number not in self._answers:
            sequence = np.random.SeedSequence((self._seed, self._place, next(self._seeds)))
            kwargs["seed"] = model_seed(sequence)
        return self._answer(number, name, functools.partial(ask, **kwargs))

    async def _answer(self, number: int, name: str, ask: Callable[[], Any]) -> Any:
        kind, found = self._answers.get(number, ("", None))
        if kind == name:
            if isinstance(found, GenrtError):
                raise found.fresh()
            return _copied(found)
        if kind or not self._is_live:
            raise _impure(f"asked for another {name}")
        try:
            found = await ask()
        except GenrtError as error:
            self._answered.append((number, name, error))  # the program may go on
            raise
        self._answered.append((number, name, _copied(found)))
        return found

    def context(
        self, prompt: str | TokenIds | Context, *, adapter: str | None = None
    ) -> ParticleContext:
        """Return a sequence of this particle that begins with a prompt, as ``AsyncLM.context`` does.
        When the particle is copied, the copy's contexts share all that was computed."""
        made = begin_context(self._lm._contexts, prompt, adapter, ParticleContext)
        return made._belong(self)

    async def sample(
        self,
        token_ids: TokenIds | Context,
        *,
        mask: Mask | None = None,
        temperature: float = 1.0,
        adapter: str | None = None,
        proposal: TokenIds | Context | None = None,
        name: str | None = None,
    ) -> int:
        """Draw a token from the row after ``token_ids`` or a context of ``p.context``, which stays as
        it is.

        Args:
            mask: the tokens that may be drawn, as ``AsyncLM.draw`` takes them. The log-weight gains the
                log-probability of all of them; without any the particle dies.
            temperature: of the row; other than 1, the tempered row is the law. Not with a mask or a
                proposal, whose weights belong to the row.
            adapter: by name; a context has its own.
            proposal: token ids or a context; the row after them draws instead, and the log-weight gains
                log p - log q of the token.
            name: names the draw, so that ``Program(given=…)`` can fix its token.

        Raises:
            InvalidRequest: a call in another task than the program's, another context than
                ``p.context`` makes, or a wrong argument.
            ContextTooLong, UnknownAdapter, EngineFailed, Closed: as ``AsyncLM.draw``.
        """
        temperature = checks.check_temperature(temperature)
        if temperature != 1 and (mask is not None or proposal is not None):
            raise InvalidRequest(
                "sample takes a mask or a proposal, or a temperature: leave one out"
            )
        self._check_context("sample", token_ids, adapter)
        self._check_context("sample", proposal)
        if (recorded := await self._recorded("sample", name, self._has_sampled)) is not None:
            return int(recorded.outcome)
        self._has_sampled = True
        if name in self._given:
            if temperature != 1:
                raise InvalidRequest(f"{name} is given, and has a temperature: leave one out")
            most = self._lm.vocab_size - 1
            token_id = check_int(f"the given {name}", self._given[name], 0, most)
            logprob = 0.0
            self._weigh(await self._logprob(token_ids, token_id, mask, adapter))
        else:
            before = (token_ids, adapter) if proposal is None else (proposal, None)
            drawn = await self._draw(before[0], mask, temperature, before[1])
            token_id, logprob = drawn.token_id, drawn.logprob
            if token_id == DEAD:
                self._weigh(-math.inf)
            elif proposal is not None:
                self._weigh(await self._logprob(token_ids, token_id, None, adapter) - logprob)
            elif mask is not None:
                self._weigh(drawn.log_mass)
        self._trace.log_proposal += logprob
        await self._record(_Choice("sample", token_id, name, token_id))
        self._trace.tokens += (token_id,)
        return token_id

    async def text(
        self,
        token_ids: TokenIds | Context,
        *,
        max_tokens: int,
        stop: Stop = END_TOKEN,
        constraint: Constraint | None = None,
        temperature: float = 1.0,
        adapter: str | None = None,
        name: str | None = None,
    ) -> Text:
        """Draw a text after ``token_ids`` or a context of ``p.context``, as a ``TextModel`` of the same
        arguments does, and return it. The context stays as it is: extend it by ``text.token_ids``.

        The texts of all particles grow together, and particles are resampled after every token. With a
        constraint the log-weight gains the mass of the allowed tokens at each.

        Args:
            constraint: the texts that may be drawn. Make it outside of the program: particles with one
                constraint are drawn in one question.
            adapter: by name; a context has its own.
            name: names the text, so that ``Program(given=…)`` can fix it.

        Raises:
            InvalidRequest, ContextTooLong, UnknownAdapter, EngineFailed, Closed: as ``sample`` and
                ``TextModel``.
        """
        self._check_context("text", token_ids, adapter)
        if (recorded := await self._recorded("text", name, self._has_sampled)) is not None:
            return cast("Text", recorded.outcome)
        self._has_sampled = True
        if (text := self._grown) is None:
            if isinstance(token_ids, Context):
                prompt, adapter = tuple(token_ids.token_ids), token_ids.adapter
            else:
                prompt = prompt_tokens(self._lm, token_ids, name="token_ids")
            options: Any = {"max_tokens": max_tokens, "stop": stop}
            model = self._text_model(prompt, adapter, temperature, constraint, **options)
            start = model.start(prompt)
            if name in self._given:
                text = await self._given_text(model, start, name)
            else:
                self._trace.growing = model, start
                await self._stop("text")
                text = cast("Text", self._grown)
        self._grown, self._has_drawn, self._has_weighed, self._has_sampled = None, True, True, True
        await self._record(_Choice("text", text, name, text))
        return text

    async def _given_text(self, model: TextModel, start: TextTrace, name: str | None) -> Text:
        """Return a given text, whose log-probability the log-weight gains."""
        given, ends = self._given[name], model.ends
        tokens = given.token_ids if isinstance(given, Text) else given
        about = f"the given {name}"
        ids = prompt_tokens(self._lm, tokens, name=about, begins=False, allow_empty=True)
        if len(ends.token_ids) > 1 or ends.strings:
            raise InvalidRequest(f"{name} is given, and has several stops: give it one stop token")
        may_be_cut = model.constraint is None and len(ids) == model.max_tokens
        if ends.token_ids and not may_be_cut:
            ids = (*ids, *ends.token_ids)
        [found] = await model.follow([start], [ids])
        gained = math.fsum(each.log_target for each in found.path())
        self._weigh(gained if found.finished else -math.inf)
        return found.generated

    def _draw(
        self, token_ids: TokenIds | Context, mask: Any, temperature: float, adapter: str | None
    ) -> Coroutine[Any, Any, Draw]:
        """Draw a token, with the seed that a TextModel's draw has."""
        seed = seed_at(self._seed, self._place)
        if isinstance(token_ids, Context):
            return Context.draw(token_ids, mask=mask, temperature=temperature, seed=seed)
        return self._lm.draw(
            token_ids, mask=mask, temperature=temperature, seed=seed, adapter=adapter
        )

    async def _logprob(
        self, token_ids: TokenIds | Context, token_id: int, mask: Mask | None, adapter: str | None
    ) -> float:
        """Return the log-probability of a token, -inf if a mask forbids it."""
        words = None if mask is None else packed_words(mask, self._lm.vocab_size).numpy()
        if words is not None and not has_bit(words, token_id):
            return -math.inf
        return (await self._draw(token_ids, [token_id], 1.0, adapter)).log_mass

    def condition(
        self, token_ids: TokenIds | Context, continuation: TokenIds, *, adapter: str | None = None
    ) -> Coroutine[Any, Any, None]:
        """Observe that ``continuation`` follows ``token_ids``, or a context: the log-weight gains its
        log-probability. The context stays as it is. Await it. Raises as ``AsyncLM.score``."""
        self._check_context("condition", token_ids, adapter)
        if isinstance(token_ids, Context):
            scores = token_ids.score(continuation)
        else:
            scores = self.lm.score(token_ids, continuation, adapter=adapter)

        async def condition() -> None:
            self.observe(float((await scores).double().sum()))

        return condition()

    def observe(self, log_weight: float) -> None:
        """Add to the particle's log-weight; -inf ends the particle at its next draw. Raises
        InvalidRequest for NaN, +inf, or no number."""
        number = checks.check_log_weight(log_weight, "observe was given")
        if self._is_live and self._trace is not None:  # a task of the program's may be late
            self._weigh(number)

    def _weigh(self, log_weight: float) -> None:
        self._trace.log_weight += log_weight
        self._has_weighed = self._has_drawn

    async def uniform(self) -> float:
        """Draw a number uniformly from [0, 1)."""
        if (recorded := await self._recorded("uniform")) is not None:
            return float(recorded.outcome)
        drawn = float(self._rng().random())
        await self._record(_Choice("uniform", drawn))
        return drawn

    async def choice(
        self,
        values: Sequence[T],
        *,
        log_weights: Weights | None = None,
        proposal: Weights | None = None,
        name: str | None = None,
    ) -> T:
        """Draw one of the values, uniformly, or in proportion to the exponentials of ``log_weights``.

        Args:
            proposal: other log-weights, which draw instead; the particle's log-weight gains log p - log
                q of the value.
            name: names the draw, so that ``Program(given=…)`` can fix its value.

        Raises:
            InvalidRequest: no values, or values without an order; not as many log-weights, all of them
                -inf, or one NaN or +inf.
        """
        if isinstance(values, Mapping | Set) or not hasattr(values, "__getitem__"):
            raise InvalidRequest(
                f"choice got a {type(values).__name__}: give the values in a list, in a fixed order"
            )
        count = len(values)
        if not count:
            raise InvalidRequest("choice got no values: give at least one")
        if (recorded := await self._recorded("choice", name)) is not None:
            if recorded.outcome >= count:
                raise _impure("asked for another choice")
            return values[int(recorded.outcome)]
        drawing, log_target = _choice_probabilities(log_weights, count)
        logs = log_target
        if proposal is not None:
            drawing, logs = _choice_probabilities(proposal, count)
            if ((logs == -math.inf) & (log_target > -math.inf)).any():
                raise InvalidRequest("choice got a proposal that cannot draw one of its values")
        if name in self._given:
            given = self._given[name]
            places = [place for place, each in enumerate(values) if _are_equal(each, given)]
            if not places:
                raise InvalidRequest(f"{name} was given {given!r}, which is not one of its values")
            index = places[0]
            self._weigh(float(np.logaddexp.reduce(log_target[places])))
        else:
            index = int(self._rng().choice(count, p=drawing))
            if proposal is not None:
                self._weigh(float(log_target[index] - logs[index]))
            self._trace.log_proposal += float(logs[index])
        value = values[index]
        drawn = None if name is None else _copied(value)
        await self._record(_Choice("choice", index, name, drawn))
        return value

    async def _record(self, choice: _Choice) -> None:
        """Record a draw; one that has ended the particle never returns."""
        if self._trace.log_weight == -math.inf:
            await _pause()
        self._trace.choices.append(choice)

    async def _recorded(
        self, kind: str, name: str | None = None, due: bool = False
    ) -> _Choice | None:
        """Return the recorded outcome of this draw; ``None`` if it is new, after a pause if one is due.
        Raises InvalidRequest in another task than the program's, if it was another draw before, or if
        another draw of this execution has the name."""
        if name is not None and name in self._names:
            raise InvalidRequest(f"two draws are called {name!r}: give each its own name")
        self._names.add(name)
        if asyncio.current_task() is not self._task:
            raise InvalidRequest(
                f"{kind} was awaited in another task than the program's, as gather and "
                "create_task do: await it in the program itself, one after the other"
            )
        if self._to_replay:
            recorded = self._to_replay.popleft()
            if recorded.kind != kind:
                raise _impure(f"asked for another {kind}")
            return recorded
        if not self._is_live:
            if self._trace.pause != kind:
                raise _impure(f"asked for another {kind}")
            self._is_live = True
            for own, equal in zip(self._contexts, self._computed, strict=False):
                context = own()
                if context is None or equal is None or context.adapter != equal.adapter:
                    continue
                if context.token_ids == equal.token_ids:
                    take_over(context, equal)
            self._computed = ()
        elif due or self._has_weighed or self._trace.log_weight == -math.inf:
            await self._stop(kind)
        self._has_drawn = True
        return None

    async def _stop(self, kind: str) -> None:
        """Pause before a draw."""
        self._trace.pause = kind
        await _pause()

    def _check_context(self, method: str, context: Any, adapter: str | None = None) -> None:
        """Raise InvalidRequest for a context of others, or an adapter with a context."""
        if isinstance(context, Context):
            if not isinstance(context, ParticleContext) or context._execution is not self:
                raise InvalidRequest(f"{method} got a context of others: begin it by p.context(…)")
            if adapter is not None:
                raise InvalidRequest("a context has its adapter: p.context(prompt, adapter=…)")


def _impure(found: str) -> InvalidRequest:
    return InvalidRequest(
        f"a program ran again with its recorded choices, and {found} than before: make it a function of "
        "its choices, with all its randomness from the execution"
    )


def _are_equal(value: Any, given: Any) -> bool:
    if isinstance(value, np.ndarray | torch.Tensor):
        is_like = type(value) is type(given) and value.shape == given.shape
        return is_like and repr(value.tolist()) == repr(given.tolist())  # NaN equals itself
    return value is given or bool(value == given)


def _copied(answer: Any) -> Any:
    """Return a copy of an answer that its caller may change, or the answer itself if it has no copy."""
    try:
        return copy.deepcopy(answer)
    except Exception:  # such as a runtime
        return answer


def _choice_probabilities(log_weights: Any, count: int) -> tuple[Floats | None, Floats]:
    """Return the probabilities of ``count`` values, ``None`` if uniform, and their logarithms. Raises
    InvalidRequest if these are not their log-weights."""
    if log_weights is None:
        return None, np.full(count, math.log(1 / count))
    weighed = checks.check_log_weights(log_weights, count, "choice got the log-weights")
    if np.all(weighed == -math.inf):
        raise InvalidRequest("choice got log-weights of -inf alone: give one above -inf")
    shares = normalized_weights(weighed)
    with np.errstate(divide="ignore"):
        return shares, np.log(shares)


class ProgramTrace(Trace):
    """The choices of one execution, and at most once that execution itself, to continue. Only ``live``
    changes; a copy has none.

    Attributes:
        choices: the draws that its last unit recorded.
        answers: the number, the kind and the answer of each question of its last unit.
        pause: the kind of the draw before which the execution stopped.
        value: the result of the program.
        live: the execution and its coroutine.
        growing: the model and the trace of the text that it draws; ``None`` between texts.
    """

    __slots__ = ("answers", "choices", "growing", "live", "pause", "value")

    before: ProgramTrace | None

    def __init__(self, before: ProgramTrace | None = None) -> None:
        super().__init__(before)
        self.choices: list[_Choice] = []
        self.answers: list[tuple[int, str, Any]] = []
        self.pause: str | None = None if before is None else before.pause
        self.growing: tuple[TextModel, TextTrace] | None = None
        if before is not None:
            self.growing = before.growing
        self.value: Any = None
        self.live: list[Live] = []

    def _parts(self) -> dict[str, Any]:
        return super()._parts() | {"live": []}

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        kind, (own, parts) = super().__reduce__()
        for each in parts[:-1]:
            each["growing"] = None  # only the last unit goes on
        return kind, (own, parts)

    @property
    def named(self) -> dict[str, Any]:
        """The values of the draws with names."""
        return {
            each.name: _copied(each.drawn) for each in self._recorded() if each.name is not None
        }

    def _recorded(self) -> list[_Choice]:
        """Return all recorded draws."""
        return [choice for each in self.path() for choice in each.choices]

    def die(self) -> None:
        """End the execution, and its text."""
        for _, coroutine in self.live:
            coroutine.close()
        self.live, self.growing = [], None


def _forks(live: Sequence[Live]) -> Computed:
    """Return forks of an execution's contexts."""
    kept = [each() for execution, _ in live for each in execution._contexts]
    return [None if each is None or each.is_closed else each.copied(Context) for each in kept]


class Program:
    """A model that you write: an async function of an ``Execution``, which returns a value.

    The module's docstring has its target and its limits. A posterior needs hashable values;
    ``token_ids`` and texts come from all ``sample`` calls.

    Attributes:
        lm: the runtime.
    """

    max_steps: int | None = None
    """A program ends when it returns."""

    def __init__(
        self,
        lm: AsyncLM,
        function: Callable[[Execution], Coroutine[Any, Any, Any]],
        *,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            given: values of draws by name. Such a draw has its value, and the log-weight gains the
                log-probability of it. ``trace.named`` of another run replays its draws. Each execution
                must have them all.

        Raises:
            InvalidRequest: ``function`` cannot be called, or ``given`` is no mapping; from the first
                step, ``function`` is no ``async def``, a value is none of a draw's, or a given name is
                no draw.
        """
        checks.check_callable("the program", function, "an async function of an execution")
        self.lm = checks.check_runtime(lm)
        self._function = function
        if not isinstance(given, Mapping | None):
            raise InvalidRequest(f"given is {displayed(given)}: give a dict of values by name")
        self._given = dict[Any, Any](given or {})
        self._text_models = dict[Hashable, TextModel]()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_text_models": {}}  # whose keys are of this process

    def __repr__(self) -> str:
        return f"Program({getattr(self._function, '__name__', self._function)})"

    def start(self) -> ProgramTrace:
        """Return an execution before its first line."""
        return ProgramTrace()

    def text(self, trace: ProgramTrace) -> str:
        """Return the text of the sampled tokens as UTF-8; other bytes show as U+FFFD and their number.
        Without a tokenizer it is ``""``."""
        try:
            vocabulary = self.lm.byte_vocab
        except (InvalidRequest, EngineUnsupported):
            return ""
        return decoded(b"".join(vocabulary[token_id] for token_id in trace.token_ids))

    def value(self, trace: ProgramTrace) -> Any:
        """Return the result of the program; ``None`` before its end."""
        return trace.value

    async def extend(self, traces: Sequence[ProgramTrace], seed: int) -> list[ProgramTrace]:
        """Run all executions at once, each to its next resampling point or to its end; the texts that
        they draw grow by a token each."""
        new, going = list[ProgramTrace](), list[Coroutine[Any, Any, None]]()
        taken = dict[ProgramTrace, list[Live]]()
        for place, old in enumerate(traces):
            trace = ProgramTrace(old)
            others = taken.get(old, [])
            if old not in taken:  # the first copy goes on
                taken[old], trace.live, old.live = old.live, old.live, []
            new.append(trace)
            if trace.growing is None:
                going.append(self._go_on(trace, seed, place, _forks(others)))
        await gather_all(going)
        groups = defaultdict[Hashable, list[int]](list)
        for place, each in enumerate(new):
            if each.growing is not None:
                groups[id(each.growing[0]), id(each.growing[1].populations)].append(place)
        await gather_all(self._texts_longer(new, each, seed) for each in groups.values())
        return new

    async def _texts_longer(
        self, traces: Sequence[ProgramTrace], places: Sequence[int], seed: int
    ) -> None:
        """Extend the texts of the new traces at these places by a token. Where one ends, the program goes
        on to its next pause."""
        own = seed
        if len(places) < len(traces):  # the others have draws of their own
            own = model_seed(np.random.SeedSequence(seed, spawn_key=(places[0],)))
        several = [traces[place] for place in places]
        pairs: Any = [each.growing for each in several]
        model, ended = pairs[0][0], []
        longer = await model.extend([text for _, text in pairs], own)
        for place, trace, text in zip(places, several, longer, strict=True):
            trace.tokens, trace.growing = text.tokens, (model, text)
            trace.log_weight += text.log_weight
            trace.log_proposal += text.log_proposal
            if trace.log_weight == -math.inf:
                trace.die()
            elif text.finished:
                # Its questions may have had seeds of this step before the text.
                after = model_seed(np.random.SeedSequence(own, spawn_key=(place, 0)))
                ended.append(self._go_on(trace, after, place, text=text.generated))
        await gather_all(ended)

    def _text_model(
        self,
        prompt: tuple[int, ...],
        adapter: str | None,
        temperature: float,
        constraint: Constraint | None,
        **options: Any,
    ) -> TextModel:
        """Return the model of a text, one for equal arguments but the prompt."""
        key = id(constraint), adapter, repr((temperature, options))
        if (model := self._text_models.get(key)) is None:
            law = Law(self.lm, prompt, adapter=adapter, temperature=temperature)
            model = TextModel(law, constraint=constraint, **options)
            if len(self._text_models) >= MOST_TEXT_MODELS:
                del self._text_models[next(iter(self._text_models))]
            self._text_models[key] = model  # holds the constraint, whose id the key has
        model.laws[0].check_length(model.max_tokens, prompt)
        return model

    async def _go_on(
        self,
        trace: ProgramTrace,
        seed: int,
        place: int,
        computed: Computed = (),
        text: Text | None = None,
    ) -> None:
        """Run the execution of a new trace to its next pause, with the text at which it paused, and add
        what it did to the trace."""
        if not trace.live:
            execution = Execution(self, trace, computed)
            coroutine = self._function(execution)
            if not inspect.iscoroutine(coroutine):
                raise InvalidRequest(
                    f"the program returned a {type(coroutine).__name__}: make it an async def"
                )
            trace.live = [(execution, coroutine)]
        [(execution, coroutine)] = trace.live
        execution._begin(trace, seed, place, text)
        trace.growing = None
        try:
            finished, value = await _until_pause(coroutine)
        finally:
            # Breaks the cycle: the task holds the result, which holds the execution.
            execution._task = execution._trace = None
        if trace.log_weight == -math.inf:
            trace.die()
            return
        if finished:
            if not execution._is_live:
                raise _impure("returned earlier")
            if unknown := self._given.keys() - execution._names:
                names = ", ".join(sorted(map(repr, unknown)))
                raise InvalidRequest(
                    f"the program ended without a draw called {names}, which is given: name draws"
                )
            trace.finished, trace.value, trace.live = True, value, []


_PAUSE = object()


@types.coroutine
def _pause() -> Generator[object, None, None]:
    """Stop an execution until its next step."""
    yield _PAUSE


@types.coroutine
def _until_pause(coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, None, tuple[bool, Any]]:
    """Run a coroutine in the running task until it pauses or ends; return whether it has ended, and its
    result."""
    error: BaseException | None = None
    while True:
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return True, end.value
        if awaited is _PAUSE:
            return False, None
        error = None
        try:
            yield awaited
        except BaseException as raised:
            error = raised
