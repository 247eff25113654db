"""Binds questions to adapters by name, and awaits them, or blocks for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
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
    Mapping,
    Sequence,
)
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

from genrt.errors import GenrtError, TimedOut, UnknownAdapter
from genrt.numbers import check_timeout, named
from genrt.questions.arguments import Adapter
from genrt.questions.completions import CompletionRequest, Delta, NativeRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.batcher import Batcher, Waiter
from genrt.runtime.concurrency import twin_of
from genrt.runtime.streams import Flow, NativeFlow, Stream, StreamBuffer, SyncStream

MAX_UNAWAITED = 64
"""The maximum requests in a row without waiting; after these a task lets others run."""

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


class HasBatcher(Protocol):
    """The part of an ``EngineThread`` that an ``Asker`` uses."""

    @property
    def batcher(self) -> Batcher:
        """The batcher. Raises Closed if there is no thread."""


class Asker:
    """Asks a batcher. A question whose adapter another thread replaces meanwhile is asked again with the
    new one.

    Args:
        source: has the batcher.

    Attributes:
        adapters: the present adapters by name, including adapters that a restart has lost.
        lost: the lost ones, with their errors.
    """

    def __init__(
        self,
        source: HasBatcher,
        adapters: dict[str, Adapter] | None = None,
        lost: Mapping[Adapter, GenrtError] = MappingProxyType({}),
    ) -> None:
        self._source = source
        self.adapters = {} if adapters is None else adapters
        self.lost = lost
        self._unawaited = Unawaited()

    def bound(self, name: str | None) -> Adapter | None:
        """Return the adapter of a name; ``None`` stands for the base model. Raises UnknownAdapter if it
        is not loaded, or a restart has lost it."""
        if name is None:
            return None
        adapter = self.adapters.get(name) if isinstance(name, str) else None
        if adapter is None:
            loaded = ", ".join(map(repr, self.loaded())) or "none"
            raise UnknownAdapter(
                f"no adapter is named {named(name)} (loaded: {loaded}); load it with add_adapter first"
            )
        if adapter in self.lost:
            raise self.lost[adapter].fresh()
        return adapter

    def loaded(self) -> tuple[str, ...]:
        """Return the names of usable adapters."""
        return tuple(name for name, each in [*self.adapters.items()] if each not in self.lost)

    def _rebound(self, requests: Sequence[Request], error: UnknownAdapter) -> list[Request]:
        """Return requests for the adapter that has their adapter's name now. Raises UnknownAdapter:
        ``error`` if it is the same adapter."""
        before = requests[0].adapter
        adapter = self.bound(before.name) if before is not None else None
        if adapter == before:
            raise error
        return [request.bound_to(adapter) for request in requests]

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """Return the results in order, each in its own storage; requests may repeat. With ``stacked``,
        the only result is the stack of at least one row. Cancelling the await withdraws only this caller.

        Raises:
            InvalidRequest: the timeout is out of range.
            EngineFailed: the step of one request failed; the question's other requests are withdrawn.
            TimedOut: there was no answer within ``timeout`` seconds; the question is withdrawn.
            Closed: the batcher is closed, also while this waits.
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
                        batcher.cancel(waiter)
            except UnknownAdapter as error:
                await unawaited.let_others_run()
                requests, seconds = self._rebound(requests, error), seconds_left(until)
            except GenrtError:
                await unawaited.let_others_run()
                raise
            else:
                if unawaited.count >= MAX_UNAWAITED:  # not before ``join``: the adapter could go
                    await unawaited.let_others_run()
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
                batcher.cancel(waiter)

    def stream(self, request: CompletionRequest, *, timeout: float | None = None) -> Stream:
        """Return the deltas of a completion, which is asked with the first of them; raises then, and
        withdraws, as ``ask``. The timeout is for the whole text."""
        flow = Flow(seconds=check_timeout(timeout))
        return Stream(self._deltas(request, flow), flow, request)

    def stream_sync(
        self, request: CompletionRequest, *, timeout: float | None = None
    ) -> SyncStream:
        """Return the deltas as ``stream`` does, blocking the thread."""
        flow = Flow(seconds=check_timeout(timeout))
        return SyncStream(self._deltas_sync(request, flow), flow, request)

    def native(
        self, request: NativeRequest, flow: NativeFlow
    ) -> AsyncGenerator[tuple[Any, ...], None]:
        """Yield the outputs of a native text, several at once to a slow reader; asks, raises and cancels
        as ``stream``. Ends early once ``flow.leave`` is called."""
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
                        batcher.cancel(waiter)
                    # An error may be on its way to a reader that has left: asyncio would log it.
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
                        batcher.cancel_soon(waiter)

    def _restarted(
        self, requests: Sequence[Request], flow: StreamBuffer[Any], error: UnknownAdapter
    ) -> Sequence[Request]:
        """Return the request for the adapter that has the name now. Raise the error if there is no such
        adapter, or if a part of the text by the old one has been read."""
        if flow.is_begun:
            raise error
        flow.restart()
        return self._rebound(requests, error)


class Unawaited(threading.local):
    """The number of requests in a row that this thread has asked without waiting. A task that the cache
    always answers would never let its loop run, not even to cancel it. One count serves all tasks of a
    thread, because another task runs only when the loop does."""

    count = 0

    async def let_others_run(self) -> None:
        """Let the loop run other tasks after ``MAX_UNAWAITED`` requests."""
        if self.count >= MAX_UNAWAITED:
            self.count = 0
            await asyncio.sleep(0)


async def within(seconds: float | None, answer: Awaitable[T], *, until: float | None = None) -> T:
    """Return the answer, or cancel it and raise TimedOut after so many seconds. If they run already, they
    end at ``until``, by ``time.monotonic``."""
    scope = asyncio.timeout(seconds if until is None else seconds_left(until))
    try:
        async with scope:
            return await answer
    except TimeoutError:
        if scope.expired():
            raise _timed_out(cast("float", seconds)) from None
        raise


async def asked_in_turn(
    ask: Callable[..., Awaitable[list[Result]]],
    questions: Iterable[Sequence[Request]],
    timeout: float | None,
) -> AsyncGenerator[Tensor, None]:
    """Yield the rows of each question, asked when they are wanted: stacked rows, or the only result. The
    timeout is for each question."""
    for requests in questions:
        are_rows = isinstance(requests[0], LogprobsRequest)
        yield cast("Tensor", (await ask(requests, stacked=are_rows, timeout=timeout))[0])


def _timed_out(seconds: float) -> TimedOut:
    return TimedOut(f"no answer within {seconds:g} s; the question was withdrawn")


def seconds_left(until: float | None) -> float | None:
    """Return the seconds until a moment of ``time.monotonic``."""
    return None if until is None else max(0.0, until - time.monotonic())


def blocking_question(
    question: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return the blocking twin of a method that awaits only ``self._ask(…)``. The object also has
    ``_ask_sync``."""

    @twin_of(question, interrupted="An interrupt withdraws it.")
    def twin(lm: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast("T", run_without_loop(question(cast("S", _Blocking(lm)), *args, **kwargs)))

    return twin


def run_without_loop(coroutine: Any) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError(f"{coroutine!r} awaits something besides its answer")


def blocking_stream(
    stream: Callable[Concatenate[S, P], Stream],
) -> Callable[Concatenate[S, P], SyncStream]:
    """Return the blocking twin of a method that returns ``self._stream(…)``."""

    @twin_of(stream, interrupted="An interrupt withdraws it.")
    def twin(lm: S, /, *args: P.args, **kwargs: P.kwargs) -> SyncStream:
        return cast("SyncStream", stream(cast("S", _Blocking(lm)), *args, **kwargs))

    return twin


def blocking_chunks(
    chunks: Callable[Concatenate[S, P], AsyncIterator[T]],
) -> Callable[Concatenate[S, P], Iterator[T]]:
    """Return the blocking twin of a method with an iterator that awaits only ``self._ask(…)``."""

    def taken(values: AsyncIterator[T]) -> Iterator[T]:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield run_without_loop(anext(values))

    @twin_of(chunks, interrupted="An interrupt withdraws the present question.")
    def twin(lm: S, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return taken(chunks(cast("S", _Blocking(lm)), *args, **kwargs))

    return twin


class _Blocking:
    """An AsyncLM or a population as its ``_sync`` twins see it. Its questions block instead of waiting:
    coroutines over it run without an event loop, also inside a running one."""

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

    def _stream(self, *args: Any, **kwargs: Any) -> SyncStream:
        stream: SyncStream = self._lm._stream_sync(*args, **kwargs)
        return stream
