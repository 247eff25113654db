"""One runtime's tokens as constraints see them, and masks over them, packed."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.tokens.vocabulary import special_token_ids

if TYPE_CHECKING:
    from genrt.lm import AsyncLM


# Masks are made with NumPy: torch would start its own team of threads in every thread that asks.
Words: TypeAlias = NDArray[np.int32]
"""A packed mask: token ``i`` is bit ``i % 32`` of word ``i // 32``; the other bits are 0."""


class PackedState(Protocol):
    """A state that has its mask in packed form; the array that ``packed`` returns must not be written
    to."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the mask."""
        ...

    def packed(self) -> Words:
        """Return ``mask()`` as words, computed at the first call."""
        ...


class Masked(Protocol):
    """Anything with a mask: states of both kinds."""

    def mask(self) -> Tensor:
        """Return a mask, bool ``[vocab_size]``."""
        ...


class Tokens:
    """The tokens of a vocabulary: their bytes, the end token, and which ones stand for text.

    Attributes:
        byte_vocab: each token's bytes.
        special: the tokens that stand for no text, the end token among them.
        open: the packed mask of the tokens that stand for text, and of the end token.
    """

    def __init__(self, byte_vocab: Sequence[bytes], eos_token_id: int, special: frozenset[int]):
        self.byte_vocab = tuple(byte_vocab)
        self.eos_token_id = eos_token_id
        self.special = special | {eos_token_id}
        allowed = np.array([bool(token) for token in self.byte_vocab], dtype=np.bool_)
        allowed[[token_id for token_id in self.special if token_id < len(allowed)]] = False
        allowed[eos_token_id] = True
        self.open: Words = packed(allowed)

    @staticmethod
    def of(lm: AsyncLM) -> Tokens:
        """Return the tokens of a runtime, read once.

        Raises:
            InvalidConstraint: not a runtime, or its tokenizer names no end token.
        """
        if not (hasattr(lm, "tokenizer") and hasattr(lm, "byte_vocab")):
            raise InvalidConstraint(f"the lm is {lm!r}: give a runtime, as genrt.load returns it")
        tokens = _tokens.get(lm)
        if tokens is None:
            eos_token_id = getattr(lm.tokenizer, "eos_token_id", None)
            if eos_token_id is None:
                raise InvalidConstraint(
                    "a constraint ends texts with the end token, and the model's tokenizer names none: "
                    "set its eos_token_id"
                )
            tokens = Tokens(lm.byte_vocab, eos_token_id, special_token_ids(lm.tokenizer))
            tokens = _tokens.setdefault(lm, tokens)
        return tokens

    def __len__(self) -> int:
        return len(self.byte_vocab)

    @cached_property
    def spelt(self) -> tuple[NDArray[np.int64], list[bytes]]:
        """The tokens that stand for text, in the order of their bytes, and these bytes."""
        token_ids = [i for i in range(len(self)) if self.is_open(i) and i != self.eos_token_id]
        token_ids.sort(key=self.byte_vocab.__getitem__)
        return np.array(token_ids, np.int64), [self.byte_vocab[i] for i in token_ids]

    def same(self, other: Tokens) -> bool:
        """Tell whether a token id means the same in both."""
        return self is other or (self.byte_vocab, self.eos_token_id, self.special) == (
            other.byte_vocab,
            other.eos_token_id,
            other.special,
        )

    def checked(self, token_id: int) -> int:
        """Return the id. Raises InvalidRequest if it is not a token's."""
        return checked_token_id(token_id, len(self.byte_vocab))

    def is_open(self, token_id: int) -> bool:
        """Tell whether a token is in ``open``: it stands for text, or is the end token."""
        return bool(self.open[token_id // 32] >> (token_id % 32) & 1)

    def text(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text.

        Raises:
            InvalidRequest: not a token's id, or the end token's.
        """
        index = self.checked(token_id)
        if index == self.eos_token_id:
            raise InvalidRequest(
                f"token {index} is the end token: it ends the text, and nothing comes after it"
            )
        return self.byte_vocab[index]

    def refused(self, token_id: int) -> InvalidRequest:
        """Return the error for a token that may not follow."""
        return InvalidRequest(
            f"token {token_id} ({self.byte_vocab[token_id]!r}) may not follow here: "
            "advance only by tokens of the state's mask"
        )


_tokens: weakref.WeakKeyDictionary[AsyncLM, Tokens] = weakref.WeakKeyDictionary()

S = TypeVar("S")


class Children(Generic[S]):
    """A state's next states by token, for as long as anyone holds them: particles with equal texts share
    a state, and with it all that is computed for it."""

    __slots__ = ("_lock", "_states")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: weakref.WeakValueDictionary[int, S] = weakref.WeakValueDictionary()

    def get(self, token_id: int, make: Callable[[], S]) -> S:
        """Return the state that is there, or the one that ``make`` makes."""
        with self._lock:
            state = self._states.get(token_id)
            if state is None:
                state = self._states[token_id] = make()
            return state


def checked_token_id(token_id: int, vocab_size: int) -> int:
    """Return the id. Raises InvalidRequest if it is no integer, or out of range."""
    try:
        index = operator.index(token_id)
    except TypeError as error:
        raise InvalidRequest(f"{token_id!r} is not a token id: give an integer") from error
    if not 0 <= index < vocab_size:
        raise InvalidRequest(f"token id {index} is not in 0 .. {vocab_size - 1}")
    return index


def packed(mask: NDArray[np.bool_]) -> Words:
    """Pack bool ``[vocab_size]`` into words."""
    padded = np.zeros(-(-len(mask) // 32) * 32, dtype=np.bool_)
    padded[: len(mask)] = mask
    return np.packbits(padded, bitorder="little").view(np.int32)


def is_packed(state: object) -> TypeGuard[PackedState]:
    """Tell whether a state has a packed mask; ``isinstance`` with a protocol would take longer than the
    rest."""
    return hasattr(state, "packed") and hasattr(state, "vocab_size")


def words_of(state: Masked) -> tuple[Words, int]:
    """Return a state's mask as words, and its number of tokens."""
    if is_packed(state):
        return state.packed(), state.vocab_size
    mask = state.mask().cpu().numpy()
    return packed(mask), len(mask)


def unpacked(words: Words, vocab_size: int) -> Tensor:
    """Unpack words ``[..., n]`` into bool ``[..., vocab_size]``, in memory of its own."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(bits[..., :vocab_size]).view(np.bool_))
