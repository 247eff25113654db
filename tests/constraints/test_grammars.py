"""JSON schemas against jsonschema, grammars against derivations, lists of texts against membership."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.constraints import bitmasks, grammar, grammars, json_schema, regex, strings
from genrt.errors import InvalidConstraint
from genrt.lm import AsyncLM
from tests.vocabularies import (
    accepted,
    lm_over,
    matching,
    of_texts,
    spelt,
    vocabularies,
)

Schema = dict[str, Any] | bool

SEPARATORS = {"compact": (",", ":"), "spaced": (", ", ": ")}


def validates(schema: Schema, data: bytes, *, whitespace: str = "compact") -> bool:
    """Whether the bytes are what ``json.dumps`` writes for a valid value."""
    try:
        value = json.loads(data)
    except ValueError:
        return False
    separators = SEPARATORS[whitespace]
    canonical = json.dumps(value, ensure_ascii=False, separators=separators).encode() == data
    validator = jsonschema.Draft202012Validator(schema)
    return canonical and validator.is_valid(value)


OBJECT: Schema = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"const": 1}}},
    "required": ["a"],
    "additionalProperties": False,
}
PARTS = [b"{", b'"a"', b":", b" ", b"[1", b",", b"1", b"]", b"}", b": [1]", b'{"a"', b", 1"]


def test_texts_are_as_python_writes_them_by_default() -> None:
    lm = lm_over(*PARTS)
    for constraint in (json_schema(OBJECT, lm), json_schema(OBJECT, lm, whitespace="spaced")):
        got = accepted(constraint, 4)
        assert got == matching(lambda data: validates(OBJECT, data, whitespace="spaced"), lm, 4)
        assert b'{"a": [1, 1]}' in {spelt(lm, ids) for ids in accepted(constraint, 7)}
    inline = grammar(f"start: %json {json.dumps(OBJECT)}", lm)
    assert accepted(inline, 4) == got


def test_flexible_texts_have_space_between_the_parts() -> None:
    lm = lm_over(b"{", b'"a"', b":", b" ", b"[", b"]", b"}", b":[]", b'{"a"', b"\n")

    def wanted(text: str) -> bool:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return text == text.strip() and bool(
            jsonschema.Draft202012Validator(OBJECT).is_valid(value)
        )

    got = accepted(json_schema(OBJECT, lm, whitespace="flexible"), 4)
    assert got == matching(of_texts(wanted), lm, 4)
    assert b'{"a" :[]}' in {spelt(lm, ids) for ids in got}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.text('aé"\\\n\x01', max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(values, st.sampled_from(sorted(SEPARATORS)))
def test_any_value_is_accepted_as_python_writes_it(value: Any, whitespace: str) -> None:
    """By ``True``, and by the schema that says it is this value."""
    lm = lm_over(*[bytes([byte]) for byte in range(256)])
    data = json.dumps(value, ensure_ascii=False, separators=SEPARATORS[whitespace]).encode()
    for schema in (True, {"const": value}):
        state = json_schema(schema, lm, whitespace=whitespace).start()  # type: ignore[arg-type]
        for byte in data:
            assert not state.accepting or isinstance(value, int)
            state = state.advance(1 + byte)
        assert state.accepting


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "false, which no text satisfies"),
        ("false", "false, which no text satisfies"),
        ("{", "not a JSON text"),
        ("[1]", "give a dict"),
        (3, "give a dict"),
        (None, "give a dict"),
        ({"const": {1, 2}}, "no JSON form"),
        ({"const": float("nan")}, "no JSON form"),
        ({"type": "integr"}, "the type 'integr': give one of"),
        ({"$dynamicRef": "#a"}, "dynamicRef.*take it out, and check it by a predicate"),
        ({"propertys": {}}, "unknown keyword 'propertys': write 'properties'"),
        ({"items": {"maxLenght": 3}}, "unknown keyword 'maxLenght': write 'maxLength'"),
        ({"required": "a"}, "give a list"),
        ({"maxLength": "3"}, "give a number"),
        ({"minLength": -1}, "whole number from 0 on"),
        ({"items": 3}, "has 'items': 3; give"),
        ({"anyOf": [3]}, "has 3 where a schema belongs"),
        ({"type": "string", "format": "bar"}, "the format 'bar'"),
        ({"$ref": "#/$defs/gone"}, "gone"),
        ({"$ref": "http://localhost/schema"}, "is not a place in the schema"),
        ({"$defs": {"a": {"$anchor": "b"}}, "$ref": "#b"}, "is not a place in the schema"),
        ({"items": {"$id": "a"}}, r"the \$id 'a' of a part: take it out"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired.*check it by a predicate"),
        ({"items": {"dependencies": {"a": {}}}}, "dependencies.*check it by a predicate"),
        ({"x-guidance": 1}, "give an object"),
        ({"const": "\ud800"}, "JSON schema"),
    ],
)
def test_a_bad_schema_is_refused_at_the_call(schema: Any, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message):
        json_schema(schema, lm_over(b"a"))


def test_options_of_llguidance_go_first() -> None:
    schema: dict[str, Any] = {"x-guidance": {"item_separator": " ,"}, "type": "array"}
    lm = lm_over(b"[1", b" ,1]", b", 1]")
    assert accepted(json_schema(schema, lm), 2) == {(1, 2)}
    for wrong in ({"lenient": True}, {"item_separator": ";"}, {"key_separator": 3}):
        with pytest.raises(InvalidConstraint, match="give"):
            json_schema(schema | {"x-guidance": wrong}, lm)


def nested(text: str) -> bool:
    return text == "a" * (len(text) // 2) + "b" * (len(text) // 2)


def palindrome(text: str) -> bool:
    return letters(text) and text == text[::-1]


def letters(text: str) -> bool:
    return set(text) <= set("ab")


def pairs(text: str) -> bool:
    return not text.replace("ab", "").replace("é", "")


def a_and_perhaps_b(text: str) -> bool:
    return text.startswith("a") and not text.removesuffix("b").strip("a")


GRAMMARS = [
    ("lark", 'start: "a" start "b" | ""', nested),
    ("lark", 'start: pair*\npair: "a" "b" | "é"', pairs),
    ("lark", "start: WORD\nWORD: /[ab]/{2,3}", lambda text: letters(text) and len(text) in (2, 3)),
    ("lark", 'start: "a"i "b" // "c"\n%llguidance {"no_forcing": false}', "ab".__eq__),
    ("ebnf", 'root ::= "a" root "b" | ""', nested),
    ("ebnf", 'root ::= "a" root "a" | "b" root "b" | [ab]?', palindrome),
    ("ebnf", 'root ::= as "a"\nas ::= [a]+ # greedy?', lambda text: set(text) == {"a"} and len(text) > 1),
    ("ebnf", 'root ::= Some-Thing "b"\nSome-Thing ::=\n "a" |\n "ab"', ["ab", "abb"].__contains__),
    ("ebnf", 'root ::= root "a" | "b"', lambda text: text.startswith("b") and set(text[1:]) <= {"a"}),
    ("ebnf", r'root ::= [^\x62-z]{2} | "\u00e9" . | "" | ("a" "b"){2,}', lambda text: (
        (len(text) == 2 and (set(text) <= set('aé"') or text[0] == "é"))
        or text == "" or (len(text) > 2 and text == "ab" * (len(text) // 2))
    )),
    ("ebnf", 'root ::= [a-]{1,} ("b" | [ab]? | ())', a_and_perhaps_b),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "text", "wanted"), GRAMMARS)
@settings(deadline=None, max_examples=15)
@given(lm=vocabularies)
def test_accepts_what_derives(syntax: Any, text: str, wanted: Any, lm: AsyncLM) -> None:
    assert accepted(grammar(text, lm, syntax=syntax), 3) == matching(of_texts(wanted), lm, 3)


def test_terminals_of_lark_take_the_longest_match() -> None:
    """As the docstring says, which sends those to EBNF who want more."""
    lm = lm_over(b"a", b"b")
    dead = grammar('start: A "a"\nA: /a+/', lm)
    assert accepted(dead, 4) == set()
    assert accepted(grammar('start: ("a" | "ab") "b"', lm), 3) == {(1, 2, 2)}
    assert accepted(grammar('root ::= ("a" | "ab") "b"', lm, syntax="ebnf"), 3) == {
        (1, 2),
        (1, 2, 2),
    }
    assert not bitmasks([grammar('start: "c"', lm).start()]).any()


BAD: dict[str, list[tuple[Any, str]]] = {
    "lark": [
        (b"start:", "as str"),
        ("", "no start rule"),
        ('a: "b"', "no start rule"),
        ("start: x", r'1\(8\): unknown name: "x"'),
        ('start: "a\n', "compile"),
        ('start: "a" ~', "compile"),
        ('start: "a" <eos>', "special token <eos>"),
        ("start: <[3-5]>", "special token"),
        ('start: a\na[stop="x"]: /a*/', "option stop"),
        ("start: a\na[max_tokens = 3]: /a*/", "option max_tokens"),
        ("start: a\na[temperature=0.5]: /a*/", "option temperature"),
        ("start: /(?=a)/", "look-around"),
        ("start: 'a'", "single quote at line 1"),
        ("start: /a/m", "the flag m of"),
        ('start: %json {"not": {}}', "'not', which cannot be compiled"),
        ('start: "\ud800"', "lone surrogate"),
    ],
    "ebnf": [
        ("", "no rule 'root'"),
        ('x ::= "a"', "no rule 'root'"),
        ("root ::= foo", "line 1, column 10, there is no rule 'foo'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1, there is a second rule 'root'"),
        ('root ::= "a', "'\"' is not expected"),
        ('"a"', "is not expected"),
        ('root ::= ("a"', "a group is not closed"),
        ('root ::= ("a"\nx ::= "b"', "not closed before this rule"),
        ('root ::= "a")', "nothing is open"),
        ("root ::= *", r"nothing that '\*' could repeat"),
        ('root ::= "a" | +', "could repeat"),
        ('root ::= "a"**', "could repeat"),
        ("root ::= [b-a]", "the range b-a is empty"),
        ("root ::= []", "class is empty"),
        (r'root ::= "\q"', r"escape \\q is not known"),
        (r'root ::= "\ud800"', "no character"),
        (r'root ::= "\UFFFFFFFF"', "no character"),
        ('root ::= "\ud800"', "lone surrogate"),
        ('root ::= "a"{3,2}', "compile"),
    ],
}


@pytest.mark.parametrize("syntax", BAD)
def test_a_bad_grammar_is_refused_at_the_call(syntax: Any) -> None:
    for text, message in BAD[syntax]:
        with pytest.raises(InvalidConstraint, match=message):
            grammar(text, lm_over(b"a"), syntax=syntax)


@pytest.mark.parametrize(
    ("text", "syntax", "hint"),
    [
        ('root ::= "a"', "lark", 'It looks like EBNF: give syntax="ebnf"'),
        ('start: "a"', "ebnf", 'It looks like Lark: give syntax="lark"'),
        ("start: x", "lark", ""),
        ('start: "::=" x', "lark", ""),
    ],
)
def test_a_grammar_in_the_other_syntax_is_told_which(text: str, syntax: Any, hint: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        grammar(text, lm_over(b"a"), syntax=syntax)
    assert str(caught.value).endswith(hint)
    assert ("looks like" in str(caught.value)) == bool(hint)


def test_masks_are_the_same_one_after_the_other_and_in_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = [b"a", b"b", b"ab", b"x", b"y", b"z", b"1", b"12"]
    found = []
    for seconds in (60.0, -1.0):
        monkeypatch.setattr(grammars, "QUICK", seconds)
        start = regex(r"[ab]{1,9}(x|yz)[0-9]{2}", lm_over(*pieces)).start()
        states = [start]
        for _ in range(3):
            states = [state.advance(token) for state in states for token in (1, 2, 3)]
        found.append(bitmasks([start, *states]))
    assert len(found[0]) == 28
    assert torch.equal(*found)


texts = st.lists(st.text("abé", max_size=4), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(texts, vocabularies)
def test_accepts_the_texts_and_no_other(wanted: list[str], lm: AsyncLM) -> None:
    encoded = {text.encode() for text in wanted}
    assert accepted(strings(wanted, lm), 3) == matching(lambda data: data in encoded, lm, 3)
