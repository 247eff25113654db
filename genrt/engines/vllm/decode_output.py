"""Builds vLLM's ``SchedulerOutput`` for a step of one more token for each of some known requests.

The parts of vLLM that this file uses are listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

__all__ = ["decode_output"]


def decode_output(
    requests: Sequence[Any],
    new_blocks: Sequence[tuple[list[int], ...] | None],
    finished: set[str],
    preempted: set[str],
    blocks_to_zero: Any,
) -> SchedulerOutput:
    """Return the step of one token for each of these requests.

    Args:
        new_blocks: the new blocks of each request, or ``None``.
        finished, preempted, blocks_to_zero: the changes since the last step.
    """
    request_ids = [request.request_id for request in requests]
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=request_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[*new_blocks],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[len(request._output_token_ids) for request in requests],
        ),
        num_scheduled_tokens=dict.fromkeys(request_ids, 1),
        total_num_scheduled_tokens=len(requests),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=finished,
        preempted_req_ids=preempted,
        free_encoder_mm_hashes=[],
        new_block_ids_to_zero=blocks_to_zero,
    )
