"""Streams of a simulated runtime that compare each delta with the expected completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from genrt.questions.completions import Completion, Delta
from genrt.questions.request import Request, Result
from genrt.runtime.streams import Stream
from genrt.testing.record import Record
from genrt.testing.simulated_model import Model


class Simulated(Protocol):
    """The part of a simulated runtime that its streams need.

    Attributes:
        model: has the correct completions.
        unanswered: the numbers of callers that still wait.
    """

    model: Model
    record: Record
    numbers: Iterator[int]
    weights: dict[int, int]
    unanswered: set[int]

    def is_right(self, request: Request, result: Result, version: int) -> bool:
        """Return whether this is the answer for the weights of this version."""
        ...


class WatchedStream(Stream):
    """A stream that compares each delta with the expected completion.

    A simulation that observes more overrides ``began``, ``whole`` and ``left``.
    """

    def __init__(self, stream: Stream, runtime: Simulated, timeout: float | None) -> None:
        super().__init__(stream._deltas, stream._flow, stream._request)
        self.runtime = runtime
        self.timeout = timeout
        self._number: int | None = None
        self._is_over = False
        self._start = self._text_start = 0

    async def __anext__(self) -> Delta:
        if self._number is None:
            self._number = next(self.runtime.numbers)
            self.runtime.record.add("streamed", self._number, self._request)
            self.began()
        self.runtime.unanswered.add(self._number)
        try:
            delta = await super().__anext__()
        except StopAsyncIteration:
            self._end("read")
            raise
        except GeneratorExit:  # garbage-collected with its loop, at any moment
            raise
        except BaseException as error:
            self._end(type(error).__name__)
            self.left(error)
            raise
        finally:
            self.runtime.unanswered.discard(self._number)
        self._check(delta)
        return delta

    async def aclose(self) -> None:
        await super().aclose()
        if self._end("left"):
            self.left(GeneratorExit())

    def __del__(self) -> None:
        self._end("dropped")

    def began(self) -> None:
        """Note that the request is about to be sent."""

    def whole(self, completion: Completion) -> None:
        """Note that the last delta has come."""

    def left(self, error: BaseException) -> None:
        """Note the error that ended the stream before its last delta."""

    def _end(self, how: str) -> bool:
        """Record the end; return whether the stream had begun and had not ended before."""
        if self._number is None or self._is_over:
            return False
        self._is_over = True
        self.runtime.record.add(how, self._number)
        return True

    def _check(self, delta: Delta) -> None:
        request, wrong = self._request, self.runtime.record.violated
        version = self._flow.weights_version
        numbers = self.runtime.weights
        expected = cast("Completion", self.runtime.model.answer(request, numbers[version]))
        start, end = self._start, self._start + len(delta.token_ids)
        text_start, text_end = self._text_start, self._text_start + len(delta.text)
        if (delta.start, delta.text_start) != (start, text_start):
            wrong(f"{request} has a gap: at {start} tokens and {text_start} letters came {delta}")
        self._start, self._text_start = end, text_end
        if (
            delta.token_ids != expected.token_ids[start:end]
            or delta.text != expected.text[text_start:text_end]
            or delta.logprobs != expected.logprobs[start:end]
            or delta.top_logprobs != expected.top_logprobs[start:end]
        ):
            wrong(f"{request} was brought what is not its own: {delta} of {expected}")
        partial, so_far = self.partial, (expected.text[:text_end], expected.top_logprobs[:end])
        if (partial.text, partial.top_logprobs) != so_far:
            wrong(f"{request} has read {partial}, not {so_far}")
        if delta.finish_reason is None:
            if end == start and text_end == text_start:
                wrong(f"{request} was brought nothing")
            return
        self._end("whole")
        ends = (delta.finish_reason, delta.stop_reason)
        is_whole = end == len(expected.token_ids) and text_end == len(expected.text)
        if not is_whole or ends != (expected.finish_reason, expected.stop_reason):
            wrong(f"{request} has ended in {delta}, which is not the end of {expected}")
        if self.completion is None or not self.runtime.is_right(request, self.completion, version):
            wrong(f"{request} has ended with {self.completion}, not with {expected}")
        self.whole(self.completion)
