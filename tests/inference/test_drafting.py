"""Drafts: with any of them the same texts and weights are drawn, to the bit where rows are; right ones
save forwards, and nothing is disturbed."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from benchmarks.drafts import always
from genrt.constraints import regex
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import InvalidRequest, NotFinite
from genrt.inference import SMC, MetropolisHastings, Result, TextModel
from genrt.inference.drafting import Drafting
from genrt.lm import AsyncLM
from tests.scoring_engine import ScoringEngine

VOCABULARY = [b"a", b"b", b"ab", b"ba", b"c", b""]
END = 5
NGRAM = NGram.random(VOCABULARY, seed=3, zeros=0.1, eos_token_id=END)
SIZE = len(VOCABULARY)


class Wild:
    """Drafts anything."""

    def __init__(self, seed: int, most: int = 6) -> None:
        self._chance = random.Random(seed)
        self._most = most

    async def draft(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        chance = self._chance
        return [
            [chance.randrange(SIZE) for _ in range(chance.randint(0, self._most))] for _ in texts
        ]


class Told:
    """Drafts what it was told that texts go on with."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [[*each] for each in texts]

    async def draft(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        def rest(text: list[int]) -> list[int]:
            fits = (each for each in self._texts if each[: len(text)] == text)
            return next(fits, text)[len(text) :]

        return [rest([*text]) for text in texts]


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(NGRAM, engine="exact", cache_bytes=0) as opened:
        yield opened


@pytest.fixture(scope="module", params=[ExactEngine, ScoringEngine], ids=["rows", "scores"])
def any_lm(request: pytest.FixtureRequest) -> Iterator[AsyncLM]:
    with genrt.load(engine=lambda: request.param(NGRAM), cache_bytes=2**20) as opened:
        yield opened


def same(one: Result, other: Result) -> bool:
    return (
        one.token_ids == other.token_ids
        and one.log_weights.tolist() == other.log_weights.tolist()
        and one.log_evidence == other.log_evidence
        and [each.ancestors.tolist() for each in one.infos]
        == [each.ancestors.tolist() for each in other.infos]
    )


@pytest.mark.promise(number=37)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    pattern=st.sampled_from([None, "(a|b){1,9}", "(ab)*c(ab|ba)*", "(a|b)*abba(a|c)*"]),
    particles=st.sampled_from([1, 3, 12]),
    resample_when=st.sampled_from([0.0, 0.5, 1.0]),
    source=st.sampled_from(["auto", "wild", "told"]),
)
def test_with_drafts_the_same_is_drawn(
    any_lm: AsyncLM,
    seed: int,
    pattern: str | None,
    particles: int,
    resample_when: float,
    source: str,
) -> None:
    options: dict[str, Any] = {
        "max_tokens": 10,
        "constraint": None if pattern is None else regex(pattern, any_lm),
    }

    def run(model: TextModel) -> Result:
        smc = SMC(model, num_particles=particles, resample_when=resample_when)
        return smc.run_sync(seed=seed)

    plain = run(TextModel(any_lm, [0, 1], **options))
    if source == "auto":
        model = always(TextModel(any_lm, [0, 1], drafts="auto", **options))
        assert same(run(model), plain)
    elif source == "wild":
        model = TextModel(any_lm, [0, 1], drafts=Wild(seed), **options)
    else:
        texts = [[0, 1, *each] for each in plain.token_ids]
        model = TextModel(any_lm, [0, 1], drafts=Told(texts), **options)
    assert same(run(model), plain)


async def test_chains_draw_the_same(lm: AsyncLM) -> None:
    several: list[Any] = ["auto", Wild(1)]
    for drafts in several:
        chains = [
            MetropolisHastings(model, num_chains=5, num_steps=12)
            for model in (
                TextModel(lm, [0], max_tokens=8),
                TextModel(lm, [0], max_tokens=8, drafts=drafts),
            )
        ]
        if drafts == "auto":
            always(chains[1]._model)  # type: ignore[arg-type]
        one, other = [await each.run(seed=4) for each in chains]
        assert one.token_ids == other.token_ids


async def test_what_must_follow_is_computed_in_one_forward(lm: AsyncLM) -> None:
    """Each token but the first few is the only one that the constraint lets follow."""
    model = always(
        TextModel(lm, [0], max_tokens=12, constraint=regex("(c){10}", lm), drafts="auto")
    )
    before = lm.statistics().engine.steps
    result = await SMC(model, num_particles=4).run(seed=0)
    assert {*result.token_ids} == {(4,) * 10}
    assert lm.statistics().engine.steps - before == 1
    assert (model.drafted.steps, model.drafted.forwards) == (11, 1)
    assert model.drafted.right == model.drafted.guessed == {"forced": 4 * 10}


async def test_a_right_draft_saves_all_forwards_but_one(lm: AsyncLM) -> None:
    plain = await SMC(TextModel(lm, [0], max_tokens=8, stop=None), num_particles=1).run(seed=1)
    model = TextModel(lm, [0], max_tokens=8, stop=None, drafts=Told([[0, *plain.token_ids[0]]]))
    before = lm.statistics().engine
    drafted = await SMC(model, num_particles=1).run(seed=1)
    done = lm.statistics().engine
    assert same(drafted, plain)
    assert done.steps - before.steps == 1
    assert model.drafted.right["drafter"] == 8


async def test_texts_learn_from_those_before_them(lm: AsyncLM) -> None:
    """Guesses of texts that repeat themselves are right more often than not, and save forwards."""
    model = always(TextModel(lm, [0], max_tokens=30, stop=None, drafts="auto"))
    before = lm.statistics().engine.steps
    for seed in range(6):
        await SMC(model, num_particles=2, resample_when=0.0).run(seed=seed)
    assert lm.statistics().engine.steps - before < 6 * 30 * 0.8
    assert model.drafted.right["texts"] > model.drafted.guessed["texts"] / 2


async def test_a_drafter_that_is_wrong_counts_as_wrong(lm: AsyncLM) -> None:
    model = TextModel(lm, [0], max_tokens=12, stop=None, drafts=Wild(0))
    await SMC(model, num_particles=8).run(seed=0)
    assert 0 < model.drafted.right["drafter"] < model.drafted.guessed["drafter"] / 2


@pytest.mark.parametrize("how", ["raise", "wrong", "many", "ids", "none"])
async def test_a_drafter_that_fails_says_so_and_disturbs_nothing(lm: AsyncLM, how: str) -> None:
    class Bad:
        async def draft(self, texts: Sequence[Sequence[int]]) -> Any:
            if how == "raise":
                raise ZeroDivisionError("mine")
            return {"wrong": 7, "many": [[1]] * 9, "ids": [[SIZE]] * len(texts), "none": None}[how]

    smc = SMC(TextModel(lm, [0], max_tokens=5, drafts=Bad()), num_particles=3)
    state = smc.init(0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError if how == "raise" else InvalidRequest):
            await smc.step(state)
    assert lm.statistics().batcher.in_flight == 0
    with pytest.raises(InvalidRequest, match="drafts"):
        TextModel(lm, [0], max_tokens=5, drafts=how)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="drafts"):
        TextModel(lm, [0], max_tokens=5, drafts=Bad)  # type: ignore[arg-type]


async def test_a_state_that_nobody_reaches_may_raise(lm: AsyncLM) -> None:
    """What a constraint of one's own raises in a draft is told to nobody."""

    class State:
        def __init__(self, length: int, asked: bool) -> None:
            self.length, self.asked = length, asked

        @property
        def accepting(self) -> bool:
            return self.length > 2

        def mask(self) -> torch.Tensor:
            if self.length > 3:
                raise ZeroDivisionError("nobody is here")
            return torch.tensor([self.length < 3] * END + [self.accepting])

        def advance(self, token_id: int) -> State:
            return State(self.length + 1, self.asked)

    class Short:
        def start(self) -> State:
            return State(0, False)

    plain = TextModel(lm, [0], max_tokens=6, constraint=Short())
    drafted = always(TextModel(lm, [0], max_tokens=6, constraint=Short(), drafts="auto"))
    wild = TextModel(lm, [0], max_tokens=6, constraint=Short(), drafts=Wild(0))
    for seed in range(10):
        results = [
            await SMC(each, num_particles=4).run(seed=seed) for each in (plain, drafted, wild)
        ]
        assert same(results[0], results[1])
        assert same(results[0], results[2])


async def test_models_travel_without_what_they_have_learnt(lm: AsyncLM) -> None:
    model = always(TextModel(lm, [0], max_tokens=9, drafts="auto"))
    await SMC(model, num_particles=4).run(seed=0)
    drafting = model._proposals.drafting
    copied = pickle.loads(pickle.dumps(drafting))  # noqa: S301
    assert isinstance(copied, Drafting)
    assert copied.statistics.steps == 0 < model.drafted.steps
    assert copied._ends == {END}
    assert TextModel(lm, [0], max_tokens=9).drafted.steps == 0


@pytest.mark.promise(number=37)
@pytest.mark.parametrize("turns", range(8))
async def test_a_cancelled_step_is_made_again(lm: AsyncLM, turns: int) -> None:
    smc = SMC(TextModel(lm, [0], max_tokens=9, drafts=Wild(2)), num_particles=8, resample_when=1.0)
    plain = SMC(TextModel(lm, [0], max_tokens=9), num_particles=8, resample_when=1.0)
    state, other = smc.init(5), plain.init(5)
    while not other.done:
        step = asyncio.ensure_future(smc.step(state))
        for _ in range(turns):
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        (state, _), (other, _) = await smc.step(state), await plain.step(other)
        assert [each.token_ids for each in state.particles] == [
            each.token_ids for each in other.particles
        ]
        assert state.log_weights.tolist() == other.log_weights.tolist()
    assert lm.statistics().batcher.in_flight == 0


@pytest.mark.promise(number=37)
async def test_new_weights_and_restarts_between_steps(tmp_path: Path) -> None:
    """Rows of the old weights are not drawn from, and a restart is not seen."""
    other = NGram.random(VOCABULARY, seed=9, eos_token_id=END)

    async def told(drafts: Any) -> tuple[list[Any], list[float], int]:
        async with await genrt.aload(NGRAM, engine="exact", cache_bytes=0) as lm:
            smc = SMC(TextModel(lm, [0], max_tokens=12, stop=None, drafts=drafts), num_particles=6)
            state = smc.init(3)
            for step in range(12):
                if step == 4:
                    await lm.update_weights({"table": other._table})
                if step == 8:
                    await lm.arestart()
                state, _ = await smc.step(state)
            texts = [each.token_ids for each in state.particles]
            return texts, state.log_weights.tolist(), lm.statistics().engine.steps

    texts, weights, steps = await told("off")
    drafts = Told([[0, *text] for text in texts])
    *found, found_steps = await told(drafts)
    assert found == [texts, weights]
    assert found_steps < steps
    assert (await told(Wild(4)))[:2] == (texts, weights)


class Poisoned(ExactEngine):
    """Has no row after some contexts, which nobody but drafts asks for."""

    def step(self) -> list[Any]:
        return [
            genrt.engines.protocol.Finished(end.request, error=NotFinite("no"))
            if end.error is None and 4 in getattr(end.request, "token_ids", ())
            else end
            for end in super().step()
        ]


async def test_a_draft_whose_row_is_not_finite_fails_nobody() -> None:
    async with await genrt.aload(engine=lambda: Poisoned(NGRAM), cache_bytes=0) as lm:
        options: dict[str, Any] = {"max_tokens": 9, "constraint": regex("(a|b)*", lm)}
        plain = await SMC(TextModel(lm, [0], **options), num_particles=8).run(seed=2)
        model = TextModel(lm, [0], drafts=Wild(3), **options)
        assert same(await SMC(model, num_particles=8).run(seed=2), plain)


# -- on vLLM ------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**25,
}


@pytest.mark.vllm
@pytest.mark.promise(number=37)
@pytest.mark.parametrize("what", ["nothing", "restart", "evict", "cancel"])
async def test_on_vllm_the_same_is_drawn(llama: Path, what: str) -> None:
    """With the texts of a run without drafts, half of them wrong, and with guesses."""
    async with await genrt.aload(str(llama), engine_options=OPTIONS, cache_bytes=0) as lm:
        prompt = [5, 6, 7, 8]
        options: dict[str, Any] = {"max_tokens": 14, "stop": None}

        async def run(model: TextModel) -> tuple[list[Any], np.ndarray, int]:
            smc = SMC(model, num_particles=10, resample_when=1.0)
            before, state = lm.statistics().engine.steps, smc.init(9)
            while not state.done:
                if state.step % 5 == 3:
                    if what == "restart":
                        await lm.arestart()
                    elif what == "evict":
                        await lm.batch_next_token_logprobs([[n, 3, 2] for n in range(64)])
                    elif what == "cancel":
                        cancelled = asyncio.ensure_future(smc.step(state))
                        await asyncio.sleep(0)
                        cancelled.cancel()
                        await asyncio.gather(cancelled, return_exceptions=True)
                state, _ = await smc.step(state)
            steps = lm.statistics().engine.steps - before
            return [each.token_ids for each in state.particles], state.log_weights, steps

        texts, weights, steps = await run(TextModel(lm, prompt, **options))
        chance = random.Random(0)
        half = [[*prompt, *each[: chance.randint(2, 14)], *[1] * 3] for each in texts]
        models = [
            TextModel(lm, prompt, drafts=Told([*half, *half]), **options),
            always(TextModel(lm, prompt, drafts="auto", **options)),
        ]
        for model in models:
            found, found_weights, found_steps = await run(model)
            assert found == texts
            assert np.allclose(found_weights, weights, atol=1e-3)
            if what == "nothing":
                assert found_steps <= steps
        assert lm.statistics().batcher.in_flight == 0
