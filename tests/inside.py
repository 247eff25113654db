"""Reads private attributes of a runtime and its engine for tests."""

from __future__ import annotations

import threading
from typing import Any

from genrt.lm import AsyncLM
from genrt.runtime.thread import EngineThread


def thread_of(lm: AsyncLM) -> EngineThread:
    """Return the engine thread of a runtime."""
    return lm._thread


def system_thread(owner: AsyncLM | EngineThread) -> threading.Thread:
    """Return Python's thread of a runtime or of its engine thread."""
    found = (owner if isinstance(owner, EngineThread) else owner._thread)._thread
    assert found is not None
    return found


def engine_of(lm: AsyncLM) -> Any:
    """Return the engine of a runtime."""
    return lm._thread.engine


def adapters_of(lm: AsyncLM) -> Any:
    """Return the table of a runtime's adapters."""
    return lm._adapters


def in_progress(engine: Any) -> Any:
    """Return the requests that an engine works on."""
    return engine._in_progress


def core_of(owner: Any) -> Any:
    """Return vLLM's engine core, of a runtime on vLLM or of its engine."""
    engine: Any = owner._thread.engine if isinstance(owner, AsyncLM) else owner
    return engine._core.engine_core


def texts_of(engine: Any) -> Any:
    """Return the texts of an engine on vLLM."""
    return engine._texts


def populations_of(engine: Any) -> Any:
    """Return the populations of an engine on vLLM."""
    return engine._populations


def open_of(engine: Any) -> Any:
    """Return the open sequences of an engine on vLLM."""
    return engine._open
