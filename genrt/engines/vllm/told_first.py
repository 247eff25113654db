"""Decides whether a population's draws are delivered before or after the next step is prepared.

Delivery and preparation both run on the engine's thread. Delivering first hides the time of the delivery
if the device is idle and the caller asks again before the step is prepared. A caller with more work
between two draws is served last, while the device computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

__all__ = ["ToldFirst"]

MOST = 2.0
"""A caller that takes longer than this many times the rest of a step does more than draw again. Two busy
threads slow each other down, so both take longer than alone."""


class ToldFirst:
    """Compares the callers' time between delivery and next request with the time of the rest of a step.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at = 0.0
        self._absent = self._rest = float("inf")

    def asked(self) -> None:
        """Record that a caller asks for draws."""
        self._absent = self._clock() - self._told_at

    def is_due(self, device: torch.device) -> bool:
        """Return whether the draws are delivered before the next step is prepared."""
        if device.type != "cuda" or not self._absent <= MOST * self._rest < float("inf"):
            return False
        return bool(torch.cuda.current_stream(device).query())

    @contextlib.contextmanager
    def rest(self, *, is_told: bool) -> Iterator[None]:
        """Measure the rest of a step; ``is_told`` says that the draws are delivered before it."""
        began = self._clock()
        yield
        ended = self._clock()
        self._rest, self._told_at = ended - began, began if is_told else ended
