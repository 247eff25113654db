"""Makes a constraint from a finite set of texts."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from genrt.constraints.protocols import MaskedConstraint
from genrt.constraints.tokens import PackedState, tokens_of
from genrt.errors import InvalidConstraint
from genrt.numbers import displayed
from genrt.structures.tokens import Tokens, Words, packed

if TYPE_CHECKING:
    from genrt.lm import AsyncLM


def strings(texts: Iterable[str], lm: AsyncLM) -> MaskedConstraint:
    """Return the constraint of exactly these texts, in any order. One may be a prefix of another, or
    empty.

    A mask costs one look-up for each prefix that the remaining texts and the vocabulary's tokens share.
    The number of texts does not matter. A mask is computed once for all tokenizations of a text.

    Raises:
        InvalidConstraint: there are no texts, one is not a str or has lone surrogates, or there is no
            end token.
    """
    is_one = isinstance(texts, str | bytes) or getattr(texts, "ndim", 1) == 0
    if is_one or not isinstance(texts, Iterable):
        raise InvalidConstraint(f"the texts are {displayed(texts)}: give a list of str")
    encoded = sorted({_utf8(text) for text in texts})
    if not encoded:
        raise InvalidConstraint("there are no texts: give at least one, '' for the empty text")
    return _Strings(encoded, tokens_of(lm))


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidConstraint(f"one of the texts is {displayed(text)}: give each as str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidConstraint(
            f"the text {displayed(text)} holds a lone surrogate: remove it"
        ) from error


class _Strings:
    """The constraint: sorted texts, so that texts with a common prefix are neighbors.

    A state is a range of texts and the length of the prefix that they share.
    """

    def __init__(self, texts: list[bytes], tokens: Tokens) -> None:
        self.texts = texts
        self.tokens = tokens
        self._states: weakref.WeakValueDictionary[tuple[int, int, int], _StringState] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.Lock()

    def start(self) -> _StringState:
        return self.state(0, len(self.texts), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Strings, (self.texts, self.tokens)

    def __repr__(self) -> str:
        shown = ", ".join(repr(text.decode()) for text in self.texts[:3])
        more = f", … {len(self.texts)} in all" if len(self.texts) > 3 else ""
        return f"<constraint: strings {shown}{more}>"

    def state(self, first: int, end: int, length: int) -> _StringState:
        """Return the state of that range; all holders share one object."""
        with self._lock:
            return self._states.setdefault(
                (first, end, length), _StringState(self, first, end, length)
            )


class _StringState(PackedState):
    """The texts ``first .. end - 1``. Their common first ``length`` bytes are the text so far."""

    __slots__ = ("_end", "_first", "_length", "_of")

    def __init__(self, of: _Strings, first: int, end: int, length: int) -> None:
        super().__init__(len(of.tokens))
        self._of = of
        self._first = first
        self._end = end
        self._length = length

    @property
    def accepting(self) -> bool:
        return len(self._of.texts[self._first]) == self._length

    def _computed(self) -> Words:
        """Return the mask by a walk over the trie of the texts' continuations, as far as tokens reach."""
        tokens, texts = self._of.tokens, self._of.texts
        mask = np.zeros(len(tokens), dtype=np.bool_)
        mask[tokens.eos_token_id] = self.accepting
        # Each entry: a range of texts, a range of tokens, and the number of token bytes that they share.
        spelt, spellings = tokens.spelt
        ranges = [(self._first, self._end, 0, len(spellings), 0)]
        while ranges:
            first, end, start, stop, shared = ranges.pop()
            here = start
            while here < stop and len(spellings[here]) == shared:
                here += 1
            if shared:
                mask[spelt[start:here]] = True
            depth = self._length + shared
            if len(texts[first]) == depth:
                first += 1
            while first < end and here < stop:
                byte = texts[first][depth]
                after = bisect_right(texts, byte, first, end, key=lambda text: text[depth])
                low = bisect_left(spellings, byte, here, stop, key=lambda token: token[shared])
                high = bisect_right(spellings, byte, low, stop, key=lambda token: token[shared])
                if low < high:
                    ranges.append((first, after, low, high, shared + 1))
                first, here = after, high
        return packed(mask)

    def _after(self, token_id: int) -> _StringState:
        tokens, texts = self._of.tokens, self._of.texts
        token = tokens.text(token_id)
        length = self._length + len(token)
        text = texts[self._first][: self._length] + token
        first = bisect_left(texts, text, self._first, self._end)
        end = bisect_right(texts, text, first, self._end, key=lambda other: other[:length])
        if first == end or not tokens.is_open(token_id):
            raise tokens.refused(token_id)
        return self._of.state(first, end, length)
