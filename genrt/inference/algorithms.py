"""The loop of all algorithms: a state is stepped until it is done, and becomes a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from genrt.inference.checks import token_bytes
from genrt.inference.model import DEAD, Model
from genrt.inference.resampling import Floats
from genrt.inference.result import Result
from genrt.inference.state import Info
from genrt.lm import AsyncLM
from genrt.progress import progress_bar
from genrt.runtime.concurrency import blocking_twin
from genrt.runtime.statistics import Statistics

M = TypeVar("M", bound=Model)
S = TypeVar("S")
I = TypeVar("I")  # noqa: E741
K = TypeVar("K")


class Algorithm(ABC, Generic[M, S, I, K]):
    """An algorithm for a model: states ``S``, records of steps ``I``, parts ``K`` of them for a result.

    It holds no state of a run, so it may run many times, at once and on several event loops.
    """

    _name: str
    _total: int | None = None

    def __init__(self, model: M) -> None:
        self._model = model

    @property
    def model(self) -> M:
        """The model that runs."""
        return self._model

    @abstractmethod
    def init(self, seed: int) -> S:
        """Return the state before the first step; the seed is an integer from 0 on."""

    @abstractmethod
    def is_done(self, state: S) -> bool:
        """Return whether a run ends at this state."""

    @abstractmethod
    async def step(self, state: S) -> tuple[S, I]:
        """Return the next state, and a record of the step. The same state gives the same step, also after
        a cancellation or an error.

        Raises:
            GenrtError: any error of the model.
        """

    async def steps(self, state: S) -> AsyncIterator[tuple[S, I]]:
        """Step until the state is done, from ``init(seed)`` or from any later state."""
        while not self.is_done(state):
            state, info = await self.step(state)
            yield state, info

    async def run(
        self, seed: int, *, on_step: Callable[[S, I], None] | None = None, progress: bool = False
    ) -> Result:
        """Make all steps from ``init(seed)`` and return the result. Equal seeds and rows give equal
        results.

        Args:
            on_step: called after every step.
            progress: show a bar, in a notebook or on stderr.
        """
        state, counted, kept = self.init(seed), start_counting(self._model), list[K]()
        with progress_bar(self._name, self._total, shown=progress) as show:
            while not self.is_done(state):
                state, info = await self.step(state)
                kept += self._kept(state, info)
                show(**self._figures(state, info))
                if on_step is not None:
                    on_step(state, info)
        return replace(self._result(state, kept), statistics=counted())

    run_sync = blocking_twin(run)
    """``run``, blocking: in another thread, which also calls ``on_step``. An interrupt cancels it."""

    def _kept(self, state: S, info: I) -> list[K]:
        """Return the part of a step that the result needs."""
        return []

    def _figures(self, state: S, info: I) -> dict[str, Any]:
        """Return the figures of the progress bar."""
        return {}

    @abstractmethod
    def _result(self, state: S, kept: list[K]) -> Result:
        """Return the result of a run."""


def result_of(
    model: Model, particles: Iterable[Any], log_weights: Floats, log_evidence: float, **fields: Any
) -> Result:
    """Return weighted particles of a model as a result with these further fields."""
    particles = tuple(particles)
    return Result(
        texts=tuple(map(model.text, particles)),
        token_ids=tuple(particle.token_ids for particle in particles),
        values=tuple(map(model.value, particles)),
        log_weights=log_weights,
        log_evidence=log_evidence,
        **fields,
    )


def start_counting(model: Any) -> Callable[[], Statistics | None]:
    """Return a function that returns the work of the model's runtime from now on, for any caller;
    ``None`` if the model has no runtime."""
    lm = getattr(model, "lm", None)
    if not isinstance(lm, AsyncLM):
        return lambda: None
    before = lm.statistics()
    return lambda: lm.statistics().since(before)


def drawn_tokens(model: Any, infos: Iterable[Info]) -> dict[int, bytes]:
    """Return the bytes of every token that was drawn, by its id; ``{}`` if the model has no runtime."""
    lm = getattr(model, "lm", None)
    if not isinstance(lm, AsyncLM):
        return {}
    drawn = set().union(*(np.unique(info.token_ids).tolist() for info in infos)) - {DEAD}
    vocabulary = token_bytes(lm)
    return {each: vocabulary[each] for each in sorted(drawn)}
