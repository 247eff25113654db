"""Products are intersections, potentials are indicators, masks are those of brute force."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.constraints import (
    CheckedState,
    Constraint,
    ConstraintState,
    abitmasks,
    all_of,
    amasks,
    bitmasks,
    grammar,
    json_schema,
    masks,
    potential,
    predicate,
    regex,
    strings,
)
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.lm import AsyncLM
from genrt.tokens.texts import Text
from tests.vocabularies import (
    EOS,
    accepted,
    led_to,
    lm_over,
    marked,
    sequences,
    spelt,
    vocabularies,
    weighed,
)


@dataclass(frozen=True)
class Case:
    """A constraint, and what is in it."""

    name: str
    make: Callable[[AsyncLM], Constraint]
    wanted: Callable[[bytes], bool]

    def __repr__(self) -> str:
        return self.name


def is_text(data: bytes, pattern: str) -> bool:
    try:
        return bool(re.fullmatch(pattern, data.decode()))
    except UnicodeDecodeError:
        return False


def short(text: Text) -> bool:
    return len(text.bytes) < 5


def odd(text: Text) -> bool:
    return not text.finished or len(text.bytes) % 2 == 1


async def later(text: Text) -> bool:
    return short(text) and odd(text)


FINITE = ["", "ab", "aé", "éa", "ba", "b", "abab"]
MIDDLE = "(aa(é?)bb|a(é?)b|é?)"
CASES = [
    Case("regex", lambda lm: regex("(ab|é|b)*", lm), lambda data: is_text(data, "(ab|é|b)*")),
    Case(
        "strings",
        lambda lm: strings(FINITE, lm),
        lambda data: data in {text.encode() for text in FINITE},
    ),
    Case(
        "lark",
        lambda lm: grammar('start: "a" start "b" | "é" | ""', lm),
        lambda data: is_text(data, MIDDLE),
    ),
    Case(
        "ebnf",
        lambda lm: grammar('root ::= [^b] root | "b"', lm, syntax="ebnf"),
        lambda data: is_text(data, "[^b]*b"),
    ),
    Case(
        "json",
        lambda lm: json_schema({"type": "string", "pattern": "^[abé]?$"}, lm),
        lambda data: is_text(data, '"[abé]?"'),
    ),
    Case("plain", lambda lm: predicate(odd, lm), lambda data: len(data) % 2 == 1),
    Case("async", lambda lm: predicate(later, lm), lambda data: len(data) in (1, 3)),
]

cases = st.sampled_from(CASES)


@settings(deadline=None, max_examples=25)
@given(st.lists(cases, min_size=1, max_size=3), vocabularies)
def test_a_product_is_the_intersection(factors: list[Case], lm: AsyncLM) -> None:
    async def check() -> None:
        constraints = [case.make(lm) for case in factors]
        prefixes, whole = await led_to(all_of(*constraints), 3)
        separate = [await led_to(constraint, 3) for constraint in constraints]
        assert prefixes == set.intersection(*[led for led, _ in separate])
        assert whole == set.intersection(*[ended for _, ended in separate])
        nested = all_of(all_of(*constraints[:1]), all_of(*constraints))
        assert await led_to(nested, 3) == (prefixes, whole)

    asyncio.run(check())


@pytest.mark.parametrize("size", [1, 1000])
@settings(deadline=None, max_examples=25)
@given(st.lists(cases, min_size=1, max_size=2), vocabularies, st.randoms(use_true_random=False))
def test_a_potential_is_the_indicator_in_any_order(
    size: int, factors: list[Case], lm: AsyncLM, rng: Any
) -> None:
    async def check() -> None:
        constraint = all_of(*[case.make(lm) for case in factors])
        prefixes, whole = await led_to(constraint, 3)
        weigh = potential(constraint, cache_size=size)
        texts = [(ids, finished) for ids in sequences(lm, 3) for finished in (False, True)]
        rng.shuffle(texts)
        for ids, finished in texts[:60]:
            inside = ids in (whole if finished else prefixes)
            assert await weighed(weigh, Text(ids, spelt(lm, ids), finished)) == (
                0 if inside else -math.inf
            )

    asyncio.run(check())


@settings(deadline=None, max_examples=40)
@given(st.lists(cases, min_size=1, max_size=2), vocabularies)
def test_the_kinds_of_states(factors: list[Case], lm: AsyncLM) -> None:
    constraint = all_of(*[case.make(lm) for case in factors])
    state = constraint.start()
    asked = any(case.name in ("plain", "async") for case in factors)
    assert isinstance(state, CheckedState) == asked
    assert isinstance(state, ConstraintState) != asked
    assert isinstance(constraint, Constraint)
    assert constraint.start() is state
    upper = state.mask()
    (mask,), (packed,) = asyncio.run(amasks([state])), asyncio.run(abitmasks([state]))
    assert not (mask & ~upper).any()
    assert packed.dtype == torch.int32
    bits = [bool(int(word) >> bit & 1) for word in packed for bit in range(32)]
    assert bits == mask.tolist() + [False] * (len(bits) - len(mask))
    if isinstance(state, CheckedState):
        every = list(range(lm.vocab_size))
        assert asyncio.run(state.check(every)) == mask.tolist()
        assert asyncio.run(state.check(every[::-1])) == mask.tolist()[::-1]
        for sync in (masks, bitmasks):
            with pytest.raises(InvalidRequest, match="await amasks"):
                sync([state])  # type: ignore[list-item]
    else:
        assert torch.equal(mask, upper)
        assert torch.equal(masks([state])[0], mask)
        assert torch.equal(bitmasks([state])[0], packed)
        assert state.accepting == bool(mask[EOS])


async def test_the_dear_are_asked_only_about_what_the_cheap_let_pass() -> None:
    asked: list[tuple[str, bytes, bool]] = []

    def dear(name: str, refused: bytes) -> Callable[[Text], bool]:
        def ask(text: Text) -> bool:
            asked.append((name, text.bytes, text.finished))
            return refused not in text.bytes

        return ask

    lm = lm_over(b"a", b"b", b"c", b"d")
    first, second = predicate(dear("first", b"b"), lm), predicate(dear("second", b"c"), lm)
    product = all_of(first, regex("[abc]d?", lm), second)
    state: Any = product.start()
    assert marked(state.mask()) == [1, 2, 3]
    assert await state.check([1, 2, 3, 4, EOS, 1]) == [True, False, False, False, False, True]
    assert asked == [
        ("first", b"a", False),
        ("first", b"b", False),
        ("first", b"c", False),
        ("second", b"a", False),
        ("second", b"c", False),
    ]
    asked.clear()
    assert marked((await amasks([state.advance(1)]))[0]) == [EOS, 4]
    assert sorted(asked) == [
        ("first", b"a", True),
        ("first", b"ad", False),
        ("second", b"a", True),
        ("second", b"ad", False),
    ]


async def test_states_of_all_kinds_go_together_and_equal_ones_once() -> None:
    calls: list[Text] = []

    def ask(text: Text) -> bool:
        calls.append(text)
        return odd(text)

    class Own:
        accepting = True
        made = 0

        def start(self) -> Own:
            return self

        def mask(self) -> torch.Tensor:
            Own.made += 1
            return torch.tensor([True, False, True])

        def advance(self, token_id: int) -> Own:
            return self

    lm = lm_over(b"a", b"b")
    own, asked, known = Own(), predicate(ask, lm).start(), regex("a?", lm).start()
    both: Any = all_of(Own(), predicate(ask, lm))
    Own.made = 0
    states: Sequence[Any] = [own, asked, known, asked, own, both.start(), known]
    got = await amasks(states)
    assert got.int().tolist() == [
        [1, 0, 1],
        [0, 1, 1],
        [1, 1, 0],
        [0, 1, 1],
        [1, 0, 1],
        [0, 0, 1],
        [1, 1, 0],
    ]
    assert Own.made == 2
    assert len(calls) == 3 + 2
    assert torch.equal(
        await abitmasks(states), torch.stack([(await abitmasks([s]))[0] for s in states])
    )


class OwnChecked:
    """A checked constraint of one's own: tokens 1 and no end before one of them."""

    def __init__(self, length: int = 0) -> None:
        self.length = length

    def start(self) -> OwnChecked:
        return self

    def mask(self) -> torch.Tensor:
        return torch.tensor([True, True, False])

    async def check(self, token_ids: Sequence[int]) -> list[bool]:
        return [token_id == 1 or (token_id == EOS and self.length > 0) for token_id in token_ids]

    def advance(self, token_id: int) -> OwnChecked:
        if token_id != 1:
            raise InvalidRequest(f"{token_id} may not follow")
        return OwnChecked(self.length + 1)


def test_a_product_over_different_vocabularies_is_refused() -> None:
    small = lm_over(b"a", b"b")
    for other in (lm_over(b"a"), lm_over(b"b", b"a")):
        with pytest.raises(InvalidConstraint, match="one lm"):
            all_of(regex("a", small), predicate(odd, other))
    with pytest.raises(InvalidConstraint, match="one lm"):
        all_of(OwnChecked(), regex("a", lm_over(b"a")))
    again = lm_over(b"a", b"b")
    assert accepted(all_of(regex("a|b", small), strings(["b"], again)), 1) == {(2,)}
