"""What vLLM's xgrammar passes over in JSON schemas: it is named, and what is right is not."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from genrt.structures.unheeded import unheeded

pytestmark = pytest.mark.vllm

TEXT, NUMBER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
NUMBERED = {"properties": {"a": NUMBER, "b": NUMBER}, **OBJECT}
DEFINED = {"$defs": {"a": {**NUMBER, "$anchor": "x"}}}

PASSED_OVER: list[tuple[dict[str, Any], Any, str]] = [
    ({"not": TEXT}, "a", "'not'"),
    ({"items": TEXT | {"not": {"const": "a"}}}, ["a"], "'not'"),
    ({"if": TEXT, "then": {"minLength": 2}}, "a", "'then'"),
    (NUMBERED | {"dependentRequired": {"a": ["b"]}}, {"a": 1}, "'dependentRequired'"),
    (NUMBERED | {"dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}, "'dependentSchemas'"),
    ({"contains": NUMBER}, ["a"], "'contains'"),
    ({"uniqueItems": True}, [1, 1], "'uniqueItems' without a 'type'"),
    ({"minimum": 3}, 1, "'minimum' without a 'type'"),
    ({"properties": {"a": {"pattern": "^a$"}}}, {"a": "b"}, "'pattern' without a 'type'"),
    ({"patternProperties": {"^a": NUMBER}}, {"a": "x"}, "'patternProperties' without a 'type'"),
    ({"$ref": "#/$defs/a", "minimum": 5, **DEFINED}, 1, "'minimum' beside '$ref'"),
    ({"$ref": "#x", **DEFINED}, "x", "a '$ref' that does not begin with '#/'"),
    (NUMBER | {"anyOf": [{"minimum": 5}, {"maximum": 2}]}, 3, "'type' beside 'anyOf'"),
    ({"allOf": [TEXT], "minLength": 3}, "a", "'minLength' beside 'allOf'"),
    (TEXT | {"enum": ["a", 1]}, 1, "'type' beside 'enum'"),
    (NUMBER | {"const": "a"}, "a", "'type' beside 'const'"),
    ({"const": "a", "enum": ["b"]}, "a", "'enum' beside 'const'"),
]

HEEDED: list[tuple[dict[str, Any], Any, Any]] = [
    ({"anyOf": [NUMBER, {"type": "null"}], "default": None, "title": "N"}, None, "a"),
    ({"anyOf": [NUMBER, {"type": "null"}], "type": ["number", "null"]}, 1, "a"),
    (TEXT | {"const": "a", "enum": ["a"], "title": "A"}, "a", "b"),
    (NUMBER | {"enum": [1, 2.0]}, 1, 3),
    ({"$ref": "#/$defs/a", "description": "it", "default": 1, **DEFINED}, 1, "a"),
    (OBJECT | {"oneOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": NUMBERED}}, {"a": 1}, {"a": "x"}),
    (NUMBERED | {"required": ["a", "b"], "additionalProperties": False}, {"a": 1, "b": 2}, {}),
    ({"properties": {"a": {}}, "required": ["a"], "minProperties": 1}, {"a": 1}, {}),
    ({"items": NUMBER, "minItems": 2}, [1, 2], [1]),
    (OBJECT | {"additionalProperties": NUMBER}, {"x": 1}, {"x": "a"}),
    (
        {"type": "array", "prefixItems": [NUMBER, TEXT], "items": False, "minItems": 2},
        [1, "a"],
        [1],
    ),
    (TEXT | {"minLength": 2, "maxLength": 3}, "ab", "a"),
    ({}, 1, None),
    ({"type": "number", "exclusiveMinimum": 0}, 1, 0),
]


def admits(schema: dict[str, Any], value: Any) -> bool:
    """Tell whether xgrammar takes a value's text for one of the schema."""
    import xgrammar

    tokens = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo([*tokens, b"<end>"], stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(json.dumps(value)) and matcher.accept_token(256))


@pytest.mark.parametrize(("schema", "wrong", "what"), PASSED_OVER, ids=str)
def test_what_xgrammar_passes_over_is_named(schema: dict[str, Any], wrong: Any, what: str) -> None:
    assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)
    assert admits(schema, wrong), "xgrammar heeds it now: take it out of the list"
    assert unheeded(schema) == what


@pytest.mark.parametrize(("schema", "right", "wrong"), HEEDED, ids=str)
def test_what_xgrammar_heeds_is_not(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    assert unheeded(schema) is None
    assert admits(schema, right)
    assert not admits(schema, wrong) or schema == {}


@pytest.mark.parametrize("union", ["anyOf", "oneOf", "allOf"])
def test_a_union_of_nothing_is_named(union: str) -> None:
    assert unheeded({"items": {union: []}}) == f"an empty {union!r}"
