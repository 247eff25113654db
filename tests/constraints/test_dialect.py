"""The dialect of structures: tables of what each form means, and drawn ones against Python's ``re`` and
jsonschema."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from benchmarks.structures import accepts, check_patterns, check_schemas
from genrt.constraints import json_schema, regex
from genrt.errors import InvalidConstraint
from genrt.structures.guides import lark_of_grammar, lark_of_regex, lark_of_schema, lark_of_tags
from genrt.structures.matching import byte_matcher
from tests.vocabularies import lm_over


def takes(lark: str, text: str) -> bool:
    matcher = byte_matcher(lark)
    assert not matcher.is_error(), matcher.get_error()
    return accepts(matcher, text)


@pytest.mark.parametrize(
    ("pattern", "has", "has_not"),
    [
        (r"[\^a]", ["^", "a"], ["b", ""]),
        (r"\x41b", ["Ab"], ["A", "b"]),
        (".", ["a", "é", "\r"], ["\n", ""]),
        ("(?s).", ["\n"], [""]),
        ("A.{3}B", ["AéébB", "AabcB"], ["Aa\nbB", "AééB"]),
        (r"\d\w\s", ["1a ", "٣é\u2003"], ["aa "]),
        # Python's classes and case, which differ from those of the Rust crate.
        (r"\w+", ["é_²½٣", "ª\u2167①"], ["e\u0300", "\u203f", "\u200d"]),
        (r"[\w-]\W", ["a\u0300", "-\u203f"], ["a²"]),
        (r"\s\S", ["\x1ca", "\x1fa"], ["a\x1c"]),
        ("(?i)i[h-j]", ["I\u0131", "\u0130j", "\u0131I"], ["i\u0300"]),
        ("(?i)[^i]", ["a"], ["\u0131", "I", "\u0130"]),
        ("^a|b$", ["a", "b"], ["ab", ""]),
        ("(?:^a|b)c$", ["ac", "bc"], ["abc"]),
        ("(?x)a\n b # c\n d", ["abd"], ["a\nbd"]),
        ("(?i)straSSe", ["STRASSE", "strasse"], ["strase"]),
        ("(?i:a)b(?P<n>c)(?#d)", ["Abc"], ["aBc"]),
        ("a{2}|b{,2}|c{1,}", ["aa", "", "bb", "ccc"], ["a", "bbb"]),
        (r"\"\\/\/", ['"\\//'], ['"//']),
        ("", [""], ["a"]),
    ],
    ids=str,
)
def test_regular_expressions(pattern: str, has: list[str], has_not: list[str]) -> None:
    forms = [lark_of_regex(pattern)]
    if pattern and "/" not in pattern:
        forms.append(lark_of_grammar(f"start: /{pattern}/", "lark"))
    for form in forms:
        assert [text for text in has if not takes(form, text)] == []
        assert [text for text in has_not if takes(form, text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"\AParis\Z", "an assertion: only"),
        (r"a\b", "an assertion: only"),
        ("a$b", r"\$ stands where it can never match"),
        ("a^", r"\^ stands where"),
        ("a?^b", r"\^ stands where"),
        ("(^a)*", "an anchor is repeated"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(?>a)", "an atomic group"),
        ("(a)(?(1)b|c)", "a condition"),
        ("(?P<n>a)(?P=n)", "a back-reference"),
        (r"(a)\1", "back-reference"),
        ("a++", "a possessive repetition"),
        ("[[:alpha:]]", "read in several ways"),
        ("[a&&b]", "read in several ways"),
        ("[]a]", "read in several ways"),
        ("[a--b]", "read in several ways"),
        ("(?m)^a$", "the flag MULTILINE"),
        ("(?a:a)", "the flag ASCII"),
        (r"\07", "octal"),
        (r"\a", "write"),
        (r"\ud800", "not a character"),
        # Python's own messages.
        (r"\p{L}", r"bad escape \\p"),
        (r"[\d-a]", "bad character range"),
        ("a**", "multiple repeat"),
        ("(?P<n>a)(?P<n>b)", "redefinition of group name"),
        ("a{2,1}", "min repeat greater than max"),
        ("(", "unterminated subpattern"),
        ("a?" * 10_001, "10,001 repetitions"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_what_has_several_readings_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message):
        regex(pattern, lm_over(b"a"))
    with pytest.raises(InvalidConstraint, match=message):
        json_schema({"pattern": pattern}, lm_over(b"a"))


@pytest.mark.parametrize(
    ("pattern", "has", "has_not"),
    [
        ('^"$', ['"'], ["", '""']),
        (r"^\\$", ["\\"], ["\\\\"]),
        (r"^\x0a\t$", ["\n\t"], ["\n"]),
        (r"^[^a]$", ['"', "\\", "\x00", "\x1f", "é"], ["a", ""]),
        ("b", ["b", "abc", '"b'], ["a", ""]),
        ("^a|b$", ["a", "ax", "xb"], ["xa", "bx"]),
        # Validators of several languages agree on these.
        (r"^\d$", ["1"], ["٣", "a"]),
        (r"^\D$", ["a"], ["٣", "1"]),
        (r"^\w$", ["a", "_"], ["é", "-"]),
        (r"^\W$", ["-", '"'], ["é", "a"]),
        (r"^[^\w]$", ["-"], ["é", "a"]),
        (r"^.$", ["a", '"'], ["\n", "\r", "\u2028"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["pattern", "propertyNames", "patternProperties"])
def test_patterns_of_schemas(where: str, pattern: str, has: list[str], has_not: list[str]) -> None:
    schemas: dict[str, dict[str, Any]] = {
        "pattern": {"type": "string", "pattern": pattern},
        "propertyNames": {"type": "object", "propertyNames": {"pattern": pattern}},
        "patternProperties": {
            "type": "object",
            "patternProperties": {pattern: True},
            "additionalProperties": False,
        },
    }
    lark = lark_of_schema(schemas[where], "spaced")
    for texts, is_of_it in ((has, True), (has_not, False)):
        for text in texts:
            value: Any = text if where == "pattern" else {text: 1}
            assert takes(lark, json.dumps(value, ensure_ascii=False)) == is_of_it, text


BASE = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}

SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    # Schemas that hold together at the root.
    ({"allOf": [BASE], "properties": {"b": {}}}, ['{"a": 1}', '{"a": 1, "b": 2}'], ['{"b": 2}']),
    (
        {"$defs": {"A": BASE}, "$ref": "#/$defs/A", "properties": {"b": {"type": "null"}}},
        ['{"a": 1, "b": null}'],
        ['{"a": 1, "b": 1}', '{"a": "x"}'],
    ),
    ({"anyOf": [BASE, {"required": ["c"]}], "properties": {"b": {}}}, ['{"a": 1, "b": 2}'], ["{}"]),
    # Older drafts.
    ({"allOf": [{"items": [{"const": 1}]}], "type": "array"}, ["[1]", "[1, 2]"], ["[2]"]),
    ({"items": [{"const": 1}], "additionalItems": False}, ["[1]", "[]"], ["[1, 2]"]),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.5"], ["1", "1.0"]),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"i": {"type": "integer"}},
            "allOf": [{"$ref": "#/definitions/i", "maximum": 0}],
        },
        ["1"],
        ['"a"'],
    ),
    # Names that need escapes.
    (
        {"type": "object", "properties": {"a\nb": {"type": "integer"}}},
        ['{"a\\nb": 1}', '{"c": "x"}'],
        ['{"a\\nb": "x"}', '{"a\\u000ab": "x"}', '{"\\u0061\\nb": "x"}'],
    ),
    # Formats beside other keywords, and their corners.
    ({"format": "date", "pattern": "^2"}, ['"2024-02-29"'], ['"1999-01-01"', '"2023-02-29"', '"2x"']),
    ({"format": "ipv4"}, ['"1.1.1.1"'], ['"01.1.1.1"']),
    # Containers of which only a size is known.
    ({"maxItems": 2}, ["[]", "[1]", '[{"a": [null]}]'], ["[1, 2, 3]"]),
    ({"required": []}, ["{}", '{"a": {"b": [1]}}'], ["{1}"]),
    ({"maxProperties": 1}, ["{}", '{"a": {"b": [1]}}'], ['{"a": 1, "b": 1}']),
    # What is rewritten.
    (
        {"$defs": {"A": {"properties": {"k": {"const": "a"}, "x": {}}, "required": ["k", "x"]},
                   "B": {"properties": {"k": {"const": "b"}}, "required": ["k"]}},
         "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "discriminator": {}, "type": "object"},
        ['{"k": "a", "x": 1}', '{"k": "b"}'],
        ['{"k": "a"}', '{"k": "c"}'],
    ),
    (  # a union that contains itself
        {"type": "object", "properties": {"k": {"const": 1}, "l": {"items": {"oneOf": [
            {"$ref": "#"}, {"type": "object", "properties": {"k": {"enum": [2]}}, "required": ["k"]},
            {"type": "string", "enum": ["a"]}, {"type": "string", "const": "b"}]}}}, "required": ["k"]},
        ['{"k": 1, "l": [{"k": 2}, {"k": 1, "l": ["a", "b"]}]}'],
        ['{"k": 2}', '{"k": 1, "l": ["c"]}', '{"k": 1, "l": [{"k": 3}]}'],
    ),
    ({"properties": {"a": {"type": "null"}}}, ['{"a": null, "b": 1}'], ['{"\\u0061": 1}', '{"a": 1}']),
    (
        {"properties": {"ab": {}, "": {}}, "additionalProperties": {"type": "null"}},
        ['{"ab": 1, "": 2}', '{"a": null, "abc": null, "b": null}'],
        ['{"a": 1}', '{"abc": 1}', '{"": 1, "": null}'],
    ),
    ({"propertyNames": {"enum": ["a", "b"]}}, ['{"a": 1}', "{}"], ['{"c": 1}']),
    ({"if": {"const": 1}, "uniqueItems": False, "dependentRequired": {}}, ["1", "[1, 1]"], ["x"]),
    ({"$id": "a:b", "$defs": {"a/b": {"const": 1}}, "items": {"$ref": "#/$defs/a~1b"}}, ["[1]"], ["[2]"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "has", "has_not"), SCHEMAS, ids=lambda each: str(each)[:60])
def test_schemas(schema: Any, has: list[str], has_not: list[str]) -> None:
    lark = lark_of_schema(schema, "spaced")
    assert [text for text in has if not takes(lark, text)] == []
    assert [text for text in has_not if takes(lark, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"unevaluatedProperties": False, "allOf": [{}]}, "'unevaluatedProperties'"),
        ({"unevaluatedItems": False}, "'unevaluatedItems'"),
        ({"$dynamicRef": "#a"}, "'.dynamicRef'"),
        ({"uniqueItems": True, "type": "array"}, "'uniqueItems'"),
        ({"not": {"type": "null"}}, "'not'"),
        ({"if": {"type": "null"}, "then": {"type": "string"}}, "'if'"),
        ({"contains": {"const": 1}}, "'contains'"),
        ({"propertyNames": {"maxLength": 1}}, "'propertyNames' of more than a pattern or an enum"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "or beside properties"),
        ({"minProperties": 2}, "minProperties 2 and 0 required by name"),
        ({"patternProperties": {"^a": True}}, "patternProperties beside other properties"),
        (
            {"patternProperties": {r"^\d$": {}, "a": {}}, "additionalProperties": False},
            "validators read differently",
        ),
        ({"type": "number", "multipleOf": 3, "maximum": -3}, "negative numbers"),
        (
            {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0},
            "beside a bound that is exclusive",
        ),
        ({"format": "idn-email"}, "the format 'idn-email'"),
        ({"$schema": "http://example.com/mine"}, "which is not a draft from 4 to 2020-12"),
        (
            {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
            "a oneOf whose schemas may hold together",
        ),
        (
            {"patternProperties": {"a": {}, "b": {}}, "additionalProperties": False},
            "are not disjoint",
        ),
        (
            {"properties": {"a": {}, "b": {}}, "maxProperties": 1},
            "min/maxProperties only supported",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message):
        json_schema(schema, lm_over(b"a"))


def test_a_pydantic_model_is_a_schema() -> None:
    class Pet(pydantic.BaseModel):
        name: str
        age: int | None = None

    letters = lm_over(*[bytes([byte]) for byte in range(256)])
    state = json_schema(Pet, letters).start()
    for byte in b'{"name": "x", "age": null}':
        state = state.advance(1 + byte)
    assert state.accepting


TAGGED = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
    "end": "</f>",
}
CALLS = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAGGED]}


@pytest.mark.parametrize(
    ("form", "has", "has_not"),
    [
        (TAGGED, ["<f>1</f>"], ["<f>x</f>", "1", ""]),
        (
            {
                "type": "tags_with_separator",
                "tags": [TAGGED],
                "separator": ",",
                "at_least_one": True,
            },
            ["<f>1</f>", "<f>1</f>,<f>2</f>"],
            ["", "<f>1</f>,"],
        ),
        (CALLS, ["", "a<b", "a <f>1</f> b", "<f>1</f><f>2</f>"], ["<f>x</f>", "a <f"]),
        (CALLS | {"at_least_one": True}, ["<f>1</f> a"], ["", "a <f>1</f>"]),
        (CALLS | {"stop_after_first": True}, ["a <f>1</f>", "a"], ["<f>1</f>b"]),
        (CALLS | {"excludes": ["no"]}, ["<f>1</f> n o"], ["no", "<f>1</f>no"]),
        (TAGGED | {"content": {"type": "any_text"}}, ["<f>a < b</f>"], ["<f>a", "<f></f>b"]),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "a/"},
                    {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]+"}, TAGGED]},
                    {"type": "any_text"},
                ],
            },
            ["a/12 x", "a/<f>1</f>"],
            ["a/", "12"],
        ),
    ],
    ids=str,
)
def test_structural_tags(form: Any, has: list[str], has_not: list[str]) -> None:
    lark = lark_of_tags(json.dumps({"type": "structural_tag", "format": form}))
    assert [text for text in has if not takes(lark, text)] == []
    assert [text for text in has_not if takes(lark, text)] == []


def test_structural_tags_of_older_clients() -> None:
    structure = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
    lark = lark_of_tags(json.dumps({"structures": [structure], "triggers": ["<f"]}))
    assert takes(lark, "a <f>1</f> b")
    assert not takes(lark, "a <f>x</f>")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
        ('{"format": {"type": "token", "token": 1}}', "the format 'token', which genrt cannot"),
        (
            '{"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["<"]}',
            "of the triggers",
        ),
        (
            '{"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}',
            "in the style 'qwen_xml'",
        ),
    ],
)  # fmt: skip
def test_structural_tags_that_cannot_be_compiled_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message):
        lark_of_tags(text)


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_patterns_accept_what_pythons_re_accepts(seed: int) -> None:
    """``python -m benchmarks.structures`` draws 10,000."""
    table = check_patterns(250, seed)
    assert table.wrong == []
    assert table.compiled > 100


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_schemas_accept_what_jsonschema_accepts(seed: int) -> None:
    """``python -m benchmarks.structures`` draws 2,000."""
    table = check_schemas(60, seed)
    assert table.wrong == []
    assert table.compiled > 20
