"""Streams: what completions have drawn so far, brought to those who read it while the rest is drawn.

The engine thread asks the engine for deltas after a step, and hands those of one event loop over in one
call. A loop that takes long to tell its readers gets them less often, several tokens at once: telling
takes a ``SHARE`` of its time at most, and the engine never waits for a reader. How long it takes is the
CPU time of the loop's thread, for a loop that sleeps or waits for Python's lock holds up nobody.

Rules:
    The last delta comes with the answer to the question, which a stream waits for as any other does.
    An engine that was restarted, or ran out of memory, draws the same text again from its beginning.
    What a reader has seen is left out; a text that differs from it fails.
    A stream that nobody reads any more withdraws its question. Where the garbage collector ends it, that
    may be in any thread, so ``Batcher.leave_soon`` is made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, cast

from genrt.errors import GenrtError, StreamCut
from genrt.questions.completions import Completion, CompletionRequest, Delta, Streamed, Told
from genrt.runtime.passages import Passage

__all__ = ["Flow", "Stream", "Streams", "SyncStream"]

SHARE = 0.04
"""How much of an event loop's time is spent at most on telling what streams have drawn. While it runs,
the engine thread waits for Python's lock."""

MOST_EACH = 1e-4
"""Seconds of CPU time that telling one reader is taken to cost at most: alone it takes some 80 us, among
many 10. What a reader computes beyond that is its own, and so is what else the loop runs meanwhile.
Telling it less often would not make that cheaper, and would bring all others on its loop their texts
late."""


class Flow(Passage[Delta]):
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
        ``Passage.take``."""
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
    """The streams in flight that are read on one loop, and when it is told of them next."""

    flows: dict[Streamed, Passage[Any]] = field(default_factory=dict)
    is_told: bool = False  # set by the engine thread, taken back on the loop
    due: float = 0.0


class Streams:
    """The streams in flight, loop by loop; ``by_loop`` is empty if there is none.

    Args:
        lock: the batcher's, which whoever calls anything but ``tell`` holds.
        clock: seconds, monotonic.
        cpu_clock: seconds of CPU time of the calling thread. By a coarse one, few streams mostly cost
            nothing, and many on average what they do.
    """

    def __init__(
        self, lock: threading.RLock, clock: Callable[[], float], cpu_clock: Callable[[], float]
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.by_loop: dict[asyncio.AbstractEventLoop | None, _Readers] = {}

    def add(self, request: Streamed, flow: Passage[Any]) -> None:
        """Have this one told of."""
        self.by_loop.setdefault(flow.loop, _Readers()).flows[request] = flow

    def discard(self, request: Streamed, flow: Passage[Any]) -> None:
        """Have this one told of no more."""
        readers = self.by_loop.get(flow.loop)
        if readers is not None:
            readers.flows.pop(request, None)
            if not readers.flows:
                del self.by_loop[flow.loop]

    def clear(self) -> None:
        """Forget all."""
        self.by_loop.clear()

    def tell(self, progress: Callable[[Sequence[Streamed]], Sequence[Told | None]]) -> None:
        """Give what the engine has drawn to the readers of those loops that may be told now."""
        now = self._clock()
        with self._lock:
            due = [
                (readers, [*readers.flows.items()])
                for readers in self.by_loop.values()
                if not readers.is_told and readers.due <= now
            ]
        for readers, flows in due:
            deltas = progress([request for request, _ in flows])
            news = [
                (flow, delta)
                for (_, flow), delta in zip(flows, deltas, strict=True)
                if delta is not None
            ]
            if not news:
                continue
            for flow, _ in news:
                flow.is_told = True
            loop = flows[0][1].loop
            if loop is None:
                _put(news)
                continue
            readers.is_told = True
            with contextlib.suppress(RuntimeError):  # closed, and with it all who read there
                loop.call_soon_threadsafe(self._tell, loop, readers, news)

    def _tell(
        self,
        loop: asyncio.AbstractEventLoop,
        readers: _Readers,
        news: Sequence[tuple[Passage[Any], Told]],
    ) -> None:
        """Tell the readers on a loop, on it, and look when they have all done what they do then."""
        try:
            # Their tasks run in the loop's next round, before what that round schedules.
            loop.call_soon(loop.call_soon, self._told, readers, len(news), self._cpu_clock())
            _put(news)
        except BaseException:  # an interrupt: all are told again, and leave out what they know
            loop.call_soon(self._tell, loop, readers, news)
            raise

    def _told(self, readers: _Readers, count: int, began: float) -> None:
        # Less than nothing on a loop that was stopped, and goes on in another thread.
        cost = min(max(0.0, self._cpu_clock() - began), MOST_EACH * count)
        readers.due = self._clock() + cost * (1.0 / SHARE - 1.0)
        readers.is_told = False


def _put(news: Sequence[tuple[Passage[Any], Told]]) -> None:
    for flow, delta in news:
        flow.put(delta)
