"""llamppl's models and inference on a genrt runtime.

The statistical test has fixed seeds and compares a mean with its exact value at five standard errors.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.errors import Closed, InvalidRequest
from genrt.lm import AsyncLM

pytestmark = pytest.mark.genlm

PROMPT = "The capital of"


def as_llamppl(lm: AsyncLM) -> Any:
    from genrt.interop import llamppl

    return llamppl.as_llamppl(lm)


def context_classes() -> dict[str, Any]:
    """genrt's contexts and llamppl's own, which asks by content."""
    import llamppl

    from genrt.interop.llamppl import LMContext

    return {"genrt": LMContext, "llamppl": llamppl.LMContext}


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


@pytest.mark.parametrize("kind", ["genrt", "llamppl"])
async def test_its_smc_has_the_right_evidence(lm: AsyncLM, model: Any, kind: str) -> None:
    """The mean weight of particles that grow by two tokens, each given that it is one of eight, is the
    probability of that, which the sixty-four texts' probabilities sum to."""
    import llamppl

    allowed = set(range(40, 48))

    class Allowed(llamppl.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.context = context_classes()[kind](model, PROMPT)

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


async def test_its_contexts_draw_and_weigh_as_llamppls_own(lm: AsyncLM, model: Any) -> None:
    """With a resampling in every step, masks of both values, drawn masks and observed tokens."""
    import llamppl

    class Particle(llamppl.Model):  # type: ignore[misc]
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.context = kind(model, PROMPT, temp=0.8)
            self.others = {"one": self.context}

        async def step(self) -> None:
            assert self.others["one"] is self.context
            if await self.sample(self.context.mask_dist(set(range(0, 300, 2)))):
                await self.observe(self.context.mask_dist(set(range(40, 400))), True)
            else:
                await self.observe(self.context.mask_dist(set(range(60))), False)
            token = await self.sample(self.context.next_token())
            if token.token_id % 3 == 0:
                await self.observe(self.context.next_token(), token)
            if self.context.token_count > 5:
                self.finish()

    found: dict[str, Any] = {}
    weights = {}
    for name, kind in context_classes().items():
        lm.clear_cache()
        np.random.seed(3)
        before = lm.statistics().engine.steps
        particles = await llamppl.smc_standard(Particle(kind), 12, ess_threshold=1.0)
        steps = lm.statistics().engine.steps - before
        found[name] = steps, [(str(p.context), p.context.tokens) for p in particles]
        weights[name] = [p.weight for p in particles]
    assert found["genrt"] == found["llamppl"]
    assert weights["genrt"] == pytest.approx(weights["llamppl"], abs=1e-4)
    assert len({tuple(tokens) for _, tokens in found["genrt"][1]}) > 1


async def test_copies_share_what_is_computed(lm: AsyncLM, model: Any) -> None:
    context = await context_classes()["genrt"].create(model, PROMPT)
    lm.clear_cache()
    before = lm.statistics().engine
    copies = [copy.deepcopy(context) for _ in range(9)]
    assert lm.statistics().engine.rows == before.rows
    await asyncio.gather(*(each.next_token().log_prob(40 + i % 3) for i, each in enumerate(copies)))
    after = lm.statistics().engine
    assert (after.steps - before.steps, after.rows - before.rows) == (1, 3)
    assert [each.token_count for each in (context, *copies)] == [0] + [1] * 9
    assert [each.tokens[-1] for each in copies] == [40, 41, 42] * 3


async def test_a_cancelled_draw_leaves_its_context_as_it_was(lm: AsyncLM, model: Any) -> None:
    contexts = [context_classes()["genrt"](model, PROMPT) for _ in range(3)]
    for each in contexts:
        await each.mask_dist({50, 51}).log_prob(True)
    tasks = [asyncio.create_task(each.next_token().sample()) for each in contexts]
    await asyncio.sleep(0)
    assert tasks[1].cancel()
    drawn = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(drawn[1], asyncio.CancelledError)
    assert [each.token_count for each in contexts] == [1, 0, 1]
    assert contexts[1].model_mask == {50, 51}
    assert contexts[0].model_mask == model.masks.ALL_TOKENS
    token, _ = await contexts[1].next_token().sample()
    assert contexts[1].tokens == [*lm.encode(PROMPT), token.token_id]
    row = await model.next_token_logprobs(contexts[1].tokens)
    assert np.allclose(contexts[1].next_token_logprobs, row, atol=1e-5)


async def test_a_mask_without_tokens_raises_as_llamppls_does(model: Any) -> None:
    from llamppl.distributions.lmcontext import NullMask

    for kind in context_classes().values():
        context = kind(model, PROMPT)
        assert await context.mask_dist(model.masks.ALL_TOKENS).sample() == (True, 0.0)
        with pytest.raises(NullMask):
            await context.mask_dist(model.masks.ALL_TOKENS).log_prob(False)
        assert await context.mask_dist({40}).log_prob(True) == context_logprob(model, 40)


def context_logprob(model: Any, token_id: int) -> Any:
    row = model.next_token_logprobs_unbatched(model.tokenizer.encode(PROMPT))
    return pytest.approx(float(row[token_id]), abs=1e-5)


async def test_a_context_takes_assigned_tokens_and_only_genrts_models(
    lm: AsyncLM, model: Any
) -> None:
    context = context_classes()["genrt"](model, PROMPT)
    context.tokens = [5, 6]
    await context.next_token().log_prob(7)
    assert context.tokens == [5, 6, 7]
    row = await model.next_token_logprobs([5, 6, 7])
    assert np.allclose(context.next_token_logprobs, row, atol=1e-5)
    other = copy.copy(model)
    other.model = lm
    with pytest.raises(InvalidRequest, match="as_llamppl returns"):
        context_classes()["genrt"](other, PROMPT)


async def test_a_closed_runtime_closes_its_contexts(llama: Path) -> None:
    with genrt.load(str(llama), engine="transformers") as lm:
        context = context_classes()["genrt"](as_llamppl(lm), PROMPT)
        tokens = context.tokens
    with pytest.raises(Closed):
        await context.next_token().sample()
    assert context.tokens == tokens


def test_a_model_without_transformers_tokenizer_is_refused() -> None:
    with (
        genrt.load(NGram.random(3, seed=0, eos_token_id=2), engine="exact") as small,
        pytest.raises(InvalidRequest, match="load a checkpoint"),
    ):
        as_llamppl(small)
