"""The step-level Engine protocol: what an engine is, what it returns, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from genrt.errors import EngineDied, EngineFailed, GenrtError, InvalidRequest, OutOfMemory
from genrt.questions.completions import Decoding, Streamed, Told
from genrt.questions.contexts import Adapter
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = [
    "Capabilities",
    "Engine",
    "EngineStatistics",
    "Finished",
    "FullEngine",
    "ReplicaStatistics",
    "capabilities_of",
    "check_supported",
    "failure",
    "survived",
    "tokenizer_of",
]

NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""How torch says on a CPU, by a plain RuntimeError, that memory ran out."""


@dataclass(slots=True)
class Finished:
    """The end of one request: exactly one of ``result`` and ``error`` is not ``None``."""

    request: Request
    result: Result | None = None
    error: GenrtError | None = None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters of an engine since it was opened; they only grow, but for what is said to be of this
    moment.

    Attributes:
        steps: forwards that were run.
        requests: requests that they were run for.
        rows: rows computed for logprobs requests.
        sampled_tokens: tokens drawn for sample requests.
        scored_tokens: tokens whose log-probabilities were computed for score requests.
        computed_tokens: tokens put through the model.
        failed: requests that ended in an error.
        cancelled: requests that were withdrawn.
        reads: questions answered from rows that stayed on the device.
        bytes_to_host: bytes copied off the device.
        extended: rows of a resident sequence that grew by a token.
        forked: new sequences that share the blocks of a resident one, some of them made ahead.
        evicted: resident sequences dropped to make room.
        resident: sequences that are resident at this moment.
        kept_tokens: tokens of prefixes whose KV blocks are held at this moment.
        prepared: steps that were scheduled before their tokens were known.
        speculated: prepared steps that ran with tokens drawn on the device before anybody asked.
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
    """One replica of an engine: what it is at this moment, and has done.

    Attributes:
        state: ``"healthy"``, ``"suspect"``, ``"stale"``, ``"restarting"``, ``"dead"`` or ``"retired"``.
        restarts: how often it was started again.
        in_flight: requests that it has not answered.
        engine: its engine's counters since it was last started.
    """

    state: str
    restarts: int
    in_flight: int
    engine: EngineStatistics


class Engine(Protocol):
    """An engine computes. Only one thread calls it, the one that opened it.

    Step-level, so that new requests join the ones in progress between any two steps. Every submitted
    request comes back from ``step`` once, finished, unless it is cancelled first.
    """

    @property
    def vocab_size(self) -> int:
        """The length of a row; token ids are ``0 .. vocab_size - 1``."""

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens, that has a row."""

    @property
    def max_batch_size(self) -> int:
        """How many requests the engine takes to one step at most; more are worked off in several."""

    @property
    def device(self) -> torch.device:
        """Where the rows are."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: one of transformers', a ``vocabulary.BytesTokenizer``, or ``None``."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush of distinct requests, none of them in progress, for rows and samples. Raises for
        none of them or all: an error that concerns one alone comes back from ``step`` as that one's."""

    def step(self) -> list[Finished]:
        """Run one forward; return the requests it finished, in any order, ``[]`` if none is in progress.
        Nothing writes to a row any more; it may be part of a larger tensor, so whoever keeps one copies
        it.

        Raises:
            EngineFailed: the forward failed, and with it every request in progress, all of which the
                engine has forgotten; it can take new ones.
        """

    def cancel(self, requests: Sequence[Request]) -> None:
        """Forget these; requests that are not in progress are ignored. Their memory is free after the
        next step, and ``step`` does not return them any more.

        An engine that raises anything but EngineDied goes on, and is told again before it gets anything
        new; if it raises again, one of these that is asked anew fails."""

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load the LoRA adapter in directory ``path`` (safetensors). Its files stay as they are until the
        adapter is removed.

        Raises:
            InvalidAdapter: the directory holds no adapter that fits, or the engine takes none.
        """

    def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter. Requests in progress that are bound to it finish first. An engine that
        raises anything but EngineDied goes on; it is not told again."""

    def statistics(self) -> EngineStatistics:
        """Return the counters at this moment; any thread may ask."""

    def close(self) -> None:
        """Free everything, forgetting the requests in progress. Idempotent."""


class Prefixes(Protocol):
    """The contexts that an engine keeps, so that others which begin with them start from there."""

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        """Return whether this one is kept, and nothing of it that can be kept is lacking."""

    def keep(self, prefix: LogprobsRequest) -> None:
        """Keep what is computed of this context, now and whenever it is computed again. Nothing is
        refused for it, and nothing waits for ever: rather it is given up. Do not raise."""

    def release(self, prefix: LogprobsRequest) -> None:
        """Keep this context no more; ignore one that is not kept."""


class FullEngine(Engine, Protocol):
    """Every method that an engine may have beside those of ``Engine``; ``Capabilities`` tells which."""

    tell: Callable[[Sequence[Finished]], object] | None
    """May be called by ``step`` with the ends of populations, which it does not return then, once only
    the next step depends on the rest of the work. Set before each step."""

    # Speculation.

    def expect(self, rows: Sequence[LogprobsRequest], token_ids: torch.Tensor) -> None:
        """Expect questions about these contexts, all different, each with the token that was drawn from
        its row: float64 ``[n]``, -1 for none. The tokens are on the engine's device, which may still be
        drawing them; do not wait for it, and do not raise."""

    # Populations, whose sequences the engine keeps and finds by number.

    def go_on(self, population: PopulationDraw) -> bool:
        """Take a population whose sequences all go on from known ones: ``step`` returns it once, ended
        by its draws on their way to the host, a ``Leaving`` of the result of ``PopulationDraw.drawn``,
        and ``cancel`` forgets it. Rows that are not finite give a log mass that is NaN. Otherwise, or
        without room, change no state and return False: its rows are asked for then."""

    def settle(self, population: PopulationDraw) -> None:
        """Remember the sequences of a population whose rows were asked for one by one, so that others go
        on from them. Do not raise."""

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        """Forget these sequences, and free the memory that only they hold. Do not raise."""

    # Texts.

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return which option of these the engine cannot do, and why; ``None`` if it can do all. Any
        thread may ask.

        Raises:
            InvalidRequest: an option is wrong, and it is cheap to see that here.
        """

    def progress(self, streamed: Sequence[Streamed]) -> Sequence[Told | None]:
        """Return the deltas of each of these streamed requests since the last call: ``None`` if there
        are none, or if it is not in progress. The completion has all of them too. Do not raise."""

    # Scores, reads and prefixes.

    @property
    def scores(self) -> bool:
        """True if ``submit`` takes score requests, and computes each text once; rows are asked for
        otherwise. Any thread may ask."""

    @property
    def scores_rows(self) -> bool:
        """True, the default, if these may ask for whole rows."""

    @property
    def reads(self) -> Collection[type]:
        """The kinds of reads that the engine answers itself: classes of a ``ReadRequest``'s ``wanted``,
        and ``PopulationDraw``."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters, by name, that an engine with ``reads`` has without being given them."""

    @property
    def prefixes(self) -> Prefixes:
        """The contexts that it keeps."""

    def forget_residents(self) -> None:
        """Forget everything computed that no request in progress needs."""

    # Engines that wait for others, elsewhere, in ``step``.

    def interrupt(self) -> None:
        """Have ``step`` return soon, as there is something new; any thread may call it, also a finalizer
        that holds locks."""

    def tend(self) -> float:
        """Look after the others while no request is in progress; return in how many seconds to do so
        again.

        Raises:
            EngineDied: there are no others any more.
        """

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        """Return the state and the counters of each; any thread may ask."""

    # vLLM's front ends.

    @property
    def vllm_config(self) -> Any:
        """vLLM's configuration of the model; ``None`` if the engine is not vLLM after all."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional parts of one engine, each a group of methods of ``FullEngine``."""

    speculates: bool
    populates: bool
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
    """Return the optional parts of an engine, by the methods that it has. Keep it: looking takes time."""

    def has(*names: str) -> bool:
        return all(hasattr(engine, name) for name in names)

    scores = bool(getattr(engine, "scores", False))
    return Capabilities(
        speculates=has("expect"),
        populates=has("go_on", "settle", "release"),
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
    """Raise InvalidRequest, with the name of the option and of the engine, unless this engine draws such
    completions."""
    unsupported = getattr(engine, "unsupported", None)
    reason = "it draws no completions" if unsupported is None else unsupported(decoding)
    if reason is not None:
        raise InvalidRequest(f"{type(engine).__name__} cannot do this: {reason}")


def tokenizer_of(engine: Engine) -> Any:
    """Return the model's tokenizer. Raises InvalidRequest if it has none."""
    if engine.tokenizer is None:
        raise InvalidRequest(
            "this model has no tokenizer: ask with token ids, or load a checkpoint that has one"
        )
    return engine.tokenizer


def failure(error: Exception, what: str = "the engine failed") -> GenrtError:
    """Return the error of genrt that an engine's exception means; return one of genrt's own as it is."""
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
    """Return ``failure`` of an error after which the engine goes on.

    Raises:
        EngineDied: the error says that it does not.
    """
    translated = failure(error)
    if isinstance(translated, EngineDied):
        raise translated
    return translated
