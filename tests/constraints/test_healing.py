"""Healed prompts: where they are cut, and the law of the text after them, by enumeration."""

from __future__ import annotations

import asyncio
import math
import random
import re
from typing import Any, cast

import pytest

import genrt
from genrt.constraints import heal
from genrt.engines.exact import NGram
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.inference import TextModel, importance_sampling
from genrt.lm import AsyncLM
from genrt.testing import exact_posterior
from tests.vocabularies import EOS, led_to, lm_over, spelt

PIECES = [b"a", b"b", b":", b":/", b"ab:", b"b:", b"ba", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b"]


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_before_the_first_token_from_which_on_one_token_spells_more(seed: int) -> None:
    rng = random.Random(seed)
    lm = lm_over(*rng.sample(PIECES, 5), b"a", b"b")
    whole = [token for token in range(1, lm.vocab_size) if not lm.byte_vocab[token].strip(b"ab:/")]
    prompt = [EOS, *rng.choices(whole, k=6)]
    healed = heal(lm, prompt)
    rests = {place: spelt(lm, prompt[place:]) for place in range(1, len(prompt))}
    longer = [
        place
        for place, rest in rests.items()
        if any(data.startswith(rest) and data != rest for data in lm.byte_vocab[1:])
    ]
    cut = min(longer, default=len(prompt))
    assert healed.token_ids == prompt[:cut]
    assert healed.text.encode() == spelt(lm, prompt[cut:])
    prefixes, whole_texts = asyncio.run(led_to(healed.constraint, 3))
    assert whole_texts == {
        ids
        for ids in prefixes
        if spelt(lm, ids).startswith(healed.text.encode()) and is_text(spelt(lm, ids))
    }


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("seed", range(6))
async def test_the_bytes_have_the_models_law_given_that_they_begin_so(seed: int) -> None:
    model = NGram.random([b"<e>", b"a", b"b", b"ab", b"ba", b"c"], seed=seed, eos_token_id=EOS)
    prompt = random.Random(seed).choices([1, 2, 4], k=3)
    async with genrt.load(model, engine="exact") as lm:
        healed = heal(lm, prompt)
        free = exact_posterior(model, healed.token_ids, max_tokens=5)
        # Texts of 5 tokens are cut, and are no texts of a constraint.
        wanted = {
            ids: p
            for ids, p in free.token_ids.items()
            if len(ids) < 5
            and is_text(spelt(lm, ids))
            and spelt(lm, ids).startswith(healed.text.encode())
        }
        found = exact_posterior(model, healed.token_ids, max_tokens=5, constraint=healed.constraint)
        assert len(wanted) > 1
        assert found.log_evidence == pytest.approx(math.log(math.fsum(wanted.values())))
        total = math.fsum(wanted.values())
        assert found.token_ids == pytest.approx({ids: p / total for ids, p in wanted.items()})
        texts = TextModel(lm, healed.token_ids, max_tokens=5, constraint=healed.constraint)
        result = await importance_sampling(texts, num_particles=50).run(seed=0)
        assert {text.encode() for text, _ in result.posterior()} <= found.texts.keys()
        done = await lm.generate(
            healed.token_ids, regex=re.escape(healed.text) + r"[\s\S]*", max_tokens=5, seed=0
        )
        assert done.text.startswith(healed.text)


def test_a_cut_inside_a_character_goes_back_to_its_start() -> None:
    lm = lm_over(b"a", b"\xc3", b"\xa9", b"\xa9b")
    healed = heal(lm, [1, 2, 3])
    assert (healed.token_ids, healed.text) == ([1], "é")


def test_special_tokens_stay() -> None:
    lm = cast(Any, lm_over(b"a", b"<eos>b"))
    assert heal(lm, [1, EOS]).token_ids == [1, EOS]


def test_wrong_prompts_are_refused() -> None:
    lm: AsyncLM = lm_over(b"a", b"\xc3", b"\xc3\xa9")
    with pytest.raises(InvalidConstraint, match="inside a character"):
        heal(lm, [1, 2])
    with pytest.raises(InvalidRequest, match="give a str, or token ids"):
        heal(lm, cast(Any, None))
