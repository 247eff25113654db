"""Searches of the tree of tokens: stochastic beams and best-first, against enumeration.

Seeds are fixed; each statistical assertion fails for right code with probability under 1e-6, had the
seeds been drawn.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import numpy as np
import pytest

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import Law, Program, TextModel, best_first, stochastic_beam_search
from genrt.lm import AsyncLM
from genrt.testing import assert_samples_from, assert_weighted_samples_from, exact_posterior
from genrt.tokens.texts import Text

MODEL = NGram.random([b"a", b"b", b"ab", b"ba", b""], seed=3, zeros=0.25, eos_token_id=4)
SMALL = NGram.random([b"a", b"b", b""], seed=5, eos_token_id=2)


def likes_short(text: Text) -> float:
    return -0.9 * len(text.token_ids)


def options_of(name: str, lm: AsyncLM) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "free": {},
        "dead ends": {"constraint": regex("(a|b){2,5}b", lm)},
        "no stop": {"constraint": regex("(a|b){2,5}b", lm), "stop": None},
        "two stops": {"constraint": regex("(b|ab){1,5}", lm), "stop": [0, 4]},
    }
    return {"max_tokens": 4, "potential": likes_short, **more[name]}


CASES = ["free", "dead ends", "no stop", "two stops"]


def sets_of(law: dict[Any, float], width: int) -> dict[Any, float]:
    """The probability of each set of ``width`` values that are drawn without replacement."""
    found = dict.fromkeys(map(frozenset, itertools.combinations(law, width)), 0.0)
    for order in itertools.permutations(law, width):
        left, share = 1.0, 1.0
        for each in order:
            share *= law[each] / left
            left -= law[each]
        found[frozenset(order)] += share
    return found


async def test_a_stochastic_beam_is_a_sample_without_replacement() -> None:
    """Seven texts have 35 sets of three."""
    async with await genrt.aload(SMALL, engine="exact") as lm:
        model = TextModel(lm, [0], max_tokens=2)
        law = dict(exact_posterior(SMALL, [0], max_tokens=2).token_ids)
        search = stochastic_beam_search(model, width=3)
        found = await asyncio.gather(*(search.run(seed) for seed in range(500)))
    assert len(law) == 7
    assert_samples_from([frozenset(each.token_ids) for each in found], sets_of(law, 3))


@pytest.mark.parametrize("name", CASES)
async def test_the_weights_of_a_stochastic_beam_are_unbiased(name: str) -> None:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        options = options_of(name, lm)
        model, exact = TextModel(lm, [0], **options), exact_posterior(MODEL, [0], **options)
        search = stochastic_beam_search(model, width=5)
        results = await asyncio.gather(*(search.run(seed) for seed in range(150)))
        everything = await stochastic_beam_search(model, width=2000).run(0)
    assert all(len(set(each.token_ids)) == len(each.token_ids) for each in results)
    ratios = np.exp([each.log_evidence - exact.log_evidence for each in results])
    error = ratios.std() / math.sqrt(len(ratios))
    assert abs(ratios.mean() - 1) < 5 * error + 1e-5 < 0.8
    assert_weighted_samples_from(
        [(each.token_ids, each.log_weights) for each in results],
        exact.token_ids,
        log_evidence=exact.log_evidence,
        highest=math.inf,
    )
    # A beam that is wider than the tree has every text.
    assert everything.log_evidence == pytest.approx(exact.log_evidence, abs=1e-5)
    assert dict(everything.posterior()) == pytest.approx(
        {text.decode(): share for text, share in exact.texts.items()}, abs=1e-5
    )


@pytest.mark.parametrize("name", CASES)
async def test_best_first_finds_the_best_texts_in_order(name: str) -> None:
    for seed in range(6):
        ngram = NGram.random(MODEL.vocabulary, seed=seed, zeros=0.25, eos_token_id=4)
        async with await genrt.aload(ngram, engine="exact") as lm:
            options = options_of(name, lm)
            exact = exact_posterior(ngram, [0], **options)
            for width in (1, 8):
                search = best_first(TextModel(lm, [0], **options), num_texts=3, width=width)
                found = await search.run(0)
                best = [*exact.token_ids.items()][:3]
                assert found.token_ids == tuple(ids for ids, _ in best)
                weights = [exact.log_evidence + math.log(share) for _, share in best]
                assert found.log_weights.tolist() == pytest.approx(weights, abs=1e-5)
                assert math.isnan(found.log_evidence)


async def test_best_first_stops_after_its_visits() -> None:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model = TextModel(lm, [0], **options_of("dead ends", lm))
        none = await best_first(model, visits=1).run(0)
        assert (none.texts, none.posterior(), str(none).count("no particles")) == ((), [], 1)
        few = await best_first(model, num_texts=1000, visits=40).run(0)
        every = await best_first(model, num_texts=1000).run(0)
        assert 0 < len(few.texts) < len(every.texts)
        with pytest.raises(InvalidRequest, match="higher one"):
            await best_first(model, bound=-3.0).run(0)


async def test_a_search_of_nothing_but_the_empty_text() -> None:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        model = TextModel(lm, [0], max_tokens=3, constraint=regex("", lm), stop=None)
        for search in (best_first(model), stochastic_beam_search(model, width=3)):
            assert (await search.run(0)).posterior() == [("", 1.0)]


async def test_wrong_searches_say_so() -> None:
    async with await genrt.aload(MODEL, engine="exact") as lm:
        contrast = TextModel([Law(lm, [0]), Law(lm, [1], power=-0.5)], max_tokens=3)
        with pytest.raises(InvalidRequest, match="positive powers"):
            best_first(contrast)
        proposed = TextModel(lm, [0], max_tokens=3, proposal=Law(lm, [1]))
        with pytest.raises(InvalidRequest, match="leave the proposal out"):
            await stochastic_beam_search(proposed, width=2).run(0)

        async def nothing(p: Any) -> None: ...

        with pytest.raises(InvalidRequest, match="give a TextModel"):
            stochastic_beam_search(Program(lm, nothing), width=2)  # type: ignore[arg-type]
