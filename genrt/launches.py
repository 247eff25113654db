"""Work for a GPU that is launched again and again with the same arguments: captured, and launched as one.

Every kernel that Python launches costs the host as much time as a small kernel costs the device, or more.
A CUDA graph of a dozen is one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Repeated"]

TIMES = 8
"""How often work is launched as it is: to capture it takes as long as to launch it a few times more."""


class Repeated:
    """Kernels that are launched again and again on the current device, each time with the same arguments.

    Calling it launches them on the current stream. What they read and write has to stay where it is for
    as long as this is called; what lies there may change. Where they can't be captured they are always
    launched as they are.

    Args:
        launch: launches them, and waits for nothing.
        times: how often it is called before they are captured.
    """

    def __init__(self, launch: Callable[[], object], *, times: int = TIMES) -> None:
        self._launch = launch
        self._left: int | None = times if torch.cuda.is_available() else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._left == 0:
            self._graph, self._left = _captured(self._launch), None
        if self._graph is not None:
            self._graph.replay()
            return
        self._launch()
        if self._left is not None:
            self._left -= 1


def _captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """Return a graph of what this launches, or ``None`` where it can't be captured."""
    graph = torch.cuda.CUDAGraph()
    # A default stream can't be captured. Other threads go on with theirs: the mode is for this one.
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        except RuntimeError:
            return None
    return graph
