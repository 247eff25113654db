"""A generated text as predicates and potentials see it: a str that knows its tokens and its bytes."""

from __future__ import annotations

import codecs
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from genrt.errors import InvalidRequest

__all__ = ["BatchPotential", "Potential", "Predicate", "Text", "batched", "decoded"]

Bytes: TypeAlias = bytes
"""``bytes``, for a class in which an attribute hides that name."""


class Text(str):
    """The generated text so far, without the prompt and without the end token.

    As a ``str`` it is the bytes as UTF-8, with U+FFFD for invalid ones; an unfinished text leaves out the
    bytes of an incomplete last character. String methods return plain ``str``.

    Two texts are equal if their tokens, their bytes and ``finished`` are; a text equals a plain string if
    it reads the same.

    Attributes:
        token_ids: the generated tokens.
        bytes: the bytes of the tokens; they may break off inside a character.
        finished: true if the text is over; otherwise it is a prefix of a longer one.
    """

    __slots__ = ("bytes", "finished", "token_ids")

    token_ids: tuple[int, ...]
    bytes: Bytes
    finished: bool

    def __new__(
        cls, token_ids: Sequence[int] = (), bytes: Bytes = b"", finished: bool = False
    ) -> Text:
        """Raise InvalidRequest if it is given as a string."""
        ids, data = cast("tuple[object, object]", (token_ids, bytes))
        if isinstance(ids, str) or isinstance(data, str):
            raise InvalidRequest(
                "a Text is made of token ids and bytes: Text(lm.encode(text), text.encode()); potentials "
                "and predicates that use no more than a str may be called with one"
            )
        self = super().__new__(cls, codecs.utf_8_decode(bytes, "replace", finished)[0])
        self.token_ids, self.bytes, self.finished = tuple(token_ids), bytes, finished
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Text):
            return self._key() == other._key()
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return f"Text({self.token_ids}, {self.bytes!r}, finished={self.finished})"

    def __reduce__(self) -> tuple[type[Text], tuple[tuple[int, ...], Bytes, bool]]:
        return Text, self._key()

    def _key(self) -> tuple[tuple[int, ...], Bytes, bool]:
        return self.token_ids, self.bytes, self.finished


def decoded(data: bytes) -> str:
    r"""Return the bytes as UTF-8, with U+FFFD and its number for every invalid byte: ``�\xff``. Different
    bytes make different strings: a U+FFFD of the text before ``\x`` is written byte by byte too."""
    text = data.decode(errors="surrogateescape")
    if "\ufffd\\x" in text:
        own = "".join(map(_escape, "\ufffd".encode()))
        text = re.sub(r"\ufffd(?=\\x)", lambda _: own, text)
    return re.sub("[\udc80-\udcff]", lambda found: _escape(ord(found[0]) - 0xDC00), text)


def _escape(byte: int) -> str:
    return f"\ufffd\\x{byte:02x}"


Predicate: TypeAlias = Callable[[Text], bool | Awaitable[bool]]
"""Tells whether a finished text is wanted, or whether a prefix may become a wanted text."""

Potential: TypeAlias = Callable[[Text], float | Awaitable[float]]
"""A log-weight of a text: a finite number, or -inf to rule it out."""


@dataclass(frozen=True, slots=True)
class BatchPotential:
    """A potential that judges several texts in one call, made by ``batched``."""

    function: Callable[[list[Text]], Any]

    def __call__(self, text: Text) -> float | Awaitable[float]:
        """Return the log-weight of one text, to be awaited from a coroutine function."""
        found = self.function([text])
        return self._first(found) if inspect.isawaitable(found) else float(found[0])

    async def _first(self, found: Awaitable[Any]) -> float:
        return float((await found)[0])


def batched(function: Callable[[list[Text]], Any]) -> BatchPotential:
    """Return a potential from a function of a list of texts, such as a reward model: a plain function, or
    a coroutine function, which returns a log-weight for each. All different texts of a step are one
    call."""
    return BatchPotential(function)
