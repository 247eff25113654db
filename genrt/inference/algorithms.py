"""The loop of all algorithms: a state is stepped until it is done, and becomes a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from genrt.inference.model import Model
from genrt.inference.resampling import Floats
from genrt.inference.result import Result
from genrt.lm import AsyncLM
from genrt.progress import progress_bar
from genrt.runtime.concurrency import blocking_twin

M = TypeVar("M", bound=Model)
S = TypeVar("S")
I = TypeVar("I")  # noqa: E741


class Algorithm(ABC, Generic[M, S, I]):
    """An algorithm for a model: states ``S``, records of steps ``I``.

    It holds no state of a run, so it may run many times, at once and on several event loops.
    """

    _name: str
    _total: int | None = None
    _needs_infos = False
    """Whether a result has parts of the steps' records."""

    def __init__(self, model: M) -> None:
        self.model = model
        """The model that runs."""

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
        state, infos, lm = self.init(seed), list[I](), runtime_of(self.model)
        before = None if lm is None else lm.statistics()
        with progress_bar(self._name, self._total, shown=progress) as show:
            while not self.is_done(state):
                state, info = await self.step(state)
                if self._needs_infos:
                    infos.append(info)
                show(**self._figures(state, info))
                if on_step is not None:
                    on_step(state, info)
        result = self.result(state, infos=infos)
        if lm is None or before is None:
            return result
        return replace(result, statistics=lm.statistics().since(before))

    run_sync = blocking_twin(run)
    """``run``, blocking: in another thread, which also calls ``on_step``. An interrupt cancels it."""

    def _figures(self, state: S, info: I) -> dict[str, Any]:
        """Return the figures of the progress bar."""
        return {}

    @abstractmethod
    def result(self, state: S, *, infos: Sequence[I] = ()) -> Result:
        """Return the result of a run at this state, with the records of all steps."""


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


def runtime_of(model: Any) -> AsyncLM | None:
    """Return the model's runtime; ``None`` without one."""
    lm = getattr(model, "lm", None)
    return lm if isinstance(lm, AsyncLM) else None
