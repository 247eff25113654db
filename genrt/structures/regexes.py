r"""Regular expressions in genrt's dialect: parsed, and written again in the form that llguidance reads.

docs/guide/structures.md lists the dialect. Everything else is refused by name, so that no pattern has two
readings. ``^`` and ``$`` vanish from a tree: ``parsed`` matches a whole text, ``searched`` a part of it.
Validators of several languages read ``\d \w \s .`` in schemas differently: all of them match the narrow
reading, and none matches more than the wide one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeAlias

from genrt.errors import InvalidConstraint
from genrt.structures.matching import first_characters

LAST = 0x10FFFF
MOST_REPETITIONS = 10_000


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class.

    Attributes:
        ranges: first and last code points.
        named: further members, as the Rust crate writes them inside a class.
        negated: whether the class is the complement of its members.
        folded: whether case is ignored.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    named: tuple[str, ...] = ()
    negated: bool = False
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Raw:
    """A regular expression that is written already, as one unit."""

    text: str


@dataclass(frozen=True, slots=True)
class Seq:
    """All parts, one after the other."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of the parts; the empty set without parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """A part from ``low`` to ``high`` times, unbounded without ``high``."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Both:
    """The texts that all parts match."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The texts that the part does not match."""

    part: Node


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``, while a pattern is parsed."""

    sign: str


Node: TypeAlias = Chars | Raw | Seq | OneOf | Times | Both | Not | Anchor

EMPTY = Seq()
ANY_TEXT = Times(Chars(((0, LAST),)), 0, None)
"""All texts."""

_LAST_LINE_FEED = Times(Chars(((10, 10),)), 0, 1)


def parsed(pattern: str, name: str) -> Node:
    """Return the tree of the texts that a pattern matches from first to last character. Raises
    InvalidConstraint if the pattern is not in the dialect."""
    return _read(pattern, name, "exact", EMPTY)


def searched(pattern: str, name: str, *, wide: bool = False) -> Node:
    """Return the tree of the texts in which a JSON schema's pattern matches some part; raises as
    ``parsed``."""
    return _read(pattern, name, "wide" if wide else "narrow", ANY_TEXT)


def literal(text: str) -> Node:
    """Return the tree of one text."""
    return Seq(tuple(Chars(((ord(letter), ord(letter)),)) for letter in text))


def intersection(nodes: Sequence[Node]) -> Node:
    """Return the tree of the texts that all these trees match."""
    return ANY_TEXT if not nodes else nodes[0] if len(nodes) == 1 else Both(tuple(nodes))


def character_code(letter: str) -> str:
    """Return a character as it stands in a regular expression for itself."""
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):X}}}"


def _read(pattern: str, name: str, reading: str, around: Node) -> Node:
    repetitions = sum(map(pattern.count, "?*+{"))
    if repetitions > MOST_REPETITIONS:
        raise InvalidConstraint(
            f"the {name} has {repetitions:,} repetitions, and {MOST_REPETITIONS:,} is the most: "
            "simplify it"
        )
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise InvalidConstraint(f"the {name} holds a lone surrogate, which no text has") from error
    parser = _Parser(pattern, name, reading)
    try:
        node = parser.all()
        for sign in "^$":
            # Python's $ also matches before a last line feed.
            found = _LAST_LINE_FEED if sign == "$" and reading == "wide" else EMPTY
            node = _without_anchors(node, sign, around, found)
            if sign in _anchors_in(node):
                raise parser.error(
                    f"{sign} stands where it can never match, or only sometimes: write it first or last"
                )
    except RecursionError as error:
        raise InvalidConstraint(f"the {name} is nested too deeply: simplify it") from error
    return node


def _anchors_in(node: Node) -> set[str]:
    match node:
        case Anchor(sign):
            return {sign}
        case Seq(parts) | OneOf(parts):
            return set().union(*map(_anchors_in, parts))
        case Times(part, _, _):
            return _anchors_in(part)
    return set()


def _without_anchors(node: Node, sign: str, around: Node, found: Node) -> Node:
    """Replace an anchor at one end of each alternative by ``found``, else add ``around``."""
    match node:
        case Anchor(other) if other == sign:
            return found
        case OneOf(parts):
            return OneOf(tuple(_without_anchors(part, sign, around, found) for part in parts))
        case Seq(parts) if parts:
            end, rest = (parts[0], parts[1:]) if sign == "^" else (parts[-1], parts[:-1])
            if end == Anchor(sign):
                return _beside(found, _without_anchors(Seq(rest), sign, EMPTY, EMPTY), sign)
            if sign in _anchors_in(end):
                return _beside(_without_anchors(end, sign, around, found), Seq(rest), sign)
    return node if around == EMPTY else _beside(around, node, sign)


def _beside(outer: Node, inner: Node, sign: str) -> Node:
    return Seq((outer, inner) if sign == "^" else (inner, outer))


_SIMPLE = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_ADVICE = {
    **dict.fromkeys("AZzbBGKQE", "which is an assertion: only ^ and $ are known, at the ends"),
    **dict.fromkeys("123456789kg", "which is a back-reference: write the group again"),
    "0": "which is octal elsewhere: write \\x00",
}
_HEX = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xu]\{([0-9A-Fa-f]{1,6})\})"
)
_PROPERTY = re.compile(r"\\[pP](?:[A-Z]|\{\^?[A-Za-z0-9_=: -]+\})")
_TIMES = re.compile(r"[?*+]|\{(?:(\d+)(,(\d*))?|,(\d+))\}")
_GROUP = re.compile(r"\?(?:P?<(?P<name>[A-Za-z_]\w*)>|([A-Za-z]*)(?:-([A-Za-z]+))?([:)]))")
_AROUND = {
    "?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind",
    "?>": "an atomic group", "?(": "a condition", "?#": "a comment", "?P=": "a back-reference",
    "?P>": "a recursion", "?R": "a recursion", "?&": "a recursion", "*": "a verb",
}  # fmt: skip

_WORD = "0-9A-Za-z_"
_BLANKS = "\\s\\x{FEFF}\\x{1C}-\\x{1F}"
_READINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "exact": {  # as Python's re reads them
        "\\d": ("\\d",), "\\w": ("\\p{L}", "\\p{N}", "_"), "\\s": ("\\s", "\\x{1C}-\\x{1F}"),
        "\\D": ("\\D",), "\\W": ("[^\\p{L}\\p{N}_]",), "\\S": ("[^\\s\\x{1C}-\\x{1F}]",),
    },
    "narrow": {
        "\\d": ("0-9",), "\\w": (_WORD,), "\\s": ("\\t-\\r\\x{20}",),
        "\\D": ("\\D",), "\\W": ("[^\\w\\p{N}]",), "\\S": (f"[^{_BLANKS}]",),
    },
    "wide": {
        "\\d": ("\\d",), "\\w": ("\\w", "\\p{N}"), "\\s": (_BLANKS,),
        "\\D": ("[^0-9]",), "\\W": (f"[^{_WORD}]",), "\\S": ("[^\\t-\\r\\x{20}]",),
    },
}  # fmt: skip
_DOTTED = (0x49, 0x69, 0x130, 0x131)
"""I and i, with and without a dot: one letter to Python's re without case, several to others."""


@dataclass(frozen=True, slots=True)
class _Flags:
    i: bool = False
    s: bool = False
    x: bool = False


@dataclass(slots=True)
class _Parser:
    """A recursive descent through a pattern."""

    text: str
    name: str
    reading: str
    at: int = 0
    flags: _Flags = field(default_factory=_Flags)
    names: set[str] = field(default_factory=set)  # of groups

    def error(self, problem: str) -> InvalidConstraint:
        return InvalidConstraint(f"the {self.name} does not compile: at {self.at}, {problem}")

    def all(self) -> Node:
        node = self._options()
        if self.at < len(self.text):
            raise self.error("nothing is open that ')' could close")
        return node

    def _peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def _skip(self) -> None:
        """Skip white space and comments under flag x."""
        while self.flags.x and (sign := self._peek()):
            if sign == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif not sign.isspace():
                return
            else:
                self.at += 1

    def _options(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else OneOf(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        self._skip()
        while self._peek() not in ("", "|", ")"):
            part = self._atom()
            if part is not None:
                parts.append(self._repeated(part))
            self._skip()
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        self._skip()
        match = _TIMES.match(self.text, self.at)
        if match is None:
            return part
        if _anchors_in(part):
            raise self.error("an anchor is repeated: take it out of what repeats")
        sign, low, more, high, most = match[0], match[1], match[2], match[3], match[4]
        self.at = match.end()
        if self._peek() == "?":
            self.at += 1  # laziness is without effect on a set
        self._skip()
        if _TIMES.match(self.text, self.at):
            raise self.error("two repetitions follow each other: write a group around the first")
        if sign[0] != "{":
            least, limit = {"?": (0, 1), "*": (0, None), "+": (1, None)}[sign]
        elif most is not None:
            least, limit = 0, int(most)
        else:
            least = int(low)
            limit = least if more is None else int(high) if high else None
        if limit is not None and limit < least:
            raise self.error(f"{sign} has no number between its bounds: turn them round")
        return Times(part, least, limit)

    def _atom(self) -> Node | None:
        sign = self._peek()
        if sign == "(":
            return self._group()
        if sign == "[":
            return self._class()
        if sign in ("^", "$"):
            self.at += 1
            return Anchor(sign)
        if sign in ("?", "*", "+", "{"):
            raise self.error(
                f"there is nothing that {sign} could repeat: write \\{sign} for the character"
            )
        if sign == ".":
            self.at += 1
            return self._dot()
        if sign == "\\":
            return self._class_of([self._escape()], negated=False)
        self.at += 1
        return self._class_of([ord(sign)], negated=False)

    def _dot(self) -> Node:
        if self.flags.s:
            return Chars(((0, LAST),))
        ends = ((10, 10), (13, 13), (0x2028, 0x2029)) if self.reading == "narrow" else ((10, 10),)
        return Chars(ends, negated=True)

    def _group(self) -> Node | None:
        self.at += 1
        before = self.flags
        if self._peek() in ("?", "*"):
            for opening, what in _AROUND.items():
                if self.text.startswith(opening, self.at):
                    raise self.error(f"({opening} is {what}, which is not known: leave it out")
            match = _GROUP.match(self.text, self.at)
            if match is None:
                raise self.error(f"({self._peek(3)} is not known: write (?:…) or (…)")
            self.at = match.end()
            if match["name"] in self.names:
                raise self.error(f"a second group has the name {match['name']}: give it another")
            self.names.update({match["name"]} - {None})
            self._set_flags(match[2] or "", match[3] or "")
            if match[4] == ")":
                return None  # for the rest of the group around it
        node = self._options()
        if self._peek() != ")":
            raise self.error("a group is not closed")
        self.at += 1
        self.flags = before
        return node

    def _set_flags(self, on: str, off: str) -> None:
        for letter in on + off:
            if letter not in "isx":
                raise self.error(f"the flag {letter} is not known: only i, s and x are")
        self.flags = replace(
            self.flags,
            **dict.fromkeys(on, True),
            **{letter: False for letter in off if letter not in on},
        )

    def _escape(self) -> int | str:
        """Take an escape; return a code point, or a class."""
        match = _HEX.match(self.text, self.at)
        if match is not None:
            code = int(next(filter(None, match.groups())), 16)
            if code > LAST or 0xD800 <= code < 0xE000:
                raise self.error(f"{match[0]} is not a character")
            self.at = match.end()
            return code
        if match := _PROPERTY.match(self.text, self.at):
            self.at = match.end()
            return match[0]
        letter = self._peek(2)[1:]
        if letter == "":
            raise self.error("it ends in a lone backslash")
        if letter in "dDwWsS":
            self.at += 2
            return f"\\{letter}"
        if letter in _SIMPLE or (letter.isascii() and not letter.isalnum() and letter not in "<>"):
            self.at += 2
            return _SIMPLE.get(letter, ord(letter))
        advice = _ADVICE.get(letter, "write the character itself, or \\x{…}")
        raise self.error(f"the escape \\{letter} is not known, {advice}")

    def _class(self) -> Node:
        start = self.at
        self.at += 1
        negated = self._peek() == "^"
        self.at += negated
        members: list[int | str | tuple[int, int]] = []
        while self._peek() != "]" or not members:
            sign = self._peek()
            if sign == "":
                self.at = start
                raise self.error("a class is not closed")
            self._check_member(sign, is_first=not members)
            low = self._member(sign)
            if self._peek(2) == "--":
                raise self.error("-- inside a class is read in several ways: escape it")
            if self._peek() == "-" and self._peek(2)[1:] not in ("]", ""):
                self.at += 1
                self._check_member(self._peek(), is_first=True)
                high = self._member(self._peek())
                if not isinstance(low, int) or not isinstance(high, int):
                    raise self.error("a range begins or ends with a class: write \\- for the sign")
                if low > high:
                    raise self.error("a range is empty: turn it round")
                members.append((low, high))
            else:
                members.append(low)
        self.at += 1
        return self._class_of(members, negated=negated)

    def _check_member(self, sign: str, *, is_first: bool) -> None:
        if sign == "[":
            raise self.error("[ inside a class is read in several ways: write \\[, or no [:name:]")
        if sign == "]":
            raise self.error("a class is empty, or begins with ]: write \\] for the character")
        if self._peek(2) in ("&&", "--", "~~", "||"):
            raise self.error(f"{self._peek(2)} inside a class is read in several ways: escape it")
        if self.flags.x and (sign.isspace() or sign == "#"):
            raise self.error(
                "white space or # inside a class is read in several ways under flag x: escape it"
            )
        if sign == "-" and not is_first and self._peek(2) != "-]":
            raise self.error("- inside a class is read in several ways: write \\- for the sign")

    def _member(self, sign: str) -> int | str:
        if sign == "\\":
            return self._escape()
        self.at += 1
        return ord(sign)

    def _class_of(self, members: list[int | str | tuple[int, int]], *, negated: bool) -> Chars:
        ranges: list[tuple[int, int]] = []
        named: list[str] = []
        reading = self.reading
        if negated:
            reading = {"narrow": "wide", "wide": "narrow"}.get(reading, reading)
        for member in members:
            if isinstance(member, int):
                ranges.append((member, member))
            elif isinstance(member, tuple):
                ranges.append(member)
            else:
                named += _READINGS[reading].get(member, (member,))
        is_dotted = any(low <= code <= high for low, high in ranges for code in _DOTTED)
        if is_dotted and self.flags.i and reading != "narrow":
            ranges += [(code, code) for code in _DOTTED]
        return Chars(tuple(ranges), tuple(named), negated, self.flags.i)


def _class_text(chars: Chars) -> str:
    """Return a class as the Rust crate writes it, without flags."""
    low_high = (
        character_code(chr(low)) + (f"-{character_code(chr(high))}" if high > low else "")
        for low, high in _without_surrogates(chars.ranges)
    )
    return f"[{'^' * chars.negated}{''.join(low_high)}{''.join(chars.named)}]"


def _without_surrogates(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        low = 0xE000 if 0xD800 <= low < 0xE000 else low
        high = 0xD7FF if 0xD800 <= high < 0xE000 else high
        if low <= high:
            yield low, high


def regex_text(node: Node) -> str:
    """Return a tree without ``Both`` and ``Not`` as one unit of a regular expression."""
    match node:
        case Raw(text):
            return text
        case Chars(ranges, named, negated, folded):
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not named and not negated:
                text = character_code(chr(ranges[0][0]))
            else:
                text = _class_text(node)
            return f"(?i:{text})" if folded else text
        case Seq(parts):
            return (
                f"(?:{''.join(map(regex_text, parts))})"
                if len(parts) != 1
                else regex_text(parts[0])
            )
        case OneOf(parts):
            return f"(?:{'|'.join(map(regex_text, parts))})" if parts else r"[^\s\S]"
        case Times(part, low, high):
            signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (low, low): f"{{{low}}}"}
            end = "" if high is None else high
            return f"(?:{regex_text(part)}){signs.get((low, high), f'{{{low},{end}}}')}"
    raise TypeError(f"{node} is not one regular expression")


_SPECIAL = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_ESCAPED = {
    '"': '\\"',
    "\\": "\\\\",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
    "\b": "\\b",
    "\f": "\\f",
}
_SPECIALS = [chr(code) for low, high in _SPECIAL for code in range(low, high + 1)]


def escaped(letter: str) -> str:
    """Return a character as it stands in a JSON string: as ``json.dumps`` writes it, but not in ASCII."""
    return _ESCAPED.get(letter, f"\\u{ord(letter):04x}" if ord(letter) < 0x20 else letter)


def in_json(node: Node) -> Node:
    """Return the tree of the JSON spellings, without quotes, of the strings that a tree matches."""
    match node:
        case Chars():
            return _encoded(node)
        case Seq(parts):
            return Seq(tuple(map(in_json, parts)))
        case OneOf(parts):
            return OneOf(tuple(map(in_json, parts)))
        case Both(parts):
            return Both(tuple(map(in_json, parts)))
        case Times(part, low, high):
            return Times(in_json(part), low, high)
        case Not(part):
            return Both((in_json(ANY_TEXT), Not(in_json(part))))
    raise TypeError(f"{node} has no characters")


@cache
def _encoded(chars: Chars) -> Node:
    special = [letter for letter in _SPECIALS if _covers(chars, letter)]
    if not special:
        return chars
    escapes = "|".join("".join(map(character_code, escaped(letter))) for letter in special)
    if not chars.negated and all(low == high for low, high in chars.ranges) and not chars.named:
        kept = tuple(each for each in chars.ranges if chr(each[0]) not in _SPECIALS)
        if not kept:
            return Raw(f"(?:{escapes})")
        return Raw(f"(?:{regex_text(replace(chars, ranges=kept))}|{escapes})")
    flag = "i" if chars.folded else ""
    plain = f"(?{flag}:[{_class_text(chars)}--{_class_text(Chars(_SPECIAL))}])"
    return Raw(f"(?:{plain}|{escapes})")


def _covers(chars: Chars, letter: str) -> bool:
    code = ord(letter)  # which has no case
    found = any(low <= code <= high for low, high in chars.ranges)
    return (
        found or any(letter in first_characters(f"[{each}]") for each in chars.named)
    ) != chars.negated


class Terminals:
    """The terminals of one grammar in llguidance's Lark, each with one name.

    Args:
        prefix: the prefix of their names, in upper case.
    """

    def __init__(self, prefix: str = "T") -> None:
        self._prefix = prefix
        self._names: dict[str, str] = {}  # by their bodies
        self._bodies: dict[str, str] = {}
        self._parts: dict[str, list[str]] = {}

    def name(self, node: Node) -> str:
        """Return the name of the terminal of a tree."""
        parts: list[str] = []
        match node:
            case Not(part):
                parts = [self.name(part)]
                body = f"~{parts[0]}"
            case Both(inside) | Seq(inside) | OneOf(inside) if not _is_plain(node):
                parts = [*map(self.name, inside)]
                sign = {Both: " & ", Seq: " ", OneOf: " | "}[type(node)]
                body = sign.join(parts)
            case _:
                body = f"/{regex_text(node)}/"
        name = self._names.setdefault(body, f"{self._prefix}{len(self._names)}")
        self._bodies[name], self._parts[name] = body, parts
        return name

    def may_be_empty(self, name: str) -> bool:
        """Return whether a terminal may match no text, as far as its form tells."""
        return bool(self._parts[name]) or "[^" in self._bodies[name] or "--" in self._bodies[name]

    def lines(self, used: Iterable[str] | None = None) -> list[str]:
        """Return the lines that define these terminals, or only the used ones and their parts."""
        needed: set[str] = set(self._parts if used is None else ())
        left = [*(used or ())]
        while left:
            name = left.pop()
            if name in self._parts and name not in needed:
                needed.add(name)
                left += self._parts[name]
        return [f"{name}: {body}" for name, body in self._bodies.items() if name in needed]


@cache
def _is_plain(node: Node) -> bool:
    match node:
        case Both() | Not():
            return False
        case Seq(parts) | OneOf(parts):
            return all(map(_is_plain, parts))
        case Times(part, _, _):
            return _is_plain(part)
    return True
