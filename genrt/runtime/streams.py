"""Streams carry the deltas of texts from the engine's thread to their readers while the texts are drawn.

After a step the engine's thread asks the engine for deltas and hands the deltas of one event loop over in
one call. A loop with n readers gets deltas at most every n times ``READER_SECONDS``, several tokens at
once, and only after it has taken the last ones: the engine never waits for a reader.

Rules:
    The last delta comes with the answer to the question, which a stream awaits as any other caller.
    After a restart, or running out of memory, an engine draws the same text again from its beginning.
    Tokens already read are skipped; a text that differs from them fails.
    A closed stream withdraws its question. The garbage collector may close it in any thread, so
    ``Batcher.cancel_soon`` takes no lock.
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
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

from genrt.errors import GenrtError, InvalidRequest, StreamCut
from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Delta,
    SamplingMask,
    Streamed,
    Told,
    weights_spans,
)
from genrt.tokens.sets import DrawnFrom

T = TypeVar("T")

Outputs: TypeAlias = tuple[Any, ...]

READER_SECONDS = 2.5e-4
"""The interval between two deliveries to a loop, for each reader with a delta. A delivery takes the loop
10 us of CPU time for each of many readers, 4 % of this, while the engine's thread waits for the GIL."""

DIFFERS = (
    "the engine drew another text than the stream had delivered before it began again, or drew it by new "
    "weights: ask again"
)


class StreamBuffer(ABC, Generic[T]):
    """The parts of one text on their way from the engine's thread to the reader.

    Args:
        loop: the reader's event loop; ``None`` for a blocking reader.
        seconds: the timeout of the whole text.

    Attributes:
        error: the error that ended the reading early.
        weights_version: of the weights when the text was begun.
        is_delivered: whether the engine's thread has delivered a part.
        is_begun, is_over: whether a part, or everything, has been read.
        is_left, is_late: whether the reader has closed the stream, or its timeout is over.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, seconds: float | None = None
    ) -> None:
        self.loop = loop
        self.seconds = seconds
        self.error: GenrtError | None = None
        self.weights_version = 0
        self.is_delivered = self.is_begun = self.is_over = self.is_left = self.is_late = False
        self._came: deque[T] = deque()  # put by one thread, taken by another
        self._woken: asyncio.Future[None] | None = None
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    @abstractmethod
    def take(self) -> T | None:
        """Return everything that came since the last call, if anything did. Raises StreamCut if the text
        was begun again and differs from the parts already read."""

    @abstractmethod
    def end(self, result: Any) -> T:
        """Return the unread rest of the result; raises as ``take``."""

    def put(self, part: T) -> None:
        """Add a part; called on the reader's loop, or by the engine's thread if it blocks."""
        self._came.append(part)
        self.wake()

    def wake(self, _: object = None) -> None:
        """End the reader's present wait, or its next."""
        if self.loop is None:
            self._signals.put(None)
        elif self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def leave(self) -> None:
        """Close the stream: the reader's present wait is its last."""
        self.is_left = True
        if self.loop is None or not self.loop.is_closed():
            self.wake()

    def time_out(self) -> None:
        """End the reading by its timeout; called on the reader's loop, whose timers may be early."""
        self.is_late = True
        self.wake()

    async def wait(self) -> None:
        """Wait for a part, or for the end of the question."""
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
        """Read on this loop, or blocking, until the timeout; record an error that ends the reading."""
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
        """Raise the error that ended the reading, if there is one."""
        if self.error is not None:
            raise self.error.fresh() from None

    def restart(self) -> None:
        """Drop unread parts: they are of another text, by other weights."""
        self._came.clear()


class NativeFlow(StreamBuffer[Outputs]):
    """The outputs of a native text. The engine leaves out delivered outputs by itself."""

    def take(self) -> Outputs | None:
        outputs: list[Any] = []
        while self._came:
            outputs += self._came.popleft()
        self.is_begun = self.is_begun or bool(outputs)
        return tuple(outputs) or None

    def end(self, result: Outputs) -> Outputs:
        self.is_over = True
        return (*(self.take() or ()), *result)


class Flow(StreamBuffer[Delta]):
    """The deltas of a completion, and the text that they add up to."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, seconds: float | None = None
    ) -> None:
        super().__init__(loop, seconds=seconds)
        self.token_ids: list[int] = []
        self.text = self.reasoning = ""
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.weights_begins: list[tuple[int, int]] = []  # each version with its first token
        self.last_mask: SamplingMask | None = None  # of the form and size of all
        self.places: list[DrawnFrom] = []
        self.completion: Completion | None = None

    def take(self) -> Delta | None:
        before = self._so_far()
        while self._came:
            self._add(self._came.popleft())
        return None if before == self._so_far() else self._since(*before)

    def end(self, result: Any) -> Delta:
        before, completion = self._so_far(), cast("Completion", result)
        if not completion.text.startswith(self.text):
            raise StreamCut(DIFFERS)
        self._add(
            Delta(
                completion.text,
                completion.token_ids,
                completion.logprobs,
                completion.top_logprobs,
                reasoning=completion.reasoning,
                weights_spans=completion.weights_spans,
                sampling_mask=completion.sampling_mask,
            )
        )
        self.completion, self.is_over = completion, True
        return replace(
            self._since(*before),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _add(self, delta: Delta) -> None:
        """Add the unknown part of a delta: a text that was begun again starts with known tokens."""
        known = len(self.token_ids) - delta.start
        if [*delta.token_ids[:known]] != self.token_ids[delta.start :][: len(delta.token_ids)]:
            raise StreamCut(DIFFERS)
        if known and self.weights_begins and delta.weights_spans:
            place = delta.start, min(len(self.token_ids), delta.start + len(delta.token_ids))
            begins = [each[:2] for each in delta.weights_spans]
            if weights_spans(begins, *place) != weights_spans(self.weights_begins, *place):
                raise StreamCut(DIFFERS)  # other weights have drawn equal tokens
        for version, start, end in delta.weights_spans:
            is_other = not self.weights_begins or self.weights_begins[-1][0] != version
            if is_other and end > len(self.token_ids):
                self.weights_begins.append((version, max(start, len(self.token_ids))))
        self.token_ids += delta.token_ids[known:]
        self.logprobs += delta.logprobs[known:]
        self.top_logprobs += delta.top_logprobs[known:]
        if delta.sampling_mask is not None:
            self.last_mask = delta.sampling_mask
            self.places += delta.sampling_mask.places[known:]
        self.text += delta.text[max(0, len(self.text) - delta.text_start) :]
        self.reasoning += delta.reasoning[max(0, len(self.reasoning) - delta.reasoning_start) :]
        self.is_begun = bool(self.token_ids)

    def sampling_mask(self, start: int = 0) -> SamplingMask | None:
        """The sets of the tokens from number ``start`` on, if they are wanted."""
        if self.last_mask is None:
            return None
        return replace(self.last_mask, places=tuple(self.places[start:]))

    def _so_far(self) -> tuple[int, int, int]:
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
            weights_spans=weights_spans(self.weights_begins, start, len(self.token_ids)),
            sampling_mask=self.sampling_mask(start),
        )


class _Reading:
    """A text that is being read."""

    def __init__(self, deltas: Any, flow: Flow, request: CompletionRequest) -> None:
        self._deltas = deltas
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
        spans = weights_spans(flow.weights_begins, 0, len(flow.token_ids))
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
            weights_version=spans[-1].version if spans else flow.weights_version,
            weights_spans=spans,
            sampling_mask=flow.sampling_mask(),
        )

    def __repr__(self) -> str:
        state = "ended" if self._flow.is_over else "open"
        return f"{type(self).__name__}({state}, {len(self._flow.token_ids)} tokens read)"


class Stream(_Reading):
    """The deltas of one completion as they are drawn: an asynchronous iterator and context manager.

    The question is asked with the first ``anext``. Closing the stream, leaving its context or cancelling
    the await withdraws it: the engine's slot is free at its next step. Leaving a loop over the stream
    withdraws it too, unless the stream has a name: then it can be read on until it is closed or garbage.

    Reading on after an error raises it again; after a cancellation, InvalidRequest. A text that was cut
    never looks complete.
    """

    _deltas: AsyncGenerator[Delta, None]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            return await self._deltas.__anext__()
        except StopAsyncIteration:
            self._flow.check()
            raise

    async def aclose(self) -> None:
        """Withdraw the question if it has not ended; a task that waits for a delta gets no more.
        Idempotent."""
        if getattr(self._deltas, "ag_running", False):  # a running generator cannot be closed
            self._flow.leave()
        else:
            await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class SyncStream(_Reading):
    """The deltas of one completion as they are drawn: a blocking iterator and context manager.

    The question is asked with the first ``next``. An interrupt withdraws it; the rest is as in a
    ``Stream``.
    """

    _deltas: Generator[Delta, None, None]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            return next(self._deltas)
        except StopIteration:
            self._flow.check()
            raise

    def close(self) -> None:
        """Withdraw the question if it has not ended; a thread that waits for a delta gets no more.
        Idempotent, from any thread."""
        try:
            self._deltas.close()
        except ValueError:  # it is running, in another thread or below a signal handler
            self._flow.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class _Readers:
    """The streams in flight that one loop reads, and when deltas may be delivered to it next."""

    buffers: dict[Streamed, StreamBuffer[Any]] = field(default_factory=dict)
    is_busy: bool = False  # set by the engine's thread, cleared on the loop
    due: float = 0.0


class Streams:
    """The streams in flight by the event loop that reads them.

    Args:
        lock: the batcher's. Callers of ``add`` and ``discard`` hold it.
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
        """Stop delivering this stream's deltas."""
        readers = self.by_loop.get(buffer.loop)
        if readers is not None:
            readers.buffers.pop(request, None)
            if not readers.buffers:
                del self.by_loop[buffer.loop]

    def deliver(self, progress: Callable[[Sequence[Streamed]], Sequence[Told | None]]) -> None:
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
                buffer.is_delivered = True
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
    except BaseException:  # an interrupt: all are put again, and a buffer skips known tokens
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
