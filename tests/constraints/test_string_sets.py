"""A finite set of texts: membership, nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.constraints import bitmasks, masks, regex, strings
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.lm import AsyncLM
from tests.vocabularies import EOS, accepted, allowed, lm_over, matching, vocabularies

texts = st.lists(st.text("abé", max_size=4), min_size=1, max_size=8)


@settings(deadline=None, max_examples=150)
@given(texts, vocabularies)
def test_accepts_the_texts_and_no_other(wanted: list[str], lm: AsyncLM) -> None:
    encoded = {text.encode() for text in wanted}
    assert accepted(strings(wanted, lm), 3) == matching(lambda data: data in encoded, lm, 3)


@settings(deadline=None, max_examples=50)
@given(texts, vocabularies)
def test_states_agree_with_those_of_the_alternation(wanted: list[str], lm: AsyncLM) -> None:
    pairs = [(strings(wanted, lm).start(), regex("|".join(wanted), lm).start())]
    for _ in range(3):
        ours, theirs = zip(*pairs, strict=True)
        assert masks(ours).equal(masks(theirs))
        assert bitmasks(ours).equal(bitmasks(theirs))
        following = []
        for own, other in pairs:
            assert own.accepting == other.accepting == own.mask()[EOS]
            for token_id in range(1, lm.vocab_size):
                if own.mask()[token_id]:
                    following.append((own.advance(token_id), other.advance(token_id)))
                else:
                    with pytest.raises(InvalidRequest, match="may not follow"):
                        own.advance(token_id)
        if not following:
            break
        pairs = following[:20]


def test_many_texts_over_many_tokens() -> None:
    rng = random.Random(0)
    words = {"".join(rng.choices("abcd", k=rng.randint(0, 12))) for _ in range(5000)}
    pieces = sorted({"".join(rng.choices("abcd", k=rng.randint(1, 4))) for _ in range(400)})
    lm = lm_over(*[piece.encode() for piece in pieces])
    state, text = strings(words, lm).start(), ""
    while True:
        following = [piece for piece in pieces if any(w.startswith(text + piece) for w in words)]
        expected = [1 + pieces.index(piece) for piece in following]
        assert allowed(state) == [EOS] * (text in words) + expected
        if not following:
            break
        piece = rng.choice(following)
        state, text = state.advance(1 + pieces.index(piece)), text + piece
    assert len(text) > 4


def test_ways_to_spell_a_text_meet_in_one_state() -> None:
    lm = lm_over(b"a", b"b", b"ab", b"c")
    start = strings(["abc", "abca"], lm).start()
    assert start.advance(1).advance(2) is start.advance(3)


def test_a_text_that_no_tokens_spell_is_a_dead_end() -> None:
    start = strings(["ab"], lm_over(b"a", b"c")).start()
    assert allowed(start) == [1]
    assert allowed(start.advance(1)) == []


@pytest.mark.parametrize(
    ("given_texts", "message"),
    [
        ([], "no texts"),
        ("abc", "give a list of str"),
        (b"abc", "give a list of str"),
        (3, "give a list of str"),
        (["a", 3], "3: give each as str"),
        ([b"a"], "give each as str"),
        (["\ud800"], "lone surrogate"),
    ],
)
def test_wrong_texts_are_refused_at_the_call(given_texts: object, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message):
        strings(given_texts, lm_over(b"a"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("token_id", "message"), [(EOS, "ends the text"), (2, r"0 \.\. 1"), (1.5, "integer")]
)
def test_advancing_by_no_text_is_refused(token_id: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        strings(["", "a"], lm_over(b"a")).start().advance(token_id)


def test_says_what_it_is() -> None:
    lm = lm_over(b"a")
    assert repr(strings(["b", "a"], lm)) == "<constraint: strings 'a', 'b'>"
    assert repr(strings(set("abcde"), lm)) == "<constraint: strings 'a', 'b', 'c', … 5 in all>"
