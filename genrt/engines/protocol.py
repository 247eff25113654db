"""The step-level Engine protocol: its methods, results and errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from genrt.errors import EngineDied, EngineFailed, GenrtError, InvalidRequest, OutOfMemory
from genrt.questions.arguments import Adapter
from genrt.questions.completions import Decoding, Streamed, Told
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle

if TYPE_CHECKING:
    from pathlib import Path

    import torch

NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""The text of torch's RuntimeError for a CPU without memory."""


@dataclass(slots=True)
class Finished:
    """The end of one request: exactly one of ``result`` and ``error`` is not ``None``."""

    request: Request
    result: Result | None = None
    error: GenrtError | None = None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters of an engine since it was opened; they only grow, except the ones of this moment.

    Attributes:
        steps: forwards that were run.
        requests: submitted requests.
        rows: rows computed for logprobs requests.
        sampled_tokens: tokens drawn for sample requests.
        scored_tokens: tokens scored for score requests.
        computed_tokens: tokens put through the model.
        failed: requests that ended in an error.
        cancelled: requests that were withdrawn.
        reads: questions answered from rows that stayed on the device.
        bytes_to_host: bytes copied off the device.
        extended: rows of a resident sequence that grew by a token.
        forked: new sequences that share the blocks of a resident one; some are made ahead.
        evicted: resident sequences dropped to make room.
        resident: sequences that are resident at this moment.
        kept_tokens: tokens of the prefixes that have KV blocks at this moment.
        prepared: steps that were scheduled before their tokens were known.
        speculated: prepared steps that ran with tokens drawn on the device ahead of requests.
        seconds: how long the forwards took.
    """

    steps: int = 0
    requests: int = 0
    rows: int = 0
    sampled_tokens: int = 0
    scored_tokens: int = 0
    computed_tokens: int = 0
    failed: int = 0
    cancelled: int = 0
    reads: int = 0
    bytes_to_host: int = 0
    extended: int = 0
    forked: int = 0
    evicted: int = 0
    resident: int = 0
    kept_tokens: int = 0
    prepared: int = 0
    speculated: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """The state and the counters of one replica of an engine.

    Attributes:
        state: ``"restarting"`` until it has all settings, ``"healthy"``, ``"dead"`` while it waits to be
            started again, or ``"retired"`` for good.
        restarts: how often it was restarted.
        in_flight: unanswered requests.
        engine: its engine's counters since it was last started.
    """

    state: str
    restarts: int
    in_flight: int
    engine: EngineStatistics


class Engine(Protocol):
    """An engine computes. Only one thread calls it, the one that opened it.

    New requests join the ones in progress between any two steps. ``step`` returns every submitted request
    once, finished, unless it is cancelled first.

    Attributes:
        vocab_size: the length of a row; token ids are ``0 .. vocab_size - 1``.
        max_model_len: the longest context, in tokens, that has a row.
        max_batch_size: the most requests of one step; more take several.
        device: where the rows are.
        tokenizer: one of transformers', a ``vocabulary.BytesTokenizer``, or ``None``.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_batch_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def tokenizer(self) -> Any: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush of distinct requests for rows and samples; none of them is in progress. If it
        raises, it takes no request. ``step`` returns an error that concerns one request alone."""

    def step(self) -> list[Finished]:
        """Run one forward; return the requests that it finished, in any order. Nothing writes to a row
        afterwards; it may be a part of a larger tensor, so copy it to keep it.

        Raises:
            EngineFailed: the forward failed, and with it every request in progress. The engine has
                forgotten them, and can take new ones.
        """

    def cancel(self, requests: Sequence[Request]) -> None:
        """Forget these requests, and ignore requests that are not in progress. ``step`` does not return
        them; their memory is free after the next step.

        After any error but EngineDied the engine goes on. ``cancel`` is called again with these
        requests before the next ``submit``; if it raises again, they fail when submitted later."""

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors). Its files stay as they are until the
        adapter is removed.

        Raises:
            InvalidAdapter: the directory holds no adapter that fits, or the engine takes no adapters.
        """

    def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter. Requests in progress that are bound to it finish first. After any error but
        EngineDied the engine goes on; the call is not repeated."""

    def statistics(self) -> EngineStatistics:
        """Return the counters at this moment. Safe from any thread."""

    def close(self) -> None:
        """Free everything, and forget the requests in progress. Idempotent."""


class Prefixes(Protocol):
    """The contexts that an engine keeps. Longer contexts start from them."""

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        """Return whether the engine keeps as much of this context as it can."""

    def keep(self, prefix: LogprobsRequest) -> None:
        """Keep everything computed of this context, now and whenever it is computed again, unless a
        request lacks the memory. Do not raise."""

    def release(self, prefix: LogprobsRequest) -> None:
        """Stop keeping this context; ignore an unknown one."""


class FullEngine(Engine, Protocol):
    """The optional methods of an engine; see ``Capabilities``.

    Attributes:
        tell: set before each step. ``step`` may call it with finished populations before it returns,
            while work for the next step is left; it does not return these again.
        scores: whether ``submit`` takes score requests, and computes each text once; otherwise rows are
            requested. Safe from any thread.
        scores_rows: whether score requests may ask for whole rows; true by default.
        reads: the kinds of reads that the engine answers itself: classes of a ``ReadRequest``'s
            ``wanted``, and ``PopulationDraw``.
        rows_by_number: whether ``continue_population`` takes requests for rows; false by default.
        blocks: whether the engine takes requests with a block: in ``continue_population``, or if its
            ``reads`` have ``PopulationDraw``; false by default.
        adapters: the adapters, by name, that an engine with ``reads`` has from the beginning.
        prefixes: the contexts that it keeps.
        vllm_config: vLLM's configuration of the model, for vLLM's front ends; ``None`` without vLLM.
    """

    tell: Callable[[Sequence[Finished]], object] | None

    @property
    def scores(self) -> bool: ...
    @property
    def scores_rows(self) -> bool: ...
    @property
    def reads(self) -> Collection[type]: ...
    @property
    def rows_by_number(self) -> bool: ...
    @property
    def blocks(self) -> bool: ...
    @property
    def adapters(self) -> dict[str, Adapter]: ...
    @property
    def prefixes(self) -> Prefixes: ...
    @property
    def vllm_config(self) -> Any: ...

    def forget_residents(self) -> None:
        """Forget everything computed that no request in progress needs."""

    # Speculation.

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: torch.Tensor) -> None:
        """Expect questions about these distinct contexts, each with the token that was drawn from its
        row: float64 ``[n]``, as draws are, -1 without one. The tokens are on the engine's device, which
        may still be drawing them: do not wait for it. Do not raise."""

    # Populations. The engine keeps their sequences, and finds them by number.

    def continue_population(self, population: PopulationDraw) -> bool:
        """Take a population if all its sequences continue known ones. ``step`` returns it once, with an
        ``AsyncHostCopy`` of its draws or of the answer for its block, or with its rows; ``cancel``
        forgets it. Rows that are not finite give a log mass, or an answer for a block, that is NaN.
        Otherwise, or without room, change nothing and return False: its rows are requested then."""

    def settle(self, population: PopulationDraw) -> None:
        """Remember the sequences of a population, after requests for single rows, so that others go on
        from them. Do not raise."""

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        """Forget these sequences, and free the memory that only they hold. Do not raise."""

    # Texts.

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return an option that the engine cannot do, and the reason; ``None`` if it can do all. Safe
        from any thread.

        Raises:
            InvalidRequest: an option is wrong, and it is cheap to see that here.
        """

    def progress(self, streamed: Sequence[Streamed]) -> Sequence[Told | None]:
        """Return the deltas of each of these streamed requests since the last call: ``None`` without any,
        or if it is not in progress. The completion has all deltas too. Do not raise."""

    # Engines that wait for others, elsewhere, in ``step``.

    def interrupt(self) -> None:
        """Have ``step`` return soon, as there is something new. Safe from any thread, and from a
        finalizer that holds locks."""

    def tend(self) -> float:
        """Look after the others while no request is in progress; return in how many seconds to do so
        again.

        Raises:
            EngineDied: there are no others any more.
        """

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        """Return the state and the counters of each. Safe from any thread."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional parts of one engine, each a group of methods of ``FullEngine``."""

    speculates: bool
    populates: bool
    rows_by_number: bool
    blocks: bool
    delivers_early: bool
    completes: bool
    scores: bool
    scores_rows: bool
    reads: frozenset[type]
    keeps_prefixes: bool
    forgets_residents: bool
    has_replicas: bool
    serves_vllm: bool


def capabilities_of(engine: Engine) -> Capabilities:
    """Return the optional parts of an engine, by the methods that it has. Slow: call it once."""

    def has(*names: str) -> bool:
        return all(hasattr(engine, name) for name in names)

    scores = bool(getattr(engine, "scores", False))
    return Capabilities(
        speculates=has("expect"),
        populates=has("continue_population", "settle", "release"),
        rows_by_number=bool(getattr(engine, "rows_by_number", False)),
        blocks=bool(getattr(engine, "blocks", False)),
        delivers_early=has("tell"),
        completes=has("unsupported", "progress"),
        scores=scores,
        scores_rows=scores and bool(getattr(engine, "scores_rows", True)),
        reads=frozenset(getattr(engine, "reads", ())),
        keeps_prefixes=has("prefixes"),
        forgets_residents=has("forget_residents"),
        has_replicas=has("interrupt", "tend", "replicas"),
        serves_vllm=has("vllm_config"),
    )


def check_supported(engine: Engine, decoding: Decoding) -> None:
    """Raise InvalidRequest unless this engine draws such completions."""
    unsupported = getattr(engine, "unsupported", None)
    reason = "it draws no completions" if unsupported is None else unsupported(decoding)
    if reason is not None:
        raise InvalidRequest(f"{type(engine).__name__} cannot do this: {reason}")


def tokenizer_of(engine: Engine) -> Any:
    """Return the model's tokenizer. Raises InvalidRequest without one."""
    if engine.tokenizer is None:
        raise InvalidRequest(
            "this model has no tokenizer: ask with token ids, or load a checkpoint that has one"
        )
    return engine.tokenizer


def failure(error: Exception, what: str = "the engine failed") -> GenrtError:
    """Return an engine's exception as an error of genrt; genrt's own stay as they are."""
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
    """Return ``failure`` of an error; raise it if it is EngineDied."""
    translated = failure(error)
    if isinstance(translated, EngineDied):
        raise translated
    return translated
