"""One engine of several: an ``AsyncLM`` with the questions of another process.

Rules:
    Questions are waiters of the runtime's batcher; everything else runs on its engine's thread.
    A replica with a dead engine, or a mixture of weights, raises EngineDied; the other end replaces it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from genrt.cluster.flushes import Answers, Message, Pickled, pickled, unpickled
from genrt.cluster.programs import ProgramRequest, packed_run, program_loop
from genrt.engines.folders import Folder
from genrt.engines.protocol import check_supported, survived
from genrt.engines.remote.wire import packed_tokenizer
from genrt.engines.weights import set_version, weights_of
from genrt.errors import EngineDied, EngineUnsupported, GenrtError
from genrt.questions.arguments import Adapter
from genrt.questions.completions import CompletionRequest, NativeRequest, Told
from genrt.questions.reads import HostRow, ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Waiter
from genrt.runtime.streams import NativeFlow

StoredTensors = Sequence[tuple[str, str, np.ndarray]]
"""Tensors for an object store: the name, torch's name of the type, and the numbers, maybe as bytes."""


class Facts(NamedTuple):
    """The properties of a replica's engine; ``tokenizer`` is packed, and ``sleep_refused`` says why it
    cannot sleep."""

    vocab_size: int
    max_model_len: int
    max_batch_size: int
    scores: bool
    serves_vllm: bool
    sleep_refused: str | None
    tokenizer: bytes


class Settings(NamedTuple):
    """Everything that a replica needs before its first question: the version of the weights, 0 for the
    model's own; their parts, each ``StoredTensors`` or an awaitable; adapters and their files by name."""

    version: int = 0
    tensors: tuple[Any, ...] = ()
    adapters: tuple[tuple[Adapter, Mapping[str, bytes]], ...] = ()


class Replica:
    """The methods that the other end calls, all on one event loop."""

    def __init__(self) -> None:
        self._lm: Any = None
        self._version = 0
        self._adapters: set[Adapter] = set()
        self._handles: dict[int, SequenceHandle] = {}
        self._withdraw: dict[int, Callable[[], object]] = {}
        self._last_ticket = 0
        self._early: set[int] = set()  # withdrawn before they came
        self._ends: list[tuple[int, Any]] = []
        self._told: list[tuple[int, Told]] = []
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        self._listening = 0
        self._failed: EngineDied | None = None
        self._program_loop: asyncio.AbstractEventLoop | None = None

    async def prepare(self, make: Callable[[], Awaitable[Any]], wanted: Settings) -> Facts:
        """Open the runtime, the first time, and give it these settings. Raises GenrtError if it cannot be
        opened, and EngineDied if its weights are a mixture."""
        if self._lm is None:
            self._lm = await make()
        if wanted.version != self._version:
            parts = [await each if inspect.isawaitable(each) else each for each in wanted.tensors]
            await self._on_engine(partial(self._load, version=wanted.version, parts=parts))
        for adapter in self._adapters - dict(wanted.adapters).keys():
            await self.remove_adapter(adapter)
        for adapter, files in wanted.adapters:
            if (refused := await self.add_adapter(adapter, files)) is not None:
                raise refused
        facts = await self._on_engine(_facts)
        if isinstance(facts, GenrtError):
            raise facts
        return cast("Facts", facts)

    def _load(
        self, answering: AnsweringEngine, *, version: int, parts: Sequence[StoredTensors]
    ) -> None:
        try:
            answering.begin_update()
            weights = weights_of(answering.engine)
            for each in parts:
                weights.load(_tensors(each))
            weights.finish()
        except Exception as error:
            raise EngineDied(f"its weights could not be replaced: {error}") from error
        self._version = version

    async def exchange(self, message: Pickled, seconds: float) -> Pickled | None:
        """Take a ``Message``; wait for answers to any questions, and return all that there are. After so
        many seconds there are none, once the engine's thread takes a call. ``None`` if two calls wait.

        Raises:
            EngineDied: something failed. Before ``prepare``: a call for an earlier life would take the
                answers of this one.
        """
        if self._lm is None:
            raise EngineDied("it was started again")
        try:
            self._take(unpickled(message, self._handles))
        except Exception as error:
            self._failed = EngineDied(f"a flush could not be read: {error}")
            self._news.set()
        if self._listening == 2:
            return None
        self._listening += 1
        try:
            async with self._turn:
                try:
                    async with asyncio.timeout(seconds):
                        await self._news.wait()
                except TimeoutError:
                    await self.do("statistics")
                self._news.clear()
        finally:
            self._listening -= 1
        if self._failed is not None:
            raise self._failed
        ends, self._ends, told, self._told = self._ends, [], self._told, []
        return pickled(Answers(ends, told, self._lm._thread.statistics()))

    def _take(self, message: Message) -> None:
        if gone := [self._handles.pop(n) for n in message.forgotten if n in self._handles]:
            self._lm._thread.give_back(gone)
        for ticket, request in message.asked:
            self._ask(ticket, request)
        self._cancel(message.withdrawn)

    def _cancel(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            if (withdraw := self._withdraw.pop(ticket, None)) is not None:
                withdraw()
            elif ticket > self._last_ticket:
                self._early.add(ticket)

    def _ask(self, ticket: int, request: Request) -> None:
        lm, loop = self._lm, asyncio.get_running_loop()
        self._last_ticket = max(self._last_ticket, ticket)
        if (version := request.weights_version) != lm._thread.batcher.weights_version:
            lm._thread.batcher.weights_version = version  # as the other end counts
            lm._thread.call(lambda answering: set_version(answering.engine, version))
        if ticket in self._early:
            self._early.discard(ticket)
            return
        future: asyncio.Future[Any]
        if isinstance(request, ProgramRequest):
            self._program_loop = self._program_loop or program_loop()
            running = packed_run(request, lm._of_seed(request.seed))
            future = asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(running, self._program_loop)
            )
            self._withdraw[ticket] = future.cancel
        elif getattr(request, "streamed", False):
            future = asyncio.ensure_future(self._streamed(ticket, request))
            self._withdraw[ticket] = future.cancel
        else:
            future = loop.create_future()
            if isinstance(request, LogprobsRequest) and lm.device.type != "cpu":
                request = ReadRequest(request, HostRow())
            waiter = Waiter((request,), loop, future)
            self._withdraw[ticket] = partial(lm._thread.batcher.cancel, waiter)
            try:
                if isinstance(request, CompletionRequest):
                    check_supported(lm._thread.engine, request.decoding)
                if (found := lm._thread.batcher.join(waiter)) is not None:
                    future.set_result(found)
            except GenrtError as error:
                future.set_exception(error)
        future.add_done_callback(partial(self._done, ticket))

    async def _streamed(self, ticket: int, request: Any) -> list[Any]:
        asker, is_native = self._lm._asker, isinstance(request, NativeRequest)
        if is_native:
            stream = asker.native(request, NativeFlow())
        else:
            check_supported(self._lm._thread.engine, request.decoding)
            stream = asker.stream(request)
        async for part in stream:
            self._told.append((ticket, part))
            self._news.set()
        return [() if is_native else stream.completion]

    def _done(self, ticket: int, future: asyncio.Future[list[Any]]) -> None:
        error = None if future.cancelled() else future.exception()
        if self._withdraw.pop(ticket, None) is None or future.cancelled():
            return
        if error is None or isinstance(error, GenrtError):
            self._ends.append((ticket, error or future.result()[0]))
        else:
            self._failed = EngineDied(f"{type(error).__name__}: {error}")
        self._news.set()

    async def add_adapter(self, adapter: Adapter, files: Mapping[str, bytes]) -> GenrtError | None:
        """Load an adapter from its files, unless it is loaded. Return why it does not fit."""
        if adapter in self._adapters:
            return None
        with Folder("adapter") as directory:
            for name, data in files.items():
                (directory / name).write_bytes(data)
            refused = await self._on_engine(lambda engine: engine.add_adapter(adapter, directory))
        if refused is None:
            self._adapters.add(adapter)
            self._lm._adapters.by_name[adapter.name] = adapter
        return cast("GenrtError | None", refused)

    async def remove_adapter(self, adapter: Adapter) -> None:
        """Forget an adapter."""
        if adapter in self._adapters:
            self._adapters.discard(adapter)
            names = self._lm._adapters.by_name
            if names.get(adapter.name) == adapter:
                del names[adapter.name]
            await self._on_engine(lambda answering: answering.remove_adapter(adapter))

    async def do(self, name: str, *arguments: Any) -> Any:
        """Return an attribute of the answering engine, by a dotted name; call it if it is a method, and
        return its GenrtError if it raises one. Raises EngineDied."""

        def call(answering: AnsweringEngine) -> Any:
            found = attrgetter(name)(answering)
            found = found(*arguments) if callable(found) else found
            return dict(found) if isinstance(found, Mapping) else found

        return await self._on_engine(call)

    async def stop(self) -> None:
        """Close the runtime."""
        self._cancel([*self._withdraw])
        if self._lm is not None:
            await self._lm.aclose()

    async def _on_engine(self, function: Callable[[AnsweringEngine], Any]) -> Any:
        """Return the result, or the GenrtError, of a function of the engine on its thread. Raises
        EngineDied."""

        def call(answering: AnsweringEngine) -> Any:
            try:
                return function(answering)
            except Exception as error:
                return survived(error)

        if self._lm is None:
            raise EngineDied("it was started again")
        return await asyncio.wrap_future(self._lm._thread.call(call))


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
    return Facts(*sizes, able.scores, able.serves_vllm, refused, tokenizer)
