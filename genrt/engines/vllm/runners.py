"""vLLM's model runners, where open requests reach into them: tokens, seats, logits.

A step can be *prepared* while the device still computes the step before it: ``execute_model`` puts in
place everything that a forward needs except its tokens, and is stopped right before the forward. Once the
tokens are known, they are written into the input buffer and the forward runs, again with other tokens if
the first ones were wrong. Once the tokens are certain, the step is *confirmed*.

What ``runner_v1.py`` and ``runner_v2.py`` touch of vLLM is listed in ``docs/new_vllm.md``;
``self_check.py`` compares rows that come by these ways with rows that don't.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from genrt.engines.vllm.seats import Seat

__all__ = ["NextTokens", "Prepared", "Runner", "Stopped", "prepared"]


@dataclass(slots=True)
class NextTokens:
    """The next input tokens of different requests, as columns: each follows ``positions`` others, the
    first ``prompts`` of which vLLM takes for the request's prompt."""

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request_ids)

    def add(self, others: NextTokens) -> None:
        """Add the tokens of other requests."""
        self.request_ids += others.request_ids
        self.token_ids += others.token_ids
        self.positions += others.positions
        self.prompts += others.prompts

    def at(self, places: Sequence[int]) -> NextTokens:
        """Return those at these places."""
        return NextTokens(
            [self.request_ids[n] for n in places],
            [self.token_ids[n] for n in places],
            [self.positions[n] for n in places],
            [self.prompts[n] for n in places],
        )

    def without(self, request_ids: Collection[str]) -> NextTokens:
        """Return those of other requests than these."""
        return self.at([n for n, each in enumerate(self.request_ids) if each not in request_ids])

    def in_order_of(self, request_ids: list[str]) -> NextTokens | None:
        """Return them in the order of these requests; ``None`` if they are not of these."""
        if self.request_ids == request_ids:
            return self
        places = {request_id: n for n, request_id in enumerate(self.request_ids)}
        if len(places) != len(request_ids) or not places.keys() >= set(request_ids):
            return None
        return self.at([places[request_id] for request_id in request_ids])


class Prepared(NamedTuple):
    """A step that lacks nothing but its tokens: its requests in the order of the batch, how many tokens
    come before each one's token, and what the runner needs to launch the forward."""

    request_ids: list[str]
    positions: list[int]
    launch: Any


class Runner(Protocol):
    """A runner as open requests need it, between two steps."""

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        """Prepare a step of one token for each request; return ``None`` where the forward cannot be run
        apart from its preparation. ``before`` is the prepared step that ran last, if no other step has
        run since."""
        ...

    def refresh(self, step: Prepared) -> None:
        """Refresh a prepared step after some of its requests took other seats of the batch, at
        the same position."""
        ...

    def run(
        self, step: Prepared, token_ids: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run a prepared step, request ``i`` with token ``i``, or token ``order[i]``, and return its rows
        in the order of its requests, for use until a step is run again. It can be run again with other
        tokens.

        Args:
            token_ids: numbers ``[n]`` on the device or in pinned memory; less than 0 is token 0.
        """
        ...

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        """Record that these are the tokens with which the step was run last, for these requests; what was
        run for others does not count."""
        ...

    def execute(self, output: SchedulerOutput) -> None:
        """Run the forward of a step of one token for each request."""
        ...

    def reseat(self, seats: Sequence[Seat]) -> None:
        """Copy blocks, and have these requests go on as other sequences, one seat after the other."""
        ...

    def write(self, tokens: NextTokens) -> None:
        """Put the callers' tokens where the runner keeps those it sampled for these requests."""
        ...

    def take_rows(self) -> tuple[list[str], torch.Tensor]:
        """Take the forward's rows, in place of sampling; return their requests too."""
        ...


class Stopped(Exception):
    """Raised in place of the forward, with what it would have been given."""


def prepared(output: SchedulerOutput, request_ids: list[str], launch: Any) -> Prepared:
    """Return a step that was prepared, of these requests in the order of the batch."""
    # The runner may have sorted the batch: the positions follow its order, not the scheduler's.
    scheduled = output.scheduled_cached_reqs
    positions = dict(zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True))
    return Prepared(request_ids, [positions[request_id] for request_id in request_ids], launch)
