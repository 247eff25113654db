"""llguidance's matchers: their limits, the meaning of their errors, and whether anything matches."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from genrt.errors import InvalidConstraint
from genrt.structures.tokens import Tokens

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
    """Return llguidance's form of a vocabulary.

    Raises:
        InvalidConstraint: a token is longer than llguidance can hold.
    """
    from llguidance import LLTokenizer

    longest = max(map(len, tokens.byte_vocab))
    if longest > _LONGEST_TOKEN:
        raise InvalidConstraint(
            f"the vocabulary has a token of {longest} bytes, and llguidance takes {_LONGEST_TOKEN} "
            "at most; use another model, or a constraint of your own"
        )
    return LLTokenizer(_Tokenizer(tokens), n_vocab=len(tokens))


class _Tokenizer:
    """The attributes and the call by which llguidance knows a tokenizer."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = list(tokens.byte_vocab)
        self.eos_token_id = tokens.eos_token_id
        self.special_token_ids = sorted(tokens.special)

    def __call__(self, text: str | bytes) -> list[int]:
        # Asked only for the tokens of forced text, which no_forcing turns off: masks would then
        # admit one tokenization alone.
        return []


def new_matcher(tokenizer: Any, lark: str) -> Any:
    """Return a matcher at the start of a grammar; one that does not compile is in an error state."""
    from llguidance import LLMatcher, LLParserLimits

    # The last options win, so they come after the text, whose lines so keep their numbers.
    grammar = LLMatcher.grammar_from_lark(f'{lark}\n%llguidance {{"no_forcing": true}}')
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def byte_matcher(lark: str) -> Any:
    """Return a matcher over bytes: token 0 is the end token, and ``1 + byte`` a byte."""
    return new_matcher(_bytes(), lark)


def matches_nothing(lark: str) -> bool:
    """Tell whether no text begins as the grammar wants: for a grammar of one terminal, whether that
    matches nothing at all. False for a grammar that does not compile."""
    matcher = byte_matcher(lark)
    return not matcher.is_error() and _is_dead(matcher)


def _is_dead(matcher: Any) -> bool:
    if matcher.is_accepting():
        return False
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return matcher.get_error().startswith("NoExtension") or not mask.any()


@cache
def first_characters(regex: str) -> frozenset[str]:
    """Return the ASCII characters with which texts of a regular expression in llguidance's dialect
    begin."""
    matcher = byte_matcher(f"start: /{regex}/")
    if matcher.is_error():
        raise InvalidConstraint(f"{regex} does not compile: {brief(matcher.get_error())}")
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    bits = np.unpackbits(mask, bitorder="little")
    return frozenset(chr(code) for code in range(128) if bits[1 + code])


def check_begins(lark: str) -> None:
    """Raise InvalidConstraint unless a grammar compiles and some text, of any bytes, begins as it wants;
    of a grammar that is too complex to tell too."""
    matcher = byte_matcher(lark)
    if matcher.is_error():
        raise InvalidConstraint(f"it does not compile: {brief(matcher.get_error())}")
    if _is_dead(matcher):
        raise InvalidConstraint("no text has this structure: change it")
    if matcher.is_error():
        raise InvalidConstraint(f"it is too complex, simplify it: {brief(matcher.get_error())}")


@cache
def _bytes() -> Any:
    byte_vocab = (b"<end>", *(bytes([i]) for i in range(256)))
    return new_tokenizer(Tokens(byte_vocab, 0, frozenset({0})))


def brief(error: str) -> str:
    """Return llguidance's message without its listing of the grammar and its internal state."""
    error = re.split(r"\n +\d+ \||\n<", error)[0].strip()
    if "grammar.symbols.len()" in error:
        error = "it has more than 65,000 rules, groups and terminals: make it smaller"
    return error
