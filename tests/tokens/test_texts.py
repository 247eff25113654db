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
from genrt.inference import (
    SMC,
    BestOfN,
    Execution,
    MetropolisHastings,
    Program,
    Rejection,
    TextModel,
)
from genrt.testing import exact_posterior
from genrt.tokens.texts import Text, decoded

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


# -- bytes that are no UTF-8 ------------------------------------------------------------------


def encoded(text: str) -> bytes:
    """The bytes that ``decoded`` made this text of."""
    parts = re.split(r"\ufffd\\x([0-9a-f]{2})", text)
    return b"".join(
        bytes([int(part, 16)]) if place % 2 else part.encode() for place, part in enumerate(parts)
    )


near_escapes = st.lists(
    st.sampled_from(
        [b"\xff", b"\xfe", b"\xf0\x9f", b"\\x", b"\\xff", b"ff", b"\\", b"\xef\xbf\xbd", b"a"]
    )
).map(b"".join)


@given(st.one_of(st.binary(), near_escapes))
def test_bytes_can_be_told_from_the_text_that_they_are_shown_as(data: bytes) -> None:
    text = decoded(data)
    assert encoded(text) == data
    text.encode()  # so that it can be printed anywhere
    try:
        plain = data.decode()
    except UnicodeDecodeError:
        assert "\ufffd\\x" in text
    else:
        assert text == plain or "\ufffd\\x" in plain


def test_bytes_that_are_no_utf8_are_shown_as_their_numbers() -> None:
    assert decoded(b"caf\xe9") == r"caf�\xe9"
    assert decoded("caf\N{REPLACEMENT CHARACTER}e".encode()) == "caf\N{REPLACEMENT CHARACTER}e"


BROKEN = NGram.random([b"\xff", b"\xfe", b"\xc3", b"\xa9", b""], seed=4, eos_token_id=4)


async def by_hand(p: Execution) -> None:
    tokens = [0]
    while tokens[-1] != 4 and len(tokens) < 3:
        tokens.append(await p.sample(tokens))


@pytest.mark.parametrize("name", ["SMC", "program", "Metropolis-Hastings", "rejection", "best"])
def test_texts_of_different_bytes_stay_apart(name: str) -> None:
    exact = exact_posterior(BROKEN, [0], max_tokens=2).texts
    with genrt.load(BROKEN, engine="exact") as lm:
        model = TextModel(lm, [0], max_tokens=2)
        algorithms: dict[str, Any] = {
            "SMC": SMC(model, num_particles=2000),
            "program": SMC(Program(lm, by_hand), num_particles=2000),
            "Metropolis-Hastings": MetropolisHastings(model, num_chains=50, num_steps=40),
            "rejection": Rejection(model, num_samples=2000, max_texts=2000, batch_size=2000),
            "best": BestOfN(model, n=2000),
        }
        result = algorithms[name].run_sync(0)
        vocabulary = lm.byte_vocab
    for text, token_ids in zip(result.texts, result.token_ids, strict=True):
        spelled = b"".join(vocabulary[token] for token in token_ids if token != 4)
        assert encoded(text) == spelled
    common = {data for data, probability in exact.items() if probability > 0.02}
    assert len(common) > 7
    assert common <= {encoded(text) for text in result.texts} <= set(exact)
    assert len(common) > len({data.decode(errors="replace") for data in common})
    if name in ("SMC", "rejection"):
        posterior = {encoded(text): weight for text, weight in result.posterior()}
        for data, probability in exact.items():
            assert abs(posterior.get(data, 0.0) - probability) < 0.06
