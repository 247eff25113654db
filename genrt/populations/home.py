"""The home of a runtime's populations: the means to ask, and what the engine keeps for each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from genrt.errors import Closed
from genrt.questions.contexts import Limits
from genrt.questions.origins import Asked, Origins
from genrt.runtime.adapters import AdapterNames
from genrt.runtime.ask import Asker
from genrt.runtime.thread import EngineThread

__all__ = ["Home", "PopulationOrigins"]

FEW = 64
"""So few sequences are not shared by replicas: a step of half as many takes about as long."""


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

    @property
    def device(self) -> torch.device:
        """Where rows are computed."""
        return self._thread.engine.device

    @property
    def scores(self) -> bool:
        """True if the engine takes score requests."""
        return self._thread.capabilities.scores

    @property
    def most(self) -> int:
        """How many sequences are asked about by one request at most."""
        return self._thread.max_weight

    def most_of(self, count: int) -> int:
        """Return the same for a batch of so many, which replicas share."""
        share = -(-count // max(1, len(self._thread.replicas())))
        return min(self.most, max(share, FEW))

    @property
    def weights_version(self) -> int:
        """The version of the weights that answer."""
        return self._thread.batcher.weights_version

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, if it has one."""
        return self._thread.engine.tokenizer

    def give_back(self, asked: Sequence[Asked]) -> None:
        """Have the engine free what it keeps of these questions, but for those that a population goes on
        from. It takes no lock: finalizers call it."""
        over = [each for each in asked if not each.users]
        if over:
            with contextlib.suppress(Closed):  # in a forked child
                self._thread.give_back(over)


class PopulationOrigins:
    """The origins of one population, which the engine keeps for it until it is closed or collected."""

    def __init__(self, home: Home, origins: Origins) -> None:
        self._home = home
        self._key = object()
        self._asked: Sequence[Asked] = ()
        self.replace(origins)

    def replace(self, origins: Origins) -> None:
        """Take other origins in place of these. The engine goes on from the ones before by itself, and
        frees them."""
        self.origins = origins
        for each in origins.asked:
            each.users.add(self._key)
        before, self._asked = self._asked, origins.asked
        for each in before:
            if each not in origins.asked:
                each.users.discard(self._key)

    def close(self) -> None:
        """Give back the origins. Any thread may call it, also as a finalizer."""
        before, self._asked = self._asked, ()
        for each in before:
            each.users.discard(self._key)
        self._home.give_back(before)
