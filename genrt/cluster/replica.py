"""One engine of several: an ``AsyncLM`` with the questions of another process.

Rules:
    Each call has a thread of its own. Flushes are taken in the order in which they were made.
    Questions are waiters of the runtime's batcher, which its engine's thread answers.
    A replica with a dead engine, or a mixture of weights, raises EngineDied; the other end replaces it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from genrt.engines.folders import Folder
from genrt.engines.protocol import EngineStatistics, check_supported, survived
from genrt.engines.remote.flushes import Answers, NearEnd, packed_ends
from genrt.engines.remote.wire import Unpacking, packed_tokenizer
from genrt.engines.weights import Continuing, KVCache, set_version, weights_of
from genrt.errors import EngineDied, EngineUnsupported, GenrtError
from genrt.questions.arguments import Adapter
from genrt.questions.completions import CompletionRequest, NativeRequest, Told
from genrt.questions.reads import HostRow, ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Barrier, Waiter
from genrt.runtime.programs import ProgramRequest, packed_run, program_loop
from genrt.runtime.streams import NativeFlow

StoredTensors = Sequence[tuple[str, str, np.ndarray]]
"""Tensors for an object store: the name, torch's name of the type, and the numbers, maybe as bytes."""

COUNTERS = attrgetter(*(each.name for each in fields(EngineStatistics)))


class Facts(NamedTuple):
    """The properties of a replica's engine; ``tokenizer`` is packed, ``sleep_refused`` says why it cannot
    sleep, and ``continues`` whether its texts can go on with other weights."""

    vocab_size: int
    max_model_len: int
    max_batch_size: int
    scores: bool
    serves_vllm: bool
    sleep_refused: str | None
    tokenizer: bytes
    continues: bool


class Settings(NamedTuple):
    """Everything that a replica needs before its first question.

    Attributes:
        version: counts loads of weights; 0 for the model's own.
        tensors: the parts of the weights, each ``StoredTensors`` or a reference to them.
        adapters: adapters and their files by name.
        label: the weights' version as callers see it.
        texts: the KV cache of texts in progress, which go on with these weights; ``None`` if no text is
            in progress.
    """

    version: int = 0
    tensors: tuple[Any, ...] = ()
    adapters: tuple[tuple[Adapter, Mapping[str, bytes]], ...] = ()
    label: int = 0
    texts: KVCache | None = None


class Replica:
    """The methods that the other end calls, each from any thread. ``fetch`` returns the tensors of a
    reference."""

    def __init__(self, fetch: Callable[[Any], StoredTensors] = lambda stored: stored) -> None:
        self._fetch = fetch
        self._lm: Any = None
        self._version = 0
        self._adapters: set[Adapter] = set()
        self._near = NearEnd()
        self._withdraw: dict[int, Callable[[], object]] = {}
        self._ends: list[tuple[int, Any]] = []
        self._told: list[tuple[int, Told]] = []
        self._lock = threading.RLock()
        self._turns, self._news = (threading.Condition(self._lock) for _ in range(2))
        self._taken = self._listening = self._given = 0
        self._failed: EngineDied | None = None
        self._loops: dict[str, asyncio.AbstractEventLoop] = {}

    def prepare(self, make: Callable[[], Any], wanted: Settings) -> Facts:
        """Open the runtime, the first time, and give it these settings. Raises GenrtError if it cannot be
        opened, and EngineDied if its weights are a mixture."""
        if self._lm is None:
            self._lm = make()
        if wanted.version != self._version:
            self._replace_weights(wanted)
        for adapter in self._adapters - dict(wanted.adapters).keys():
            self.remove_adapter(adapter)
        for adapter, files in wanted.adapters:
            if (refused := self.add_adapter(adapter, files)) is not None:
                raise refused
        facts = self._on_engine(_facts)
        if isinstance(facts, GenrtError):
            raise facts
        return cast("Facts", facts)

    def _replace_weights(self, wanted: Settings) -> None:
        """Load weights once the engine has ended what was withdrawn. Texts go on between two steps."""
        parts, batcher = [*map(self._fetch, wanted.tensors)], self._lm._thread.batcher
        barrier = Barrier("finish" if wanted.texts is None else "continue")

        def load(answering: AnsweringEngine) -> None:
            try:
                answering.begin_update(texts=wanted.texts)
                set_version(answering.engine, wanted.label)
                weights = weights_of(answering.engine)
                for each in parts:
                    weights.load(_tensors(each))
                weights.finish()
            except Exception as error:
                raise EngineDied(f"its weights could not be replaced: {error}") from error

        try:
            self._on_engine(lambda _: batcher.raise_barrier(barrier))
            barrier.drained.result()
            self._on_engine(load)
        finally:
            batcher.lift_barrier(barrier, wanted.label)
        self._version = wanted.version

    def exchange(self, data: bytes, *others: Request) -> bytes | Answers | None:
        """Take a flush, by its number, from 0; wait for answers to any questions, and return all that
        there are. After its seconds there are none, once the engine's thread takes a call. ``None`` if
        two calls wait.

        Raises:
            EngineDied: something failed. Before ``prepare``: a call for an earlier life would take the
                answers of this one.
        """
        if self._lm is None:
            raise EngineDied("it was started again")
        flush = Unpacking(data)
        number, seconds = flush.header["number"], flush.header["seconds"]
        with self._lock:
            if not self._turns.wait_for(lambda: self._failed or self._taken == number, seconds):
                raise EngineDied("an earlier flush has not come")
            try:
                self._take(flush.header, self._near.requests(flush, others))
            except Exception as error:
                self._fail(error)
            self._taken += 1
            self._turns.notify_all()
            if self._listening == 2:
                return None
            self._listening += 1
            has_news = self._news.wait_for(self._has_news, seconds)
            self._listening -= 1
            found = self._answers() if has_news else None
        if found is None:
            self.do("statistics")
            with self._lock:
                found = self._answers()
        return packed_ends(*found, COUNTERS(self._lm._thread.statistics()))

    def _has_news(self) -> bool:
        return bool(self._ends or self._told or self._failed)

    def _answers(self) -> tuple[int, list[tuple[int, Any]], list[tuple[int, Told]]]:
        """Return the number of these answers, from 0, and all ends and parts of streams."""
        if self._failed is not None:
            raise self._failed
        ends, self._ends, told, self._told = self._ends, [], self._told, []
        number, self._given = self._given, self._given + 1
        return number, ends, told

    def _take(self, header: Mapping[str, Any], requests: Sequence[Request]) -> None:
        thread = self._lm._thread
        if gone := self._near.forget(header["forgotten"]):
            thread.give_back(gone)
        with thread.batcher.lock:  # the engine gets them together
            for ticket, request in zip(header["tickets"], requests, strict=True):
                self._ask(ticket, request)
        self._cancel(header["withdrawn"])

    def _cancel(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            if (withdraw := self._withdraw.pop(ticket, None)) is not None:
                withdraw()

    def _ask(self, ticket: int, request: Request) -> None:
        lm = self._lm
        thread, batcher = lm._thread, lm._thread.batcher
        if isinstance(request, ProgramRequest):
            self._begin(ticket, "programs", packed_run(request, lm._of_seed(request.seed)))
            return
        if getattr(request, "streamed", False):
            self._begin(ticket, "streams", _streamed(lm, request, partial(self._tell, ticket)))
            return
        if isinstance(request, LogprobsRequest) and lm.device.type != "cpu":
            request = ReadRequest(request, HostRow())
        future: Any = SimpleNamespace(  # which ends the question at once
            set_result=lambda results: self._end(ticket, results[0]),
            set_exception=partial(self._end, ticket),
        )
        waiter = Waiter((request,), None, future)
        self._withdraw[ticket] = partial(batcher.cancel, waiter)
        try:
            if isinstance(request, CompletionRequest):
                check_supported(thread.engine, request.decoding)
            if (found := batcher.join(waiter)) is not None:
                self._end(ticket, found[0])
        except GenrtError as error:
            self._end(ticket, error)

    def _begin(self, ticket: int, loop: str, work: Coroutine[Any, Any, Sequence[Any]]) -> None:
        """Run a coroutine on one of the loops; its result has the answer."""
        if loop not in self._loops:
            self._loops[loop] = program_loop()
        future = asyncio.run_coroutine_threadsafe(work, self._loops[loop])
        self._withdraw[ticket] = future.cancel
        future.add_done_callback(partial(self._done, ticket))

    def _tell(self, ticket: int, part: Told) -> None:
        with self._lock:
            self._told.append((ticket, part))
            self._news.notify()

    def _done(self, ticket: int, future: Future[Sequence[Any]]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, GenrtError):
            self._fail(error)
        elif not future.cancelled():
            self._end(ticket, error or future.result()[0])

    def _end(self, ticket: int, result: Any) -> None:
        with self._lock:
            if self._withdraw.pop(ticket, None) is not None:
                self._ends.append((ticket, result))
                self._news.notify()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failed = EngineDied(f"{type(error).__name__}: {error}")
            self._news.notify_all()
            self._turns.notify_all()

    def add_adapter(self, adapter: Adapter, files: Mapping[str, bytes]) -> GenrtError | None:
        """Load an adapter from its files, unless it is loaded. Return why it does not fit."""
        if adapter in self._adapters:
            return None
        with Folder("adapter") as directory:
            for name, data in files.items():
                (directory / name).write_bytes(data)
            refused = self._on_engine(lambda engine: engine.add_adapter(adapter, directory))
        if refused is None:
            self._adapters.add(adapter)
            self._lm._adapters.by_name[adapter.name] = adapter
        return cast("GenrtError | None", refused)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter."""
        if adapter in self._adapters:
            self._adapters.discard(adapter)
            names = self._lm._adapters.by_name
            if names.get(adapter.name) == adapter:
                del names[adapter.name]
            self._on_engine(lambda answering: answering.remove_adapter(adapter))

    def do(self, name: str, *arguments: Any) -> Any:
        """Return an attribute of the answering engine, by a dotted name; call it if it is a method, and
        return its GenrtError if it raises one. Raises EngineDied."""

        def call(answering: AnsweringEngine) -> Any:
            found = attrgetter(name)(answering)
            found = found(*arguments) if callable(found) else found
            return dict(found) if isinstance(found, Mapping) else found

        return self._on_engine(call)

    def stop(self) -> None:
        """Close the runtime, and end all calls."""
        self._cancel([*self._withdraw])
        self._fail(EngineDied("it was stopped"))
        if self._lm is not None:
            self._lm.close()

    def _on_engine(self, function: Callable[[AnsweringEngine], Any]) -> Any:
        """Return the result, or the GenrtError, of a function of the engine on its thread. Raises
        EngineDied."""

        def call(answering: AnsweringEngine) -> Any:
            try:
                return function(answering)
            except Exception as error:
                return survived(error)

        if self._lm is None:
            raise EngineDied("it was started again")
        return self._lm._thread.call(call).result()


async def _streamed(lm: Any, request: Any, tell: Callable[[Told], object]) -> list[Any]:
    """Tell the parts of a text; return the rest as ``Waiter`` results. No method: Ray gives no threads to
    the calls of a class with a coroutine."""
    is_native = isinstance(request, NativeRequest)
    if is_native:
        stream = lm._asker.native(request, NativeFlow())
    else:
        check_supported(lm._thread.engine, request.decoding)
        stream = lm._asker.stream(request)
    async for part in stream:
        tell(part)
    return [() if is_native else stream.completion]


def stored(name: str, tensor: torch.Tensor) -> tuple[str, str, np.ndarray]:
    """Return a tensor for an object store: its last axis are the bytes of a number."""
    numbers = tensor.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8)
    return name, str(tensor.dtype).removeprefix("torch."), numbers.numpy()


def _tensors(several: StoredTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an object store, in its memory."""
    for name, dtype, data in several:
        yield name, torch.from_numpy(data).view(getattr(torch, dtype)).squeeze(-1)


def _facts(answering: AnsweringEngine) -> Facts:
    engine, able = answering.engine, answering.capabilities
    refused: str | None = "it has no memory of a device to give back"
    if (check := getattr(getattr(engine, "weights", None), "check_sleep", None)) is not None:
        try:
            refused = check()
        except EngineUnsupported as error:
            refused = str(error)
    tokenizer = packed_tokenizer(engine.tokenizer)
    sizes = engine.vocab_size, engine.max_model_len, engine.max_batch_size
    continues = isinstance(getattr(engine, "weights", None), Continuing)
    return Facts(*sizes, able.scores, able.serves_vllm, refused, tokenizer, continues)
