"""Structures of texts on engines that draw from rows: beside each other, refused alone, cancelled, kept
compiled. tests/questions/test_completion_laws.py has their law."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion
from genrt.structures import guides
from genrt.structures.guides import Guides
from tests.inside import engine_of

BYTES = [bytes([byte]) for byte in range(1, 128)]
EOS = len(BYTES)
MODEL = NGram.random([*BYTES, b""], order=1, seed=3, eos_token_id=EOS)
MODEL_TOKENIZER = MODEL.tokenizer
RECORD = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["n"],
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 200}) as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine="transformers") as opened:
        yield opened


def holds(name: str, value: Any, text: str) -> bool:
    match name:
        case "regex":
            return re.fullmatch(value, text) is not None
        case "choice":
            return text in set(value)
        case "json_schema":
            return bool({"n"} <= json.loads(text).keys() <= {"n", "b"})
        case _:
            return re.fullmatch("x+", text) is not None


ASKED: list[dict[str, Any]] = [
    {"json_schema": RECORD},
    {"json_schema": json.dumps(RECORD)},
    {"regex": "[a-c]{3}"},
    {"regex": "[0-9]|z"},
    {"choice": ["yes", "no", "yesterday"]},
    {"choice": [".*", "a|b", '"', "\\"]},
    {"grammar": 'root ::= "x" root?'},
    {"grammar": "start: /x/+"},
]


@pytest.mark.parametrize("name", ["lm", "oracle"])
async def test_structures_differ_from_call_to_call_within_a_flush(
    name: str, request: pytest.FixtureRequest
) -> None:
    own: AsyncLM = request.getfixturevalue(name)
    before = own.statistics().engine
    asked = [each | {"max_tokens": 60, "seed": seed} for each in ASKED for seed in range(3)]
    texts = await asyncio.gather(
        *(own.generate([1, 2], **each) for each in asked),
        own.generate([1, 2], max_tokens=5, seed=1),
    )
    assert own.statistics().engine.steps - before.steps <= 60
    whole = [(each, text) for each, text in zip(asked, texts, strict=False) if not text.truncated]
    assert len(whole) > len(asked) / 2
    for each, text in whole:
        [structure] = each.keys() & {"json_schema", "regex", "choice", "grammar"}
        assert holds(structure, each[structure], text.text), (each, text.text)


@pytest.mark.parametrize("name", ["lm", "oracle"])
async def test_a_bad_structure_fails_alone(name: str, request: pytest.FixtureRequest) -> None:
    own: AsyncLM = request.getfixturevalue(name)
    before = own.statistics().engine
    answers = await asyncio.gather(
        own.generate([1, 2], regex="ab", max_tokens=5),
        own.generate([1, 2], regex="a(", max_tokens=5),
        own.generate([1, 2], json_schema={"type": "nothing"}, max_tokens=5),
        own.generate([1, 2], max_tokens=5),
        return_exceptions=True,
    )
    kinds = [type(each) for each in answers]
    assert kinds == [Completion, InvalidRequest, InvalidRequest, Completion]
    assert own.statistics().engine.failed == before.failed


async def test_a_text_that_the_vocabulary_cannot_go_on_with_fails_alone(lm: AsyncLM) -> None:
    dead, alive = await asyncio.gather(
        lm.generate([1], regex="aé", max_tokens=5, seed=1),
        lm.generate([1], regex="ab", max_tokens=5, seed=1),
        return_exceptions=True,
    )
    assert isinstance(dead, InvalidRequest)
    assert "leave no token to draw: structure" in str(dead)
    assert isinstance(alive, Completion)
    assert alive.text == "ab"


def test_without_a_tokenizer_or_an_end_token_structures_are_refused() -> None:
    endless = NGram.random(5, order=1)
    with (
        genrt.load(endless, engine="exact") as own,
        pytest.raises(InvalidRequest, match="ExactEngine cannot do this: regex needs an end token"),
    ):
        own.generate_sync([1], regex="a", max_tokens=2)

    def silent() -> ExactEngine:
        engine = ExactEngine(MODEL)
        engine.tokenizer = None
        return engine

    with genrt.load(engine=silent) as own:
        option: dict[str, Any]
        for option in ({"regex": "a"}, {"choice": ["a"]}, {"json_schema": {}}, {"stop": "a"}):
            [name] = option
            with pytest.raises(InvalidRequest, match=f"{name} needs a tokenizer, which this model"):
                own.generate_sync([1], max_tokens=2, **option)


def test_what_is_kept_compiled_is_bounded(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(lm)
    for number in range(guides.MOST_KEPT + 20):
        text = lm.generate_sync([1], choice=[f"a{number}"], max_tokens=9).text
        assert text == f"a{number}"
    assert len(engine._guides._larks) == len(engine._guides._starts) == guides.MOST_KEPT
    compiled: list[str] = []
    monkeypatch.setattr(guides, "check_begins", compiled.append)
    lm.batch_generate_sync([[1]] * 5, choice=["new"], max_tokens=5)
    lm.batch_generate_sync([[1]] * 5, choice=["new"], max_tokens=5)
    assert len(compiled) == 1


BASE = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "has", "has_not"),
    [
        ({"properties": {"a": {}}}, '{"a":1}', '{"a":1,"b":1}'),
        ({"properties": {"a": {}}, "required": ["a"]}, '{"a":1}', '{"a":1,"b":1}'),
        ({"properties": {"a": {}}, "required": ["b"]}, '{"b":1,"c":1}', '{"a":1}'),
        (
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            '{"a":1,"b":null}',
            '{"a":1,"b":1}',
        ),
        # Schemas that hold together stay open.
        ({"allOf": [BASE], "properties": {"b": {}}}, '{"a":1,"b":1,"c":1}', '{"a":"x"}'),
        (
            {"$defs": {"A": BASE}, "$ref": "#/$defs/A", "properties": {"b": {}}},
            '{"a":1,"b":1}',
            '{"b":1}',
        ),
        ({"anyOf": [BASE, {"properties": {"b": {}}}]}, '{"b":1}', '{"a":"x","b":1}'),
        ({"type": "object"}, '{"a":1}', "[]"),
        ({"items": {"properties": {"a": {}}}}, '[{"a":1}]', '[{"b":1}]'),
        ({"$defs": {"x": {"properties": {"a": {}}}}, "$ref": "#/$defs/x"}, '{"a":1}', '{"b":1}'),
    ],
    ids=str,
)
def test_objects_have_no_other_properties_unless_the_schema_speaks_of_them(
    schema: dict[str, Any], has: str, has_not: str
) -> None:
    guided = Guides(MODEL_TOKENIZER, len(BYTES) + 1)
    for text, is_of_it in ((has, True), (has_not, False)):
        guide = guided.begin(("json_schema", json.dumps(schema)), ())
        tokens = [BYTES.index(letter.encode()) for letter in text]
        assert (all(map(guide.took, tokens)) and guide.took(EOS)) == is_of_it


def test_a_guide_goes_back_over_its_end() -> None:
    """vLLM takes drafts of tokens back."""
    guide = Guides(MODEL_TOKENIZER, len(BYTES) + 1).begin(("regex", "ab*"), [BYTES.index(b"c")])
    first, more, end = (BYTES.index(each) for each in (b"a", b"b", b"c"))
    assert not guide.took(end)
    assert all(map(guide.took, (first, more, end, more, EOS)))
    ended = [guide.is_over]
    for _ in range(2):
        guide.take_back(2)
        ended.append(guide.is_over)
    assert ended == [True, True, False]
    assert [guide.mask()[each].item() for each in (first, more, end, EOS)] == [0, 1, 1, 1]
    guide.begin_again()
    assert guide.mask().nonzero().flatten().tolist() == [first]
