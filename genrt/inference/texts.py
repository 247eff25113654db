"""A text as it grows, and the ways in which it ends: by tokens, by strings, or without either."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias, cast

from genrt.errors import InvalidRequest
from genrt.inference.model import Trace
from genrt.numbers import displayed, is_truth_value
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
        """Return the start of the first string in ``data``, if it ends in the last ``new`` bytes, else
        ``None``."""
        before = len(data) - new + 1
        places = [data.find(each, max(0, before - len(each))) for each in self.strings]
        return min((place for place in places if place >= 0), default=None)


def parse_stop(stop: Any, *, eos_token_id: int | None, vocab_size: int) -> Ends:
    """Read ``stop=``. Raises InvalidRequest if it is empty, or has something of another type or an id out
    of range in it."""
    if stop is None:
        return Ends(frozenset(), (), True)
    given = [stop] if isinstance(stop, str | EndToken) or hasattr(stop, "__index__") else stop
    is_other = isinstance(given, bytes | bytearray | Mapping)
    if is_other or not isinstance(given, Collection) or not given:
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
            if is_truth_value(each) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"stop has {displayed(each)} in it: give strings that are not empty, or token ids "
                    f"from 0 to {vocab_size - 1}"
                )
            token_ids.add(token_id)
    return Ends(frozenset(token_ids), tuple(strings), False)


class TextTrace(Trace):
    """One text as it grows. Its tokens are joined at the first access. A copy or a pickle has no place in
    a population; the runtime looks its sequence up by its tokens. With a constraint there is no pickle,
    because the constraint's state belongs to a runtime.

    Attributes:
        count: the number of the text's tokens.
        data: the bytes of the last unit.
        constraint_state: the constraint's state after it, ``None`` without a constraint.
        populations: a list with the step's populations of all texts, until the next step takes them; so
            a history of traces holds no population. ``None`` if unknown.
        place: its place in them.
        prompt: the token ids before the text, ``None`` for the laws' own prompts.
    """

    __slots__ = ("_text", "constraint_state", "count", "data", "place", "populations", "prompt")

    before: TextTrace | None
    constraint_state: Any
    populations: list[list[Population]] | None
    prompt: tuple[int, ...] | None

    def __init__(
        self,
        before: TextTrace | None = None,
        tokens: tuple[int, ...] = (),
        data: bytes = b"",
        *,
        constraint_state: Any = None,
        log_weight: float = 0.0,
        log_proposal: float = 0.0,
        finished: bool = False,
        is_end: bool = False,
        text: Text | None = None,
        prompt: tuple[int, ...] | None = None,
    ) -> None:
        """
        Args:
            tokens: drawn after ``before``; if ``is_end``, the last one ends the text.
            text: the text, if it is not that of ``before`` and ``tokens``.
            prompt: of a text without ``before``.
        """
        super().__init__(before, tokens, log_weight, log_proposal, finished=finished)
        self.data, self.constraint_state, self._text = data, constraint_state, text
        self.populations, self.place = None, 0
        if before is None:
            self.count, self.prompt = 0, prompt
            self._text = Text() if text is None else text
        else:
            self.log_twist, self.prompt = before.log_twist, before.prompt
            self.count = before.count + len(tokens) - is_end
        if self._text is not None:
            self.count = len(self._text.token_ids)

    @property
    def generated(self) -> Text:
        """The text, without the prompt and without the end token."""
        after, trace = list[TextTrace](), self
        while trace._text is None:
            after.append(trace)
            trace = cast("TextTrace", trace.before)
        begun = trace._text
        if after:
            after.reverse()
            drawn = [token for each in after for token in each.tokens]
            token_ids = (*begun.token_ids, *drawn)[: self.count]
            data = begun.bytes + b"".join([each.data for each in after])
            begun = self._text = Text(token_ids, data, self.finished)
        return begun

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, without the end token."""
        return self.generated.token_ids

    def _parts(self) -> dict[str, Any]:
        parts = super()._parts() | {"populations": None, "place": 0}
        if not self.finished and self.before is not None:
            parts["_text"] = None  # only a finished text may differ from its tokens
        return parts

    def __repr__(self) -> str:
        return f"TextTrace({self.generated!r})"
