"""Another model's proposals: the weight of each text by hand, what is asked, and what does not fit.

The target and the evidence are in ``test_algorithms.py``, on drawn cases.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.errors import ContextTooLong, InvalidRequest
from genrt.inference import (
    SMC,
    Law,
    TextModel,
    importance_sampling,
)
from genrt.lm import AsyncLM
from genrt.tokens import sampling

PROMPT = [0]
TOKENS = [b"a", b"b", b"ab", b"ba", b""]
MODEL = NGram.random(TOKENS, seed=3, zeros=0.25, eos_token_id=4)
NOISE = 0.4 * torch.randn(5, 5, generator=torch.Generator().manual_seed(8))
SMALL = NGram(TOKENS, (0.7 * MODEL.table).clamp(min=-3.0) + NOISE, eos_token_id=4)
LENGTH = 5


@pytest.fixture
async def lm() -> AsyncIterator[AsyncLM]:
    async with await genrt.aload(MODEL, engine="exact") as runtime:
        yield runtime


@pytest.fixture
async def small() -> AsyncIterator[AsyncLM]:
    async with await genrt.aload(SMALL, engine="exact") as runtime:
        yield runtime


def row_of(ngram: NGram, before: tuple[int, ...], temperature: float) -> torch.Tensor:
    row = ngram.row((*PROMPT, *before)[-ngram.order :]).double()
    return sampling.truncate(row, temperature=temperature)


@pytest.mark.parametrize(("unit", "temperature"), [(1, 0.7), (3, 1.0), (5, 1.0)])
async def test_every_weight_is_that_of_its_text(
    lm: AsyncLM, small: AsyncLM, unit: int, temperature: float
) -> None:
    """Without resampling, by hand: the probability by the one model over that by the other."""
    constraint = regex("(a|b)*b", lm)
    model = TextModel(
        Law(lm, PROMPT, temperature=temperature), max_tokens=LENGTH, constraint=constraint,
        proposal=Law(small, PROMPT, temperature=temperature), unit=unit,
    )  # fmt: skip
    smc = importance_sampling(model, num_particles=100)
    state = smc.init(1)
    while not state.done:
        state, _ = await smc.step(state)
    assert state.step == model.max_steps == -(-LENGTH // unit)
    seen = 0
    for particle, log_weight in zip(state.particles, state.log_weights, strict=True):
        if log_weight == -math.inf:
            continue
        expected, constraint_state = 0.0, constraint.start()
        for place, token_id in enumerate((*particle.token_ids, 4)):
            before = particle.token_ids[:place]
            mask = constraint_state.mask()
            if place == LENGTH - 1:
                mask &= torch.arange(5) == 4
            proposed = row_of(SMALL, before, temperature).masked_fill(~mask, -math.inf)
            expected += float(row_of(MODEL, before, temperature)[token_id])
            expected -= float(proposed.log_softmax(-1)[token_id])
            constraint_state = (
                constraint_state if token_id == 4 else constraint_state.advance(token_id)
            )
        assert log_weight == pytest.approx(expected, abs=1e-4)
        seen += 1
    assert seen > 10


@pytest.mark.parametrize(("length", "block"), [(7, 3), (5, 8), (4, 1)])
async def test_a_block_is_one_question_to_the_model(length: int, block: int) -> None:
    """However its texts end: one step of the engine for all that they have in a block, while the other
    model takes one a token."""
    options: dict[str, Any] = {"engine": "exact", "cache_bytes": 0}
    async with (
        await genrt.aload(MODEL, **options) as lm,
        await genrt.aload(SMALL, **options) as small,
    ):
        model = TextModel(lm, PROMPT, max_tokens=length, proposal=small, unit=block)
        result = await SMC(model, num_particles=40).run(0)
        assert len({len(each) for each in result.token_ids}) > 2
        assert lm.statistics().engine.steps == -(-length // block)
        assert small.statistics().engine.steps == length


async def test_what_does_not_fit_is_refused(lm: AsyncLM, small: AsyncLM) -> None:
    other = NGram.random([b"a", b"b", b"ab", b"bb", b""], seed=3, eos_token_id=4)
    async with (
        await genrt.aload(other, engine="exact") as foreign,
        await genrt.aload(SMALL, engine="exact", engine_options={"max_model_len": 4}) as short,
    ):
        with pytest.raises(InvalidRequest, match="another vocabulary"):
            TextModel(lm, PROMPT, max_tokens=4, proposal=foreign)
        with pytest.raises(ContextTooLong, match="the model's is 4"):
            TextModel(lm, PROMPT, max_tokens=5, proposal=short)
    for more in ({"unit": 0}, {"unit": ""}, {"unit": 1.5}):
        with pytest.raises(InvalidRequest, match="unit"):
            TextModel(lm, PROMPT, max_tokens=4, **more)
    with pytest.raises(InvalidRequest, match="power 1"):
        TextModel(lm, PROMPT, max_tokens=4, proposal=Law(small, PROMPT, power=2.0))


# -- on vLLM ------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**25,
}
BEGIN = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def pair(
    llama: Path, loras: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[AsyncLM, AsyncLM]]:
    """A model with two adapters, and a smaller one of the same vocabulary."""
    from tests.small_models import make_llama

    other = make_llama(tmp_path_factory.mktemp("small") / "model", seed=7, layers=1)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with (
        genrt.load(str(llama), engine_options=OPTIONS | lora) as lm,
        genrt.load(str(other), engine_options=OPTIONS) as small,
    ):
        lm.add_adapter_sync("a", loras[0])
        lm.add_adapter_sync("b", loras[1])
        yield lm, small


def weigh(
    lm: AsyncLM, text: tuple[int, ...], mask: list[int], adapter: str | None, temperature: float
) -> float:
    """The log-probability of a text by rows, each restricted to a mask: of every token without one."""
    contexts = [[*BEGIN, *text[:place]] for place in range(len(text))]
    rows = lm.batch_next_token_logprobs_sync(contexts, adapter=adapter)
    rows = sampling.truncate(rows, temperature=temperature).double()
    if mask:
        rows = (rows[:, mask]).log_softmax(-1)
        return sum(float(rows[n, mask.index(token_id)]) for n, token_id in enumerate(text))
    return sum(float(rows[n, token_id]) for n, token_id in enumerate(text))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("adapter", "proposal_adapter", "temperature"), [(None, None, 1.0), ("a", "b", 0.8)]
)
async def test_weights_on_vllm_are_those_of_rows(
    pair: tuple[AsyncLM, AsyncLM],
    adapter: str | None,
    proposal_adapter: str | None,
    temperature: float,
) -> None:
    """One model proposes to another, or by an adapter to itself; blocks are scored in one pass."""
    lm = pair[0]
    proposal = pair[1] if proposal_adapter is None else lm
    model = TextModel(
        lm, BEGIN, max_tokens=10, stop=None, unit=4, adapter=adapter, temperature=temperature,
        proposal=Law(proposal, BEGIN, adapter=proposal_adapter, temperature=temperature),
    )  # fmt: skip
    before = lm.statistics().engine
    result = await importance_sampling(model, num_particles=6).run(3)
    after = lm.statistics().engine
    assert after.scored_tokens - before.scored_tokens == 6 * 10
    for text, log_weight in zip(result.token_ids, result.log_weights, strict=True):
        expected = await asyncio.to_thread(
            lambda text=text: (
                weigh(lm, text, [], adapter, temperature)  # type: ignore[misc]
                - weigh(proposal, text, [], proposal_adapter, temperature)
            )
        )
        assert log_weight == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("stop", [None, "bb"])
async def test_a_unit_without_masks_is_one_question_to_the_draft(
    lm: AsyncLM, small: AsyncLM, stop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts and weights are those of a question for each token."""
    model = TextModel(Law(lm, PROMPT), max_tokens=8, stop=stop, proposal=Law(small, PROMPT), unit=3)
    smc = SMC(model, num_particles=40)
    found = await smc.run(seed=5)
    assert 0 < small.statistics().batcher.flushes <= model.max_steps == 3
    monkeypatch.setattr(TextModel, "_drawn_block", nothing)
    wanted = await smc.run(seed=5)
    assert found.texts == wanted.texts
    assert found.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-6)


async def nothing(*_: object) -> list[Any]:
    return []
