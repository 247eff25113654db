"""Sends requests to vLLM's core, each under an id that is never used again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from genrt.engines.vllm.in_progress import Sent
from genrt.engines.vllm.lora import VLLMAdapters
from genrt.engines.vllm.process import Globals
from genrt.engines.vllm.requests import as_genrt_error, core_request, row_params
from genrt.engines.vllm.samples import Samples
from genrt.engines.vllm.scores import Positions
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest

__all__ = ["Sending"]


class Sending:
    """Sends requests to vLLM's core.

    Args:
        positions: receives the positions of scores.
        room: the most tokens of an open request; ``None`` if no request stays open.
    """

    def __init__(
        self,
        core: Any,
        own: Globals,
        adapters: VLLMAdapters,
        samples: Samples,
        positions: Positions,
        room: int | None,
    ) -> None:
        self.room = room
        self._core = core
        self._globals = own
        self._adapters = adapters
        self._samples = samples
        self._positions = positions
        self._tickets = itertools.count(1)

    def send(self, request: Sent) -> str:
        """Send a request and return its vLLM id: its ticket as a decimal number.

        Raises:
            GenrtError: vLLM refused the request and holds no part of it.
        """
        ticket = next(self._tickets)
        try:
            lora = self._adapters.request(request.adapter)
            with self._globals:
                self._core.add_request(self._made(ticket, request, lora))
        except Exception as error:
            self._samples.forget([str(ticket)])
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
            return self._samples.begin(str(ticket), request, lora)
        row = request.computed if isinstance(request, ScoreRequest) else request
        # An open request ends by itself only at its last possible token.
        most = None if self.room is None else self.room - len(row)
        first = None
        if isinstance(request, ScoreRequest):
            self._positions.begin(str(ticket), request, lora)
            first = request.start - 1
        params = row_params(ticket, open_for=most, first=first)
        return core_request(str(ticket), row.token_ids, params, lora)
