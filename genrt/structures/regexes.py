r"""Regular expressions, parsed by Python's own ``re`` and written in the form that llguidance reads.

A pattern means what ``re.fullmatch`` means, or is refused by name. A JSON schema's pattern is searched
for; validators of several languages read ``\d \w \s .`` differently, and the written form matches only
texts on which all validators agree. ``re._parser`` is a private module; tests/constraints/test_dialect.py
compares with ``re`` itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as sre
from re import _parser
from typing import Any

from genrt.errors import InvalidConstraint

MOST_REPETITIONS = 10_000
_ANY_TEXT = "(?s:.)*"

_REFUSED = {
    sre.ASSERT: "look-around", sre.ASSERT_NOT: "look-around", sre.ATOMIC_GROUP: "an atomic group",
    sre.GROUPREF: "a back-reference", sre.GROUPREF_EXISTS: "a condition",
    sre.POSSESSIVE_REPEAT: "a possessive repetition", sre.AT: "an assertion: only ^ and $ are known",
}  # fmt: skip
_SEVERAL_READINGS = [
    (
        re.compile(r"\\[0-9]"),
        "an octal escape or a back-reference: write \\x.., or the group again",
    ),
    (re.compile(r"\\a"), "\\a: write \\x07"),
]
_CLASS = re.compile(r"\\.|(\[\^?\]?(?:\\.|[^\\\]])*\])", re.DOTALL)
_IN_CLASS = re.compile(r"^\[\^?\]|.\[|&&|--|~~|\|\|", re.DOTALL)

_WORD = "0-9A-Za-z_"
_WORDS = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}\p{N}"
_BLANKS = r"\s\x{FEFF}\x{1C}-\x{1F}"
_CLASSES = ("DIGIT", "NOT_DIGIT", "WORD", "NOT_WORD", "SPACE", "NOT_SPACE")
_READINGS: dict[str, tuple[str, ...]] = {  # of ``_CLASSES``
    "exact": (  # as Python's re reads them
        r"\p{Nd}", r"\P{Nd}", r"\p{L}\p{N}_", r"[^\p{L}\p{N}_]",
        r"\s\x{1C}-\x{1F}", r"[^\s\x{1C}-\x{1F}]",
    ),
    "narrow": ("0-9", r"\P{Nd}", _WORD, f"[^{_WORDS}]", r"\t-\r\x{20}", f"[^{_BLANKS}]"),
    "wide": (r"\p{Nd}", "[^0-9]", _WORDS, f"[^{_WORD}]", _BLANKS, r"[^\t-\r\x{20}]"),
}  # fmt: skip
_DOTTED = (0x49, 0x69, 0x130, 0x131)
"""I and i, with and without a dot: one letter to Python's re without case, several to others."""


def whole(pattern: str, name: str) -> str:
    """Return the regular expression of the texts that a pattern matches from first to last character.
    Raises InvalidConstraint if the pattern is not in the dialect."""
    return _Writer(pattern, name, "exact").text("")


def searched(pattern: str, name: str) -> str:
    """Return the regular expression, with anchors, of the texts in which a JSON schema's pattern matches
    some part; raises as ``whole``."""
    return f"^{_Writer(pattern, name, 'narrow').text(_ANY_TEXT)}$"


def character_code(letter: str) -> str:
    """Return a character as it stands in a regular expression for itself."""
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):X}}}"


def none_of(texts: Iterable[str]) -> str:
    """Return the regular expression of all texts but these."""
    after: dict[str, list[str]] = {}
    may_end = True
    for text in texts:
        if text:
            after.setdefault(text[0], []).append(text[1:])
        else:
            may_end = False
    options = [character_code(letter) + none_of(rest) for letter, rest in after.items()]
    others = f"[^{''.join(map(character_code, after))}]" if after else "(?s:.)"
    return f"(?:{'|'.join([*options, others + _ANY_TEXT])}){'?' * may_end}"


class _Writer:
    """Writes one pattern."""

    def __init__(self, pattern: str, name: str, reading: str) -> None:
        self._pattern = pattern
        self._name = name
        self._reading = reading

    def _error(self, problem: str) -> InvalidConstraint:
        return InvalidConstraint(f"the {self._name} does not compile: {problem}")

    def text(self, around: str) -> str:
        """Return the whole; ``around`` stands where a pattern has no anchor."""
        pattern = self._pattern
        repetitions = sum(map(pattern.count, "?*+{"))
        if repetitions > MOST_REPETITIONS:
            raise InvalidConstraint(
                f"the {self._name} has {repetitions:,} repetitions, and {MOST_REPETITIONS:,} is the "
                "most: simplify it"
            )
        plain = pattern.replace("\\\\", "")
        for several, advice in _SEVERAL_READINGS:
            if several.search(plain):
                raise self._error(f"it has {advice}")
        for each in _CLASS.finditer(pattern):
            if each[1] and _IN_CLASS.search(re.sub(r"\\.", "_", each[1], flags=re.DOTALL)):
                raise self._error(
                    f"the class {each[1]} is read in several ways: escape [ ] and double signs in it"
                )
        try:
            pattern.encode()
            tree = _parser.parse(pattern)
            return self._sequence(tree, self._checked(tree.state.flags), around, around)
        except UnicodeEncodeError as error:
            raise InvalidConstraint(
                f"the {self._name} holds a lone surrogate, which no text has"
            ) from error
        except RecursionError as error:
            raise InvalidConstraint(
                f"the {self._name} is nested too deeply: simplify it"
            ) from error
        except (re.error, OverflowError) as error:
            raise self._error(str(error)) from error

    def _checked(self, flags: int) -> int:
        for flag in (re.MULTILINE, re.ASCII):
            if flags & flag:
                raise self._error(f"the flag {flag.name} is not known: only i, s and x are")
        return flags

    def _sequence(self, items: Any, flags: int, begin: str | None, end: str | None) -> str:
        """Return the text of items one after the other.

        Args:
            begin, end: the texts that stand there without an anchor; ``None``: no anchor may.
        """
        items = [*items]
        if items and begin is not None and items[0] == (sre.AT, sre.AT_BEGINNING):
            return self._sequence(items[1:], flags, "", end)
        if items and end is not None and items[-1] == (sre.AT, sre.AT_END):
            return self._sequence(items[:-1], flags, begin, "")
        if not items:
            return f"(?:{begin or ''}{end or ''})"
        texts = []
        for place, item in enumerate(items):
            found = _anchors([item])
            sides = begin if place == 0 else None, end if place == len(items) - 1 else None
            inside: list[Any] = []
            for sign, anchor, around in zip(
                "^$", (sre.AT_BEGINNING, sre.AT_END), sides, strict=True
            ):
                if anchor in found and around is None:
                    raise self._error(
                        f"{sign} stands where it can never match, or only sometimes: write it first or "
                        "last"
                    )
                inside.append(around if anchor in found else None)
            before, after = (
                each if each and within is None else ""
                for each, within in zip(sides, inside, strict=True)
            )
            texts.append(before + self._item(item, flags, *inside) + after)
        return f"(?:{''.join(texts)})" if len(texts) > 1 or begin or end else texts[0]

    def _item(self, item: Any, flags: int, begin: str | None, end: str | None) -> str:
        kind, value = item
        if kind is sre.LITERAL:
            return self._class([(kind, value)], flags, negated=False)
        if kind is sre.NOT_LITERAL:
            return self._class([(sre.LITERAL, value)], flags, negated=True)
        if kind is sre.IN:
            negated = value[0][0] is sre.NEGATE
            return self._class(value[negated:], flags, negated=negated)
        if kind is sre.ANY:
            if flags & re.DOTALL:
                return "(?s:.)"
            return r"[^\n\r\x{2028}\x{2029}]" if self._reading == "narrow" else r"[^\n]"
        if kind is sre.BRANCH:
            return f"(?:{'|'.join(self._sequence(each, flags, begin, end) for each in value[1])})"
        if kind is sre.SUBPATTERN:
            _, added, removed, inside = value
            return self._sequence(inside, (flags | self._checked(added)) & ~removed, begin, end)
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):  # laziness is without effect on a set
            low, high, inside = value
            if _anchors(inside):
                raise self._error("an anchor is repeated: take it out of the repetition")
            most = "" if high is sre.MAXREPEAT else int(high)
            times = {(0, 1): "?", (0, ""): "*", (1, ""): "+", (low, low): f"{{{low}}}"}.get(
                (low, most)
            )
            text = self._sequence(inside, flags, None, None)
            return f"(?:{text}){times or f'{{{low},{most}}}'}"
        raise self._error(
            f"it has {_REFUSED.get(kind, kind)}, which is not in the dialect: leave it out"
        )

    def _class(self, members: Iterable[Any], flags: int, *, negated: bool) -> str:
        reading = self._reading
        if negated:
            reading = {"narrow": "wide"}.get(reading, reading)
        ranges: list[tuple[int, int]] = []
        named = ""
        for kind, value in members:
            if kind is sre.CATEGORY:
                name = str(value).removeprefix("CATEGORY_")
                named += _READINGS[reading][_CLASSES.index(name)]
            else:
                ranges.append(value if kind is sre.RANGE else (value, value))
        folded = bool(flags & re.IGNORECASE)
        is_dotted = any(low <= code <= high for low, high in ranges for code in _DOTTED)
        if folded and is_dotted and reading != "narrow":
            ranges += [(code, code) for code in _DOTTED]
        if not named and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            text = self._letter(ranges[0][0])
            text = f"[^{text}]" if negated else text
        else:
            inside = "".join(
                self._letter(low) + (f"-{self._letter(high)}" if high > low else "")
                for low, high in self._whole_characters(ranges)
            )
            text = f"[{'^' * negated}{inside}{named}]"
        return f"(?i:{text})" if folded else text

    def _letter(self, code: int) -> str:
        if 0xD800 <= code < 0xE000:
            raise self._error(f"\\u{code:x} is not a character")
        return character_code(chr(code))

    def _whole_characters(self, ranges: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
        """Yield ranges without surrogates at their ends."""
        for low, high in ranges:
            low = 0xE000 if 0xD800 <= low < 0xE000 and low < high else low
            high = 0xD7FF if 0xD800 <= high < 0xE000 and low < high else high
            if low <= high:
                yield low, high


def _anchors(items: Iterable[Any]) -> set[Any]:
    """Return the kinds of anchors in items and in their groups."""
    found: set[Any] = set()
    for kind, value in items:
        if kind is sre.AT:
            found |= {value} & {sre.AT_BEGINNING, sre.AT_END}
        elif kind is sre.BRANCH:
            found |= set().union(*map(_anchors, value[1]))
        elif kind is sre.SUBPATTERN:
            found |= _anchors(value[3])
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            found |= _anchors(value[2])
    return found
