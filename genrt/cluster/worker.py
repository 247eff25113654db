"""The end of a replica where its engine is: takes questions from a runtime, and steps until they are
answered.

Rules:
    One thread calls this, the one that has opened the engine. Programs run on threads of their own, and
    post what they ask.
    A step's answers are one message. Everything that is asked ends in one, unless it is cancelled.
    Whatever goes wrong beyond one step is the end of the replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from genrt.cluster.messages import Flat, dump_message, unflattened
from genrt.cluster.programs import ProgramRequest
from genrt.cluster.running import Programs, SharedEngine
from genrt.engines.protocol import (
    Engine,
    EngineStatistics,
    Finished,
    check_supported,
    survived,
)
from genrt.engines.remote.wire import packed_tokenizer
from genrt.engines.weights import Sleeping, SleepingPart, TensorsIn, weights_of
from genrt.errors import EngineDied, EngineFailed, GenrtError, UnknownAdapter
from genrt.questions.completions import CompletionRequest, Streamed
from genrt.questions.contexts import Adapter
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache

__all__ = ["Answers", "Facts", "Renewal", "Worker", "with_rows"]


LEAST_BESIDE = 2**14
"""How many bytes of a row are worth memory beside the message."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The engine of a replica, as it tells of it once it is open; ``tokenizer`` is packed, and so is
    ``vllm_config``, which takes vLLM to unpack."""

    vocab_size: int
    max_model_len: int
    max_batch_size: int
    tokenizer: bytes
    sleep_refused: str | None
    scores: bool
    vllm_config: bytes | None


@dataclass(frozen=True, slots=True)
class Renewal:
    """Everything that a replica needs to have, some of which it has: weights, adapters, prefixes.

    Attributes:
        settings: the number of all this.
        weights: which of the weights that this runtime has been given; 0 are those it was opened with.
        files: the safetensors files that have these.
    """

    settings: int
    weights: int
    files: tuple[str, ...]
    adapters: tuple[tuple[Adapter, str], ...]
    prefixes: tuple[LogprobsRequest, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a step, and what it has told.

    Attributes:
        ends: tickets with a result or an error each. An int for a result is a row's place among those
            that travel beside the message.
        told: tickets of streamed texts with what has been drawn since.
        rows: how many these are.
    """

    ends: list[tuple[int, Any, GenrtError | None]]
    told: list[tuple[int, Any]]
    rows: int
    statistics: EngineStatistics


def with_rows(message: Sequence[Any], rows: Tensor) -> Sequence[Any]:
    """Return a message of answers with its rows, float32 ``[n, width]``, which travelled beside it."""
    answers: Answers = message[1]
    ends = [
        (ticket, rows[result] if type(result) is int else result, error)
        for ticket, result, error in answers.ends
    ]
    return message[0], replace(answers, ends=ends, rows=0)


class Worker:
    """Answers a runtime's questions with an engine, one message after another.

    Args:
        engine: opened by this thread.
        send: has the runtime get a message, and ``rows`` of one length beside it.
        wake: has ``turn`` be called soon; from any thread.
    """

    def __init__(
        self, engine: Engine, send: Callable[..., None], wake: Callable[[], None] = lambda: None
    ) -> None:
        self.answering = AnsweringEngine(engine, RowCache(0))
        self.names: dict[str, Adapter] = {}
        self._send, self._wake = send, wake
        self._posted: deque[Callable[[], object]] = deque()
        self._programs = Programs(self, self._ended_program)
        self._moved_bytes = 0  # of rows, from the engine's device
        self._requests: dict[int, Request] = {}
        self._tickets: dict[Request, dict[int | SharedEngine, None]] = {}
        self._streamed: dict[int, Streamed] = {}
        self._streams: dict[tuple[SharedEngine, Streamed], None] = {}
        self._ended: list[Finished] = []
        self._adapters: dict[Adapter, None] = {}
        self._prefixes: dict[LogprobsRequest, None] = {}
        self._weights = 0
        self.asked: dict[int, SequenceHandle] = {}
        self.rounds = 0

    @property
    def is_busy(self) -> bool:
        """True if something is to be computed or told."""
        return bool(self._tickets or self._ended or self._posted)

    @property
    def has_programs(self) -> bool:
        """True if programs run, which may ask nothing for a while."""
        return bool(len(self._programs))

    def facts(self) -> Facts:
        """Return what the runtime has to know of the engine."""
        has = self.answering.capabilities
        engine, refused = self.answering.engine, "it has no memory of a device to give back"
        weights = getattr(engine, "weights", None)
        if isinstance(weights, Sleeping):
            try:
                weights.check_sleep()
                refused = ""
            except GenrtError as error:
                refused = str(error)
        return Facts(
            engine.vocab_size,
            engine.max_model_len,
            engine.max_batch_size,
            packed_tokenizer(engine.tokenizer),
            refused or None,
            has.scores,
            dump_message(self.answering.full.vllm_config)
            if self.answering.capabilities.serves_vllm
            else None,
        )

    def take(self, kind: str, *arguments: Any) -> None:
        """Do what a message says. Raises EngineDied if the engine can't go on."""
        getattr(self, f"_take_{kind}")(*arguments)

    def turn(self) -> None:
        """Take a step if anything is to be computed, and tell what it has ended."""
        self.rounds += 1
        for _ in range(len(self._posted)):
            self._posted.popleft()()
        if self._tickets:
            self._ended += self._stepped()
        told = self._told() if self._streamed or self._streams else []
        ends, self._ended = self._ended, []
        if ends or told:
            self._answer(ends, told)

    def close(self) -> None:
        """Close the engine, and end the programs."""
        self._programs.close()
        self.answering.close()

    # -- programs -----------------------------------------------------------------------------

    def post(self, function: Callable[[], object]) -> None:
        """Have ``turn`` call a function; from any thread."""
        self._posted.append(function)
        self._wake()

    def ask(self, requests: Sequence[Request], asker: SharedEngine) -> None:
        """Take questions of programs, whose ends the asker is told."""
        known = {None, *self._adapters}
        for request in requests:
            if request.adapter not in known:
                gone = UnknownAdapter(f"the adapter {request.adapter} has been removed")
                asker.take(Finished(request, error=gone))
        self._submit([(asker, each) for each in requests if each.adapter in known])

    def withdraw(self, requests: Sequence[Request], asker: SharedEngine) -> None:
        """Forget questions of programs."""
        self._withdraw([(asker, each) for each in requests])

    def stream(self, streamed: Sequence[Streamed], asker: SharedEngine) -> None:
        """Tell the asker what these draw meanwhile."""
        self._streams |= {
            (asker, each): None for each in streamed if asker in self._tickets.get(each, ())
        }

    def _ended_program(
        self, ticket: int, outcome: bytes | None, error: EngineFailed | None
    ) -> None:
        self._tell([(ticket, outcome, error)], [], ())

    def _withdraw_programs(self) -> None:
        """Have nothing be computed for programs: those that are left have been withdrawn."""
        asked = [
            (asker, request)
            for request, askers in self._tickets.items()
            for asker in askers
            if isinstance(asker, SharedEngine)
        ]
        self._withdraw(asked)
        for asker, request in asked:
            asker.take(Finished(request, error=EngineFailed("the program was withdrawn")))

    # -- messages -----------------------------------------------------------------------------

    def _take_ask(self, rows: Flat, draws: Flat, others: list[Any]) -> None:
        asked: list[tuple[int | SharedEngine, Request]] = []
        for ticket, request in unflattened(rows, draws, others):
            if isinstance(request, ProgramRequest):
                self._programs.start(ticket, request)
                continue
            self._requests[ticket] = request
            asked.append((ticket, request))
        self._submit(asked)

    def _submit(self, asked: Sequence[tuple[int | SharedEngine, Request]]) -> None:
        new: list[Request] = []
        for asker, request in asked:
            if request in self._tickets:
                self._tickets[request][asker] = None
                continue
            self._tickets[request] = {asker: None}
            try:
                if isinstance(request, CompletionRequest):
                    check_supported(self.answering.engine, request.decoding)
            except GenrtError as error:
                self._ended.append(Finished(request, error=error))
            else:
                new.append(request)
        try:
            self._ended += self.answering.submit(new)
        except Exception as error:
            failed = survived(error)
            self._ended += [Finished(request, error=failed) for request in new]

    def _take_cancel(self, tickets: Sequence[int]) -> None:
        asked: list[tuple[int | SharedEngine, Request]] = []
        for ticket in tickets:
            self._programs.withdraw(ticket)
            self._streamed.pop(ticket, None)
            if (request := self._requests.pop(ticket, None)) is not None:
                asked.append((ticket, request))
        self._withdraw(asked)

    def _withdraw(self, asked: Sequence[tuple[int | SharedEngine, Request]]) -> None:
        unwanted: list[Request] = []
        for asker, request in asked:
            askers = self._tickets.get(request, {})
            if asker not in askers:
                continue
            del askers[asker]
            self._streams.pop((asker, request), None)  # type: ignore[arg-type]
            if not askers:
                del self._tickets[request]
                unwanted.append(request)
        self.answering.cancel(unwanted)

    def _take_stream(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            if ticket in self._requests:
                self._streamed[ticket] = cast("Streamed", self._requests[ticket])

    def _take_forget(self, populations: Sequence[int]) -> None:
        known = [self.asked.pop(each) for each in populations if each in self.asked]
        self.answering.give_back(known)

    def _take_renew(self, wanted: Renewal) -> None:
        try:
            self._renew(wanted)
        except EngineDied:
            raise
        except Exception as error:
            self._send("renewed", wanted.settings, survived(error))
        else:
            self._send("renewed", wanted.settings, None)

    def _renew(self, wanted: Renewal) -> None:
        engine = self.answering.engine
        if wanted.weights != self._weights:
            self._withdraw_programs()
            self.answering.begin_update()
            weights = weights_of(engine)
            try:
                weights.load(TensorsIn([Path(each) for each in wanted.files]))
                weights.finish()
            except Exception as error:
                raise EngineDied(f"its weights could not be replaced: {error}") from error
            self._weights = wanted.weights
        for adapter, path in wanted.adapters:
            if adapter not in self._adapters:
                self._add_adapter(adapter, path)
        for prefix in wanted.prefixes:
            self._keep(prefix)

    def _take_do(self, call: int, name: str, *arguments: Any) -> None:
        try:
            result = getattr(self, f"_{name}")(*arguments)
        except EngineDied:
            raise
        except Exception as error:
            self._send("done", call, None, survived(error))
        else:
            self._send("done", call, result, None)

    def _add_adapter(self, adapter: Adapter, path: str) -> None:
        self.answering.engine.add_adapter(adapter, Path(path))
        self._adapters[adapter] = None
        self.names[adapter.name] = adapter

    def _remove_adapter(self, adapter: Adapter) -> None:
        if adapter in self._adapters:
            del self._adapters[adapter]
            if self.names.get(adapter.name) == adapter:
                del self.names[adapter.name]
            self.answering.engine.remove_adapter(adapter)

    def _forget_residents(self) -> None:
        self.answering.forget_residents()

    def _keep(self, prefix: LogprobsRequest) -> None:
        if prefix not in self._prefixes and self.answering.capabilities.keeps_prefixes:
            self._prefixes[prefix] = None
            self.answering.full.prefixes.keep(prefix)

    def _release(self, prefix: LogprobsRequest) -> None:
        if prefix in self._prefixes and self.answering.capabilities.keeps_prefixes:
            del self._prefixes[prefix]
            self.answering.full.prefixes.release(prefix)

    def _layout(self) -> Any:
        return dict(weights_of(self.answering.engine).layout())

    def _checkpoint(self) -> list[Path]:
        return weights_of(self.answering.engine).checkpoint()

    def _sleep(self, level: int) -> int:
        self._withdraw_programs()
        self.answering.begin_update()
        return cast("Sleeping", weights_of(self.answering.engine)).sleep(level)

    def _wake_up(self, parts: frozenset[SleepingPart]) -> None:
        weights = cast("Sleeping", weights_of(self.answering.engine))
        weights.wake_up(weights.asleep & parts)

    # -- answers ------------------------------------------------------------------------------

    def _stepped(self) -> list[Finished]:
        try:
            return self.answering.step(lambda ends: self._answer(ends, []))
        except Exception as error:
            failed = survived(error)
            lost = list(self._tickets)
            self.answering.cancel(lost)
            return [Finished(request, error=failed) for request in lost]

    def _told(self) -> list[tuple[int, Any]]:
        streamed = [*self._streamed.values(), *(each for _, each in self._streams)]
        told = self.answering.progress([*dict.fromkeys(streamed)])
        found = {
            each: told for each, told in zip(dict.fromkeys(streamed), told, strict=True) if told
        }
        for asker, each in self._streams:
            if each in found:
                asker.take((each, found[each]))
        return [(ticket, found[each]) for ticket, each in self._streamed.items() if each in found]

    def _answer(self, ends: Sequence[Finished], told: list[tuple[int, Any]]) -> None:
        found: list[tuple[int, Any, GenrtError | None]] = []
        rows: list[Tensor] = []
        for end in ends:
            askers = self._tickets.pop(end.request, {})
            tickets = [each for each in askers if isinstance(each, int)]
            for asker in askers:
                if isinstance(asker, SharedEngine):
                    self._streams.pop((asker, end.request), None)  # type: ignore[arg-type]
                    asker.take(_copied_end(end))
            result = end.result
            if tickets and isinstance(result, Tensor) and result.device.type != "cpu":
                self._moved_bytes += result.nbytes
            if tickets and (row := _shared(result)) is not None and _fits(row, rows):
                rows.append(row)
                result = len(rows) - 1
            for ticket in tickets:
                found.append((ticket, result, end.error))
                del self._requests[ticket]
                self._streamed.pop(ticket, None)
        if found or told:
            self._tell(found, told, rows)

    def _tell(
        self,
        ends: list[tuple[int, Any, GenrtError | None]],
        told: list[tuple[int, Any]],
        rows: Sequence[Tensor],
    ) -> None:
        counted = self.answering.statistics()
        counted = replace(counted, bytes_to_host=counted.bytes_to_host + self._moved_bytes)
        answers = Answers(ends, told, len(rows), counted)
        self._send("answers", answers, rows=rows)


def _copied_end(end: Finished) -> Finished:
    """Return an end whose row stays as it is, whatever the engine does next."""
    result = end.result
    return replace(end, result=result.clone()) if isinstance(result, Tensor) else end


def _shared(result: object) -> Tensor | None:
    """Return a result that is a row worth to travel beside the message."""
    if isinstance(result, Tensor) and result.dim() == 1 and result.nbytes >= LEAST_BESIDE:
        return result
    return None


def _fits(row: Tensor, rows: Sequence[Tensor]) -> bool:
    return not rows or (len(row), row.device) == (len(rows[0]), rows[0].device)
