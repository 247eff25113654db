"""A vocabulary's tokens as structures see them, and packed masks over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.tokens.vocabulary import checked_token_id, special_token_ids

# Masks are made with NumPy: torch would start its own team of threads in every thread that asks.
Words: TypeAlias = NDArray[np.int32]
"""A packed mask: token ``i`` is bit ``i % 32`` of word ``i // 32``; the other bits are 0."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a vocabulary; equal ones mean the same by a token id.

    Attributes:
        byte_vocab: each token's bytes.
        special: the tokens that stand for no text, the end token among them.
    """

    byte_vocab: tuple[bytes, ...]
    eos_token_id: int
    special: frozenset[int]

    @staticmethod
    def read(tokenizer: Any, byte_vocab: Iterable[bytes]) -> Tokens:
        """Return the tokens of a tokenizer, whose bytes are known.

        Raises:
            InvalidConstraint: it names no end token.
        """
        eos_token_id = getattr(tokenizer, "eos_token_id", None)
        if eos_token_id is None:
            raise InvalidConstraint(
                "a constraint ends texts with the end token, and the model's tokenizer names none: "
                "set its eos_token_id"
            )
        special = special_token_ids(tokenizer) | {eos_token_id}
        return Tokens(tuple(byte_vocab), eos_token_id, special)

    def __len__(self) -> int:
        return len(self.byte_vocab)

    @cached_property
    def open(self) -> Words:
        """The packed mask of the tokens that stand for text, and of the end token."""
        allowed = np.array([bool(token) for token in self.byte_vocab], dtype=np.bool_)
        allowed[[token_id for token_id in self.special if token_id < len(allowed)]] = False
        allowed[self.eos_token_id] = True
        return packed(allowed)

    @cached_property
    def spelt(self) -> tuple[NDArray[np.int64], list[bytes]]:
        """The tokens that stand for text, in the order of their bytes, and these bytes."""
        token_ids = [i for i, text in enumerate(self.texts) if text is not None]
        token_ids.sort(key=self.byte_vocab.__getitem__)
        return np.array(token_ids, np.int64), [self.byte_vocab[i] for i in token_ids]

    @cached_property
    def texts(self) -> list[bytes | None]:
        """The bytes that each token adds to a text; ``None`` for one that stands for no text."""
        texts = [token if self.is_open(i) else None for i, token in enumerate(self.byte_vocab)]
        return [*texts[: self.eos_token_id], None, *texts[self.eos_token_id + 1 :]]

    def is_open(self, token_id: int) -> bool:
        """Tell whether a token is in ``open``: it stands for text, or is the end token."""
        return has_bit(self.open, token_id)

    def text(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text.

        Raises:
            InvalidRequest: not a token's id, or the end token's.
        """
        index = checked_token_id(token_id, len(self))
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


def packed(mask: NDArray[np.bool_]) -> Words:
    """Pack bool ``[vocab_size]`` into words."""
    padded = np.zeros(-(-len(mask) // 32) * 32, dtype=np.bool_)
    padded[: len(mask)] = mask
    return np.packbits(padded, bitorder="little").view(np.int32)


def has_bit(words: Words, token_id: int) -> bool:
    """Tell whether a packed mask allows a token."""
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


def set_bits(words: Words, token_ids: Iterable[int], allowed: bool) -> None:
    """Allow tokens in a packed mask, or forbid them."""
    for token_id in token_ids:
        bit = np.uint32(1 << token_id % 32).view(np.int32)
        words[token_id // 32] = (
            words[token_id // 32] | bit if allowed else words[token_id // 32] & ~bit
        )


def unpacked(words: Words, vocab_size: int) -> Tensor:
    """Unpack words ``[..., n]`` into bool ``[..., vocab_size]``, in memory of its own."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(bits[..., :vocab_size]).view(np.bool_))
