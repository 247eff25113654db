"""Opening an engine changes the process: put back the environment, hooks, torch's settings.

vLLM sets process-wide whatever suits a process of its own; so do some of the packages it imports. By the
time it is open it has read what it needs of that, and its worker processes have inherited it.

Random generators are not put back, since others may have drawn from them meanwhile. They are left alone
from the start: ``vllm/config.py`` takes the seed away. Filters of warnings that packages add for
themselves when they are imported stay, as the packages do.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch

__all__ = ["heap_kept", "process_kept"]

_OPENING = threading.RLock()
"""Engines are opened one after the other: what is changed meanwhile must be put back in order."""


@contextmanager
def process_kept() -> Iterator[None]:
    """Open an engine inside of this, on one thread; what other threads change meanwhile stays changed."""
    with _OPENING, _environment(), heap_kept(), _settings():
        yield


@contextmanager
def _environment() -> Iterator[None]:
    """Put back the variables that this thread sets or removes."""
    before: dict[str, str | None] = {}
    opener = threading.get_ident()

    def noting(change: Callable[..., None]) -> Callable[..., None]:
        def noted(name: bytes, *value: bytes) -> None:
            if threading.get_ident() == opener:
                key = os.fsdecode(name)
                before.setdefault(key, os.environ.get(key))
            change(name, *value)

        return noted

    # What ``os.environ`` calls, before it changes itself.
    set_, unset = os.putenv, os.unsetenv
    os.putenv, os.unsetenv = noting(set_), noting(unset)
    try:
        yield
    finally:
        os.putenv, os.unsetenv = set_, unset
        for key, value in before.items():
            if value is not None:
                os.environ[key] = value
            else:
                os.environ.pop(key, None)


class _Heap:
    """Which objects the garbage collector passes over; several threads may have that kept at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep objects frozen that were frozen before, and no others. vLLM freezes every object there is;
        those that became garbage later would stay in memory."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._functions, self._frozen = (gc.freeze, gc.unfreeze), gc.get_freeze_count() > 0
                # ``gc.unfreeze`` thaws everything. If the user froze objects, it would thaw those too, so
                # vLLM is kept from freezing; if not, all that vLLM froze is thawed at the end.
                if self._frozen:
                    gc.freeze = gc.unfreeze = lambda: None
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    gc.freeze, gc.unfreeze = self._functions
                    if not self._frozen:
                        gc.unfreeze()


heap_kept = _Heap().kept


_PRECISIONS = (
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)


@contextmanager
def _settings() -> Iterator[None]:
    """Put back the hook for exceptions, how ``multiprocessing`` starts processes, torch's numbers of
    threads, precisions and defaults, and ``set_num_threads`` itself."""
    hook = sys.excepthook
    has_start_method = bool(multiprocessing.get_start_method(allow_none=True))
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    settings: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    ]
    for path in _PRECISIONS:
        owner, name = path.rsplit(".", 1)
        with suppress(AttributeError):  # of a torch that has no such setting
            backend = attrgetter(owner)(torch.backends)
            getattr(backend, name)
            settings.append((partial(getattr, backend, name), partial(setattr, backend, name)))
    before = [read() for read, _ in settings]
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            # From another thread: that of the engine may keep what vLLM chose for it.
            other = threading.Thread(target=set_num_threads, args=(threads,))
            other.start()
            other.join()
        for (read, write), value in zip(settings, before, strict=True):
            if read() != value:
                write(value)
        if not has_start_method:
            multiprocessing.set_start_method(None, force=True)
        # torch replaces it with one that writes ``[rank0]``; any other is somebody else's.
        if getattr(sys.excepthook, "__module__", "").startswith("torch"):
            sys.excepthook = hook
