"""batcher.py against a model, under any order of events.

One thread, three event loops taken round by hand, a scripted engine turned by hand: every run is
deterministic and Hypothesis can shrink it. The model knows who waits for what; after each event the
engine must hold exactly what somebody still waits for, and every waiter must end once and rightly.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from genrt.errors import EngineFailed
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.ask import Asker
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from tests.scripted import ScriptedEngine, logprobs, passes, right, sample

REQUESTS: list[Request] = [*map(logprobs, range(5)), sample(1, seed=1), sample(2, seed=2)]
LOOPS = 3


@dataclass(eq=False)
class Asked:
    """A question, and what the model expects of it."""

    requests: list[Request]
    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[list[Result]]
    missing: set[Request] = field(default_factory=set)
    expects: type[BaseException] | None = None
    over: bool = False


class BatcherMachine(RuleBasedStateMachine):
    @initialize(
        max_batch_size=st.sampled_from([None, 1, 2]), cache_bytes=st.sampled_from([0, 4096])
    )
    def start(self, max_batch_size: int | None, cache_bytes: int) -> None:
        self.engine = ScriptedEngine(steps=lambda request: 1 + request.token_ids[0] % 3)
        self.answering = AnsweringEngine(self.engine, RowCache(0))
        self.cache_bytes = cache_bytes
        self.batcher = Batcher(
            RowCache(cache_bytes), max_batch_size=max_batch_size, clock=lambda: 0.0
        )
        self.asker = Asker(self)
        self.loops = [asyncio.new_event_loop() for _ in range(LOOPS)]
        self.reports: list[dict[str, Any]] = []
        for loop in self.loops:
            loop.set_exception_handler(lambda _, report: self.reports.append(report))
        self.asked: list[Asked] = []
        self.cached: set[Request] = set()
        self.questions = self.dropped = self.cancelled = self.failed = 0

    # -- the events ---------------------------------------------------------------------------

    @rule(
        loop=st.integers(0, LOOPS - 1),
        requests=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4),
    )
    def ask(self, loop: int, requests: list[Request]) -> None:
        running = self.loops[loop]
        task = running.create_task(self.asker.ask(requests))
        self.one_pass(running)
        missing = set(requests) - self.cached
        self.questions += len(requests)
        self.asked.append(Asked(requests, running, task, missing, over=not missing))

    @rule(loop=st.integers(0, LOOPS - 1), count=st.integers(1, 4))
    def go_round(self, loop: int, count: int) -> None:
        for _ in range(count):
            self.one_pass(self.loops[loop])

    @precondition(lambda self: any(not asked.task.done() for asked in self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from([a for a in self.asked if not a.task.done()]))
        asked.task.cancel()
        self.cancelled += not asked.over
        asked.expects = asyncio.CancelledError
        for _ in range(2):
            self.one_pass(asked.loop)
        assert asked.task.cancelled()
        self.leave(asked)

    @rule(fails=st.sampled_from([False, False, False, True]))
    def turn(self, fails: bool) -> None:
        steps, flushes = len(self.engine.stepped), len(self.engine.submitted)
        self.engine.fail_at = {steps + 1: RuntimeError("scripted")} if fails else {}
        self.batcher.turn(self.answering)
        assert len(self.engine.submitted) <= flushes + 1
        assert not self.ghosts(), "nobody waits for these any more"
        if len(self.engine.stepped) == steps:
            return
        if fails:
            lost = set(self.engine.stepped[-1])
            self.failed += len(lost)
            for asked in self.asked:
                if asked.missing & lost:
                    asked.expects = EngineFailed
                    asked.missing -= lost
                    self.leave(asked)
            return
        for request in self.engine.finished[-1]:
            if isinstance(request, LogprobsRequest) and self.cache_bytes:
                self.cached.add(request)
            for asked in self.asked:
                asked.missing.discard(request)
                asked.over |= not asked.missing

    @rule()
    def clear_cache(self) -> None:
        self.batcher._cache.clear()
        self.cached.clear()

    # -- what must hold after each ------------------------------------------------------------

    @invariant()
    def counters_add_up(self) -> None:
        s = self.batcher.statistics()
        sent = sum(map(len, self.engine.submitted))
        assert s.questions == self.questions
        assert s.questions == s.cached + s.deduplicated + sent + s.queued + self.dropped
        assert (s.cancelled, s.failed) == (self.cancelled, self.failed)
        assert self.reports == []

    @invariant()
    def everything_waited_for_is_on_its_way_and_nothing_else(self) -> None:
        wanted = {request for asked in self.asked for request in asked.missing}
        assert not self.ghosts() or self.batcher.seconds_until_due() == 0.0
        s = self.batcher.statistics()
        assert s.in_flight == len(self.engine.in_progress)
        assert s.queued == len(wanted - set(self.engine.in_progress))

    @invariant()
    def every_answer_is_right(self) -> None:
        for asked in self.asked:
            if asked.task.done():
                assert asked.over
                self.check(asked)
        self.asked = [asked for asked in self.asked if not asked.task.done()]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.fail_at = {}
        for _ in range(100):
            for loop in self.loops:
                loop.run_until_complete(passes())
            if self.batcher.seconds_until_due() is None:
                break
            self.turn(fails=False)
        for asked in self.asked:
            assert asked.task.done(), f"{asked.requests} never ended"
            self.check(asked)
        s = self.batcher.statistics()
        assert (s.queued, s.in_flight) == (0, 0)
        self.counters_add_up()
        for loop in self.loops:
            loop.close()

    # -- the model ----------------------------------------------------------------------------

    def ghosts(self) -> set[Request]:
        """What the engine works on and nobody waits for."""
        return set(self.engine.in_progress) - {r for asked in self.asked for r in asked.missing}

    def leave(self, asked: Asked) -> None:
        """It waits no more; what nobody else waits for is dropped, if it has not been sent."""
        own, asked.missing, asked.over = asked.missing, set(), True
        wanted = {request for other in self.asked for request in other.missing}
        self.dropped += len(own - wanted - set(self.engine.in_progress))

    @staticmethod
    def one_pass(loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(loop.stop)
        loop.run_forever()

    @staticmethod
    def check(asked: Asked) -> None:
        if asked.expects is asyncio.CancelledError:
            assert asked.task.cancelled()
        elif asked.expects is not None:
            assert isinstance(asked.task.exception(), asked.expects)
        else:
            assert right(asked.requests, asked.task.result())


@pytest.mark.promise(number=1)  # no other is touched
@pytest.mark.promise(number=2)  # no ghosts
class TestBatcherMachine(BatcherMachine.TestCase):  # type: ignore[valid-type,misc]
    settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
