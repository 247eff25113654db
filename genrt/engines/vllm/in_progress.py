"""Tracks the vLLM requests in progress: the purpose of each, and the questions that their rows answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from genrt.engines.protocol import Finished
from genrt.engines.vllm.lora import VLLMAdapters
from genrt.engines.vllm.populations import SeatedPopulations
from genrt.engines.vllm.samples import Generated, Samples
from genrt.engines.vllm.scores import Positions
from genrt.errors import EngineFailed
from genrt.questions.draws import PopulationDraw
from genrt.questions.rows import LogprobsRequest, not_finite
from genrt.questions.scores import ScoreRequest

__all__ = ["Answered", "InProgress", "Purpose", "Sent"]

Sent: TypeAlias = LogprobsRequest | ScoreRequest | Generated
"""A question that is sent to vLLM as one request."""

Purpose: TypeAlias = Sent | PopulationDraw
"""A question with its own vLLM request, or a population, which has several."""


class Answered(NamedTuple):
    """The results of a step's rows.

    Attributes:
        kept: the vLLM requests that are now resident, each with the question of its context.
        over: the requests that vLLM must forget.
    """

    finished: list[Finished]
    kept: list[tuple[str, LogprobsRequest]]
    over: list[str]


class InProgress(dict[str, Purpose]):
    """Maps vLLM request ids to their purposes. Each request holds its adapter, sample and positions until
    it ends."""

    def __init__(self, adapters: VLLMAdapters, samples: Samples, positions: Positions) -> None:
        super().__init__()
        self._adapters = adapters
        self._positions = positions
        self._samples = samples

    def begin(self, request_id: str, request: Sent) -> None:
        """Add a request that was sent to vLLM."""
        if request.adapter is not None:
            self._adapters.hold(request.adapter)
        self[request_id] = request

    def end(self, request_id: str) -> Purpose:
        """Remove a request and return its purpose. A population releases its adapter itself."""
        request = self.pop(request_id)
        if isinstance(request, PopulationDraw):
            return request
        if isinstance(request, ScoreRequest):
            self._positions.forget([request_id])
        elif not isinstance(request, LogprobsRequest):
            self._samples.forget([request_id])
        if request.adapter is not None:
            self._adapters.release(request.adapter)
        return request

    def leave(self, request_ids: Sequence[str]) -> int:
        """Remove the requests of a population that was drawn; return their number."""
        for request_id in request_ids:
            del self[request_id]
        return len(request_ids)

    def answered(
        self,
        request_ids: Sequence[str],
        rows: Sequence[torch.Tensor | None],
        populations: SeatedPopulations,
    ) -> Answered:
        """End the vLLM requests with these rows or scores; ``None`` stands for one that is not finite."""
        finished: list[Finished] = []
        kept: list[tuple[str, LogprobsRequest]] = []
        over: list[str] = []
        for request_id, row in zip(request_ids, rows, strict=True):
            request = self.end(request_id)
            end: Finished | None = None
            if isinstance(request, PopulationDraw):
                end = populations.put(request, request_id, row)
                if end is None and request not in populations:
                    over.append(request_id)  # an earlier row has failed the population
                    continue
            elif row is None:
                end = Finished(request, error=not_finite())
            else:
                end = Finished(request, row)
                if isinstance(request, LogprobsRequest):
                    kept.append((request_id, request))
                elif isinstance(request, ScoreRequest):
                    kept.append((request_id, request.computed))
            if row is None:
                over.append(request_id)
            if end is not None:
                finished.append(end)
        return Answered(finished, kept, over)

    def ended(
        self, outputs: Sequence[EngineCoreOutput], populations: SeatedPopulations
    ) -> tuple[list[Finished], list[str]]:
        """Return the questions that vLLM's outputs end, and the requests that finished with a row."""
        finished: list[Finished] = []
        last: list[str] = []
        for output in outputs:
            reason = output.finish_reason
            if output.request_id not in self or reason is None:
                continue
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                last.append(output.request_id)
                continue
            request = self.end(output.request_id)
            if not isinstance(request, PopulationDraw) or populations.forget(request):
                error = EngineFailed(f"vLLM ended the request with {reason}")
                finished.append(Finished(request, error=error))
        return finished, last

    def left_by(self, finished: Sequence[Finished]) -> list[str]:
        """Return the remaining vLLM requests of populations that failed by one of their rows."""
        failed = [
            end.request
            for end in finished
            if end.error is not None and isinstance(end.request, PopulationDraw)
        ]
        return [each for each, request in self.items() if request in failed] if failed else []
