"""The values that are valid under JSON schemas, by type: keywords as facts that are intersected.

Rules:
    A ``Claim`` says that a schema holds, or that it does not. A value's place is a set of claims.
    ``Claims.cases`` returns the values of one type that some claims allow, as alternatives. Each
    alternative is one object of facts. A value may be in several.
    Facts never admit a value that is not valid. They admit all valid ones, except where the guide's
    page on structures says so. What cannot be done is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, TypeAlias, cast

from genrt.errors import InvalidConstraint
from genrt.structures.formats import FORMATS, LONGEST
from genrt.structures.matching import matches_nothing
from genrt.structures.numbers import Numbers, fraction_of
from genrt.structures.regexes import (
    ANY_TEXT,
    Both,
    Chars,
    Node,
    Not,
    OneOf,
    Terminals,
    Times,
    literal,
    parsed,
    searched,
)
from genrt.structures.schemas import Document, Schema, undone

__all__ = ["KINDS", "Arrays", "Claim", "Claims", "Facts", "Literals", "Objects", "Place", "Strings"]

KINDS = ("null", "boolean", "number", "string", "array", "object")
MOST_CASES = 4_000
MOST_EXCLUSIVE = 300
_DEEPEST = 3

Claim: TypeAlias = tuple[int, bool]
"""The number of a schema, and whether it holds."""

Place: TypeAlias = frozenset[Claim]
"""What is said of one value."""

ANYTHING: Place = frozenset()
NOTHING: Place = frozenset({(-1, True)})
"""The claim that no value meets."""


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
        return ANY_TEXT if not parts else parts[0] if len(parts) == 1 else Both(tuple(parts))


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays of some length.

    Attributes:
        items: of each schema that speaks of items, those of the first places, and of all others.
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
        """Return what is said of an item."""
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
        names: of each schema that speaks of properties, what it says.
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


Facts: TypeAlias = Literals | Numbers | Strings | Arrays | Objects
Cases: TypeAlias = list[Any]  # of Facts of one type

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
        """Return the place of which a schema holds, or does not."""
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
        found: Cases = [_ALL[kind]]
        for claim in sorted(place):
            found = _both(found, self._cases(claim, kind))
        return found

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
            return []  # a schema that needs itself has no value of its own
        loops = self._loops
        self._open.add(key)
        try:
            schema = self._schemas[claim[0]]
            found = self._valid(schema, kind) if claim[1] else self._invalid(schema, kind)
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
        """Return what is said of a property."""
        place = ANYTHING
        for names in objects.names:
            given = dict(names.properties).get(name)
            place |= given or ANYTHING
            is_surely = given is not None
            for pattern, inside in names.patterns:
                narrow, wide = self.pattern(pattern)
                if _has(wide, name):
                    place |= inside
                    is_surely |= _has(narrow, name)
            if not is_surely and names.others is not None:
                place |= names.others
        for allowed in objects.allowed:
            strings = self.cases(allowed, "string")
            if all(is_nothing(Both((each.node(), literal(name)))) for each in strings):
                place |= NOTHING
        return place

    def _valid(self, schema: Schema, kind: str) -> Cases:
        """Return the values of a type that are valid under a schema."""
        found: Cases = [_ALL[kind]]
        for part in self._parts(schema, kind):
            found = _both(found, part(True))
            if not found:
                break
        return found

    def _invalid(self, schema: Schema, kind: str) -> Cases:
        """Return the values of a type that are not valid under a schema."""
        return _either(part(False) for part in self._parts(schema, kind))

    def _parts(self, schema: Schema, kind: str) -> Iterator[Callable[[bool], Cases]]:
        """Yield what a schema says of a type. Each returns the values that meet it, or that do not."""
        if "type" in schema:
            types = schema["type"]
            yield lambda holds: _of_types([types] if isinstance(types, str) else types, kind, holds)
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
        """Return the values of a list, or those that are not in it."""
        own = [value for value in values if _kind_of(value) == kind]
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
                return [Strings(None, frozenset({Not(OneOf(tuple(map(literal, own))))}))]
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

    def _of_strings(self, schema: Schema) -> Iterator[Callable[[bool], Cases]]:
        if "minLength" in schema or "maxLength" in schema:
            low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
            yield lambda holds: _lengths(low, None if high is None else int(high), holds)
        if "pattern" in schema:
            narrow, wide = self.pattern(schema["pattern"])
            yield lambda holds: [Strings(None, frozenset({narrow if holds else Not(wide)}))]
        if "format" in schema:
            yield lambda holds: [Strings(None, _format(schema["format"], holds))]

    def _of_arrays(self, schema: Schema) -> Iterator[Callable[[bool], Cases]]:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        if first or rest not in (True, {}):
            yield lambda holds: self._items(first, rest, holds)
        if "unevaluatedItems" in schema and schema["unevaluatedItems"] not in (True, {}):
            raise undone("'unevaluatedItems'")
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if low or high is not None:
            yield lambda holds: _counted(Arrays, low, None if high is None else int(high), holds)
        if "contains" in schema:
            yield lambda holds: self._contains(schema, holds)
        if schema.get("uniqueItems"):
            yield _unique

    def _items(self, first: list[Any], rest: Any, holds: bool) -> Cases:
        if holds:
            return [Arrays(((tuple(map(self.place, first)), self.place(rest)),))]
        found: Cases = []
        for index, schema in enumerate(first):
            if schema is not True:
                places = (*[ANYTHING] * index, self.place(schema, False))
                found.append(Arrays(((places, ANYTHING),), index + 1))
        if rest is not True:
            found.append(Arrays(contained=((self.place(rest, False), len(first), 1, None),)))
        return found

    def _contains(self, schema: Schema, holds: bool) -> Cases:
        inside = schema["contains"]
        low, high = int(schema.get("minContains", 1)), schema.get("maxContains")
        place = self.place(inside)
        if not holds:
            found = [self._at_most(inside, low - 1)] if low else []
            if high is not None:
                found.append(Arrays(contained=((place, 0, int(high) + 1, None),)))
            return found
        if high is not None:
            return _both(
                [self._at_most(inside, int(high))], [Arrays(contained=((place, 0, low, None),))]
            )
        return [Arrays(contained=((place, 0, low, None),))] if low else [Arrays()]

    def _at_most(self, schema: Any, count: int) -> Arrays:
        if count == 0:
            return Arrays((((), self.place(schema, False)),))
        return Arrays(contained=((self.place(schema), 0, 0, count),))

    def _of_objects(self, schema: Schema) -> Iterator[Callable[[bool], Cases]]:
        others = schema.get("additionalProperties")
        if schema.get("unevaluatedProperties", True) not in (True, {}):
            applied = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"}
            if schema.keys() & applied:
                raise undone("'unevaluatedProperties' beside schemas that evaluate some")
            others = schema["unevaluatedProperties"] if others is None else others
        if schema.keys() & {"properties", "patternProperties"} or others is not None:
            yield lambda holds: self._properties(schema, others, holds)
        if schema.get("required"):
            names = tuple(dict.fromkeys(schema["required"]))
            yield (
                lambda holds: (
                    [Objects(required=names)] if holds else [_without(name) for name in names]
                )
            )
        low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if low or high is not None:
            yield lambda holds: _counted(Objects, low, None if high is None else int(high), holds)
        if schema.get("propertyNames", True) not in (True, {}):
            yield (
                lambda holds: (
                    [Objects(allowed=(self.place(schema["propertyNames"]),))]
                    if holds
                    else (_raise(undone("a 'not' of propertyNames")))
                )
            )
        keys = ("dependentRequired", "dependentSchemas", "dependencies")
        several = [each for key in keys for each in schema.get(key, {}).items()]
        for name, then in several:
            yield partial(self._dependent, name, then)

    def _properties(self, schema: Schema, others: Any, holds: bool) -> Cases:
        given, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        if holds:
            names = Names(
                tuple((name, self.place(each)) for name, each in given.items()),
                tuple((pattern, self.place(each)) for pattern, each in patterns.items()),
                None if others is None else self.place(others),
            )
            return [Objects((names,))]
        if patterns and any(each not in (True, {}) for each in patterns.values()):
            raise undone("a 'not' of patternProperties")
        if others not in (None, True, {}):
            raise undone("a 'not' of additionalProperties")
        return [
            Objects((Names(((name, self.place(each, False)),)),), (name,))
            for name, each in given.items()
            if each is not True
        ]

    def _dependent(self, name: str, then: Any, holds: bool) -> Cases:
        if isinstance(then, list):
            then = self._kept({"required": then})
        met = _both([Objects(required=(name,))], self._of(then, "object", holds))
        return [_without(name), *met] if holds else met


def _raise(error: InvalidConstraint) -> Cases:
    raise error


def _without(name: str) -> Objects:
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
    return found


_EVERYTHING = frozenset(_ALL.values())


def _of_types(types: list[str], kind: str, holds: bool) -> Cases:
    everything: Cases = [_ALL[kind]]
    if kind in types:
        return everything if holds else []
    if kind == "number" and "integer" in types:
        return [Numbers(is_integer=holds)]
    return [] if holds else everything


def _of_numbers(schema: Schema) -> Iterator[Callable[[bool], Cases]]:
    for key, is_low in (("minimum", True), ("maximum", False)):
        strict = f"exclusive{key.capitalize()}"
        bounds = []
        if key in schema:
            bounds.append((schema[key], schema.get(strict) is True))
        if not isinstance(schema.get(strict, True), bool):
            bounds.append((schema[strict], True))
        for value, is_strict in bounds:
            bound = fraction_of(value), is_strict
            opposite = bound[0], not is_strict
            pair = Numbers(low=bound), Numbers(high=opposite)
            if not is_low:
                pair = Numbers(high=bound), Numbers(low=opposite)
            yield partial(_either_side, *pair)
    if "multipleOf" in schema:
        step = fraction_of(schema["multipleOf"])
        if step == 1:
            yield lambda holds: [Numbers(is_integer=holds)]
        else:
            yield (
                lambda holds: (
                    [Numbers(multiple=step)] if holds else _raise(undone("a 'not' of multipleOf"))
                )
            )


def _either_side(inside: Numbers, outside: Numbers, holds: bool) -> Cases:
    return [inside if holds else outside]


def _lengths(low: int, high: int | None, holds: bool) -> Cases:
    any_letter = Chars(((0, 0x10FFFF),))
    bounds: list[tuple[int, int | None]] = [(low, high)] if holds else [(0, low - 1)] * (low > 0)
    if not holds and high is not None:
        bounds.append((high + 1, None))
    return [
        Strings(None, frozenset({Times(any_letter, least, most)}))
        for least, most in bounds
        if most is None or least <= most
    ]


def _counted(made: Any, low: int, high: int | None, holds: bool) -> Cases:
    """Return arrays or objects of so many members, or of fewer and of more."""
    if holds:
        return [] if high is not None and low > high else [made(low=low, high=high)]
    found = [made(high=low - 1)] if low else []
    return found + ([] if high is None else [made(low=high + 1)])


def _unique(holds: bool) -> Cases:
    if not holds:
        raise undone("a 'not' of uniqueItems")
    return [Arrays(are_unique=True)]


def _format(name: str, holds: bool) -> frozenset[Node]:
    if name not in FORMATS:
        raise undone(f"the format {name!r}, which is not one of {', '.join(FORMATS)}")
    if not holds:
        raise undone("a 'not' of format")
    found = [parsed(FORMATS[name], f"format {name}")]
    if name in LONGEST:
        found.append(Times(Chars(((0, 0x10FFFF),)), 0, LONGEST[name]))
    return frozenset(found)


def _kind_of(value: object) -> str:
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


def _has(node: Node, text: str) -> bool:
    return not is_nothing(Both((node, literal(text))))
