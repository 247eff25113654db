"""A text as it grows: its last token and its prefix, joined when it is read. The joined text replaces the
prefix, so that no token is stored twice."""

from __future__ import annotations

from typing import Self, cast

from genrt.populations import Population
from genrt.tokens.texts import Text


class Frontier:
    """The population of one step, until the next step takes it; so a history of particles holds no
    population."""

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
    """One text. A value. A copy or a pickle has no frontier: the runtime looks it up by its tokens.

    Attributes:
        token_id: its last token, where it has a frontier.
        count: the number of its tokens.
        finished: true if the text is complete.
        frontier: the population of its prefix before its last token; ``None`` if unknown.
        number: its place in that population.
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
