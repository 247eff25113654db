"""Constraints: masks are exactly the tokens that keep the text a prefix of the set, over bytes."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.constraints import (
    ConstraintState,
    MaskedConstraint,
    bitmasks,
    masks,
    regex,
)
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.lm import AsyncLM
from tests.vocabularies import (
    EOS,
    Tokens,
    accepted,
    allowed,
    lm_over,
    matching,
    of_texts,
    vocabularies,
)


def reach(constraint: MaskedConstraint, token_ids: Sequence[int]) -> ConstraintState:
    state = constraint.start()
    for token_id in token_ids:
        state = state.advance(token_id)
    return state


def matches(pattern: str) -> Callable[[bytes], bool]:
    return of_texts(lambda text: bool(re.fullmatch(pattern, text)))


patterns = st.recursive(
    st.sampled_from(["a", "b", "é", "[ab]", "[^a]", "."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(
            "(?:{0[0]}){0[1]}".format
        ),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=80)
@given(patterns, vocabularies)
def test_accepts_what_re_fullmatch_accepts_for_any_pattern(pattern: str, lm: AsyncLM) -> None:
    assert accepted(regex(pattern, lm), 3) == matching(matches(pattern), lm, 3)


@settings(deadline=None, max_examples=50)
@given(patterns, vocabularies)
def test_laws_of_states(pattern: str, lm: AsyncLM) -> None:
    states = [regex(pattern, lm).start()]
    for _ in range(3):
        together, packed = masks(states), bitmasks(states)
        assert together.shape == (len(states), lm.vocab_size)
        assert together.dtype == torch.bool
        assert packed.dtype == torch.int32
        following = []
        for state, mask, words in zip(states, together, packed, strict=True):
            assert torch.equal(state.mask(), mask)
            assert bool(mask[EOS]) == state.accepting
            bits = [bool(int(words[i // 32]) >> (i % 32) & 1) for i in range(32 * len(words))]
            assert bits == mask.tolist() + [False] * (len(bits) - lm.vocab_size)
            for token_id in range(1, lm.vocab_size):
                if mask[token_id]:
                    following.append(state.advance(token_id))
                else:
                    with pytest.raises(InvalidRequest, match="may not follow"):
                        state.advance(token_id)
        if not following:
            break
        states = following[:20]


def test_the_end_token_is_never_text() -> None:
    lm = lm_over(b"<", b"e", b"o", b"s", b">")
    constraint = regex("<eos>", lm)
    assert allowed(constraint.start()) == [1]
    assert allowed(reach(constraint, [1, 2, 3, 4, 5])) == [EOS]
    assert EOS not in allowed(regex("<.*>", lm).start())


def test_a_pattern_that_becomes_intractable_is_refused_where_it_does() -> None:
    start = regex("((a|b)*a(a|b){400}){400}", lm_over(b"a", b"b", b"ab" * 500)).start()
    after = start.advance(allowed(start)[-1])
    for _ in range(2):
        with pytest.raises(
            InvalidConstraint, match=r"expression '\(\(a.* is too complex.*: lexer error"
        ):
            masks([start, after])
    with pytest.raises(InvalidConstraint, match="too complex"):
        after.advance(3)
    assert allowed(start) == [1, 2, 3]


def test_a_vocabulary_without_an_end_token_is_refused() -> None:
    with pytest.raises(InvalidConstraint, match="eos_token_id"):
        regex("a", lm_over(b"a", eos_token_id=None))


def test_a_vocabulary_that_llguidance_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidConstraint, match="1025 bytes"):
        regex("a", lm_over(b"a" * 1025))


def test_states_of_vocabularies_of_different_sizes_are_refused() -> None:
    states = [regex("a", lm).start() for lm in (lm_over(b"a"), lm_over(b"a", b"b"))]
    with pytest.raises(InvalidRequest, match=r"\[2, 3\] tokens"):
        masks(states)


class Marked:
    """A tokenizer with special tokens, as transformers' tell them."""

    eos_token_id = 0
    all_special_ids = (0, 2)
    added_tokens_decoder: ClassVar[dict[int, Any]] = {3: SimpleNamespace(special=True)}


def test_special_tokens_other_than_the_end_are_never_allowed() -> None:
    lm = Tokens(b"a", b"a", b"a", b"a")
    lm.tokenizer = Marked()
    state = regex("[a<eos>]*", cast(AsyncLM, lm)).start()
    assert allowed(state) == [EOS, 1, 4]
    for token_id in (2, 3):
        with pytest.raises(InvalidRequest, match="may not follow"):
            state.advance(token_id)


def test_a_runtime_is_not_kept_alive_by_its_constraints() -> None:
    lm = lm_over(b"a")
    constraint = regex("a", lm)
    watched = weakref.ref(lm)
    del lm
    gc.collect()
    assert watched() is None
    assert allowed(constraint.start()) == [1]
