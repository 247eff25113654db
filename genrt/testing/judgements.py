"""Predicates and potentials for tests: deterministic, and showing in a message what they are."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from genrt.tokens.texts import Text

__all__ = [
    "Judgement",
    "always",
    "asynchronous",
    "at_most_tokens",
    "containing",
    "even_when_finished",
    "hashed",
    "never",
    "never_finished",
    "tabled",
    "without",
]


class Judgement:
    """A function of a text that is named for what it does."""

    def __init__(self, name: str, function: Callable[[Text], Any]) -> None:
        self.name = name
        self.function = function

    def __call__(self, text: Text) -> Any:
        return self.function(text)

    def __repr__(self) -> str:
        return self.name


class _Asynchronous(Judgement):
    """A judgement that is to be awaited."""

    async def __call__(self, text: Text) -> Any:
        await asyncio.sleep(0)
        return self.function(text)


def asynchronous(judgement: Judgement) -> Judgement:
    """Return the same judgement as a coroutine function."""
    return _Asynchronous(f"asynchronous({judgement})", judgement.function)


def always() -> Judgement:
    """Return the predicate of every text."""
    return Judgement("always()", lambda text: True)


def never() -> Judgement:
    """Return the predicate of no text, which refuses every prefix."""
    return Judgement("never()", lambda text: False)


def never_finished() -> Judgement:
    """Return the predicate of no text, which refuses only what is finished."""
    return Judgement("never_finished()", lambda text: not text.finished)


def even_when_finished() -> Judgement:
    """Return the predicate of texts of an even number of bytes."""
    return Judgement(
        "even_when_finished()", lambda text: not text.finished or len(text.bytes) % 2 == 0
    )


def at_most_tokens(most: int) -> Judgement:
    """Return the predicate of texts of at most this many tokens: bytes alone do not decide it."""
    return Judgement(f"at_most_tokens({most})", lambda text: len(text.token_ids) <= most)


def without(part: str) -> Judgement:
    """Return the predicate of texts without this part."""
    return Judgement(f"without({part!r})", lambda text: part.encode() not in text.bytes)


def containing(part: str) -> Judgement:
    """Return the predicate of texts with this part."""
    return Judgement(
        f"containing({part!r})", lambda text: not text.finished or part.encode() in text.bytes
    )


def hashed(divisor: int) -> Judgement:
    """Return the predicate of one in ``divisor`` texts, chosen by a hash."""
    return Judgement(
        f"hashed({divisor})",
        lambda text: not text.finished or zlib.crc32(text.bytes) % divisor == 0,
    )


def tabled(*log_weights: float) -> Judgement:
    """Return the potential that gives a text one of these, by its bytes and not by its tokens."""
    return Judgement(
        f"tabled({', '.join(map(str, log_weights))})",
        lambda text: log_weights[zlib.crc32(text.bytes) % len(log_weights)],
    )
