"""Any predicate on texts as a constraint, asked token by token."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import weakref
from collections.abc import Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from genrt.constraints.protocols import Constraint
from genrt.constraints.together import together
from genrt.constraints.tokens import PackedState, Tokens, Words
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.tokens.texts import Predicate, Text
from genrt.tokens.vocabulary import checked_token_id

if TYPE_CHECKING:
    from genrt.lm import AsyncLM


def predicate(
    function: Predicate, lm: AsyncLM, *, name: str | None = None, max_concurrent: int = 64
) -> Constraint:
    """Return the constraint of the texts that ``function`` accepts.

    It is asked "may this go on to a wanted text?" about a prefix, and "is this wanted?" about a finished
    text. If it refuses a prefix it has to refuse every text that begins with it: in the set are the texts
    that are wanted and of which no prefix is refused. It is not asked about the empty prefix.

    A coroutine function is awaited on the event loop that checks, ``max_concurrent`` calls at once on
    each loop. Any other function is called in threads, the tokens of one ``check`` one after the other,
    and up to ``max_concurrent`` checks at once: give 1 if it is not safe to call from several. A state
    remembers its answers and asks about no token twice. ``check`` raises what the function raises. A
    cancelled ``check`` makes no further call; one under way in a thread ends by itself.

    Raises:
        InvalidConstraint: ``function`` can't be called, ``max_concurrent`` is under 1, or there is no end
            token.
    """
    if not callable(function):
        raise InvalidConstraint(f"the predicate is {function!r}: give a function of a Text")
    if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int):
        raise InvalidConstraint(f"max_concurrent is {max_concurrent!r}: give an integer")
    if max_concurrent < 1:
        raise InvalidConstraint(f"max_concurrent is {max_concurrent}: it is at least 1")
    if name is not None and not isinstance(name, str):
        raise InvalidConstraint(f"the predicate's name is {name!r}: give it as str")
    return _Asked(function, Tokens.of(lm), name or _name_of(function), max_concurrent)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


class _Asked:
    """The constraint: the function, and how many calls of it may be under way on a loop."""

    def __init__(self, function: Predicate, tokens: Tokens, name: str, max_concurrent: int) -> None:
        self.tokens = tokens
        self.name = name
        self._function = function
        # An object with an ``async def __call__`` is a coroutine function in all but name.
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self._max_concurrent = max_concurrent
        self._limits: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        self._start = PredicateState(self, (), b"")

    def start(self) -> PredicateState:
        return self._start

    def __repr__(self) -> str:
        return f"<constraint: predicate {self.name}>"

    async def ask(self, texts: Sequence[tuple[int, Text]], answers: dict[int, bool]) -> None:
        """Ask about texts, and write each answer under its number as soon as it arrives."""
        loop = asyncio.get_running_loop()
        with self._lock:
            limit = self._limits.get(loop)
            if limit is None:
                limit = self._limits[loop] = asyncio.Semaphore(self._max_concurrent)
        queue = iter(texts)
        if not self._is_async:
            stop = threading.Event()
            async with limit:
                try:
                    await self._finish(
                        await asyncio.to_thread(self._call, queue, answers, stop), answers
                    )
                finally:
                    stop.set()
        await together(
            [
                self._await(queue, answers, limit)
                for _ in range(min(self._max_concurrent, len(texts)))
            ]
        )

    def _call(
        self, queue: Iterator[tuple[int, Text]], answers: dict[int, bool], stop: threading.Event
    ) -> _Left:
        """Call a plain function about all texts; stop at an error, or if it returns something to be
        awaited."""
        for number, text in queue:
            if stop.is_set():
                break
            # An exception is handed over as a value: a future can't hold StopIteration.
            try:
                answer = self._function(text)
            except BaseException as error:
                return error
            if inspect.isawaitable(answer):
                self._is_async = True
                return number, answer
            try:
                answers[number] = self._judged(answer)
            except InvalidRequest as error:
                return error
        return None

    async def _finish(self, left: _Left, answers: dict[int, bool]) -> None:
        if isinstance(left, BaseException):
            raise left
        if left is not None:
            number, answer = left
            answers[number] = self._judged(await answer)

    async def _await(
        self,
        queue: Iterator[tuple[int, Text]],
        answers: dict[int, bool],
        limit: asyncio.Semaphore,
    ) -> None:
        """Take texts from the shared queue and await their answers, until the queue is empty."""
        for number, text in queue:
            async with limit:
                answer: Any = self._function(text)
                answers[number] = self._judged(
                    await answer if inspect.isawaitable(answer) else answer
                )

    def _judged(self, answer: Any) -> bool:
        if not isinstance(answer, bool | np.bool_):
            raise InvalidRequest(
                f"the predicate {self.name} said {answer!r} of a text: return True or False"
            )
        return bool(answer)


# Left to the event loop by a thread: an error to raise, or an answer to await.
_Left: TypeAlias = BaseException | tuple[int, Awaitable[Any]] | None


class PredicateState(PackedState):
    """A text, and the predicate's answers about the texts that are one token longer."""

    __slots__ = ("_answers", "_asking", "_bytes", "_of", "_token_ids", "_turns")

    def __init__(self, of: _Asked, token_ids: tuple[int, ...], data: bytes) -> None:
        super().__init__(len(of.tokens))
        self._of = of
        self._token_ids = token_ids
        self._bytes = data
        self._answers: dict[int, bool] = {}
        # Tokens being asked about, each with a future that is done when that check has ended.
        self._turns: dict[int, concurrent.futures.Future[None]] = {}
        self._asking = threading.Lock()

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        tokens = self._of.tokens
        asked = [checked_token_id(token_id, len(tokens)) for token_id in token_ids]
        wanted = [token_id for token_id in dict.fromkeys(asked) if tokens.is_open(token_id)]
        while True:
            turn: concurrent.futures.Future[None] = concurrent.futures.Future()
            with self._asking:
                missing = [token_id for token_id in wanted if token_id not in self._answers]
                others = {self._turns[token_id] for token_id in missing if token_id in self._turns}
                mine = [token_id for token_id in missing if token_id not in self._turns]
                self._turns.update(dict.fromkeys(mine, turn))
            if mine:
                try:
                    texts = [(token_id, self._text(token_id)) for token_id in mine]
                    await self._of.ask(texts, self._answers)
                finally:
                    with self._asking:
                        for token_id in mine:
                            del self._turns[token_id]
                    turn.set_result(None)
            if others:
                # If another check is cancelled, the next round here asks its tokens.
                await asyncio.wait([asyncio.wrap_future(other) for other in others])
            else:
                break
        return [self._answers.get(token_id, False) for token_id in asked]

    def _text(self, token_id: int) -> Text:
        if token_id == self._of.tokens.eos_token_id:
            return Text(self._token_ids, self._bytes, finished=True)
        return Text((*self._token_ids, token_id), self._bytes + self._of.tokens.text(token_id))

    def advance(self, token_id: int) -> Self:
        tokens = self._of.tokens
        tokens.text(token_id)
        if not self._answers.get(token_id, tokens.is_open(token_id)):
            raise tokens.refused(token_id)
        return super().advance(token_id)

    def _computed(self) -> Words:
        return self._of.tokens.open

    def _after(self, token_id: int) -> Self:
        data = self._bytes + self._of.tokens.byte_vocab[token_id]
        return type(self)(self._of, (*self._token_ids, token_id), data)
