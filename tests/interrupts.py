"""SIGINT at a chosen moment: at the k-th line of genrt that the main thread comes to, or when an engine
begins its k-th step; and what must hold of a runtime after it.

A moment is a count, so the same moment comes again. Lines that begin with ``with`` are none: such a line
is also where a lock is let go, and no interpreter looks for signals between that and the line before.
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
from pathlib import Path
from types import FrameType
from typing import Any

import genrt
from genrt.lm import AsyncLM
from genrt.waiters import Waiter

PACKAGE = str(Path(genrt.__file__).parent)
TOLERANCE = 5e-4


@contextmanager
def at_line(number: int) -> Iterator[list[str]]:
    """SIGINT when the main thread comes to its ``number``-th line of genrt; the list gets that line."""
    passed = itertools.count(1)
    fired: list[str] = []

    def in_genrt(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not fired:
            file, line = frame.f_code.co_filename, frame.f_lineno
            text = linecache.getline(file, line).strip()
            if not text.startswith("with ") and next(passed) == number:
                fired.append(f"{Path(file).name}:{line}: {text}")
                signal.raise_signal(signal.SIGINT)
        return in_genrt

    def anywhere(frame: FrameType, event: str, argument: object) -> Any:
        if fired or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        return in_genrt(frame, event, argument)

    sys.settrace(anywhere)
    try:
        yield fired
    finally:
        sys.settrace(None)


@contextmanager
def at_step(engine: Any, number: int) -> Iterator[list[str]]:
    """SIGINT to the main thread when the engine begins its ``number``-th step from here."""
    step, passed = engine.step, itertools.count(1)
    fired: list[str] = []

    def counted() -> Any:
        if not fired and next(passed) == number:
            fired.append(f"step {number}")
            main = threading.main_thread().ident
            signal.pthread_kill(main or 0, signal.SIGINT)
        return step()

    engine.step = counted
    try:
        yield fired
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
    """Questions of a loop: alone, equal, in a batch, one that is cancelled in flight."""
    long = asyncio.create_task(lm.sample(next(contexts), max_tokens=40))
    same = next(contexts)
    await asyncio.gather(
        *(lm.next_token_logprobs(next(contexts)) for _ in range(3)),
        lm.next_token_logprobs(same),
        lm.next_token_logprobs(same),
        lm.batch_next_token_logprobs([next(contexts) for _ in range(3)]),
        lm.draw(next(contexts)),
    )
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    await lm.next_token_logprobs(next(contexts))


def on_new_loops(lm: AsyncLM, contexts: Contexts, _: asyncio.AbstractEventLoop) -> None:
    """As ``asyncio.run`` takes interrupts: its main task is cancelled."""
    asyncio.run(concurrent(lm, contexts))


def on_one_loop(lm: AsyncLM, contexts: Contexts, loop: asyncio.AbstractEventLoop) -> None:
    """A loop that is interrupted wherever it is, and goes on once its tasks are cancelled."""
    main = loop.create_task(concurrent(lm, contexts))
    try:
        loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


PROGRAMS: dict[str, Program] = {
    "blocking": blocking,
    "on new loops": on_new_loops,
    "on one loop": on_one_loop,
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

    def interrupt(self, program: Program, moment: AbstractContextManager[list[str]]) -> str:
        """Run a program again and again until it is interrupted; what is wrong then, or ``""``."""
        with contextlib.suppress(KeyboardInterrupt), moment as fired:
            while not fired:
                program(self.lm, self._next, self.loop)
        wrong = self._wrong()
        return f"after {fired[0]}: {wrong}" if wrong else ""

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
            return f"ghosts: {self.lm._thread.batcher}"
        left = self.lm._thread.call(lambda engine: engine.__dict__.get("_in_progress")).result(30)
        if left:
            return f"the engine still works on {left}"
        gc.collect()
        waiters = [each for each in gc.get_objects() if isinstance(each, Waiter)]
        return f"{len(waiters)} waiters are kept" if waiters else ""
