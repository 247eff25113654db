"""Models over bytes, against sums over all token sequences that cover a text."""

from __future__ import annotations

import functools
import math
import random
from typing import Any, cast

import numpy as np
import pytest

import genrt
from genrt.byte_lm import END, ByteLM, ByteProduct
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest

PIECES = [b"a", b"b", b"c", b"ab", b"ba", b"aa", b"abc", b"bab", b"a", b"cab"]


def drawn(seed: int) -> NGram:
    """A model whose token 0 is the end token and whose last token has no bytes."""
    rng = random.Random(seed)
    pieces = [b"<e>", b"a", b"b", b"c", *rng.sample(PIECES, 4), b""]
    return NGram.random(pieces, order=2, seed=seed, eos_token_id=0)


@functools.cache
def row(model: NGram, context: tuple[int, ...]) -> list[float]:
    """Probabilities of the next tokens after the last two without those that have no bytes."""
    kept = model.row(context).double().exp()
    kept[-1] = 0
    return cast("list[float]", (kept / kept.sum()).tolist())


def begins(model: NGram, context: tuple[int, ...], data: bytes) -> float:
    """The probability that a text begins with some bytes, by the tokens that cover them."""
    if not data:
        return 1.0
    total = 0.0
    for token, probability in enumerate(row(model, context[-2:])):
        piece = model.vocabulary[token] if token else b""
        if piece and piece.startswith(data):
            total += probability
        elif piece and data.startswith(piece):
            total += probability * begins(model, (*context, token), data[len(piece) :])
    return total


def is_text(model: NGram, context: tuple[int, ...], data: bytes) -> float:
    """The probability that some bytes are the whole text."""
    rows = row(model, context[-2:])
    total = rows[0] if not data else 0.0
    for token, probability in enumerate(rows):
        piece = model.vocabulary[token] if token else b""
        if piece and data.startswith(piece):
            total += probability * is_text(model, (*context, token), data[len(piece) :])
    return total


def law(model: NGram, context: tuple[int, ...], data: bytes) -> np.ndarray:
    whole = begins(model, context, data)
    found = [begins(model, context, data + bytes([byte])) / whole for byte in range(256)]
    return np.array([*found, is_text(model, context, data) / whole])


TEXTS = [b"", b"a", b"ab", b"abab", b"cabba", b"aaaabc"]


@pytest.mark.parametrize("seed", range(5))
async def test_without_a_limit_the_law_is_that_of_all_covers(seed: int) -> None:
    model = drawn(seed)
    async with genrt.load(model, engine="exact") as lm:
        start = await ByteLM(lm, [1, 2], beam=None).start()
        for text in TEXTS:
            state = await start.extend(text)
            assert state.text == text
            assert state.log_lost == -math.inf
            assert math.exp(state.log_mass) == pytest.approx(begins(model, (1, 2), text), rel=1e-5)
            assert np.exp(state.logprobs) == pytest.approx(law(model, (1, 2), text), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("beam", [1, 2, 3])
async def test_the_probability_is_between_what_a_beam_keeps_and_that_with_what_it_lost(
    seed: int, beam: int
) -> None:
    model, lost = drawn(seed), 0
    async with genrt.load(model, engine="exact") as lm:
        start = await ByteLM(lm, [1], beam=beam).start()
        for text in TEXTS:
            state = await start.extend(text)
            exact = begins(model, (1,), text)
            kept, dropped = math.exp(state.log_mass), math.exp(state.log_lost)
            assert kept * (1 - 1e-5) <= exact <= (kept + dropped) * (1 + 1e-5)
            lost += kept < exact * (1 - 1e-3)
    assert lost


async def test_new_candidates_are_asked_about_in_one_question_a_byte() -> None:
    async with genrt.load(drawn(1), engine="exact") as lm:
        state = await ByteLM(lm, [1], beam=None).start()
        before = lm.statistics()
        await state.extend(b"aba")
        assert lm.statistics().since(before).batcher.flushes <= 3


async def test_a_product_of_models_over_other_tokens_has_the_normalized_product_of_laws() -> None:
    one, other = drawn(0), drawn(3)
    assert one.vocabulary != other.vocabulary
    async with genrt.load(one, engine="exact") as lm, genrt.load(other, engine="exact") as lm2:
        starts = [await ByteLM(each, [1], beam=None).start() for each in (lm, lm2)]
        product = await ByteProduct(starts, powers=[1.0, 0.5]).extend(b"ab")
        assert product.text == b"ab"
        wanted = law(one, (1,), b"ab") * law(other, (1,), b"ab") ** 0.5
        assert np.exp(product.logprobs) == pytest.approx(wanted / wanted.sum(), rel=1e-5)
        assert wanted[END] > 0


async def test_bytes_that_no_tokens_spell_have_no_probability() -> None:
    async with genrt.load(drawn(0), engine="exact") as lm:
        state = await (await ByteLM(lm, [1]).start()).extend(b"xa")
        assert state.log_mass == -math.inf
        assert (state.logprobs == -math.inf).all()


@pytest.mark.parametrize(
    ("arguments", "message"), [({"beam": 0}, "beam"), ({"prompt": None}, "the prompt is None")]
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with genrt.load(drawn(0), engine="exact") as lm, pytest.raises(InvalidRequest, match=message):
        ByteLM(lm, **{"prompt": [1]} | arguments)


async def test_wrong_products_and_bytes_are_refused() -> None:
    async with genrt.load(drawn(0), engine="exact") as lm:
        start = await ByteLM(lm, [1]).start()
        for states, powers in (
            ([], None),
            ([start, await start.extend(b"a")], None),
            ([start], [1, 1]),
        ):
            with pytest.raises(InvalidRequest, match="states of one text"):
                ByteProduct(states, powers)
        with pytest.raises(InvalidRequest, match="above 0"):
            ByteProduct([start], [0.0])
        with pytest.raises(InvalidRequest, match="give bytes"):
            await start.extend(cast(Any, "a"))
