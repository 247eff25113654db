"""Say who goes first once a population has been drawn: whoever asked for it, or the device.

Both wait for the engine's thread: one to be told of the draws, the other to be given the next step. If
the device has nothing left to do, and whoever asks will be back before that step is prepared, being told
first saves what being told takes. Whoever has more to do meanwhile is better told last, while the device
computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

__all__ = ["ToldFirst"]

MOST = 2.0
"""Whoever takes longer than this many times what is left of a step has more to do than to draw again. Two
threads at work slow each other, so that both take longer than alone."""


class ToldFirst:
    """How long those who ask take to ask again, beside what is left of a step.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at = 0.0
        self._absent = self._rest = float("inf")

    def asked(self) -> None:
        """Note that somebody asks."""
        self._absent = self._clock() - self._told_at

    def is_due(self, device: torch.device) -> bool:
        """Return whether whoever asked is told before the next step is prepared."""
        if device.type != "cuda" or not self._absent <= MOST * self._rest < float("inf"):
            return False
        return bool(torch.cuda.current_stream(device).query())

    @contextlib.contextmanager
    def rest(self, *, is_told: bool) -> Iterator[None]:
        """Note how long the rest of a step takes, and whether it is told of before or after that."""
        began = self._clock()
        yield
        ended = self._clock()
        self._rest, self._told_at = ended - began, began if is_told else ended
