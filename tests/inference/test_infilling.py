"""Gaps between a prefix and a suffix, against sums over all gaps. The level is 1e-6."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import genrt
from genrt.constraints import predicate, strings
from genrt.engines.exact import NGram
from genrt.errors import ContextTooLong
from genrt.inference import SMC, infilling
from genrt.testing import assert_variance_bounded, assert_weighted_samples_from

MODEL = NGram.random([b"a", b"b", b"ab", b""], order=2, seed=5, zeros=0.2, eos_token_id=3)
SUFFIX = [1, 0]


def logprob(ids: Sequence[int], start: int) -> float:
    return sum(float(MODEL.row(ids[:at])[ids[at]]) for at in range(start, len(ids)))


def gaps(longest: int) -> Iterator[tuple[int, ...]]:
    for length in range(longest + 1):
        yield from itertools.product(range(3), repeat=length)


def by_hand(wanted: Any, longest: int) -> dict[str, float]:
    weights: defaultdict[str, float] = defaultdict(float)
    for gap in gaps(longest):
        text = b"".join(MODEL.vocabulary[token] for token in gap).decode()
        if wanted(text):
            weights[text] += math.exp(logprob([0, *gap, *SUFFIX], 1))
    return {text: weight for text, weight in weights.items() if weight > 0}


@pytest.mark.parametrize(
    ("kind", "resample_when"), [("anything", 0.0), ("strings", 0.5), ("predicate", 1.0)]
)
async def test_gaps_have_their_law_and_the_evidence_is_the_sum(
    kind: str, resample_when: float
) -> None:
    wanted: Any = {
        "anything": lambda text: True,
        "strings": lambda text: text in ("ab", "aba", "bb", ""),
        "predicate": lambda text: len(text) % 2 == 1,
    }[kind]
    weights = by_hand(wanted, 3)
    evidence = sum(weights.values())
    with genrt.load(MODEL, engine="exact") as lm:
        constraint = {
            "anything": None,
            "strings": strings(["ab", "aba", "bb", ""], lm),
            "predicate": predicate(lambda text: not text.finished or len(text) % 2 == 1, lm),
        }[kind]
        model = infilling(lm, [0], SUFFIX, max_tokens=3, constraint=constraint)
        smc = SMC(model, num_particles=6, resample_when=resample_when)
        results = await asyncio.gather(*(smc.run(seed) for seed in range(40)))
    runs = []
    for result in results:
        values = [value if value is not None else "" for value in result.values]
        runs.append((values, result.log_weights))
    assert_weighted_samples_from(
        runs,
        {text: weight / evidence for text, weight in weights.items()},
        log_evidence=math.log(evidence),
        highest=None,
    )


async def test_the_evidence_varies_no_more_than_that_of_gaps_of_even_lengths() -> None:
    """The reference draws a length, then its tokens: its variance is known. A gap that hardly ever ends
    before ``max_tokens`` is unbiased too, and its evidence is too small in every run."""
    suffix = SUFFIX * 3
    evidence = square = 0.0
    for gap in gaps(3):
        ids = [0, *gap]
        masses = [float(MODEL.row(ids[:at])[:3].exp().sum()) for at in range(1, len(ids))]
        proposed = math.exp(logprob(ids, 1)) / math.prod(masses) / 4
        weight = math.exp(logprob([*ids, *suffix], 1))
        evidence += weight
        square += weight**2 / proposed if weight else 0.0
    with genrt.load(MODEL, engine="exact") as lm:
        smc = SMC(infilling(lm, [0], suffix, max_tokens=3), num_particles=16)
        results = await asyncio.gather(*(smc.run(seed) for seed in range(60)))
    assert_variance_bounded(
        [math.exp(result.log_evidence) for result in results],
        evidence,
        relative_variance=10 * (square / evidence**2 - 1) / 16,
    )


def test_prefix_gap_and_suffix_may_fill_the_context() -> None:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 4}) as lm:
        assert SMC(infilling(lm, [0], SUFFIX, max_tokens=2), num_particles=4).run_sync(0).ess > 0
        with pytest.raises(ContextTooLong):
            infilling(lm, [0], SUFFIX, max_tokens=3)


def test_gaps_that_are_not_utf8_stay_apart() -> None:
    model = NGram.random([b"a", b"\xff", b"\xfe", b""], seed=1, eos_token_id=3)
    with genrt.load(model, engine="exact") as lm:
        result = SMC(infilling(lm, [0], [0], max_tokens=1), num_particles=200).run_sync(0)
    assert {value for value, _ in result.posterior()} == {
        *("", "a", "\N{REPLACEMENT CHARACTER}\\xff", "\N{REPLACEMENT CHARACTER}\\xfe")
    }


def test_a_gap_that_cannot_be_another_has_its_own_weight() -> None:
    """No randomness is left, so that a weight that is too small shows, too."""
    with genrt.load(MODEL, engine="exact") as lm:
        model = infilling(lm, [0], SUFFIX, max_tokens=2, constraint=strings(["a"], lm))
        result = SMC(model, num_particles=3).run_sync(0)
    weight = by_hand(lambda text: text == "a", 2)["a"]
    assert result.values == ("a",) * 3
    assert result.log_weights.tolist() == pytest.approx([math.log(weight)] * 3, abs=1e-5)
