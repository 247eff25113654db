"""Several engines as one: their counters, the prefixes that all of them keep, the parts of a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from genrt.engines.protocol import EngineStatistics, Finished
from genrt.questions.completions import Delta, NativeRequest, Streamed, Told
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest

__all__ = ["ReplicaPrefixes", "ReplicaStreams", "join_stream_parts", "sum_counters"]


class ReplicaPrefixes:
    """The prefixes that every replica keeps.

    Args:
        tell: has every replica that is open do something; those that are opened later are given all.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._kept: dict[LogprobsRequest, None] = {}

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        return prefix in self._kept

    def __iter__(self) -> Iterator[LogprobsRequest]:
        return iter(self._kept)

    def keep(self, prefix: LogprobsRequest) -> None:
        self._kept[prefix] = None
        self._tell("keep", prefix)

    def release(self, prefix: LogprobsRequest) -> None:
        if self._kept.pop(prefix, self) is None:
            self._tell("release", prefix)


class ReplicaStreams:
    """The streams in progress over replicas, with what has come of each and was not asked for yet."""

    def __init__(self) -> None:
        self._came: dict[Request, deque[Told]] = {}

    def begin(self, streamed: Streamed) -> bool:
        """Keep what comes of this one from now on; return whether it is new."""
        is_new = streamed not in self._came
        self._came.setdefault(streamed, deque())
        return is_new

    def add(self, request: Request | None, told: Told) -> None:
        """Keep a part, unless nobody reads it."""
        if request in self._came:
            self._came[request].append(told)

    def take(self, streamed: Streamed) -> Told | None:
        """Return what has come since the last call; ``None`` if that is nothing."""
        told = join_stream_parts(self._came.get(streamed))
        if told is not None and isinstance(streamed, NativeRequest):
            streamed.asked.tell(told)  # a replica that begins it anew goes on from there
        return told

    def begun(self, requests: Sequence[Request]) -> list[Request]:
        """Return those of them that are streams, now that replicas begin them, if anew, then with what
        was not asked for yet."""
        streamed = [each for each in requests if each in self._came]
        for each in streamed:
            self._came[each].clear()
        return streamed

    def end(self, end: Finished) -> Finished:
        """Forget a stream that has ended; return its end, with what was not asked for in front of the
        rest."""
        told: Any = join_stream_parts(self._came.pop(end.request, None))
        if told is None or end.error is not None or not isinstance(end.request, NativeRequest):
            return end
        rest: Any = end.result
        return replace(end, result=(*told, *rest))

    def forget(self, requests: Sequence[Request]) -> None:
        """Forget these, which are withdrawn."""
        for each in requests:
            self._came.pop(each, None)


def sum_counters(several: Sequence[EngineStatistics]) -> EngineStatistics:
    """Return the counters of several engines as those of one."""
    sums = {
        field.name: sum(getattr(each, field.name) for each in several)
        for field in fields(EngineStatistics)
    }
    return EngineStatistics(**sums)


def join_stream_parts(told: deque[Told] | None) -> Told | None:
    """Return all that a stream has been told, as one part, and forget it."""
    if not told:
        return None
    parts = [told.popleft() for _ in range(len(told))]
    first = parts[0]
    deltas: list[Any] = parts
    if not isinstance(first, Delta):
        return tuple(output for each in deltas for output in each)
    joined: Delta = replace(
        deltas[-1],
        text="".join(each.text for each in deltas),
        token_ids=sum((each.token_ids for each in deltas), ()),
        logprobs=sum((each.logprobs for each in deltas), ()),
        top_logprobs=sum((each.top_logprobs for each in deltas), ()),
        reasoning="".join(each.reasoning for each in deltas),
        start=first.start,
        text_start=first.text_start,
        reasoning_start=first.reasoning_start,
    )
    return joined
