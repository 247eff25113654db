"""Samples: tokens drawn one after another by the engine's own decode loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Required, TypeAlias, TypedDict

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.numbers import check_float, check_int, nearest, shown
from genrt.questions.contexts import Adapter, Limits, TokenIds, abbreviated, check_seed, seed_at
from genrt.questions.request import Request

__all__ = [
    "DECODING_CHECKS",
    "Check",
    "DecodingOptions",
    "SampleOptions",
    "SampleRequest",
    "check_among",
    "check_number",
    "check_room",
    "sample_request",
    "sample_requests",
]

HIGHEST_TEMPERATURE = 2.0**100
"""A higher one has the same law in float32, in which vLLM computes: every token is as likely. One beyond
float32 would make the logits of masked tokens NaN."""
LEAST_TOP_P = 2.0**-126
"""The least positive normal float32, in which vLLM computes. A smaller ``top_p`` has the same law: below
the likeliest token's probability, which is at least 1 / vocab_size, any keeps that token alone."""


@dataclass(frozen=True, slots=True, repr=False)
class SampleRequest(Request):
    """Up to ``max_tokens`` tokens drawn one after another after ``token_ids``. The answer is a tuple of
    token ids.

    Attributes:
        max_tokens: how many at most, at least 1.
        stop_token_ids: drawing any of these ends the sample; it is not part of the result.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: the likeliest tokens that have this probability together are kept; 1.0 is off.
        top_k: so many of the likeliest tokens are kept; 0 is off.
        min_p: tokens of at least this share of the likeliest one's probability are kept; 0.0 is off.
        seed: fixes the draws, whatever else is in the batch.
        nonce: sets apart the requests whose answers are independent draws (those with no seed), and is
            what they are drawn from: see ``seed_of``. ``None`` where equal requests have equal answers.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    adapter: Adapter | None = None
    nonce: int | None = None
    weights_version: int = 0

    def __repr__(self) -> str:
        return (
            f"SampleRequest({abbreviated(self.token_ids)}, max_tokens={self.max_tokens}, "
            f"temperature={self.temperature}, seed={self.seed}, adapter={self.adapter})"
        )


class DecodingOptions(TypedDict, total=False):
    """The options of whatever is drawn token by token.

    Attributes:
        temperature: logits are divided by it; below 1e-5 it is greedy.
        top_p: keep the likeliest tokens that have this probability together; 1.0 is off.
        top_k: keep so many of the likeliest tokens; 0 is off.
        min_p: keep tokens of at least this share of the likeliest one's probability; 0.0 is off.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float


class SampleOptions(DecodingOptions, total=False):
    """The options of ``AsyncLM.sample``, with those of ``DecodingOptions``.

    Attributes:
        stop_token_ids: any of these ends the sample, and is not returned. Nothing else ends it early:
            give ``tokenizer.eos_token_id`` to stop there.
        seed: makes the draws reproducible, whatever else is in the batch. Without one, equal calls are
            independent draws.
    """

    max_tokens: Required[int]
    stop_token_ids: Collection[int]
    seed: int | None
    adapter: str | None


Check: TypeAlias = Callable[[Limits, str, Any], Any]
"""Returns the value of an option by its name, as plain types; raises InvalidRequest if it is wrong."""


def check_number(low: float, high: float = math.inf) -> Check:
    """Return the check of a number from ``low`` to ``high``."""
    return lambda _, name, value: check_float(name, value, low, high)


def check_among(names: Collection[str]) -> Check:
    """Return the check of a text that is one of these."""

    def check(_: Limits, name: str, value: object) -> object:
        if not isinstance(value, str) or value not in names:
            raise InvalidRequest(f"{name} must be one of {sorted(names)}, got {shown(value)}")
        return value

    return check


def _top_p(_: Limits, name: str, value: object) -> float:
    top_p = check_float(name, value, 0.0, 1.0)
    if top_p == 0.0:
        raise InvalidRequest("top_p must be over 0 (1.0 keeps everything), got 0")
    return max(top_p, LEAST_TOP_P)


def _temperature(_: Limits, name: str, value: float) -> float:
    return min(check_float(name, value, 0.0), HIGHEST_TEMPERATURE)


def _top_k(limits: Limits, name: str, value: int) -> int:
    top_k = check_int(name, value, 0)
    return top_k if top_k < limits.vocab_size else 0


def _stop_token_ids(limits: Limits, name: str, value: Any) -> tuple[int, ...]:
    stops = tuple(value) if isinstance(value, Set) else value
    return tuple(sorted({*limits.token_ids(stops, allow_empty=True, name=name)}))


DECODING_CHECKS: dict[str, Check] = {
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": check_number(0.0, 1.0),
    "stop_token_ids": _stop_token_ids,
}
"""How the options that samples and completions share are read, by their names."""


def check_room(limits: Limits, length: int, max_tokens: int) -> int:
    """Return ``max_tokens``. Raises ContextTooLong unless so many tokens fit behind ``length`` others."""
    room = limits.max_model_len - length
    if max_tokens > room:
        advice = f"max_tokens can be {room} here" if room > 0 else "shorten the context"
        raise ContextTooLong(
            f"a context of {length} tokens and max_tokens={shown(max_tokens)} are over "
            f"max_model_len={limits.max_model_len} together: {advice}"
        )
    return max_tokens


def sample_request(
    limits: Limits,
    token_ids: TokenIds,
    adapter: Adapter | None,
    nonce: int,
    *,
    max_tokens: int,
    seed: int | None = None,
    **options: Any,
) -> SampleRequest:
    """Return the request for a sample; ``nonce`` sets it apart unless greedy decoding or a seed decide
    its answer.

    Raises:
        InvalidRequest: a parameter is of the wrong type or out of range.
        ContextTooLong: context and ``max_tokens`` are too long together.
    """
    ids = limits.token_ids(token_ids)
    max_tokens = check_int("max_tokens", max_tokens, 1)
    checked = {name: DECODING_CHECKS[name](limits, name, each) for name, each in options.items()}
    checked["stop_token_ids"] = frozenset(checked.get("stop_token_ids", ()))
    seed = check_seed(seed)
    check_room(limits, len(ids), max_tokens)
    request = SampleRequest(ids, max_tokens, adapter=adapter, **checked)
    if request.temperature == 0.0:
        return request
    return replace(request, seed=seed, nonce=nonce if seed is None else None)


def sample_requests(
    limits: Limits,
    contexts: Sequence[TokenIds],
    adapter: Adapter | None,
    nonces: Iterator[int],
    method: str,
    options: Mapping[str, Any],
) -> list[SampleRequest]:
    """Return a request for each context; context ``i`` is drawn with seed ``seed + i``. Wrong options
    raise for no contexts too: TypeError, as Python does for ``method``, if one is unknown or
    ``max_tokens`` is missing; else as ``sample_request``."""
    for name in options:
        if name not in SampleOptions.__annotations__:
            near = nearest(name, SampleOptions.__annotations__)
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{near}")
    if "max_tokens" not in options:
        raise TypeError(f"{method}() missing a required keyword argument: 'max_tokens'")
    if len(contexts) == 0:
        sample_request(limits, [0], adapter, 0, **options)
    requests: list[SampleRequest] = []
    for place, token_ids in enumerate(contexts):
        request = sample_request(limits, token_ids, adapter, next(nonces), **options)
        if request.seed is not None:
            request = replace(request, seed=seed_at(request.seed, place))
        requests.append(request)
    return requests
