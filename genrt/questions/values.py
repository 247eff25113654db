"""What is asked: the request values.

A request is a frozen value and holds the whole question, so that equal requests have equal answers:
it is the key by which questions are deduplicated, rows are cached and results come back.
"""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from genrt.errors import InvalidRequest

__all__ = [
    "TOKEN_BYTES",
    "Adapter",
    "Candidates",
    "DrawToken",
    "HostRow",
    "LogprobsRequest",
    "ReadRequest",
    "Request",
    "Result",
    "SampleRequest",
    "TopTokens",
    "abbreviated",
    "rebound",
    "seed_of",
]

if TYPE_CHECKING:
    import torch

    from genrt.tokens.sampling import Draw, TopLogprobs


TOKEN_BYTES = array("I").itemsize
"""What a token id takes in a packed context."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as a request binds it: its name and which loading of that name.

    ``version`` grows with every ``add_adapter`` of the name, so a request never meets, and a cache
    never returns, the weights that the name stood for before.
    """

    name: str
    version: int


@dataclass(frozen=True, slots=True, repr=False, init=False)
class LogprobsRequest:
    """The row after ``token_ids``: log-probabilities over the vocabulary, float32, normalised.

    Attributes:
        packed: the token ids as unsigned 32-bit numbers in this machine's byte order, ``TOKEN_BYTES``
            each. Contexts are long and are compared all the time: bytes are hashed and compared at the
            speed of memory, whatever number objects they were made of.
    """

    packed: bytes
    adapter: Adapter | None = None
    _hash: int = field(init=False, compare=False)

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        adapter: Adapter | None = None,
        *,
        packed: bytes | None = None,
    ) -> None:
        if packed is None:
            packed = (token_ids if type(token_ids) is array else _words(token_ids)).tobytes()
        # One is made for every question: what a frozen dataclass would do costs half as much again.
        _set_packed(self, packed)
        _set_adapter(self, adapter)
        _set_hash(self, hash((packed, adapter)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The context; unpacked every time."""
        return tuple(array("I", self.packed))

    @property
    def last_token(self) -> int:
        """The last token id of the context."""
        return int.from_bytes(self.packed[-TOKEN_BYTES:], sys.byteorder)

    @property
    def nbytes(self) -> int:
        """What the context takes in memory."""
        return len(self.packed)

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"LogprobsRequest({abbreviated(self.token_ids)}, adapter={self.adapter})"


def _words(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", token_ids)
    except OverflowError as error:
        raise InvalidRequest(f"{abbreviated(token_ids)}: no token id is negative") from error


_set_packed, _set_adapter, _set_hash = (
    vars(LogprobsRequest)[name].__set__ for name in ("packed", "adapter", "_hash")
)


@dataclass(frozen=True, slots=True, repr=False)
class SampleRequest:
    """Up to ``max_tokens`` tokens drawn one after another after ``token_ids``.

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

    @property
    def nbytes(self) -> int:
        """What the context takes in memory, packed."""
        return len(self.token_ids) * TOKEN_BYTES

    def __repr__(self) -> str:
        return (
            f"SampleRequest({abbreviated(self.token_ids)}, max_tokens={self.max_tokens}, "
            f"temperature={self.temperature}, seed={self.seed}, adapter={self.adapter})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class DrawToken:
    """Wanted of a row: one token, with its importance weight.

    Masks are long, so they are compared last. The hash looks at one only where nothing but the mask may
    tell draws apart: those with a nonce have that.

    Attributes:
        mask: the tokens that may be drawn, packed: token ``i`` is bit ``i % 8`` of byte ``i // 8``, in
            whole words of 32 bits, those beyond the vocabulary 0; ``None`` is every token.
        temperature: 0 is greedy; otherwise the row is divided by it, under the mask.
        seed: fixes the draw, whatever else is in the batch.
        nonce: sets apart the draws that are independent of each other, as in ``SampleRequest``.
    """

    mask: bytes | None = None
    temperature: float = 1.0
    seed: int | None = None
    nonce: int | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DrawToken):
            return NotImplemented
        return (
            self.nonce == other.nonce
            and self.seed == other.seed
            and self.temperature == other.temperature
            and self.mask == other.mask
        )

    def __hash__(self) -> int:
        if self.nonce is not None:
            return hash((self.temperature, self.seed, self.nonce))
        return hash((self.temperature, self.seed, self.mask))


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Wanted of a row: the ``k`` likeliest tokens, ``1 .. vocab_size``."""

    k: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Wanted of a row: the log-probabilities of these tokens."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostRow:
    """Wanted of a row: all of it, in the host's memory."""


@dataclass(frozen=True, slots=True, repr=False)
class ReadRequest:
    """What is read from a row that stays on the device. An engine never sees one: ``answers.py`` asks it
    for the row, once for all who read from it, and answers from that."""

    row: LogprobsRequest
    wanted: DrawToken | TopTokens | Candidates | HostRow
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.row, self.wanted)))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The context."""
        return self.row.token_ids

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the row is computed with."""
        return self.row.adapter

    @property
    def nbytes(self) -> int:
        """What the context takes in memory, and the mask of a draw."""
        mask = self.wanted.mask if isinstance(self.wanted, DrawToken) else None
        return self.row.nbytes + len(mask or b"")

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        kind = type(self.wanted).__name__
        return f"ReadRequest({kind}, {abbreviated(self.token_ids)}, adapter={self.adapter})"


Request: TypeAlias = LogprobsRequest | SampleRequest | ReadRequest
"""One question to the model."""

Result: TypeAlias = "torch.Tensor | tuple[int, ...] | Draw | TopLogprobs"
"""A row ``[vocab_size]`` for a LogprobsRequest, token ids for a SampleRequest; for a ReadRequest a Draw,
TopLogprobs, the candidates' log-probabilities, or the row, all on the host."""


def rebound(request: Request, adapter: Adapter | None) -> Request:
    """Return the same question to another adapter."""
    if isinstance(request, LogprobsRequest):
        return LogprobsRequest(packed=request.packed, adapter=adapter)
    if isinstance(request, ReadRequest):
        row = LogprobsRequest(packed=request.row.packed, adapter=adapter)
        return ReadRequest(row, request.wanted)
    return replace(request, adapter=adapter)


def seed_of(asked: SampleRequest | DrawToken) -> int:
    """Return what decides the draws: the seed, or what sets the request apart, or else, where there is
    neither, a number from the system."""
    if asked.seed is not None:
        return asked.seed
    if asked.nonce is not None:
        return asked.nonce
    return 0 if asked.temperature == 0.0 else secrets.randbits(62)


def abbreviated(token_ids: Sequence[int]) -> str:
    """Token ids for messages: prompts may be private, so only their number and the last few."""
    if len(token_ids) <= 4:
        return repr(list(token_ids))
    return f"[… {len(token_ids) - 2} tokens, {token_ids[-2]}, {token_ids[-1]}]"
