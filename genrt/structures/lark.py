"""A grammar in llguidance's dialect of Lark: its parts that genrt has a say in, checked and replaced.

genrt reads the tokens of a grammar, and leaves its rules to llguidance. Regular expressions are those of
genrt's dialect, and a ``%json`` becomes rules of genrt's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from genrt.errors import InvalidConstraint
from genrt.structures.regexes import parsed, regex_text

__all__ = ["check_depth", "checked_lark"]

# llguidance's lexer, which takes the longest match: a comment before a regex, a rule before an operator.
_PARTS = re.compile(
    r"""(?P<space>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<newline>(?:\r?\n)+[ \t]*)
    |(?P<string>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4})|[^"\\\x00-\x1F\x7F])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<special><[^<>\s]+>|@[a-zA-Z0-9_\-]+)
    |(?P<json>%(?:json|regex|llguidance))
    |(?P<keyword>%[a-z]+)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9\-]*)
    |(?P<terminal>_?[A-Z][_A-Z0-9\-]*)
    |(?P<number>0[xX][0-9a-fA-F]+|[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<sign>->|::|\.\.|[:,.(){}\[\]~|&=_+*?])""",
    re.VERBOSE | re.DOTALL,
)

_MOST_PARTS = 200_000
_MOST_LEVELS = 1_000  # llguidance's stack overflows, which ends the process, at some 2,500


@dataclass(frozen=True, slots=True)
class _Token:
    """A part of the text; ``value`` is the JSON after ``%json`` and its like."""

    kind: str
    text: str
    start: int
    end: int
    value: Any = None


def checked_lark(lark: str, rules_of: Callable[[Any, str], list[str]]) -> str:
    """Return a grammar with its regular expressions and schemas as genrt reads them.

    A text that is not Lark comes back as it is: llguidance's message says best where it is wrong.

    Args:
        rules_of: makes the lines of the rules of a schema, the first of which defines the rule of a name.

    Raises:
        InvalidConstraint: it names special tokens, is nested too deeply or too large, or has a regular
            expression, a schema or a quote that is not in the dialect.
    """
    tokens = _tokens(lark)
    if tokens is None:
        return lark
    if len(tokens) > _MOST_PARTS:
        raise InvalidConstraint(
            f"the grammar has {len(tokens):,} parts, and {_MOST_PARTS:,} is the most: make it smaller"
        )
    for before, token in pairwise(tokens):
        _refuse_what_is_no_text(before, token)
    named = _named(tokens)
    for start in ("start", *named):
        check_depth(start, lambda name: named.get(name, ()), "grammar")
    prefix = "json"
    while any(name.lower().startswith(prefix) for name in named):
        prefix += "x"
    parts: list[str] = []
    lines: list[list[str]] = []
    position = 0
    for token in tokens:
        if token.kind == "regex":
            part = _regex(token.text)
        elif token.text == "%json":
            part = f"{prefix}{len(lines)}"
            lines.append(rules_of(token.value, part))
        else:
            continue
        parts += [lark[position : token.start], part]
        position = token.end
    return "\n".join(
        ["".join([*parts, lark[position:]]), *(line for each in lines for line in each)]
    )


def _tokens(lark: str) -> list[_Token] | None:
    """Return the tokens of a text, without spaces and comments; ``None`` where none fits."""
    decoder, position, found = json.JSONDecoder(), 0, [_Token("newline", "", 0, 0)]
    while position < len(lark):
        match = _PARTS.match(lark, position)
        if match is None:
            if lark[position] == "'":
                raise InvalidConstraint(
                    f"the grammar has a single quote at line {lark.count(chr(10), 0, position) + 1}: "
                    'llguidance\'s Lark has strings in double quotes alone, "…"'
                )
            return None
        kind, value, start = str(match.lastgroup), None, position
        position = match.end()
        if kind == "json":
            while lark[position : position + 1].isspace():
                position += 1
            try:
                value, position = decoder.raw_decode(lark, position)
            except (ValueError, RecursionError):
                return None
        if kind != "space":
            found.append(_Token(kind, match[0], start, position, value))
    return found


def _refuse_what_is_no_text(before: _Token, token: _Token) -> None:
    if token.kind == "special" and token.text.startswith("<"):
        raise InvalidConstraint(
            f"the grammar names the special token {token.text}, and constraints are on text: "
            "write what stands for text as a string"
        )
    if token.text == "=" and before.text in ("stop", "max_tokens", "temperature"):
        raise InvalidConstraint(
            f"the grammar has the rule option {before.text}, which is not about the text: leave it out"
        )


def _named(tokens: Iterable[_Token]) -> dict[str, list[str]]:
    """Return the rules and terminals that each rule or terminal names, by its own name."""
    found: dict[str, list[str]] = {}
    own: list[str] = []
    is_first = True
    for token in tokens:
        if token.kind in ("rule", "terminal"):
            name = token.text.lstrip("!?")
            if is_first:
                own = found.setdefault(name, [])
            else:
                own.append(name)
        is_first = token.kind == "newline"
    return found


def _regex(source: str) -> str:
    text, _, flags = source[1:].rpartition("/")
    for letter in flags:
        if letter not in "isx":
            raise InvalidConstraint(
                f"the grammar has the flag {letter} of {source}: only i, s and x are known"
            )
    prefix = f"(?{flags})" if flags else ""
    name = f"grammar's regular expression {source[:60]}"
    return f"/{regex_text(parsed(prefix + text, name))}/"


def check_depth(start: str, named: Callable[[str], Iterable[str]], what: str) -> None:
    """Raise InvalidConstraint if a rule leads to another through too many rules, each in the one before.

    The search is depth first, as llguidance compiles: by recursion, on a stack that can overflow.
    """
    seen = {start}
    stack: list[tuple[str, Iterator[str]]] = [(start, iter(named(start)))]
    while stack:
        for after in stack[-1][1]:
            if after not in seen:
                seen.add(after)
                stack.append((after, iter(named(after))))
                break
        else:
            stack.pop()
        if len(stack) > _MOST_LEVELS:
            raise InvalidConstraint(
                f"the {what} is nested too deeply: {start!r} leads to {stack[-1][0]!r} through more than "
                f"{_MOST_LEVELS:,} rules, each in the one before"
            )
