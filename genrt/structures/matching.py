"""A vocabulary as llguidance reads it, packed masks over it, and matchers of grammars."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
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
        """Return the tokens of a tokenizer, with their bytes. Raises InvalidConstraint if it
        names no end token."""
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

    def is_open(self, token_id: int) -> bool:
        """Tell whether a token is in ``open``: it stands for text, or is the end token."""
        return has_bit(self.open, token_id)

    def text(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text. Raises InvalidRequest if it is not a
        token's id, or is the end token's."""
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
    """Unpack words ``[..., n]`` into a new tensor, bool ``[..., vocab_size]``."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(bits[..., :vocab_size]).view(np.bool_))


_LONGEST_TOKEN = 1024
"""In bytes; llguidance aborts on a vocabulary with longer tokens."""

_LIMITS: dict[str, Any] = {
    # Enough for large unambiguous grammars: an object of many properties, a choice of many words.
    "max_items_in_row": 200_000,
    # A mask takes some 0.1 s when it uses this up, and some 2 s when ambiguity uses up step_max_items.
    "step_lexer_fuel": 1_000_000,
    "verbose_errors": False,
}


def new_tokenizer(tokens: Tokens) -> Any:
    """Return llguidance's form of a vocabulary. Raises InvalidConstraint if a token is longer than
    llguidance can hold."""
    from llguidance import LLTokenizer

    longest = max(map(len, tokens.byte_vocab))
    if longest > _LONGEST_TOKEN:
        raise InvalidConstraint(
            f"the vocabulary has a token of {longest} bytes, and llguidance takes {_LONGEST_TOKEN} "
            "at most; use another model, or a constraint of your own"
        )
    return LLTokenizer(_Tokenizer(tokens), n_vocab=len(tokens))


class _Tokenizer:
    """The attributes and the call that llguidance expects of a tokenizer."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = list(tokens.byte_vocab)
        self.eos_token_id = tokens.eos_token_id
        self.special_token_ids = sorted(tokens.special)

    def __call__(self, text: str | bytes) -> list[int]:
        # llguidance calls this only to force text. no_forcing turns that off, because masks would then
        # admit one tokenization alone.
        return []


def new_matcher(tokenizer: Any, lark: str) -> Any:
    """Return a matcher at the start of a grammar; one that does not compile is in an error state."""
    from llguidance import LLMatcher, LLParserLimits

    # The last options win. They come after the text, so that line numbers in messages stay right.
    grammar = LLMatcher.grammar_from_lark(f'{lark}\n%llguidance {{"no_forcing": true}}')
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def byte_matcher(lark: str) -> Any:
    """Return a matcher over bytes: token 0 is the end token, and ``1 + byte`` a byte."""
    return new_matcher(_byte_tokenizer(), lark)


def _is_dead(matcher: Any) -> bool:
    if matcher.is_accepting():
        return False
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return matcher.get_error().startswith("NoExtension") or not mask.any()


def compile_error(name: str, error: str) -> InvalidConstraint:
    """Return the error of a grammar that llguidance does not compile."""
    problem = brief(error)
    is_whole = problem.startswith("the JSON schema")
    return InvalidConstraint(problem if is_whole else f"{name} does not compile: {problem}")


def check_begins(lark: str) -> None:
    """Raise InvalidConstraint if a grammar does not compile, if no text of any bytes begins as it wants,
    or if it is too complex to tell."""
    matcher = byte_matcher(lark)
    if matcher.is_error():
        raise compile_error("it", matcher.get_error())
    if _is_dead(matcher):
        raise InvalidConstraint("no text has this structure: change it")
    if matcher.is_error():
        raise InvalidConstraint(f"it is too complex, simplify it: {brief(matcher.get_error())}")


@cache
def _byte_tokenizer() -> Any:
    byte_vocab = (b"<end>", *(bytes([i]) for i in range(256)))
    return new_tokenizer(Tokens(byte_vocab, 0, frozenset({0})))


def brief(error: str) -> str:
    """Return llguidance's message without its listing of the grammar and its internal state."""
    error = re.split(r"\n +\d+ \||\n<", error)[0].strip()
    if "grammar.symbols.len()" in error:
        error = "it has more than 65,000 rules, groups and terminals: make it smaller"
    _, is_schema, problem = error.partition("failed to compile JSON schema: ")
    if not is_schema:
        return error
    if "nsatisfiable" in problem and "while processing" not in problem:
        return f"the JSON schema allows no value, change it: {problem}"
    if "oneOf" in problem:
        problem = (
            "a oneOf whose schemas may hold together (write anyOf, or give each a required property with "
            "another const)"
        )
    return (
        f"the JSON schema has what llguidance cannot compile: {problem}: take it out, and check it by a "
        "predicate: all_of(json_schema(…), predicate(…))"
    )
