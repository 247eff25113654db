"""Predicates and potentials for tests: deterministic functions with a readable ``repr``."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from genrt.tokens.texts import Text

__all__ = ["Asynchronous", "Judgement"]

_RULES: dict[str, Callable[..., Any]] = {
    "always": lambda text: True,
    "never": lambda text: False,
    # Refuses no prefix, so a text fails only at its end.
    "never_finished": lambda text: not text.finished,
    "even_when_finished": lambda text: not text.finished or len(text.bytes) % 2 == 0,
    # Does not depend on bytes alone.
    "at_most_tokens": lambda text, most: len(text.token_ids) <= most,
    "without": lambda text, part: part.encode() not in text.bytes,
    "containing": lambda text, part: not text.finished or part.encode() in text.bytes,
    "hashed": lambda text, divisor: not text.finished or zlib.crc32(text.bytes) % divisor == 0,
    # A potential: one of these log-weights, selected by the text's bytes and not by its tokens.
    "tabled": lambda text, *weights: weights[zlib.crc32(text.bytes) % len(weights)],
}


class Judgement:
    """A function of a text: a rule's name and its further arguments."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name = name
        self.arguments = arguments

    def __call__(self, text: Text) -> Any:
        return _RULES[self.name](text, *self.arguments)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


class Asynchronous:
    """The same judgement as a coroutine function."""

    def __init__(self, judgement: Judgement) -> None:
        self.judgement = judgement

    async def __call__(self, text: Text) -> Any:
        await asyncio.sleep(0)
        return self.judgement(text)

    def __repr__(self) -> str:
        return f"asynchronous({self.judgement})"
