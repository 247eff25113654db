"""JSON schemas: read and checked, then turned into facts for each type of value.

Older keywords keep the meaning of their draft under any ``$schema``. A ``$ref`` replaces the keywords
beside it only in a schema of draft 7 or older.

A ``Claim`` states that a schema holds, or that it does not. A value's place is a set of claims.
``Claims.cases`` returns the values of one type that meet them, as alternatives of facts. Facts never
admit an invalid value, and admit all valid ones but those that docs/guide/structures.md lists.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, TypeAlias, cast
from urllib.parse import unquote, urldefrag, urljoin

from genrt.errors import InvalidConstraint
from genrt.numbers import displayed
from genrt.structures.matching import matches_nothing
from genrt.structures.regexes import (
    Both,
    Chars,
    Node,
    Not,
    OneOf,
    Raw,
    Terminals,
    Times,
    intersection,
    literal,
    parsed,
    searched,
)

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # datetime knows no year 0
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:Z|[+\\-]{_HOUR}:[0-5][0-9])"

_OF_DAY = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_OF_YEAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_OF_YEAR}(?:T{_OF_DAY})?|T{_OF_DAY}|[0-9]+W)"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_PART = "[0-9A-Fa-f]{1,4}"
_TWO = f"(?:{_PART}:{_PART}|{_IPV4})"
_IPV6 = (
    "(?:"
    + "|".join(
        [
            f"(?:{_PART}:){{6}}{_TWO}",
            f"::(?:{_PART}:){{5}}{_TWO}",
            *(
                f"(?:(?:{_PART}:){{0,{before}}}{_PART})?::(?:{_PART}:){{{4 - before}}}{_TWO}"
                for before in range(5)
            ),
            f"(?:(?:{_PART}:){{0,5}}{_PART})?::{_PART}",
            f"(?:(?:{_PART}:){{0,6}}{_PART})?::",
        ]
    )
    + ")"
)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]+"
_EMAIL = f"{_ATOM}(?:\\.{_ATOM})*@(?:{_HOSTNAME}|\\[(?:{_IPV4}|IPv6:{_IPV6})\\])"

_HEX = "%[0-9A-Fa-f]{2}"
_PLAIN = "A-Za-z0-9\\-._\\~!$&'()*+,;="
_SIGN = f"(?:[{_PLAIN}:@]|{_HEX})"
_AUTHORITY = (
    f"(?:(?:[{_PLAIN}:]|{_HEX})*@)?(?:\\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\\.[{_PLAIN}:]+)\\]"
    f"|(?:[{_PLAIN}]|{_HEX})*)(?::[0-9]*)?"
)
_URI = (
    f"[A-Za-z][A-Za-z0-9+\\-.]*:(?://{_AUTHORITY}(?:/{_SIGN}*)*|/(?:{_SIGN}+(?:/{_SIGN}*)*)?"
    f"|{_SIGN}+(?:/{_SIGN}*)*|)(?:\\?(?:{_SIGN}|[/?])*)?(?:#(?:{_SIGN}|[/?])*)?"
)
_DIGIT = "[0-9A-Fa-f]"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_DIGIT}{{8}}-(?:{_DIGIT}{{4}}-){{3}}{_DIGIT}{{12}}",
    "uri": _URI,
}
"""The formats by name. None has ``^`` or ``$`` as an anchor."""

LONGEST = {"hostname": 253}
"""The most characters of a format whose expression does not bound them."""


Schema: TypeAlias = dict[str, Any]

_MOST = {"minItems": 10_000, "maxItems": 10_000, "properties": 2_000, "patternProperties": 50}
_MOST["enum"] = 100_000  # this many take half a minute

_DEFINITIONS = ("$defs", "definitions")
_MAPS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "propertyNames", "contains"),
    *("not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_MAPS, "dependencies", "dependentRequired"), (dict,)),
    **dict.fromkeys((*_LISTS, "enum", "required"), (list,)),
    **dict.fromkeys(_SINGLE, (dict, bool)),
    **dict.fromkeys((*_COUNTS, *_NUMBERS), (int, float)),
    **dict.fromkeys(("$ref", "$id", "$anchor", "$schema", "pattern", "format"), (str,)),
    "items": (dict, bool, list),
    "type": (str, list),
    "uniqueItems": (bool,),
    "exclusiveMinimum": (int, float, bool),
    "exclusiveMaximum": (int, float, bool),
}
_NAMES = {
    list: "a list",
    dict: "an object",
    bool: "true or false",
    str: "a string",
    int: "a number",
}
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "$comment", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "id"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "xml", "const"),
    *("externalDocs", "enumNames", "propertyOrdering", "strict", "name", "nullable"),
)
_UNDONE = ("$dynamicRef", "$recursiveRef")
_KNOWN = (*_KINDS, *_ANNOTATIONS, *_UNDONE)
_DRAFTS = {
    f"{scheme}://json-schema.org/{draft}/schema{end}": draft
    for draft in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
    for scheme in ("http", "https")
    for end in ("", "#")
}
_OLD = ("draft-04", "draft-06", "draft-07")


def wrong(what: str) -> InvalidConstraint:
    """Return the error for a part of a schema that is not one."""
    return InvalidConstraint(f"the JSON schema has {what}")


def undone(what: str) -> InvalidConstraint:
    """Return the error for a part of a schema that genrt cannot compile."""
    return wrong(
        f"{what}: take it out, and check it by a predicate: all_of(json_schema(…), predicate(…))"
    )


def object_of(schema: object) -> Schema:
    """Return a schema as a new object, read from its JSON text.

    Args:
        schema: a mapping, a JSON text, a bool, or a pydantic model's class.

    Raises:
        InvalidConstraint: it is another kind of object, is false, or has no JSON form.
    """
    kind = InvalidConstraint(
        f"the JSON schema is {displayed(schema)}: give a dict, a JSON text, a pydantic model or True for "
        "any JSON"
    )
    try:
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, Mapping):
            schema = json.dumps(dict(schema), allow_nan=False)
    except RecursionError as error:
        raise InvalidConstraint(f"the JSON schema is nested too deeply: {error}") from error
    except Exception as error:  # of pydantic's own kinds too
        raise InvalidConstraint(f"the JSON schema has no JSON form: {error}") from error
    if not isinstance(schema, str | bool):
        raise kind
    try:
        rules = (
            schema if isinstance(schema, bool) else json.loads(schema, parse_constant=_refuse_nan)
        )
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(f"the JSON schema is not a JSON text: {error}") from error
    if rules is False:
        raise InvalidConstraint("the JSON schema is false, which no text satisfies: change it")
    if rules is not True and not isinstance(rules, dict):
        raise kind
    return {} if rules is True else rules


def _refuse_nan(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Document:
    """A schema and all schemas inside of it, by identity. Raises InvalidConstraint if a keyword is
    unknown and looks misspelt, is used wrongly, or is too large."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        draft = _DRAFTS.get(root.get("$schema", ""), "draft/2020-12")
        if "$schema" in root and root["$schema"] not in _DRAFTS:
            raise undone(f"the $schema {root['$schema']!r}, which is not a draft from 4 to 2020-12")
        self._ref_is_alone = draft in _OLD
        self._is_first = draft == "draft-04"
        self._bases: dict[int, str] = {}
        self._by_id: dict[str, Schema] = {"": root}
        self._anchors: dict[str, Schema] = {}
        self._visit(root, "")

    def _visit(self, root: Any, base: str) -> None:
        left = [(root, base)]
        while left:
            schema, base = left.pop()
            if isinstance(schema, bool) or id(schema) in self._bases:
                continue
            if not isinstance(schema, dict):
                raise wrong(f"{schema!r} where a schema belongs: change it")
            if self._ref_is_alone and "$ref" in schema:
                for key in [key for key in schema if key not in ("$ref", *_DEFINITIONS)]:
                    del schema[key]
            _check_keywords(schema)
            if not (self._ref_is_alone and "$ref" in schema):
                identity = schema.get("id" if self._is_first else "$id", "")
                if isinstance(identity, str) and identity:
                    base = urldefrag(urljoin(base, identity))[0]
                    if identity.startswith("#"):  # an anchor, in old drafts
                        self._anchors[urljoin(base, identity)] = schema
                    else:
                        self._by_id[base] = schema
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(schema.get(key), str):
                        self._anchors[f"{base}#{schema[key]}"] = schema
            self._bases[id(schema)] = base
            left += [(inside, base) for inside in _inside(schema)]

    def target(self, schema: Schema) -> Any:
        """Return the schema that a ``$ref`` refers to. Raises InvalidConstraint if it is not in
        this document."""
        reference = schema["$ref"]
        whole = urljoin(self._bases[id(schema)], reference)
        base, fragment = urldefrag(whole)
        if f"{base}#{fragment}" in self._anchors:
            return self._anchors[f"{base}#{fragment}"]
        found: Any = self._by_id.get(base)
        if found is None or (fragment and not fragment.startswith("/")):
            raise InvalidConstraint(
                f"the JSON schema's $ref {reference!r} is not in the schema: put what it "
                "refers to into $defs"
            )
        for step in unquote(fragment).split("/")[1:] if fragment != "/" else ():
            key: Any = step.replace("~1", "/").replace("~0", "~")
            base = self._bases.get(id(found), base)
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (TypeError, ValueError, LookupError):
                raise InvalidConstraint(
                    f"the JSON schema's $ref {reference!r} leads nowhere: mend it"
                ) from None
        self._visit(found, base)
        return found


def _inside(schema: Schema) -> Iterator[Any]:
    """Yield all schemas directly inside of one."""
    for key in (*_MAPS, "dependencies"):
        for inside in schema.get(key, {}).values():
            if not (key == "dependencies" and isinstance(inside, list)):
                yield inside
    for key in _LISTS:
        yield from schema.get(key, ())
    for key in _SINGLE:
        if isinstance(schema.get(key), list):
            yield from schema[key]
        elif key in schema:
            yield schema[key]


def _check_keywords(schema: Schema) -> None:
    """Raise InvalidConstraint for a keyword that is unknown, used wrongly, or too large."""
    for key, value in schema.items():
        kinds = _KINDS.get(key, (object,))
        if key not in _KNOWN:
            close = difflib.get_close_matches(key, _KNOWN, 1, 0.8)
            if close and not key.startswith("x-"):
                raise wrong(f"the unknown keyword {key!r}: write {close[0]!r}, or take it out")
        elif key in _UNDONE:
            raise undone(f"{key!r}, which cannot be compiled")
        elif not isinstance(value, kinds) or (kinds == (int, float) and isinstance(value, bool)):
            raise wrong(f"{key!r}: {value!r}; give {_NAMES[kinds[0]]}")
        if key in _COUNTS and (value < 0 or value != int(value)):
            raise wrong(f"{key!r}: {value}; give a whole number from 0 on")
        if key in _MOST:
            size = len(value) if isinstance(value, dict | list) else value
            if size > _MOST[key]:
                raise undone(f"{key} of {size:,}, and {_MOST[key]:,} is the most")
    if "prefixItems" in schema and isinstance(schema.get("items"), list):
        raise wrong("prefixItems beside a list of items: give one of both")
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        if name not in _TYPES:
            raise wrong(f"the type {name!r}: give one of {', '.join(_TYPES)}")
    names = [schema.get("required", []), *schema.get("dependentRequired", {}).values()]
    names += [each for each in schema.get("dependencies", {}).values() if isinstance(each, list)]
    for each in names:
        if not isinstance(each, list) or not all(isinstance(name, str) for name in each):
            raise wrong(f"{each!r} as required properties: give a list of names")
    if schema.get("multipleOf", 1) <= 0:
        raise wrong(f"a multipleOf of {schema['multipleOf']}: give a number above 0")
    _refuse_what_is_rounded(schema)


def _refuse_what_is_rounded(schema: Schema) -> None:
    left = [schema.get(key) for key in ("const", "enum", *_NUMBERS)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, int) and (
            abs(value) > 10**300 or Decimal(repr(float(value))) != value
        ):
            raise wrong(
                f"the integer {value}, which is not a 64-bit float and would be rounded: leave it out, "
                "or give it as a string"
            )


MOST_REMAINDERS = 100_000
MOST_LISTED = 2_000

_INTEGER = "-?(?:0|[1-9][0-9]*)"
_ANY_FRACTION = r"(?:\.[0-9]+)?"


def fraction_of(value: int | float) -> Fraction:
    """Return the number that a JSON text means, as it is written."""
    return Fraction(repr(value))


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a kind within bounds, perhaps from a list.

    Attributes:
        is_integer: ``True``: only integers; ``False``: no integers; else both.
        low, high: the bounds, each with whether it is exclusive.
        multiple: the numbers are multiples of this number.
        listed: the texts of the only numbers.
        unlisted: excluded numbers.
    """

    is_integer: bool | None = None
    low: tuple[Fraction, bool] | None = None
    high: tuple[Fraction, bool] | None = None
    multiple: Fraction | None = None
    listed: tuple[str, ...] | None = None
    unlisted: frozenset[Fraction] = frozenset()

    def __and__(self, other: Numbers) -> Numbers | None:
        """Return the intersection, or ``None`` if it is visibly empty."""
        if None not in (self.is_integer, other.is_integer) and self.is_integer != other.is_integer:
            return None
        lows = [each for each in (self.low, other.low) if each]
        highs = [each for each in (self.high, other.high) if each]
        multiples = [each for each in (self.multiple, other.multiple) if each]
        lists = [each for each in (self.listed, other.listed) if each is not None]
        found = Numbers(
            self.is_integer if other.is_integer is None else other.is_integer,
            max(lows, default=None),
            min(highs, key=lambda each: (each[0], not each[1]), default=None),
            _least_common_multiple(multiples) if multiples else None,
            None if not lists else tuple(text for text in lists[0] if text in lists[-1]),
            self.unlisted | other.unlisted,
        )
        return found if found._is_possible() else None

    def has(self, number: Fraction) -> bool:
        """Return whether a number is among these, but for ``listed``."""
        low, high = self.low, self.high
        return (
            (self.is_integer is None or (number.denominator == 1) == self.is_integer)
            and (low is None or number > low[0] or (number == low[0] and not low[1]))
            and (high is None or number < high[0] or (number == high[0] and not high[1]))
            and (self.multiple is None or (number / self.multiple).denominator == 1)
            and number not in self.unlisted
        )

    def _is_possible(self) -> bool:
        if self.listed is not None:
            return bool(self.kept())
        low, high = self.low, self.high
        if low is None or high is None:
            return True
        return low[0] < high[0] or (low[0] == high[0] and self.has(low[0]))

    def kept(self) -> list[str]:
        """Return the texts of the listed numbers that are among these."""
        return [text for text in self.listed or () if self.has(Fraction(text))]

    def finite(self) -> list[str] | None:
        """Return the texts of all numbers, each once, if they are few."""
        if self.listed is not None:
            by_value = {Fraction(text): text for text in reversed(self.kept())}
            return list(reversed(by_value.values()))
        if self.low and self.high and self.is_integer:
            first, last = math.ceil(self.low[0]), math.floor(self.high[0])
            if last - first < 16:
                return [str(n) for n in range(first, last + 1) if self.has(Fraction(n))]
        return None

    def forms(self) -> tuple[list[Node], list[str]]:
        """Return the regular expressions of these numbers, and JSON schemas for llguidance."""
        if self.listed is not None:
            return [OneOf(tuple(map(literal, self.kept())))], []
        parts = [self]
        for hole in sorted(self.unlisted):
            parts = [
                piece
                for part in parts
                for side in (Numbers(high=(hole, True)), Numbers(low=(hole, True)))
                if (piece := part & side) is not None
            ]
        nodes: list[Node] = []
        schemas: list[str] = []
        for part in parts:
            if part.multiple is not None:
                part._add_multiples(part.multiple, nodes, schemas)
            else:
                nodes += part._nodes()
        return nodes, schemas

    def _nodes(self) -> list[Node]:
        """Return the regular expressions of numbers within bounds, positive and negative ones."""
        shape = {
            True: "[0-9]+",
            False: r"[0-9]+\.[0-9]*[1-9][0-9]*",
            None: f"[0-9]+{_ANY_FRACTION}",
        }
        if self.low is None and self.high is None:
            if self.is_integer is None:
                return [Raw(f"{_INTEGER}{_ANY_FRACTION}(?:[eE][+-]?[0-9]+)?")]
            if self.is_integer:
                return [Raw(_INTEGER)]
        nodes: list[Node] = []
        below = [bound and (-bound[0], bound[1]) for bound in (self.high, self.low)]
        for minus, (low, high) in (("", (self.low, self.high)), ("-", below)):
            if high is not None and (high[0] < 0 or high == (Fraction(0), True)):
                continue
            parts: list[Node] = [Raw(rf"{minus}(?:0|[1-9][0-9]*){_ANY_FRACTION}")]
            parts.append(Raw(minus + shape[self.is_integer]))
            if low is not None and (low[0] > 0 or low == (Fraction(0), True)):
                parts.append(Raw(f"{minus}(?:{_at_least(*low)})"))
            if high is not None:
                parts.append(Not(Raw(f"{minus}(?:{_at_least(high[0], not high[1])})")))
            # A reader of floats would round more digits to an excluded bound or integer.
            if self.is_integer is False or any(each and each[1] for each in (low, high)):
                parts.append(Raw(f"{minus}(?:[0-9]*|[0-9.]{{1,16}})"))
            nodes.append(Both(tuple(parts)))
        return nodes

    def _add_multiples(self, step: Fraction, nodes: list[Node], schemas: list[str]) -> None:
        if self.is_integer is False:
            raise undone("a multipleOf of numbers that are not integers")
        if self.is_integer:
            step = _least_common_multiple([step, Fraction(1)])
        remainders = _remainders_of(step)
        if remainders > MOST_REMAINDERS:
            raise undone(
                f"a multipleOf that needs {remainders:,} remainders to be told apart, and "
                f"{MOST_REMAINDERS:,} is the most"
            )
        first = Fraction(0)
        if self.low is not None:
            first = max(first, step * math.ceil(self.low[0] / step))
            first += step if self.low == (first, True) else 0
        if self.high is None:
            last = None
        else:
            last = step * math.floor(self.high[0] / step)
            last -= step if self.high == (last, True) else 0
            if last < first:
                return
        # llguidance's bounds are right for integers; the multiples up to these are listed.
        start = math.ceil(first)
        end = None if last is None else math.floor(last)
        if last is not None and (last - first) / step < MOST_LISTED:
            listed = _multiples(first, last, step)
            start, end = 1, 0
        else:
            listed = _multiples(first, start - step / 2, step)
            listed += [] if last is None else _multiples(Fraction(math.floor(last)), last, step)
            if len(listed) > 2 * MOST_LISTED:
                raise undone("a multipleOf with too many multiples within a fraction of 1")
        if listed:
            nodes.append(OneOf(tuple(literal(_decimal(each)) for each in listed)))
        if end is None or start <= end:
            schema: dict[str, int | float | str] = {
                "type": "integer" if self.is_integer else "number",
                "minimum": start,
                "multipleOf": int(step) if step.denominator == 1 else float(step),
            }
            if end is not None:
                schema["maximum"] = end
            schemas.append(json.dumps(schema))


def _multiples(first: Fraction, last: Fraction, step: Fraction) -> list[Fraction]:
    count = math.ceil(first / step)
    return [step * n for n in range(count, math.floor(last / step) + 1)]


def _least_common_multiple(steps: Iterable[Fraction]) -> Fraction:
    found, *others = steps
    for other in others:
        numerator = math.lcm(found.numerator, other.numerator)
        found = Fraction(numerator, math.gcd(found.denominator, other.denominator))
    return found


def _remainders_of(step: Fraction) -> int:
    """Return how many remainders an automaton for the decimal multiples of a number tells apart."""
    while step.denominator != 1:
        step *= 10
    return int(str(step.numerator).rstrip("0"))


def _decimal(number: Fraction) -> str:
    """Return a number from 0 on in decimals, exactly, without a last zero."""
    places = 0
    while number.denominator != 1:
        number *= 10
        places += 1
    digits = str(number.numerator).rjust(places + 1, "0")
    return f"{digits[: len(digits) - places]}.{digits[len(digits) - places :]}".rstrip(".")


def _at_least(bound: Fraction, strict: bool) -> str:
    """Return the decimals at or above a bound from 0 on; ``strict``: above it."""
    whole, _, part = _decimal(bound).partition(".")
    greater = [f"[1-9][0-9]{{{len(whole)},}}"]
    greater += [
        f"{whole[:i]}[{chr(ord(digit) + 1)}-9][0-9]{{{len(whole) - i - 1}}}"
        for i, digit in enumerate(whole)
        if digit < "9"
    ]
    fractions = [
        f"{part[:i]}[{chr(ord(digit) + 1)}-9][0-9]*" for i, digit in enumerate(part) if digit < "9"
    ]
    fractions.append(f"{part}0*[1-9][0-9]*" if strict else f"{part}[0-9]*" if part else "[0-9]+")
    same = rf"{whole}\.(?:{'|'.join(fractions)})"
    if not part and not strict:
        same = f"{whole}(?:{same[len(whole) :]})?"
    return f"(?:{'|'.join(greater)}){_ANY_FRACTION}|{same}"


KINDS = ("null", "boolean", "number", "string", "array", "object")
MOST_CASES = 4_000
MOST_EXCLUSIVE = 300
_DEEPEST = 3

Claim: TypeAlias = tuple[int, bool]
"""The number of a schema, and whether it holds."""

Place: TypeAlias = frozenset[Claim]
"""The claims about one value."""

ANYTHING: Place = frozenset()
NOTHING: Place = frozenset({(-1, True)})
"""A claim that no value meets."""


@dataclass(frozen=True, slots=True)
class Literals:
    """Some of ``null``, ``true``, ``false``."""

    texts: frozenset[str]

    def __and__(self, other: Literals) -> Literals | None:
        texts = self.texts & other.texts
        return Literals(texts) if texts else None


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings that all ``regexes`` match, and that are ``listed``, if something is."""

    listed: tuple[str, ...] | None = None
    regexes: frozenset[Node] = frozenset()

    def __and__(self, other: Strings) -> Strings | None:
        listed = self.listed if other.listed is None else other.listed
        if self.listed is not None and other.listed is not None:
            kept = {*other.listed}
            listed = tuple(text for text in self.listed if text in kept)
        found = Strings(listed, self.regexes | other.regexes)
        return None if listed == () else found

    def node(self) -> Node:
        """Return the strings as a regular expression."""
        parts = sorted(self.regexes, key=repr)
        parts += [] if self.listed is None else [OneOf(tuple(map(literal, self.listed)))]
        return intersection(parts)


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays of some length.

    Attributes:
        items: by schema, the places of the first items, and the place of all other items.
        contained: places, from which item on, and how many times at least and at most one comes.
    """

    items: tuple[tuple[tuple[Place, ...], Place], ...] = ()
    low: int = 0
    high: int | None = None
    contained: tuple[tuple[Place, int, int, int | None], ...] = ()
    are_unique: bool = False

    def __and__(self, other: Arrays) -> Arrays | None:
        highs = [each for each in (self.high, other.high) if each is not None]
        found = Arrays(
            tuple(dict.fromkeys(self.items + other.items)),
            max(self.low, other.low),
            min(highs, default=None),
            tuple(dict.fromkeys(self.contained + other.contained)),
            self.are_unique or other.are_unique,
        )
        return None if found.high is not None and found.low > found.high else found

    def place(self, index: int) -> Place:
        """Return the place of an item."""
        parts = (first[index] if index < len(first) else rest for first, rest in self.items)
        return ANYTHING.union(*parts)

    @property
    def named(self) -> int:
        """How many of the first items have a place of their own."""
        return max((len(first) for first, _ in self.items), default=0)


@dataclass(frozen=True, slots=True)
class Names:
    """The places of an object's properties under one schema: by name, by patterns, of all others."""

    properties: tuple[tuple[str, Place], ...] = ()
    patterns: tuple[tuple[str, Place], ...] = ()
    others: Place | None = None


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects of some properties.

    Attributes:
        names: by schema, the places of properties.
        allowed: places that the names have to meet, as strings.
    """

    names: tuple[Names, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    allowed: tuple[Place, ...] = ()

    def __and__(self, other: Objects) -> Objects | None:
        highs = [each for each in (self.high, other.high) if each is not None]
        found = Objects(
            tuple(dict.fromkeys(self.names + other.names)),
            tuple(dict.fromkeys(self.required + other.required)),
            max(self.low, other.low),
            min(highs, default=None),
            tuple(dict.fromkeys(self.allowed + other.allowed)),
        )
        least = max(found.low, len(found.required))
        return None if found.high is not None and least > found.high else found

    def place(self, matched: Set[str], surely: Set[str], name: str | None = None) -> Place:
        """Return the place of the properties whose names match these patterns, in the wide reading and
        in the narrow one; ``name`` is that of a single property."""
        place = ANYTHING
        for names in self.names:
            given = dict(names.properties).get(name) if name is not None else None
            place = place.union(given or (), *(p for each, p in names.patterns if each in matched))
            is_other = given is None and not any(each in surely for each, _ in names.patterns)
            if is_other and names.others is not None:
                place |= names.others
        return place


Facts: TypeAlias = Literals | Numbers | Strings | Arrays | Objects
Cases: TypeAlias = list[Any]  # of Facts of one type

Condition: TypeAlias = Callable[[bool], Cases]
"""Returns the values of one type that meet a condition (True), or fail it (False)."""

_ALL: dict[str, Facts] = {
    "null": Literals(frozenset({"null"})),
    "boolean": Literals(frozenset({"true", "false"})),
    "number": Numbers(),
    "string": Strings(),
    "array": Arrays(),
    "object": Objects(),
}


class Claims:
    """The claims that one document makes."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._schemas: list[Schema] = []
        self._numbers: dict[int, int] = {}
        self._known: dict[tuple[Claim, str], Cases] = {}
        self._open: set[tuple[Claim, str]] = set()
        self._loops = 0
        self._patterns: dict[str, tuple[Node, Node]] = {}
        self._made: dict[str, Schema] = {}  # by their texts

    def place(self, schema: Any, holds: bool = True) -> Place:
        """Return the place where a schema holds, or does not."""
        if isinstance(schema, bool):
            return ANYTHING if schema == holds else NOTHING
        number = self._numbers.get(id(schema))
        if number is None:
            number = self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append(schema)
        return frozenset({(number, holds)})

    def pattern(self, text: str) -> tuple[Node, Node]:
        """Return the narrow and the wide reading of a pattern."""
        if text not in self._patterns:
            name = "JSON schema's pattern"
            both = searched(text, name), searched(text, name, wide=True)
            self._patterns[text] = both
        return self._patterns[text]

    def cases(self, place: Place, kind: str) -> Cases:
        """Return the values of a type that meet all claims of a place."""
        return _all(kind, (self._cases(claim, kind) for claim in sorted(place)))

    def _cases(self, claim: Claim, kind: str) -> Cases:
        if claim[0] < 0:
            return []
        key = claim, kind
        if key in self._known:
            return self._known[key]
        if key in self._open:
            if not claim[1]:
                raise undone("a 'not' around a schema that refers to itself")
            self._loops += 1
            return []  # a schema that needs itself adds no value
        loops = self._loops
        self._open.add(key)
        try:
            number, holds = claim
            parts = self._parts(self._schemas[number], kind)
            found = (
                _all(kind, (part(True) for part in parts))
                if holds
                else _either(part(False) for part in parts)
            )
        finally:
            self._open.discard(key)
        if loops == self._loops:
            self._known[key] = found
        return found

    def _of(self, schema: Any, kind: str, holds: bool = True) -> Cases:
        return self.cases(self.place(schema, holds), kind)

    def is_empty(self, place: Place, depth: int = _DEEPEST) -> bool:
        """Return whether no value meets a place, as far as that is seen without going deep."""
        return all(self._are_empty(self.cases(place, kind), depth) for kind in KINDS)

    def _are_empty(self, cases: Cases, depth: int) -> bool:
        return all(self._is_empty(facts, depth) for facts in cases)

    def _is_empty(self, facts: Facts, depth: int) -> bool:
        match facts:
            case Strings(listed, regexes):
                return (
                    bool(regexes)
                    and (listed is not None or len(regexes) > 1)
                    and is_nothing(facts.node())
                )
            case Arrays(_, low) if depth:
                indices = range(min(low, facts.named + 1))
                return any(self.is_empty(facts.place(index), depth - 1) for index in indices)
            case Objects() if depth:
                return any(
                    self.is_empty(self.of_name(facts, name), depth - 1) for name in facts.required
                )
        return False

    def of_name(self, objects: Objects, name: str) -> Place:
        """Return the place of a property."""
        patterns = {pattern for names in objects.names for pattern, _ in names.patterns}
        matched = {each for each in patterns if _matches(self.pattern(each)[1], name)}
        surely = {each for each in matched if _matches(self.pattern(each)[0], name)}
        place = objects.place(matched, surely, name)
        for allowed in objects.allowed:
            strings = self.cases(allowed, "string")
            if all(is_nothing(Both((each.node(), literal(name)))) for each in strings):
                place |= NOTHING
        return place

    def _parts(self, schema: Schema, kind: str) -> Iterator[Condition]:
        """Yield a schema's conditions on a type."""
        if "type" in schema:
            yield _of_types(schema["type"], kind)
        if "const" in schema:
            yield lambda holds: self._listed([schema["const"]], kind, holds)
        if "enum" in schema:
            yield lambda holds: self._listed(schema["enum"], kind, holds)
        if "$ref" in schema:
            yield lambda holds: self._of(self._document.target(schema), kind, holds)
        for each in schema.get("allOf", ()):
            yield partial(self._of, each, kind)
        if "anyOf" in schema:
            yield lambda holds: self._any(schema["anyOf"], kind, holds)
        if "oneOf" in schema:
            yield lambda holds: self._one(schema["oneOf"], kind, holds)
        if "not" in schema:
            yield lambda holds: self._of(schema["not"], kind, not holds)
        if "if" in schema and schema.keys() & {"then", "else"}:
            yield lambda holds: self._if(schema, kind, holds)
        match kind:
            case "number":
                yield from _of_numbers(schema)
            case "string":
                yield from self._of_strings(schema)
            case "array":
                yield from self._of_arrays(schema)
            case "object":
                yield from self._of_objects(schema)

    def _any(self, schemas: list[Any], kind: str, holds: bool) -> Cases:
        each = (self._of(schema, kind, holds) for schema in schemas)
        return _either(each) if holds else _all(kind, each)

    def _one(self, schemas: list[Any], kind: str, holds: bool) -> Cases:
        if len(schemas) > MOST_EXCLUSIVE:
            raise undone(
                f"a oneOf of {len(schemas)}, and {MOST_EXCLUSIVE} is the most: or write anyOf"
            )
        inside = [self._of(schema, kind) for schema in schemas]
        if not holds:
            pairs = (_both(one, other) for one, other in combinations(inside, 2))
            return _either([self._any(schemas, kind, False), *pairs])
        found: list[Cases] = []
        for index, cases in enumerate(inside):
            for other, schema in enumerate(schemas):
                if other != index and not self._are_empty(_both(cases, inside[other]), _DEEPEST):
                    cases = _both(cases, self._of(schema, kind, False))
            found.append(cases)
        return _either(found)

    def _if(self, schema: Schema, kind: str, holds: bool) -> Cases:
        found = []
        for is_met, branch in ((True, "then"), (False, "else")):
            met = self._of(schema["if"], kind, is_met)
            found.append(_both(met, self._of(schema.get(branch, True), kind, holds)) if met else [])
        return _either(found)

    def _listed(self, values: list[Any], kind: str, holds: bool) -> Cases:
        """Return the values of a list, or the other values."""
        own = [value for value in values if _json_kind(value) == kind]
        if not own:
            return [] if holds else [_ALL[kind]]
        match kind:
            case "null" | "boolean":
                texts = frozenset(json.dumps(value) for value in own)
                kept = texts if holds else cast("Literals", _ALL[kind]).texts - texts
                return [Literals(kept)] if kept else []
            case "number" if holds:
                return [Numbers(listed=tuple(dict.fromkeys(map(_number_text, own))))]
            case "number":
                return [Numbers(unlisted=frozenset(map(fraction_of, own)))]
            case "string" if holds:
                return [Strings(tuple(dict.fromkeys(own)))]
            case "string":
                return [_of_regexes(Not(OneOf(tuple(map(literal, own)))))]
        if not holds:
            raise undone(f"a 'not' of an {kind} as a whole")
        return [self._constant(value) for value in own]

    def _constant(self, value: Any) -> Facts:
        if isinstance(value, list):
            places = tuple(self.place(self._kept({"const": item})) for item in value)
            return Arrays(((places, NOTHING),), len(value), len(value))
        properties = tuple(
            (name, self.place(self._kept({"const": item}))) for name, item in value.items()
        )
        return Objects((Names(properties, (), NOTHING),), tuple(value))

    def _kept(self, schema: Schema) -> Schema:
        """Return an equal schema that is always the same object."""
        return self._made.setdefault(json.dumps(schema), schema)

    def _of_strings(self, schema: Schema) -> Iterator[Condition]:
        yield from _counted(schema, "Length", _of_length)
        if "pattern" in schema:
            narrow, wide = self.pattern(schema["pattern"])
            yield _condition([_of_regexes(narrow)], [_of_regexes(Not(wide))])
        if "format" in schema:
            yield _condition([_of_regexes(*_format(schema["format"]))], "format")

    def _of_arrays(self, schema: Schema) -> Iterator[Condition]:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        if first or rest not in (True, {}):
            failed = [
                Arrays((((*[ANYTHING] * index, self.place(each, False)), ANYTHING),), index + 1)
                for index, each in enumerate(first)
                if each is not True
            ]
            if rest is not True:
                failed.append(Arrays(contained=((self.place(rest, False), len(first), 1, None),)))
            yield _condition([Arrays(((tuple(map(self.place, first)), self.place(rest)),))], failed)
        if schema.get("unevaluatedItems", True) not in (True, {}):
            raise undone("'unevaluatedItems'")
        yield from _counted(schema, "Items", Arrays)
        if "contains" in schema:
            yield self._contains(schema)
        if schema.get("uniqueItems"):
            yield _condition([Arrays(are_unique=True)], "uniqueItems")

    def _contains(self, schema: Schema) -> Condition:
        inside = schema["contains"]
        low, high = int(schema.get("minContains", 1)), schema.get("maxContains")
        place = self.place(inside)
        met = [Arrays(contained=((place, 0, low, None),) if low else ())]
        failed = [self._at_most(inside, low - 1)] if low else []
        if high is not None:
            met = _both([self._at_most(inside, int(high))], met)
            failed.append(Arrays(contained=((place, 0, int(high) + 1, None),)))
        return _condition(met, failed)

    def _at_most(self, schema: Any, count: int) -> Arrays:
        if count == 0:
            return Arrays((((), self.place(schema, False)),))
        return Arrays(contained=((self.place(schema), 0, 0, count),))

    def _of_objects(self, schema: Schema) -> Iterator[Condition]:
        others = schema.get("additionalProperties")
        if schema.get("unevaluatedProperties", True) not in (True, {}):
            applied = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"}
            if schema.keys() & applied:
                raise undone("'unevaluatedProperties' beside schemas that evaluate some")
            others = schema["unevaluatedProperties"] if others is None else others
        if schema.keys() & {"properties", "patternProperties"} or others is not None:
            yield self._properties(schema, others)
        if schema.get("required"):
            names = tuple(dict.fromkeys(schema["required"]))
            yield _condition([Objects(required=names)], [*map(_without_property, names)])
        yield from _counted(schema, "Properties", Objects)
        if schema.get("propertyNames", True) not in (True, {}):
            allowed = self.place(schema["propertyNames"])
            yield _condition([Objects(allowed=(allowed,))], "propertyNames")
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, then in schema.get(key, {}).items():
                yield partial(self._dependent, name, then)

    def _properties(self, schema: Schema, others: Any) -> Condition:
        given, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        names = Names(
            tuple((name, self.place(each)) for name, each in given.items()),
            tuple((pattern, self.place(each)) for pattern, each in patterns.items()),
            None if others is None else self.place(others),
        )
        failed: Cases | str = [
            Objects((Names(((name, self.place(each, False)),)),), (name,))
            for name, each in given.items()
            if each is not True
        ]
        if others not in (None, True, {}):
            failed = "additionalProperties"
        if any(each not in (True, {}) for each in patterns.values()):
            failed = "patternProperties"
        return _condition([Objects((names,))], failed)

    def _dependent(self, name: str, then: Any, holds: bool) -> Cases:
        if isinstance(then, list):
            then = self._kept({"required": then})
        met = _both([Objects(required=(name,))], self._of(then, "object", holds))
        return [_without_property(name), *met] if holds else met


def _without_property(name: str) -> Objects:
    return Objects((Names(((name, NOTHING),)),))


def _both(one: Cases, other: Cases) -> Cases:
    """Return the values that are in one of some cases, and in one of others."""
    if len(one) * len(other) > 100 * MOST_CASES:
        raise _too_many()
    found = dict.fromkeys(each for a in one for b in other if (each := a & b) is not None)
    if len(found) > MOST_CASES:
        raise _too_many()
    return [*found]


def _too_many() -> InvalidConstraint:
    return undone(f"combinations of alternatives, of which there are more than {MOST_CASES:,}")


def _either(several: Iterable[Cases]) -> Cases:
    found = [*dict.fromkeys(facts for cases in several for facts in cases)]
    everything = next((facts for facts in found if facts in _EVERYTHING), None)
    return found if everything is None else [everything]


def _all(kind: str, several: Iterable[Cases]) -> Cases:
    found: Cases = [_ALL[kind]]
    for cases in several:
        found = _both(found, cases)
        if not found:
            break
    return found


_EVERYTHING = frozenset(_ALL.values())


def _condition(met: Cases, failed: Cases | str) -> Condition:
    """Return a condition: the values that meet it, and the values that fail it. ``failed`` is a keyword
    if the failing values cannot be compiled."""

    def cases(holds: bool) -> Cases:
        if not holds and isinstance(failed, str):
            raise undone(f"a 'not' of {failed}")
        return met if holds else cast("Cases", failed)

    return cases


def _of_types(types: str | list[str], kind: str) -> Condition:
    types = [types] if isinstance(types, str) else types
    if kind == "number" and "integer" in types and "number" not in types:
        return _condition([Numbers(is_integer=True)], [Numbers(is_integer=False)])
    everything: Cases = [_ALL[kind]]
    return _condition(everything, []) if kind in types else _condition([], everything)


def _of_numbers(schema: Schema) -> Iterator[Condition]:
    for key, is_low in (("minimum", True), ("maximum", False)):
        strict = schema.get(f"exclusive{key.capitalize()}", False)
        bounds = [(schema[key], strict is True)] if key in schema else []
        bounds += [] if isinstance(strict, bool) else [(strict, True)]
        for value, is_strict in bounds:
            inside, outside = (fraction_of(value), is_strict), (fraction_of(value), not is_strict)
            low, high = (inside, outside) if is_low else (outside, inside)
            cases: tuple[Cases, Cases] = [Numbers(low=low)], [Numbers(high=high)]
            yield _condition(*(cases if is_low else reversed(cases)))
    if "multipleOf" in schema:
        step = fraction_of(schema["multipleOf"])
        if step == 1:
            yield _of_types("integer", "number")
        else:
            yield _condition([Numbers(multiple=step)], "multipleOf")


def _counted(schema: Schema, what: str, made: Callable[..., Facts]) -> Iterator[Condition]:
    """Yield the condition on a number of characters or members; ``made`` returns the values whose number
    lies between two bounds."""
    low, high = int(schema.get(f"min{what}", 0)), schema.get(f"max{what}")
    if high is None:
        if low:
            yield _condition([made(low=low)], [made(high=low - 1)])
        return
    high = int(high)
    failed = [made(high=low - 1)] if low else []
    met = [made(low=low, high=high)] if low <= high else []
    yield _condition(met, [*failed, made(low=high + 1)])


def _of_length(low: int = 0, high: int | None = None) -> Strings:
    return _of_regexes(Times(Chars(((0, 0x10FFFF),)), low, high))


def _of_regexes(*regexes: Node) -> Strings:
    return Strings(None, frozenset(regexes))


def _format(name: str) -> list[Node]:
    if name not in FORMATS:
        raise undone(f"the format {name!r}, which is not one of {', '.join(FORMATS)}")
    found = [parsed(FORMATS[name], f"format {name}")]
    if name in LONGEST:
        found.append(Times(Chars(((0, 0x10FFFF),)), 0, LONGEST[name]))
    return found


def _json_kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _number_text(value: int | float) -> str:
    """Return a number in decimals, as llguidance's and Python's JSON both read it."""
    return f"{Decimal(repr(value)):f}"


@lru_cache(8192)
def is_nothing(node: Node) -> bool:
    """Return whether a regular expression matches no text."""
    terminals = Terminals()
    return matches_nothing("\n".join([f"start: {terminals.name(node)}", *terminals.lines()]))


def _matches(node: Node, text: str) -> bool:
    return not is_nothing(Both((node, literal(text))))
