"""Streams: the deltas are the completion, whoever reads them, however slowly; nothing is left of a stream
that nobody reads any more."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Finished
from genrt.errors import (
    Closed,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    TimedOut,
    UnknownAdapter,
)
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion, CompletionRequest, Decoding, Delta
from genrt.runtime.streams import READER_SECONDS, Flow, Stream, Streams, SyncStream
from tests.inside import engine_of, in_progress, thread_of
from tests.runtime.test_stream_ends import Loop
from tests.scripted import passes

EOS = 4
TEXTS = [b"a", b"b", b" c", b"d", b"<end>", "é".encode()[:1], "é".encode()[1:]]
MODEL = NGram.random(TEXTS, order=1, seed=3, eos_token_id=EOS)
OPTIONS: dict[str, Any] = {"max_model_len": 256}


class Engine(ExactEngine):
    """Raises what it is told to, in steps that it is told."""

    faults: dict[int, Exception]
    count = 0

    def step(self) -> list[Finished]:
        self.count += 1
        fault = type(self).faults.pop(self.count, None)
        if fault is not None:
            self.cancel([*self._in_progress])
            raise fault
        return super().step()


def loaded(*, restart: Literal["auto"] | None = None, **faults: Exception) -> AsyncLM:
    """A runtime whose engine raises these faults: ``step_3=…`` in its third step."""
    Engine.faults = {int(name.removeprefix("step_")): fault for name, fault in faults.items()}
    return genrt.load(engine=lambda: Engine(MODEL, **OPTIONS), restart=restart)


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


# -- leaving -------------------------------------------------------------------------------------


async def leave_by_break(lm: AsyncLM) -> None:
    async for _ in lm.stream([0], max_tokens=200, ignore_eos=True):
        break


async def leave_by_context(lm: AsyncLM) -> None:
    async with lm.stream([0], max_tokens=200, ignore_eos=True) as stream:
        await anext(stream)


async def leave_by_error(lm: AsyncLM) -> None:
    async def failing() -> None:
        async with lm.stream([0], max_tokens=200, ignore_eos=True) as stream:
            async for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await failing()


async def leave_by_cancellation(lm: AsyncLM) -> None:
    task = asyncio.create_task(read(lm.stream([0], max_tokens=200, ignore_eos=True)))
    await lm.next_token_logprobs([3, 3, 3])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(lm: AsyncLM) -> None:
    stream = lm.stream([0], max_tokens=200, ignore_eos=True, timeout=1e-6)
    with pytest.raises(TimedOut, match="withdrawn"):
        await read(stream)


async def leave_unread(lm: AsyncLM) -> None:
    stream = lm.stream([0], max_tokens=200, ignore_eos=True)
    del stream


async def leave_by_collection(lm: AsyncLM) -> None:
    stream = lm.stream([0], max_tokens=200, ignore_eos=True)
    circle: list[Any] = [stream]
    circle.append(circle)
    await anext(stream)
    del stream, circle
    gc.collect()
    await asyncio.sleep(0)


WAYS = [
    leave_by_break,
    leave_by_context,
    leave_by_error,
    leave_by_cancellation,
    leave_by_timeout,
    leave_unread,
    leave_by_collection,
]


@pytest.mark.parametrize("leave", WAYS)
async def test_nothing_is_left_of_a_stream_that_nobody_reads(lm: AsyncLM, leave: Any) -> None:
    before = lm.statistics().batcher
    await leave(lm)
    await nothing_left(lm)
    after = lm.statistics().batcher
    assert after.cancelled - before.cancelled == (leave is not leave_unread)


def test_a_loop_that_closes_takes_its_streams_with_it(lm: AsyncLM) -> None:
    loop = asyncio.new_event_loop()
    stream = lm.stream([0], max_tokens=200, ignore_eos=True)
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(nothing_left(lm))
    del stream


async def test_a_thousand_streams_of_which_a_third_are_left_early() -> None:
    async with await genrt.aload(MODEL, engine="exact", engine_options=OPTIONS) as lm:
        tokens = 0

        async def reader(number: int) -> None:
            nonlocal tokens
            async for delta in lm.stream([number % 4], max_tokens=3, ignore_eos=True):
                tokens += len(delta.token_ids)
                if number % 3 == 0:
                    return

        await asyncio.gather(*map(reader, range(1_000)))
        await nothing_left(lm)
        counted = lm.statistics().batcher
        # One that is left in the step that ends it counts as both.
        assert counted.answered + counted.cancelled >= counted.questions - counted.cached
        assert tokens >= 3 * 666
        assert len(asyncio.all_tasks()) == 1


# -- what happens on the way ---------------------------------------------------------------------


async def test_a_runtime_that_closes_ends_its_streams() -> None:
    lm = loaded()
    stream = lm.stream([0], max_tokens=200, ignore_eos=True)
    await anext(stream)
    lm.close()
    with pytest.raises(Closed):
        await read(stream)
    assert stream.completion is None
    assert stream.partial.token_ids
    with pytest.raises(Closed):
        await anext(lm.stream([0]))


@pytest.mark.parametrize("fault", [OutOfMemory("scripted"), EngineDied("scripted")])
async def test_a_text_that_is_begun_anew_goes_on_where_its_reader_was(fault: Exception) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "logprobs": 0}
    with loaded(restart="auto", step_9=fault) as lm:
        streams = [lm.stream([0], seed=seed, **options) for seed in range(3)]
        found = await asyncio.gather(*map(read, streams))
        alone = [await lm.generate([0], seed=seed, **options) for seed in range(3)]
        for deltas, completion in zip(found, alone, strict=True):
            assert joined(deltas) == (completion.text, completion.token_ids, completion.logprobs)
        assert not Engine.faults
        assert lm.statistics().batcher.retried == 3
        await nothing_left(lm)


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


def test_what_was_not_read_of_other_weights_is_forgotten() -> None:
    flow = Flow()
    flow.put(Delta("ab", (0, 1)))
    flow.restart()
    flow.put(Delta("b", (1,)))
    assert flow.take() == Delta("b", (1,))


# -- how often -----------------------------------------------------------------------------------


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
