"""A text as it grows, and how it ends: by tokens, by strings, or without either."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Self, TypeAlias, cast

from genrt.errors import InvalidRequest
from genrt.numbers import displayed
from genrt.populations import Population
from genrt.tokens.texts import Text
from genrt.tokens.vocabulary import checked_utf8


class EndToken(Enum):
    """The type of ``END_TOKEN``."""

    END_TOKEN = "the end token"

    def __repr__(self) -> str:
        return self.name


END_TOKEN: Literal[EndToken.END_TOKEN] = EndToken.END_TOKEN
"""The model's own end token, in ``stop=``."""

Stop: TypeAlias = EndToken | int | str | Collection[EndToken | int | str] | None
"""The ends of a text: the end token, token ids, strings, several of these, or ``None``."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The ways in which a text ends, as ``stop=`` gave them.

    Attributes:
        token_ids: any drawn one ends a text; the token is not part of the text.
        strings: a text ends before the first one that appears.
        never: ``stop=None``: a text ends where no token may follow.
    """

    token_ids: frozenset[int]
    strings: tuple[bytes, ...]
    never: bool

    def cut(self, data: bytes, new: int) -> int | None:
        """Return the start of the first string in ``data``, whose last ``new`` bytes are new; ``None``
        if there is no string."""
        before = len(data) - new + 1
        places = [data.find(each, max(0, before - len(each))) for each in self.strings]
        return min((place for place in places if place >= 0), default=None)


def parse_stop(stop: Any, *, eos_token_id: int | None, vocab_size: int) -> Ends:
    """Read ``stop=``. Raises InvalidRequest if it is empty, or has something of another type or an id out
    of range in it."""
    if stop is None:
        return Ends(frozenset(), (), True)
    given = [stop] if isinstance(stop, str | EndToken) or hasattr(stop, "__index__") else stop
    if isinstance(given, bytes) or not isinstance(given, Collection) or not given:
        raise InvalidRequest(
            f"stop is {displayed(stop)}: give strings, token ids, END_TOKEN, or several in a list; None "
            "if nothing is to end a text"
        )
    token_ids: set[int] = set()
    strings: list[bytes] = []
    for each in given:
        if each is END_TOKEN:
            token_ids |= set() if eos_token_id is None else {eos_token_id}
        elif isinstance(each, str) and each:
            strings.append(checked_utf8(each))
        else:
            try:
                token_id = operator.index(each)
            except (TypeError, RuntimeError):  # torch raises the latter
                token_id = -1
            if isinstance(each, bool) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"stop has {displayed(each)} in it: give strings that are not empty, or token ids "
                    f"from 0 to {vocab_size - 1}"
                )
            token_ids.add(token_id)
    return Ends(frozenset(token_ids), tuple(strings), False)


class Trail:
    """One text: its last token and its prefix, joined at the first access. The joined text replaces the
    prefix, so that no token is stored twice. A copy or a pickle has no frontier: the runtime looks it up
    by its tokens.

    Attributes:
        token_id: its last token, where it has a frontier.
        count: the number of its tokens.
        finished: true if the text is complete.
        frontier: a list with the population of all prefixes of its step before their last tokens, until
            the next step takes it; so a history of particles holds no population. ``None`` if unknown.
        number: its place in that population.
    """

    __slots__ = ("_before", "_data", "_text", "count", "finished", "frontier", "number", "token_id")

    def __init__(
        self,
        before: Trail,
        token_id: int,
        data: bytes,
        finished: bool,
        frontier: list[Population] | None = None,
        number: int = 0,
    ) -> None:
        """Add a token and its bytes to a text."""
        self._before: Trail | None = before
        self._data, self.token_id = data, token_id
        self._text: Text | None = None
        self.count: int = before.count + 1
        self.finished, self.frontier, self.number = finished, frontier, number

    @classmethod
    def of(cls, text: Text, frontier: list[Population] | None = None, number: int = 0) -> Self:
        """Return a joined text."""
        made = cls.__new__(cls)
        made._before, made._data, made._text = None, b"", text
        made.token_id = text.token_ids[-1] if text.token_ids else -1
        made.count, made.finished = len(text.token_ids), text.finished
        made.frontier, made.number = frontier, number
        return made

    @property
    def text(self) -> Text:
        """The text, joined at the first access."""
        trail, after = self, list[Trail]()
        # In this order: another thread drops the prefix once the text is set.
        while (before := trail._before) is not None and trail._text is None:
            after.append(trail)
            trail = before
        begun = cast("Text", trail._text)
        if not after:
            return begun
        after.reverse()
        token_ids = (*begun.token_ids, *[each.token_id for each in after])
        data = begun.bytes + b"".join([each._data for each in after])
        self._text = text = Text(token_ids, data, self.finished)
        self._before = None
        return text

    def ended(self) -> Trail:
        """Return the same text, over."""
        text = self.text
        return Trail.of(Text(text.token_ids, text.bytes, finished=True))

    def __reduce__(self) -> tuple[object, tuple[Text]]:
        return Trail.of, (self.text,)

    def __repr__(self) -> str:
        return f"Trail({self.text!r})"
