"""llguidance's matchers: their limits, the meaning of their errors, and whether anything matches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from genrt.errors import InvalidConstraint
from genrt.structures.tokens import Tokens

_LONGEST_TOKEN = 1024
"""In bytes; llguidance aborts on a vocabulary with longer tokens."""

_MOST_REPETITIONS = 10_000

_PLAIN = ("type", "enum", "const", "pattern", "format", "minLength", "maxLength")
"""The keywords of JSON schemas that tell of values without parts, but for numbers' bounds."""

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


def matches_nothing(lark: str) -> bool:
    """Tell whether no text begins as the grammar wants: for a grammar of one terminal, whether that
    matches nothing at all. False for a grammar that does not compile."""
    matcher = new_matcher(_bytes(), lark)
    return not matcher.is_error() and _is_dead(matcher)


def _is_dead(matcher: Any) -> bool:
    if matcher.is_accepting():
        return False
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return matcher.get_error().startswith("NoExtension") or not mask.any()


def check_begins(lark: str) -> None:
    """Raise InvalidConstraint unless a grammar compiles and some text, of any bytes, begins as it wants;
    of a grammar that is too complex to tell too."""
    matcher = new_matcher(_bytes(), lark)
    if matcher.is_error():
        raise InvalidConstraint(f"it does not compile: {brief(matcher.get_error())}")
    if _is_dead(matcher):
        raise InvalidConstraint("no text has this structure: change it")
    if matcher.is_error():
        raise InvalidConstraint(f"it is too complex, simplify it: {brief(matcher.get_error())}")


def may_begin(lark: str, data: bytes) -> bool:
    """Tell whether bytes can begin a text of the grammar; True for one that does not compile."""
    matcher = new_matcher(_bytes(), lark)
    return matcher.is_error() or all(matcher.consume_token(1 + byte) for byte in data)


def has_objects(
    required: Iterable[object], named: dict[str, bool], patterns: dict[str, bool], *, others: bool
) -> bool:
    """Tell whether there are objects with the required properties, given which of those that are named,
    that match a pattern, or that do neither, have values. What is no text is no name."""
    names = [each for each in required if isinstance(each, str)]
    if not all(named.get(name, True) for name in names):
        return False
    if all(patterns.values()) and (others or named.keys() >= {*names}):
        return True
    schema: dict[str, Any] = {"type": "object", "required": names, "properties": named}
    schema |= {"patternProperties": patterns, "additionalProperties": others}
    return bool(patterns) and _is_satisfiable(json.dumps(schema))


def has_plain_values(schemas: Iterable[dict[str, Any]]) -> bool:
    """Tell whether there are values of which all these hold, as far as types, listed values and the
    bounds of strings tell."""
    rules = [{key: each[key] for key in _PLAIN if key in each} for each in schemas]
    rules = [each for each in rules if each]
    if sum(map(len, rules)) == 1 and "type" in rules[0]:
        return True
    return not rules or _is_satisfiable(json.dumps({"allOf": rules}))


@lru_cache(1024)
def _is_satisfiable(schema: str) -> bool:
    # Judged again and again while it is not known which schemas within one another have values.
    matcher = new_matcher(_bytes(), f"start: %json {schema}")
    return not (matcher.is_error() and "unsatisfiable" in matcher.get_error().lower())


@cache
def _bytes() -> Any:
    byte_vocab = (b"<end>", *(bytes([i]) for i in range(256)))
    return new_tokenizer(Tokens(byte_vocab, 0, frozenset({0})))


def checked_pattern(pattern: str, name: str) -> str:
    """Return a regular expression.

    Raises:
        InvalidConstraint: it has so many repetitions that llguidance would work for seconds: its time
            grows as the square of their number.
    """
    repetitions = sum(map(pattern.count, "?*{"))
    if repetitions > _MOST_REPETITIONS:
        raise InvalidConstraint(
            f"the {name} has {repetitions:,} repetitions, and {_MOST_REPETITIONS:,} is the most: "
            "simplify it"
        )
    return pattern


def brief(error: str) -> str:
    """Return llguidance's message without its listing of the grammar and its internal state."""
    error = re.split(r"\n +\d+ \||\n<", error)[0].strip()
    error = error.removeprefix("at 1(8): failed to compile JSON schema: ")
    if error.startswith("Unimplemented keys"):
        error += (
            "; take them out, and check them by a predicate: all_of(json_schema(…), predicate(…))"
        )
    if "grammar.symbols.len()" in error:
        error = "it has more than 65,000 rules, groups and terminals: make it smaller"
    return error
