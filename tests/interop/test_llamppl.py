"""llamppl's models and inference on a genrt runtime.

The statistical test has fixed seeds and compares a mean with its exact value at five standard errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM

pytestmark = pytest.mark.genlm

PROMPT = "The capital of"


def as_llamppl(lm: AsyncLM) -> Any:
    from genrt.interop import llamppl

    return llamppl.as_llamppl(lm)


@pytest.fixture(scope="module")
def lm(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine="transformers") as lm:
        yield lm


@pytest.fixture(scope="module")
def model(lm: AsyncLM) -> Any:
    return as_llamppl(lm)


async def test_it_is_a_model_of_llamppls_with_the_runtimes_rows(lm: AsyncLM, model: Any) -> None:
    import llamppl

    assert isinstance(model, llamppl.CachedCausalLM)
    context = lm.encode(PROMPT)
    row = lm.next_token_logprobs_sync(context)[: len(model.str_vocab)].log_softmax(-1)
    assert np.allclose(await model.next_token_logprobs(context), row, atol=1e-5)
    assert np.allclose(model.next_token_logprobs_unbatched(context), row, atol=1e-5)
    assert len(model.str_vocab) == len(model.byte_vocab) == len(model.masks.ALL_TOKENS)
    assert {lm.tokenizer.eos_token_id} == model.masks.EOS
    with pytest.warns(RuntimeWarning, match="No operation"):
        model.cache_kv(context)
    model.clear_cache()
    assert lm.statistics().cache.rows == 0


async def test_its_smc_has_the_right_evidence(lm: AsyncLM, model: Any) -> None:
    """The mean weight of particles that grow by two tokens, each given that it is one of eight, is the
    probability of that, which the sixty-four texts' probabilities sum to."""
    import llamppl

    allowed = set(range(40, 48))

    class Allowed(llamppl.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.context = llamppl.LMContext(model, PROMPT)

        async def step(self) -> None:
            await self.observe(self.context.mask_dist(allowed), True)
            await self.sample(self.context.next_token())
            if self.context.token_count == 2:
                self.finish()

    prompt = lm.encode(PROMPT)
    first = torch.from_numpy(await model.next_token_logprobs(prompt))
    seconds = await model.model.batch_next_token_logprobs([[*prompt, token] for token in allowed])
    exact = sum(
        float((first[a] + row[b]).exp())
        for (a, row), b in itertools.product(zip(allowed, seconds, strict=True), allowed)
    )
    np.random.seed(0)
    before = lm.statistics().engine.steps
    particles = await llamppl.smc_standard(Allowed(), 200, ess_threshold=1e-9)
    assert lm.statistics().engine.steps - before <= 3
    assert {token for p in particles for token in p.context.tokens[len(prompt) :]} <= allowed
    weights = np.exp([particle.weight for particle in particles])
    standard_error = weights.std(ddof=1) / len(weights) ** 0.5
    assert 0 < standard_error < 0.2 * exact
    assert abs(weights.mean() - exact) < 5 * standard_error


def test_a_model_without_transformers_tokenizer_is_refused() -> None:
    with (
        genrt.load(NGram.random(3, seed=0, eos_token_id=2), engine="exact") as small,
        pytest.raises(InvalidRequest, match="load a checkpoint"),
    ):
        as_llamppl(small)
