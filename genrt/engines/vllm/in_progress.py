"""Sends requests to vLLM's core, and tracks their purposes until they end.

Each request has its own vLLM id, which is never used again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from genrt.engines.protocol import Finished
from genrt.engines.vllm.lora import VLLMAdapters
from genrt.engines.vllm.populations import SeatedPopulations
from genrt.engines.vllm.process import Globals
from genrt.engines.vllm.requests import as_genrt_error, core_request, row_params
from genrt.engines.vllm.scores import Positions
from genrt.engines.vllm.texts import TextRequest, VLLMTexts
from genrt.errors import EngineFailed
from genrt.questions.draws import PopulationDraw
from genrt.questions.rows import LogprobsRequest, not_finite
from genrt.questions.scores import ScoreRequest

__all__ = ["CoreRequests", "Purpose", "Sent"]

Sent: TypeAlias = LogprobsRequest | ScoreRequest | TextRequest
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


class CoreRequests(dict[str, Purpose]):
    """Maps the ids of vLLM requests in progress to their purposes. A request holds its adapter, text and
    positions until it ends.

    Args:
        room: the most tokens of an open request; ``None`` if no request stays open.
    """

    def __init__(
        self,
        core: Any,
        own: Globals,
        adapters: VLLMAdapters,
        texts: VLLMTexts,
        positions: Positions,
        room: int | None,
    ) -> None:
        super().__init__()
        self.room = room
        self._core = core
        self._globals = own
        self._adapters = adapters
        self._texts = texts
        self._positions = positions
        self._tickets = itertools.count(1)

    def send(self, request: Sent) -> str:
        """Send a request and return its vLLM id: its ticket as a decimal number.

        Raises:
            GenrtError: vLLM refused the request and has forgotten it.
        """
        ticket = next(self._tickets)
        try:
            lora = self._adapters.request(request.adapter)
            with self._globals:
                self._core.add_request(self._made(ticket, request, lora))
        except Exception as error:
            self._texts.forget([str(ticket)])
            self._positions.forget([str(ticket)])
            refused = as_genrt_error(error, "vLLM does not take this request")
            raise refused from refused.__cause__  # ``refused`` may be ``error`` itself
        return str(ticket)

    def send_all(self, rows: Sequence[LogprobsRequest]) -> list[str]:
        """Send these requests as ``send`` does. If one is refused, abort the others and raise."""
        sent: list[str] = []
        try:
            sent += map(self.send, rows)
        except BaseException:
            with self._globals:
                self._core.abort_requests(sent)
            raise
        return sent

    def _made(self, ticket: int, request: Sent, lora: LoRARequest | None) -> EngineCoreRequest:
        if not isinstance(request, LogprobsRequest | ScoreRequest):
            return self._texts.begin(str(ticket), request, lora)
        row = request.computed if isinstance(request, ScoreRequest) else request
        # An open request ends by itself only at its last possible token.
        most = None if self.room is None else self.room - len(row)
        first = None
        if isinstance(request, ScoreRequest):
            self._positions.begin(str(ticket), request, lora)
            first = request.start - 1
        params = row_params(ticket, open_for=most, first=first)
        return core_request(str(ticket), row.token_ids, params, lora)

    def begin(self, request_id: str, request: Sent) -> None:
        """Track a request that vLLM has."""
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
            self._texts.forget([request_id])
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
        """End these vLLM requests with rows or scores; ``None`` stands for one that is not finite."""
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

    def orphans_of(self, finished: Sequence[Finished]) -> list[str]:
        """Return the remaining vLLM requests of populations that failed by one of their rows."""
        failed = [
            end.request
            for end in finished
            if end.error is not None and isinstance(end.request, PopulationDraw)
        ]
        return [each for each, request in self.items() if request in failed] if failed else []

    def close(self) -> None:
        """Drop all requests and the reference to vLLM's core."""
        self.clear()
        self._core = None
