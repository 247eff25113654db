"""Loads adapters under names: loading a name again makes another adapter."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from genrt.engines.adapters import adapter_bytes, check_adapter_directory, drop_copy
from genrt.errors import GenrtError, InvalidAdapter, InvalidRequest
from genrt.numbers import named
from genrt.questions.arguments import Adapter
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.ask import Asker
from genrt.runtime.concurrency import AT_ONCE_BYTES, in_background
from genrt.runtime.thread import COMPUTES, EngineThread


class AdapterNames:
    """Loads adapters under names, and unloads them. Safe from any thread."""

    def __init__(self, thread: EngineThread, asker: Asker) -> None:
        self._thread, self._asker = thread, asker
        self.by_name = asker.adapters
        self._lock = threading.Lock()
        self._versions = itertools.count(1)
        self._bound: dict[str, int] = {}  # the last version that each name was bound to

    def files(self, name: str) -> Path | None:
        """Return the directory of the copy of an adapter's files, if there is one."""
        adapter = self.by_name.get(name) if isinstance(name, str) else None
        return next((copy for each, copy in self._thread.adapters if each == adapter), None)

    async def add(self, name: str, path: str | os.PathLike[str]) -> Callable[[], None]:
        """Load an adapter as ``AsyncLM.add_adapter``; return a function that removes it if the name
        was free. The last call for a name wins. Raises InvalidRequest, InvalidAdapter."""
        directory = _adapter_directory(name, path)
        adapter = Adapter(name, next(self._versions))
        copy = await self._copied(directory)

        def load_and_bind(answering: AnsweringEngine) -> bool:
            try:
                answering.add_adapter(adapter, copy)
            except InvalidAdapter as error:
                raise InvalidAdapter(str(error).replace(str(copy), str(directory))) from error
            with self._lock:
                previous = self.by_name.get(name)
                is_last = self._bound.get(name, 0) < adapter.version
                if is_last:
                    self.by_name[name], self._bound[name] = adapter, adapter.version
            self._retire(previous if is_last else adapter)
            return previous is None

        def undo(loading: concurrent.futures.Future[bool]) -> None:
            if loading.cancelled() or loading.exception() is not None:
                drop_copy(copy)
            elif loading.result() and self.by_name.get(name) is adapter:
                with contextlib.suppress(GenrtError):  # closed, or lost in a restart
                    self.remove(name)

        loading = self._thread.call(load_and_bind, COMPUTES)
        try:
            await asyncio.wrap_future(loading)
        except GeneratorExit:  # collected with its loop: no lock may be taken
            loading.cancel()
            raise
        except BaseException:
            loading.cancel()
            loading.add_done_callback(undo)
            raise
        return partial(undo, loading)

    async def _copied(self, directory: Path) -> Path:
        """Copy an adapter's files, in another thread unless they are small."""
        adapters = self._thread.adapters
        if adapter_bytes(directory) <= AT_ONCE_BYTES:
            return adapters.copied(directory)
        copying = in_background(partial(adapters.copied, directory))

        def drop(done: concurrent.futures.Future[Path]) -> None:
            if not done.cancelled() and done.exception() is None:
                drop_copy(done.result())

        try:
            return await asyncio.wrap_future(copying)
        except BaseException:
            copying.add_done_callback(drop)
            raise

    def _retire(self, adapter: Adapter | None) -> None:
        if adapter is not None and adapter not in self._thread.adapters.lost:
            self._thread.batcher.retire(adapter)

    def remove(self, name: str) -> None:
        """Unbind a name; the adapter is removed after its last question. Raises UnknownAdapter,
        InvalidRequest, Closed."""
        batcher = self._thread.batcher
        with self._lock:
            adapter = self._asker.bound(name)
            if adapter is None:
                raise InvalidRequest("the base model is no adapter: give the name of one")
            del self.by_name[adapter.name]
        batcher.retire(adapter)


def _adapter_directory(name: object, path: object) -> Path:
    """Return the directory of an adapter."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"an adapter's name must be a non-empty str, got {named(name)}")
    if not isinstance(path, str | os.PathLike):
        raise InvalidRequest(f"an adapter's path must be a str or a Path, got {named(path)}")
    directory = Path(path).expanduser()
    check_adapter_directory(directory)
    return directory
