"""What callers give, checked and made into requests: the errors at the call.

Nothing here touches an engine; a request that leaves this file can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Required, TypedDict, cast

import numpy as np
import torch

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.numbers import check_float, check_int, named, shown
from genrt.questions.masks import Mask, Masks, check_masks, packed_mask
from genrt.questions.token_ids import TokenIds, advice_for, host_array, id_words
from genrt.questions.values import (
    TOKEN_BYTES,
    Adapter,
    Candidates,
    DrawToken,
    LogprobsRequest,
    ReadRequest,
    SampleRequest,
    TopTokens,
)

__all__ = [
    "Limits",
    "Mask",
    "Masks",
    "SampleOptions",
    "TokenIds",
    "check_contexts",
    "check_float",
    "check_int",
    "check_masks",
    "check_options",
    "check_timeout",
    "must_move",
]


class SampleOptions(TypedDict, total=False):
    """The options of ``AsyncLM.sample``, which documents them."""

    max_tokens: Required[int]
    stop_token_ids: Collection[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model can be asked: token ids below ``vocab_size``, contexts up to ``max_model_len``."""

    vocab_size: int
    max_model_len: int

    def token_ids(
        self, token_ids: TokenIds, *, allow_empty: bool = False, name: str = "token ids"
    ) -> tuple[int, ...]:
        """Token ids as a tuple of int; messages call them ``name``.

        Raises:
            InvalidRequest: they are no flat sequence of ints in the vocabulary, or empty.
        """
        return tuple(id_words(token_ids, self.vocab_size, allow_empty=allow_empty, name=name))

    def logprobs_request(self, token_ids: TokenIds, adapter: Adapter | None) -> LogprobsRequest:
        """Raises InvalidRequest for bad token ids, ContextTooLong for too many."""
        ids = id_words(token_ids, self.vocab_size)
        if len(ids) > self.max_model_len:
            raise ContextTooLong(
                f"a context of {len(ids)} tokens is over max_model_len={self.max_model_len}: shorten "
                'it, or load with engine_options={"max_model_len": …} if the model can take more'
            )
        return LogprobsRequest(ids, adapter)

    def sample_request(
        self,
        token_ids: TokenIds,
        adapter: Adapter | None,
        nonce: int,
        *,
        max_tokens: int,
        stop_token_ids: Collection[int] = (),
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
    ) -> SampleRequest:
        """The request; ``nonce`` sets it apart unless greedy decoding or a seed decide its answer.

        Raises:
            InvalidRequest: a parameter is of the wrong type or out of range.
            ContextTooLong: context and ``max_tokens`` are too long together.
        """
        ids = self.token_ids(token_ids)
        max_tokens = check_int("max_tokens", max_tokens, 1)
        temperature = check_float("temperature", temperature, 0.0, math.inf)
        top_p = check_float("top_p", top_p, 0.0, 1.0)
        min_p = check_float("min_p", min_p, 0.0, 1.0)
        top_k = check_int("top_k", top_k, 0)
        if top_p == 0.0:
            raise InvalidRequest("top_p must be over 0 (1.0 keeps everything), got 0")
        if seed is not None:
            seed = check_int("seed", seed, 0, _LAST_SEED)
        room = self.max_model_len - len(ids)
        if max_tokens > room:
            advice = f"max_tokens can be {room} here" if room > 0 else "shorten the context"
            raise ContextTooLong(
                f"a context of {len(ids)} tokens and max_tokens={shown(max_tokens)} are over "
                f"max_model_len={self.max_model_len} together: {advice}"
            )
        decided = temperature == 0.0 or seed is not None
        if isinstance(stop_token_ids, Set):
            stop_token_ids = tuple(stop_token_ids)
        return SampleRequest(
            ids,
            max_tokens,
            frozenset(
                self.token_ids(
                    cast("TokenIds", stop_token_ids), allow_empty=True, name="stop_token_ids"
                )
            ),
            temperature,
            max(top_p, _LEAST_TOP_P),
            top_k if top_k < self.vocab_size else 0,
            min_p,
            seed if temperature > 0.0 else None,
            adapter,
            nonce=None if decided else nonce,
        )

    def candidates_request(
        self, token_ids: TokenIds, candidates: TokenIds, adapter: Adapter | None
    ) -> ReadRequest:
        """Raises InvalidRequest for bad token ids or candidates, ContextTooLong for too many."""
        wanted = self.token_ids(candidates, allow_empty=True, name="candidates")
        return ReadRequest(self.logprobs_request(token_ids, adapter), Candidates(wanted))

    def top_request(self, token_ids: TokenIds, k: int, adapter: Adapter | None) -> ReadRequest:
        """Raises InvalidRequest for bad token ids or ``k``, ContextTooLong for too many."""
        k = check_int("k", k, 1, self.vocab_size)
        return ReadRequest(self.logprobs_request(token_ids, adapter), TopTokens(k))

    def score_requests(
        self, token_ids: TokenIds, continuation: TokenIds, adapter: Adapter | None
    ) -> list[ReadRequest]:
        """One for each token of ``continuation``, after what comes before it.

        Raises:
            InvalidRequest: bad token ids in either.
            ContextTooLong: context and continuation, less its last token, are too long together.
        """
        before = self.token_ids(token_ids)
        after = self.token_ids(continuation, allow_empty=True, name="continuation")
        whole = self.logprobs_request((*before, *after[:-1]), adapter).packed
        start = TOKEN_BYTES * len(before)
        rows = (
            LogprobsRequest(adapter=adapter, packed=whole[: start + TOKEN_BYTES * count])
            for count in range(len(after))
        )
        return [
            ReadRequest(row, Candidates((each,))) for row, each in zip(rows, after, strict=True)
        ]

    def draw_request(
        self,
        token_ids: TokenIds,
        adapter: Adapter | None,
        nonce: int,
        *,
        mask: Mask | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        place: int = 0,
    ) -> ReadRequest:
        """The draw at ``place`` of a batch; ``nonce`` sets it apart unless a seed or temperature 0
        decides it.

        Raises:
            InvalidRequest: a mask or parameter is of the wrong type, shape or range; bad token ids.
            ContextTooLong: too many of them.
        """
        row = self.logprobs_request(token_ids, adapter)
        if type(temperature) is not float or not 0.0 <= temperature < math.inf:
            temperature = check_float("temperature", temperature, 0.0, math.inf)
        if seed is not None:
            seed = check_int("seed", seed, 0, _LAST_SEED)
        packed = None if mask is None else packed_mask(mask, self.vocab_size)
        if temperature == 0.0:
            return ReadRequest(row, DrawToken(packed, 0.0))
        if seed is None:
            return ReadRequest(row, DrawToken(packed, temperature, nonce=nonce))
        own_seed = (seed + place) % (_LAST_SEED + 1)
        return ReadRequest(row, DrawToken(packed, temperature, seed=own_seed))


_LAST_SEED = 2**63 - 1

_LEAST_TOP_P = 2.0**-126
"""The least positive normal float32, in which vLLM computes. A smaller ``top_p`` has the same law: below
the likeliest token's probability, which is at least 1 / vocab_size, any keeps that token alone."""


def check_contexts(contexts: Sequence[TokenIds]) -> Sequence[TokenIds]:
    """Return the contexts, each of which is still to be checked. Raises InvalidRequest if these are no
    contexts in a sequence."""
    given: object = contexts
    if isinstance(given, np.ndarray | torch.Tensor) and given.ndim:
        contexts = given = list(host_array(given, "contexts"))
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise InvalidRequest(
            "contexts must be a sequence of token-id sequences, "
            f"got {type(contexts).__name__}{advice_for(given)}"
        )
    if len(given) and isinstance(given[0], int | np.number):
        raise InvalidRequest(
            "contexts must be a sequence of token-id sequences, got one of them: give [token_ids]"
        )
    return contexts


def must_move(device: str | torch.device | None, own: torch.device) -> bool:
    """Whether rows that are on ``own`` are to be moved to the host for who wants them on ``device``.

    Raises:
        InvalidRequest: it is neither the rows' device nor the host.
    """
    if device is None:
        return False
    advice = f"device is {named(device)}: give " + " or ".join(
        dict.fromkeys([repr(str(own)), "'cpu'"])
    )
    given: object = device
    if not isinstance(given, str | int | torch.device):  # or torch's error would show what it is
        raise InvalidRequest(advice)
    try:
        wanted = torch.device(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(advice) from error
    if wanted.type == own.type and wanted.index in (None, own.index):
        return False
    if wanted.type != "cpu":
        raise InvalidRequest(f"device is {device!r}: rows are on {own}; give 'cpu' to move them")
    return True


def check_timeout(seconds: float | None) -> float | None:
    """Return it as a Python float, or ``None``. Raises InvalidRequest unless it is a finite number of at
    least 0."""
    if seconds is None:
        return None
    check_float("timeout", seconds, 0.0, math.inf)
    return float(seconds)  # what numpy's narrow floats are added to loses its precision


def check_options(method: str, options: SampleOptions) -> None:
    """Raises TypeError, as Python does for ``method``, if one is unknown or ``max_tokens`` is missing."""
    for name in options:
        if name not in SampleOptions.__annotations__:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
    if "max_tokens" not in options:
        raise TypeError(f"{method}() missing a required keyword argument: 'max_tokens'")
