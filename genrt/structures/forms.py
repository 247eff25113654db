"""Regular expressions, JSON schemas, grammars and choices as llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from genrt.errors import InvalidConstraint
from genrt.numbers import displayed
from genrt.structures.ebnf import lark_of_ebnf
from genrt.structures.json_grammar import Whitespace, schema_rules
from genrt.structures.lark import checked_lark
from genrt.structures.regexes import character_code, parsed, regex_text

Syntax = Literal["lark", "ebnf"]

_WHITESPACE = ("compact", "spaced", "flexible")

_FIRST_RULE = {
    "lark": re.compile(
        r"^[ \t]*[?!]?_?[A-Za-z][\w-]*[ \t]*(?:\[[^\]\n]*\][ \t]*)?:(?![:=])", re.MULTILINE
    ),
    "ebnf": re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE),
}


def name_of_regex(pattern: str) -> str:
    """Return what messages call a regular expression."""
    return f"regular expression {pattern[:60]!r}{'…' if len(pattern) > 60 else ''}"


def lark_of_regex(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole.

    Raises:
        InvalidConstraint: the pattern is no str, or not in genrt's dialect.
    """
    given: object = pattern
    if isinstance(given, re.Pattern):
        raise InvalidConstraint(
            f"the pattern is {displayed(pattern)}; give its text, pattern.pattern"
        )
    if not isinstance(given, str):
        raise InvalidConstraint(
            f"the pattern is {displayed(pattern)}; give a regular expression as str"
        )
    return f"start: /{regex_text(parsed(pattern, name_of_regex(pattern)))}/"


def lark_of_choice(texts: Sequence[str]) -> str:
    """Return the grammar of exactly these texts, of which there is one at least.

    Raises:
        InvalidConstraint: one holds a lone surrogate.
    """
    _check_text("".join(texts), "choice")
    return f"start: /{'|'.join(''.join(map(character_code, text)) for text in texts)}/"


def lark_of_schema(schema: object, whitespace: Whitespace, *, closed: bool = False) -> str:
    """Return the grammar of the JSON texts of the values that are valid under a schema.

    With ``closed``, objects have no other properties than those named, where no schema speaks of others.

    Raises:
        InvalidConstraint: the schema is not one, or says more than can be compiled; or no such
            whitespace.
    """
    if not isinstance(whitespace, str) or whitespace not in _WHITESPACE:
        raise InvalidConstraint(
            f"whitespace is {displayed(whitespace)}: give one of {', '.join(map(repr, _WHITESPACE))}"
        )
    return "\n".join(["start: j", *schema_rules(schema, whitespace, closed=closed)])


def compact_schema(text: str) -> str:
    """Return the JSON text of a schema whose texts have no white space between their parts."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text  # which is refused with the reason
    if isinstance(schema, dict):
        own = {"whitespace_flexible": False, **schema.get("x-guidance", {})}
        return json.dumps(schema | {"x-guidance": own})
    return json.dumps({"x-guidance": {"whitespace_flexible": False}}) if schema is True else text


def texts_of_choice(text: str) -> tuple[str, ...]:
    """Return the texts of a choice that is written as a JSON list."""
    return tuple(map(str, json.loads(text)))


def syntax_of(grammar: str) -> Syntax:
    """Return the syntax in which a grammar is written: EBNF if one of its lines has ``::=``, as vLLM
    tells them apart."""
    lines = (re.sub(r"(#|//).*$", "", line) for line in grammar.split("\n"))
    return "ebnf" if any("::=" in line for line in lines) else "lark"


def lark_of_grammar(text: str, syntax: Syntax) -> str:
    """Return a grammar for llguidance.

    Raises:
        InvalidConstraint: it does not parse, an EBNF derives nothing, or is too large; or no such syntax.
    """
    if not isinstance(text, str):
        raise InvalidConstraint(f"the grammar is {displayed(text)}: give its text as str")
    _check_text(text, "grammar")
    if not isinstance(syntax, str) or syntax not in _FIRST_RULE:
        raise InvalidConstraint(f"syntax is {displayed(syntax)}: give 'lark' or 'ebnf'")
    try:
        if syntax == "ebnf":
            return lark_of_ebnf(text)
        return checked_lark(text, lambda schema, name: schema_rules(schema, "spaced", prefix=name))
    except InvalidConstraint as error:
        raise InvalidConstraint(f"{error}{syntax_advice(text, syntax)}") from error


def syntax_advice(text: str, syntax: Syntax) -> str:
    """Return what to add to the error of a grammar that looks as if it were in the other syntax."""
    other = "lark" if syntax == "ebnf" else "ebnf"
    if not _FIRST_RULE[other].search(text) or _FIRST_RULE[syntax].search(text):
        return ""
    return f'\nIt looks like {"Lark" if other == "lark" else "EBNF"}: give syntax="{other}"'


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidConstraint(f"the {name} holds a lone surrogate, which no text has") from error
