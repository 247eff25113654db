"""What trainers ask of the real engine: the sets that tokens are drawn from, and a teacher's likeliest
tokens; in chunks, preempted, cancelled, after new weights, beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import genrt
from genrt.engines.vllm.capture import DrawnSets
from genrt.errors import ContextTooLong, EngineUnsupported, InvalidRequest, NotFinite, TimedOut
from genrt.lm import AsyncLM
from genrt.tokens.sampling import TeacherLogprobs, likeliest
from tests.engines.vllm.small import TOLERANCE, left_over, preemptions, runner_of, tokens
from tests.engines.vllm.test_vllm_scores import TIGHT
from tests.inside import engine_of, texts_of
from tests.masks import check_places, sets_in
from tests.waiting import a_loop_beside_each_step, until

pytestmark = pytest.mark.vllm

Rows = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="module")
def lm(llama: Path) -> Iterator[AsyncLM]:
    with genrt.load(str(llama), engine_options=TIGHT, cache_bytes=0) as lm:
        yield lm


# -- sampling masks ----------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"top_p": 0.9, "sampling_mask": "ids"},
    {"top_p": 0.5, "temperature": 0.7, "sampling_mask": "bits"},
    {"top_k": 7, "temperature": 1.6, "logprobs_mode": "processed_logprobs", "sampling_mask": "ids"},
    {"min_p": 0.3, "sampling_mask": "ids"},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.4, "sampling_mask": "ids"},
    {"sampling_mask": "bits"},
    {"temperature": 0.0, "sampling_mask": "bits"},
    {"temperature": 0.0, "sampling_mask": "ids"},
    {"top_p": 0.9, "logprobs_mode": "processed_logprobs", "logprobs": 2},
    {"top_p": 0.9},
]


@pytest.fixture(scope="module")
def row_after(lm: AsyncLM) -> Callable[[Sequence[int]], np.ndarray]:
    """The engine's own rows: sets are held against the law that drew them, up to the batch."""
    return lambda context: lm.next_token_logprobs_sync(list(context)).numpy()


def test_rows_normalized_over_their_sets_are_the_reported_log_probabilities(
    lm: AsyncLM, row_after: Callable[[Sequence[int]], np.ndarray]
) -> None:
    """In one flush, of prompts longer than a step and than the room: texts are preempted, and begin
    again. The tokens are those of the same texts without sets."""
    prompts = [tokens(30 + 9 * n, n) for n in range(len(CASES))]
    common: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True}

    async def crowd(*, masked: bool) -> list[Any]:
        def options(case: dict[str, Any]) -> dict[str, Any]:
            return {n: each for n, each in case.items() if masked or n != "sampling_mask"}

        texts = [
            lm.generate(prompt, seed=3 + n, **common, **options(case))
            for n, (prompt, case) in enumerate(zip(prompts, CASES, strict=True))
        ]
        rows = [lm.score(tokens(60, 90 + n), tokens(70, 80 + n)) for n in range(3)]
        return (await asyncio.gather(*texts, *rows))[: len(CASES)]

    with preemptions(lm) as preempted:
        found = asyncio.run(crowd(masked=True))
    assert preempted
    assert left_over(engine_of(lm)) == {}
    assert len(texts_of(engine_of(lm))._sets) == 0
    plain = asyncio.run(crowd(masked=False))
    for text, same, case in zip(found, plain, CASES, strict=True):
        assert text.token_ids == same.token_ids
        assert same.sampling_mask is None
        if "sampling_mask" not in case:
            assert text.sampling_mask is None
            continue
        check_places(text, case, row_after, tolerance=2e-5)
        if case.get("logprobs_mode") == "processed_logprobs":
            assert text.logprobs == pytest.approx(text.sampling_mask.logprobs.tolist(), abs=1e-6)


async def test_streams_have_the_sets_and_leave_none(lm: AsyncLM) -> None:
    options: dict[str, Any] = {"top_p": 0.8, "seed": 4, "max_tokens": 30, "sampling_mask": "ids"}
    whole = await lm.generate([1, 2, 3], **options)
    stream = lm.stream([1, 2, 3], **options)
    parts = [delta.sampling_mask async for delta in stream]
    joined = [set_ for part in parts if part is not None for set_ in sets_in(part)]
    assert joined == sets_in(whole.sampling_mask)
    left = lm.stream([1, 2, 3], **options)
    async with left:
        await anext(left)
    with pytest.raises(TimedOut):
        await lm.generate([5], timeout=0.0, **options)
    cancelled = asyncio.create_task(lm.generate(tokens(200, 1), **options))
    await lm.next_token_logprobs([1])
    cancelled.cancel()
    await lm.next_token_logprobs([2])
    assert left_over(engine_of(lm)) == {}
    assert len(texts_of(engine_of(lm))._sets) == 0


def test_structures_stop_strings_and_penalties_have_sets(lm: AsyncLM) -> None:
    forms: dict[str, Any] = {"choice": ["ab", "b"], "seed": 1, "sampling_mask": "ids"}
    chosen = lm.generate_sync([1, 2], **forms)
    spelled = {lm.decode([each]) for each in sets_in(chosen.sampling_mask)[0]}
    assert spelled <= {"a", "b", "ab"}
    assert {"a", "b"} <= spelled
    biased: dict[str, Any] = {
        "logit_bias": {11: 60.0},
        "max_tokens": 3,
        "ignore_eos": True,
        "top_p": 0.9,
    }
    found = lm.generate_sync([1, 2], seed=1, sampling_mask="ids", **biased)
    assert sets_in(found.sampling_mask) == [{11}] * 3
    assert found.sampling_mask is not None
    assert found.sampling_mask.log_mass.tolist() == pytest.approx(found.logprobs, abs=1e-5)
    stopped = lm.generate_sync(
        [1], stop=["e"], seed=2, top_p=0.99, max_tokens=200, sampling_mask="ids"
    )
    assert stopped.sampling_mask is not None
    assert len(stopped.sampling_mask) == len(stopped.token_ids)


async def test_a_set_that_is_not_cut_is_whole_beside_texts_with_top_p(lm: AsyncLM) -> None:
    """Tokens without a probability in float32 are in it too: a set depends on its own text alone."""
    biased: dict[str, Any] = {
        "temperature": 0.3,
        "logit_bias": {token: -100.0 for token in range(9, 160)},
    }
    cut: dict[str, Any] = {"temperature": 1.0, "top_p": 0.5}
    whole, _ = await asyncio.gather(
        *(
            lm.generate([1, 2], seed=1, max_tokens=3, sampling_mask="bits", **own)
            for own in (biased, cut)
        )
    )
    assert sets_in(whole.sampling_mask) == [set(range(lm.vocab_size))] * len(whole.token_ids)
    assert whole.sampling_mask is not None
    assert whole.sampling_mask.log_mass.tolist() == pytest.approx([0.0] * 3, abs=1e-5)


def test_a_sampler_that_genrt_does_not_see_is_told_of(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawnSets, "put", lambda *_: None)
    with pytest.raises(EngineUnsupported, match="has no sampling_mask"):
        lm.generate_sync([1], max_tokens=2, top_p=0.5, sampling_mask="ids")


def test_sets_in_a_worker_are_refused_by_name(lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_of(engine_of(lm)), "_sets", None)
    with pytest.raises(InvalidRequest, match="sampling_mask needs vLLM's sampler in this process"):
        lm.generate_sync([1], max_tokens=2, top_p=0.5, sampling_mask="ids")


# -- teachers ----------------------------------------------------------------------------------------


def expect_teacher(found: TeacherLogprobs, rows: torch.Tensor, top: int, heat: float = 1.0) -> None:
    """The answer is the rows': ids up to near ties, log-probabilities and tails to the tolerance."""
    rows = (rows.double() / heat).log_softmax(-1)
    assert found.token_ids.shape == found.logprobs.shape == (len(rows), top)
    assert found.token_ids.dtype == torch.int32
    assert found.logprobs.dtype == found.tail.dtype == torch.float32
    limit = TOLERANCE / min(heat, 1.0)
    ids = found.token_ids.long()
    assert float((rows.gather(1, ids) - found.logprobs).abs().max()) < limit
    assert float((rows.topk(top).values - found.logprobs).abs().max()) < limit
    assert all(len(set(each)) == top for each in ids.tolist())
    tail = rows.scatter(1, ids, -torch.inf).logsumexp(-1)
    if top < rows.shape[1]:
        assert float((tail - found.tail).abs().max()) < limit
        whole = torch.cat([found.logprobs, found.tail[:, None]], 1).double().logsumexp(-1)
        assert float(whole.abs().max()) < 1e-5
    else:
        assert found.tail.tolist() == [-torch.inf] * len(rows)


def test_a_teachers_rows_are_those_after_every_token(lm: AsyncLM, oracle_rows: Rows) -> None:
    """In chunks, with other numbers of tokens and temperatures in the same step, beside scores, rows,
    draws and texts."""
    cases = [(5, 1, 1.0), (320, 1, 1.0), (1, 20, 0.5), (7, 90, 3.0), (7, 3, 1.0), (64, 1, 0.2)]
    texts = [tokens(90 + 9 * n, 40 + n) for n in range(len(cases))]

    async def ask() -> list[Any]:
        others: list[Any] = [lm.score([1, 2], tokens(60, 1)), lm.draw(tokens(30, 2), seed=1)]
        others += [lm.generate(tokens(20, 3), max_tokens=20), lm.next_token_logprobs([4])]
        asked = [
            lm.teacher(text, top=top, start=start, temperature=heat)
            for text, (top, start, heat) in zip(texts, cases, strict=True)
        ]
        return (await asyncio.gather(*asked, *others))[: len(cases)]

    before = lm.statistics().engine
    for text, (top, start, heat), found in zip(texts, cases, asyncio.run(ask()), strict=True):
        expect_teacher(found, oracle_rows(text)[start - 1 :], top, heat)
    since = lm.statistics().engine.scored_tokens - before.scored_tokens
    assert since == 60 + sum(len(t) + 1 - s for t, (_, s, _) in zip(texts, cases, strict=True))
    assert left_over(engine_of(lm)) == {}


def test_a_group_computes_its_common_beginning_once(roomy: AsyncLM, oracle_rows: Rows) -> None:
    prompt = tokens(160, 7)
    group = [prompt + tokens(20, 100 + n) for n in range(8)] + [
        prompt[:150],
        prompt + tokens(20, 100),
    ]
    before = roomy.statistics()
    found = roomy.batch_teacher_sync(group, top=4)
    since = roomy.statistics().since(before)
    assert (since.batcher.questions, since.batcher.flushes) == (9, 1)
    assert since.engine.scored_tokens == 150 + 10 + 8 * 20  # no position twice
    assert (
        since.engine.computed_tokens <= 320 + 8 * 32
    )  # the last block of a beginning is not shared
    for text, each in zip(group, found, strict=True):
        expect_teacher(each, oracle_rows(text), 4)
    assert torch.equal(found[0].token_ids, found[-1].token_ids)
    found[0].logprobs.fill_(0.0)
    assert bool((found[-1].logprobs != 0).all())
    # A prompt that is not asked about comes from the cache.
    before = roomy.statistics()
    after = roomy.batch_teacher_sync([group[0], group[1]], top=4, start=161)
    since = roomy.statistics().since(before)
    assert since.engine.computed_tokens < 100
    assert [len(each.tail) for each in after] == [20, 20]


async def test_a_teacher_after_and_during_evictions_is_the_rows(
    lm: AsyncLM, oracle_rows: Rows
) -> None:
    """Its beginning was resident, and gets evicted; beside it so many rows that these evict each other,
    and a population whose sequences end as well."""
    text = tokens(120, 61)
    await lm.next_token_logprobs(text[:80])
    before = lm.statistics().engine.evicted
    with lm.population([text[:40], text[:41]]) as population:
        population.append((await population.draw(seed=1)).token_ids)
        await asyncio.gather(*(lm.next_token_logprobs(tokens(90, 70 + n)) for n in range(24)))
        asked: list[Any] = [lm.teacher(text, top=5), population.draw(seed=2)]
        asked += [lm.next_token_logprobs(tokens(60, 100 + n)) for n in range(24)]
        found, drawn, *rows = await asyncio.gather(*asked)
        same = await lm.batch_draw([*population], seed=2)
    assert lm.statistics().engine.evicted > before
    expect_teacher(found, oracle_rows(text), 5)
    assert drawn.token_ids.tolist() == same.token_ids.tolist()
    for n, row in enumerate(rows):
        assert float((row - oracle_rows(tokens(60, 100 + n))[-1]).abs().max()) < TOLERANCE
    assert left_over(engine_of(lm)) == {}


async def test_teachers_that_leave_leave_nothing(lm: AsyncLM) -> None:
    with pytest.raises(TimedOut):
        await lm.teacher(tokens(200, 1), timeout=0.0)
    leaving = asyncio.create_task(lm.teacher(tokens(200, 2)))
    staying = asyncio.create_task(lm.teacher(tokens(100, 3), top=2))
    await lm.next_token_logprobs([1])
    leaving.cancel()
    assert (await staying).token_ids.shape == (100, 2)
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert left_over(engine_of(lm)) == {}
    with pytest.raises(ContextTooLong):
        await lm.teacher(tokens(lm.max_model_len + 1, 4))
    assert len((await lm.teacher(tokens(lm.max_model_len, 4), top=1)).tail) == lm.max_model_len


def test_a_row_that_is_not_finite_fails_its_teacher_alone(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runner_of(lm).model
    compute, bad = model.compute_logits, int(lm.top_logprobs_sync([1, 2, 3, 7], 1).token_ids[0])

    def poisoned(hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden_states).clone()
        logits[logits.argmax(-1) == bad] = torch.nan
        return logits

    async def ask(top: int) -> list[Any]:
        asked = [lm.teacher([1, 2, 3, 7], top=top), lm.teacher([9, 8], top=top)]
        return await asyncio.gather(*asked, return_exceptions=True)

    monkeypatch.setattr(model, "compute_logits", poisoned)
    for top in (3, 320):
        failed, found = asyncio.run(ask(top))
        assert isinstance(failed, NotFinite)
        assert isinstance(found, TeacherLogprobs | NotFinite)
    assert left_over(engine_of(lm)) == {}


def test_after_new_weights_and_a_restart_a_teacher_is_the_new_model(
    llama: Path, other: Path, oracle_rows: Rows
) -> None:
    text = tokens(60, 5)
    with genrt.load(str(llama), engine_options=TIGHT, cache_bytes=0) as lm:
        old = lm.teacher_sync(text, top=3)
        expect_teacher(old, oracle_rows(text), 3)
        lm.update_weights_sync(load_file(other / "model.safetensors"))
        new = lm.teacher_sync(text, top=3)
        rows = torch.stack(
            [lm.next_token_logprobs_sync(text[: n + 1]) for n in range(0, len(text), 13)]
        )
        assert torch.allclose(new.logprobs[::13], rows.topk(3).values, atol=TOLERANCE)
        assert float((new.logprobs - old.logprobs).abs().max()) > 0.1
        options: dict[str, Any] = {"top_p": 0.7, "seed": 3, "max_tokens": 8, "sampling_mask": "ids"}
        text_now = lm.generate_sync(text[:5], **options)
        check_places(
            text_now, options, lambda c: lm.next_token_logprobs_sync([*c]).numpy(), tolerance=2e-5
        )
        lm.restart()
        again = lm.teacher_sync(text, top=3)
        assert torch.allclose(again.logprobs, new.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("pending", ["finish", "restart", "continue"])
async def test_a_teacher_in_the_middle_of_new_weights_is_of_one_version(
    lm: AsyncLM, llama: Path, other: Path, oracle_rows: Rows, pending: Any
) -> None:
    """In chunks of a step, beside a text. One that was asked before is answered by the old weights,
    unless all begin again; one that is asked in the middle, by the new weights."""
    texts = [tokens(220, 30 + n) for n in range(4)]
    pairs = [*load_file(other / "model.safetensors").items()]
    later: list[asyncio.Task[Any]] = []

    async def parts() -> Any:
        yield pairs[:9]
        later.append(asyncio.create_task(lm.teacher(texts[0], top=4)))
        await asyncio.sleep(0)
        yield pairs[9:]

    with a_loop_beside_each_step(lm):
        before = lm.statistics().engine.scored_tokens
        asked = [asyncio.create_task(lm.teacher(each, top=4)) for each in texts]
        text = asyncio.create_task(lm.generate([5], max_tokens=60, ignore_eos=True))
        await until(lambda: lm.statistics().engine.scored_tokens > before, lm)
        await lm.update_weights(parts(), pending=pending)
    earlier, after = await asyncio.gather(*asked), await later[0]
    assert len((await text).token_ids) == 60
    again = await lm.batch_teacher(texts, top=4)
    await lm.update_weights(llama)
    assert torch.allclose(after.logprobs, again[0].logprobs, atol=TOLERANCE)
    began_again = 0
    for each, found, new in zip(texts, earlier, again, strict=True):
        assert float((new.logprobs - oracle_rows(each).topk(4).values).abs().max()) > 0.1
        if torch.allclose(found.logprobs, new.logprobs, atol=TOLERANCE):
            began_again += 1
        else:
            expect_teacher(found, oracle_rows(each), 4)
    assert bool(began_again) == (pending == "restart")
    assert left_over(engine_of(lm)) == {}


def test_equal_log_probabilities_come_by_their_ids() -> None:
    rows = torch.tensor([[0.0, -1.0, -0.0, -1.0, -torch.inf], [-2.0, -2.0, -2.0, -2.0, -2.0]])
    assert likeliest(rows, 4).tolist()[1] == [0, 1, 2, 3]
    assert likeliest(rows, 4).tolist()[0][2:] == [1, 3]
