"""Globals of vLLM, kept apart for each engine: graphs, their memory, workspaces. The engines of a process
take turns with them.

Rules:
    Every call into vLLM happens with its engine's ``Globals`` in place, one engine at a time.
    What one engine opens, clears or shuts down is never another's.

Without this, an engine that is opened clears the piecewise CUDA graphs of all others (vLLM measures
their memory, and then clears every wrapper that the process has), captures its own into memory that
theirs use on another stream, and replaces the workspace that their graphs write to.

Each is looked up when an engine is opened, so a vLLM that has them elsewhere is refused.
"""

from __future__ import annotations

import collections
import threading
import weakref
from typing import Any

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.model_executor.offloader import base as offloader
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

from genrt.errors import EngineUnsupported

__all__ = ["Globals", "Turns"]


_HANDED_OVER = -1
"""The holder between the one that left and the one that was woken: no thread."""


class Turns:
    """A context manager that one thread at a time is in, and may enter again inside itself.

    A thread that leaves hands over to the first one waiting, even if it comes back at once. So an engine
    that steps all the time, as in its self-test, leaves every other engine a step in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._depth = 0
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def __enter__(self) -> None:
        own = threading.get_ident()
        if self._holder != own:
            with self._lock:
                gate = self._gate()
            if gate is not None:
                self._wait(gate)
            self._holder = own
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._hand_over()

    def _gate(self) -> threading.Lock | None:
        """Return a gate in the queue to wait at, ``None`` if nobody is inside. Call it under the lock."""
        if self._holder is None:
            self._holder = _HANDED_OVER
            return None
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        return gate

    def _wait(self, gate: threading.Lock) -> None:
        try:
            gate.acquire()
        except BaseException:  # an interrupt
            with self._lock:
                was_waiting = gate in self._waiting
                if was_waiting:
                    self._waiting.remove(gate)
            if not was_waiting:
                self._hand_over()
            raise

    def _hand_over(self) -> None:
        with self._lock:
            self._holder = _HANDED_OVER if self._waiting else None
            if self._waiting:
                self._waiting.popleft().release()


_TURNS = Turns()
"""Whose engine's globals are in place: that of the thread inside."""


class Globals:
    """One engine's values of vLLM's globals; a context manager that waits for the engine's turn and puts
    them in their places. It may be entered again inside itself."""

    def __init__(self) -> None:
        """Begin with what a process has that has opened no engine yet.

        Raises:
            EngineUnsupported: this vLLM keeps them somewhere else.
        """
        self._places: list[tuple[Any, str]] = [
            (CUDAGraphWrapper, "_all_instances"),
            (BreakableCUDAGraphWrapper, "_all_instances"),
            (type(current_platform), "_global_graph_pool"),
            (workspace, "_manager"),
            (offloader, "_instance"),
        ]
        for owner, name in self._places:
            if not hasattr(owner, name):
                raise EngineUnsupported(
                    f"this vLLM has no {owner.__name__}.{name}: two runtimes in a process would not be "
                    "safe; install a version that the extras genrt[cpu] and genrt[cuda] bring"
                )
        self._values: list[Any] = [
            weakref.WeakSet(),
            weakref.WeakSet(),
            None,
            None,
            offloader.NoopOffloader(),
        ]
        self._depth = 0

    def __enter__(self) -> None:
        _TURNS.__enter__()
        try:
            if self._depth == 0:
                self._exchange()
            self._depth += 1
        except BaseException:  # an interrupt
            _TURNS.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._depth -= 1
            if self._depth == 0:
                self._exchange()
        finally:
            _TURNS.__exit__()

    def _exchange(self) -> None:
        """Swap what is kept here with what is in place."""
        for index, (owner, name) in enumerate(self._places):
            before = getattr(owner, name)
            setattr(owner, name, self._values[index])
            self._values[index] = before
