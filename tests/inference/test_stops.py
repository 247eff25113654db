"""What ends a text: tokens, strings, nothing; by every algorithm against enumeration, which is held
against sums by hand. Statistical tests have fixed seeds and a level of 1e-6."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from typing import Any

import pytest

import genrt
from genrt.constraints import regex, strings
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    END_TOKEN,
    SMC,
    Rejection,
    TextModel,
    importance_sampling,
)
from genrt.inference.texts import parse_stop
from genrt.lm import AsyncLM
from genrt.testing import assert_weighted_samples_from, exact_posterior

MODEL = NGram.random([b"a", b"b", b"ab", b"bca", b""], seed=3, zeros=0.2, eos_token_id=4)
EOS = 4
ENDLESS = NGram.random([b"a", b"b", b"ab"], seed=4)


def likes_b(text: Any) -> float:
    return float(0.6 * text.count("b") - 2.0)


CASES: dict[str, dict[str, Any]] = {
    "the end token": {"stop": END_TOKEN},
    "a token": {"stop": 1},
    "tokens": {"stop": [1, 2]},
    "tokens, the end token with them": {"stop": [1, END_TOKEN]},
    "a string": {"stop": "b"},
    "a string over tokens": {"stop": "aba"},
    "strings": {"stop": ["ba", "bc", "aa"]},
    "strings and the end token": {"stop": ["bb", END_TOKEN]},
    "nothing": {"stop": None},
}


def test_a_text_ends_before_the_first_of_the_strings_that_one_token_completes() -> None:
    for stop in itertools.permutations(["ca", "bc", "ab"]):
        ends = parse_stop(list(stop), eos_token_id=EOS, vocab_size=5)
        assert ends.cut(b"xabca", 3) == 1  # with "bca", drawn after "xa"
        assert ends.cut(b"xbca", 3) == 1


def weigh(result: Any, exact: Any) -> None:
    assert_weighted_samples_from(
        [([ids], [w]) for ids, w in zip(result.token_ids, result.log_weights, strict=True)],
        exact.token_ids,
        log_evidence=exact.log_evidence,
        highest=None,
    )
    assert {text.encode() for text, _ in result.posterior()} <= set(exact.texts)


@pytest.mark.parametrize("name", CASES)
async def test_without_a_constraint(name: str) -> None:
    options = CASES[name] | {"max_tokens": 4, "potential": likes_b}
    exact = exact_posterior(MODEL, [0], **options)
    with genrt.load(MODEL, engine="exact") as lm:
        twisted = TextModel(lm, [0], twist=likes_b, **options)
        smc = SMC(twisted, num_particles=5, resample_when=1.0)
        results = await asyncio.gather(*(smc.run(seed) for seed in range(40)))
        assert_weighted_samples_from(
            [(each.token_ids, each.log_weights) for each in results],
            exact.token_ids,
            log_evidence=exact.log_evidence,
            highest=None,
        )


@pytest.mark.parametrize("pattern", ["", "(ab){2}|b*a", "c"])
async def test_without_a_stop_a_text_ends_where_the_constraint_allows_no_more(pattern: str) -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        options: dict[str, Any] = {"max_tokens": 4, "constraint": regex(pattern, lm), "stop": None}
        exact = exact_posterior(MODEL, [0], **options, potential=likes_b)
        model = TextModel(lm, [0], **options, potential=likes_b)
        result = await importance_sampling(model, num_particles=300).run(0)
    if exact.log_evidence == -math.inf:
        assert result.log_evidence == -math.inf
    else:
        weigh(result, exact)


# -- the oracle, by hand ----------------------------------------------------------------------


def by_hand(stop: str | None, tokens: int) -> dict[bytes, float]:
    """The probability of each text: of all token sequences, each cut where it first has the string."""
    law: defaultdict[bytes, float] = defaultdict(float)
    for ids in itertools.product(range(5), repeat=tokens):
        logprob = sum(float(MODEL.row([0, *ids[:place]])[token]) for place, token in enumerate(ids))
        data = b"".join(MODEL.vocabulary[token] for token in ids)
        law[data if stop is None else data.split(stop.encode())[0]] += math.exp(logprob)
    return {text: weight for text, weight in law.items() if weight > 0}


@pytest.mark.parametrize("stop", ["b", "aba", "bb", None])
def test_the_oracle_is_right_of_strings_and_of_nothing(stop: str | None) -> None:
    exact = exact_posterior(MODEL, [0], max_tokens=4, stop=stop)
    assert exact.texts == pytest.approx(by_hand(stop, 4), abs=1e-6)


def test_the_oracle_is_right_of_what_is_wanted_with_nothing_after_it() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        wanted = strings(["abab", "bb"], lm)
        exact = exact_posterior(MODEL, [0], max_tokens=4, stop=None, constraint=wanted)
    sums = {b"abab": 0.0, b"bb": 0.0}
    for length in range(1, 5):
        for ids in itertools.product(range(4), repeat=length):
            data = b"".join(MODEL.vocabulary[token] for token in ids)
            if data in sums:
                sums[data] += math.exp(
                    sum(float(MODEL.row([0, *ids[:at]])[token]) for at, token in enumerate(ids))
                )
    assert exact.evidence == pytest.approx(sum(sums.values()), abs=1e-6)
    total = sum(sums.values())
    assert exact.texts == pytest.approx(
        {text: each / total for text, each in sums.items() if each}, abs=1e-6
    )


# -- texts, and wrong use ---------------------------------------------------------------------


async def test_a_text_is_cut_before_the_string_even_inside_of_a_token() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model = TextModel(lm, [0], max_tokens=6, stop="c")
        result = await importance_sampling(model, num_particles=300).run(0)
    cut = [
        (text, ids) for text, ids in zip(result.texts, result.token_ids, strict=True) if 3 in ids
    ]
    assert cut
    assert all(text.endswith("b") and ids[-1] == 3 for text, ids in cut)
    assert not any("c" in text for text in result.texts)


async def test_texts_of_a_model_without_an_end_token_may_end() -> None:
    with genrt.load(ENDLESS, engine="exact") as lm:
        for stop in (1, "b", None, END_TOKEN):
            exact = exact_posterior(ENDLESS, [0], max_tokens=3, stop=stop)
            model = TextModel(lm, [0], max_tokens=3, stop=stop)
            weigh(await importance_sampling(model, num_particles=400).run(0), exact)


def of(lm: AsyncLM, **options: Any) -> TextModel:
    return TextModel(lm, [0], max_tokens=2, constraint=regex("a*", lm), **options)


def test_what_does_not_go_together_is_refused() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        with pytest.raises(InvalidRequest, match="put the string into the constraint"):
            of(lm, stop="b")
        with pytest.raises(InvalidRequest, match="take SMC"):
            Rejection(of(lm, stop=None), num_samples=2, max_texts=9)
