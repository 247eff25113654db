"""Keeps vLLM's globals apart for each engine: graphs, their memory, workspaces. A process's engines take
turns with them.

Rules:
    Every call into vLLM happens with its engine's ``Globals`` in place, one engine at a time.
    An engine opens, clears and shuts down only its own globals.

Without this, opening an engine breaks the others: vLLM measures the memory of piecewise CUDA graphs and
then clears every graph wrapper of the process. The new engine would capture its graphs into memory that
other engines' graphs use on another stream. It would also replace the workspace that these graphs write
to.

All globals are looked up when an engine is opened. A vLLM that has them elsewhere is refused.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.model_executor.offloader import base as offloader
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

from genrt.errors import EngineUnsupported

__all__ = ["Globals", "Turns"]

F32 = "TRITON_F32_DEFAULT"


class Turns:
    """A reentrant context manager that admits one thread at a time.

    A leaving thread admits the first waiting thread, even if it comes back at once. So an engine that
    steps all the time, as in its self-test, gives every other engine a step in between.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._depth = 0
        self._waiting: list[int] = []  # thread idents; the first one enters next

    def __enter__(self) -> None:
        own = threading.get_ident()
        with self._changed:
            if self._holder != own:
                if self._depth or self._waiting:
                    self._wait(own)
                self._holder = own
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                if self._waiting:
                    self._changed.notify_all()

    def _wait(self, own: int) -> None:
        self._waiting.append(own)
        try:
            self._changed.wait_for(lambda: not self._depth and self._waiting[0] == own)
        finally:  # also after an interrupt: then it may be the next thread's turn
            self._waiting.remove(own)
            self._changed.notify_all()


_TURNS = Turns()
"""The turns with the globals: the thread inside has its engine's globals in place."""


class Globals:
    """One engine's values of vLLM's globals. As a context manager, it waits for the engine's turn and
    puts them, and the engine's CUDA stream, in place. It is reentrant.

    ``stream`` is the engine's, once it has one.
    """

    def __init__(self) -> None:
        """Start with the values of a process that has opened no engine yet.

        Raises:
            EngineUnsupported: this vLLM has its globals somewhere else.
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
        self._variables: dict[str, str | None] = {}
        self.stream: torch.cuda.Stream | None = None
        self._outer: torch.cuda.Stream | None = None
        self._depth = 0

    def multiply_in_float32(self) -> None:
        """Make Triton's kernels multiply float32 numbers in float32 while the globals are in place.

        With TF32, their default, a token's row depends on the rest of the batch. The user's own setting
        of the environment variable wins.
        """
        if F32 not in os.environ:
            self._variables[F32], os.environ[F32] = None, "ieee"

    def take_stream(self, device: torch.device) -> torch.device:
        """Take the device's current stream for the engine, and set the default stream for other code.
        Return the device with its index."""
        if device.type != "cuda":
            return device
        self.stream = torch.cuda.current_stream()
        torch.cuda.set_stream(torch.cuda.default_stream())
        return torch.device("cuda", torch.cuda.current_device())

    def follow_default(self, tensor: torch.Tensor) -> None:
        """Make the engine's stream wait for the default stream, which computes this tensor."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
            tensor.record_stream(self.stream)

    def __enter__(self) -> None:
        _TURNS.__enter__()
        try:
            if self._depth == 0:
                self._exchange()
                if self.stream is not None:
                    self._outer = torch.cuda.current_stream(self.stream.device)
                    torch.cuda.set_stream(self.stream)
            self._depth += 1
        except BaseException:  # an interrupt
            _TURNS.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._depth -= 1
            if self._depth == 0:
                self._exchange()
                if self._outer is not None:
                    torch.cuda.set_stream(self._outer)
                    self._outer = None
        finally:
            _TURNS.__exit__()

    def _exchange(self) -> None:
        """Swap the stored values with the values in place."""
        for index, (owner, name) in enumerate(self._places):
            before = getattr(owner, name)
            setattr(owner, name, self._values[index])
            self._values[index] = before
        for name, value in self._variables.items():
            self._variables[name] = os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
