"""Several engines as one: their counters, the prefixes that all of them keep, the parts of a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from genrt.engines.protocol import EngineStatistics
from genrt.questions.completions import Delta
from genrt.questions.request import Told
from genrt.questions.rows import LogprobsRequest

__all__ = ["ReplicaPrefixes", "joined", "summed"]


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


def summed(several: Sequence[EngineStatistics]) -> EngineStatistics:
    """Return the counters of several engines as those of one."""
    sums = {
        field.name: sum(getattr(each, field.name) for each in several)
        for field in fields(EngineStatistics)
    }
    return EngineStatistics(**sums)


def joined(told: deque[Told] | None) -> Told | None:
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
