"""Weights replaced while texts go on, on the exact engine: spans say which version drew each token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import Closed, EngineFailed, EngineUnsupported, InvalidRequest
from genrt.lm import AsyncLM
from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Decoding,
    WeightsSpan,
    weights_spans,
)
from genrt.questions.rows import LogprobsRequest
from tests.inside import engine_of
from tests.scripted import ScriptedEngine
from tests.waiting import until

MODELS = [NGram.random(11, order=2, seed=seed, eos_token_id=0) for seed in range(3)]
PROMPT = [3, 1]


@pytest.fixture
async def lm() -> AsyncIterator[AsyncLM]:
    async with genrt.load(MODELS[0], engine="exact", restart="auto", seed=3) as runtime:
        yield runtime


def of_version(version: int) -> NGram:
    return MODELS[version % len(MODELS)]


async def replace(lm: AsyncLM, **options: Any) -> int:
    """Replace the weights by those of the next version."""
    table = of_version(lm.weights_version + 1).table
    return await lm.update_weights({"table": table}, pending="continue", **options)


def assert_drawn_by_its_spans(text: Completion) -> None:
    """The spans are whole and in order, and their weights give the tokens' log-probabilities."""
    ends = [0, *(each.end for each in text.weights_spans)]
    assert [each.start for each in text.weights_spans] == ends[:-1]
    assert ends[-1] == len(text.token_ids)
    versions = [each.version for each in text.weights_spans]
    assert versions == sorted(set(versions))
    assert text.weights_version == versions[-1]
    for version, start, end in text.weights_spans:
        for place in range(start, end):
            context = [*text.prompt_token_ids, *text.token_ids[:place]]
            row = of_version(version).row(context)
            assert text.logprobs[place] == pytest.approx(
                float(row[text.token_ids[place]]), abs=1e-5
            )
            for token, logprob in text.top_logprobs[place].items():
                assert logprob == pytest.approx(float(row[token]), abs=1e-5)


OPTIONS: Any = {"max_tokens": 40, "ignore_eos": True, "logprobs": 3, "seed": 5}


async def test_each_token_is_of_the_version_that_its_span_says(lm: AsyncLM) -> None:
    options = OPTIONS | {"max_tokens": 160}
    texts = asyncio.ensure_future(lm.batch_generate([PROMPT, [2], [5, 5, 5]], **options))
    while not texts.done():
        await replace(lm)
    for text in await texts:
        assert_drawn_by_its_spans(text)
        assert len(text.weights_spans) > 5


def test_each_token_may_be_of_its_own_version() -> None:
    """Below the runtime, where an update takes no steps."""
    engine = ExactEngine(MODELS[0])
    decoding = Decoding(9, ignore_eos=True, logprobs=3)
    requests = [CompletionRequest((2, each), decoding, seed=each, nonce=each) for each in range(3)]
    engine.submit(requests)
    for version in range(1, 10):
        found = engine.step()
        engine.weights.begin_beside_texts(False)
        engine.weights.load([("table", of_version(version).table)])
        engine.weights.finish()
        engine.weights.set_version(version)
    assert [each.request for each in found] == requests
    for end in found:
        assert isinstance(end.result, Completion)
        assert end.result.weights_spans == tuple(WeightsSpan(n, n, n + 1) for n in range(9))
        assert_drawn_by_its_spans(end.result)
    engine.submit([LogprobsRequest([2, 3])])
    with pytest.raises(EngineFailed):
        engine.weights.begin_beside_texts(False)


async def test_a_text_that_no_update_meets_is_of_one_version(lm: AsyncLM) -> None:
    for version in range(3):
        text = await lm.generate(PROMPT, **OPTIONS)
        assert text.weights_spans == (WeightsSpan(version, 0, 40),)
        assert_drawn_by_its_spans(text)
        await replace(lm)


async def test_a_stream_says_so_delta_by_delta(lm: AsyncLM) -> None:
    spans: list[WeightsSpan] = []
    async with lm.stream(PROMPT, **OPTIONS) as stream:
        async for delta in stream:
            if delta.token_ids:
                ends = delta.start, delta.start + len(delta.token_ids)
                assert (delta.weights_spans[0].start, delta.weights_spans[-1].end) == ends
            spans += delta.weights_spans
            assert_drawn_by_its_spans(stream.partial)
            await replace(lm)
    assert stream.completion is not None
    assert_drawn_by_its_spans(stream.completion)
    assert len(stream.completion.weights_spans) > 3
    said = {place: span.version for span in spans for place in range(span.start, span.end)}
    for version, start, end in stream.completion.weights_spans:
        assert {said[place] for place in range(start, end)} == {version}


async def test_other_questions_are_of_one_version_each(lm: AsyncLM) -> None:
    """Rows, draws, scores, contexts and populations, before, beside and after many updates."""
    text = asyncio.ensure_future(lm.generate(PROMPT, **OPTIONS | {"max_tokens": 400}))
    population, context = lm.population(PROMPT, 4), lm.context(PROMPT)
    for step in count():
        before = lm.weights_version
        asked = (
            lm.next_token_logprobs([1, step % 11]),
            lm.draw([2, step % 11], seed=step),
            lm.score([4], [5, 6]),
            population.draw(seed=step),
            context.draw(seed=step),
        )
        gathered = asyncio.gather(*asked)
        await asyncio.sleep(0)
        after = await replace(lm)
        row, draw, score, draws, of_context = await gathered
        models = [of_version(each) for each in range(before, after + 1)]
        assert any(torch.allclose(row, each.row([1, step % 11]), atol=1e-5) for each in models)
        drawn = float(of_version(draw.weights_version).row([2, step % 11])[draw.token_id])
        assert draw.logprob == pytest.approx(drawn, abs=1e-5)
        sums = [each.row([4])[5] + each.row([4, 5])[6] for each in models]
        assert min(abs(float(score.sum() - each)) for each in sums) < 1e-5
        for sequence, token, logprob in zip(population, *draws[:2], strict=True):
            row = of_version(draws.weights_version).row(sequence)
            assert float(logprob) == pytest.approx(float(row[token]), abs=1e-5)
        row = of_version(of_context.weights_version).row(context.token_ids)
        assert of_context.logprob == pytest.approx(float(row[of_context.token_id]), abs=1e-5)
        population.append(draws.token_ids)
        context.append(of_context.token_id)
        if text.done():
            break
    assert_drawn_by_its_spans(await text)
    assert step > 10


async def test_an_equal_text_asked_later_is_another_text(lm: AsyncLM) -> None:
    """Not the one in progress, which has tokens of earlier weights."""
    first = asyncio.ensure_future(lm.generate(PROMPT, **OPTIONS | {"max_tokens": 900}))
    await asyncio.sleep(0)
    await replace(lm)
    second = await lm.generate(PROMPT, **OPTIONS | {"max_tokens": 900})
    assert [each.version for each in second.weights_spans] == [1]
    assert [each.version for each in (await first).weights_spans] == [0, 1]


async def test_a_text_that_is_cancelled_during_an_update_ends(lm: AsyncLM) -> None:
    texts = [
        asyncio.ensure_future(lm.generate(PROMPT, max_tokens=900, ignore_eos=True, seed=each))
        for each in range(3)
    ]
    await until(lambda: lm.statistics().engine.sampled_tokens, lm)

    async def chunks() -> AsyncIterator[Any]:
        yield {}  # the next one is read in the middle of the update
        texts[0].cancel()
        await asyncio.sleep(0)
        yield {"table": MODELS[1].table}

    assert await lm.update_weights(chunks(), pending="continue") == 1
    for text in (await asyncio.gather(*texts, return_exceptions=True))[1:]:
        assert isinstance(text, Completion)
        assert [each.version for each in text.weights_spans] == [0, 1]
    assert texts[0].cancelled()
    assert lm.statistics().engine.cancelled == 1
    assert lm.statistics().batcher.in_flight == 0


async def test_an_update_that_is_given_up_changes_no_text(lm: AsyncLM) -> None:
    text = asyncio.ensure_future(lm.generate(PROMPT, **OPTIONS | {"max_tokens": 900}))
    await asyncio.sleep(0)

    async def chunks() -> AsyncIterator[Any]:
        yield {}
        raise OSError("the trainer has gone")

    with pytest.raises(OSError, match="trainer"):
        await lm.update_weights(chunks(), pending="continue")
    assert_drawn_by_its_spans(found := await text)
    assert [each.version for each in found.weights_spans] == [0]


async def test_after_a_death_in_an_update_texts_begin_again_with_whole_weights(lm: AsyncLM) -> None:
    await replace(lm)
    text = asyncio.ensure_future(lm.generate(PROMPT, **OPTIONS | {"max_tokens": 900}))
    await asyncio.sleep(0)
    before = engine_of(lm)

    async def chunks() -> AsyncIterator[Any]:
        yield {"table": MODELS[2].table}
        raise OSError("the trainer has gone")

    with pytest.raises(OSError, match="trainer"):
        await lm.update_weights(chunks(), pending="continue")
    found = await text
    assert engine_of(lm) is not before
    assert_drawn_by_its_spans(found)
    assert [each.version for each in found.weights_spans] == [1]


async def test_a_restart_in_an_update_ends_both(lm: AsyncLM) -> None:
    text = asyncio.ensure_future(lm.generate(PROMPT, **OPTIONS | {"max_tokens": 900}))
    await asyncio.sleep(0)

    async def chunks() -> AsyncIterator[Any]:
        yield {}
        restarts.append(asyncio.ensure_future(lm.arestart()))
        await asyncio.shield(restarts[0])
        yield {"table": MODELS[1].table}

    restarts: list[asyncio.Future[None]] = []
    with pytest.raises(EngineFailed):
        await lm.update_weights(chunks(), pending="continue")
    with pytest.raises(Closed):
        await text
    await restarts[0]
    assert_drawn_by_its_spans(await lm.generate(PROMPT, **OPTIONS))


async def test_texts_in_a_queue_are_drawn_by_the_weights_that_they_meet() -> None:
    options: Any = {"max_batch_size": 2}
    async with genrt.load(MODELS[0], engine="exact", engine_options=options) as lm:
        texts = asyncio.ensure_future(lm.batch_generate([PROMPT, [1], [2], [4]], **OPTIONS))
        await asyncio.sleep(0)
        while not texts.done():
            await replace(lm)
        for text in await texts:
            assert_drawn_by_its_spans(text)


async def test_a_pause_waits_for_texts_that_an_update_did_not_wait_for(lm: AsyncLM) -> None:
    text = asyncio.ensure_future(lm.generate(PROMPT, **OPTIONS | {"max_tokens": 900}))
    await asyncio.sleep(0)
    await asyncio.gather(lm.pause(), replace(lm))
    assert text.done()
    lm.resume()
    assert_drawn_by_its_spans(await text)


async def test_what_is_wrong_is_refused(lm: AsyncLM) -> None:
    table = {"table": MODELS[1].table}
    for options, message in (
        ({"pending": "go on"}, "must be 'finish', 'restart' or 'continue', got 'go on'"),
        ({"kv_cache": "keep"}, "pending"),
        ({"kv_cache": "drop", "pending": "continue"}, "'recompute', 'keep' or None, got 'drop'"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await lm.update_weights(table, **options)  # type: ignore[arg-type]
    for end in (lm.pause, lm.sleep):
        with pytest.raises(InvalidRequest, match="pending"):
            await end(pending="continue")
    assert lm.weights_version == 0


async def test_an_engine_whose_texts_cannot_go_on_says_so() -> None:
    class Weights:
        def __getattr__(self, name: str) -> Any:
            if name in ("begin_beside_texts", "set_version"):
                raise AttributeError(name)
            return lambda *_: {}

    class Other(ScriptedEngine):
        weights = Weights()

    async with genrt.load(engine=Other) as lm:
        with pytest.raises(EngineUnsupported, match='pending="finish"'):
            await lm.update_weights({}, pending="continue")


def test_spans_of_a_part() -> None:
    begins = [(4, 0), (6, 3), (7, 3), (9, 8)]
    assert weights_spans(begins, 0, 10) == ((4, 0, 3), (7, 3, 8), (9, 8, 10))
    assert weights_spans(begins, 2, 5) == ((4, 2, 3), (7, 3, 5))
    assert weights_spans(begins, 3, 3) == ()
    assert weights_spans([], 0, 0) == ()
