"""Concurrent work of which nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at once and return their results in order. The first error is raised; by then,
    or once cancelled, none goes on."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
