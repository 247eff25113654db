"""Samples on their way: those that wait for a slot of vLLM, and the tokens of those that have one.

Rules:
    Samples leave an eighth of the running slots free, and at least one, so that a logprobs request never
    waits for a long sample to end. If one slot is asked for, vLLM gets two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from vllm.sampling_params import SamplingParams

from genrt.engines.vllm.capture import SEED
from genrt.questions.contexts import seed_of
from genrt.questions.request import Request
from genrt.questions.samples import SampleRequest
from genrt.tokens.sampling import GREEDY_BELOW

__all__ = ["Samples", "sample_params"]

COOLEST, HOTTEST = 0.01, 2.0
"""The temperatures that vLLM lets users give; its runners take any that is not greedy."""


class Samples:
    """The samples of one engine, which has ``slots`` for requests."""

    def __init__(self, slots: int) -> None:
        self._most = slots - max(1, slots // 8)
        self._waiting: dict[SampleRequest, None] = {}
        self._drawn: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Return how many samples wait for a slot."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[SampleRequest]:
        """The samples that wait for a slot."""
        return [*self._waiting]

    def wait(self, requests: Sequence[Request]) -> None:
        """Have the samples among these wait for a slot."""
        self._waiting.update((each, None) for each in requests if isinstance(each, SampleRequest))

    def admitted(self) -> Iterator[SampleRequest]:
        """Yield samples for which there is a slot; each is begun before the next is asked for."""
        while self._waiting and len(self._drawn) < self._most:
            request = next(iter(self._waiting))
            del self._waiting[request]
            yield request

    def begin(self, request_id: str) -> None:
        """Begin the tokens of a sample that vLLM has taken."""
        self._drawn[request_id] = []

    def extend(self, request_id: str, token_ids: Sequence[int]) -> list[int] | None:
        """Append new tokens to a sample; return all of it, ``None`` if the request is no sample."""
        drawn = self._drawn.get(request_id)
        if drawn is not None:
            drawn += token_ids
        return drawn

    def end(self, request_id: str) -> None:
        """Forget a request of vLLM's, if it is a sample."""
        self._drawn.pop(request_id, None)

    def withdraw(self, unwanted: Collection[Request]) -> int:
        """Have these wait no more; return how many did."""
        gone = [request for request in self._waiting if request in unwanted]
        for request in gone:
            del self._waiting[request]
        return len(gone)

    def clear(self) -> None:
        """Forget the samples that wait."""
        self._waiting.clear()


def sample_params(request: SampleRequest, *, drawn_here: bool) -> SamplingParams:
    """Return how vLLM is asked for a sample; raise what vLLM raises for a value it does not take.

    With ``drawn_here``, the capture draws the tokens, and is the one to know the seed."""
    greedy = request.temperature < GREEDY_BELOW
    params = SamplingParams(
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        temperature=0.0 if greedy else min(max(request.temperature, COOLEST), HOTTEST),
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        ignore_eos=True,
        detokenize=False,
    )
    if not greedy:
        params.temperature = request.temperature
        if drawn_here:
            params.extra_args = {SEED: seed_of(request)}
        else:
            params.seed = seed_of(request)
    return params
