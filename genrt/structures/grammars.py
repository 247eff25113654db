"""Grammars in EBNF and in Lark, as grammars for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from genrt.errors import InvalidConstraint
from genrt.structures.regexes import character_code, whole

# llguidance's lexer, which takes the longest match: a comment before a regex, a rule before an operator.
_LARK_PARTS = re.compile(
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


def checked_lark(lark: str, source_of: Callable[[Any], str]) -> str:
    """Return a grammar with its regular expressions and schemas as genrt reads them.

    A text that is not Lark comes back as it is: llguidance's message says best where it is wrong.

    Args:
        source_of: makes the text of a schema for llguidance.

    Raises:
        InvalidConstraint: it names special tokens, is nested too deeply or too large, or has a regular
            expression, a schema or a quote that is not in the dialect.
    """
    tokens = _lark_tokens(lark)
    if tokens is None:
        return lark
    if len(tokens) > _MOST_PARTS:
        raise InvalidConstraint(
            f"the grammar has {len(tokens):,} parts, and {_MOST_PARTS:,} is the most: make it smaller"
        )
    for before, token in pairwise(tokens):
        _refuse_what_is_no_text(before, token)
    named = _names_by_rule(tokens)
    for start in ("start", *named):
        check_rule_depth(start, lambda name: named.get(name, ()), "grammar")
    parts: list[str] = []
    position = 0
    for token in tokens:
        if token.kind == "regex":
            part = _checked_regex(token.text)
        elif token.text == "%json":
            part = f"%json {source_of(token.value)}"
        else:
            continue
        parts += [lark[position : token.start], part]
        position = token.end
    return "".join([*parts, lark[position:]])


def _lark_tokens(lark: str) -> list[_Token] | None:
    """Return the tokens of a text, without spaces and comments, or ``None`` if a place fits no token."""
    decoder, position, found = json.JSONDecoder(), 0, [_Token("newline", "", 0, 0)]
    while position < len(lark):
        match = _LARK_PARTS.match(lark, position)
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


def _names_by_rule(tokens: Iterable[_Token]) -> dict[str, list[str]]:
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


def _checked_regex(source: str) -> str:
    text, _, flags = source[1:].rpartition("/")
    for letter in flags:
        if letter not in "isx":
            raise InvalidConstraint(
                f"the grammar has the flag {letter} of {source}: only i, s and x are known"
            )
    prefix = f"(?{flags})" if flags else ""
    name = f"grammar's regular expression {source[:60]}"
    return f"/{whole(prefix + text, name)}/"


def check_rule_depth(start: str, named: Callable[[str], Iterable[str]], what: str) -> None:
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


_EBNF_PARTS = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[A-Za-z_][\w-]*)(?:\s|\#[^\n]*\n)*::=
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<literal>"(?:\\.|[^"\\\n])*")
    |(?P<class>\[\^?(?:\\.|[^\]\\\n])*\])
    |(?P<times>[?*+]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[|().])""",
    re.VERBOSE | re.ASCII,
)
_WRITTEN = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)|[^\\]"
_LETTER = re.compile(_WRITTEN, re.DOTALL)
_RANGE = re.compile(f"(?P<low>{_WRITTEN})(?:-(?P<high>{_WRITTEN}))?", re.DOTALL)
_MOST_GROUPS = 30  # how deeply groups may be nested in llguidance's Lark
_DEAD = "r_"  # not the name of any rule
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {sign: sign for sign in "\"'\\[]-^/.|(){}?*+"}


def lark_of_ebnf(text: str) -> str:
    """Return the grammar for llguidance. Raises InvalidConstraint if it does not parse, a rule is
    missing or there twice, or a range is empty."""
    rules: dict[str, list[str]] = {}
    used: dict[str, int] = {}
    body: list[str] | None = None
    depth = position = 0
    while position < len(text):
        match = _EBNF_PARTS.match(text, position)
        kind = None if match is None else match.lastgroup
        if match is None or (body is None and kind not in ("space", "rule")):
            raise _syntax_error(text, position, f"{text[position]!r} is not expected here")
        part = match[kind] if kind else ""
        if kind == "rule":
            if depth:
                raise _syntax_error(text, position, "a group is not closed before this rule")
            if part in rules:
                raise _syntax_error(text, position, f"there is a second rule {part!r}")
            body = rules[part] = []
        elif body is not None and kind != "space":
            depth += (part == "(") - (part == ")") if kind == "sign" else 0
            if depth > _MOST_GROUPS:
                raise _syntax_error(text, position, "groups are too deeply nested")
            if depth < 0:
                raise _syntax_error(text, position, "nothing is open that ')' could close")
            if kind == "times" and (not body or body[-1] in "(|" or body[-1][-1] in "?*+}"):
                raise _syntax_error(text, position, f"there is nothing that {part!r} could repeat")
            if kind == "name":
                used.setdefault(part, position)
            body.append(_lark(match))
        position = match.end()
    if depth:
        raise _syntax_error(text, len(text), "a group is not closed")
    for name, place in used.items():
        if name not in rules:
            raise _syntax_error(text, place, f"there is no rule {name!r}")
    if "root" not in rules:
        raise InvalidConstraint(
            "the EBNF grammar has no rule 'root', which it starts from: write root ::= …"
        )
    bodies = {_rule_name(name): body for name, body in rules.items()}
    named = {name: [part for part in body if part in bodies] for name, body in bodies.items()}
    check_rule_depth(_rule_name("root"), named.__getitem__, "EBNF grammar")
    alive = _productive_rules(bodies)
    if _rule_name("root") not in alive:
        dead = [repr(name) for name in rules if _rule_name(name) not in alive]
        shown = ", ".join(dead[:4]) + (", …" if len(dead) > 4 else "")
        raise InvalidConstraint(
            f"the EBNF grammar derives no text: each alternative of {shown} leads back to such a "
            "rule, or "
            "needs what matches nothing; add one that ends"
        )
    lines = [f"{name}: {_kept(bodies[name], alive)[0]}" for name in bodies if name in alive]
    return "\n".join([f"start: {_rule_name('root')}", *lines])


def _productive_rules(bodies: dict[str, list[str]]) -> set[str]:
    """Return the rules that derive a finite text: masks would lead from other rules to dead ends.

    Cf. Hopcroft, Motwani and Ullman, Introduction to Automata Theory, Languages, and Computation, 7.1.
    """
    found: set[str] = set()
    before = -1
    while before < len(found):
        before = len(found)
        for name in (*bodies, *reversed(bodies)):
            if name not in found and _kept(bodies[name], found)[0] is not None:
                found.add(name)
    return found


def _kept(body: list[str], alive: Collection[str], at: int = 0) -> tuple[str | None, int]:
    """Return the alternatives from a place to the end of their group, and where that is.

    Alternatives that need a dead rule are removed. The text is ``None`` if all are removed.
    """
    options: list[list[str] | None] = [[]]
    while at < len(body) and body[at] != ")":
        item: str | None = body[at]
        at += 1
        if item == "|":
            options.append([])
            continue
        if item == "(":
            inside, at = _kept(body, alive, at)
            at += 1
            item = None if inside is None else f"({inside})"
        elif str(item).startswith("r_") and item not in alive:
            item = None
        times = body[at] if at < len(body) and body[at][0] in "?*+{~" else ""
        at += bool(times)
        if item is not None and options[-1] is not None:
            options[-1].append(item + times)
        elif not re.match(r"[?*~]|\{0*[,}]", times):
            options[-1] = None
    kept = [" ".join(option) or _NOTHING for option in options if option is not None]
    return (" | ".join(kept) if kept else None), at


_NOTHING = '""'


def _lark(match: re.Match[str]) -> str:
    match match.lastgroup:
        case "name":
            return _rule_name(match[0])
        case "literal":
            letters = _LETTER.finditer(match.string, match.start() + 1, match.end() - 1)
            codes = [character_code(_character(letter)) for letter in letters]
            return f"({' '.join(f'/{code}/' for code in codes)})" if codes else _NOTHING
        case "class":
            return _class(match)
        case "sign" if match[0] == ".":
            return "/(?s:.)/"
        case _:
            times = re.sub(r"\s", "", match[0])
            return "~0" if re.fullmatch(r"\{0+(?:,0+)?\}", times) else times


def _class(match: re.Match[str]) -> str:
    opening = "[^" if match[0].startswith("[^") else "["
    ranges = []
    for letters in _RANGE.finditer(match.string, match.start() + len(opening), match.end() - 1):
        low = _character(letters, "low")
        high = _character(letters, "high") if letters["high"] else low
        if low > high:
            problem = f"the range {low}-{high} is empty: turn it round"
            raise _syntax_error(match.string, match.start(), problem)
        ranges.append((low, high))
    if not ranges:
        raise _syntax_error(match.string, match.start(), "the class is empty")
    if opening == "[^" and _is_all(ranges):
        return _DEAD
    inside = "".join(f"{character_code(low)}-{character_code(high)}" for low, high in ranges)
    return f"/{opening}{inside}]/"


def _is_all(ranges: list[tuple[str, str]]) -> bool:
    """Tell whether ranges hold every character."""
    following = 0
    for low, high in sorted(ranges):
        if ord(low) > following and not (following == 0xD800 and ord(low) == 0xE000):
            return False
        following = max(following, ord(high) + 1)
    return following > 0x10FFFF


def _character(match: re.Match[str], group: str | int = 0) -> str:
    """Return the character in a group of a match; it may be written as an escape."""
    written = match[group]
    kind, digits = written[1:2], written[2:]
    if digits:
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _syntax_error(match.string, match.start(group), f"{written} is no character")
        return chr(code)
    if kind and kind not in _ESCAPES:
        raise _syntax_error(match.string, match.start(group), f"the escape {written} is not known")
    return _ESCAPES[kind] if kind else written


def _rule_name(name: str) -> str:
    # Lark tells rules from terminals by their case, and knows some names: every other byte is spelt out.
    return "r_" + "".join(
        letter if letter.islower() or letter.isdigit() else f"_{ord(letter):x}_" for letter in name
    )


def _syntax_error(text: str, position: int, problem: str) -> InvalidConstraint:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return InvalidConstraint(
        f"the EBNF grammar does not parse: at line {line}, column {column}, {problem}"
    )
