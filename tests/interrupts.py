"""SIGINT at a chosen moment: at the k-th line of genrt that the main thread comes to, or when an engine
begins its k-th step; and what must hold of a runtime after it.

A moment is a count, so the same moment comes again. Lines that begin with ``with`` or ``try`` are none:
the first is also where a lock is let go, the second does nothing, and no interpreter looks for signals
between these and the line before.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import genrt
from genrt.lm import AsyncLM
from genrt.runtime.batcher import Waiter
from tests.inside import engine_of, in_progress, thread_of

NO_MOMENTS = ("with ", "async with ", "try:")
PACKAGE = str(Path(genrt.__file__).parent)
TOLERANCE = 5e-4


@dataclass
class Moment:
    """How many moments have passed, and which one was the interrupt's."""

    number: int
    passed: int = 0
    fired: str = ""

    def comes(self) -> bool:
        """Whether this is the one."""
        self.passed += 1
        return self.passed == self.number


@contextmanager
def at_line(number: int) -> Iterator[Moment]:
    """SIGINT when the main thread comes to its ``number``-th line of genrt; 0 is never."""
    moment = Moment(number)

    def in_genrt(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not moment.fired:
            file, line = frame.f_code.co_filename, frame.f_lineno
            text = linecache.getline(file, line).strip()
            if not text.startswith(NO_MOMENTS) and moment.comes():
                moment.fired = f"{Path(file).name}:{line}: {text}"
                signal.raise_signal(signal.SIGINT)
        return in_genrt

    def anywhere(frame: FrameType, event: str, argument: object) -> Any:
        if moment.fired or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        return in_genrt(frame, event, argument)

    before = sys.gettrace()
    sys.settrace(anywhere)
    try:
        yield moment
    finally:
        sys.settrace(before)


@contextmanager
def at_step(engine: Any, number: int) -> Iterator[Moment]:
    """SIGINT to the main thread when the engine begins its ``number``-th step from here; 0 is never."""
    moment, step = Moment(number), engine.step
    main = threading.main_thread().ident or 0

    def counted() -> Any:
        if moment.comes():
            moment.fired = f"step {number}"
            signal.pthread_kill(main, signal.SIGINT)
        return step()

    engine.step = counted
    try:
        yield moment
    finally:
        engine.step = step


Contexts = Iterator[list[int]]
Program = Callable[[AsyncLM, Contexts, asyncio.AbstractEventLoop], None]


def blocking(lm: AsyncLM, contexts: Contexts, _: asyncio.AbstractEventLoop) -> None:
    """Questions of the thread itself."""
    lm.next_token_logprobs_sync(next(contexts))
    lm.batch_next_token_logprobs_sync([next(contexts) for _ in range(3)])
    lm.sample_sync(next(contexts), max_tokens=5)
    lm.draw_sync(next(contexts))


async def concurrent(lm: AsyncLM, contexts: Contexts) -> None:
    """Questions of a loop: alone, equal, in a batch."""
    same = next(contexts)
    await asyncio.gather(
        *(lm.next_token_logprobs(next(contexts)) for _ in range(3)),
        lm.next_token_logprobs(same),
        lm.next_token_logprobs(same),
        lm.batch_next_token_logprobs([next(contexts) for _ in range(3)]),
        lm.sample(next(contexts), max_tokens=5),
        lm.draw(next(contexts)),
    )
    await lm.next_token_logprobs(next(contexts))


async def cancelling(lm: AsyncLM, contexts: Contexts) -> None:
    """The same, and one that is cancelled in flight."""
    long = asyncio.create_task(lm.sample(next(contexts), max_tokens=40))
    await concurrent(lm, contexts)
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)


def on_new_loops(lm: AsyncLM, contexts: Contexts, _: asyncio.AbstractEventLoop) -> None:
    """As ``asyncio.run`` takes interrupts: its main task is cancelled."""
    asyncio.run(cancelling(lm, contexts))


def on_one_loop(lm: AsyncLM, contexts: Contexts, loop: asyncio.AbstractEventLoop) -> None:
    """A loop that is interrupted wherever it is, and goes on once its tasks are cancelled.

    Nothing is cancelled before: an interrupt that is raised in the clean-up of a cancelled task skips it,
    as Python has it, and what that task asked is computed to its end.
    """
    main = loop.create_task(concurrent(lm, contexts))
    try:
        loop.run_until_complete(main)
    finally:
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def on_closed_loops(lm: AsyncLM, contexts: Contexts, _: asyncio.AbstractEventLoop) -> None:
    """A loop that is closed with a task pending, interrupted or not; nobody cancels that."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)

    async def leaving() -> None:
        asyncio.create_task(lm.sample(next(contexts), max_tokens=400))  # noqa: RUF006
        await concurrent(lm, contexts)

    try:
        loop.run_until_complete(leaving())
    finally:
        loop.close()


PROGRAMS: dict[str, Program] = {
    "blocking": blocking,
    "on new loops": on_new_loops,
    "on one loop": on_one_loop,
    "on closed loops": on_closed_loops,
}


class Examination:
    """A runtime without a cache, interrupted again and again, and the rows that it gave before."""

    def __init__(self, lm: AsyncLM) -> None:
        self.lm = lm
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda *_: None)
        self.contexts = [[1 + n, *range(n % 40)] for n in range(60)]
        self.rows = lm.batch_next_token_logprobs_sync(self.contexts)
        self._next = itertools.cycle(self.contexts)
        gc.collect()
        gc.freeze()  # what is older than this is looked at no more

    def moments(self, program: Program, moment: AbstractContextManager[Moment]) -> int:
        """How many moments a program has, if nothing interrupts it."""
        with moment as counted:
            program(self.lm, self._next, self.loop)
        return counted.passed

    def interrupt(self, program: Program, moment: AbstractContextManager[Moment]) -> str | None:
        """Run a program and interrupt it; what is wrong then, or ``""``. ``None`` if it ended before."""
        with contextlib.suppress(KeyboardInterrupt), moment as this:
            program(self.lm, self._next, self.loop)
        if not this.fired:
            return None
        wrong = self._wrong()
        return f"after {this.fired}: {wrong}" if wrong else ""

    def _wrong(self) -> str:
        number = self.contexts.index(next(self._next))
        asked = self.contexts[number]
        for row in (
            self.lm.next_token_logprobs_sync(asked),
            asyncio.run(self.lm.next_token_logprobs(asked)),
            self.loop.run_until_complete(self.lm.next_token_logprobs(asked)),
        ):
            if float((row - self.rows[number]).abs().max()) > TOLERANCE:
                return "the next row is wrong"
        s = self.lm.statistics().batcher
        if (s.queued, s.in_flight) != (0, 0):
            return f"ghosts: {thread_of(self.lm).batcher}"
        engine = engine_of(self.lm)
        left = thread_of(self.lm).call(lambda _: [*in_progress(engine)]).result(30)
        if left:
            return f"the engine still works on {left}"
        gc.collect()
        waiters = [each for each in gc.get_objects() if isinstance(each, Waiter)]
        return f"{len(waiters)} waiters are kept" if waiters else ""
