"""Gaps between a prefix and a suffix, against sums over all gaps. The level is 1e-6."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from typing import Any

import pytest

import genrt
from genrt.constraints import predicate, strings
from genrt.engines.exact import NGram
from genrt.inference import SMC, infilling
from genrt.testing import assert_weighted_samples_from

MODEL = NGram.random([b"a", b"b", b"ab", b""], order=2, seed=5, zeros=0.2, eos_token_id=3)
SUFFIX = [1, 0]


def by_hand(wanted: Any, longest: int) -> dict[str, float]:
    weights: defaultdict[str, float] = defaultdict(float)
    for length in range(longest + 1):
        for gap in itertools.product(range(3), repeat=length):
            text = b"".join(MODEL.vocabulary[token] for token in gap).decode()
            ids = [0, *gap, *SUFFIX]
            logprob = sum(float(MODEL.row(ids[:at])[ids[at]]) for at in range(1, len(ids)))
            if wanted(text):
                weights[text] += math.exp(logprob)
    return {text: weight for text, weight in weights.items() if weight > 0}


@pytest.mark.parametrize("resample_when", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["anything", "strings", "predicate"])
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
