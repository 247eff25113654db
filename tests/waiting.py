"""Waiting for what happens in other threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from genrt.lm import AsyncLM
from tests.inside import thread_of


async def until(happened: Callable[[], object], lm: AsyncLM | None = None) -> None:
    """Go round until something has happened in another thread: the event loop alone, or between two
    rounds of a runtime's engine, so that a thread that only looks does not take Python's lock from it.
    """
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it never happens"
        if lm is None:
            await asyncio.sleep(0)
        else:
            await asyncio.wrap_future(thread_of(lm).call(lambda _: None))
