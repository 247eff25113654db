"""A JSON schema as it is given: read, checked keyword by keyword, its references resolved.

Drafts 4 to 2020-12 are read together: older keywords mean what they mean in their draft, whatever
``$schema`` says (``items`` as a list, ``additionalItems``, ``dependencies``, ``exclusiveMinimum:
true``). Only in a schema of draft 7 or older does a ``$ref`` replace the keywords beside it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from genrt.errors import InvalidConstraint
from genrt.numbers import displayed

__all__ = ["Document", "Schema", "object_of", "undone"]

Schema: TypeAlias = dict[str, Any]

_MOST_ITEMS = 10_000
_MOST_PROPERTIES = 2_000
_MOST_PATTERNS = 50

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
    *(
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
    ),
    *("$comment", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor", "id", "contentEncoding"),
    *("contentMediaType", "contentSchema", "discriminator", "xml", "externalDocs", "const"),
    *("enumNames", "propertyOrdering", "strict", "name", "nullable"),
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


def undone(what: str) -> InvalidConstraint:
    """Return the error for a part of a schema that genrt cannot compile."""
    return InvalidConstraint(
        f"the JSON schema has {what}: take it out, and check it by a predicate: "
        "all_of(json_schema(…), predicate(…))"
    )


def object_of(schema: object) -> Schema:
    """Return a schema as an object of its own, read from its JSON text.

    Args:
        schema: a mapping, a JSON text, a bool, or a pydantic model's class.

    Raises:
        InvalidConstraint: it is none of these, or false, or has no JSON form.
    """
    wrong = (
        f"the JSON schema is {displayed(schema)}: give a dict, a JSON text, a pydantic model or True for "
        "any JSON"
    )
    try:
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
    except Exception as error:  # of pydantic's own kinds
        raise InvalidConstraint(f"the JSON schema has no JSON form: {error}") from error
    if isinstance(schema, Mapping):
        schema = dict(schema)
    if not isinstance(schema, str | dict | bool):
        raise InvalidConstraint(wrong)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    except RecursionError as error:
        raise InvalidConstraint(f"the JSON schema is nested too deeply: {error}") from error
    except (TypeError, ValueError) as error:
        raise InvalidConstraint(f"the JSON schema has no JSON form: {error}") from error
    try:
        rules = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(f"the JSON schema is not a JSON text: {error}") from error
    if rules is True:
        return {}
    if rules is False:
        raise InvalidConstraint("the JSON schema is false, which no text satisfies: change it")
    if not isinstance(rules, dict):
        raise InvalidConstraint(wrong)
    return rules


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Document:
    """A schema and all schemas inside of it, by identity.

    Raises:
        InvalidConstraint: a keyword is unknown and looks misspelt, is used wrongly, or is too large.
    """

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
                raise InvalidConstraint(
                    f"the JSON schema has {schema!r} where a schema belongs: change it"
                )
            if self._ref_is_alone and "$ref" in schema:
                for key in [key for key in schema if key not in ("$ref", *_DEFINITIONS)]:
                    del schema[key]
            _check(schema)
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
        """Return the schema that a ``$ref`` refers to.

        Raises:
            InvalidConstraint: it is not in this document.
        """
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


def _check(schema: Schema) -> None:
    """Raise InvalidConstraint for a keyword that is unknown, used wrongly, or too large."""
    for key, value in schema.items():
        if key not in _KNOWN:
            close = difflib.get_close_matches(key, _KNOWN, 1, 0.8)
            if close and not key.startswith("x-"):
                raise InvalidConstraint(
                    f"the JSON schema has the unknown keyword {key!r}: write {close[0]!r}, or take it out"
                )
        elif key in _UNDONE:
            raise undone(f"{key!r}, which cannot be compiled")
        elif key in _KINDS:
            kinds = _KINDS[key]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise InvalidConstraint(
                    f"the JSON schema has {key!r}: {value!r}; give {_NAMES[kinds[0]]}"
                )
    for key in _COUNTS:
        count = schema.get(key, 0)
        if count < 0 or count != int(count):
            raise InvalidConstraint(
                f"the JSON schema has {key!r}: {count}; give a whole number from 0 on"
            )
    if "prefixItems" in schema and isinstance(schema.get("items"), list):
        raise InvalidConstraint(
            "the JSON schema has prefixItems beside a list of items: give one of both"
        )
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        if name not in _TYPES:
            raise InvalidConstraint(
                f"the JSON schema has the type {name!r}: give one of {', '.join(_TYPES)}"
            )
    names = [schema.get("required", []), *schema.get("dependentRequired", {}).values()]
    names += [each for each in schema.get("dependencies", {}).values() if isinstance(each, list)]
    for each in names:
        if not isinstance(each, list) or not all(isinstance(name, str) for name in each):
            raise InvalidConstraint(f"the JSON schema requires {each!r}: give a list of names")
    if schema.get("multipleOf", 1) <= 0:
        raise InvalidConstraint(
            f"the JSON schema has a multipleOf of {schema['multipleOf']}: give a number above 0"
        )
    _refuse_what_is_too_large(schema)
    _refuse_what_is_rounded(schema)


def _refuse_what_is_too_large(schema: Schema) -> None:
    for key in ("minItems", "maxItems"):
        if schema.get(key, 0) > _MOST_ITEMS:
            raise InvalidConstraint(
                f"the JSON schema has {key} {schema[key]}, and {_MOST_ITEMS:,} is the most: "
                "leave it out, or "
                "check it by a predicate"
            )
    for key, most in (("properties", _MOST_PROPERTIES), ("patternProperties", _MOST_PATTERNS)):
        if len(names := schema.get(key, {})) > most:
            raise InvalidConstraint(
                f"the JSON schema has an object of {len(names):,} {key}, and {most:,} is the most: "
                "make it smaller"
            )


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
            raise InvalidConstraint(
                f"the JSON schema has the integer {value}, which is not a 64-bit float and would "
                "be rounded: leave it out, or give it as a string"
            )
