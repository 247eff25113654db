"""Texts are strings that know their tokens and bytes."""

from __future__ import annotations

import copy
import re

from hypothesis import given
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import NGram
from genrt.inference import SMC, Execution, Program, TextModel
from genrt.testing import exact_posterior
from genrt.tokens.texts import Text, batched, decoded

MODEL = NGram.random([b"a", b"b", b"ab", b"\xc3", b"\xa9", b""], seed=3, eos_token_id=5)


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


BROKEN = NGram.random([b"\xff", b"\xfe", b"\xc3", b"\xa9", b""], seed=4, eos_token_id=4)


async def by_hand(p: Execution) -> None:
    tokens = [0]
    while tokens[-1] != 4 and len(tokens) < 3:
        tokens.append(await p.sample(tokens))


def test_texts_of_different_bytes_stay_apart() -> None:
    exact = exact_posterior(BROKEN, [0], max_tokens=2).texts
    with genrt.load(BROKEN, engine="exact") as lm:
        model = TextModel(lm, [0], max_tokens=2)
        programs = SMC(Program(lm, by_hand), num_particles=2000).run_sync(0)
        result = SMC(model, num_particles=2000).run_sync(0)
        vocabulary = lm.byte_vocab
    for each in (result, programs):
        for text, token_ids in zip(each.texts, each.token_ids, strict=True):
            spelled = b"".join(vocabulary[token] for token in token_ids if token != 4)
            assert encoded(text) == spelled
    common = {data for data, probability in exact.items() if probability > 0.02}
    assert len(common) > max(7, len({data.decode(errors="replace") for data in common}))
    posterior = {encoded(text): weight for text, weight in result.posterior()}
    for data, probability in exact.items():
        assert abs(posterior.get(data, 0.0) - probability) < 0.06


async def test_a_batched_potential_judges_one_text() -> None:
    async def later(texts: list[Text]) -> list[float]:
        return [float(len(each)) for each in texts]

    judged = batched(later)(Text((1,), b"ab"))
    assert not isinstance(judged, float)
    assert await judged == 2.0
    assert batched(lambda texts: [1.5])(Text()) == 1.5
