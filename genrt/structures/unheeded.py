"""Keywords of JSON schemas that vLLM's xgrammar passes over, or takes wrongly: texts would come out that
break them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from genrt.structures.schemas import schemas_in

__all__ = ["mistaken", "unheeded"]

Schema: TypeAlias = dict[str, Any]

_NEVER = ("not", "then", "else", "contains", "dependentRequired", "dependentSchemas", "$dynamicRef")
_OF_OBJECTS = ("properties", "required", "additionalProperties", "unevaluatedProperties")
_OF_ARRAYS = ("items", "prefixItems", "unevaluatedItems")
_WITH_TYPE = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems"),
    *("minProperties", "maxProperties", "propertyNames", "patternProperties"),
)
_UNIONS = ("anyOf", "oneOf", "allOf")
_ALONE = ("$ref", "const", "enum", *_UNIONS)
_MISTAKEN = {"minLength", "maxLength", "patternProperties"}
_ASSERTING = ("type", *_ALONE, *_OF_OBJECTS, *_OF_ARRAYS, *_WITH_TYPE)


def unheeded(schema: object) -> str | None:
    """Return what of a schema xgrammar passes over, in words; ``None`` if that is nothing known."""
    root = schema if isinstance(schema, dict) else {}
    return next((what for each in schemas_in(root) for what in _unheeded(each)), None)


def mistaken(schema: Schema) -> bool:
    """Return whether xgrammar takes a schema, and gets it wrong: strings of some length may have control
    characters, which JSON has not; properties that are required beside patterns may be missing."""
    return any(not each.keys().isdisjoint(_MISTAKEN) for each in schemas_in(schema))


def _unheeded(schema: Schema) -> Iterator[str]:
    for key in _NEVER:
        if key in schema:
            yield repr(key)
    reference = schema.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        yield "a '$ref' that does not begin with '#/'"
    for key in _UNIONS:
        if schema.get(key) == []:
            yield f"an empty {key!r}"
    alone = next((key for key in _ALONE if key in schema), None)
    if alone is not None:
        for key in _ASSERTING:
            if key != alone and key in schema and not _says_the_same(schema, alone, key):
                yield f"{key!r} beside {alone!r}"
    elif not schema.keys() & {"type", *_OF_OBJECTS, *_OF_ARRAYS}:
        for key in _WITH_TYPE:
            if key in schema:
                yield f"{key!r} without a 'type'"


def _says_the_same(schema: Schema, alone: str, other: str) -> bool:
    """Tell whether a keyword leaves out nothing of what the one beside it admits, as far as is seen."""
    said = schema[other]
    if alone == "const" and other == "enum":
        return isinstance(said, list) and schema[alone] in said
    if other != "type" or alone == "$ref":
        return False
    types = {said} if isinstance(said, str) else {*said} if isinstance(said, list) else set()
    if "number" in types:
        types.add("integer")
    if alone in _UNIONS:
        return all(
            isinstance(each, dict) and ("$ref" in each or _types_of(each) <= types)
            for each in schema[alone]
        )
    values = [schema[alone]] if alone == "const" else schema[alone]
    return all(_type_of(value) in types for value in values)


def _types_of(schema: Schema) -> set[str]:
    said = schema.get("type", "any")
    return {said} if isinstance(said, str) else {*said}


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return {int: "integer", str: "string", list: "array", dict: "object"}[type(value)]
