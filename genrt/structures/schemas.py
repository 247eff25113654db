"""A JSON schema as llguidance gets it: the same values, without what it takes wrongly or too long over.

A subschema that no finite value satisfies becomes ``false``, which llguidance leaves out of objects,
arrays and unions. Otherwise it would follow a ``$ref`` that leads back to itself, and masks would lead
there. Formats that it checks too loosely become patterns. Numbers that it would round are refused, and so
are sizes that it would work on for many seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain
from typing import Any, TypeAlias
from urllib.parse import unquote

from genrt.errors import InvalidConstraint
from genrt.structures.formats import FORMATS, LONGEST
from genrt.structures.intervals import BOUNDS, mend_bounds
from genrt.structures.matching import checked_pattern, has_objects, has_plain_values, may_begin
from genrt.structures.multiples import common_multiple, has_numbers, remainders_of

Schema: TypeAlias = dict[str, Any]

_MOST_ITEMS = 10_000
_MOST_PROPERTIES = 2_000
_MOST_REMAINDERS = 100_000
_MOST_PATTERNS = 100
_MOST_LEVELS = 500  # llguidance's stack overflows, which ends the process, at some 2,500
_DEFINITIONS = ("$defs", "definitions")
_MAPS = (*_DEFINITIONS, "properties", "patternProperties")
_KEYWORDS = (
    *("properties", "patternProperties", "additionalProperties"),
    *("prefixItems", "items", "additionalItems", "allOf", "anyOf", "oneOf"),
)
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def schema_text(schema: object, options: Schema) -> str:
    """Return a schema as JSON text, with llguidance's ``options`` unless it has its own.

    Raises:
        InvalidConstraint: not a schema, without a JSON form, satisfied by nothing, or too large.
    """
    rules = _object_of(schema)
    own = rules.pop("x-guidance", {})
    if not isinstance(own, dict):
        raise InvalidConstraint(f'the schema\'s "x-guidance" is {own!r}: give an object')
    _Prepared(rules)
    try:
        return json.dumps({"x-guidance": options | own, **rules}, allow_nan=False)
    except ValueError as error:
        raise InvalidConstraint(f"the JSON schema has no JSON form: {error}") from error


def closed(schema: object) -> Schema:
    """Return a schema whose objects have no other properties than those it names, where it says nothing
    of others: as vLLM's xgrammar reads it.

    Nothing is closed where schemas hold together (``allOf``, or ``$ref``, ``anyOf``, ``oneOf`` beside
    ``properties``): one would refuse the properties of the other.

    Raises:
        InvalidConstraint: not a schema, or without a JSON form.
    """
    root = _object_of(schema)
    found = [*schemas_in(root)]
    if any(
        "allOf" in each or ("properties" in each and each.keys() & {"$ref", "anyOf", "oneOf"})
        for each in found
    ):
        return root
    for each in found:
        names, others = _map(each, "properties"), {"additionalProperties", "unevaluatedProperties"}
        if (
            names
            and not each.keys() & others
            and all(name in names for name in _list(each, "required"))
        ):
            each["additionalProperties"] = False
    return root


def with_required_named(schema: object) -> Schema:
    """Return a schema whose objects name all that they require among their properties: vLLM's xgrammar
    requires no others.

    Raises:
        InvalidConstraint: not a schema, without a JSON form, or one requires what it forbids.
    """
    root = _object_of(schema)
    for each in schemas_in(root):
        others, names = each.get("additionalProperties", True), each.get("properties", {})
        # Where patterns speak of other names too, only what says nothing can be said of a name.
        is_known = not each.get("patternProperties") or others is True or others == {}
        if not isinstance(names, dict) or not is_known:
            continue
        for name in _list(each, "required"):
            if isinstance(name, str) and name not in names:
                if others is False:
                    raise InvalidConstraint(f"{name!r} is required, and forbidden: change it")
                names = each["properties"] = {**names, name: others}
    return root


def schemas_in(root: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas inside of it."""
    left: list[Any] = [root]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            yield each
            left += [within[key] for within, key in _parts(each, (*_DEFINITIONS, *_KEYWORDS))]


def _object_of(schema: object) -> Schema:
    """Return a schema as an object of its own, read from its JSON text."""
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        name = (schema if isinstance(schema, type) else type(schema)).__name__
        raise InvalidConstraint(f"the JSON schema is {name}: give {name}.model_json_schema()")
    wrong = f"the JSON schema is {schema!r}: give a dict, a JSON text, or True for any JSON"
    if not isinstance(schema, str | dict | bool):
        raise InvalidConstraint(wrong)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    except RecursionError as error:
        raise InvalidConstraint(f"the JSON schema is nested too deeply: {error}") from error
    except (TypeError, ValueError) as error:
        raise InvalidConstraint(f"the JSON schema has no JSON form: {error}") from error
    try:
        rules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(f"the JSON schema is no JSON text: {error}") from error
    if rules is True:
        return {}
    if rules is False:
        raise InvalidConstraint("the JSON schema is false, which no text satisfies: change it")
    if not isinstance(rules, dict):
        raise InvalidConstraint(wrong)
    return rules


class _Prepared:
    """A schema whose subschemas are checked and changed in place."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._places: list[tuple[Any, Any, Schema]] = []
        self._find()
        for _, _, schema in self._places:
            self._refuse_too_many_remainders(schema)
        # Where one refers to itself, llguidance finds too late that what is beside that has no values.
        every = [schema for _, _, schema in self._places]
        some = every if any("$ref" in each for each in every) else []
        self._empty = {id(n) for n in some if not has_plain_values(self._conjunction(n))}
        # Ids of the schemas that a finite value is known to satisfy.
        self._alive: set[int] = set()
        before = -1
        while before < len(self._alive):
            before = len(self._alive)
            for _, _, schema in reversed(self._places):  # those inside before those around them
                if id(schema) not in self._alive and self._has_values(schema):
                    self._alive.add(id(schema))
        if id(root) not in self._alive:
            raise self._nothing()
        for within, key, schema in self._places:
            if id(schema) not in self._alive:
                within[key] = False
            mend_bounds(schema)
        if not any("patternProperties" in schema for _, _, schema in self._places):
            for _, _, schema in self._places:
                _close_names(schema)

    def _find(self) -> None:
        """Find all schemas within the root, and those that it refers to, and check each.

        It is searched depth first, as llguidance does, by recursion on a stack that can overflow. What is
        only defined comes last: it may be referred to in ways that can't be told from the text.
        """
        seen: set[int] = set()
        defined: list[tuple[Any, Any]] = []
        stack: list[Iterator[tuple[Any, Any]]] = [iter([([self._root], 0)])]
        while stack or defined:
            stack = stack or [iter([defined.pop()])]
            for within, key in stack[-1]:
                schema = within[key]
                if isinstance(schema, dict) and id(schema) not in seen:
                    seen.add(id(schema))
                    self._places.append((within, key, schema))
                    _refuse_what_is_too_large(schema)
                    _refuse_what_is_rounded(schema)
                    _refuse_what_counts_names(schema)
                    _replace_format(schema)
                    _settle_patterns(schema)
                    defined += _parts(schema, _DEFINITIONS)
                    stack.append(chain(_parts(schema, _KEYWORDS), self._referred(schema)))
                    break
            else:
                stack.pop()
            if len(stack) > _MOST_LEVELS:
                raise InvalidConstraint(
                    f"the JSON schema is nested too deeply: more than {_MOST_LEVELS} schemas, each in "
                    "the one before or referred to by it"
                )

    def _referred(self, schema: Schema) -> Iterator[tuple[Any, Any]]:
        """Yield where the schema of a ``$ref`` is, if that can be told from the text."""
        reference, identity = schema.get("$ref"), self._root.get("$id")
        if not isinstance(reference, str):
            return
        if isinstance(identity, str) and identity:
            reference = reference.removeprefix(identity.rstrip("#"))
        if reference in ("", "#", "#/"):
            yield [self._root], 0
        elif reference.startswith("#/"):
            within: Any = [self._root]
            key: Any = 0
            try:
                for step in unquote(reference[2:]).split("/"):
                    within = within[key]
                    key = step.replace("~1", "/").replace("~0", "~")
                    key = int(key) if isinstance(within, list) else key
                within[key]
            except (TypeError, ValueError, LookupError):
                return
            yield within, key
        else:
            for within, key, other in self._places:
                if reference == f"#{other.get('$anchor')}":
                    yield within, key
                    return

    def _target(self, schema: Schema) -> Any:
        """Return what a schema's ``$ref`` refers to; True if it has none or that can't be told."""
        return next((within[key] for within, key in self._referred(schema)), True)

    def _lives(self, schema: Any) -> bool:
        return id(schema) in self._alive if isinstance(schema, dict) else schema is not False

    def _has_values(self, schema: Schema) -> bool:
        """Tell whether a finite value satisfies a schema, given which of the schemas within it have
        values so far.

        If nothing satisfies two schemas together, llguidance finds that itself, except for numbers, and
        where one refers to itself.
        """
        if id(schema) in self._empty:
            return False
        for key, judge in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            if isinstance(schema.get(key), list) and not judge(map(self._lives, schema[key])):
                return False
        if not self._lives(self._target(schema)):
            return False
        types = schema.get("type", _TYPES)
        types = [types] if isinstance(types, str) else types
        if "const" in schema or "enum" in schema or not isinstance(types, list | tuple):
            return True
        return any(self._has_values_of(schema, each) for each in types)

    def _has_values_of(self, schema: Schema, kind: object) -> bool:
        match kind:
            case "object":
                named, patterns = (
                    {name: self._lives(values) for name, values in _map(schema, key).items()}
                    for key in ("properties", "patternProperties")
                )
                others = self._lives(schema.get("additionalProperties", True))
                return has_objects(_list(schema, "required"), named, patterns, others=others)
            case "array":
                return all(map(self._lives, _required_items(schema)))
            case "number" | "integer":
                return has_numbers(list(self._conjunction(schema)), kind == "integer")
            case _:
                return True

    def _conjunction(self, schema: Schema) -> Iterator[Schema]:
        """Yield a schema and all that hold together with it, by ``allOf`` or ``$ref``."""
        seen: set[int] = set()
        left: list[Any] = [schema]
        while left:
            schema = left.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                yield schema
                left += [*_list(schema, "allOf"), self._target(schema)]

    def _refuse_too_many_remainders(self, schema: Schema) -> None:
        step = common_multiple(self._conjunction(schema))
        remainders = 1 if step is None else remainders_of(step)
        if remainders > _MOST_REMAINDERS:
            raise InvalidConstraint(
                f"the JSON schema's multipleOf needs {remainders:,} remainders to be told apart, and "
                f"{_MOST_REMAINDERS:,} is the most: leave it out, and check it by a predicate"
            )

    def _nothing(self) -> InvalidConstraint:
        dead = [schema for _, _, schema in self._places if id(schema) not in self._alive]
        references = list(dict.fromkeys(each["$ref"] for each in dead if "$ref" in each))
        if references:
            why = f"{', '.join(map(repr, references[:3]))} leads back to itself without end"
        elif any("multipleOf" in schema for schema in dead):
            why = "no number from 0 on has this multipleOf within these bounds"
        elif bounded := [each for each in dead if not each.keys().isdisjoint(BOUNDS)]:
            bounds = (f"{key} {bounded[0][key]}" for key in BOUNDS if key in bounded[0])
            why = f"no number is within {', '.join(bounds)}"
        else:
            why = "something in it is required, and can't be"
        return InvalidConstraint(f"the JSON schema allows no value: {why}; change it")


def _parts(schema: Schema, keys: Iterable[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the places of the schemas that are directly within one, under some of its keywords."""
    for key in keys:
        inside = schema.get(key)
        if key in _MAPS and isinstance(inside, dict):
            yield from ((inside, name) for name in inside)
        elif key not in _MAPS and isinstance(inside, list):
            yield from ((inside, index) for index in range(len(inside)))
        elif key not in _MAPS and inside is not None:
            yield schema, key


def _list(schema: Schema, key: str) -> list[Any]:
    """Return the list under a key; an empty one if there is none: llguidance tells what is wrong."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _map(schema: Schema, key: str) -> Schema:
    """Return the object under a key; an empty one if there is none."""
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def _required_items(schema: Schema) -> Iterator[Any]:
    """Yield the schemas of the required items."""
    count, first, others = schema.get("minItems", 0), "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        first, others = "items", "additionalItems"
    if isinstance(count, int):
        yield from _list(schema, first)[:count]
        if count > len(_list(schema, first)):
            yield schema.get(others, True)


def _refuse_what_is_too_large(schema: Schema) -> None:
    for key in ("minItems", "maxItems"):
        count = schema.get(key)
        if isinstance(count, int) and count > _MOST_ITEMS:
            raise InvalidConstraint(
                f"the JSON schema has {key} {count}, and {_MOST_ITEMS:,} is the most: leave it out, or "
                "check it by a predicate"
            )
    for key, most in (("properties", _MOST_PROPERTIES), ("patternProperties", _MOST_PATTERNS)):
        if len(names := _map(schema, key)) > most:
            raise InvalidConstraint(
                f"the JSON schema has an object of {len(names):,} {key}, and {most:,} is the most: "
                "make it smaller"
            )
    for pattern in (*_map(schema, "patternProperties"), schema.get("pattern")):
        if isinstance(pattern, str):
            checked_pattern(pattern, "JSON schema's pattern")


def _refuse_what_counts_names(schema: Schema) -> None:
    # llguidance counts properties as they come, and lets a name that is not spelled out come twice.
    least, required = schema.get("minProperties"), _list(schema, "required")
    if isinstance(least, int) and least > len(required) + 1:
        raise InvalidConstraint(
            f"the JSON schema has minProperties {least} and requires {len(required)} by name: take it "
            "out, and check it by a predicate: all_of(json_schema(…), predicate(…))"
        )


def _refuse_what_is_rounded(schema: Schema) -> None:
    left = [schema.get(key) for key in ("const", "enum", *BOUNDS)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, int) and (
            abs(value) > 10**300 or Decimal(repr(float(value))) != value
        ):
            raise InvalidConstraint(
                f"the JSON schema has the integer {value}, which is no 64-bit float and would "
                "be rounded: leave it out, or give it as a string"
            )


def _replace_format(schema: Schema) -> None:
    """Replace a format that llguidance knows too loosely by a pattern."""
    form = schema.get("format")
    if not isinstance(form, str):
        return
    if form in LONGEST:
        longest = schema.get("maxLength", LONGEST[form])
        schema["maxLength"] = min(longest, LONGEST[form]) if isinstance(longest, int) else longest
    if form in FORMATS:
        del schema["format"]
        pattern = f"^(?:{FORMATS[form]})$"
        parts = schema.get("allOf", [])
        if "pattern" not in schema:
            schema["pattern"] = pattern
        elif isinstance(parts, list):
            both = {"type": schema.get("type", list(_TYPES)), "pattern": pattern}
            schema["allOf"] = [*parts, both]


def _settle_patterns(schema: Schema) -> None:
    """Take out the patterns of properties that no name is left to match."""
    patterns, properties = _map(schema, "patternProperties"), schema.get("properties", {})
    if not isinstance(properties, dict):
        return
    names = [*properties, *_list(schema, "required")]
    taken = dict.fromkeys((name for name in names if isinstance(name, str)), False)
    for pattern in list(patterns):
        if not _has_names(taken, {pattern: True}):
            values = patterns.pop(pattern)
            for name in taken:
                if not _has_names({name: True}, {pattern: False}):  # the name matches
                    properties[name] = {"allOf": [properties.get(name, True), values]}
            schema["properties"] = properties


def _close_names(schema: Schema) -> None:
    """Say by a pattern that other properties may be anything, if they may.

    Without it llguidance lets names that no pattern covers be spelt with escapes, and so those of
    ``properties``.
    """
    others = schema.get("additionalProperties", True)
    counted = schema.keys() & {"minProperties", "maxProperties"}
    if schema.get("properties") and (others is True or others == {}) and not counted:
        schema["patternProperties"] = {r"^[\s\S]*$": True}
        schema["additionalProperties"] = False


def _has_names(properties: Schema, patterns: Schema) -> bool:
    """Tell whether an object of only these properties and patterns can have any name."""
    schema = {
        "type": "object",
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": False,
    }
    return may_begin(f"start: %json {json.dumps(schema)}", b'{"')
