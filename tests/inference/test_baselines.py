"""Rejection and best of N: the estimator by enumeration of stopping points, what is kept, what is asked.

Statistical tests have fixed seeds and a level of 1e-6.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

import genrt
from genrt.constraints import predicate, regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    END_TOKEN,
    BestOfN,
    Rejection,
    RejectionState,
    Result,
    SampledText,
    TextModel,
)
from genrt.testing import (
    assert_samples_from,
    assert_unbiased,
    assert_weighted_samples_from,
    exact_posterior,
)
from genrt.tokens.texts import Text

PROMPT = [0]
LIVELY = NGram.random([b"a", b"b", b""], seed=11, eos_token_id=2)


def likes_b(text: Text) -> float:
    return 0.8 * text.bytes.count(b"b") - 1.0


async def likes_b_later(text: Text) -> float:
    await asyncio.sleep(0)
    return likes_b(text)


def ends_in_b(text: Text) -> bool:
    return not text.finished or text.bytes.endswith(b"b")


# -- the evidence -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [2, 3])
@pytest.mark.parametrize("max_texts", [1, 2, 3, 6])
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("bound", [0.0, 1.5])
def test_the_evidence_is_unbiased_over_all_points_at_which_it_stops(
    num_samples: int, max_texts: int, share: float, bound: float
) -> None:
    """Exactly: over every (kept, drawn) that independent trials of probability ``share`` can stop at."""
    with genrt.load(LIVELY, engine="exact") as lm:
        sampler = Rejection(
            TextModel(lm, PROMPT, max_tokens=2),
            num_samples=num_samples,
            max_texts=max_texts,
            bound=bound,
        )
        total, mean = 0.0, 0.0
        for kept in range(num_samples + 1):
            for drawn in range(1, max_texts + 1):
                if kept == num_samples:
                    ways = math.comb(drawn - 1, kept - 1)
                else:
                    ways = math.comb(drawn, kept) if drawn == max_texts else 0
                probability = ways * share**kept * (1 - share) ** max(drawn - kept, 0)
                if probability:
                    state = RejectionState((Text(),) * kept, drawn, 1, 0)
                    assert sampler.is_done(state)
                    total += probability
                    mean += probability * math.exp(sampler.result(state).log_evidence)
    assert total == pytest.approx(1)
    assert mean == pytest.approx(share * math.exp(bound))


def options_of(name: str, lm: Any) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "plain": {"max_tokens": 3},
        "regex": {"max_tokens": 5, "constraint": regex("[ab]{1,3}b", lm)},
        "predicate": {"max_tokens": 4, "constraint": predicate(ends_in_b, lm)},
        "potential": {"max_tokens": 3, "potential": likes_b_later},
        "all": {
            "max_tokens": 4,
            "constraint": regex("(a|b)*b", lm),
            "potential": likes_b,
            "temperature": 2.0,
        },
        "never": {"max_tokens": 3, "constraint": regex("x", lm)},
    }
    return options[name]


@pytest.mark.parametrize("max_texts", [7, 1000])
@pytest.mark.parametrize("name", ["plain", "regex", "predicate", "potential", "all", "never"])
async def test_what_is_kept_follows_the_target_and_the_evidence_is_unbiased(
    name: str, max_texts: int
) -> None:
    if name == "never":
        max_texts = 7
    with genrt.load(LIVELY, engine="exact") as lm:
        options = options_of(name, lm)
        exact = exact_posterior(LIVELY, PROMPT, **options)
        bound = 3.0 if "potential" in options else 0.0
        sampler = Rejection(
            TextModel(lm, PROMPT, **options),
            num_samples=3,
            max_texts=max_texts,
            batch_size=5 if max_texts == 7 else 20,
            bound=bound,
        )
        results = await asyncio.gather(*(sampler.run(seed) for seed in range(120)))
    evidence = [math.exp(result.log_evidence) for result in results]
    assert_unbiased(evidence, exact.evidence, highest=math.exp(bound))
    kept = [token_ids for result in results for token_ids in result.token_ids]
    if name == "never":
        assert kept == []
        assert all(result.posterior() == [] and result.ess == 0 for result in results)
    else:
        assert_samples_from(kept, exact.token_ids)
        assert max_texts == 7 or all(len(result.texts) == 3 for result in results)


async def test_of_one_text_there_is_no_estimate() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        sampler = Rejection(TextModel(lm, PROMPT, max_tokens=2), num_samples=1, max_texts=5)
        result = await sampler.run(0)
    assert len(result.texts) == 1
    assert math.isnan(result.log_evidence)


# -- steps ------------------------------------------------------------------------------------


def same(first: Result, second: Result) -> bool:
    return first.token_ids == second.token_ids and (
        first.log_evidence == second.log_evidence
        or (math.isnan(first.log_evidence) and math.isnan(second.log_evidence))
    )


def keeping(
    seen: list[tuple[SampledText, ...]],
) -> Callable[[RejectionState, tuple[SampledText, ...]], None]:
    return lambda state, batch: seen.append(batch)


async def test_a_run_is_its_steps_and_a_seed_makes_it() -> None:
    results = []
    runtimes: list[dict[str, Any]] = [{}, {"cache_bytes": 0}, {"max_batch_size": 1}]
    for runtime in runtimes:
        with genrt.load(LIVELY, engine="exact", **runtime) as lm:
            sampler = Rejection(
                TextModel(lm, PROMPT, **options_of("regex", lm)),
                num_samples=6,
                max_texts=300,
                batch_size=4,
            )
            seen: list[tuple[SampledText, ...]] = []
            result = await sampler.run(2, on_step=keeping(seen))
            results.append(result)
            state, batches = sampler.init(2), []
            while not sampler.is_done(state):
                (after, batch), (again, _) = await sampler.step(state), await sampler.step(state)
                assert after == again
                assert len(batch) <= 4
                assert after.drawn == state.drawn + len(batch)
                assert after.texts[len(state.texts) :] == tuple(d.text for d in batch if d.kept)
                state = after
                batches.append(batch)
            assert batches[-1][-1].kept, "a run ends with the last text that it wanted"
            assert seen == batches
            assert same(sampler.result(state), result)
            done, nothing = await sampler.step(state)
            assert (done.texts, done.drawn, nothing) == (state.texts, state.drawn, ())
            assert not same(await sampler.run(3), result)
    assert all(same(result, results[0]) for result in results)


async def test_texts_that_were_drawn_say_why_they_are_not_kept() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        sampler = Rejection(
            TextModel(
                lm,
                PROMPT,
                max_tokens=4,
                constraint=regex("(a|b)*b", lm),
                potential=lambda text: -1.0,
            ),
            num_samples=50,
            max_texts=200,
            batch_size=200,
        )
        state, batch = await sampler.step(sampler.init(0))
    refused = [each for each in batch if each.log_weight == -math.inf]
    assert refused
    for each in refused:
        assert not each.kept
        assert not each.text.bytes.endswith(b"b") or len(each.text.token_ids) == 4
    assert {each.log_weight for each in batch} == {-1.0, -math.inf}
    assert 0 < len(state.texts) < sum(each.log_weight == -1.0 for each in batch)


async def test_a_potential_above_the_bound_is_refused() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=3, potential=likes_b)
        sampler = Rejection(model, num_samples=100, max_texts=1000)
        with pytest.raises(InvalidRequest, match=r"above the bound 0\.0: give a higher bound="):
            await sampler.run(0)


# -- best of N --------------------------------------------------------------------------------


async def test_the_best_is_the_best_of_those_that_satisfy_the_constraint() -> None:
    judged: list[Text] = []

    def score(text: Text) -> float:
        judged.append(text)
        return float(text.bytes.count(b"a"))

    with genrt.load(LIVELY, engine="exact") as lm:
        constraint = regex("(a|b)*b", lm)
        model = TextModel(lm, PROMPT, max_tokens=4, constraint=constraint, potential=likes_b)
        for sampler, rank in (
            (BestOfN(model, n=40), likes_b),
            (BestOfN(model, n=40, score=score), score),
        ):
            state, batch = await sampler.step(sampler.init(1))
            valid = [
                each.text
                for each in batch
                if each.text.bytes.endswith(b"b") and len(each.text.token_ids) < 4
            ]
            assert 0 < len(valid) < 40
            assert state.best is not None
            best = state.texts[state.best]
            assert best in valid
            assert rank(best) == max(map(rank, valid))
            assert [each.kept for each in batch] == [i == state.best for i in range(40)]
            result = await sampler.run(1)
            assert result.posterior() == [(best.bytes.decode(), 1.0)]
            assert result.token_ids == tuple(text.token_ids for text in state.texts)
            assert math.isnan(result.log_evidence)
            assert same(await sampler.run(1), result)
            assert not same(await sampler.run(2), result)
    assert all(text.bytes.endswith(b"b") for text in judged), "the invalid are not scored"


async def test_a_constraint_of_little_mass_leaves_no_run_without_a_text() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=9, constraint=regex("(ab){4}", lm))
        mass = exact_posterior(LIVELY, PROMPT, max_tokens=9, constraint=model.constraint).evidence
        results = await asyncio.gather(*(BestOfN(model, n=2).run(seed) for seed in range(20)))
    assert mass < 0.01
    assert all(result.posterior() == [("abababab", 1.0)] for result in results)


@pytest.mark.parametrize("stop", [END_TOKEN, None])
@pytest.mark.parametrize("name", ["regex", "predicate", "all", "never"])
async def test_candidates_are_drawn_under_the_mask_with_the_weights_of_their_law(
    name: str, stop: Any
) -> None:
    """Of the constraint alone: the potential ranks them."""
    with genrt.load(LIVELY, engine="exact") as lm:
        options = options_of(name, lm) | {"stop": stop}
        law = {each: options[each] for each in options if each != "potential"}
        exact = exact_posterior(LIVELY, PROMPT, **law)
        sampler = BestOfN(TextModel(lm, PROMPT, **options, twist=likes_b), n=4)
        states = [await sampler.step(sampler.init(seed)) for seed in range(100)]
    runs = [([each.token_ids for each in s.texts], s.log_weights) for s, _ in states]
    assert_weighted_samples_from(runs, exact.token_ids, log_evidence=exact.log_evidence)
    for state, batch in states:
        for text, log_weight, score, drawn in zip(
            state.texts, state.log_weights, state.scores, batch, strict=True
        ):
            is_dead = log_weight == -math.inf
            assert score == drawn.log_weight
            assert score == (-math.inf if is_dead else likes_b(text) if name == "all" else 0.0)


async def test_more_texts_may_make_a_better_one() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        sampler = BestOfN(TextModel(lm, PROMPT, max_tokens=6), n=2, score=likes_b)
        state, scores = sampler.init(1), []
        for count in range(1, 13):
            state, batch = await sampler.step(state)
            assert len(batch) == 2
            assert len(state.texts) == 2 * count
            assert state.best is not None
            scores.append(state.scores[state.best])
    assert scores == sorted(scores)
    assert scores[-1] > scores[0]


async def test_without_any_valid_text_there_is_no_best() -> None:
    with genrt.load(LIVELY, engine="exact") as lm:
        model = TextModel(lm, PROMPT, max_tokens=3, constraint=regex("x", lm))
        result = await BestOfN(model, n=5).run(0)
    assert result.posterior() == []
    assert len(result.texts) == 5
