"""The interface to vLLM's model runners that open requests need: tokens, seats and logits.

A step can be *prepared* while the device still computes the previous step. ``execute_model`` then sets up
everything except the tokens and is stopped right before the forward. When the tokens are known, they are
written to the input buffer and the forward runs. It runs again if the first tokens were wrong. When the
tokens are certain, the step is *confirmed*.

The parts of vLLM that ``runner_v1.py`` and ``runner_v2.py`` use are listed in ``docs/new_vllm.md``.
``self_check.py`` compares rows computed this way with rows computed without it.
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
    """The next input tokens of different requests, as columns. Each token follows ``positions`` others;
    vLLM counts the first ``prompts`` of these as the request's prompt."""

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
        """Return the tokens at these places."""
        return NextTokens(
            [self.request_ids[n] for n in places],
            [self.token_ids[n] for n in places],
            [self.positions[n] for n in places],
            [self.prompts[n] for n in places],
        )

    def without(self, request_ids: Collection[str]) -> NextTokens:
        """Return the tokens of all other requests."""
        return self.at([n for n, each in enumerate(self.request_ids) if each not in request_ids])

    def in_order_of(self, request_ids: list[str]) -> NextTokens | None:
        """Return the tokens in this order of requests; ``None`` if the requests differ."""
        if self.request_ids == request_ids:
            return self
        places = {request_id: n for n, request_id in enumerate(self.request_ids)}
        if len(places) != len(request_ids) or not places.keys() >= set(request_ids):
            return None
        return self.at([places[request_id] for request_id in request_ids])


class Prepared(NamedTuple):
    """A step that lacks only its tokens: its requests in the order of the batch, the number of tokens
    before each request's token, and the runner's data for the forward."""

    request_ids: list[str]
    positions: list[int]
    launch: Any


class Runner(Protocol):
    """A model runner as open requests use it between two steps."""

    def prepare(self, output: SchedulerOutput, before: Prepared | None = None) -> Prepared | None:
        """Prepare a step of one token for each request.

        Return ``None`` where the forward cannot run apart from its preparation. ``before`` is the
        prepared step that ran last, if no other step has run since.
        """
        ...

    def refresh(self, step: Prepared) -> None:
        """Update a prepared step after some of its requests took other seats at the same position."""
        ...

    def run(
        self, step: Prepared, token_ids: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run a prepared step and return its rows in the order of its requests.

        Request ``i`` gets token ``i``, or token ``order[i]``. The rows are valid until a step runs again.
        The step can run again with other tokens.

        Args:
            token_ids: numbers ``[n]`` on the device or in pinned memory; a negative number is token 0.
        """
        ...

    def confirm(self, step: Prepared, tokens: NextTokens) -> None:
        """Record that the step ran last with the right tokens for these requests; the results of its
        other requests do not count."""
        ...

    def execute(self, output: SchedulerOutput) -> None:
        """Run the forward of a step of one token for each request."""
        ...

    def reseat(self, seats: Sequence[Seat]) -> None:
        """Copy blocks, and make these requests continue as other sequences, one seat after the other."""
        ...

    def write(self, tokens: NextTokens) -> None:
        """Write the callers' tokens to the place of the runner's sampled tokens."""
        ...

    def take_rows(self) -> tuple[list[str], torch.Tensor]:
        """Return the forward's rows, in place of sampling, and their requests."""
        ...


class Stopped(Exception):
    """Raised in place of the forward, with the forward's inputs."""


def prepared(output: SchedulerOutput, request_ids: list[str], launch: Any) -> Prepared:
    """Return the ``Prepared`` of a step with these requests, in the order of the batch."""
    # The runner may have sorted the batch: the positions follow its order, not the scheduler's.
    scheduled = output.scheduled_cached_reqs
    positions = dict(zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True))
    return Prepared(request_ids, [positions[request_id] for request_id in request_ids], launch)
