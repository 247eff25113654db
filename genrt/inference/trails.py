"""A text as it grows: a last token and what comes before it, put together once somebody reads it.

Rule:
    What was read is kept, and what it was read from is given up, so that neither a long text nor a
    history of particles holds anything twice.
"""

from __future__ import annotations

from typing import Self, cast

from genrt.populations import Population
from genrt.tokens.texts import Text


class Frontier:
    """The population of one step, until another goes on from it: so a history of particles holds none."""

    __slots__ = ("_held",)

    def __init__(self, population: Population) -> None:
        self._held = [population]

    @property
    def population(self) -> Population | None:
        """The population, while it is there."""
        return self._held[0] if self._held else None

    def take(self) -> Population | None:
        """Return the population to one caller alone, of any thread."""
        try:
            return self._held.pop()
        except IndexError:
            return None


class Trail:
    """One text. A value: nobody sees it change. A copy of it, and a pickle, has no frontier: such a text
    is found by its tokens, as one is whose frontier has moved on.

    Attributes:
        token_id: its last token, where it has a frontier.
        count: how many tokens it has.
        finished: true if the text is over.
        frontier: the population that it was asked about in before its last token; ``None`` if unknown.
        number: which of the population's sequences it was.
    """

    __slots__ = ("_before", "_data", "_text", "count", "finished", "frontier", "number", "token_id")

    def __init__(
        self,
        before: Trail,
        token_id: int,
        data: bytes,
        finished: bool,
        frontier: Frontier | None = None,
        number: int = 0,
    ) -> None:
        """Add a token and its bytes to a text."""
        self._before: Trail | None = before
        self._data, self.token_id = data, token_id
        self._text: Text | None = None
        self.count: int = before.count + 1
        self.finished, self.frontier, self.number = finished, frontier, number

    @classmethod
    def of(cls, text: Text, frontier: Frontier | None = None, number: int = 0) -> Self:
        """Return a text that is all there."""
        made = cls.__new__(cls)
        made._before, made._data, made._text = None, b"", text
        made.token_id = text.token_ids[-1] if text.token_ids else -1
        made.count, made.finished = len(text.token_ids), text.finished
        made.frontier, made.number = frontier, number
        return made

    @property
    def text(self) -> Text:
        """The text, put together at the first look."""
        trail, after = self, list[Trail]()
        # In this order: another thread drops what is before once the text is there.
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
