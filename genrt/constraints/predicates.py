"""Makes a constraint from any predicate on texts, which is checked token by token."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from genrt.constraints.protocols import (
    Constraint,
    HasTokens,
    PackedState,
    check_positive,
    tokens_of,
)
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.numbers import displayed
from genrt.runtime.concurrency import ConcurrentCalls
from genrt.structures.matching import Tokens, Words
from genrt.tokens.texts import Predicate, Text
from genrt.tokens.vocabulary import checked_token_id


def predicate(
    function: Predicate, lm: HasTokens, *, name: str | None = None, max_concurrent: int = 64
) -> Constraint:
    """Return the constraint of the texts that ``function`` accepts.

    For a prefix, the function answers "may this continue to a wanted text?"; for a finished text, "is
    this wanted?". If it refuses a prefix, it must refuse every text that starts with it. The empty prefix
    is never checked.

    A coroutine function is awaited on the event loop that checks, with at most ``max_concurrent`` calls
    at once on each loop. Any other function is called in threads, for up to ``max_concurrent`` checks at
    once; use 1 if it is not thread-safe. A state checks no token twice. ``check`` raises the function's
    exceptions. A cancelled ``check`` makes no further call; a call under way in a thread runs to its end.

    Raises:
        InvalidConstraint: ``function`` is not callable, ``max_concurrent`` is under 1, or there is no end
            token.
    """
    if not callable(function):
        raise InvalidConstraint(
            f"the predicate is {displayed(function)}: give a function of a Text"
        )
    check_positive("max_concurrent", max_concurrent)
    if name is not None and not isinstance(name, str):
        raise InvalidConstraint(f"the predicate's name is {displayed(name)}: give it as str")
    name = name or str(getattr(function, "__qualname__", None) or repr(function))
    return _Predicate(function, tokens_of(lm), name, max_concurrent)


class _Predicate:
    """The constraint."""

    def __init__(self, function: Predicate, tokens: Tokens, name: str, max_concurrent: int) -> None:
        self.tokens = tokens
        self.name = name
        self._made_of = function, tokens, name, max_concurrent
        self.asked = ConcurrentCalls(function, max_concurrent)
        self._start = PredicateState(self, (), b"")

    def start(self) -> PredicateState:
        return self._start

    def __reduce__(self) -> tuple[Any, ...]:
        return _Predicate, self._made_of

    def __repr__(self) -> str:
        return f"<constraint: predicate {self.name}>"

    def judged(self, answer: object) -> bool:
        """Return the function's answer as a bool. Raises InvalidRequest if it is not True or False."""
        if not isinstance(answer, bool | np.bool_):
            raise InvalidRequest(
                f"the predicate {self.name} said {answer!r} of a text: return True or False"
            )
        return bool(answer)


class PredicateState(PackedState):
    """A text, with the predicate's answers about the texts that are one token longer."""

    __slots__ = ("_answers", "_asking", "_bytes", "_of", "_token_ids", "_turns")

    def __init__(self, of: _Predicate, token_ids: tuple[int, ...], data: bytes) -> None:
        super().__init__(len(of.tokens))
        self._of = of
        self._token_ids = token_ids
        self._bytes = data
        self._answers: dict[int, bool] = {}
        # Tokens under check, each with a future that is done when the check has ended.
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
                    texts = {token_id: self._text(token_id) for token_id in mine}
                    await self._of.asked.about(texts, self._keep)
                finally:
                    with self._asking:
                        for token_id in mine:
                            del self._turns[token_id]
                    turn.set_result(None)
            if others:
                # If another check is cancelled, the next round here checks its tokens.
                await asyncio.wait([asyncio.wrap_future(other) for other in others])
            else:
                break
        return [self._answers.get(token_id, False) for token_id in asked]

    def _keep(self, token_id: int, answer: object) -> None:
        self._answers[token_id] = self._of.judged(answer)

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
