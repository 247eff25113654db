"""Makes a potential from a constraint: 0 on its texts, -inf elsewhere."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from genrt.constraints.protocols import (
    Constraint,
    State,
    check_count,
    checked_constraint,
    is_checked,
)
from genrt.constraints.tokens import tokens_of
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.structures.tokens import Tokens
from genrt.tokens.texts import Potential, Text
from genrt.tokens.vocabulary import checked_token_id

if TYPE_CHECKING:
    from genrt.lm import AsyncLM


def potential(
    constraint: Constraint, *, lm: AsyncLM | None = None, cache_size: int = 1024
) -> Potential:
    """Return the constraint's indicator as a log-weight.

    It is 0 for a finished text of the set, and for an unfinished text that the masks lead to; otherwise
    it is -inf.

    The states of the last ``cache_size`` texts are cached. A cached text that has grown by a token costs
    one step; any other text costs one step for each token after its longest cached prefix. A predicate
    judges the text itself and not its prefixes.

    The potential is a plain function; for a constraint of checked states it returns an awaitable. It may
    be called from any thread or event loop. It raises InvalidRequest for an argument that is not a Text
    and for a token id out of range. Exceptions of a predicate pass through.

    Args:
        lm: needed for your own constraint with checked states, to know the end token.

    Raises:
        InvalidConstraint: not a constraint, ``cache_size`` is under 1, or ``lm`` is needed.
    """
    checked_constraint(constraint)
    check_count("cache_size", cache_size)
    tokens = getattr(constraint, "tokens", None) if lm is None else tokens_of(lm)
    start = constraint.start()
    if not is_checked(start):
        return _Indicator(constraint, start, tokens, cache_size)
    if tokens is None:
        raise InvalidConstraint(
            f"the end token of {constraint!r} is not known: give the lm that it is over"
        )
    return _AskedIndicator(constraint, start, tokens, cache_size)


class _States:
    """Caches the states that texts lead to; ``None`` for a text outside the set."""

    def __init__(
        self, constraint: Constraint, start: State, tokens: Tokens | None, cache_size: int
    ) -> None:
        self._constraint = constraint
        self._start = start
        self._tokens = tokens
        self._kept: LRUCache[tuple[int, ...], Any] = LRUCache(cache_size)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self._constraint, self._tokens, self._kept.maxsize)

    def __repr__(self) -> str:
        return f"<potential of {self._constraint!r}>"

    def token_ids(self, text: Text) -> tuple[int, ...]:
        """Return the text's tokens. Raises InvalidRequest if it is not a Text over these tokens."""
        if not isinstance(text, Text):
            raise InvalidRequest(f"a potential was given {text!r}: call it with a Text")
        if self._tokens is not None:
            for token_id in text.token_ids:
                checked_token_id(token_id, len(self._tokens))
        return text.token_ids

    def after(self, token_ids: tuple[int, ...]) -> Any:
        """Return the state after these tokens."""
        with self._lock:  # find the longest cached prefix
            kept = (i for i in range(len(token_ids), 0, -1) if token_ids[:i] in self._kept)
            length = next(kept, 0)
            state = self._kept[token_ids[:length]] if length else self._start
        for token_id in token_ids[length:]:
            if state is None:
                break
            try:
                state = state.advance(token_id)
            except InvalidRequest:
                state = None
        with self._lock:
            self._kept[token_ids] = state
        return state


def _again(
    kind: type[_States], constraint: Constraint, tokens: Tokens | None, cache_size: int
) -> _States:
    """Return an unpickled potential."""
    return kind(constraint, constraint.start(), tokens, cache_size)


class _Indicator(_States):
    """The potential of a constraint with masked states."""

    def __call__(self, text: Text) -> float:
        state = self.after(self.token_ids(text))
        is_in = state is not None and (not text.finished or state.accepting)
        return 0.0 if is_in else -math.inf


class _AskedIndicator(_States):
    """The potential of a constraint with checked states."""

    async def __call__(self, text: Text) -> float:
        token_ids = self.token_ids(text)
        if text.finished and self._tokens is not None:
            token_ids = (*token_ids, self._tokens.eos_token_id)
        if not token_ids:
            return 0.0
        state = await asyncio.to_thread(self.after, token_ids[:-1])
        is_in = state is not None and (await state.check(token_ids[-1:]))[0]
        return 0.0 if is_in else -math.inf
