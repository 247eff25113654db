"""A generated text as predicates and potentials see it: its tokens, its bytes, and whether it is over."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Potential", "Predicate", "Text"]


@dataclass(frozen=True, slots=True)
class Text:
    """What was generated so far, without the prompt and without the end token.

    Attributes:
        token_ids: the generated tokens.
        bytes: what they say; it may break off inside a character.
        finished: whether the text is over. If not, it is a prefix of what is to come.
    """

    token_ids: tuple[int, ...] = ()
    bytes: bytes = b""
    finished: bool = False

    def __str__(self) -> str:
        """The text as UTF-8, with U+FFFD for what is not, and without the bytes of a last character that
        is not whole yet."""
        return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(
            self.bytes, final=self.finished
        )


Predicate: TypeAlias = Callable[[Text], bool | Awaitable[bool]]
"""Whether a text is wanted: of a finished one, whether it is; of a prefix, whether it may become so."""

Potential: TypeAlias = Callable[[Text], float | Awaitable[float]]
"""A log-weight of a text: a finite number, or -inf to rule it out."""
