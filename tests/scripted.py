"""An engine that does what a test's script says, and a batcher turned by hand: no threads, no waiting.

Its rows are a function of the request, so a result that went to the wrong caller is seen; the lists
of what it was given (``submitted``, ``cancelled``, …) are what tests assert on.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from genrt.engines.protocol import Engine, EngineStatistics, Finished
from genrt.errors import GenrtError
from genrt.questions.arguments import Adapter
from genrt.questions.completions import SampleRequest
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request, Result
from genrt.questions.rows import Limits, LogprobsRequest
from genrt.questions.sequences import Contexts, Sequences
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.ask import Asker
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache

PATIENCE_SECONDS = 30.0
"""After which a test that waits for another thread fails instead of hanging."""


NOWHERE = Path("/no/such/place")
"""Where the adapters are that a ScriptedEngine has loaded."""


class ProtocolViolation(BaseException):
    """The engine was called as the protocol forbids; no ``except Exception`` can hide it."""


class Gate:
    """Holds whoever passes until it is opened, and says when somebody is held."""

    def __init__(self) -> None:
        self._held = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def go_through(self) -> None:
        self._held.set()
        if not self._open.wait(PATIENCE_SECONDS):
            raise ProtocolViolation("the gate was never opened: whoever should open it is stuck")

    def wait_until_held(self) -> None:
        if not self._held.wait(PATIENCE_SECONDS):
            raise AssertionError("nobody came to the gate")


def logprobs(*token_ids: int, adapter: Adapter | None = None) -> LogprobsRequest:
    return LogprobsRequest(token_ids, adapter)


def sample(*token_ids: int, seed: int = 0, max_tokens: int = 3) -> SampleRequest:
    return SampleRequest(token_ids, max_tokens, seed=seed)


def contexts_of(*rows: LogprobsRequest) -> Contexts:
    """The contexts of these rows, as a population has them."""
    sequences = Sequences.of(Limits(2**31, 2**31), [row.token_ids for row in rows])
    return sequences.contexts(np.arange(len(rows)))


def population_of(*rows: LogprobsRequest) -> PopulationDraw:
    """Draws from these rows, seeded by their places."""
    seeds = np.arange(len(rows), dtype=np.uint64)
    return PopulationDraw(contexts_of(*rows), None, None, 1.0, seeds)


def expected_row(request: LogprobsRequest, vocab_size: int = 8) -> torch.Tensor:
    """The row that ScriptedEngine gives; a fresh tensor."""
    return _row(request, vocab_size).clone()


@lru_cache(maxsize=4096)
def _row(request: LogprobsRequest, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_number(request))
    return torch.randn(vocab_size, generator=generator).log_softmax(0)


def expected(request: Request, vocab_size: int = 8) -> Result:
    """What ScriptedEngine answers."""
    if not isinstance(request, SampleRequest):
        return expected_row(LogprobsRequest(request.token_ids, request.adapter), vocab_size)
    return tuple((_number(request) + i) % vocab_size for i in range(request.max_tokens))


def _number(request: Request) -> int:
    return zlib.crc32(repr((type(request), request.token_ids, request)).encode())


class ScriptedEngine:
    """An Engine for tests.

    Args:
        steps: how many steps a request takes.
        fail_at: what the n-th step, counted from 1, raises, forgetting everything in progress.
        fail_submit: what the n-th submit, counted from 1, raises, taking nothing.
        errors: requests that end in an error of their own.
        gate: every step goes through it.
        fail_cancel, fail_close: what ``cancel`` and ``close`` raise.
        row: makes a row, where a test wants special tensors.
    """

    vocab_size = 8
    max_model_len = 64
    max_batch_size = 1_000_000
    device = torch.device("cpu")
    tokenizer: Any = None

    def __init__(
        self,
        *,
        steps: Callable[[Request], int] = lambda request: 1,
        fail_at: Mapping[int, BaseException] | None = None,
        fail_submit: Mapping[int, Exception] | None = None,
        errors: Mapping[Request, GenrtError] | None = None,
        gate: Gate | None = None,
        fail_cancel: BaseException | None = None,
        fail_close: BaseException | None = None,
        row: Callable[[LogprobsRequest], torch.Tensor] = expected_row,
    ) -> None:
        self._steps = steps
        self.fail_at = dict(fail_at or {})
        self._fail_submit = fail_submit or {}
        self._errors = errors or {}
        self._gate = gate
        self._fail_cancel = fail_cancel
        self._fail_close = fail_close
        self._make_row = row
        self._submits = 0
        self.in_progress: dict[Request, int] = {}
        self.submitted: list[list[Request]] = []
        self.stepped: list[list[Request]] = []
        self.finished: list[list[Request]] = []
        self.cancelled: list[list[Request]] = []
        self.adapters: list[Adapter] = []
        self.removed: list[Adapter] = []
        self.closed = 0
        self.threads: set[int] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        self._called()
        self._submits += 1
        if self._submits in self._fail_submit:
            raise self._fail_submit[self._submits]
        if not requests or len(set(requests)) < len(requests):
            raise ProtocolViolation(f"an empty flush, or a request twice in it: {requests}")
        if set(requests) & set(self.in_progress):
            raise ProtocolViolation(f"in progress already: {set(requests) & set(self.in_progress)}")
        self.submitted.append(list(requests))
        self.in_progress |= {request: self._steps(request) for request in requests}

    def step(self) -> list[Finished]:
        self._called()
        self.stepped.append(list(self.in_progress))
        self.finished.append([])
        if self._gate is not None:
            self._gate.go_through()
        if len(self.stepped) in self.fail_at:
            self.in_progress.clear()
            raise self.fail_at[len(self.stepped)]
        for request in self.in_progress:
            self.in_progress[request] -= 1
        done = [request for request, left in self.in_progress.items() if left <= 0]
        for request in done:
            del self.in_progress[request]
        self.finished[-1] += done
        return [self._end(request) for request in reversed(done)]

    def _end(self, request: Request) -> Finished:
        error = self._errors.get(request)
        if error is not None:
            return Finished(request, error=error)
        if isinstance(request, LogprobsRequest):
            return Finished(request, result=self._make_row(request))
        return Finished(request, result=expected(request))

    def cancel(self, requests: Sequence[Request]) -> None:
        self._called()
        if self._fail_cancel is not None:
            raise self._fail_cancel
        self.cancelled.append(list(requests))
        for request in requests:
            self.in_progress.pop(request, None)

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self._called()
        self.adapters.append(adapter)

    def remove_adapter(self, adapter: Adapter) -> None:
        self._called()
        if adapter not in self.adapters or any(r.adapter == adapter for r in self.in_progress):
            raise ProtocolViolation(f"{adapter} is not loaded, or in use")
        self.adapters.remove(adapter)
        self.removed.append(adapter)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(steps=len(self.stepped), requests=sum(map(len, self.submitted)))

    def close(self) -> None:
        self.closed += 1
        if self._fail_close is not None:
            raise self._fail_close

    def _called(self) -> None:
        self.threads.add(threading.get_ident())
        if self.closed:
            raise ProtocolViolation("called after close")


class Answers(AnsweringEngine):
    """An answering engine that keeps the ends of ``submit`` until ``ready`` is called."""

    def __init__(self, engine: Engine, *parts: Any) -> None:
        super().__init__(engine, *parts)
        self.vocab_size, self.max_model_len = engine.vocab_size, engine.max_model_len
        self.max_batch_size, self.device = engine.max_batch_size, engine.device
        self._ends: list[Finished] = []

    def submit(self, requests: Sequence[Request]) -> list[Finished]:
        self._ends += super().submit(requests)
        return []

    def ready(self) -> list[Finished]:
        ends, self._ends = self._ends, []
        return ends


async def passes(count: int = 5) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


class ByHand:
    """A batcher over a ScriptedEngine, in the test's own thread and loop.

    ``dropped`` is how many requests the test expects to have left the queue unsent; ``check`` proves
    by it that every question is accounted for.
    """

    def __init__(
        self,
        engine: ScriptedEngine | None = None,
        *,
        cache_bytes: int = 2**20,
        max_batch_size: int | None = None,
        max_wait_seconds: float = 0.0,
        max_queued_requests: int = 2**16,
        max_queued_bytes: int = 2**30,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.engine = engine or ScriptedEngine()
        self.cache = RowCache(cache_bytes)
        self.answering = AnsweringEngine(self.engine, self.cache)
        self.wakes = 0
        self.batcher = Batcher(
            self.cache,
            max_batch_size=max_batch_size,
            max_wait_seconds=max_wait_seconds,
            max_queued_requests=max_queued_requests,
            max_queued_bytes=max_queued_bytes,
            wake=self._wake,
            clock=clock,
        )
        self.asker = Asker(self)
        self.dropped = 0
        self._tasks: list[asyncio.Task[list[Result]]] = []

    def _wake(self) -> None:
        self.wakes += 1

    def load(self, *adapters: Adapter) -> None:
        """Adapters that requests may be bound to."""
        for adapter in adapters:
            self.engine.add_adapter(adapter, NOWHERE)
            self.answering._adapters._copies[adapter] = NOWHERE
            self.asker.adapters[adapter.name] = adapter

    def ask(self, *requests: Request) -> asyncio.Task[list[Result]]:
        """A task that asks them as one question."""
        self._tasks.append(asyncio.get_running_loop().create_task(self.asker.ask(requests)))
        return self._tasks[-1]

    async def queued(self, *requests: Request) -> asyncio.Task[list[Result]]:
        """The same, once its requests are ready for the next flush."""
        task = self.ask(*requests)
        await passes()
        return task

    def turn(self) -> None:
        self.batcher.turn(self.answering)

    async def finish(self) -> None:
        """Turn until there is nothing left to do, and see that everyone has an answer."""
        await passes()
        for _ in range(1000):
            if self.batcher.seconds_until_due() is None:
                assert all(task.done() for task in self._tasks), "someone was never told"
                return
            self.turn()
            await passes()
        raise AssertionError(f"the batcher is never done: {self.batcher}")

    def check(self) -> None:
        """Every question was cached, joined another, was sent, is queued, or was dropped unsent."""
        s = self.batcher.statistics()
        sent = sum(map(len, self.engine.submitted)) - s.retried
        assert s.questions == s.cached + s.deduplicated + sent + s.queued + self.dropped, s
        assert s.flushes == len(self.engine.submitted)
        assert s.largest_flush == max(map(len, self.engine.submitted), default=0)
        assert s.in_flight == len(self.engine.in_progress)


def right(requests: Sequence[Request], results: Sequence[Result]) -> bool:
    """Whether each result is its own request's, bit by bit."""
    return len(requests) == len(results) and all(
        torch.equal(result, cast("torch.Tensor", wanted))
        if isinstance(result, torch.Tensor)
        else result == wanted
        for result, wanted in zip(results, map(expected, requests), strict=True)
    )
