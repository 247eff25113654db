"""JSON schemas: what is in the set validates, no mask leads to a prefix of nothing, and limits hold at
the call."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from genrt.constraints import ConstraintState, json_schema
from genrt.errors import InvalidConstraint, InvalidRequest
from tests.vocabularies import EOS, allowed, lm_over

Schema = dict[str, Any] | bool

LETTERS = b'"{}[],:0123456789-.eabctrufalsn \\\xc3\xa9'
LM = lm_over(*[bytes([byte]) for byte in LETTERS])
BYTES = lm_over(*[bytes([byte]) for byte in range(256)])


def taken(schema: Schema, *texts: str) -> list[str]:
    """The texts that are in the set."""
    start = json_schema(schema, BYTES).start()

    def is_taken(text: str) -> bool:
        state = start
        try:
            for byte in text.encode():
                state = state.advance(1 + byte)
        except InvalidRequest:
            return False
        return state.accepting

    return [*filter(is_taken, texts)]


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
SEVENS = {"multipleOf": 7, "minimum": 1, "maximum": 6}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["b"], "additionalProperties": {"$ref": "#"}},
        {"type": "integer", **SEVENS},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"allOf": [True, False]},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "string", "allOf": [{"pattern": "^a+$"}, {"pattern": "^b+$"}]},
        {"format": "date", "type": "string", "maxLength": 3},
        {"enum": ["a", "b"], "pattern": "^c"},
    ],
)
def test_a_schema_that_nothing_satisfies_is_refused(schema: Schema) -> None:
    with pytest.raises(InvalidConstraint, match="allows no value"):
        json_schema(schema, LM)


def test_all_texts_are_led_to_and_nothing_else() -> None:
    end = {"$defs": {"n": {**NODE, "additionalProperties": False}}}
    schema = {**end, "anyOf": [{"$ref": "#/$defs/n"}, {"const": 1}, {"$ref": "#/anyOf/1"}]}
    lm = lm_over(*[bytes([byte]) for byte in b'{}:1 "next'])
    found = set()
    stack: list[tuple[ConstraintState, str]] = [(json_schema(schema, lm).start(), "")]
    while stack:
        state, text = stack.pop()
        following = allowed(state)
        assert following, f"{text!r} is a dead end"
        for token_id in following:
            if token_id == EOS:
                found.add(text)
            elif len(text) < 14:
                stack.append((state.advance(token_id), text + lm.byte_vocab[token_id].decode()))
    assert found == {"1", "{}", '{"next": {}}'}


# Of each format that llguidance knows or genrt defines: what is of it, what is not, and who says so.
FORMATS: list[tuple[str, str, str, Callable[[str], object] | None]] = [
    (
        "date",
        "2020-02-29 2000-02-29 1996-02-29 0001-01-01 9999-12-31 0004-02-29",
        "2019-02-29 1900-02-29 2100-02-29 0000-01-01 2020-02-30 2021-04-31 2021-13-01 2021-00-01 "
        "2021-01-00 20210101 21-01-01 2021-1-1 2021-01-01T _2021-01-01",
        datetime.date.fromisoformat,
    ),
    (
        "time",
        "00:00:00Z 23:59:59.999999+23:59 12:30:00-05:00 12:30:00.5Z",
        "24:00:00Z 12:60:00Z 12:00:60Z 12:00:00 12:00Z 1:00:00Z 12:00:00+24:00 12:00:00.Z",
        datetime.time.fromisoformat,
    ),
    (
        "date-time",
        "2020-02-29T00:00:00Z 1999-12-31T23:59:59.25+01:00",
        "2019-02-29T00:00:00Z 2020-01-01T00:00:60Z 2020-01-01_00:00:00Z 2020-01-01T00:00:00 "
        "0000-01-01T00:00:00Z 2020-01-01",
        datetime.datetime.fromisoformat,
    ),
    (
        "hostname",
        f"a a-b.c {'x' * 63} {'.'.join(['x' * 63] * 3 + ['x' * 61])}",
        f"-a a- a..b a_b {'x' * 64} {'.'.join(['x' * 63] * 3 + ['x' * 62])}",
        None,
    ),
]


@pytest.mark.parametrize(
    ("form", "valid", "invalid", "parse"), FORMATS, ids=[each[0] for each in FORMATS]
)
def test_formats(
    form: str, valid: str, invalid: str, parse: Callable[[str], object] | None
) -> None:
    """The standard library reads whatever is of the format; with a pattern beside it, both hold."""
    first, *others = valid.split()
    right = [json.dumps(text) for text in (first, *others)]
    wrong = [json.dumps(each) for each in ("", " ", f" {first}", f"{first} ", *invalid.split())]
    for schema in ({"format": form}, {"type": "string", "format": form, "maxLength": 300}):
        assert taken(schema, *right, *wrong) == right
    if parse is not None:
        for text in (first, *others):
            parse(text)
    with_pattern = {
        "format": form,
        "pattern": "^" + "".join(f"\\x{ord(sign):02x}" for sign in first) + "$",
    }
    assert taken(with_pattern, *right, *wrong) == right[:1]


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"const": 0.1 + 0.2},  # llguidance's reader of floats may miss the 17th digit
        {"enum": [1, [{"a": -(2**53) - 1}]]},
        {"type": "integer", "minimum": 2**63},
        {"type": "array", "items": {"exclusiveMaximum": 10**400}},
        {"$defs": {"a": {"maximum": 2**53 + 1}}, "anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]},
    ],
)
def test_integers_that_would_be_rounded_are_refused(schema: Schema) -> None:
    with pytest.raises(InvalidConstraint, match="would be rounded"):
        json_schema(schema, LM)


@pytest.mark.parametrize("number", [0, -7, 2**53, 10**17, 0.1, -2.5, 1e-7, 123456.789])
def test_numbers_are_taken_as_they_are(number: float) -> None:
    written = f"{Decimal(repr(number)):f}"
    for schema in ({"const": number}, {"type": "number", "minimum": number, "maximum": number}):
        assert taken(schema, written, written + "1") == [written]
    assert taken({"const": float(number)}, written) == [written]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"multipleOf": 999_983}, "needs 999,983 remainders to be told apart, and 100,000 is the most"),
        ({"type": "number", "multipleOf": 0.999983}, "needs 999,983 remainders"),
        (
            {"type": "integer", "multipleOf": 997, "allOf": [{"multipleOf": 991}]},
            "needs 988,027 remainders",
        ),
        ({"anyOf": [{"multipleOf": 0.00001}, {"multipleOf": 70000}]}, "several multipleOf of many"),
        ({"minimum": 1e18}, "too far from 0"),
        ({"multipleOf": 0}, "multipleOf of 0"),
        ({"type": "array", "maxItems": 10_001}, "maxItems of 10,001, and 10,000 is the most"),
        ({"type": "array", "minItems": 10**9}, "minItems of 1,000,000,000, and 10,000 is the most"),
        ({"properties": {f"p{i}": True for i in range(2001)}}, "of 2,001, and 2,000 is the most"),
        ({"patternProperties": {f"^p{i}_": True for i in range(101)}}, "patternProperties of 101"),
        ({"pattern": "a?" * 10_001}, "pattern has 10,001 repetitions"),
        ({"patternProperties": {"a?" * 10_001: True}}, "pattern has 10,001 repetitions"),
        ({"minProperties": 2}, "minProperties 2 and 0 required by name"),
        (
            {
                "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1100)}
                | {"d1100": {}},
                "$ref": "#/$defs/d0",
            },
            "nested too deeply",
        ),
        (json.loads("[" * 400 + "]" * 400), "give a dict"),
        ('{"items":' * 100_000 + "true" + "}" * 100_000, "recursion"),
    ],
)  # fmt: skip
def test_a_schema_beyond_the_limits_is_refused_at_the_call(schema: Any, message: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        json_schema(schema, LM)
    assert message in str(caught.value)


LARGE: list[tuple[Schema, str]] = [
    ({"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}, '{"p1999": 1, "q": 2}'),
    (
        {"anyOf": [{"properties": {"kind": {"const": f"k{i}"}, f"p{i}": {"const": i}},
                    "required": ["kind", f"p{i}"]} for i in range(100)]},
        '{"kind": "k99", "p99": 99}',
    ),
    ({"type": "array", "maxItems": 10_000}, "[" + ", ".join(["1"] * 200) + "]"),
    ({"enum": [f"value {i}" for i in range(2_000)]}, '"value 1999"'),
    ({"type": "string", "pattern": "^([a-z]{2}[0-9]){0,1000}$"}, '"ab1cd2"'),
    (json.loads('{"items":' * 100 + "true" + "}" * 100), "[" * 100 + "]" * 100),
    ({"type": "number", "multipleOf": 0.0001}, "12345.0678"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text"), LARGE)
def test_what_is_taken_is_never_too_complex_in_the_midst_of_a_text(schema: Any, text: str) -> None:
    """Objects of a thousand properties ran into llguidance's limits with their first brace."""
    state = json_schema(schema, BYTES).start()
    for place, byte in enumerate(text.encode()):
        if place % 100 in (0, 1, 2, 20):
            assert 1 + byte in allowed(state)
        state = state.advance(1 + byte)
    assert state.accepting


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.1}, "0.1 0.05 0.0001", "0 0.0 0.11 -0.05"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.01", "0 0.1 -0.6"),
        ({"exclusiveMinimum": 7, "maximum": 7.99}, "7.90 7.99 7.001", "7 7.0 8"),
        ({"minimum": -7.25, "exclusiveMaximum": -7}, "-7.20 -7.25 -7.1", "-7 -7.0 -7.3"),
        ({"exclusiveMinimum": 7, "minimum": 7.5, "maximum": 7.9}, "7.5 7.9", "7 7.4"),
        ({"maximum": 9.25}, "9.20 9.25 9 -3.5", "9.26 9.3 10"),
        (
            {"minimum": 0, "maximum": 0.125},
            "0 0.10 0.12 0.125".replace("0.12 ", "0.120 "),
            "0.13 0.2 1",
        ),
        ({"minimum": 9.22, "maximum": 9.25}, "9.22 9.25 9.23", "9.2 9.3"),
        ({"minimum": 1, "maximum": 3, "multipleOf": 0.5}, "1 1.5 3", "0 0.5 1.2 3.5"),
        ({"multipleOf": 0.01}, "12 0.35 3.1", "0.125 -1"),
    ],
)
def test_bounds_of_numbers_are_where_they_are(
    bounds: dict[str, float], inside: str, outside: str
) -> None:
    """With the digits of a bound: 7.90 under 7.99."""
    schema: dict[str, Any] = {"type": "number", **bounds}
    assert taken(schema, *inside.split(), *outside.split()) == inside.split()
