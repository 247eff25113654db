"""Runs a sampler deterministically: real batching over an engine that reorders, delays and fails, with a
virtual clock and without threads. The same seed gives the same run, callback by callback."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.protocol import Engine, Finished, FullEngine, capabilities_of
from genrt.errors import EngineDied, EngineFailed, InvalidRequest
from genrt.lm import AsyncLM
from genrt.questions.completions import Decoding
from genrt.questions.request import Request
from genrt.runtime.batcher import Batcher, Waiter
from genrt.runtime.cache import RowCache
from genrt.runtime.thread import EngineThread, LoopThread
from genrt.testing.virtual_loop import VirtualClock, VirtualLoop

T = TypeVar("T")

MOST_EVENTS = 100_000
"""The number of events after which a sampler counts as stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of a simulated engine; there are no faults by default.

    Attributes:
        step: the probability that a call of ``step`` raises, for everything in progress.
        death: the probability that the engine dies in a call of ``step``.
    """

    step: float = 0.0
    death: float = 0.0


def run_simulated(
    sampler: Callable[[AsyncLM], Coroutine[Any, Any, T]],
    *,
    seed: int,
    model: NGram | Callable[[], Engine] | None = None,
    faults: Faults | None = None,
    cancel_after: int | None = None,
) -> T:
    """Return the result of your own sampler on a simulated runtime.

    The sampler gets a real ``AsyncLM``, which is closed when it ends. The engine answers in any order and
    in as many steps as the seed decides. Time on its event loop is virtual: ``asyncio.sleep`` takes no
    time. The seed fixes the whole run, including torch's global generator.

    Args:
        sampler: an async function of the runtime. It may not call methods that block (``…_sync``).
        seed: decides everything that is not specified.
        model: the source of the rows: an ``NGram``, a function that opens an engine, or ``None`` for a
            random ``NGram`` of eight tokens.
        faults: the engine's faults; no faults by default.
        cancel_after: the number of events (callbacks, engine steps, …) after which the sampler is
            cancelled if it has not ended; ``None``: never.

    Raises:
        AssertionError: the sampler waits forever, or left tasks, questions or unread errors behind. The
            message has the seed.
        InvalidRequest: the sampler calls a method that blocks.
        CancelledError: the sampler was cancelled.

    The sampler's own exceptions pass through unchanged.
    """
    if model is None:
        model = NGram.random(8, order=2, seed=0)
    open_engine = partial(ExactEngine, model) if isinstance(model, NGram) else model
    chance = random.Random(seed)
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    rounds: list[VirtualRounds] = []

    def make_rounds(round: Callable[[], float | None], _: Callable[..., None]) -> VirtualRounds:
        rounds.append(VirtualRounds(round, clock))
        return rounds[-1]

    cache = RowCache(2**20)
    time = clock.time
    thread = EngineThread(
        lambda: _FaultyEngine(open_engine(), faults or Faults(), chance),
        cache,
        make_batcher=partial(_AwaitedBatcher, clock=time),
        make_thread=make_rounds,
    )
    lm = AsyncLM(thread, cache, thread.engine, seed=abs(seed))
    engine_share = chance.choice([0.05, 0.3, 0.7])

    def step() -> bool:
        """Let one event happen; return whether one was possible."""
        is_due = rounds[-1].is_due
        if is_due and (not loop.has_work or chance.random() < engine_share):
            rounds[-1].go_round()
        elif loop.has_work:
            loop.run_one()
        else:
            timer = loop.next_timer
            due = min(rounds[-1].alarm, math.inf if timer is None else timer)
            if due == math.inf:
                return False
            clock.pass_until(due)
        return True

    def expect(condition: bool, message: str) -> None:
        if not condition:
            raise AssertionError(f"seed {seed}: {message}: {thread.batcher}")

    def settle() -> None:
        for _ in range(MOST_EVENTS):
            if not step():
                return
        expect(False, f"something still happens after {MOST_EVENTS} events")

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            task = loop.create_task(sampler(lm))
            events = 0
            while not task.done():
                if events == cancel_after:
                    task.cancel()
                events += 1
                expect(events < MOST_EVENTS, f"the sampler waits after {MOST_EVENTS} events")
                expect(step() or task.done(), "nothing can happen any more, and the sampler waits")
            settle()
        left = [each for each in asyncio.all_tasks(loop) if not each.done()]
        expect(not left, f"the sampler has ended and left these waiting: {left}")
        s = thread.batcher.statistics()
        expect(not s.queued + s.in_flight + s.waiting, "the sampler has left questions behind")
        lm.close()
        settle()
        reports = [] if task.cancelled() or task.exception() is not None else loop.reports
        expect(not reports, f"the event loop's exception handler was called with {reports}")
    finally:
        lm.close()
        for each in asyncio.all_tasks(loop):
            each.get_coro().close()
        loop.close()
    return task.result()


class _AwaitedBatcher(Batcher):
    """A batcher that refuses questions of callers that block the only thread."""

    def join(self, waiter: Waiter) -> list[Any] | None:
        if waiter.loop is None:
            raise InvalidRequest(
                "a simulation has one thread: await the question, not its _sync twin"
            )
        return super().join(waiter)


class _FaultyEngine:
    """An engine that passes some requests to another engine later, returns some results later, in any
    order, and has faults."""

    def __init__(self, inner: Engine, faults: Faults, chance: random.Random) -> None:
        self.vocab_size, self.max_model_len = inner.vocab_size, inner.max_model_len
        self.max_batch_size, self.device = inner.max_batch_size, inner.device
        self.tokenizer = getattr(inner, "tokenizer", None)
        self.add_adapter, self.remove_adapter = inner.add_adapter, inner.remove_adapter
        self.statistics, self.close = inner.statistics, inner.close
        self._inner = inner
        self._faults = faults
        self._chance = chance
        self._delay = chance.choice([0.0, 0.3, 0.6])
        self._queued: dict[Request, None] = {}
        self._running: dict[Request, None] = {}
        self._done: list[Finished] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._queued |= dict.fromkeys(requests)

    def step(self) -> list[Finished]:
        faults = self._faults
        if self._is_due(faults.death):
            raise EngineDied("the simulated engine died")
        if self._is_due(faults.step):
            self.cancel([*self._queued, *self._running, *(end.request for end in self._done)])
            raise EngineFailed("the simulated engine failed in a step")
        if sent := self._some([*self._queued]):
            for request in sent:
                del self._queued[request]
            self._running |= dict.fromkeys(sent)
            self._inner.submit(sent)
        for end in self._inner.step() if self._running else ():
            self._running.pop(end.request, None)
            self._done.append(end)
        self._chance.shuffle(self._done)
        told = self._some(self._done)
        self._done = [end for end in self._done if end not in told]
        return told

    def cancel(self, requests: Sequence[Request]) -> None:
        unwanted = set(requests)
        self._done = [end for end in self._done if end.request not in unwanted]
        self._queued = {each: None for each in self._queued if each not in unwanted}
        if running := [each for each in self._running if each in unwanted]:
            for each in running:
                del self._running[each]
            self._inner.cancel(running)

    def unsupported(self, decoding: Decoding) -> str | None:
        if capabilities_of(self._inner).completes:
            return cast("FullEngine", self._inner).unsupported(decoding)
        return "it draws no completions"

    def progress(self, streamed: Sequence[Any]) -> Sequence[Any]:
        if not capabilities_of(self._inner).completes:
            return [None] * len(streamed)
        told = cast("FullEngine", self._inner).progress(streamed)
        return [
            delta if each in self._running else None
            for each, delta in zip(streamed, told, strict=True)
        ]

    def _is_due(self, probability: float) -> bool:
        return probability > 0.0 and self._chance.random() < probability

    def _some(self, things: list[Any]) -> list[Any]:
        """Return the first of these, and others at random."""
        return things[:1] + [each for each in things[1:] if self._chance.random() >= self._delay]


class VirtualRounds(LoopThread):
    """Rounds without a thread, each run by ``go_round``. Between rounds it sleeps until it is woken or
    due, as the thread does, so a missing wake is detected."""

    def __init__(self, round: Callable[[], float | None], clock: VirtualClock) -> None:
        super().__init__(round, lambda **_: None)
        self.is_at_work = self.is_turning = False
        self.alarm = math.inf
        self._clock = clock
        self._is_awake = False
        self._is_over = False

    def go_round(self) -> None:
        """Run one round."""
        self._is_awake, self.alarm, self.is_at_work = False, math.inf, True
        try:
            seconds = self._round()
        finally:
            self.is_at_work = self.is_turning = False
        if seconds is None:
            self._is_over = True
        elif seconds > 0.0:
            self.alarm = self._clock.now + seconds
        else:
            self._is_awake = True

    @property
    def is_due(self) -> bool:
        """True if it is awake or its alarm has passed."""
        is_free = not self._is_over and not self.is_at_work
        return is_free and (self._is_awake or self.alarm <= self._clock.now)

    # -- as a thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Run rounds until the engine is open and there is no work; a real start blocks as long."""
        self._is_awake = True
        while self._is_awake:
            self.go_round()

    def wake(self) -> None:
        self._is_awake = True

    def join(self, timeout: float | None = None) -> None:
        """Run the last round, unless a round is running, which cannot be waited for."""
        if not self.is_at_work and not self._is_over:
            self.go_round()

    def is_alive(self) -> bool:
        return not self._is_over

    def open(self, open_engine: Callable[[], Engine]) -> Engine:
        return open_engine()
