"""Repeats GPU work with the same arguments: captures it as a CUDA graph and replays it with one launch.

Each kernel launch from Python costs the host as much time as a small kernel costs the device, or more. A
CUDA graph of a dozen kernels is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

__all__ = ["Graphs", "Repeated", "Staged", "room_for"]

TIMES = 8
"""Launches before the capture, which takes as long as a few launches."""

LEAST = 16
"""The least room of a launch, in numbers."""


class Graphs:
    """A stream and a memory pool that several captured graphs share, so that memory does not grow with
    their number. The graphs run one after the other; a graph's results are valid until another one
    runs."""

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream for captures."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @cached_property
    def memory(self) -> Any:
        """The memory pool of the graphs."""
        return torch.cuda.graph_pool_handle()


class Repeated:
    """Kernels that are launched repeatedly on the current device with the same arguments.

    Calling it launches them on the current stream. Their inputs and outputs must keep their addresses
    between calls; their contents may change. Kernels that cannot be captured are always launched one by
    one.

    Args:
        launch: launches the kernels without waiting for the device.
        times: the number of calls before the capture.
        graphs: the shared stream and memory, if others use them too.
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
    """Kernels that are launched repeatedly with changing numbers, which the same launch copies to the
    device.

    Args:
        shape: of the numbers, int64.
        launch: launches the kernels that read the numbers on the device, without waiting for it.
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
        """Wait until the device has read the last launch's numbers; return the array to be changed."""
        if self._read is not None:
            self._read.synchronize()
        return self._numbers

    def launch(self) -> None:
        """Run the kernels with the current numbers."""
        self._go()
        if self._read is not None:
            self._read.record()


def room_for(count: int) -> int:
    """Return a launch's room for this many numbers, rounded up so that few sizes occur."""
    return max(LEAST, 1 << (count - 1).bit_length())


def _captured(launch: Callable[[], object], graphs: Graphs) -> torch.cuda.CUDAGraph | None:
    """Return a graph of the launch, or ``None`` if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    # A default stream cannot be captured. The mode lets other threads use their streams meanwhile.
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
