"""How callers ask: awaiting or blocking, of an adapter that another thread may load anew meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

from genrt.errors import GenrtError, TimedOut, UnknownAdapter
from genrt.numbers import check_timeout
from genrt.questions.completions import CompletionRequest, Delta, NativeRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.adapters import AdapterNames
from genrt.runtime.batcher import Batcher, Waiter
from genrt.runtime.concurrency import twin_of
from genrt.runtime.streams import Flow, NativeFlow, Stream, StreamBuffer, SyncStream

__all__ = [
    "MAX_UNAWAITED",
    "Asker",
    "blocking_chunks",
    "blocking_question",
    "blocking_stream",
    "within",
]

MAX_UNAWAITED = 64
"""After so many requests in a row without waiting, a task lets others run."""

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


class HasBatcher(Protocol):
    """Has a batcher, as ``EngineThread`` does."""

    @property
    def batcher(self) -> Batcher:
        """The batcher. Raises Closed if there is none."""


class Asker:
    """Asks a batcher.

    Args:
        source: has the batcher.
        adapters: the present adapters by name, for questions bound to one that was loaded over.
    """

    def __init__(self, source: HasBatcher, adapters: AdapterNames | None = None) -> None:
        self._source = source
        self._adapters = adapters
        self._unawaited = Unawaited()

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Return the results in order, each in storage of its own; requests may appear more than once.
        With ``stacked``, the only result is the stack of the rows, of which there is at least one.

        Cancelling the await withdraws this caller alone. Questions that the cache answers let other tasks
        run from time to time.

        Raises:
            InvalidRequest: the timeout is out of range.
            EngineFailed: the step of one of the requests failed; the question's others are withdrawn.
            TimedOut: there was no answer within ``timeout`` seconds; the question is withdrawn.
            Closed: the batcher is closed, or was while this waited.
        """
        seconds = None if timeout is None else check_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        loop, unawaited = asyncio.get_running_loop(), self._unawaited
        while True:
            unawaited.count += len(requests) or 1
            future: asyncio.Future[list[Result]] = loop.create_future()
            waiter = Waiter(requests, loop, future, stacked)
            try:
                batcher = self._source.batcher
                try:
                    if (results := batcher.join(waiter)) is None:
                        unawaited.count = 0
                        return await (future if seconds is None else within(seconds, future))
                finally:
                    if waiter.missing and not loop.is_closed():
                        batcher.leave(waiter)
            except UnknownAdapter as error:
                await unawaited.let_others_run()
                requests, seconds = self._rebound(requests, error), seconds_left(until)
            except GenrtError:
                await unawaited.let_others_run()
                raise
            else:
                if unawaited.count >= MAX_UNAWAITED:  # after ``join``: its adapter could go
                    await unawaited.let_others_run()
                return results

    def _rebound(self, requests: Sequence[Request], error: UnknownAdapter) -> Sequence[Request]:
        """Return the requests for the adapter that was loaded under the name meanwhile; raise the error
        if there is none."""
        if self._adapters is None:
            raise error
        return self._adapters.rebound(requests, error)

    def ask_sync(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Ask as ``ask`` does, blocking the thread; an interrupt withdraws the question."""
        seconds = None if timeout is None else check_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                return self._join_sync(requests, stacked, seconds)
            except UnknownAdapter as error:
                requests, seconds = self._rebound(requests, error), seconds_left(until)

    def _join_sync(
        self, requests: Sequence[Request], stacked: bool, seconds: float | None
    ) -> list[Result]:
        future: concurrent.futures.Future[list[Result]] = concurrent.futures.Future()
        waiter = Waiter(requests, None, future, stacked)
        batcher = self._source.batcher
        longest = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        try:
            results = batcher.join(waiter)
            return future.result(longest) if results is None else results
        except concurrent.futures.TimeoutError:
            raise _timed_out(cast("float", seconds)) from None
        finally:
            if waiter.missing:
                batcher.leave(waiter)

    def chunks(
        self, questions: Iterable[Sequence[Request]], *, timeout: float | None = None
    ) -> AsyncGenerator[Tensor, None]:
        """Return the rows of questions, one after the other, each asked when it is wanted: rows that are
        stacked, or one request for all of them. The timeout is for each."""
        check_timeout(timeout)
        return self._asked_in_turn(questions, timeout)

    async def _asked_in_turn(
        self, questions: Iterable[Sequence[Request]], timeout: float | None
    ) -> AsyncGenerator[Tensor, None]:
        for requests in questions:
            yield (await self.ask(requests, stacked=_are_rows(requests), timeout=timeout))[0]

    def chunks_sync(
        self, questions: Iterable[Sequence[Request]], *, timeout: float | None = None
    ) -> Iterator[Tensor]:
        """Return the rows as ``chunks`` does, for a thread that blocks."""
        check_timeout(timeout)
        return (
            self.ask_sync(requests, stacked=_are_rows(requests), timeout=timeout)[0]
            for requests in questions
        )

    def stream(self, request: CompletionRequest, *, timeout: float | None = None) -> Stream:
        """Return the deltas of a completion that is streamed, to be asked with the first of them; raises
        then, and withdraws, as ``ask``. The timeout is for all of it."""
        flow = Flow(seconds=check_timeout(timeout))
        return Stream(self._deltas(request, flow), flow, request)

    def stream_sync(
        self, request: CompletionRequest, *, timeout: float | None = None
    ) -> SyncStream:
        """Return the deltas as ``stream`` does, for a thread that blocks."""
        flow = Flow(seconds=check_timeout(timeout))
        return SyncStream(self._deltas_sync(request, flow), flow, request)

    def native(
        self, request: NativeRequest, flow: NativeFlow
    ) -> AsyncGenerator[tuple[Any, ...], None]:
        """Yield the outputs of a native text, several where they came faster than they were read; asks,
        raises and withdraws as ``stream``. It also ends, without the rest, when the flow is left."""
        return self._deltas(request, flow)

    async def _deltas(self, request: Request, flow: StreamBuffer[T]) -> AsyncGenerator[T, None]:
        loop = asyncio.get_running_loop()
        requests: Sequence[Request] = (request,)
        with flow.under_way(loop):
            while not flow.is_over:
                future: asyncio.Future[list[Result]] = loop.create_future()
                future.add_done_callback(flow.wake)
                waiter = Waiter(requests, loop, future, flow=flow)
                batcher = self._source.batcher
                try:
                    batcher.join(waiter)
                    while not future.done():
                        if flow.is_left:
                            return
                        if flow.is_late:
                            raise _timed_out(cast("float", flow.seconds))
                        if (delta := flow.take()) is not None:
                            yield delta
                        else:
                            await flow.wait()
                    yield flow.end(*future.result())
                except UnknownAdapter as error:
                    requests = self._restarted(requests, flow, error)
                finally:
                    if waiter.missing and not loop.is_closed():
                        batcher.leave(waiter)
                    # An answer may be on its way to a reader that has left: as an error that nobody
                    # reads, asyncio would complain of it.
                    future.remove_done_callback(flow.wake)
                    if not future.cancel() and not future.cancelled():
                        future.exception()

    def _deltas_sync(self, request: Request, flow: Flow) -> Generator[Delta, None, None]:
        until = None if flow.seconds is None else time.monotonic() + flow.seconds
        requests: Sequence[Request] = (request,)
        with flow.under_way():
            while not flow.is_over:
                future: concurrent.futures.Future[list[Result]] = concurrent.futures.Future()
                future.add_done_callback(flow.wake)
                waiter = Waiter(requests, None, future, flow=flow)
                batcher = self._source.batcher
                try:
                    batcher.join(waiter)
                    while not future.done():
                        if flow.is_left:
                            return
                        if (left := seconds_left(until)) == 0.0:
                            raise _timed_out(cast("float", flow.seconds))
                        if (delta := flow.take()) is not None:
                            yield delta
                        else:
                            flow.wait_sync(left)
                    yield flow.end(*future.result())
                except UnknownAdapter as error:
                    requests = self._restarted(requests, flow, error)
                finally:
                    if waiter.missing:
                        batcher.leave_soon(waiter)

    def _restarted(
        self, requests: Sequence[Request], flow: StreamBuffer[Any], error: UnknownAdapter
    ) -> Sequence[Request]:
        """Return the request for the adapter that was loaded anew meanwhile. Raise the error if there is
        none, or if the text has been begun with the old one's weights."""
        if flow.is_begun:
            raise error
        flow.restart()
        return self._rebound(requests, error)


class Unawaited(threading.local):
    """How many requests in a row this thread has asked without waiting: a task that the cache always
    answers would never let its loop run, not even to cancel it. One count serves all tasks of a thread:
    another task runs only once the loop has gone on."""

    count = 0

    async def let_others_run(self) -> None:
        """Let the loop run other tasks, if it is time."""
        if self.count >= MAX_UNAWAITED:
            self.count = 0
            await asyncio.sleep(0)


async def within(seconds: float | None, answer: Awaitable[T], *, until: float | None = None) -> T:
    """Return the answer if it comes in time, and cancel it otherwise. Seconds that have begun already end
    at ``until``, by ``time.monotonic``.

    Raises:
        TimedOut: it did not.
    """
    scope = asyncio.timeout(seconds if until is None else seconds_left(until))
    try:
        async with scope:
            return await answer
    except TimeoutError:
        if scope.expired():
            raise _timed_out(cast("float", seconds)) from None
        raise


def _are_rows(requests: Sequence[Request]) -> bool:
    return isinstance(requests[0], LogprobsRequest)


def _timed_out(seconds: float) -> TimedOut:
    """Return the error that says that no answer came within these seconds."""
    return TimedOut(f"no answer within {seconds:g} s; the question was withdrawn")


def seconds_left(until: float | None) -> float | None:
    """Return how many seconds are left, if there is an end to them."""
    return None if until is None else max(0.0, until - time.monotonic())


def blocking_question(
    question: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return the twin of a question that blocks its thread. The question's method awaits ``self._ask(…)``
    and nothing else; its object has that, and ``_ask_sync``."""

    @twin_of(question, interrupted="An interrupt withdraws it.")
    def twin(lm: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        asked = question(cast("S", _Blocking(lm)), *args, **kwargs)
        try:
            asked.send(None)
        except StopIteration as end:
            return cast("T", end.value)
        raise RuntimeError(f"{question.__name__} awaits something besides its answer")

    return twin


def blocking_stream(
    stream: Callable[Concatenate[S, P], Stream],
) -> Callable[Concatenate[S, P], SyncStream]:
    """Return the twin of a method that returns ``self._stream(…)``: its stream blocks its thread."""

    @twin_of(stream, interrupted="An interrupt withdraws it.")
    def twin(lm: S, /, *args: P.args, **kwargs: P.kwargs) -> SyncStream:
        return cast("SyncStream", stream(cast("S", _Blocking(lm)), *args, **kwargs))

    return twin


def blocking_chunks(
    chunks: Callable[Concatenate[S, P], AsyncIterator[T]],
) -> Callable[Concatenate[S, P], Iterator[T]]:
    """Return the twin of a method that returns ``self._chunks(…)``: its iterator blocks its thread."""

    @twin_of(chunks, interrupted="An interrupt withdraws the question that is asked.")
    def twin(lm: S, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return cast("Iterator[T]", chunks(cast("S", _Blocking(lm)), *args, **kwargs))

    return twin


class _Blocking:
    """An AsyncLM, or a population, as its ``_sync`` twins see it: what they await is answered already, so
    no event loop is needed, and a running one is not entered."""

    is_blocking = True
    _lm: Any

    def __init__(self, lm: Any) -> None:
        object.__setattr__(self, "_lm", lm)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._lm, name, value)

    async def _ask(self, *args: Any, **kwargs: Any) -> list[Result]:
        answer: list[Result] = self._lm._ask_sync(*args, **kwargs)
        return answer

    def _chunks(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        chunks: Iterator[Tensor] = self._lm._chunks_sync(*args, **kwargs)
        return chunks

    def _stream(self, *args: Any, **kwargs: Any) -> SyncStream:
        stream: SyncStream = self._lm._stream_sync(*args, **kwargs)
        return stream
