"""Contexts: a sequence for each coroutine. The questions of all contexts in one pass of an event loop
become one request of arrays.

Rule:
    A question is about the sequence of its call. Once it is answered, its context extends the answered
    sequence by number, unless the context was cut or answered otherwise in the meantime.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, NoReturn, Self, TypeAlias, TypeVar, Unpack, cast

import numpy as np
import torch

from genrt.constraints.products import abitmasks, bitmasks
from genrt.engines.protocol import failure
from genrt.errors import Closed, GenrtError, InvalidRequest, NotFinite
from genrt.numbers import check_int, check_timeout
from genrt.populations import Ask, PopulationRuntime
from genrt.questions.arguments import Adapter, TokenIds, check_seed
from genrt.questions.completions import Completion, GenerateOptions, SampleOptions
from genrt.questions.draws import PopulationDraw, draw_temperature
from genrt.questions.masks import Mask, words_of_each, words_or_state
from genrt.questions.reads import candidates_request, checked_temperature, top_request
from genrt.questions.request import Request, Result
from genrt.questions.rows import check_length, id_words
from genrt.questions.scores import joined_scores, score_requests
from genrt.questions.sequences import Contexts, Origins, SequenceHandle, padded_block
from genrt.runtime.ask import blocking_question, run_without_loop, within
from genrt.runtime.concurrency import gather_all
from genrt.runtime.texts import Texts
from genrt.tokens import encoding
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs

__all__ = ["Context", "Gatherer", "begin_context", "take_over"]


MOST_TOGETHER = 1024
"""The most questions that one pass of an event loop sends or answers, so that its other tasks can run."""

C = TypeVar("C", bound="Context")


def begin_context(
    gatherer: Gatherer, prompt: str | TokenIds | Context, adapter: str | None, kind: type[C]
) -> C:
    """Return a context of this class that begins with a prompt, as ``AsyncLM.context`` does."""
    runtime = gatherer.runtime
    runtime.asker.bound(adapter)
    given: Any = prompt
    if isinstance(given, Context):
        if given._gatherer is gatherer and given.adapter == adapter:
            return given.copied(kind)
        given = given.token_ids
    elif isinstance(given, str):
        given = encoding.encode_prompt(runtime.thread.engine.tokenizer, given)
    return kind(gatherer, adapter, id_words(given, runtime.limits.vocab_size))


def take_over(context: Context, equal: Context) -> None:
    """Make a context extend the computed sequence that an equal one extends; that one closes."""
    context._place, equal._place = equal._place, context._place
    context._tail, equal._tail = equal._tail, context._tail
    equal.close()


@dataclass(slots=True, eq=False)
class _Answered:
    """The sequences of an answered request, and how many contexts extend them."""

    contexts: Contexts
    handle: SequenceHandle
    extended_by: int = 0

    def leave(self, runtime: PopulationRuntime) -> None:
        """Count a context that no longer extends them; the last one gives them back."""
        self.extended_by -= 1
        if not self.extended_by:
            runtime.give_back([self.handle])


_Place: TypeAlias = tuple[_Answered | None, int, int]
"""The number and the length of the answered sequence that a context extends. A context that changes
otherwise than by more tokens gets another tuple."""


class Context:
    """A sequence of one coroutine, such as a particle of a sampler.

    ``AsyncLM.context`` makes it. A question is about the sequence when it is first awaited, in a new task
    when that first runs, and appends nothing, except ``advance``. ``append``, ``extend`` and ``cut``
    change the sequence without a question. The questions that contexts ask at once are one request, so a
    step of many costs about as much as a step of a population. Answers, cancellation, timeouts and errors
    are as for every question of an ``AsyncLM``. After a restart or an eviction, the engine recomputes
    what it lost. After new weights, later questions have these.

    One task or thread at a time may change a context. As a context manager, it closes at the end; a
    context that is collected closes too.
    """

    __slots__ = (
        "__weakref__",
        "_adapter",
        "_cuts",
        "_gatherer",
        "_is_closed",
        "_place",
        "_runtime",
        "_tail",
    )

    def __init__(self, gatherer: Gatherer, adapter: str | None, token_ids: Sequence[int]) -> None:
        self._gatherer, self._runtime = gatherer, gatherer.runtime
        self._adapter = adapter
        self._place: _Place = (None, 0, 0)
        self._tail = [*token_ids]  # the tokens after that sequence
        self._cuts = 0
        self._is_closed = False

    # -- contents -----------------------------------------------------------------------------

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that answers."""
        return self._adapter

    @property
    def token_ids(self) -> list[int]:
        """The sequence, a copy."""
        return self._words().tolist()

    @property
    def text(self) -> str:
        """The text of the sequence, special tokens included. Raises InvalidRequest without a
        tokenizer."""
        return encoding.decode(self._runtime.thread.engine.tokenizer, self._words())

    @property
    def is_closed(self) -> bool:
        """True after ``close``."""
        return self._is_closed

    def __len__(self) -> int:
        return self._place[2] + len(self._tail)

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"Context({len(self)} tokens, adapter={self._adapter}{closed})"

    # -- questions ----------------------------------------------------------------------------

    async def draw(
        self,
        *,
        mask: Mask | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Draw:
        """Draw the next token with its weight, as ``AsyncLM.draw`` does; append nothing.

        Args:
            mask: a constraint's state, or the allowed tokens in any form of ``AsyncLM.draw``. The masks
                of states that are asked with at once are computed together, also those of predicates.
                A packed tensor is not copied: do not change it before the draw is there.
            temperature: 0 is greedy.
            seed: makes the draw reproducible, whatever other contexts ask.

        Raises:
            InvalidRequest: a mask or parameter that does not fit. InvalidConstraint: a grammar exceeded a
                limit. An exception of a predicate; otherwise as ``logprobs``.
        """
        runtime = self._runtime
        given = None if mask is None else words_or_state(mask, runtime.limits.vocab_size)
        heat = draw_temperature(temperature)
        own = next(runtime.nonces) if seed is None else cast("int", check_seed(seed))
        question = _Question(self, heat, given, own)
        return cast("Draw", await self._ask(question, timeout=timeout))

    async def logprobs(self, *, timeout: float | None = None) -> torch.Tensor:
        """Return the row after the sequence, as ``AsyncLM.next_token_logprobs`` does: float32
        ``[vocab_size]`` on the runtime's device.

        Raises:
            ContextTooLong: the sequence is longer than the model allows. UnknownAdapter: the adapter was
                removed. EngineFailed, NotFinite, TimedOut: as ``AsyncLM.next_token_logprobs``.
            Closed: the context or the runtime is closed.
        """
        return cast("torch.Tensor", await self._ask(_Question(self), timeout=timeout))

    async def top_logprobs(self, k: int, *, timeout: float | None = None) -> TopLogprobs:
        """Return the ``k`` likeliest next tokens, as ``AsyncLM.top_logprobs`` does."""
        bound = self._bound()
        request = top_request(self._runtime.limits, self._words(), k, bound)
        return cast("TopLogprobs", (await self._ask((request,), timeout=timeout))[0])

    async def token_logprobs(
        self, candidates: TokenIds, *, timeout: float | None = None
    ) -> torch.Tensor:
        """Return the row's entries for ``candidates``, as ``AsyncLM.token_logprobs`` does."""
        bound = self._bound()
        request = candidates_request(self._runtime.limits, self._words(), candidates, bound)
        return cast("torch.Tensor", (await self._ask((request,), timeout=timeout))[0])

    async def score(self, continuation: TokenIds, *, timeout: float | None = None) -> torch.Tensor:
        """Return the log-probability of each token of ``continuation`` after the sequence, as
        ``AsyncLM.score`` does; append nothing."""
        own = self._runtime.limits, [self._words()], [continuation], self._bound()
        requests = score_requests(*own, in_one=self._runtime.thread.capabilities.scores)
        return joined_scores(await self._ask(requests[0], timeout=timeout), requests)[0]

    async def advance(
        self, token_ids: TokenIds, *, temperature: float = 1.0, timeout: float | None = None
    ) -> torch.Tensor:
        """Append a block of any number of tokens, and return the log-probability of each after the tokens
        before it: float32 ``[k]`` on the host.

        The blocks of all contexts that ask at once are one forward, as in ``Population.advance``, and the
        next question computes one token. After an error or a cancellation, the sequence is as before.

        Args:
            temperature: above 0. Rows are divided by it and normalized again.

        Raises:
            InvalidRequest: an argument of the wrong type or range, or the context was changed meanwhile;
                otherwise as ``logprobs``.
        """
        words = id_words(token_ids, self._runtime.limits.vocab_size, allow_empty=True)
        question = _Question(self, checked_temperature(temperature), block=words)
        if not words:
            await self._ask((), timeout=timeout)
            return torch.zeros(0)
        before = self._state()
        try:
            found = cast("torch.Tensor", await self._ask(question, timeout=timeout))
            self._follow(question, before)
        finally:
            question.drop()
        return found

    async def sample(
        self, *, timeout: float | None = None, **options: Unpack[SampleOptions]
    ) -> list[int]:
        """Draw up to ``max_tokens`` tokens after the sequence in the engine's own decode loop, as
        ``AsyncLM.sample`` does with these options; append nothing."""
        given: Any = {**options, "adapter": self._own_adapter(options)}
        requests = self._gatherer.texts.samples([self._words()], given, method="sample")
        return list((await self._ask(requests, timeout=timeout))[0])

    async def generate(self, **options: Unpack[GenerateOptions]) -> Completion:
        """Draw the text after the sequence in the engine's own decode loop, as ``AsyncLM.generate`` does
        with these options; append nothing. The completion's ``token_ids`` may be passed to
        ``extend``."""
        given = {**options, "adapter": self._own_adapter(options)}
        requests, timeout = self._gatherer.texts.requests([self._words()], given)
        return cast("Completion", (await self._ask(requests, timeout=timeout))[0])

    draw_sync = blocking_question(draw)
    logprobs_sync = blocking_question(logprobs)
    top_logprobs_sync = blocking_question(top_logprobs)
    token_logprobs_sync = blocking_question(token_logprobs)
    score_sync = blocking_question(score)
    advance_sync = blocking_question(advance)
    sample_sync = blocking_question(sample)
    generate_sync = blocking_question(generate)

    # -- changes ------------------------------------------------------------------------------

    def append(self, token_id: int) -> None:
        """Add a token.

        Raises:
            InvalidRequest: not a token id of the vocabulary, such as the -1 of a draw without mass.
            Closed: the context is closed; the other changes raise it too.
        """
        self._check_open()
        most = self._runtime.limits.vocab_size - 1
        if type(token_id) is not int or not 0 <= token_id <= most:
            token_id = check_int("token_id", token_id, 0, most)
        self._tail.append(token_id)

    def extend(self, token_ids: TokenIds) -> None:
        """Add any number of tokens. The next question computes all in one forward. Raises InvalidRequest
        for other values than token ids."""
        self._check_open()
        self._tail += id_words(token_ids, self._runtime.limits.vocab_size, allow_empty=True)

    def cut(self, length: int) -> None:
        """Drop the tokens beyond ``length``, at least 1; a shorter sequence stays as it is. Raises
        InvalidRequest for other values."""
        self._check_open()
        length = check_int("length", length, 1)
        if length >= len(self):
            return
        self._cuts += 1
        answered, number, before = self._place
        if length >= before:
            del self._tail[length - before :]
            self._place = (answered, number, before)  # another tuple
        else:
            self._tail = self._words()[:length].tolist()
            self._leave()

    def fork(self) -> Self:
        """Return a copy, which shares the computed tokens."""
        return self.copied(type(self))

    def copied(self, kind: type[C]) -> C:
        """Return a copy of another class, as ``fork`` does."""
        self._check_open()
        copy = kind(self._gatherer, self._adapter, self._tail)
        if (answered := self._place[0]) is not None:
            copy._place = self._place
            answered.extended_by += 1
        return copy

    def close(self) -> None:
        """Close the context. Questions and changes then raise ``Closed``. The engine soon frees the
        sequence, unless another context extends it. Idempotent."""
        self._tail = self.token_ids
        self._leave()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the modules may be gone
            self._leave()

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, _: object) -> Self:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a context cannot be pickled: send its token_ids, and begin another with them"
        )

    # -- how ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this context is closed: begin another one, lm.context(…)")

    def _bound(self) -> Adapter | None:
        self._check_open()
        return self._runtime.asker.bound(self._adapter)

    def _own_adapter(self, options: Mapping[str, Any]) -> str | None:
        """Return this context's adapter. Raises InvalidRequest if options name one, or Closed."""
        self._check_open()
        if "adapter" in options:
            raise InvalidRequest("a context has its adapter: lm.context(context, adapter=…)")
        return self._adapter

    def _words(self) -> array[int]:
        """Return the sequence as 32-bit numbers."""
        words, (answered, number, _) = array("I"), self._place
        if answered is not None:
            words.frombytes(answered.contexts.packed(number))
        words.extend(self._tail)
        return words

    def _state(self) -> tuple[int, int]:
        """Return two numbers that a change of the sequence changes."""
        return self._cuts, len(self)

    def _follow(self, question: _Question, before: tuple[int, int]) -> None:
        """Append the block of an answered question. Raises InvalidRequest if the sequence has changed
        since this state, or Closed."""
        self._check_open()
        if self._state() != before:
            raise InvalidRequest("the context was changed while it advanced: await the block first")
        self._leave()
        self._place, self._tail = cast("_Place", question.after), [cast("Any", question.block)[-1]]
        question.after = None

    def _leave(self) -> None:
        """Extend no sequence; give the last one of its request back. A finalizer may call this."""
        # The length is no constant, so each tuple is another object.
        answered, self._place = self._place[0], (None, 0, len(()))
        if answered is not None:
            answered.leave(self._runtime)

    def _ask(
        self, asked: _Question | Sequence[Request], *, timeout: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        if isinstance(asked, _Question):
            return self._gatherer.ask(asked, timeout)
        return self._runtime.asker.ask(asked, timeout=timeout)

    def _ask_sync(
        self, asked: _Question | Sequence[Request], *, timeout: float | None = None
    ) -> Any:
        asker = self._runtime.asker
        if not isinstance(asked, _Question):
            return asker.ask_sync(asked, timeout=timeout)

        if asked.has_state:
            asked.give_mask(bitmasks([asked.mask])[0])

        async def ask(requests: Sequence[Request], *, timeout: float | None) -> list[Result]:
            return asker.ask_sync(requests, timeout=timeout)

        run_without_loop(_ask_together(self._runtime, ask, [asked], timeout))
        return asked.answer


class _Question:
    """A question about the next token of a context, or about a block, with the sequence at its call.

    Attributes:
        kind: the adapter, the temperature, and whether it is about a block; without a temperature, the
            row is asked for.
        place: the context's at the call.
        after: where a context will be that appends the answered block; it counts as one that extends it.
        added: how many tokens follow the sequence of ``place``.
        extends: whether the engine may find the sequence by the answered one: it has one token more, or
            before a block any number, since a step reads the row before the block from its own tokens.
        token: the only one of them; or else ``words`` has the whole sequence, uint32 ``[n]``, with the
            block but for its last token.
        mask: packed, int32, or with ``has_state`` a constraint's state; ``None`` allows every token.
        seed: of the draw.
    """

    __slots__ = (
        "added",
        "after",
        "answer",
        "block",
        "context",
        "extends",
        "flush",
        "has_state",
        "kind",
        "mask",
        "place",
        "seed",
        "token",
        "waits_for",
        "words",
    )

    answer: Any
    waits_for: asyncio.Future[Any]

    def __init__(
        self,
        context: Context,
        temperature: float | None = None,
        mask: Any = None,
        seed: int = 0,
        block: array[int] | None = None,
    ) -> None:
        has_adapter = context._adapter is not None or context._is_closed
        adapter = context._bound() if has_adapter else None
        place, tail = context._place, context._tail
        self.added = added = len(tail)
        length = place[2] + added + (len(block) - 1 if block else 0)
        if length > context._runtime.limits.max_model_len:
            check_length(context._runtime.limits, length)
        self.context, self.place = context, place
        self.kind = adapter, temperature, block is not None
        self.mask, self.seed, self.block = mask, seed, block
        self.has_state = mask is not None and type(mask) is not torch.Tensor
        self.token = 0
        self.words: np.ndarray | None = None
        self.extends = place[0] is not None and (added == 1 or (block is not None and added > 1))
        if self.extends and block is None:
            self.token = tail[0]
        else:
            words = context._words()
            words += block[:-1] if block else array("I")
            self.words = np.frombuffer(words, np.uint32)
        self.flush: _Flush | None = None
        self.after: _Place | None = None

    def drop(self) -> None:
        """Give back the place of an answered block, if no context has it."""
        after, self.after = self.after, None
        if after is not None:
            cast("_Answered", after[0]).leave(self.context._runtime)

    def give_mask(self, mask: torch.Tensor) -> None:
        """Replace a state by its mask. Raises InvalidRequest if its vocabulary is another."""
        size = self.context._runtime.limits.vocab_size
        if getattr(self.mask, "vocab_size", size) != size or len(mask) != -(-size // 32):
            raise InvalidRequest(
                f"the mask is a state over another vocabulary, and the model has {size} tokens: make the "
                "constraint with this runtime"
            )
        self.mask = mask


@dataclass(slots=True, eq=False)
class _Flush:
    """The questions that were sent together, and how many callers still wait."""

    task: asyncio.Task[None]
    waiting: int


@dataclass(slots=True)
class _Gathered:
    """The questions that one event loop has gathered, and how many contexts were answered since the last
    flush. ``is_taken`` is locked while one part of them has the present pass of the loop."""

    questions: list[_Question] = field(default_factory=list)
    returning: int = 0
    is_taken: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take_pass(self) -> None:
        """Wait for a pass of the loop in which no other part of the questions has work to do."""
        await self.is_taken.acquire()
        asyncio.get_running_loop().call_soon(self.is_taken.release)


class Gatherer:
    """Gathers the questions of a runtime's contexts, for each event loop.

    The questions go together after the pass of the loop in which as many contexts have asked as were
    answered since the last flush, or after a pass that brings no further question.
    """

    def __init__(self, runtime: PopulationRuntime, texts: Texts) -> None:
        self.runtime = runtime
        self.texts = texts
        self._loops: dict[asyncio.AbstractEventLoop, _Gathered] = {}

    def _begin(self, loop: asyncio.AbstractEventLoop) -> _Gathered:
        """Begin to gather for another loop, and forget the closed ones."""
        self._loops = {loop: each for loop, each in self._loops.items() if not loop.is_closed()}
        return self._loops.setdefault(loop, _Gathered())

    async def ask(self, question: _Question, timeout: float | None) -> Any:
        """Return the answer. Cancelling withdraws this question only."""
        seconds = None if timeout is None else check_timeout(timeout)
        loop = asyncio.get_running_loop()
        gathered = self._loops.get(loop) or self._begin(loop)
        holder = None
        if (adapter := question.kind[0]) is not None:
            holder = self.runtime.thread.batcher
            holder.hold(question, adapter)
        question.waits_for = future = loop.create_future()
        gathered.questions.append(question)
        count = len(gathered.questions)
        if count == gathered.returning:
            loop.call_soon(self._send, loop, gathered)  # with any others of this pass
        elif count == 1:
            loop.call_soon(self._look_for_more, loop, gathered, 1)
        try:
            return await (future if seconds is None else within(seconds, future))
        finally:
            if holder is not None:
                holder.let_go(question)
            if (flush := question.flush) is not None:
                flush.waiting -= 1
                if not flush.waiting and not loop.is_closed():
                    flush.task.cancel()

    def _look_for_more(
        self, loop: asyncio.AbstractEventLoop, gathered: _Gathered, seen: int
    ) -> None:
        count = len(gathered.questions)
        if count > seen:
            loop.call_soon(self._look_for_more, loop, gathered, count)
        elif count:
            self._send(loop, gathered)

    def _send(self, loop: asyncio.AbstractEventLoop, gathered: _Gathered) -> None:
        questions, gathered.questions, gathered.returning = gathered.questions, [], 0
        groups: dict[tuple[Adapter | None, float | None, bool], list[_Question]] = {}
        for each in questions:
            if not each.waits_for.done():
                groups.setdefault(each.kind, []).append(each)
        most = min(self.runtime.thread.max_weight, MOST_TOGETHER)
        for group in groups.values():
            for start in range(0, len(group), most):
                part = group[start : start + most]
                # The questions keep the task, and their callers keep these.
                flush = _Flush(loop.create_task(self._answer_each(gathered, part)), len(part))
                for each in part:
                    each.flush = flush

    async def _answer_each(self, gathered: _Gathered, group: list[_Question]) -> None:
        """Ask these questions, of one kind, and resolve their futures."""

        async def ask(requests: Sequence[Request], *, timeout: float | None) -> list[Result]:
            results = await self.runtime.asker.ask(requests, timeout=timeout)
            await gathered.take_pass()
            return results

        try:
            await gathered.take_pass()
            group = await _with_masks(group)
            if group:
                await _ask_together(self.runtime, ask, group)
        except NotFinite as error:
            if len(group) > 1:  # the rows of others are finite
                waiting = [each for each in group if not each.waits_for.done()]
                await gather_all([self._answer_each(gathered, [each]) for each in waiting])
            else:
                _fail(group, error)
        except Exception as error:
            _fail(group, failure(error))
        except asyncio.CancelledError:  # also by a caller that cancels every task of the loop
            for each in group:
                each.waits_for.cancel()
            raise
        else:
            gathered.returning += len(group)
            for each in group:
                if not each.waits_for.done():
                    each.waits_for.set_result(each.answer)
                else:
                    each.drop()


async def _with_masks(group: list[_Question]) -> list[_Question]:
    """Compute the masks of states, fail the questions whose states fail, and return the others."""
    asked = [each for each in group if each.has_state]
    if not asked:
        return group
    try:
        words_of_each = await abitmasks([each.mask for each in asked])
        for each, words in zip(asked, words_of_each, strict=True):
            each.give_mask(words)
    except BaseException as error:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        if task.cancelling() or isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        if len(group) > 1:
            left = await gather_all([_with_masks([each]) for each in group])
            return [each for one in left for each in one]
        future = group[0].waits_for
        if isinstance(error, asyncio.CancelledError):  # the state cancelled a task of its own
            future.cancel()
        elif not future.done():
            future.set_exception(error)
        return []
    return group


def _fail(group: Sequence[_Question], error: GenrtError) -> None:
    """Fail these questions, each with its own exception object."""
    for each in group:
        if not each.waits_for.done():
            each.waits_for.set_exception(error.fresh())


async def _ask_together(
    runtime: PopulationRuntime, ask: Ask, group: list[_Question], timeout: float | None = None
) -> None:
    """Answer questions of one kind. The contexts of draws and rows then extend the answered
    sequences."""
    adapter, heat, is_block = group[0].kind
    known = [each for each in group if each.extends]
    new = [each for each in group if not each.extends] if len(known) < len(group) else []
    sequences: list[tuple[list[_Question], Contexts, Origins | None]] = []
    if known:
        sequences.append(_extensions(known))
        known = sequences[0][0]
    if new:
        sequences.append((new, Contexts.of([cast("Any", each.words) for each in new]), None))

    requests = [
        PopulationDraw(
            contexts,
            adapter,
            words_of_each([each.mask for each in questions]),
            1.0 if heat is None else heat,
            None
            if heat is None or is_block
            else np.array([each.seed for each in questions], np.uint64),
            origins,
            came_from=() if origins is None else origins.handles,
            block=padded_block([cast("Any", each.block) for each in questions])
            if is_block
            else None,
        )
        for questions, contexts, origins in sequences
    ]
    found, parts = await runtime.draws(ask, requests, runtime.thread.max_weight, timeout)
    ordered = iter([*known, *new])
    over: list[SequenceHandle] = []
    for result, part in zip(found, parts, strict=True):
        answered, moved = _Answered(part.contexts, part.handle), 0
        lengths = part.contexts.lengths.tolist()
        of_part = zip(islice(ordered, len(part)), _each(result), lengths, strict=True)
        for number, (question, answer, length) in enumerate(of_part):
            question.answer = answer
            context, before = question.context, question.place
            if question.block is not None:  # the context follows once its caller goes on
                question.answer = answer[: len(question.block)]
                question.after = answered, number, length
                moved += 1
            elif context._place is before:
                context._place = (answered, number, length)
                del context._tail[: question.added]
                moved += 1
                if (left := before[0]) is not None:
                    left.extended_by -= 1
                    # An engine frees the others of these sequences unless some were idle.
                    if not left.extended_by and (left.handle.idle or question.words is not None):
                        over.append(left.handle)
        answered.extended_by = moved
        if not moved:
            over.append(answered.handle)
    if over:
        runtime.give_back(over)


def _each(found: list[torch.Tensor] | BatchDraw) -> Iterable[torch.Tensor | Draw]:
    """Return the rows or the draws of a request one by one."""
    if not isinstance(found, BatchDraw):
        return found
    columns = zip(*[each.tolist() for each in found], strict=True)
    return map(Draw.of, columns, repeat(found.weights_version))


def _extensions(known: list[_Question]) -> tuple[list[_Question], Contexts, Origins | None]:
    """Return questions about sequences that each extend an answered one, by a token or by tokens with a
    block, in the order of these, with the sequences and their origins."""
    different = {each.context: each for each in known}.values()  # one may have asked twice
    asked = Counter(cast("list[_Answered]", [each.place[0] for each in different]))
    several = [*asked]
    for each, count in asked.items():  # contexts that do not ask now keep their sequences
        each.handle.idle = each.extended_by - count
    numbers = np.array([each.place[1] for each in known])
    if len(several) > 1:
        counts = np.array([each.handle.count for each in several])
        starts = dict(zip(several, counts.cumsum() - counts, strict=True))
        numbers += [starts[cast("_Answered", each.place[0])] for each in known]
    if (np.diff(numbers) < 0).any():
        order = np.argsort(numbers, kind="stable")
        numbers, known = numbers[order], [known[place] for place in order.tolist()]
    handles = tuple(each.handle for each in several)
    if known[0].block is None:
        tokens = np.array([each.token for each in known], np.uint32)
        contexts = Contexts.grown([each.contexts for each in several], numbers, tokens)
        return known, contexts, Origins(handles, numbers, contexts.lengths - 1).needed()
    contexts = Contexts.of([cast("Any", each.words) for each in known])
    lengths = np.array([each.place[2] for each in known])
    return known, contexts, Origins(handles, numbers, lengths).needed()
