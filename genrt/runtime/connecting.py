"""Runtimes over the engine of a server: its thread here, its steps there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, TypedDict, TypeVar

from genrt.engines.remote.connection import ServerConnection
from genrt.engines.remote.engine import RemoteEngine
from genrt.errors import EngineFailed, InvalidRequest
from genrt.numbers import check_int, named
from genrt.runtime.cache import RowCache
from genrt.runtime.thread import EngineThread

__all__ = ["ConnectOptions", "connected"]

T = TypeVar("T")

MOST_QUEUED, MOST_QUEUED_BYTES = 2**16, 2**30
"""How much waits for the server at most, as ``genrt.load`` has it by default."""


class ConnectOptions(TypedDict, total=False):
    """The options of ``AsyncLM.connect``, which returns a runtime over one that a genrt server serves.

    It answers as one that was loaded: what is asked concurrently is sent together, one HTTP call for a
    flush, and rows are cached here. Draws, scores and populations are answered over there, and little
    travels; rows travel whole. Samples and texts are drawn here, from a row for each token: for long ones
    use the server's OpenAI routes. Its adapters are those of the server at this moment; others cannot be
    added from here. The url is ``http://`` or ``https://``, with nothing or ``/v1`` at its end.

    Attributes:
        api_key: the server's key.
        timeout: seconds without a byte from the server after which it counts as dead; by default 600.
        cache_bytes: the bound of the row cache; by default 256 MiB, and 0 is no cache.
        restart: ``"auto"`` connects once more to a server that was lost, and asks it the unanswered
            questions; without it every later call raises the reason, until ``AsyncLM.restart``.
        seed: as ``genrt.load`` has it.
    """

    api_key: str | None
    timeout: float
    cache_bytes: int
    restart: Literal["auto"] | None
    seed: int | None


async def connected(make: Callable[..., T], url: str, options: ConnectOptions) -> T:
    """Return the runtime that ``make`` makes of a thread, a cache, an engine and a seed. Cancelling
    abandons the connecting.

    Raises:
        TypeError: an option is unknown. InvalidRequest: one is out of range.
        EngineDied: the server cannot be reached, or does not take the key.
        EngineUnsupported: it is no genrt server, or one of another version.
    """
    thread, cache = _started(url, **options)
    try:
        engine = await asyncio.wrap_future(thread.opened)
        return make(thread, cache, engine, seed=options.get("seed"))
    except BaseException:
        thread.close(wait=False)
        raise


def _started(
    url: str,
    *,
    api_key: str | None = None,
    timeout: float = 600.0,
    cache_bytes: int = 256 * 2**20,
    restart: str | None = None,
    seed: int | None = None,
) -> tuple[EngineThread, RowCache]:
    check_int("cache_bytes", cache_bytes, 0)
    if seed is not None:
        check_int("seed", seed, 0)
    if restart not in (None, "auto"):
        raise InvalidRequest(f'restart must be "auto" or None, got {named(restart)}')
    cache = RowCache(cache_bytes)
    engines: list[RemoteEngine] = []
    lines: list[ServerConnection] = []

    def open_engine() -> RemoteEngine:
        lines.clear()
        engine = RemoteEngine(url, api_key, timeout=timeout, on_connection=lines.append)
        if engines and engine.fingerprint != engines[0].fingerprint:  # whose rows are cached
            engine.close()
            raise EngineFailed(f"{url} has another model by now, or new weights: connect again")
        # The names that the runtime knows are those of the server now.
        names = engines[0].adapters if engines else engine.adapters
        for gone in names.keys() - engine.adapters.keys():
            del names[gone]
        names |= engine.adapters
        engine.adapters = names
        engines[:] = [engine]
        return engine

    def hang_up() -> None:
        for line in [*lines]:
            line.hang_up()

    thread = EngineThread(
        open_engine,
        cache,
        max_queued_requests=MOST_QUEUED,
        max_queued_bytes=MOST_QUEUED_BYTES,
        restarts=restart == "auto",
        hang_up=hang_up,
    )
    return thread, cache
