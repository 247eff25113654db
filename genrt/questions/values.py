"""What is asked, and what answers: the request values and the step-level Engine protocol.

A request is a frozen value and holds the whole question, so that equal requests have equal answers:
it is the key by which questions are deduplicated, rows are cached and results come back.
"""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from genrt.errors import EngineDied, EngineFailed, GenrtError, InvalidRequest, OutOfMemory

__all__ = [
    "TOKEN_BYTES",
    "Adapter",
    "Candidates",
    "DrawToken",
    "Engine",
    "EngineStatistics",
    "Finished",
    "Foreseeing",
    "HostRow",
    "LogprobsRequest",
    "ReadRequest",
    "Request",
    "Result",
    "SampleRequest",
    "TopTokens",
    "abbreviated",
    "failure",
    "rebound",
    "seed_of",
    "survived",
]

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from genrt.tokens.sampling import Draw, TopLogprobs


NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""How torch says on a CPU, by a plain RuntimeError, that memory ran out."""

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


@dataclass(slots=True)
class Finished:
    """The end of one request: exactly one of ``result`` and ``error`` is not ``None``."""

    request: Request
    result: Result | None = None
    error: GenrtError | None = None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine did since it was opened. Counters only grow.

    Attributes:
        steps: forwards that were run.
        requests: requests that they were run for.
        rows: rows computed for logprobs requests.
        sampled_tokens: tokens drawn for sample requests.
        computed_tokens: tokens put through the model.
        failed: requests that ended in an error.
        cancelled: requests that were withdrawn.
        reads: questions answered from rows that stayed on the device.
        bytes_to_host: bytes copied off the device.
        extended: rows of a resident sequence that grew by a token.
        forked: rows of a new sequence that shares the blocks of a resident one.
        evicted: resident sequences dropped to make room.
        resident: sequences that are resident at this moment.
        held: steps that were scheduled before their tokens were known.
        foreseen: of these, the steps that ran with tokens drawn on the device before anybody asked.
        seconds: how long the forwards took.
    """

    steps: int = 0
    requests: int = 0
    rows: int = 0
    sampled_tokens: int = 0
    computed_tokens: int = 0
    failed: int = 0
    cancelled: int = 0
    reads: int = 0
    bytes_to_host: int = 0
    extended: int = 0
    forked: int = 0
    evicted: int = 0
    resident: int = 0
    held: int = 0
    foreseen: int = 0
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
        """Take a flush of distinct requests, none of them in progress, for rows and samples. Raises for
        none of them or all: an error that concerns one alone comes back from ``step`` as that one's."""
        ...

    def step(self) -> list[Finished]:
        """One forward; returns the requests it finished, in any order. Nothing writes to a row any
        more; it may be part of a larger tensor, so whoever keeps one copies it. A step with nothing in
        progress returns ``[]``.

        Raises:
            EngineFailed: the forward failed, and with it every request in progress, all of which the
                engine has forgotten; it can take new ones.
        """
        ...

    def cancel(self, requests: Sequence[Request]) -> None:
        """Forget these; requests that are not in progress are ignored. Their memory is free after the
        next step, and ``step`` does not return them any more.

        An engine that raises anything but EngineDied goes on, and is told again before it gets anything
        new; if it raises again, one of these that is asked anew fails."""
        ...

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors). Its files stay as they are until the
        adapter is removed.

        Raises:
            InvalidAdapter: the directory holds no adapter that fits, or the engine takes none.
        """
        ...

    def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter. Requests in progress that are bound to it finish first. An engine that
        raises anything but EngineDied goes on; it is not told again."""
        ...

    def statistics(self) -> EngineStatistics:
        """The counters at this moment; any thread may ask."""
        ...

    def close(self) -> None:
        """Free everything, forgetting the requests in progress. Idempotent."""
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """What an Engine can do besides: begin with what will most likely be asked next."""

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: torch.Tensor) -> None:
        """From each of these rows, all different, the token in float64 ``[n]`` was drawn, -1 for none; so
        the context with it may be asked next. The tokens are on the engine's device, which may still be
        drawing them; nothing here waits for it, or raises."""
        ...


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


def failure(error: Exception, what: str = "the engine failed") -> GenrtError:
    """What an exception that came out of an engine means to who asked; one of genrt's own is itself."""
    import torch

    if isinstance(error, GenrtError):
        return error
    kind: type[GenrtError] = EngineFailed
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_CPU_MEMORY in str(error):
        kind = OutOfMemory
    elif isinstance(error, torch.AcceleratorError):
        kind = EngineDied
    translated = kind(f"{what}: {type(error).__name__}: {error}")
    translated.__cause__ = error
    return translated


def survived(error: Exception) -> GenrtError:
    """``failure``, of an engine that goes on.

    Raises:
        EngineDied: the error says that it can't.
    """
    translated = failure(error)
    if isinstance(translated, EngineDied):
        raise translated
    return translated
