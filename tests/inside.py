"""Reads private attributes of a runtime and its engine for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sized
from pathlib import Path
from typing import Any

from genrt.contexts import Context
from genrt.lm import AsyncLM
from genrt.questions.sequences import SequenceHandle
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


def asker_of(lm: AsyncLM) -> Any:
    """Return the next stop of a runtime's questions."""
    return lm._asker


def extended_by(context: Context) -> SequenceHandle | None:
    """Return the handle of the sequences that a context extends."""
    answered = context._place[0]
    return None if answered is None else answered.handle


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


def entries_of(batcher: Any) -> Any:
    """Return the entries of a batcher, by request."""
    return batcher._entries


def ready_of(batcher: Any) -> Any:
    """Return the entries of a batcher that are ready, in their order."""
    return batcher._ready


def calls_of(thread: EngineThread) -> Any:
    """Return the calls that a thread has yet to make."""
    return thread._calls


def kept_by(owner: object, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the attributes of an object that hold anything, and its weights, by name."""
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in but and value and (isinstance(value, Sized) or name.endswith("_weight"))
    }


def weight_copies_of(thread: EngineThread) -> list[Path]:
    """Return the folders of the weights that a runtime has copied."""
    root = thread.weights._root
    return [] if root is None else [*root.iterdir()]


def unlogged(work: asyncio.Future[Any]) -> None:
    """Have asyncio log nothing when this is collected while it is pending."""
    work._log_destroy_pending = False  # type: ignore[attr-defined]


def is_held(lock: Any) -> bool:
    """Return whether this thread holds a lock."""
    return bool(lock._is_owned())
