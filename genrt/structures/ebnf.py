"""A grammar in EBNF, as llama.cpp's GBNF writes it, as a Lark grammar whose terminals are characters.

llguidance's lexer takes the longest match of a terminal, and so loses texts that a context-free grammar
derives. Of characters none is a prefix of another: with these for terminals, nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from genrt.errors import InvalidConstraint
from genrt.structures.lark import check_depth
from genrt.structures.regexes import character_code

_PARTS = re.compile(
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
    """Return the grammar for llguidance.

    Raises:
        InvalidConstraint: it does not parse, a rule is missing or there twice, or a range is empty.
    """
    rules: dict[str, list[str]] = {}
    used: dict[str, int] = {}
    body: list[str] | None = None
    depth = position = 0
    while position < len(text):
        match = _PARTS.match(text, position)
        kind = None if match is None else match.lastgroup
        if match is None or (body is None and kind not in ("space", "rule")):
            raise _error(text, position, f"{text[position]!r} is not expected here")
        part = match[kind] if kind else ""
        if kind == "rule":
            if depth:
                raise _error(text, position, "a group is not closed before this rule")
            if part in rules:
                raise _error(text, position, f"there is a second rule {part!r}")
            body = rules[part] = []
        elif body is not None and kind != "space":
            depth += (part == "(") - (part == ")") if kind == "sign" else 0
            if depth > _MOST_GROUPS:
                raise _error(text, position, "groups are too deeply nested")
            if depth < 0:
                raise _error(text, position, "nothing is open that ')' could close")
            if kind == "times" and (not body or body[-1] in "(|" or body[-1][-1] in "?*+}"):
                raise _error(text, position, f"there is nothing that {part!r} could repeat")
            if kind == "name":
                used.setdefault(part, position)
            body.append(_lark(match))
        position = match.end()
    if depth:
        raise _error(text, len(text), "a group is not closed")
    for name, place in used.items():
        if name not in rules:
            raise _error(text, place, f"there is no rule {name!r}")
    if "root" not in rules:
        raise InvalidConstraint(
            "the EBNF grammar has no rule 'root', which it starts from: write root ::= …"
        )
    bodies = {_rule_name(name): body for name, body in rules.items()}
    named = {name: [part for part in body if part in bodies] for name, body in bodies.items()}
    check_depth(_rule_name("root"), named.__getitem__, "EBNF grammar")
    alive = _alive(bodies)
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


def _alive(rules: dict[str, list[str]]) -> set[str]:
    """Return the rules that derive a finite text. A mask would lead from others to a prefix of nothing.

    Cf. Hopcroft, Motwani and Ullman, Introduction to Automata Theory, Languages, and Computation, 7.1.
    """
    alive: set[str] = set()
    before = -1
    while before < len(alive):
        before = len(alive)
        for name in (*rules, *reversed(rules)):
            if name not in alive and _kept(rules[name], alive)[0] is not None:
                alive.add(name)
    return alive


def _kept(body: list[str], alive: Collection[str], at: int = 0) -> tuple[str | None, int]:
    """Return the alternatives from a place to the end of their group, and where that is.

    Those that need a rule that is not alive are left out; ``None`` if none remains.
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
            raise _error(match.string, match.start(), problem)
        ranges.append((low, high))
    if not ranges:
        raise _error(match.string, match.start(), "the class is empty")
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
    """Return the character that is written in a group, perhaps as an escape."""
    written = match[group]
    kind, digits = written[1:2], written[2:]
    if digits:
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _error(match.string, match.start(group), f"{written} is no character")
        return chr(code)
    if kind and kind not in _ESCAPES:
        raise _error(match.string, match.start(group), f"the escape {written} is not known")
    return _ESCAPES[kind] if kind else written


def _rule_name(name: str) -> str:
    # Lark tells rules from terminals by their case, and knows some names: every other byte is spelt out.
    return "r_" + "".join(
        letter if letter.islower() or letter.isdigit() else f"_{ord(letter):x}_" for letter in name
    )


def _error(text: str, position: int, problem: str) -> InvalidConstraint:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return InvalidConstraint(
        f"the EBNF grammar does not parse: at line {line}, column {column}, {problem}"
    )
