"""What callers give, checked and made into requests: the errors at the call.

Nothing here touches an engine; a request that leaves this file can be computed.
"""

from __future__ import annotations

import array
import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any, Required, TypeAlias, TypedDict, cast

import numpy as np
import torch

from genrt.engine import (
    Adapter,
    Candidates,
    DrawToken,
    LogprobsRequest,
    ReadRequest,
    SampleRequest,
    TopTokens,
)
from genrt.errors import ContextTooLong, InvalidRequest
from genrt.numbers import check_float, check_int, shown

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
    "must_move",
]

TokenIds = Sequence[int] | np.ndarray | torch.Tensor
"""Token ids as callers give them; a request holds them as a tuple of int."""


Mask: TypeAlias = torch.Tensor | np.ndarray | Sequence[int] | Set[int]
"""The tokens that may be drawn: bool ``[vocab_size]``, token ids, or a packed bitmask, int32
``[ceil(vocab_size / 32)]`` with token ``i`` at bit ``i % 32`` of word ``i // 32``."""

Masks: TypeAlias = Sequence[Mask | None] | torch.Tensor | np.ndarray
"""A mask for each context, or a bool or packed matrix of them."""


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
        return tuple(self._words(token_ids, allow_empty=allow_empty, name=name))

    def _words(
        self, token_ids: TokenIds, *, allow_empty: bool = False, name: str = "token ids"
    ) -> array.array[int]:
        if type(token_ids) is not list and type(token_ids) is not tuple:
            token_ids = _sequence(token_ids, name)
        try:
            words = array.array("I", token_ids)
        except (TypeError, OverflowError, ValueError):
            raise InvalidRequest(self._what_is_wrong(token_ids, name)) from None
        if not words:
            if allow_empty:
                return words
            raise InvalidRequest("an empty prompt has no next token: give at least one token id")
        if words[np.frombuffer(words, np.uint32).argmax()] >= self.vocab_size:
            raise InvalidRequest(self._what_is_wrong(words, name))
        return words

    def _what_is_wrong(self, token_ids: Sequence[Any], name: str) -> str:
        for position, token_id in enumerate(token_ids):
            if not isinstance(token_id, int | np.integer):
                kind = type(token_id).__name__
                return f"{name} must be int, but at position {position} there is a {kind}"
            if not 0 <= token_id < self.vocab_size:
                return (
                    f"{name} must be in the vocabulary, from 0 to {self.vocab_size - 1}, "
                    f"but at position {position} there is {shown(token_id)}"
                )
        return f"{name} must be one flat sequence of int"

    def logprobs_request(self, token_ids: TokenIds, adapter: Adapter | None) -> LogprobsRequest:
        """Raises InvalidRequest for bad token ids, ContextTooLong for too many."""
        ids = self._words(token_ids)
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
        self.logprobs_request(
            (*before, *after[:-1]), adapter
        )  # the longest, so that it raises first
        return [
            self.candidates_request((*before, *after[:count]), (token_id,), adapter)
            for count, token_id in enumerate(after)
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
        packed = None if mask is None else self.packed(mask)
        if temperature == 0.0:
            return ReadRequest(row, DrawToken(packed, 0.0))
        if seed is None:
            return ReadRequest(row, DrawToken(packed, temperature, nonce=nonce))
        own_seed = (seed + place) % (_LAST_SEED + 1)
        return ReadRequest(row, DrawToken(packed, temperature, seed=own_seed))

    def packed(self, mask: Mask) -> bytes:
        """A mask as ``engine.DrawToken`` has it; the same for every form of the same mask.

        Raises:
            InvalidRequest: it is none of the forms, or of another length.
        """
        words = -(-self.vocab_size // 32)
        if isinstance(mask, _TABLES) and mask.dtype in (torch.int32, np.int32):
            self._check_length(mask, "packed int32", words)
            packed = _array(mask).tobytes()
            if beyond := self.vocab_size % 32:
                last = int.from_bytes(packed[-4:], "little")
                if last >> beyond:
                    packed = packed[:-4] + (last & (1 << beyond) - 1).to_bytes(4, "little")
            return packed
        if isinstance(mask, _TABLES) and mask.dtype in (torch.bool, np.bool_):
            self._check_length(mask, "bool", self.vocab_size)
            bits = _array(mask)
        else:
            given = tuple(mask) if isinstance(mask, Set) else mask
            if isinstance(given, Sequence) and bool in set(map(type, given)):
                raise InvalidRequest(
                    "mask is a sequence of bool: give a bool tensor or array, or the allowed token ids"
                )
            bits = np.zeros(self.vocab_size, dtype=np.bool_)
            bits[list(self.token_ids(given, allow_empty=True, name="mask"))] = True
        return np.packbits(bits, bitorder="little").tobytes().ljust(4 * words, b"\0")

    def _check_length(self, mask: torch.Tensor | np.ndarray, form: str, length: int) -> None:
        if tuple(mask.shape) != (length,):
            raise InvalidRequest(
                f"mask is {form} of shape {list(mask.shape)}: give bool [{self.vocab_size}], packed "
                f"int32 [{-(-self.vocab_size // 32)}], or token ids as a list"
            )


_LAST_SEED = 2**63 - 1

_LEAST_TOP_P = 2.0**-126
"""The least positive normal float32, in which vLLM computes. A smaller ``top_p`` has the same law: below
the likeliest token's probability, which is at least 1 / vocab_size, any keeps that token alone."""

_TABLES = (torch.Tensor, np.ndarray)


def _array(mask: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(mask, np.ndarray):
        return mask
    return (mask if mask.is_cpu else mask.cpu()).numpy()


def _sequence(token_ids: TokenIds, name: str) -> Sequence[int]:
    """What is neither a list nor a tuple, if it is a sequence of token ids all the same."""
    if isinstance(token_ids, torch.Tensor | np.ndarray):
        return _integers(token_ids, name)
    if isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(
        token_ids, Sequence
    ):
        raise InvalidRequest(
            f"{name} must be a sequence of int, got {type(token_ids).__name__}; "
            "for text, give encode(text)"
        )
    return token_ids


def _integers(token_ids: np.ndarray | torch.Tensor, name: str) -> list[int]:
    """The ints of a flat array or tensor. Raises InvalidRequest if it is no such thing."""
    if isinstance(token_ids, torch.Tensor):
        dtype = token_ids.dtype
        integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    else:
        integers = np.issubdtype(token_ids.dtype, np.integer)
    if token_ids.ndim != 1 or not (integers or len(token_ids) == 0):
        raise InvalidRequest(
            f"{name} must be one flat sequence of int, got {token_ids.dtype} "
            f"of shape {list(token_ids.shape)}"
        )
    return cast("list[int]", token_ids.tolist())


def check_contexts(contexts: Sequence[TokenIds]) -> Sequence[TokenIds]:
    """Raises InvalidRequest if these are no contexts in a sequence; each is checked on its own."""
    given: object = contexts
    scalar = isinstance(given, np.ndarray | torch.Tensor) and given.ndim == 0
    if (
        scalar
        or isinstance(given, str | bytes)
        or not isinstance(given, Sequence | np.ndarray | torch.Tensor)
    ):
        raise InvalidRequest(
            f"contexts must be a sequence of token-id sequences, got {type(contexts).__name__}"
        )
    return contexts


def check_masks(masks: Masks | None, count: int) -> Sequence[Mask | None]:
    """A mask or ``None`` for each of ``count`` contexts; each is checked on its own.

    Raises:
        InvalidRequest: these are no masks in a sequence, or not as many.
    """
    if masks is None:
        return [None] * count
    if isinstance(masks, torch.Tensor | np.ndarray):
        if masks.ndim != 2:
            raise InvalidRequest(
                f"masks have shape {list(masks.shape)}: give one row for each of {count} contexts"
            )
        masks = list(_array(masks))
    given: object = masks
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise InvalidRequest(f"masks must be a sequence of masks, got {type(masks).__name__}")
    if len(masks) != count:
        raise InvalidRequest(f"{len(masks)} masks for {count} contexts: give one for each")
    return masks


def must_move(device: str | torch.device | None, own: torch.device) -> bool:
    """Whether rows that are on ``own`` are to be moved to the host for who wants them on ``device``.

    Raises:
        InvalidRequest: it is neither the rows' device nor the host.
    """
    if device is None:
        return False
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidRequest(f"device is {device!r}: give {str(own)!r} or 'cpu'") from error
    if wanted.type == own.type and wanted.index in (None, own.index):
        return False
    if wanted.type != "cpu":
        raise InvalidRequest(f"device is {device!r}: rows are on {own}; give 'cpu' to move them")
    return True


def check_timeout(seconds: float | None) -> float | None:
    """Raises InvalidRequest unless it is ``None`` or a finite number of at least 0; returns it."""
    if seconds is not None:
        check_float("timeout", seconds, 0.0, math.inf)
    return seconds
