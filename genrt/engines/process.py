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
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["heap_kept", "process_kept"]

_OPENING = threading.RLock()
"""Engines are opened one after the other: what is changed meanwhile must be put back in order."""


@contextmanager
def process_kept() -> Iterator[None]:
    """Open an engine inside of this, on one thread; what other threads change meanwhile stays changed."""
    with _OPENING, ExitStack() as kept:
        for each in (_environment, heap_kept, _hook, _start_method, _torch):
            kept.enter_context(each())
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


@contextmanager
def heap_kept() -> Iterator[None]:
    """Keep objects frozen that were frozen before, and no others. vLLM freezes every object there is;
    those that became garbage later would stay in memory."""
    frozen = gc.get_freeze_count()
    freeze, unfreeze = gc.freeze, gc.unfreeze
    # ``gc.unfreeze`` thaws everything. If the user froze objects, it would thaw those too, so vLLM is
    # kept from freezing; if not, everything that vLLM froze is thawed at the end.
    if frozen:
        gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze
        if not frozen:
            gc.unfreeze()


@contextmanager
def _hook() -> Iterator[None]:
    """Put back the hook for exceptions, which torch replaces with one that writes ``[rank0]``."""
    before = sys.excepthook
    try:
        yield
    finally:
        if getattr(sys.excepthook, "__module__", "").startswith("torch"):
            sys.excepthook = before


@contextmanager
def _start_method() -> Iterator[None]:
    """Leave it open how ``multiprocessing`` starts processes, if it was."""
    was_set = bool(multiprocessing.get_start_method(allow_none=True))
    try:
        yield
    finally:
        if not was_set:
            multiprocessing.set_start_method(None, force=True)


_PRECISIONS = (
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)


@contextmanager
def _torch() -> Iterator[None]:
    """Put back torch's numbers of threads, precisions and defaults, and ``set_num_threads`` itself."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    deterministic = torch.get_deterministic_debug_mode()
    backends = [_attribute(torch.backends, name) for name in _PRECISIONS]
    precisions = [(each, each.fp32_precision) for each in backends if each is not None]
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            # From another thread: that of the engine may keep what vLLM chose for it.
            other = threading.Thread(target=set_num_threads, args=(threads,))
            other.start()
            other.join()
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.set_deterministic_debug_mode(deterministic)
        for backend, precision in precisions:
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


def _attribute(owner: Any, path: str) -> Any:
    """Return what is there, if it has a precision."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner if hasattr(owner, "fp32_precision") else None
