"""Reads a runtime's tokens, and implements states with packed masks."""

from __future__ import annotations

import copyreg
import threading
import weakref
from typing import TYPE_CHECKING, Self

from torch import Tensor

from genrt.constraints.protocols import State
from genrt.errors import InvalidConstraint
from genrt.numbers import displayed
from genrt.structures.tokens import Tokens, Words, packed, unpacked
from genrt.tokens.vocabulary import checked_token_id

if TYPE_CHECKING:
    from genrt.lm import AsyncLM


def tokens_of(lm: AsyncLM) -> Tokens:
    """Return the tokens of a runtime, cached after the first call.

    Raises:
        InvalidConstraint: not a runtime, or its tokenizer has no end token.
    """
    if not (hasattr(lm, "tokenizer") and hasattr(lm, "byte_vocab")):
        raise InvalidConstraint(
            f"the lm is {displayed(lm)}: give a runtime, as genrt.load returns it"
        )
    tokens = _tokens.get(lm)
    if tokens is None:
        tokens = _tokens.setdefault(lm, Tokens.read(lm.tokenizer, lm.byte_vocab))
    return tokens


def lm_of(tokens: Tokens) -> AsyncLM:
    """Return the runtime that ``tokens_of`` read these tokens from. Raises InvalidConstraint if it no
    longer exists."""
    for held in _tokens.keyrefs():  # a copy, because other threads may add runtimes meanwhile
        if (lm := held()) is not None and _tokens.get(lm) is tokens:
            return lm
    raise InvalidConstraint("the runtime whose tokens these are is gone: keep it")


_tokens: weakref.WeakKeyDictionary[AsyncLM, Tokens] = weakref.WeakKeyDictionary()

# In another process, an unpickled constraint uses the tokens of the runtime there.
copyreg.pickle(Tokens, lambda tokens: (tokens_of, (lm_of(tokens),)))


class PackedState:
    """The base of genrt's own states.

    The mask is computed once, in packed form. Next states are shared as long as they are referenced, so
    particles with equal texts share a state and its cached results.

    ``words`` is the mask once it is computed; do not write to it.
    """

    __slots__ = ("__weakref__", "_children", "_lock", "vocab_size", "words")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.words: Words | None = None
        self._lock = threading.Lock()
        # No WeakValueDictionary, because one for each state costs more than the state.
        self._children: dict[int, weakref.ref[Self]] = {}

    def packed(self) -> Words:
        """Return ``mask()`` as words, computed by the first call."""
        if self.words is None:
            self.words = self._computed()
        return self.words

    def mask(self) -> Tensor:
        return unpacked(self.packed(), self.vocab_size)

    def advance(self, token_id: int) -> Self:
        index = checked_token_id(token_id, self.vocab_size)
        with self._lock:
            known = self._children.get(index)
            state = None if known is None else known()
            if state is None:
                state = self._after(index)
                self._children[index] = weakref.ref(state)
            return state

    # No ABC: its ``isinstance`` would be ten times as slow, and it runs several times per state and step.

    def _computed(self) -> Words:
        raise NotImplementedError

    def _after(self, token_id: int) -> Self:
        raise NotImplementedError


def words_of(state: State) -> tuple[Words, int]:
    """Return a state's mask as words, and its number of tokens."""
    if isinstance(state, PackedState):
        return state.packed(), state.vocab_size
    mask = state.mask().cpu().numpy()
    return packed(mask), len(mask)
