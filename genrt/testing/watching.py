"""A batcher as its callers see it, and an engine as a batcher sees it, with the ledger told of everything
that passes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch

from genrt.engines.protocol import EngineStatistics, Finished
from genrt.errors import EngineDied
from genrt.questions.values import Adapter, Request, Result
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Batcher
from genrt.testing.ledger import Ledger


class WatchedBatcher:
    """What a batcher's callers see of it."""

    def __init__(
        self,
        batcher: Batcher,
        ledger: Ledger,
        run_blocked: Callable[[Coroutine[Any, Any, list[Result]]], list[Result]],
    ) -> None:
        self._batcher = batcher
        self._ledger = ledger
        self._run_blocked = run_blocked
        self.retire = batcher.retire
        self.statistics = batcher.statistics

    async def ask(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """As ``Batcher.ask``."""
        question = self._ledger.asked(requests, stacked, timeout)
        try:
            results = await self._batcher.ask(question.requests, stacked=stacked, timeout=timeout)
        except BaseException as error:
            self._ledger.left(question, error)
            raise
        self._ledger.answered(question, results)
        return results

    def ask_sync(
        self, requests: Sequence[Request], *, stacked: bool = False, timeout: float | None = None
    ) -> list[Result]:
        """As ``Batcher.ask_sync``: the loop that it is called on is held up, the simulation goes on."""
        return self._run_blocked(self.ask(requests, stacked=stacked, timeout=timeout))

    def __repr__(self) -> str:
        return repr(self._batcher)


class WatchingEngine:
    """An engine as the batcher sees it."""

    def __init__(self, engine: AnsweringEngine, ledger: Ledger) -> None:
        self._engine = engine
        self._ledger = ledger

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def max_batch_size(self) -> int:
        return self._engine.max_batch_size

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        self._ledger.submitted(requests)
        try:
            self._engine.submit(requests)
        except EngineDied:
            raise
        except Exception as error:
            self._ledger.submit_failed(requests, error)
            raise

    def ready(self) -> list[Finished]:
        """As ``AnsweringEngine.ready``."""
        ends = self._engine.ready()
        self._ledger.finished(ends)
        return ends

    def step(self) -> list[Finished]:
        try:
            finished = self._engine.step()
        except EngineDied:
            raise
        except Exception as error:
            self._ledger.step_failed(error)
            raise
        self._ledger.finished(finished)
        return finished

    def cancel(self, requests: Sequence[Request]) -> None:
        self._ledger.cancelling(requests)
        self._engine.cancel(requests)
        self._ledger.cancelled()

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        self._engine.add_adapter(adapter, path)

    def remove_adapter(self, adapter: Adapter) -> None:
        self._engine.remove_adapter(adapter)

    def statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def close(self) -> None:
        self._engine.close()
