"""Programs in a replica: their event loop, and the replica's engine as their runtime sees it.

Rules:
    The engine's thread alone uses the engine. What programs ask is posted to it, and what it answers is
    put where the thread of their runtime waits; rows stay on the device.
    All programs of a replica share one runtime, and so batches. It is made for the first of them.
    Whoever asks for new weights has ended all programs before, or withdrawn them.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from genrt.cluster.joining import join_stream_parts
from genrt.cluster.programs import (
    Outcome,
    ProgramRequest,
    packed_outcome,
    program_outcome,
    unpickle_program,
)
from genrt.engines.protocol import EngineStatistics, Finished, ReplicaStatistics
from genrt.errors import EngineFailed, EngineUnsupported, NotFinite, OutOfMemory
from genrt.questions.completions import Decoding, Streamed, Told
from genrt.questions.contexts import Adapter
from genrt.questions.draws import DrawToken, PopulationDraw
from genrt.questions.reads import Candidates, TopTokens
from genrt.questions.request import Request
from genrt.questions.sequences import SequenceHandle
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import aside
from genrt.runtime.thread import EngineThread

__all__ = ["Programs", "SharedEngine"]


class Asking(Protocol):
    """The thread of an engine, as others ask it. Each of these is to be called there."""

    answering: AnsweringEngine
    names: dict[str, Adapter]

    def ask(self, requests: Sequence[Request], asker: SharedEngine) -> None:
        """Take questions, whose ends the asker is told."""

    def withdraw(self, requests: Sequence[Request], asker: SharedEngine) -> None:
        """Forget questions of this asker."""

    def stream(self, streamed: Sequence[Streamed], asker: SharedEngine) -> None:
        """Tell the asker what these draw meanwhile."""

    def post(self, function: Callable[[], object]) -> None:
        """Have the thread call a function soon; from any thread."""


class SharedEngine:
    """The engine of another thread, as an Engine of this one's."""

    reads = frozenset({DrawToken, TopTokens, Candidates, PopulationDraw})

    def __init__(self, other: Asking) -> None:
        engine = other.answering.engine
        self.vocab_size, self.max_model_len = engine.vocab_size, engine.max_model_len
        self.max_batch_size, self.tokenizer = engine.max_batch_size, engine.tokenizer
        self.device: torch.device = engine.device
        self.scores = bool(getattr(engine, "scores", False))
        self.adapters = other.names
        self._other = other
        self._asked: dict[Request, None] = {}
        self._streams: dict[Any, deque[Told]] = {}
        # Finished, or a streamed request with what it has told; None interrupts.
        self._came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def submit(self, requests: Sequence[Request]) -> None:
        self._asked.update(dict.fromkeys(requests))
        self._other.post(partial(self._other.ask, requests, self))

    def step(self) -> list[Finished]:
        """Wait until something has ended or been told, or ``interrupt`` was called; return what ended."""
        ended: list[Finished] = []
        came = [self._came.get()] if self._asked else []
        while True:
            for each in came:
                if isinstance(each, Finished):
                    if each.request in self._asked:
                        self._forget(each.request)
                        ended.append(each)
                elif each is not None and each[0] in self._streams:
                    self._streams[each[0]].append(each[1])
            try:
                came = [self._came.get_nowait()]
            except queue.Empty:
                return ended

    def cancel(self, requests: Sequence[Request]) -> None:
        mine = [each for each in requests if each in self._asked]
        for each in mine:
            self._forget(each)
        self._other.post(partial(self._other.withdraw, mine, self))

    def take(self, came: Finished | tuple[Streamed, Told]) -> None:
        """Take the end of a question, or what a text has told; from the other thread."""
        self._came.put(came)

    def interrupt(self) -> None:
        """End the present step, or the next; from any thread, taking no lock."""
        self._came.put(None)

    def tend(self) -> float:
        """Return infinity: nothing has to be seen to while nothing is asked."""
        return float("inf")

    def replicas(self) -> tuple[ReplicaStatistics, ...]:
        """Return none: a replica has no others."""
        return ()

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return ``None``: the other thread refuses what its engine cannot do."""
        return None

    def progress(self, streamed: Sequence[Streamed]) -> list[Told | None]:
        new = [each for each in streamed if each in self._asked and each not in self._streams]
        if new:
            self._streams |= {each: deque() for each in new}
            self._other.post(partial(self._other.stream, new, self))
        return [join_stream_parts(self._streams.get(each)) for each in streamed]

    def go_on(self, population: PopulationDraw) -> bool:
        """Return False: the other thread finds the sequences."""
        return False

    def settle(self, population: PopulationDraw) -> None:
        """Do nothing: draws of populations are the other thread's."""

    def release(self, asked: Sequence[SequenceHandle]) -> None:
        """Have the other thread forget sequences."""
        self._other.post(lambda: self._other.answering.give_back(asked))

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        """Raise EngineUnsupported."""
        raise EngineUnsupported(
            "a program cannot load adapters in its replica: load them before it is run"
        )

    def remove_adapter(self, adapter: Adapter) -> None:
        """Raise EngineUnsupported."""
        raise EngineUnsupported("a program cannot remove adapters of its replica")

    def statistics(self) -> EngineStatistics:
        return self._other.answering.statistics()

    def close(self) -> None:
        self.cancel([*self._asked])

    def _forget(self, request: Any) -> None:
        del self._asked[request]
        self._streams.pop(request, None)


class Programs:
    """The programs of a replica.

    Args:
        other: the engine's thread.
        ended: told on that thread of a program that has ended, by its ticket: with its outcome, packed,
            or with why its engine failed.
    """

    def __init__(
        self, other: Asking, ended: Callable[[int, bytes | None, EngineFailed | None], None]
    ) -> None:
        self._other, self._ended = other, ended
        self._running: dict[int, Future[tuple[bytes | None, EngineFailed | None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = asyncio.Event()
        self._thread: EngineThread | None = None
        self._runtime: Any = None

    def __len__(self) -> int:
        return len(self._running)

    def start(self, ticket: int, request: ProgramRequest) -> None:
        """Begin to run a program."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._go_round, name="genrt-programs", daemon=True).start()
        running = asyncio.run_coroutine_threadsafe(self._run(request), self._loop)
        self._running[ticket] = running
        running.add_done_callback(partial(self._over, ticket))

    def withdraw(self, ticket: int) -> None:
        """Cancel a program, of which nothing is told any more; ignore one that does not run."""
        if (running := self._running.pop(ticket, None)) is not None:
            running.cancel()

    def close(self) -> None:
        """Cancel all programs, and close their runtime."""
        for ticket in [*self._running]:
            self.withdraw(ticket)
        if self._thread is not None:
            self._thread.close(wait=False)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._closed.set)

    def _go_round(self) -> None:
        with asyncio.Runner(loop_factory=lambda: cast("Any", self._loop)) as runner:
            runner.run(self._closed.wait())

    def _over(self, ticket: int, running: Future[Any]) -> None:
        self._other.post(lambda: self._tell(ticket, running))

    def _tell(self, ticket: int, running: Future[Any]) -> None:
        if self._running.pop(ticket, None) is None:
            return  # withdrawn meanwhile
        try:
            outcome, error = running.result()
        except Exception as failed:
            outcome, error = None, EngineFailed(f"the program could not be run: {failed}")
        self._ended(ticket, outcome, error)

    async def _run(self, request: ProgramRequest) -> tuple[bytes | None, EngineFailed | None]:
        lm = await self._runtime_for(request)
        try:
            work = await aside(partial(unpickle_program, request.packed, lm))
            outcome = await program_outcome(work, lm._of_seed(request.seed), request.seed)
        except BaseException as error:  # of the program's own, and no end of this process
            outcome = Outcome(error=error)
        failed = outcome.error
        if isinstance(failed, EngineFailed) and not isinstance(failed, OutOfMemory | NotFinite):
            return None, failed
        return await aside(partial(packed_outcome, outcome, lm)), None

    async def _runtime_for(self, request: ProgramRequest) -> Any:
        """Return the runtime, with these weights; another one if a program has closed it."""
        if self._thread is None or not self._thread.alive:
            self._thread = EngineThread(lambda: SharedEngine(self._other), RowCache(0))
            self._runtime = request.runtime(self._thread, RowCache(0), self._thread.opened.result())
            with contextlib.suppress(Exception):  # a tokenizer whose bytes are not known
                await aside(lambda: self._runtime.byte_vocab)
        self._thread.batcher.weights_version = request.weights_version
        return self._runtime
