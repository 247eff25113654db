"""How a stream ends before its text does: in time, from any thread, under any lock."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import genrt
import genrt.runtime.ask
from genrt.engines.exact import NGram
from genrt.errors import EngineFailed, InvalidRequest, TimedOut
from genrt.questions.completions import CompletionRequest, Decoding, Delta
from genrt.runtime.ask import Asker
from genrt.runtime.batcher import Waiter
from genrt.runtime.streams import Flow
from tests.inside import thread_of

REQUEST = CompletionRequest((1,), Decoding(9), nonce=1, streamed=True)
FIRST, SECOND = Delta("a", (0,)), Delta("b", (1,), start=1, text_start=1)


class Batcher:
    """Answers with a first delta, and never ends."""

    def __init__(self) -> None:
        self.joined: list[Waiter] = []
        self.left: list[Waiter] = []
        self.is_asked = threading.Event()

    def join(self, waiter: Waiter) -> None:
        waiter.missing = 1
        self.joined.append(waiter)
        self.flow.put(FIRST)
        self.is_asked.set()

    @property
    def flow(self) -> Flow:
        flow = self.joined[-1].flow
        assert isinstance(flow, Flow)
        return flow

    def cancel(self, waiter: Waiter) -> None:
        self.left.append(waiter)

    cancel_soon = cancel


@pytest.fixture
def batcher() -> Batcher:
    return Batcher()


@pytest.fixture
def asker(batcher: Any) -> Asker:
    return Asker(SimpleNamespace(batcher=batcher))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    clock = SimpleNamespace(seconds=0.0)
    clock.monotonic = lambda: clock.seconds
    monkeypatch.setattr(genrt.runtime.ask, "time", clock)
    return clock


def test_a_thread_that_reads_slowly_runs_out_of_time(
    asker: Asker, batcher: Batcher, now: SimpleNamespace
) -> None:
    stream = asker.stream_sync(REQUEST, timeout=1.0)
    assert next(stream) == FIRST
    batcher.flow.put(SECOND)
    now.seconds = 1.0
    with pytest.raises(TimedOut, match="within 1 s"):
        next(stream)
    assert batcher.left == batcher.joined
    assert stream.partial.token_ids == FIRST.token_ids


class EarlyLoop(asyncio.SelectorEventLoop):
    """Has timers that are early, as uvloop's are; counts time as asyncio does."""

    def call_at(  # type: ignore[override]
        self, when: float, *args: Any, **context: Any
    ) -> Any:
        return super().call_at(when - 0.01, *args, **context)


def test_a_timer_may_be_early(asker: Asker, batcher: Batcher) -> None:
    async def read() -> None:
        stream = asker.stream(REQUEST, timeout=0.02)
        assert await anext(stream) == FIRST
        with pytest.raises(TimedOut):
            await asyncio.wait_for(anext(stream), 5)
        assert batcher.left == batcher.joined

    with asyncio.Runner(loop_factory=EarlyLoop) as runner:
        runner.run(read())


async def test_a_task_that_reads_slowly_runs_out_of_time(asker: Asker, batcher: Batcher) -> None:
    stream = asker.stream(REQUEST, timeout=1e-6)

    async def read() -> None:
        for count in range(1, 100_000):  # and something has come whenever it reads
            assert (await anext(stream)).start == count - 1
            batcher.flow.put(Delta("b", (1,), start=count, text_start=count))
            await asyncio.sleep(0)

    with pytest.raises(TimedOut):
        await read()
    assert batcher.left == batcher.joined


def test_a_thread_waits_for_any_time() -> None:
    flow, waited = Flow(), []
    signals: Any = SimpleNamespace(get=lambda timeout: waited.append(timeout))
    flow._signals = signals
    for seconds in (None, 1.0, 1e12):
        flow.wait_sync(seconds)
    assert waited == [None, 1.0, threading.TIMEOUT_MAX]


def test_another_thread_closes_a_stream_that_is_being_read(asker: Asker, batcher: Batcher) -> None:
    stream = asker.stream_sync(REQUEST)
    found: list[Delta] = []
    reader = threading.Thread(target=lambda: found.extend(stream), daemon=True)
    reader.start()
    assert batcher.is_asked.wait(5)
    stream.close()
    reader.join(5)
    stream.close()
    assert not reader.is_alive()
    assert batcher.left == batcher.joined
    assert stream.completion is None
    assert next(stream, None) is None


async def test_a_read_that_is_cancelled_does_not_look_like_the_texts_end(
    asker: Asker, batcher: Batcher
) -> None:
    stream = asker.stream(REQUEST)
    read = asyncio.create_task(anext(stream))
    read.cancel()  # before it has begun, which loses nothing
    await asyncio.wait([read])
    assert await anext(stream) == FIRST
    read = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="already running"):
        await anext(stream)
    assert batcher.left == []
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert batcher.left == batcher.joined
    for _ in range(2):
        with pytest.raises(
            InvalidRequest, match=r"withdrawn by the CancelledError.*asyncio\.wait\("
        ):
            await anext(stream)
    assert stream.partial.token_ids == FIRST.token_ids
    await stream.aclose()


def test_nor_does_one_that_is_interrupted(asker: Asker, batcher: Batcher) -> None:
    stream = asker.stream_sync(REQUEST)
    assert next(stream) == FIRST
    interrupted: Any = SimpleNamespace(get=lambda timeout: signal.raise_signal(signal.SIGINT))
    batcher.flow._signals = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert batcher.left == batcher.joined
    with pytest.raises(InvalidRequest, match="withdrawn by the KeyboardInterrupt"):
        list(stream)


async def test_an_error_that_ends_a_stream_is_raised_again(
    asker: Asker, batcher: Batcher, now: SimpleNamespace
) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        asker.stream_sync(REQUEST, timeout=-1.0)
    blocking = asker.stream_sync(REQUEST, timeout=1.0)
    assert next(blocking) == FIRST
    now.seconds = 1.0
    found = []
    for _ in range(2):
        with pytest.raises(TimedOut, match="within 1 s") as raised:
            next(blocking)
        found.append(raised.value)
    assert found[0] is not found[1]
    stream = asker.stream(REQUEST)
    assert await anext(stream) == FIRST
    batcher.joined[-1].future.set_exception(EngineFailed("scripted"))
    for _ in range(2):
        with pytest.raises(EngineFailed, match="scripted"):
            await anext(stream)


async def test_a_stream_that_its_reader_has_closed_has_ended(
    asker: Asker, batcher: Batcher
) -> None:
    stream = asker.stream(REQUEST)
    assert await anext(stream) == FIRST
    await stream.aclose()
    assert await anext(stream, None) is None
    assert batcher.left == batcher.joined


def test_a_stream_is_closed_whatever_locks_are_held() -> None:
    """As by the garbage collector, in a thread that holds the cache's lock, for which another one waits
    under the batcher's."""
    model = NGram.random([b"a", b"b"], order=1, seed=3)
    with genrt.load(model, engine="exact", engine_options={"max_model_len": 256}) as lm:
        stream = lm.stream_sync([0], max_tokens=200)
        next(stream)
        closing = threading.Thread(target=stream.close, daemon=True)
        with thread_of(lm).batcher.lock:
            closing.start()
            closing.join(5)
            is_stuck = closing.is_alive()
        assert not is_stuck
        for _ in range(6):
            lm.next_token_logprobs_sync([0])
            lm.clear_cache()
        assert lm.statistics().batcher.in_flight == 0
        assert not thread_of(lm).batcher._cancelled
