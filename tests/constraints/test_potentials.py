"""What a constraint costs as a potential; that it is the indicator is shown in ``test_products.py``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from genrt.constraints import all_of, potential, predicate, regex
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.tokens.texts import Text
from tests.vocabularies import EOS, lm_over, weighed


async def test_a_potential_asks_a_predicate_once_about_a_text() -> None:
    calls: list[bytes] = []

    def ask(text: Text) -> bool:
        calls.append(text.bytes)
        return b"b" not in text.bytes

    lm = lm_over(b"a", b"b")
    weigh = potential(all_of(regex("[ab]*", lm), predicate(ask, lm)))
    assert await weighed(weigh, Text((1,) * 20, b"a" * 20)) == 0
    assert await weighed(weigh, Text((1,) * 21, b"a" * 21)) == 0
    assert await weighed(weigh, Text((1,) * 21, b"a" * 21, finished=True)) == 0
    assert await weighed(weigh, Text((1, 2), b"ab")) == -math.inf
    assert calls == [b"a" * 20, b"a" * 21, b"a" * 21, b"ab"]


def test_a_growing_text_costs_a_potential_one_step_a_token() -> None:
    steps = 0

    class Counting:
        accepting = False

        def start(self) -> Counting:
            return self

        def mask(self) -> torch.Tensor:
            return torch.tensor([False, True])

        def advance(self, token_id: int) -> Counting:
            nonlocal steps
            steps += 1
            return Counting()

    weigh = potential(Counting())
    for length in range(50):
        assert weigh(Text((1,) * length, b"a" * length)) == 0
        assert weigh(Text((1,) * length, b"a" * length, finished=True)) == -math.inf
    assert steps == 49


def test_a_potential_refuses_what_is_no_text() -> None:
    lm = lm_over(b"a")
    weigh = potential(regex("a*", lm))
    with pytest.raises(InvalidRequest, match="call it with a Text"):
        weigh("a")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"not in 0 \.\. 1"):
        weigh(Text((2,), b"b"))
    assert weigh(Text((EOS,), b"")) == -math.inf


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_cache_size_is_a_positive_integer(size: Any) -> None:
    with pytest.raises(InvalidConstraint, match="integer of at least 1"):
        potential(regex("a", lm_over(b"a")), cache_size=size)
