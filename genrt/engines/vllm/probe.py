"""Computes rows and scores for the engine itself, beside other requests in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch

from genrt.engines.protocol import Finished
from genrt.errors import GenrtError
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest

__all__ = ["Probe"]


class Probe:
    """Asks an engine for rows and scores from its own thread.

    Args:
        submit, step: the engine's.
        in_progress: returns all requests that the engine is computing.
        put_back: receives the results of others' requests, for the next step to return.
    """

    def __init__(
        self,
        submit: Callable[[Sequence[Request]], None],
        step: Callable[[], list[Finished]],
        in_progress: Callable[[], Iterable[Request]],
        put_back: Callable[[list[Finished]], None],
    ) -> None:
        self._submit = submit
        self._step = step
        self._in_progress = in_progress
        self._put_back = put_back

    def __call__(
        self, requests: Sequence[LogprobsRequest] | Sequence[ScoreRequest]
    ) -> list[torch.Tensor]:
        """Return the rows or scores. Raise the error of one of them, or of the step.

        Other requests that end meanwhile, also by a failing step, are returned by the next step.
        """
        self._submit(requests)
        ends: dict[Request, Finished] = {}
        others: list[Finished] = []
        try:
            while len(ends) < len(requests):
                bystanders = dict.fromkeys(self._in_progress())
                try:
                    finished = self._step()
                except GenrtError as error:
                    failed = [request for request in bystanders if request not in requests]
                    others += [Finished(request, error=error.fresh()) for request in failed]
                    raise
                others += [end for end in finished if end.request not in requests]
                ends |= {end.request: end for end in finished if end.request in requests}
        finally:
            self._put_back(others)
        for end in ends.values():
            if end.error is not None:
                raise end.error
        return [cast("torch.Tensor", ends[request].result) for request in requests]

    def unused(self, vocab_size: int) -> tuple[int, ...]:
        """Return a context that no request in progress has."""
        asked = {request.token_ids for request in self._in_progress()}
        return next((token,) for token in range(vocab_size) if (token,) not in asked)
