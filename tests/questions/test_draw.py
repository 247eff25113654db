"""Draws, tops, candidates and scores of an AsyncLM, where every probability is known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import NGram
from genrt.lm import AsyncLM
from genrt.questions.scores import ScoreRequest, greedy_joined, greedy_requests
from genrt.testing import assert_samples_from
from tests.scripted import passes

VOCAB_SIZE = 41  # no multiple of 32, nor of 8
MAX_MODEL_LEN = 1024
MODEL = NGram.random(VOCAB_SIZE, order=2, seed=5, zeros=0.3)


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact") as lm:
        yield lm


@pytest.fixture(scope="module")
def shared() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact") as lm:
        yield lm


def allowed(*token_ids: int) -> torch.Tensor:
    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    mask[list(token_ids)] = True
    return mask


def as_bitmask(mask: torch.Tensor) -> torch.Tensor:
    words = np.packbits(np.pad(mask.numpy(), (0, -len(mask) % 32)), bitorder="little")
    return torch.from_numpy(words.view(np.int32))


FORMS: list[Callable[[torch.Tensor], Any]] = [
    lambda mask: mask,
    lambda mask: mask.numpy(),
    as_bitmask,
    lambda mask: as_bitmask(mask) | torch.tensor([0, -(2**9)], dtype=torch.int32),  # past the end
    lambda mask: set(mask.nonzero()[:, 0].tolist()),
]


# -- the law of a draw ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_frequencies_are_the_tempered_row_under_the_mask(
    shared: AsyncLM, seed: int | None, temperature: float
) -> None:
    mask = allowed(*range(0, VOCAB_SIZE, 2))
    row = MODEL.row([3, 4]).masked_fill(~mask, -math.inf)
    torch.manual_seed(0)
    drawn = shared.batch_draw_sync(
        [[3, 4]] * 4000, masks=[mask] * 4000, temperature=temperature, seed=seed
    )
    law = (row / temperature).softmax(-1)
    assert_samples_from(drawn.token_ids.tolist(), dict(enumerate(law.double().tolist())))
    assert torch.allclose(drawn.logprobs, law.log()[drawn.token_ids], atol=1e-4)
    assert torch.allclose(drawn.log_mass, row.logsumexp(-1).expand(4000), atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3),
    st.sets(st.integers(0, VOCAB_SIZE - 1)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**63 - 1),
)
def test_log_mass_is_exact_in_every_form_of_the_mask(
    shared: AsyncLM, context: list[int], ids: set[int], temperature: float, seed: int
) -> None:
    mask = allowed(*ids)
    masked = MODEL.row(context).masked_fill(~mask, -math.inf)
    first, *others = (
        shared.draw_sync(context, mask=form(mask), temperature=temperature, seed=seed)
        for form in FORMS
    )
    assert others == [first] * len(others)
    assert first.log_mass == pytest.approx(float(masked.logsumexp(-1)), abs=1e-5)
    if first.log_mass == -math.inf:
        assert first == (-1, -math.inf, -math.inf)
    else:
        assert masked[first.token_id] > -math.inf


@pytest.mark.parametrize("form", FORMS[:4])
async def test_a_mask_is_what_it_was_at_the_call(
    lm: AsyncLM, form: Callable[[torch.Tensor], Any]
) -> None:
    """Callers refill their masks in place, also by the raw pointer, while the draw is on its way."""
    mask = form(allowed(1, 2))
    tasks = []
    for token_id in (1, 2, 30):
        mask[:] = form(allowed(token_id))
        tasks.append(asyncio.ensure_future(lm.draw([1], mask=mask, seed=1)))
        await passes(1)
    drawn = await asyncio.gather(*tasks)
    row = MODEL.row([1])
    assert [each.log_mass for each in drawn] == pytest.approx(row[[1, 2, 30]].tolist(), abs=1e-5)


async def test_dead_ends_are_no_errors_and_disturb_nobody(lm: AsyncLM) -> None:
    impossible = (MODEL.row([1, 2]) == -math.inf).nonzero()[:, 0].tolist()
    dead, alive, empty, greedy, warm = await asyncio.gather(
        lm.draw([1, 2], mask=impossible),
        lm.draw([1, 2], seed=2),
        lm.draw([1, 2], mask=[]),
        lm.draw([1, 2], mask=impossible, temperature=0),
        lm.draw([1, 2], mask=impossible, temperature=0.5),
    )
    assert {dead, empty, greedy, warm} == {(-1, -math.inf, -math.inf)}
    assert alive.token_id >= 0
    assert alive.log_mass == pytest.approx(0, abs=1e-6)


# -- seeds ------------------------------------------------------------------------------------


@pytest.mark.promise(number=18)
async def test_a_seeded_draw_is_the_same_alone_and_in_company(lm: AsyncLM) -> None:
    alone = lm.draw_sync([1, 2], seed=5)
    lm.clear_cache()
    company = [lm.draw([n, 3], seed=n, temperature=0.5 + n % 3) for n in range(20)]
    drawn = await asyncio.gather(
        lm.draw([1, 2]), *company, lm.draw([1, 2], seed=5), lm.draw([1, 2])
    )
    assert drawn[-2] == alone
    batch = await lm.batch_draw([[4], [1, 2]], seed=4)
    assert int(batch.token_ids[1]) == alone.token_id
    assert float(batch.logprobs[1]) == pytest.approx(alone.logprob)


async def test_a_seeded_batch_draws_each_context_with_a_seed_of_its_own(lm: AsyncLM) -> None:
    batch = await lm.batch_draw([[1, 2]] * 40, seed=7)
    singles = [await lm.draw([1, 2], seed=7 + n) for n in range(40)]
    assert batch.token_ids.tolist() == [single.token_id for single in singles]
    assert len(set(batch.token_ids.tolist())) > 1
    highest = await lm.batch_draw([[1, 2]] * 2, seed=2**63 - 1)
    assert int(highest.token_ids[1]) == (await lm.draw([1, 2], seed=0)).token_id


# -- rows, the cache and the host -------------------------------------------------------------


async def test_a_cached_row_answers_everything_and_a_draws_row_is_not_cached(lm: AsyncLM) -> None:
    await lm.draw([1])
    assert lm.statistics().cache.rows == 0
    row = await lm.next_token_logprobs([1])
    before = lm.statistics().engine
    drawn = await lm.draw([1], mask=[0, 1, 2])
    top = await lm.top_logprobs([1], 1)
    some = await lm.token_logprobs([1], [4])
    after = lm.statistics().engine
    assert (after.rows, after.steps) == (before.rows, before.steps)
    assert drawn.log_mass == pytest.approx(float(row[:3].logsumexp(-1)), abs=1e-6)
    assert (top.token_ids[0], some[0]) == (row.argmax(), row[4])


async def test_rows_for_the_host_are_the_same_rows(lm: AsyncLM) -> None:
    row = await lm.next_token_logprobs([1, 2], device="cpu")
    assert torch.equal(row, await lm.next_token_logprobs([1, 2], device=torch.device("cpu")))
    assert torch.equal(row, lm.next_token_logprobs_sync([1, 2], device="cpu"))
    batch = await lm.batch_next_token_logprobs([[1, 2], [3]], device="cpu")
    assert torch.equal(batch[0], row)
    assert lm.batch_next_token_logprobs_sync([], device="cpu").shape == (0, VOCAB_SIZE)
    assert lm.statistics().engine.rows == 2


# -- tops, candidates, scores -----------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, VOCAB_SIZE])
def test_the_top_is_the_rows(lm: AsyncLM, k: int) -> None:
    token_ids, logprobs = lm.top_logprobs_sync([3, 4], k)
    row = MODEL.row([3, 4])
    assert torch.allclose(logprobs, row.sort(descending=True).values[:k], atol=1e-6)
    assert torch.allclose(row[token_ids], logprobs, atol=1e-6)


def test_candidates_in_any_order_and_number(lm: AsyncLM) -> None:
    for candidates in ([5], [7, 5, 7, 0], range(VOCAB_SIZE), np.array([1, 2]), []):
        found = lm.token_logprobs_sync([3, 4], candidates)
        assert found.dtype == torch.float32
        assert torch.allclose(found, MODEL.row([3, 4])[list(candidates)], atol=1e-6)


def test_scores_are_the_chain_rule(lm: AsyncLM) -> None:
    model = NGram.random(4, order=1, seed=2, eos_token_id=3)
    with genrt.load(model, engine="exact") as small:
        for text, logprob in model.enumerate([0, 1], 3):
            scores = small.score_sync([0, 1], text)
            assert scores.shape == (len(text),)
            assert float(scores.sum()) == pytest.approx(logprob, abs=1e-5)
            assert torch.equal(small.prompt_logprobs_sync([0, 1, *text])[1:], scores)
        pairs = [([0], [1, 2]), ([1, 2], []), ([0, 1], [2])]
        found = small.batch_score_sync(*zip(*pairs, strict=True))
        for pair, scores in zip(pairs, found, strict=True):
            assert torch.equal(scores, small.score_sync(*pair))
        assert small.batch_score_sync([], []) == []
    assert lm.prompt_logprobs_sync([3]).shape == (0,)
    assert lm.score_sync([1], []).shape == (0,)
    assert lm.score_sync([1] * MAX_MODEL_LEN, [2]).shape == (1,)
    assert lm.statistics().engine.rows == 1


@pytest.mark.parametrize("in_one", [False, True])
def test_a_greedy_score_says_whether_each_token_is_the_likeliest(lm: AsyncLM, in_one: bool) -> None:
    context, greedy = [3, 4], list[int]()
    for _ in range(4):
        greedy.append(int(MODEL.row([*context, *greedy]).argmax()))
    other = [*greedy[:2], (greedy[2] + 1) % VOCAB_SIZE, greedy[3]]
    for after, wanted in ((greedy, True), (other, False), (greedy[:1], True), ([], True)):
        rows = [MODEL.row([*context, *after[:n]]) for n in range(len(after))]
        requests = greedy_requests(lm._limits, context, after, None, in_one=in_one)
        if in_one and len(after) > 1:
            [request] = requests
            assert isinstance(request, ScoreRequest)
            score, is_greedy = greedy_joined([request.answer(rows)], after)
        else:
            assert len(requests) == 2 * len(after)
            score, is_greedy = greedy_joined(lm._ask_sync(requests), after)
        total = sum(float(row[token]) for row, token in zip(rows, after, strict=True))
        assert score == pytest.approx(total, abs=1e-5)
        assert is_greedy == wanted


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 100])
async def test_a_texts_rows_come_in_chunks(lm: AsyncLM, chunk: int | None) -> None:
    text = [3, 4, 5, 6, 7, 8]
    wanted = torch.stack([MODEL.row(text[:n]) for n in range(1, 6)])
    for start in (1, 3, 6):
        found = [rows async for rows in lm.prompt_rows(text, start, chunk=chunk)]
        assert max(map(len, found), default=0) <= (chunk or 100)
        assert sum(map(len, found)) == 6 - start
        if found:
            assert torch.allclose(torch.cat(found), wanted[start - 1 :], atol=1e-6)
        again = [*lm.prompt_rows_sync(text, start, chunk=chunk)]
        assert len(again) == len(found)
        assert all(map(torch.equal, found, again))
    before = lm.statistics()
    async for rows in lm.prompt_rows([8, 7, 6, 5, 4], chunk=2):
        rows.zero_()  # the caller's own
        break
    assert lm.statistics().since(before).engine.rows == 2  # the rest is not asked
    row = await lm.next_token_logprobs([8])
    assert torch.allclose(row, MODEL.row([8]), atol=1e-6)
