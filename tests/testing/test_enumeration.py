"""Exact posteriors: against sums over every text, and what is refused."""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import genrt
from genrt.constraints import all_of, predicate, regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.testing import ExactPosterior, exact_posterior
from genrt.tokens import sampling
from genrt.tokens.texts import Text

EOS = 4
MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], order=2, seed=3, zeros=0.25, eos_token_id=EOS)
"""Several tokenizations of one text, tokens that never follow others, and so dead ends."""
PROMPT = [0, 1]
with genrt.load(MODEL, engine="exact") as runtime:
    NEVER = regex("x", runtime)


def by_hand(max_tokens: int, weigh: Any, *, unfinished: bool = False, model: NGram = MODEL) -> Any:
    """Z and the probability of each text, summed over all there are."""
    total: defaultdict[bytes, float] = defaultdict(float)
    for ids, logprob in model.enumerate(PROMPT, max_tokens, unfinished=unfinished):
        text = b"".join(model.vocabulary[token] for token in ids)
        total[text] += math.exp(logprob) * weigh(text.decode())
    evidence = sum(total.values())
    return evidence, {text: mass / evidence for text, mass in total.items() if mass > 0}


def expect(posterior: ExactPosterior, evidence: float, texts: dict[bytes, float]) -> None:
    assert posterior.evidence == pytest.approx(evidence, rel=1e-5)
    assert math.exp(posterior.log_evidence) == posterior.evidence
    assert dict(posterior.texts) == pytest.approx(texts, rel=1e-5)
    for mapping in (posterior.texts, posterior.token_ids):
        probabilities = list(mapping.values())
        assert sum(probabilities) == pytest.approx(1)
        assert probabilities == sorted(probabilities, reverse=True)
    by_tokens: defaultdict[bytes, float] = defaultdict(float)
    for ids, probability in posterior.token_ids.items():
        assert EOS not in ids
        by_tokens[b"".join(MODEL.vocabulary[token] for token in ids)] += probability
    assert dict(by_tokens) == pytest.approx(dict(posterior.texts))


def even(text: Text) -> bool:
    return not text.finished or len(text.bytes) % 2 == 0


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: bool(re.fullmatch(pattern, text))


async def slowly(text: Text) -> float:
    await asyncio.sleep(0)
    return float(len(text.bytes))


def tempered(temperature: float) -> NGram:
    rows = sampling.truncate(MODEL.table.view(-1, 5), temperature=temperature)
    return MODEL.with_table(rows.view(5, 5, 5))


@pytest.mark.parametrize("max_tokens", [1, 3, 5])
async def test_a_posterior_is_the_sum_over_all_texts(max_tokens: int) -> None:
    """Without a constraint, texts that are cut count; with one, a text has to end in time."""
    with genrt.load(MODEL, engine="exact") as lm:
        product = all_of(regex("(ab?)*", lm), predicate(even, lm))
        of_product = lambda text: matches("(ab?)*")(text) and len(text) % 2 == 0
        cases: list[tuple[dict[str, Any], Callable[[str], float]]] = [
            *(
                ({"constraint": regex(pattern, lm)}, matches(pattern))
                for pattern in ("(a|b){3,5}b", "a?", "(ab|ba)*")
            ),
            ({"constraint": product}, of_product),
            (
                {"constraint": regex("a+", lm), "potential": slowly},
                lambda text: math.exp(len(text)) * matches("a+")(text),
            ),
        ]
        for options, weigh in cases:
            evidence, texts = by_hand(max_tokens, weigh)
            found = exact_posterior(MODEL, PROMPT, max_tokens=max_tokens, **options)
            if evidence:
                expect(found, evidence, texts)
            else:
                assert (found.evidence, dict(found.texts)) == (0.0, {})
    for temperature in (1.0, 0.5, 3.0, 1e-6):
        found = exact_posterior(MODEL, PROMPT, max_tokens=max_tokens, temperature=temperature)
        own = by_hand(max_tokens, lambda text: 1, unfinished=True, model=tempered(temperature))
        expect(found, *own)
        assert any(len(ids) == max_tokens for ids in found.token_ids)


def test_a_potential_weighs_finished_texts_once() -> None:
    seen: list[Text] = []

    def potential(text: Text) -> float:
        seen.append(text)
        return -math.inf if text.bytes == b"a" else 2.0 - len(text.bytes)

    found = exact_posterior(MODEL, PROMPT, max_tokens=4, potential=potential)
    weigh = lambda text: 0 if text == "a" else math.exp(2 - len(text))
    expect(found, *by_hand(4, weigh, unfinished=True))
    assert all(text.finished for text in seen)
    assert len(set(seen)) == len(seen)
    assert b"a" not in found.texts


def test_a_narrow_constraint_is_enumerated_over_many_tokens() -> None:
    model = NGram.random(20, seed=1, eos_token_id=19)
    with genrt.load(model, engine="exact") as lm:
        found = exact_posterior(model, [0], max_tokens=40, constraint=regex("(ab){17}c?", lm))
        assert sorted(found.texts) == [b"ab" * 17, b"ab" * 17 + b"c"]
        with pytest.raises(InvalidRequest, match="more than max_texts=1000 texts of up to 3"):
            exact_posterior(
                model, [0], max_tokens=40, constraint=regex("[a-z]*", lm), max_texts=1000
            )


def test_probabilities_too_small_for_a_float_still_make_a_posterior() -> None:
    model = NGram([b"a", b"b", b""], torch.tensor([-1e-30, -900.0, -901.0]), eos_token_id=2)
    with genrt.load(model, engine="exact") as lm:
        found = exact_posterior(model, [0], max_tokens=3, constraint=regex("b*", lm))
    assert found.log_evidence == pytest.approx(-901)
    assert found.texts[b""] == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.0}, "temperature"),
        ({"prompt": "x"}, "cannot spell the text"),
        ({"prompt": [7]}, "token id"),
        ({"constraint": "a+"}, "the constraint is a str"),
        ({"model": "exact"}, "NGram"),
        ({"max_texts": 10}, "max_texts=10"),
        ({"potential": lambda text: math.nan}, "the potential of 'a*b*' gave nan"),
        ({"potential": lambda text: math.inf}, "log-weight"),
        ({"model": NGram.random(5), "constraint": NEVER}, "eos_token_id"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    with pytest.raises(InvalidRequest, match=message):
        exact_posterior(**(right | options))
