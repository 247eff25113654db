"""A runtime's tokens, and states whose masks are packed."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from torch import Tensor

from genrt.constraints.protocols import State
from genrt.errors import InvalidConstraint
from genrt.structures.tokens import Tokens, Words, packed, unpacked
from genrt.tokens.vocabulary import checked_token_id

if TYPE_CHECKING:
    from genrt.lm import AsyncLM


def tokens_of(lm: AsyncLM) -> Tokens:
    """Return the tokens of a runtime, read once.

    Raises:
        InvalidConstraint: not a runtime, or its tokenizer names no end token.
    """
    if not (hasattr(lm, "tokenizer") and hasattr(lm, "byte_vocab")):
        raise InvalidConstraint(f"the lm is {lm!r}: give a runtime, as genrt.load returns it")
    tokens = _tokens.get(lm)
    if tokens is None:
        tokens = _tokens.setdefault(lm, Tokens.read(lm.tokenizer, lm.byte_vocab))
    return tokens


_tokens: weakref.WeakKeyDictionary[AsyncLM, Tokens] = weakref.WeakKeyDictionary()


class PackedState(ABC):
    """The base of genrt's own states: with a mask that is computed once, in packed form, and next states
    that live as long as anyone holds them. So particles with equal texts share a state, and with it all
    that is computed for it.

    ``words`` is the mask once that is computed; it must not be written to.
    """

    __slots__ = ("__weakref__", "_children", "_lock", "vocab_size", "words")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.words: Words | None = None
        self._lock = threading.Lock()
        self._children: weakref.WeakValueDictionary[int, Self] = weakref.WeakValueDictionary()

    def packed(self) -> Words:
        """Return ``mask()`` as words, computed at the first call."""
        if self.words is None:
            self.words = self._computed()
        return self.words

    def mask(self) -> Tensor:
        return unpacked(self.packed(), self.vocab_size)

    def advance(self, token_id: int) -> Self:
        index = checked_token_id(token_id, self.vocab_size)
        with self._lock:
            state = self._children.get(index)
            if state is None:
                state = self._children[index] = self._after(index)
            return state

    @abstractmethod
    def _computed(self) -> Words: ...

    @abstractmethod
    def _after(self, token_id: int) -> Self: ...


def words_of(state: State) -> tuple[Words, int]:
    """Return a state's mask as words, and its number of tokens."""
    if isinstance(state, PackedState):
        return state.packed(), state.vocab_size
    mask = state.mask().cpu().numpy()
    return packed(mask), len(mask)
