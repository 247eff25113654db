"""The questions that are answered from a row without moving it: draws, tops, candidates, scores.

This is the part of ``AsyncLM`` that asks them; ``answers.py`` answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch

from genrt.errors import UnknownAdapter
from genrt.numbers import named
from genrt.questions.checks import (
    Limits,
    Mask,
    Masks,
    TokenIds,
    check_contexts,
    check_masks,
    check_timeout,
)
from genrt.questions.values import Adapter, ReadRequest, Request, Result, rebound
from genrt.runtime.batcher import Batcher
from genrt.runtime.thread import EngineThread
from genrt.tokens.sampling import BatchDraw, Draw, TopLogprobs

__all__ = ["Reads"]

T = TypeVar("T")


class Reads:
    """What ``AsyncLM`` asks of rows. None of it moves a row to the host, or keeps it in the cache."""

    def __init__(self, thread: EngineThread, limits: Limits, seed: int | None) -> None:
        self._thread = thread
        self._limits = limits
        self._adapters: dict[str, Adapter] = {}
        # What is asked without a seed is drawn from its nonce. Each of these sequences begins somewhere
        # among 2**62 numbers, so that no two runtimes share one, nor one with the seeds that users give.
        [first] = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        self._nonces = itertools.count(int(first) >> 2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a runtime cannot be copied or pickled, since it owns an engine and its thread: hand it on "
            "as it is, and load another one in another process"
        )

    async def draw(
        self,
        token_ids: TokenIds,
        *,
        mask: Mask | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> Draw:
        """One token from the row after ``token_ids``, restricted to ``mask``, with its weight.

        The result's ``logprob`` is the log-probability with which the token was drawn, and ``log_mass``
        is ``logsumexp(row[mask])``, of the row itself whatever the temperature: at temperature 1 the
        incremental log importance weight. At another, the weight is ``row[token_id] - logprob``. No mass
        under the mask is a dead end and no error: token -1, ``log_mass`` -inf.

        Concurrent draws are batched, on the engine's device, and those after equal contexts share a row.
        A row that is in the cache is used; one computed for a draw is not put there.

        Args:
            mask: what may be drawn: bool ``[vocab_size]``; token ids as a list, a set or int64; or a
                packed bitmask, int32 ``[ceil(vocab_size / 32)]``, as ``constraints.bitmasks`` makes.
                ``None`` is all, and integers of any other type are refused.
            temperature: 0 is greedy.
            seed: makes the draw reproducible, whatever else is in the batch; draws of equal seeds share
                their randomness, so give each one of its own. Without one, calls are independent.

        Raises:
            InvalidRequest: a mask or parameter that fits nothing; else as ``next_token_logprobs``.
        """
        request = self._draw_request(token_ids, mask, temperature, seed, self._bound(adapter))
        return _only(Draw, await self._ask(timeout, (request,)))

    def draw_sync(
        self,
        token_ids: TokenIds,
        *,
        mask: Mask | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> Draw:
        """``draw``, blocking. An interrupt withdraws the question."""
        request = self._draw_request(token_ids, mask, temperature, seed, self._bound(adapter))
        return _only(Draw, self._ask_sync(timeout, (request,)))

    async def batch_draw(
        self,
        contexts: Sequence[TokenIds],
        *,
        masks: Masks | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> BatchDraw:
        """One ``draw`` after each of ``contexts``, in order, as one question; tensors on the host.

        ``masks`` has a mask, or ``None``, for each context: a sequence, or the rows of a bool or packed
        tensor. With a ``seed``, context ``i`` is drawn with seed ``seed + i``.
        """
        requests = self._draw_requests(contexts, masks, temperature, seed, adapter)
        return _batch_draw(await self._ask(timeout, requests))

    def batch_draw_sync(
        self,
        contexts: Sequence[TokenIds],
        *,
        masks: Masks | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> BatchDraw:
        """``batch_draw``, blocking. An interrupt withdraws the question."""
        requests = self._draw_requests(contexts, masks, temperature, seed, adapter)
        return _batch_draw(self._ask_sync(timeout, requests))

    async def token_logprobs(
        self,
        token_ids: TokenIds,
        candidates: TokenIds,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """The row's entries for ``candidates``: float32 ``[len(candidates)]`` on the host."""
        request = self._limits.candidates_request(token_ids, candidates, self._bound(adapter))
        return _only(torch.Tensor, await self._ask(timeout, (request,)))

    def token_logprobs_sync(
        self,
        token_ids: TokenIds,
        candidates: TokenIds,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """``token_logprobs``, blocking. An interrupt withdraws the question."""
        request = self._limits.candidates_request(token_ids, candidates, self._bound(adapter))
        return _only(torch.Tensor, self._ask_sync(timeout, (request,)))

    async def top_logprobs(
        self,
        token_ids: TokenIds,
        k: int,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> TopLogprobs:
        """The ``k`` likeliest tokens, likeliest first: ``(token_ids, logprobs)``, ``[k]`` on the host."""
        request = self._limits.top_request(token_ids, k, self._bound(adapter))
        return _only(TopLogprobs, await self._ask(timeout, (request,)))

    def top_logprobs_sync(
        self,
        token_ids: TokenIds,
        k: int,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> TopLogprobs:
        """``top_logprobs``, blocking. An interrupt withdraws the question."""
        request = self._limits.top_request(token_ids, k, self._bound(adapter))
        return _only(TopLogprobs, self._ask_sync(timeout, (request,)))

    async def score(
        self,
        token_ids: TokenIds,
        continuation: TokenIds,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """The log-probability of each token of ``continuation``, given those before it: float32
        ``[len(continuation)]`` on the host; their sum is the continuation's.

        It takes a row for each token, all in one question; the engine's prefix cache makes each cost
        little more than its own token.
        """
        requests = self._limits.score_requests(token_ids, continuation, self._bound(adapter))
        return _joined(await self._ask(timeout, requests))

    def score_sync(
        self,
        token_ids: TokenIds,
        continuation: TokenIds,
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """``score``, blocking. An interrupt withdraws the question."""
        requests = self._limits.score_requests(token_ids, continuation, self._bound(adapter))
        return _joined(self._ask_sync(timeout, requests))

    def _ask(
        self, timeout: float | None, requests: Sequence[Request], *, stacked: bool = False
    ) -> Coroutine[Any, Any, list[Result]]:
        seconds = check_timeout(timeout)
        if requests and requests[0].adapter is not None:
            return self._ask_adapter(seconds, requests, stacked)
        return self._batcher.ask(requests, stacked=stacked, timeout=seconds)

    async def _ask_adapter(
        self, timeout: float | None, requests: Sequence[Request], stacked: bool
    ) -> list[Result]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return await self._batcher.ask(requests, stacked=stacked, timeout=timeout)
            except UnknownAdapter as error:
                requests = self._bound_anew(requests, error)
                timeout = _left(until)

    def _ask_sync(
        self, timeout: float | None, requests: Sequence[Request], *, stacked: bool = False
    ) -> list[Result]:
        seconds = check_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                return self._batcher.ask_sync(requests, stacked=stacked, timeout=seconds)
            except UnknownAdapter as error:
                requests = self._bound_anew(requests, error)
                seconds = _left(until)

    def _bound_anew(self, requests: Sequence[Request], error: UnknownAdapter) -> list[Request]:
        """Return these, whose adapter the engine does not know, bound to what its name stands for now:
        another thread has loaded or removed it while they were made.

        Raises:
            UnknownAdapter: that is nothing; or what the engine raised, if it is the same still.
        """
        before = requests[0].adapter
        adapter = self._bound(before.name) if before is not None else None
        if adapter == before:
            raise error
        return [rebound(request, adapter) for request in requests]

    @property
    def _batcher(self) -> Batcher:
        return self._thread.batcher

    def _loaded_names(self) -> tuple[str, ...]:
        lost = self._thread.adapters.lost
        return tuple(name for name, adapter in list(self._adapters.items()) if adapter not in lost)

    def _bound(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        adapter = self._adapters.get(name) if isinstance(name, str) else None
        lost = self._thread.adapters.lost
        if adapter in lost:
            raise lost[adapter].fresh()
        if adapter is None:
            loaded = ", ".join(map(repr, self._loaded_names())) or "none"
            raise UnknownAdapter(
                f"no adapter is named {named(name)} (loaded: {loaded}); load it with add_adapter first"
            )
        return adapter

    def _draw_requests(
        self,
        contexts: Sequence[TokenIds],
        masks: Masks | None,
        temperature: float,
        seed: int | None,
        adapter: str | None,
    ) -> list[ReadRequest]:
        bound = self._bound(adapter)
        given = check_masks(masks, len(check_contexts(contexts)))
        if not given:
            self._draw_request(
                [0], None, temperature, seed, bound
            )  # raises what is wrong with these
        return [
            self._draw_request(ids, mask, temperature, seed, bound, place=place)
            for place, (ids, mask) in enumerate(zip(contexts, given, strict=True))
        ]

    def _draw_request(
        self,
        token_ids: TokenIds,
        mask: Mask | None,
        temperature: float,
        seed: int | None,
        adapter: Adapter | None,
        *,
        place: int = 0,
    ) -> ReadRequest:
        return self._limits.draw_request(
            token_ids,
            adapter,
            next(self._nonces),
            mask=mask,
            temperature=temperature,
            seed=seed,
            place=place,
        )


def _left(until: float | None) -> float | None:
    """Return how many seconds are left, if there is an end to them."""
    return None if until is None else max(0.0, until - time.monotonic())


def _only(kind: type[T], results: list[Result]) -> T:
    return cast("T", results[0])


def _batch_draw(draws: list[Result]) -> BatchDraw:
    drawn = cast("list[Draw]", draws)
    return BatchDraw(
        torch.tensor([each.token_id for each in drawn], dtype=torch.int64),
        torch.tensor([each.logprob for each in drawn]),
        torch.tensor([each.log_mass for each in drawn]),
    )


def _joined(scores: list[Result]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *cast("list[torch.Tensor]", scores)])
