"""JSON by sequential Monte Carlo on the embedded model: what survives validates, and the posterior of a
small case is that of brute force.

A seed does not decide texts of this model from one CPU to the next: it computes in bfloat16, by kernels
for the CPU's own instructions. How many texts end within a few tokens, and how many resampling leaves, is
luck, so nothing here rests on it: with room for every text all survive, with less those that validate.

The statistical comparison has a fixed seed and rejects beyond 5 standard errors for each of ten texts: a
right program fails under one choice of seeds in 170,000.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest

import genrt
from benchmarks.smc import SCHEMA
from genrt.constraints import ConstraintState, MaskedConstraint, json_schema, masks
from genrt.inference import SMC, TextModel, importance_sampling
from genrt.lm import AsyncLM

pytestmark = [pytest.mark.vllm, pytest.mark.embedded]

PROMPT = "A place as a JSON object with kind, population, neighbours:\n"
NEIGHBOUR = {"direction": "north", "distances": [999] * 3}
LONGEST = {"kind": "mountain", "population": 99999999, "neighbours": [NEIGHBOUR] * 3}
MOST_TOKENS = len(json.dumps(LONGEST, separators=(",", ":"))) + 1
"""A token a byte, and the end: with so many every text can end, however it was drawn."""

PAIRS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {"type": "array", "minItems": 0, "maxItems": 1, "items": {"enum": ["a", 7]}},
}
"""``[[]]``, ``[["a"],[7]]``, …: twelve texts, each with several tokenizations."""


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load() as runtime:
        yield runtime


async def exact_masses(
    lm: AsyncLM, prompt: list[int], constraint: MaskedConstraint, max_tokens: int
) -> dict[str, float]:
    """The probability of each text of the set, over all its tokenizations of up to ``max_tokens``."""
    end = lm.tokenizer.eos_token_id
    masses: defaultdict[str, float] = defaultdict(float)
    prefixes: list[tuple[tuple[int, ...], float, ConstraintState]] = [((), 0.0, constraint.start())]
    for _ in range(max_tokens):
        rows = await lm.batch_next_token_logprobs([[*prompt, *ids] for ids, _, _ in prefixes])
        allowed = masks([state for _, _, state in prefixes])
        longer = []
        for (ids, logprob, state), row, mask in zip(prefixes, rows, allowed, strict=True):
            for token_id in mask.nonzero()[:, 0].tolist():
                after = logprob + float(row[token_id])
                if token_id == end:
                    masses[lm.decode(ids)] += math.exp(after)
                else:
                    longer.append(((*ids, token_id), after, state.advance(token_id)))
        prefixes = longer
        if not prefixes:
            break
    return dict(masses)


@pytest.mark.parametrize("max_tokens", [MOST_TOKENS, 72])
async def test_the_survivors_are_those_that_validate(lm: AsyncLM, max_tokens: int) -> None:
    constraint = json_schema(SCHEMA, lm, whitespace="compact")
    model = TextModel(lm, PROMPT, max_tokens=max_tokens, constraint=constraint)
    independent, resampled = await asyncio.gather(
        importance_sampling(model, num_particles=16).run(seed=0),
        SMC(model, num_particles=16).run(seed=1),
    )
    for result in (independent, resampled):
        alive = result.log_weights != -math.inf
        assert alive.tolist() == [validates(text) for text in result.texts]
        assert np.all(np.isfinite(result.log_weights[alive]))
        assert np.isfinite(result.log_evidence) == alive.any()
        assert {text for text, _ in result.posterior()} == set(np.array(result.texts)[alive])
    if max_tokens == MOST_TOKENS:
        assert np.isfinite([independent.log_weights, resampled.log_weights]).all()
        assert len(independent.posterior()) > 1  # resampling may leave one text of many


def validates(text: str) -> bool:
    """Tell whether a text is a complete value of the schema."""
    try:
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


async def test_the_posterior_of_a_small_case_is_that_of_brute_force(lm: AsyncLM) -> None:
    prompt = lm.encode(
        '[["a"],[7]]<|im_end|>[[],["a"]]<|im_end|>[[7],[7]]<|im_end|>[["a"]]<|im_end|>'
    )
    constraint = json_schema(PAIRS, lm, whitespace="compact")
    masses = await exact_masses(lm, prompt, constraint, max_tokens=8)
    values = [json.loads(text) for text in masses]
    lists = [[], ["a"], [7]]
    expected = [[one] for one in lists] + [[one, two] for one in lists for two in lists]
    assert sorted(map(str, values)) == sorted(map(str, expected))
    total = sum(masses.values())
    model = TextModel(lm, prompt, max_tokens=8, constraint=constraint)
    result = await importance_sampling(model, num_particles=3000).run(seed=1)
    weights = np.exp(result.log_weights)
    error = weights.std(ddof=1) / math.sqrt(len(weights))
    assert abs(weights.mean() - total) < 5 * error
    shares = result.weights
    for text, mass in sorted(masses.items(), key=lambda entry: -entry[1])[:9]:
        here = np.array([each == text for each in result.texts])
        probability = mass / total
        error = math.sqrt(float((shares**2 * (here - probability) ** 2).sum()))
        assert abs(float(shares[here].sum()) - probability) < 5 * error + 1e-5, text
