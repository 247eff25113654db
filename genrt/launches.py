"""Work for a GPU that is launched again and again with the same arguments: captured, and launched as one.

Every kernel that Python launches costs the host as much time as a small kernel costs the device, or more.
A CUDA graph of a dozen is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

__all__ = ["Graphs", "Repeated", "Staged", "room_for"]

TIMES = 8
"""How often work is launched as it is: to capture it takes as long as to launch it a few times more."""

LEAST = 16
"""For how many numbers a launch has room at least."""


class Graphs:
    """Where graphs are captured whose kernels need memory: they share it, and the stream, so that it does
    not grow with their number. They run one after the other; what one has made is there until another
    runs."""

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Where they are captured."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @cached_property
    def memory(self) -> Any:
        """The pool that their memory is of."""
        return torch.cuda.graph_pool_handle()


class Repeated:
    """Kernels that are launched again and again on the current device, each time with the same arguments.

    Calling it launches them on the current stream. What they read and write has to stay where it is for
    as long as this is called; what lies there may change. Where they can't be captured they are always
    launched as they are.

    Args:
        launch: launches them, and waits for nothing.
        times: how often it is called before they are captured.
        graphs: where, if others share their memory.
    """

    def __init__(
        self, launch: Callable[[], object], *, times: int = TIMES, graphs: Graphs | None = None
    ) -> None:
        self._launch = launch
        self._graphs = graphs or Graphs()
        self._left: int | None = times if torch.cuda.is_available() else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._left == 0:
            self._graph, self._left = _captured(self._launch, self._graphs), None
        if self._graph is not None:
            self._graph.replay()
            return
        self._launch()
        if self._left is not None:
            self._left -= 1


class Staged:
    """Kernels that are launched again and again with other numbers: these go to the device in the same
    launch.

    Args:
        shape: of the numbers, int64.
        launch: launches what reads them, on the device, and waits for nothing.
    """

    def __init__(
        self, shape: tuple[int, ...], device: torch.device, launch: Callable[[torch.Tensor], object]
    ) -> None:
        is_cuda = device.type == "cuda"
        on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        there = torch.empty_like(on_host, device=device)

        def go() -> None:
            there.copy_(on_host, non_blocking=True)
            launch(there)

        self._go = Repeated(go)
        self._numbers = on_host.numpy()
        self._read = torch.Event(device) if is_cuda else None

    def free(self) -> np.ndarray:
        """Wait until the device has the numbers of the last launch, and return them, to be changed."""
        if self._read is not None:
            self._read.synchronize()
        return self._numbers

    def launch(self) -> None:
        """Run the kernels with the numbers as they are now."""
        self._go()
        if self._read is not None:
            self._read.record()


def room_for(count: int) -> int:
    """Return for how many numbers a launch of this many has room, so that few sizes occur."""
    return max(LEAST, 1 << (count - 1).bit_length())


def _captured(launch: Callable[[], object], graphs: Graphs) -> torch.cuda.CUDAGraph | None:
    """Return a graph of what this launches, or ``None`` where it can't be captured."""
    graph = torch.cuda.CUDAGraph()
    # A default stream can't be captured. Other threads go on with theirs: the mode is for this one.
    with torch.cuda.stream(graphs.stream):
        try:
            graph.capture_begin(graphs.memory, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        except RuntimeError:
            return None
    return graph
