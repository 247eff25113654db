"""Streams: the deltas of texts, from the engine's thread to their readers while the texts are drawn.

After a step the engine's thread asks the engine for deltas, and hands those of one event loop over in one
call. A loop with n readers gets deltas every n times ``READER_SECONDS`` at most, several tokens at once,
and only after it has taken the last ones: the engine never waits for a reader.

Rules:
    The last delta comes with the answer to the question, which a stream awaits as any other caller.
    After a restart, or running out of memory, an engine draws the same text again from its beginning.
    Tokens already read are skipped; a text that differs from them fails.
    A stream that is left withdraws its question. If the garbage collector ends it, that may happen in any
    thread, so ``Batcher.leave_soon`` takes no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

from genrt.errors import GenrtError, InvalidRequest, StreamCut
from genrt.questions.completions import Completion, CompletionRequest, Delta, Streamed, Told

__all__ = [
    "READER_SECONDS",
    "Flow",
    "NativeFlow",
    "Stream",
    "StreamBuffer",
    "Streams",
    "SyncStream",
]

T = TypeVar("T")

Outputs: TypeAlias = tuple[Any, ...]

READER_SECONDS = 2.5e-4
"""The interval between two deliveries to a loop, for each reader that gets something. Among many readers,
a delivery takes a loop 10 us of CPU time each, 4 % of this; meanwhile the engine's thread waits for
Python's lock."""


class StreamBuffer(ABC, Generic[T]):
    """One stream on its way from the engine thread to its reader, part by part.

    Args:
        loop: the reader's event loop; ``None`` for one that blocks a thread.
        seconds: how long the text may take, if there is an end to that.

    Attributes:
        error: why the text was not read to its end, unless its reader left.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, seconds: float | None = None
    ) -> None:
        self.loop = loop
        self.seconds = seconds
        self.error: GenrtError | None = None
        self.weights_version = 0  # of the text, since it was asked for
        self.is_told = False  # written by the engine thread, once it gives the reader anything
        self.is_left = self.is_late = False
        self._came: deque[T] = deque()  # put by one thread, taken by another
        self._woken: asyncio.Future[None] | None = None
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """True once something of the text has been read."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True once all of it has."""

    @abstractmethod
    def take(self) -> T | None:
        """Return all that has come since the last call, if anything has.

        Raises:
            StreamCut: the text was begun anew, and differs from what was read.
        """

    @abstractmethod
    def end(self, result: Any) -> T:
        """Return what of the result has not been read; raises as ``take``."""

    def put(self, part: T) -> None:
        """Have the reader take this; called on its loop, or by the engine thread for one without."""
        self._came.append(part)
        self.wake()

    def wake(self, _: object = None) -> None:
        """End the reader's present wait, or its next."""
        if self.loop is None:
            self._signals.put(None)
        elif self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def leave(self) -> None:
        """Have the reader's present wait be its last."""
        self.is_left = True
        if self.loop is None or not self.loop.is_closed():
            self.wake()

    def time_out(self) -> None:
        """Tell the reader that its time is over. Called on its loop, which need not agree: uvloop's
        timers are early by up to a millisecond."""
        self.is_late = True
        self.wake()

    async def wait(self) -> None:
        """Wait until something has come, or the question has ended."""
        if not self._came and self.loop is not None:
            self._woken = self.loop.create_future()
            await self._woken

    def wait_sync(self, seconds: float | None) -> None:
        """Block as ``wait`` does, at most so long."""
        longest = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        with contextlib.suppress(queue.Empty):
            self._signals.get(timeout=longest)

    @contextlib.contextmanager
    def under_way(self, loop: asyncio.AbstractEventLoop | None = None) -> Iterator[None]:
        """Read on this loop, or blocking, in the time there is; note an error that ends the reading."""
        self.loop = loop
        timer = None
        if loop is not None and self.seconds is not None:
            timer = loop.call_later(self.seconds, self.time_out)
        try:
            yield
        except GeneratorExit:  # closed, or collected
            raise
        except BaseException as error:
            self.error = error.fresh() if isinstance(error, GenrtError) else _withdrawn(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def check(self) -> None:
        """Raise the error that ended the reading, if one did."""
        if self.error is not None:
            raise self.error.fresh() from None

    def restart(self) -> None:
        """Forget what has come and was not read: it is of another text, by other weights."""
        self._came.clear()


class NativeFlow(StreamBuffer[Outputs]):
    """The outputs of a native text, on their way to its reader. The engine leaves out what it has told
    before."""

    def __init__(self) -> None:
        super().__init__()
        self._is_begun = self._is_over = False

    @property
    def is_begun(self) -> bool:
        return self._is_begun

    @property
    def is_over(self) -> bool:
        return self._is_over

    def take(self) -> Outputs | None:
        outputs: list[Any] = []
        while self._came:
            outputs += self._came.popleft()
        self._is_begun = self._is_begun or bool(outputs)
        return tuple(outputs) or None

    def end(self, result: Outputs) -> Outputs:
        self._is_over = True
        return (*(self.take() or ()), *result)


class Flow(StreamBuffer[Delta]):
    """The deltas of a completion, on their way to its reader, and what they amount to."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, seconds: float | None = None
    ) -> None:
        super().__init__(loop, seconds=seconds)
        self.token_ids: list[int] = []
        self.text = self.reasoning = ""
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.completion: Completion | None = None

    @property
    def is_begun(self) -> bool:
        return bool(self.token_ids)

    @property
    def is_over(self) -> bool:
        return self.completion is not None

    def take(self) -> Delta | None:
        """Return all that has come since the last call, if anything has, as one delta; raises as
        ``StreamBuffer.take``."""
        before = self._so_far()
        while self._came:
            self._add(self._came.popleft())
        return None if before == self._so_far() else self._since(*before)

    def end(self, result: Any) -> Delta:
        """Return what of the completion has not been read, as the last delta; raises as ``take``."""
        before, completion = self._so_far(), cast("Completion", result)
        if not completion.text.startswith(self.text):
            raise _differs()
        self._add(
            Delta(
                completion.text,
                completion.token_ids,
                completion.logprobs,
                completion.top_logprobs,
                reasoning=completion.reasoning,
            )
        )
        self.completion = completion
        return replace(
            self._since(*before),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _add(self, delta: Delta) -> None:
        """Add what is not known yet: of a text that was begun anew, the beginning is."""
        known = len(self.token_ids) - delta.start
        if [*delta.token_ids[:known]] != self.token_ids[delta.start :][: len(delta.token_ids)]:
            raise _differs()
        self.token_ids += delta.token_ids[known:]
        self.logprobs += delta.logprobs[known:]
        self.top_logprobs += delta.top_logprobs[known:]
        self.text += delta.text[max(0, len(self.text) - delta.text_start) :]
        self.reasoning += delta.reasoning[max(0, len(self.reasoning) - delta.reasoning_start) :]

    def _so_far(self) -> tuple[int, int, int]:
        """Return how many tokens, and characters of text and reasoning, are there."""
        return len(self.token_ids), len(self.text), len(self.reasoning)

    def _since(self, start: int, text_start: int, reasoning_start: int) -> Delta:
        return Delta(
            self.text[text_start:],
            tuple(self.token_ids[start:]),
            tuple(self.logprobs[start:]),
            tuple(map(dict, self.top_logprobs[start:])),
            start,
            text_start,
            self.reasoning[reasoning_start:],
            reasoning_start,
        )


def _differs() -> GenrtError:
    return StreamCut(
        "the engine began this text anew, and drew another one than the stream had brought so far: ask "
        "again"
    )


class _Reading:
    """A text that is being read, with what has come of it."""

    def __init__(self, flow: Flow, request: CompletionRequest) -> None:
        self._flow = flow
        self._request = request
        self._began = time.perf_counter()

    @property
    def completion(self) -> Completion | None:
        """The whole completion, once the last delta has been read."""
        return self._flow.completion

    @property
    def partial(self) -> Completion:
        """The text read so far, as a completion: with ``finish_reason="abort"`` until its end."""
        flow = self._flow
        if flow.completion is not None:
            return flow.completion
        return Completion(
            text=flow.text,
            token_ids=tuple(flow.token_ids),
            prompt_token_ids=self._request.token_ids,
            logprobs=tuple(flow.logprobs),
            top_logprobs=tuple(map(dict, flow.top_logprobs)),
            finish_reason="abort",
            stop_reason=None,
            seconds=time.perf_counter() - self._began,
            seconds_to_first_token=0.0,
            reasoning=flow.reasoning,
            weights_version=flow.weights_version,
        )

    def __repr__(self) -> str:
        state = "ended" if self._flow.completion is not None else "open"
        return f"{type(self).__name__}({state}, {len(self._flow.token_ids)} tokens read)"


class Stream(_Reading):
    """The deltas of one completion, as they are drawn: an asynchronous iterator, and a context manager.

    The question is asked with the first ``anext``. Leaving the context, or cancelling the await,
    withdraws it: the engine's slot is free at its next step. Leaving a loop over it does too, unless the
    stream has a name: it can be read on, until it is closed or nothing refers to it any more.

    A stream that an error has ended raises it again when it is read on; one that was cancelled raises
    InvalidRequest then. It never looks as if the text had come to its end.
    """

    def __init__(
        self, deltas: AsyncGenerator[Delta, None], flow: Flow, request: CompletionRequest
    ) -> None:
        super().__init__(flow, request)
        self._deltas = deltas

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            return await self._deltas.__anext__()
        except StopAsyncIteration:
            self._flow.check()
            raise

    async def aclose(self) -> None:
        """Withdraw the question if it has not ended; whoever waits for a delta in another task has read
        the last one. Idempotent."""
        if getattr(self._deltas, "ag_running", False):  # a generator cannot be closed while it is
            self._flow.leave()
        else:
            await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class SyncStream(_Reading):
    """The deltas of one completion, as they are drawn: an iterator that blocks, and a context manager.

    The question is asked with the first ``next``. Leaving the context, or an interrupt, withdraws it.
    Leaving a loop over it does too, unless the stream has a name, as of a ``Stream``. Read on after an
    error or an interrupt, it raises as a ``Stream``.
    """

    def __init__(
        self, deltas: Generator[Delta, None, None], flow: Flow, request: CompletionRequest
    ) -> None:
        super().__init__(flow, request)
        self._deltas = deltas

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            return next(self._deltas)
        except StopIteration:
            self._flow.check()
            raise

    def close(self) -> None:
        """Withdraw the question if it has not ended; a thread that waits for a delta has read the last
        one. Idempotent, from any thread."""
        try:
            self._deltas.close()
        except ValueError:  # it is running: another thread reads, or a signal handler is in the way
            self._flow.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class _Readers:
    """The streams in flight that one loop reads, and when deltas may be delivered to it next."""

    buffers: dict[Streamed, StreamBuffer[Any]] = field(default_factory=dict)
    is_busy: bool = False  # set by the engine's thread, cleared on the loop
    due: float = 0.0


class Streams:
    """The streams in flight, by the event loop that reads them; ``by_loop`` is empty if there are none.

    Args:
        lock: the batcher's, which every caller of anything but ``tell`` holds.
        clock: monotonic seconds.
    """

    def __init__(self, lock: threading.RLock, clock: Callable[[], float]) -> None:
        self._lock = lock
        self._clock = clock
        self.by_loop: dict[asyncio.AbstractEventLoop | None, _Readers] = {}

    def add(self, request: Streamed, buffer: StreamBuffer[Any]) -> None:
        """Deliver this stream's deltas from now on."""
        self.by_loop.setdefault(buffer.loop, _Readers()).buffers[request] = buffer

    def discard(self, request: Streamed, buffer: StreamBuffer[Any]) -> None:
        """Deliver this stream's deltas no more."""
        readers = self.by_loop.get(buffer.loop)
        if readers is not None:
            readers.buffers.pop(request, None)
            if not readers.buffers:
                del self.by_loop[buffer.loop]

    def tell(self, progress: Callable[[Sequence[Streamed]], Sequence[Told | None]]) -> None:
        """Deliver new deltas to each loop that is due and has taken its last ones."""
        now = self._clock()
        with self._lock:
            due = [
                (loop, readers, [*readers.buffers.items()])
                for loop, readers in self.by_loop.items()
                if not readers.is_busy and readers.due <= now
            ]
        for loop, readers, buffers in due:
            deltas = progress([request for request, _ in buffers])
            news = [
                (buffer, delta)
                for (_, buffer), delta in zip(buffers, deltas, strict=True)
                if delta is not None
            ]
            if not news:
                continue
            for buffer, _ in news:
                buffer.is_told = True
            if loop is None:
                _put(news)
                continue
            readers.due = now + READER_SECONDS * len(news)
            readers.is_busy = True
            with contextlib.suppress(RuntimeError):  # closed, and with it all of its readers
                loop.call_soon_threadsafe(_deliver, loop, readers, news)


def _deliver(
    loop: asyncio.AbstractEventLoop,
    readers: _Readers,
    news: Sequence[tuple[StreamBuffer[Any], Told]],
) -> None:
    """Put deltas into the buffers of one loop, on that loop."""
    try:
        _put(news)
    except BaseException:  # an interrupt: all are put again, and a buffer skips tokens it has
        loop.call_soon(_deliver, loop, readers, news)
        raise
    readers.is_busy = False


def _put(news: Sequence[tuple[StreamBuffer[Any], Told]]) -> None:
    for buffer, delta in news:
        buffer.put(delta)


def _withdrawn(error: BaseException) -> InvalidRequest:
    return InvalidRequest(
        f"this stream was withdrawn by the {type(error).__name__} that ended an earlier read of it: ask "
        "again. asyncio.wait_for and asyncio.timeout cancel a read that takes too long; "
        "asyncio.wait({task}, timeout=…) does not"
    )
