"""What is asked, and what answers: the request values and the step-level Engine protocol.

A request is a frozen value and holds the whole question, so that equal requests have equal answers:
it is the key by which questions are deduplicated, rows are cached and results come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

__all__ = [
    "Adapter",
    "Engine",
    "EngineStatistics",
    "Finished",
    "LogprobsRequest",
    "Request",
    "Result",
    "SampleRequest",
    "abbreviated",
]

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from genrt.errors import GenrtError


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as a request binds it: its name and which loading of that name.

    ``version`` grows with every ``add_adapter`` of the name, so a request never meets, and a cache
    never returns, the weights that the name stood for before.
    """

    name: str
    version: int


@dataclass(frozen=True, slots=True, repr=False)
class LogprobsRequest:
    """The row after ``token_ids``: log-probabilities over the vocabulary, float32, normalised."""

    token_ids: tuple[int, ...]
    adapter: Adapter | None = None
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.token_ids, self.adapter)))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"LogprobsRequest({abbreviated(self.token_ids)}, adapter={self.adapter})"


@dataclass(frozen=True, slots=True, repr=False)
class SampleRequest:
    """Up to ``max_tokens`` tokens drawn one after another after ``token_ids``.

    Fields:
        max_tokens: how many at most, at least 1.
        stop_token_ids: drawing any of these ends the sample; it is not part of the result.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k, top_p, min_p: truncations of each step's distribution; 0, 1.0 and 0.0 are off.
        seed: fixes the draws, whatever else is in the batch.
        nonce: sets apart the requests whose answers are independent draws (those with no seed); ``None``
            where equal requests have equal answers.
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

    def __repr__(self) -> str:
        return (
            f"SampleRequest({abbreviated(self.token_ids)}, max_tokens={self.max_tokens}, "
            f"temperature={self.temperature}, seed={self.seed}, adapter={self.adapter})"
        )


Request: TypeAlias = LogprobsRequest | SampleRequest
"""One question to the model."""

Result: TypeAlias = "torch.Tensor | tuple[int, ...]"
"""A row ``[vocab_size]`` for a LogprobsRequest, token ids for a SampleRequest."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request: exactly one of ``result`` and ``error`` is not ``None``."""

    request: Request
    result: Result | None = None
    error: GenrtError | None = None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine did since it was opened; counters only grow.

    ``steps`` forwards were run for ``requests`` requests and took ``seconds``; ``rows`` were computed
    for logprobs requests, ``sampled_tokens`` drawn for sample requests, ``computed_tokens`` put through
    the model; ``failed`` requests ended in an error and ``cancelled`` ones were forgotten.
    ``bytes_to_host`` counts what was copied off the device.
    """

    steps: int = 0
    requests: int = 0
    rows: int = 0
    sampled_tokens: int = 0
    computed_tokens: int = 0
    failed: int = 0
    cancelled: int = 0
    bytes_to_host: int = 0
    seconds: float = 0.0


class Engine(Protocol):
    """What computes. Only one thread at a time calls an engine, the one that opened it.

    Step-level, so that new requests join the ones in progress between any two steps. Every submitted
    request comes back from ``step`` once, finished, unless it is cancelled first.
    """

    @property
    def vocab_size(self) -> int:
        """The length of a row; token ids are ``0 .. vocab_size - 1``."""
        ...

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens, that has a row."""
        ...

    @property
    def max_batch_size(self) -> int:
        """How many requests the engine takes to one step at most; more are worked off in several."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: one of transformers', a ``vocabulary.BytesTokenizer``, or ``None``."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush of distinct requests, none of them in progress. Raises for none of them or all:
        an error that concerns one alone comes back from ``step`` as that one's."""
        ...

    def step(self) -> list[Finished]:
        """One forward; returns the requests it finished, in any order, each row in storage that
        nothing else writes to. A step with nothing in progress returns ``[]``.

        Raises:
            EngineFailed: the forward failed, and with it every request in progress, all of which the
                engine has forgotten; it can take new ones.
        """
        ...

    def cancel(self, requests: Sequence[Request]) -> None:
        """Forget these; requests that are not in progress are ignored. Their memory is free after the
        next step, and ``step`` does not return them any more."""
        ...

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors).

        Raises:
            InvalidAdapter: the directory holds no adapter that fits, or the engine takes none.
        """
        ...

    def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter. Requests in progress that are bound to it finish first."""
        ...

    def statistics(self) -> EngineStatistics:
        """The counters at this moment; any thread may ask."""
        ...

    def close(self) -> None:
        """Free everything, forgetting the requests in progress. Idempotent."""
        ...


def abbreviated(token_ids: Sequence[int]) -> str:
    """Token ids for messages: prompts may be private, so only their number and the last few."""
    if len(token_ids) <= 4:
        return repr(list(token_ids))
    return f"[… {len(token_ids) - 2} tokens, {token_ids[-2]}, {token_ids[-1]}]"
