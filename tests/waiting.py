"""Waiting for what happens in other threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from genrt.lm import AsyncLM
from tests.inside import engine_of, thread_of

PATIENCE_SECONDS = 60


async def until(happened: Callable[[], object], lm: AsyncLM | None = None) -> None:
    """Go round until something has happened in another thread: the event loop alone, or between two
    rounds of a runtime's engine, so that a thread that only looks does not take Python's lock from it.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it never happens"
        if lm is None:
            await asyncio.sleep(0)
        else:
            await asyncio.wrap_future(thread_of(lm).call(lambda _: None))


def until_replicas(lm: AsyncLM, states: str, restarts: int = 0) -> None:
    """Have the engine wait until all replicas are in this state, and were restarted so often
    altogether. It asks them nothing meanwhile, so that those that start have the processors."""
    end = time.monotonic() + 7 * PATIENCE_SECONDS

    def is_over() -> bool:
        found = lm.statistics().replicas
        assert time.monotonic() < end, found
        restarted = sum(each.restarts for each in found)
        return {each.state for each in found} == {states} and restarted >= restarts

    thread_of(lm).call(lambda _: engine_of(lm)._until(is_over)).result()


@contextmanager
def a_loop_beside_each_step(lm: AsyncLM) -> Iterator[list[bool]]:
    """Have each step of the engine wait until this event loop has run a callback meanwhile. The result
    tells of each step whether it has: a loop that waits for steps never does. On a busy machine the
    engine cannot run ahead of the loop."""
    loop, engine, ran = asyncio.get_running_loop(), engine_of(lm), list[bool]()
    step = engine.step

    def waits() -> object:
        has_run = threading.Event()
        loop.call_soon_threadsafe(has_run.set)
        ran.append(has_run.wait(PATIENCE_SECONDS))
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", waits)
        yield ran
