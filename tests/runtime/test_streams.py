"""Streams: the deltas are the completion, whoever reads them, however slowly; nothing is left of a stream
that nobody reads any more."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import NGram
from genrt.errors import (
    EngineFailed,
    InvalidRequest,
    StreamCut,
    TimedOut,
    UnknownAdapter,
)
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion, CompletionRequest, Decoding, Delta, WeightsSpan
from genrt.runtime.streams import READER_SECONDS, Flow, Stream, Streams, SyncStream
from tests.inside import engine_of, in_progress, thread_of
from tests.scripted import passes

EOS = 4
TEXTS = [b"a", b"b", b" c", b"d", b"<end>", "é".encode()[:1], "é".encode()[1:]]
MODEL = NGram.random(TEXTS, order=1, seed=3, eos_token_id=EOS)
OPTIONS: dict[str, Any] = {"max_model_len": 256}


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options=OPTIONS) as opened:
        yield opened


def untimed(completion: Completion | None) -> Completion:
    assert completion is not None
    return dataclasses.replace(completion, seconds=0.0, seconds_to_first_token=0.0)


def joined(deltas: list[Delta]) -> tuple[str, tuple[int, ...], tuple[float, ...]]:
    return (
        "".join(delta.text for delta in deltas),
        sum((delta.token_ids for delta in deltas), ()),
        sum((delta.logprobs for delta in deltas), ()),
    )


async def read(stream: Stream) -> list[Delta]:
    return [delta async for delta in stream]


async def nothing_left(lm: AsyncLM) -> None:
    """Let a few turns pass, and find nothing of any stream."""
    for token in itertools.islice(itertools.cycle(range(3)), 6):
        await lm.next_token_logprobs([token, token, 1])
        lm.clear_cache()
    assert lm.statistics().batcher.in_flight == 0
    assert not thread_of(lm).batcher.streams.by_loop
    assert len(in_progress(engine_of(lm))) == 0


# -- what comes ---------------------------------------------------------------------------------

COMPLETED = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 40),
        "seed": st.integers(0, 2**40),
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
    },
    optional={
        "stop": st.lists(st.sampled_from(["a", "dd", "b c", " cd", "é", "ab"]), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 6), max_size=2),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 2]),
    },
)


@settings(deadline=None)
@given(options=COMPLETED, prompt=st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_the_deltas_are_the_completion(
    lm: AsyncLM, options: dict[str, Any], prompt: list[int]
) -> None:
    async def asked() -> None:
        stream = lm.stream(prompt, **options)
        deltas = await read(stream)
        completion = await lm.generate(prompt, **options)
        assert untimed(stream.completion) == untimed(completion)
        assert joined(deltas) == (completion.text, completion.token_ids, completion.logprobs)
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == completion.finish_reason
        assert deltas[-1].stop_reason == completion.stop_reason
        starts = itertools.accumulate((len(delta.token_ids) for delta in deltas), initial=0)
        assert [delta.start for delta in deltas] == [*starts][:-1]

    asyncio.run(asked())


async def test_tokens_come_while_the_rest_is_drawn(lm: AsyncLM) -> None:
    stream = lm.stream([0], max_tokens=60, ignore_eos=True)
    first = await anext(stream)
    assert 1 <= len(first.token_ids) < 60
    assert stream.partial.token_ids == first.token_ids
    assert stream.partial.finish_reason == "abort"
    assert "open" in repr(stream)
    rest = await read(stream)
    assert stream.completion is not None
    assert stream.partial is stream.completion
    assert joined([first, *rest])[1] == stream.completion.token_ids
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_streams_of_conversations_and_wrong_arguments(lm: AsyncLM) -> None:
    for wrong in ({"temperature": -1.0}, {"max_tokens": 0}, {"timeout": -1.0}, {"stop": [""]}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            lm.stream([0], **wrong)
    with pytest.raises(InvalidRequest, match="chat template"):
        lm.stream_chat([{"role": "user", "content": "a"}])
    with pytest.raises(InvalidRequest, match="no option"):
        lm.stream([0], n=2)  # type: ignore[call-arg]
    with pytest.raises(UnknownAdapter):
        lm.stream([0], adapter="none")


# -- what happens on the way ---------------------------------------------------------------------


def test_a_text_that_is_begun_anew_and_differs_fails() -> None:
    flow = Flow()
    flow.put(Delta("ab", (0, 1)))
    assert flow.take() == Delta("ab", (0, 1))
    assert flow.take() is None
    flow.put(Delta("a", (0,)))
    assert flow.take() is None, "this is known"
    flow.put(Delta("bb", (1, 1), start=1, text_start=1))
    assert flow.take() == Delta("b", (1,), start=2, text_start=2)
    flow.put(Delta("ad", (0, 3)))
    with pytest.raises(EngineFailed, match="another text"):
        flow.take()


def test_a_text_that_other_weights_begin_anew_fails_though_its_tokens_are_equal() -> None:
    """A restarted text goes on with new weights before it is where its reader is: the log-probabilities
    and the versions that were delivered are not the completion's."""

    def part(token_ids: tuple[int, ...], *spans: tuple[int, int, int], start: int = 0) -> Delta:
        own = itertools.starmap(WeightsSpan, spans)
        return Delta("", token_ids, start=start, weights_spans=tuple(own))

    flow = Flow()
    flow.put(part((0, 1), (3, 0, 2)))
    assert flow.take() == part((0, 1), (3, 0, 2))
    flow.put(part((0, 1, 2), (3, 0, 2), (4, 2, 3)))
    assert flow.take() == part((2,), (4, 2, 3), start=2)
    flow.put(part((1, 2, 3), (3, 1, 2), (4, 2, 4), start=1))
    assert flow.take() == part((3,), (4, 3, 4), start=3)
    flow.put(part((0, 1, 2, 3, 4), (3, 0, 1), (4, 1, 5)))
    with pytest.raises(StreamCut, match="new weights"):
        flow.take()


def test_what_was_not_read_of_other_weights_is_forgotten() -> None:
    flow = Flow()
    flow.put(Delta("ab", (0, 1)))
    flow.restart()
    flow.put(Delta("b", (1,)))
    assert flow.take() == Delta("b", (1,))


# -- how often -----------------------------------------------------------------------------------


class Loop:
    """An event loop that keeps what is to be called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_soon(self, function: Any, *arguments: Any) -> None:
        self.calls.append((function, arguments))

    call_soon_threadsafe = call_soon

    def is_closed(self) -> bool:
        return False

    def go_round(self) -> None:
        calls, self.calls = self.calls, []
        for function, arguments in calls:
            function(*arguments)


@pytest.mark.parametrize("count", [1, 100])
def test_a_loop_gets_deltas_at_intervals_and_after_it_took_the_last_ones(count: int) -> None:
    now, asked = 0.0, 0
    streams = Streams(threading.RLock(), lambda: now)
    loop: Any = Loop()
    buffers = {
        CompletionRequest((1,), Decoding(9), nonce=nonce, streamed=True): Flow(loop)
        for nonce in range(count)
    }
    for request, buffer in buffers.items():
        streams.add(request, buffer)

    def progress(requests: Any) -> list[Delta]:
        nonlocal asked
        asked += 1
        return [Delta("a", (0,))] * len(requests)

    streams.deliver(progress)
    now = 9.0
    streams.deliver(progress)
    assert asked == 1, "the loop has not taken the first ones"
    loop.go_round()
    streams.deliver(progress)
    assert asked == 2
    loop.go_round()
    for part, expected in ((0.99, 2), (0.02, 3)):
        now += part * count * READER_SECONDS
        streams.deliver(progress)
        assert asked == expected
    for request, buffer in buffers.items():
        streams.discard(request, buffer)
    assert not streams.by_loop


# -- threads -------------------------------------------------------------------------------------


def test_a_thread_reads_the_same(lm: AsyncLM) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 2, "stop": ["dd"]}
    stream = lm.stream_sync("ab", **options)
    assert isinstance(stream, SyncStream)
    deltas = list(stream)
    completion = lm.generate_sync("ab", **options)
    assert joined(deltas) == (completion.text, completion.token_ids, ())
    assert untimed(stream.completion) == untimed(completion)
    assert deltas[-1].finish_reason == completion.finish_reason


def test_a_thread_leaves(lm: AsyncLM) -> None:
    for _ in lm.stream_sync([0], max_tokens=200, ignore_eos=True):
        break
    with lm.stream_sync([0], max_tokens=200, ignore_eos=True) as stream:
        next(stream)
    with pytest.raises(TimedOut):
        list(lm.stream_sync([0], max_tokens=200, ignore_eos=True, timeout=1e-6))
    with pytest.raises(InvalidRequest):
        lm.stream_sync([0], max_tokens=-1)
    asyncio.run(nothing_left(lm))


async def test_a_stream_may_be_closed_while_another_task_waits_for_it() -> None:
    async with await genrt.aload(MODEL, engine="exact", engine_options=OPTIONS) as lm:
        stream = lm.stream("ab", max_tokens=200, ignore_eos=True)
        read = [await anext(stream)]

        async def reading() -> None:
            read.extend([delta async for delta in stream])

        reader = asyncio.create_task(reading())
        await passes()
        await stream.aclose()
        await reader
        assert stream.completion is None
        assert read[0].token_ids == stream.partial.token_ids[: len(read[0].token_ids)]
        await lm.next_token_logprobs([0])
        assert lm.statistics().batcher.in_flight == 0
