"""Texts are strings that know their tokens and bytes."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import SMC, BestOfN, TextModel
from genrt.texts import Text

MODEL = NGram.random([b"a", b"b", b"ab", b"\xc3", b"\xa9", b""], seed=3, eos_token_id=5)

USES: dict[str, Callable[[Any], float]] = {
    "in": lambda text: -float("b" in text),
    "count": lambda text: -float(text.count("a")),
    "regex": lambda text: -float(re.search(r"a+b$", text) is None),
    "slice": lambda text: -float(text[:2] == "ab"),
    "methods": lambda text: -float(text.lower().startswith("a") or text.strip().endswith("é")),
    "split": lambda text: -float(len(text.split("b"))),
    "json": lambda text: -float(len(json.dumps(text))),
    "length": lambda text: -float(len(text)),
    "addition": lambda text: -float(("<" + text + ">").find("b")),
    "comparison": lambda text: -float(text == "ab") - float(text != "a") - float(text < "b"),
    "dictionary": lambda text: {"ab": -1.0, "a": -2.0}.get(text, -3.0),
    "format": lambda text: -float(len(f"{text:>5}")),
}


@pytest.mark.parametrize("name", USES)
async def test_a_potential_uses_a_text_as_it_would_a_string(name: str) -> None:
    use = USES[name]
    with genrt.load(MODEL, engine="exact") as lm:
        direct = TextModel(lm, [0], max_tokens=4, potential=use, twist=use)
        through = TextModel(
            lm,
            [0],
            max_tokens=4,
            potential=lambda text: use(str(text)),
            twist=lambda text: use(str(text)),
        )
        for seed in range(2):
            one = await SMC(direct, num_particles=20).run(seed)
            other = await SMC(through, num_particles=20).run(seed)
            assert one.texts == other.texts
            assert one.log_weights.tolist() == other.log_weights.tolist()
        best = await BestOfN(direct, n=10).run(0)
        assert best.texts == (await BestOfN(through, n=10).run(0)).texts


@given(st.binary(max_size=8), st.booleans())
def test_the_string_is_the_bytes_but_for_a_character_that_is_not_whole_yet(
    data: bytes, finished: bool
) -> None:
    text = Text((1, 2), data, finished)
    assert type(str(text)) is str
    assert text == str(text)
    whole = data.decode(errors="replace")
    assert whole.startswith(text)
    if finished:
        assert text == whole
    else:
        assert Text((), data + b"\x80", True)[: len(text)] == text  # nothing that comes changes it
        assert len(data) - len(text.encode()) <= 3 or "\N{REPLACEMENT CHARACTER}" in text
    assert (text.token_ids, text.bytes, text.finished) == ((1, 2), data, finished)


def test_texts_are_told_apart_by_what_they_are_made_of() -> None:
    """So that a cached potential says of each what it would say without its cache."""
    texts = [
        Text((1,), b"ab"),
        Text((1,), b"ab", True),
        Text((2, 3), b"ab"),
        Text((1,), b"ab\xc3"),
        Text((1,), b"\xff"),
        Text((1,), b"\xfe"),
    ]
    assert len(set(texts)) == len(texts)
    assert all(text == copy.deepcopy(text) and hash(text) == hash(str(text)) for text in texts)
    assert texts[0] == "ab" == texts[2]
    assert texts[0] != texts[2]
    assert texts[0] != "b"
    assert texts[0] != 3

    @functools.cache
    def judge(text: Text) -> tuple[Any, ...]:
        return text.token_ids, text.bytes, text.finished

    assert [judge(text) for text in texts] == [
        (text.token_ids, text.bytes, text.finished) for text in texts
    ]


def test_a_text_is_a_value_and_shows_what_it_is_made_of() -> None:
    text = Text([1, 2], b"ab")
    assert repr(text) == "Text((1, 2), b'ab', finished=False)"
    assert copy.copy(text) == text
    assert type(text[:]) is str
    for name in ("finished", "_bytes", "anything"):
        with pytest.raises(AttributeError):
            setattr(text, name, True)
        with pytest.raises(AttributeError):
            delattr(text, name)


@pytest.mark.parametrize("arguments", [("ab",), ((1,), "ab")])
def test_a_text_is_not_made_of_a_string(arguments: Any) -> None:
    with pytest.raises(InvalidRequest, match="token ids and bytes"):
        Text(*arguments)


def test_a_potential_may_be_tried_on_a_plain_string() -> None:
    def likes_short(text: Text) -> float:
        return 0.0 if len(text) < 3 else -math.inf

    assert likes_short("ab") == likes_short(Text((0, 1), b"ab")) == 0.0  # type: ignore[arg-type]
