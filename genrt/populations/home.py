"""The home of a runtime's populations: the means to ask, and a list of those that are there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from genrt.errors import Closed
from genrt.questions.contexts import Limits
from genrt.questions.origins import Asked
from genrt.runtime.adapter_names import AdapterNames
from genrt.runtime.ask import Asker
from genrt.runtime.thread import EngineThread

__all__ = ["Home"]

FEW = 64
"""So few sequences are not shared by replicas: a step of half as many takes about as long."""


class GoingOn(Protocol):
    """A population, which goes on from earlier questions."""

    @property
    def asked(self) -> Sequence[Asked]:
        """Their questions."""


class Home:
    """The things that the populations of one runtime have in common.

    Args:
        limits, adapters, nonces: the runtime's.
    """

    def __init__(
        self,
        thread: EngineThread,
        asker: Asker,
        limits: Limits,
        adapters: AdapterNames,
        nonces: Iterator[int],
    ) -> None:
        self._thread = thread
        self.asker = asker
        self.limits = limits
        self.adapters = adapters
        self.nonces = nonces
        # No lock, and no WeakSet: a population that is garbage is closed by its finalizer, wherever that
        # interrupts whoever looks at these.
        self._all: dict[int, weakref.ref[GoingOn]] = {}

    @property
    def device(self) -> torch.device:
        """Where rows are computed."""
        return self._thread.engine.device

    @property
    def scores(self) -> bool:
        """True if the engine takes score requests."""
        return self._thread.scores

    @property
    def most(self) -> int:
        """How many sequences are asked about by one request at most."""
        return self._thread.most_together

    def most_of(self, count: int) -> int:
        """Return the same for a batch of so many, which replicas share."""
        share = -(-count // max(1, len(self._thread.replicas())))
        return min(self.most, max(share, FEW))

    @property
    def weights_version(self) -> int:
        """The version of the weights that answer."""
        return self._thread.weights_version

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, if it has one."""
        return self._thread.engine.tokenizer

    def add(self, population: GoingOn) -> None:
        """Take note of a population."""
        every, number = self._all, id(population)
        every[number] = weakref.ref(population, lambda _: every.pop(number, None))

    def give_back(self, asked: Sequence[Asked]) -> None:
        """Have the engine free what it keeps of these questions, but for those that a population goes on
        from."""
        there = [population() for population in [*self._all.values()]]
        needed = {each for one in there if one is not None for each in one.asked}
        over = [each for each in asked if each not in needed]
        if over:
            with contextlib.suppress(Closed):  # which a forked child is told
                self._thread.give_back(over)
