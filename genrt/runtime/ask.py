"""How callers ask: awaiting or blocking, of an adapter that another thread may load anew meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
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
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch import Tensor

from genrt.errors import GenrtError, TimedOut, UnknownAdapter
from genrt.numbers import check_timeout
from genrt.questions.completions import CompletionRequest, Delta, NativeRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.adapter_names import AdapterNames
from genrt.runtime.batcher import Batcher
from genrt.runtime.passages import NativeFlow, Passage
from genrt.runtime.streams import Flow, Stream, SyncStream
from genrt.runtime.waiters import Waiter

__all__ = [
    "MOST_AT_ONCE",
    "Asker",
    "blocking_chunks",
    "blocking_question",
    "blocking_stream",
    "twin_of",
    "within",
]

MOST_AT_ONCE = 64
"""After so many requests in a row that nobody waited for, the loop goes round once."""

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Asker:
    """Asks a batcher.

    Args:
        batcher: returns it; raises Closed where there is none.
        adapters: the names that adapters have now, for questions bound to one that is loaded anew.
    """

    def __init__(
        self, batcher: Callable[[], Batcher], adapters: AdapterNames | None = None
    ) -> None:
        self._batcher = batcher
        self._adapters = adapters
        self._at_once = AtOnce()

    def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> Coroutine[Any, Any, list[Result]]:
        """Return the results in order, to be awaited, each in storage of its own; requests may appear
        more than once. With ``stacked``, the only result is the stack of the rows, of which there is at
        least one.

        Cancelling the await withdraws this caller alone. Questions that the cache answers let others run.

        Raises:
            InvalidRequest: the timeout is out of range.
            EngineFailed: the step of one of the requests failed; the question's others are withdrawn.
            TimedOut: there was no answer within ``timeout`` seconds; the question is withdrawn.
            Closed: the batcher is closed, or was while this waited.
        """
        seconds = None if timeout is None else check_timeout(timeout)
        if self._adapters is None or not requests or requests[0].adapter is None:
            return self._ask(requests, stacked, seconds)
        return self._ask_adapter(self._adapters, requests, stacked, seconds)

    async def _ask_adapter(
        self,
        adapters: AdapterNames,
        requests: Sequence[Request],
        stacked: bool,
        seconds: float | None,
    ) -> list[Result]:
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                return await self._ask(requests, stacked, seconds)
            except UnknownAdapter as error:
                requests = adapters.rebound(requests, error)
                seconds = seconds_left(until)

    async def _ask(
        self, requests: Sequence[Request], stacked: bool, seconds: float | None
    ) -> list[Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Result]] = loop.create_future()
        waiter = Waiter(requests, loop, future, stacked, {})
        self._at_once.count += len(requests) or 1
        try:
            batcher = self._batcher()
            try:
                if (results := batcher.join(waiter)) is None:
                    self._at_once.count = 0
                    return await (future if seconds is None else within(seconds, future))
            finally:
                if waiter.missing and not loop.is_closed():
                    batcher.leave(waiter)
        except GenrtError:
            await self._at_once.go_round()
            raise
        await self._at_once.go_round()  # not before it is asked: what it is bound to could go
        return results

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
                if self._adapters is None:
                    raise
                requests = self._adapters.rebound(requests, error)
                seconds = seconds_left(until)

    def _join_sync(
        self, requests: Sequence[Request], stacked: bool, seconds: float | None
    ) -> list[Result]:
        future: concurrent.futures.Future[list[Result]] = concurrent.futures.Future()
        waiter = Waiter(requests, None, future, stacked, {})
        batcher = self._batcher()
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

    async def _deltas(self, request: Request, flow: Passage[T]) -> AsyncGenerator[T, None]:
        loop = asyncio.get_running_loop()
        requests: Sequence[Request] = (request,)
        with flow.under_way(loop):
            while not flow.is_over:
                future: asyncio.Future[list[Result]] = loop.create_future()
                future.add_done_callback(flow.wake)
                waiter = Waiter(requests, loop, future, False, {}, flow=flow)
                batcher = self._batcher()
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
                    requests = self._anew(requests, flow, error)
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
                waiter = Waiter(requests, None, future, False, {}, flow=flow)
                batcher = self._batcher()
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
                    requests = self._anew(requests, flow, error)
                finally:
                    if waiter.missing:
                        batcher.leave_soon(waiter)

    def _anew(
        self, requests: Sequence[Request], flow: Passage[Any], error: UnknownAdapter
    ) -> Sequence[Request]:
        """Return the request for the adapter that was loaded anew meanwhile. Raise the error if there is
        none, or if the text has been begun with the old one's weights."""
        if self._adapters is None or flow.is_begun:
            raise error
        flow.begin_anew()
        return self._adapters.rebound(requests, error)


class AtOnce(threading.local):
    """How many requests in a row this thread has asked without waiting for one: a task that the cache
    always answers would never let its loop run anything else, not even what is to cancel it. One count
    serves all tasks of the thread, as another task runs only once the loop has gone on."""

    count = 0

    async def go_round(self) -> None:
        """Let the loop run something else, if it is time."""
        if self.count >= MOST_AT_ONCE:
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


def twin_of(method: Callable[..., Any], *, interrupted: str) -> Callable[[F], F]:
    """Return a decorator that names a function as the ``_sync`` twin of this method; its docstring is the
    method's, after what an interrupt does."""

    def named(twin: F) -> F:
        functools.update_wrapper(twin, method)
        twin.__name__, twin.__qualname__ = f"{method.__name__}_sync", f"{method.__qualname__}_sync"
        twin.__doc__ = f"``{method.__name__}``, blocking. {interrupted}\n\n{method.__doc__}"
        return twin

    return named


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
