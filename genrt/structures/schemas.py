"""JSON schemas for llguidance: read, checked, and rewritten where its compiler needs help.

llguidance compiles the schema (``%json`` of its Lark). This file decides what it gets. Every text of a
compiled schema is the JSON text of a valid value: keywords and combinations for which that is not so are
refused by name, with what to do. Rewritten are references (to ``#/$defs/…``), patterns and dates (in
genrt's dialect), names of other properties (so that each has one spelling), and bounds of draft 4.

Older keywords keep the meaning of their draft under any ``$schema``. A ``$ref`` replaces the keywords
beside it only in a schema of draft 7 or older.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import combinations, count
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote

from genrt.errors import InvalidConstraint
from genrt.numbers import displayed
from genrt.structures.regexes import none_of, searched

Whitespace: TypeAlias = Literal["compact", "spaced", "flexible"]
"""The spaces between the parts of a JSON text: no spaces, as ``json.dumps`` writes, or any spaces."""

Schema: TypeAlias = dict[str, Any]

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
_DATES = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""llguidance's own formats have a February 29 every year, a year 0 and leap seconds."""

FORMATS = (*_DATES, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_LONGEST_HOSTNAME = 253

_MOST = {"minItems": 10_000, "maxItems": 10_000, "properties": 2_000, "patternProperties": 50}
_MOST["enum"] = 100_000
_MOST_LEVELS = 200  # llguidance's stack overflows, which ends the process, at some 900
_MOST_REMAINDERS = 100_000

_DEFINITIONS = ("$defs", "definitions")
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_MAPS = (*_DEFINITIONS, "properties", "patternProperties")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "propertyNames", "contains"),
    *("not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_MAPS, *_DEPENDENT), (dict,)),
    **dict.fromkeys((*_LISTS, "enum", "required"), (list,)),
    **dict.fromkeys(_SINGLE, (dict, bool)),
    **dict.fromkeys((*_SIZES, *_NUMBERS, "minContains", "maxContains"), (int, float)),
    **dict.fromkeys(("$ref", "$id", "$schema", "pattern", "format"), (str,)),
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
_NOTES = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
    *("writeOnly", "id", "$comment", "$vocabulary"),
    *("$anchor", "$dynamicAnchor", "$recursiveAnchor"),
    *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "xml"),
    *("externalDocs", "enumNames", "propertyOrdering", "strict", "name", "nullable"),
)
_OBJECTS = (
    *("properties", "required", "patternProperties", "additionalProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties"),
)
_APPLIED = ("$ref", "allOf", "anyOf", "oneOf")
_REFUSED = (
    *("not", "contains", "uniqueItems", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    *_DEPENDENT,
)
_KNOWN = ("const", *_KINDS, *_NOTES, *_REFUSED)
_DRAFTS = {
    f"{scheme}://json-schema.org/{draft}/schema{end}": draft
    for draft in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
    for scheme in ("http", "https")
    for end in ("", "#")
}
_OLD = ("draft-04", "draft-06", "draft-07")


def _wrong(problem: str) -> InvalidConstraint:
    return InvalidConstraint(f"the JSON schema has {problem}")


def _undone(part: str) -> InvalidConstraint:
    return _wrong(
        f"{part}: take it out, and check it by a predicate: all_of(json_schema(…), predicate(…))"
    )


def schema_source(schema: object, whitespace: Whitespace, *, closed: bool = False) -> str:
    """Return a schema as it stands after ``%json`` in llguidance's Lark.

    Args:
        schema: a mapping, a JSON text, a bool, or a pydantic model's class.
        whitespace: see ``Whitespace``; llguidance's options under ``x-guidance`` go before it.
        closed: whether objects have only named properties, unless a schema describes other properties
            or is combined with another.

    Raises:
        InvalidConstraint: the schema is not one, is too large, or says more than can be compiled.
    """
    root = _object_of(schema)
    options = _spaces(root.pop("x-guidance", {}), whitespace)
    try:
        written = _Rewriter(root, closed=closed).document()
        return json.dumps(written | {"x-guidance": options})
    except RecursionError as error:
        raise InvalidConstraint("the JSON schema is nested too deeply: make it flatter") from error


def _object_of(schema: object) -> Schema:
    """Return a schema as a new object, read from its JSON text."""
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
        json.dumps(rules, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _wrong("a lone surrogate, which no text has") from error
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(f"the JSON schema is not a JSON text: {error}") from error
    if rules is False:
        raise InvalidConstraint("the JSON schema is false, which no text satisfies: change it")
    if rules is not True and not isinstance(rules, dict):
        raise kind
    return {} if rules is True else rules


def _refuse_nan(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _spaces(own: object, whitespace: Whitespace) -> Schema:
    """Return llguidance's options for the white space between parts."""
    known = {"whitespace_flexible", "item_separator", "key_separator"}
    if not isinstance(own, dict) or not own.keys() <= known:
        raise InvalidConstraint(
            f'the schema\'s "x-guidance" is {own!r}: give an object of {", ".join(sorted(known))}'
        )
    if own.get("whitespace_flexible", whitespace == "flexible"):
        return {"whitespace_flexible": True}
    space = " " if whitespace == "spaced" else ""
    options = {"item_separator": f",{space}", "key_separator": f":{space}"} | own
    for name, sign in (("item_separator", ","), ("key_separator", ":")):
        written = options[name]
        if not isinstance(written, str) or written.strip(" \t\r\n") != sign:
            raise InvalidConstraint(
                f"the schema's separator is {written!r}: give {sign!r} and white space"
            )
    return options | {"whitespace_flexible": False}


class _Document:
    """A schema and all schemas inside of it, by identity, checked keyword by keyword."""

    def __init__(self, root: Schema) -> None:
        draft = _DRAFTS.get(root.get("$schema", ""), "draft/2020-12")
        if "$schema" in root and root["$schema"] not in _DRAFTS:
            raise _undone(
                f"the $schema {root['$schema']!r}, which is not a draft from 4 to 2020-12"
            )
        self._root = root
        self._ref_is_alone = draft in _OLD
        self._id = "id" if draft == "draft-04" else "$id"
        self._visited: set[int] = set()
        self._visit(root)

    def _visit(self, root: Any) -> None:
        left = [root]
        while left:
            schema = left.pop()
            if isinstance(schema, bool) or id(schema) in self._visited:
                continue
            if not isinstance(schema, dict):
                raise _wrong(f"{schema!r} where a schema belongs: change it")
            if self._ref_is_alone and "$ref" in schema:
                for key in [key for key in schema if key not in ("$ref", *_DEFINITIONS)]:
                    del schema[key]
            _check_keywords(schema)
            if schema is not self._root and isinstance(schema.get(self._id), str):
                raise _wrong(
                    f"the {self._id} {schema[self._id]!r} of a part: take it out, and refer to the part "
                    "by its place"
                )
            self._visited.add(id(schema))
            left += _inside(schema)

    def target(self, schema: Schema) -> Any:
        """Return the schema that a ``$ref`` refers to. Raises InvalidConstraint if it is not a place in
        this document."""
        reference = schema["$ref"]
        base, _, fragment = reference.partition("#")
        if base or (fragment and not fragment.startswith("/")):
            raise InvalidConstraint(
                f"the JSON schema's $ref {reference!r} is not a place in the schema: put what it "
                "refers to into $defs, and refer to it by #/$defs/NAME"
            )
        found: Any = self._root
        for step in unquote(fragment).split("/")[1:] if fragment != "/" else ():
            key: Any = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (TypeError, ValueError, LookupError):
                raise InvalidConstraint(
                    f"the JSON schema's $ref {reference!r} leads nowhere: mend it"
                ) from None
        self._visit(found)
        return found


def _inside(schema: Schema) -> Iterator[Any]:
    """Yield all schemas directly inside of one."""
    for key in _MAPS:
        yield from schema.get(key, {}).values()
    for key in _LISTS:
        yield from schema.get(key, ())
    for key in _SINGLE:
        if isinstance(schema.get(key), list):
            yield from schema[key]
        elif key in schema:
            yield schema[key]


def _check_keywords(schema: Schema) -> None:
    """Raise InvalidConstraint for a keyword that is unknown, used wrongly, refused, or too large."""
    for key, value in schema.items():
        kinds = _KINDS.get(key, (object,))
        if key not in _KNOWN:
            close = difflib.get_close_matches(key, _KNOWN, 1, 0.8)
            if close and not key.startswith("x-"):
                raise _wrong(f"the unknown keyword {key!r}: write {close[0]!r}, or take it out")
        elif not isinstance(value, kinds) or (kinds == (int, float) and isinstance(value, bool)):
            raise _wrong(f"{key!r}: {value!r}; give {_NAMES[kinds[0]]}")
        if key in _REFUSED and not _says_nothing(key, value):
            raise _undone(f"{key!r}, which cannot be compiled")
        if key in _SIZES and (value < 0 or value != int(value)):
            raise _wrong(f"{key!r}: {value}; give a whole number from 0 on")
        if key in _MOST:
            size = len(value) if isinstance(value, dict | list) else value
            if size > _MOST[key]:
                raise _undone(f"{key} of {size:,}, and {_MOST[key]:,} is the most")
    if "if" in schema and not (
        _is_true(schema.get("then", True)) and _is_true(schema.get("else", True))
    ):
        raise _undone("'if', which cannot be compiled")
    if "prefixItems" in schema and isinstance(schema.get("items"), list):
        raise _wrong("prefixItems beside a list of items: give one of both")
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        if name not in _TYPES:
            raise _wrong(f"the type {name!r}: give one of {', '.join(_TYPES)}")
    required = schema.get("required", [])
    if not all(isinstance(name, str) for name in required):
        raise _wrong(f"{required!r} as required properties: give a list of names")
    _check_numbers(schema)


def _is_true(schema: Any) -> bool:
    return schema in (True, {}) and schema is not False


def _says_nothing(key: str, value: Any) -> bool:
    """Return whether a refused keyword has a value that every document meets."""
    if key == "uniqueItems":
        return value is False
    return not value if key in _DEPENDENT else _is_true(value) and key.startswith("uneval")


def _check_numbers(schema: Schema) -> None:
    left = [schema.get(key) for key in ("const", "enum", *_NUMBERS)]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        elif (
            isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(value)
        ):
            raise _wrong(
                f"the number {value}, which would be rounded: give 15 digits at most, or a string"
            )
    for key in _NUMBERS:
        if abs(schema.get(key, 0)) > 10**17:
            raise _undone(f"{key} of {schema[key]}, which is too far from 0")
    step = _fraction_of(schema.get("multipleOf", 1))
    if step <= 0:
        raise _wrong(f"a multipleOf of {schema['multipleOf']}: give a number above 0")


def _is_exact(value: int | float) -> bool:
    """Return whether llguidance reads a number as it is written."""
    if abs(value) < 2**63 and value == int(value):
        return int(float(value)) == value
    digits = "".join(map(str, Decimal(repr(value)).as_tuple().digits)).rstrip("0")
    return abs(value) < 10**300 and len(digits) <= 15


def _fraction_of(value: int | float) -> Fraction:
    """Return the number that a JSON text means, as it is written."""
    return Fraction(repr(value))


def _digits(number: Fraction) -> int:
    """Return how many digits a number has after the point."""
    return next(digits for digits in count() if (number * 10**digits).denominator == 1)


class _Rewriter:
    """Rewrites a document, with the schemas that it refers to under ``$defs``."""

    def __init__(self, root: Schema, *, closed: bool) -> None:
        self._root = root
        self._document = _Document(root)
        self._closed = closed
        self._levels = 0
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[int, bool], str] = {}  # by schema, and whether it is combined
        self._steps: set[Fraction] = set()

    def document(self) -> Schema:
        """Return the whole document."""
        made: Schema = self._schema(self._root)
        digits = max((_digits(step) for step in self._steps), default=0)
        scaled = [int(step * 10**digits) for step in self._steps]
        multiple = math.lcm(*scaled)
        remainders = int(str(multiple).rstrip("0"))
        if remainders > _MOST_REMAINDERS:
            raise _undone(
                f"a multipleOf that needs {remainders:,} remainders to be told apart, and "
                f"{_MOST_REMAINDERS:,} is the most"
            )
        if (
            len(scaled) > 1 and multiple * max(scaled) >= 2**32
        ):  # llguidance's integers would overflow
            raise _undone("several multipleOf of many digits")
        return made | ({"$defs": self._definitions} if self._definitions else {})

    def _schema(self, schema: Any, *, combined: bool = False) -> Any:
        """Return a rewritten schema. ``combined``: other schemas hold for the same value."""
        if isinstance(schema, bool):
            return schema
        self._levels += 1
        if self._levels > _MOST_LEVELS:
            raise InvalidConstraint(
                f"the JSON schema is nested too deeply: in more than {_MOST_LEVELS} levels, or references"
            )
        made: Schema = {}
        if "const" in schema:
            made["const"] = _plain(schema["const"])
        if "enum" in schema:
            made["enum"] = _plain(schema["enum"])
        own = schema.keys() & {*_OBJECTS, *_APPLIED}
        inner = combined or len(own) > 1 or len(schema.get("allOf", ())) > 1
        parts: list[Any] = []
        if "$ref" in schema:
            target = self._document.target(schema)
            if isinstance(target, bool):
                parts.append(target)
            else:
                made["$ref"] = self._reference(target, inner)
        parts += [self._schema(each, combined=inner) for each in schema.get("allOf", ())]
        if parts:
            made["allOf"] = parts
        if "anyOf" in schema:
            made["anyOf"] = [self._schema(each, combined=inner) for each in schema["anyOf"]]
        if "oneOf" in schema:
            options = schema["oneOf"]
            is_any = all(self._exclude(*pair) for pair in combinations(options, 2))
            written = [self._schema(each, combined=inner) for each in options]
            if is_any and "anyOf" not in schema:
                made["anyOf"] = written
            else:  # llguidance may see that they exclude each other, or refuse
                made["oneOf"] = written
        if "type" in schema:
            made["type"] = schema["type"]
        for key in _SIZES:
            if key in schema:
                made[key] = int(schema[key])
        self._add_numbers(schema, made)
        self._add_strings(schema, made)
        self._add_arrays(schema, made)
        if own & {*_OBJECTS}:
            is_closed = self._closed and not combined and own.isdisjoint(_APPLIED)
            self._add_object(schema, made, is_closed=is_closed)
        self._levels -= 1
        return made

    def _reference(self, target: Any, combined: bool) -> str:
        key = id(target), combined
        if key not in self._names:
            name = self._names[key] = str(len(self._names))
            self._definitions[name] = self._schema(target, combined=combined)
        return f"#/$defs/{self._names[key]}"

    def _followed(self, schema: Any) -> Any:
        """Return the schema to which references without other keywords lead."""
        for _ in range(_MOST_LEVELS):
            if isinstance(schema, bool) or schema.keys() - {*_NOTES} != {"$ref"}:
                break
            schema = self._document.target(schema)
        return schema

    def _exclude(self, one: Any, other: Any) -> bool:
        """Return whether no value meets both schemas, as far as types, constants and the constants of
        required properties tell."""
        one, other = self._followed(one), self._followed(other)
        if isinstance(one, bool) or isinstance(other, bool):
            return False in (one, other)
        common = _kinds(one) & _kinds(other)
        if not common or _have_other_constants(one, other):
            return True
        first, second = one.get("properties", {}), other.get("properties", {})
        return common == {"object"} and any(
            name in first
            and name in second
            and _have_other_constants(self._followed(first[name]), self._followed(second[name]))
            for name in (*one.get("required", ()), *other.get("required", ()))
        )

    def _add_numbers(self, schema: Schema, made: Schema) -> None:
        for key in _NUMBERS:
            value = schema.get(key, False)
            if value is True:  # in draft 4, beside the bound
                value = schema.get(key.replace("exclusiveM", "m"), False)
            if value is not False:
                made[key] = _plain(value)
        if schema.get("type") != "integer":
            _include(made, "inimum", max, 1)
            _include(made, "aximum", min, -1)
        if "multipleOf" not in made:
            return
        step = _fraction_of(made["multipleOf"])
        self._steps.add(step)
        if made.get("maximum", 0) < 0 or made.get("exclusiveMaximum", 1) <= 0:
            raise _undone("a multipleOf of negative numbers, which are not drawn")
        bounds = [made[key] for key in _NUMBERS[:4] if key in made]
        if (
            step.denominator != 1
            and schema.get("type") != "integer"
            and (
                made.keys() & _NUMBERS[2:4]
                or any(_fraction_of(each).denominator != 1 for each in bounds)
            )
        ):
            raise _undone(
                "a multipleOf with a fraction beside a bound that is exclusive or has a fraction (give "
                "minimum and maximum as integers)"
            )

    def _add_strings(self, schema: Schema, made: Schema) -> None:
        patterns = []
        if "pattern" in schema:
            patterns.append(searched(schema["pattern"], "JSON schema's pattern"))
        form = schema.get("format")
        if form in _DATES:
            patterns.append(searched(f"^{_DATES[form]}$", f"format {form}"))
        elif form is not None:
            if form not in FORMATS:
                raise _undone(f"the format {form!r}, which is not one of {', '.join(FORMATS)}")
            made["format"] = form
            if form == "hostname":
                made["maxLength"] = min(made.get("maxLength", _LONGEST_HOSTNAME), _LONGEST_HOSTNAME)
        if patterns:
            made["pattern"] = patterns.pop()
        if patterns:
            made["allOf"] = [*made.get("allOf", ()), {"pattern": patterns.pop()}]

    def _add_arrays(self, schema: Schema, made: Schema) -> None:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        if first:
            made["prefixItems"] = [self._schema(each) for each in first]
        if rest is not True:
            made["items"] = self._schema(rest)

    def _named(self, schema: Schema) -> dict[str, Any]:
        """Return the patterns of properties that ``propertyNames`` means."""
        names = self._followed(schema["propertyNames"])
        if names is False:
            return {}
        said = names.keys() - {*_NOTES}
        values = names.get("enum", [names["const"]] if "const" in names else None)
        if (
            said - {"type"} not in ({"pattern"}, {"enum"}, {"const"})
            or names.get("type", "string") != "string"
            or schema.keys() & {"properties", "patternProperties"}
        ):
            raise _undone("'propertyNames' of more than a pattern or an enum, or beside properties")
        if values is not None:
            texts = [re.escape(value) for value in values if isinstance(value, str)]
            names = {"pattern": f"^(?:{'|'.join(texts)})$"}
        return {names["pattern"]: schema.get("additionalProperties", True)}

    def _add_object(self, schema: Schema, made: Schema, *, is_closed: bool) -> None:
        """Write what a schema says of objects. Others than named properties become properties of a
        pattern: llguidance would also take names in other spellings (``"\\u0061"`` is ``"a"``)."""
        given, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        names = dict.fromkeys([*given, *schema.get("required", ())])
        others = schema.get("additionalProperties")
        if not _is_true(schema.get("unevaluatedProperties", True)):
            if schema.keys() & {*_APPLIED, "if"} or others is not None:
                raise _undone("'unevaluatedProperties' beside schemas that evaluate some")
            others = schema["unevaluatedProperties"]
        if not _is_true(schema.get("propertyNames", True)):
            others, patterns = False, self._named(schema)
        if others is None:
            others = not (is_closed and given and not patterns and given.keys() >= names.keys())
        if given:
            made["properties"] = {name: self._schema(each) for name, each in given.items()}
        if schema.get("required"):
            made["required"] = list(dict.fromkeys(schema["required"]))
        low, needed = schema.get("minProperties", 0), len(made.get("required", ()))
        if low > needed + 1:  # other names may come twice
            raise _undone(f"minProperties {low} and {needed} required by name")
        written = {
            searched(key, "JSON schema's pattern"): self._schema(each)
            for key, each in patterns.items()
        }
        if others is not False:
            if patterns:
                raise _wrong(
                    'patternProperties beside other properties: give "additionalProperties": false'
                )
            # llguidance excludes names as they are written; control characters are written in two ways.
            is_any = not names or (_is_true(others) and all(map(str.isprintable, names)))
            written = {"" if is_any else f"^{none_of(names)}$": self._schema(others)}
        elif any(map(_HAS_SEVERAL_READINGS.search, patterns)) and (
            len(patterns) > 1 or not all(name.isascii() and name.isprintable() for name in names)
        ):
            raise _wrong(
                "patternProperties that validators read differently: write [0-9] for \\d, and "
                "[A-Za-z0-9_] for \\w"
            )
        if written:
            made["patternProperties"] = written
        made["additionalProperties"] = False


def _include(made: Schema, bound: str, stricter: Callable[..., Any], sign: int) -> None:
    """Replace an exclusive integer that is the bound next to 0 by the next number of 15 digits, which is
    included: llguidance takes the integer itself if both bounds have the same integer part."""
    value = made.get(f"exclusiveM{bound}")
    if value is not None and value == int(value) and value * sign >= 0:
        del made[f"exclusiveM{bound}"]
        after = value + sign * 10.0 ** (len(str(abs(int(value)))) - 15 - (not value))
        made[f"m{bound}"] = stricter(after, made.get(f"m{bound}", after))


_HAS_SEVERAL_READINGS = re.compile(r"\\[dDwWsS]|(?<!\\)\.|\(\?")


def _kinds(schema: Schema) -> set[str]:
    types = schema.get("type", _TYPES)
    return {
        name.replace("integer", "number") for name in ([types] if isinstance(types, str) else types)
    }


def _have_other_constants(one: Any, other: Any) -> bool:
    """Return whether both schemas list their values, and have no value in common."""
    texts = []
    for each in (one, other):
        values = each if isinstance(each, dict) else {}
        listed = values.get("enum", [values["const"]] if "const" in values else None)
        if listed is None:
            return False
        texts.append({json.dumps(_plain(value), sort_keys=True) for value in listed})
    return texts[0].isdisjoint(texts[1])


def _plain(value: Any) -> Any:
    """Return a value with whole numbers as integers, as llguidance spells them."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
