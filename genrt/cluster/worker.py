"""The end of a replica where its engine is: takes questions from a runtime, and steps until they are
answered.

Rules:
    The thread that opens the engine receives, steps and answers; another one answers probes, so that
    these tell whether the process goes on, and ``rounds`` whether the engine does.
    A step's answers are one message. Everything that is asked ends in one, unless it is cancelled.
    Whatever goes wrong beyond one step is the end of this process, and says why if it can.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from genrt.cluster.messages import Frames, dumped, framed, loaded, unflattened
from genrt.cluster.segments import LEAST_SHARED, Segment, Segments
from genrt.engines.protocol import (
    Engine,
    EngineStatistics,
    Finished,
    Keeping,
    check_supported,
    survived,
)
from genrt.engines.remote.tokenizers import packed_tokenizer
from genrt.engines.weights import Sleeping, SleepingPart, tensors_in, weights_of
from genrt.errors import EngineDied, GenrtError
from genrt.questions.completions import CompletionRequest
from genrt.questions.contexts import Adapter
from genrt.questions.host_rows import host_row
from genrt.questions.origins import Asked
from genrt.questions.request import Request, Streamed
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache

__all__ = ["PULSE", "Answers", "Facts", "Renewal", "Worker", "main"]

PULSE = struct.Struct("<Q")
"""A probe is one byte; the answer is how many rounds the engine's thread has gone."""

RECEIVED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Facts:
    """The engine of a replica, as it tells of it once it is open; ``tokenizer`` is packed."""

    vocab_size: int
    max_model_len: int
    max_batch_size: int
    tokenizer: bytes
    sleep_refused: str | None


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
        ends: tickets with a result or an error each. An int for a result is a row's place in ``rows``.
        told: tickets of streamed texts with what has been drawn since.
        rows: where rows are that do not travel in the message.
    """

    ends: list[tuple[int, Any, GenrtError | None]]
    told: list[tuple[int, Any]]
    rows: Segment | None
    statistics: EngineStatistics


class Worker:
    """Answers a runtime's questions with an engine, one message after another.

    Args:
        engine: opened by this thread.
        send: has the runtime get a message.
    """

    def __init__(self, engine: Engine, send: Callable[..., None]) -> None:
        self._answering = AnsweringEngine(engine, RowCache(0))
        self._send = send
        self._segments = Segments()
        self._moves_rows = engine.device.type != "cpu"
        self._requests: dict[int, Request] = {}
        self._tickets: dict[Request, dict[int, None]] = {}
        self._streamed: dict[int, Streamed] = {}
        self._ended: list[Finished] = []
        self._adapters: dict[Adapter, None] = {}
        self._prefixes: dict[LogprobsRequest, None] = {}
        self._weights = 0
        self.asked: dict[int, Asked] = {}
        self.rounds = 0

    @property
    def is_busy(self) -> bool:
        """True if something is to be computed or told."""
        return bool(self._tickets or self._ended)

    def facts(self) -> Facts:
        """Return what the runtime has to know of the engine."""
        engine, refused = self._answering.engine, "it has no memory of a device to give back"
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
        )

    def take(self, kind: str, *arguments: Any) -> None:
        """Do what a message says. Raises EngineDied if the engine can't go on."""
        getattr(self, f"_take_{kind}")(*arguments)

    def turn(self) -> None:
        """Take a step if anything is to be computed, and tell what it has ended."""
        self.rounds += 1
        if self._tickets:
            self._ended += self._stepped()
        told = self._told() if self._streamed else []
        ends, self._ended = self._ended, []
        if ends or told:
            self._answer(ends, told)

    def close(self) -> None:
        """Close the engine."""
        self._answering.close()

    # -- messages -----------------------------------------------------------------------------

    def _take_ask(self, rows: list[Any], draws: list[Any], others: list[Any]) -> None:
        new: list[Request] = []
        for ticket, given in unflattened(rows, draws, others):
            request = given
            if self._moves_rows and isinstance(given, LogprobsRequest):
                request = host_row(given)
            self._requests[ticket] = request
            if request in self._tickets:
                self._tickets[request][ticket] = None
                continue
            self._tickets[request] = {ticket: None}
            try:
                if isinstance(request, CompletionRequest):
                    check_supported(self._answering.engine, request.decoding)
            except GenrtError as error:
                self._ended.append(Finished(request, error=error))
            else:
                new.append(request)
        try:
            self._answering.submit(new)
        except Exception as error:
            failed = survived(error)
            self._ended += [Finished(request, error=failed) for request in new]
        else:
            self._ended += self._answering.ready()

    def _take_cancel(self, tickets: Sequence[int]) -> None:
        unwanted: list[Request] = []
        for ticket in tickets:
            request = self._requests.pop(ticket, None)
            self._streamed.pop(ticket, None)
            if request is not None and request in self._tickets:
                del self._tickets[request][ticket]
                if not self._tickets[request]:
                    del self._tickets[request]
                    unwanted.append(request)
        self._answering.cancel(unwanted)

    def _take_stream(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            if ticket in self._requests:
                self._streamed[ticket] = cast("Streamed", self._requests[ticket])

    def _take_forget(self, populations: Sequence[int]) -> None:
        known = [self.asked.pop(each) for each in populations if each in self.asked]
        self._answering.give_back(known)

    def _take_free(self, segments: Sequence[int]) -> None:
        self._segments.free(segments)

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
        engine = self._answering.engine
        if wanted.weights != self._weights:
            self._answering.begin_update()
            weights = weights_of(engine)
            try:
                weights.load(tensors_in([Path(each) for each in wanted.files]))
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
        self._answering.engine.add_adapter(adapter, Path(path))
        self._adapters[adapter] = None

    def _remove_adapter(self, adapter: Adapter) -> None:
        if adapter in self._adapters:
            del self._adapters[adapter]
            self._answering.engine.remove_adapter(adapter)

    def _forget_residents(self) -> None:
        self._answering.forget_residents()

    def _keep(self, prefix: LogprobsRequest) -> None:
        if prefix not in self._prefixes and isinstance(self._answering.engine, Keeping):
            self._prefixes[prefix] = None
            self._answering.engine.prefixes.keep(prefix)

    def _release(self, prefix: LogprobsRequest) -> None:
        if prefix in self._prefixes and isinstance(self._answering.engine, Keeping):
            del self._prefixes[prefix]
            self._answering.engine.prefixes.release(prefix)

    def _layout(self) -> Any:
        return dict(weights_of(self._answering.engine).layout())

    def _checkpoint(self) -> list[Path]:
        return weights_of(self._answering.engine).checkpoint()

    def _sleep(self, level: int) -> int:
        self._answering.begin_update()
        return cast("Sleeping", weights_of(self._answering.engine)).sleep(level)

    def _wake_up(self, parts: frozenset[SleepingPart]) -> None:
        weights = cast("Sleeping", weights_of(self._answering.engine))
        weights.wake_up(weights.asleep & parts)

    # -- answers ------------------------------------------------------------------------------

    def _stepped(self) -> list[Finished]:
        try:
            return self._answering.step()
        except Exception as error:
            failed = survived(error)
            lost = list(self._tickets)
            self._answering.cancel(lost)
            return [Finished(request, error=failed) for request in lost]

    def _told(self) -> list[tuple[int, Any]]:
        told = self._answering.progress([*self._streamed.values()])
        return [pair for pair in zip(self._streamed, told, strict=True) if pair[1] is not None]

    def _answer(self, ends: Sequence[Finished], told: list[tuple[int, Any]]) -> None:
        found: list[tuple[int, Any, GenrtError | None]] = []
        rows: list[Tensor] = []
        for end in ends:
            tickets = self._tickets.pop(end.request, {})
            result = end.result
            if tickets and (row := _shared(result)) is not None and _fits(row, rows):
                rows.append(row)
                result = len(rows) - 1
            for ticket in tickets:
                found.append((ticket, result, end.error))
                del self._requests[ticket]
                self._streamed.pop(ticket, None)
        segment = self._segments.write(rows) if rows else None
        self._send("answers", Answers(found, told, segment, self._answering.statistics()))


def _shared(result: object) -> Tensor | None:
    """Return a result that is a row worth a segment."""
    if isinstance(result, Tensor) and result.dim() == 1 and result.nbytes >= LEAST_SHARED:
        return result
    return None


def _fits(row: Tensor, rows: Sequence[Tensor]) -> bool:
    return not rows or len(row) == len(rows[0])


def main(port: int, pulses: int) -> None:
    """Serve as a replica, over these two sockets, until the other ends are closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is the runtime's
    connection = socket.socket(fileno=port)
    rounds = [lambda: 0]
    pulse = socket.socket(fileno=pulses)
    threading.Thread(target=_answer_probes, args=(pulse, rounds), daemon=True).start()

    def send(*message: Any) -> None:
        connection.sendall(framed(dumped(message)))

    try:
        _serve(connection, send, rounds)
    except BrokenPipeError:
        pass  # the runtime is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            send("died", f"{type(error).__name__}: {error}")
        sys.exit(1)


def _serve(
    connection: socket.socket, send: Callable[..., None], rounds: list[Callable[[], int]]
) -> None:
    frames = Frames()
    waiting: list[bytes] = []
    while not waiting:
        data = connection.recv(RECEIVED_BYTES)
        if not data:
            return
        waiting += frames.add(data)
    [_, open_engine] = loaded(waiting.pop(0))
    try:
        worker = Worker(open_engine(), send)
    except Exception as error:
        send("refused", error if isinstance(error, GenrtError) else survived(error))
        return
    rounds[0] = lambda: worker.rounds
    send("opened", worker.facts())
    with contextlib.closing(worker):
        while True:
            for each in waiting:
                worker.take(*loaded(each, worker.asked))
            worker.turn()
            connection.setblocking(not worker.is_busy)
            try:
                data = connection.recv(RECEIVED_BYTES)
            except BlockingIOError:
                waiting = []
                continue
            finally:
                connection.setblocking(True)
            if not data:
                return
            waiting = frames.add(data)


def _answer_probes(pulse: socket.socket, rounds: list[Callable[[], int]]) -> None:
    """Answer probes until the runtime is gone; then so is this process, whatever it is at."""
    import os

    while pulse.recv(1):
        with contextlib.suppress(BrokenPipeError):
            pulse.sendall(PULSE.pack(rounds[0]()))
    os._exit(1)
