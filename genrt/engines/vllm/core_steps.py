"""Runs vLLM's own steps, and schedules steps of texts before the previous step has ended.

A text's next token is drawn on the device, and the next step reads it there. So the host can schedule
that step and process the previous outputs while the device computes. This is vLLM's asynchronous
scheduling. A row's next token comes from a caller, who chooses it after the step has ended.

Rules:
    Only steps of texts alone are scheduled ahead. A request for a row waits until the step under way has
    ended, in a turn of its own.
    After a row, the next ``PATIENCE`` steps are not scheduled ahead, because more rows are likely.

The parts of vLLM that this file uses are listed in ``docs/new_vllm.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core_client import EngineCoreClient

from genrt.engines.vllm.open_scheduler import OpenScheduler

__all__ = ["CoreSteps", "shut_down"]

PATIENCE = 4
"""The number of steps after a row that are not scheduled ahead."""


def shut_down(llm_engine: Any) -> None:
    """Shut an engine core down as ``EngineCore.shutdown`` does, except for state that other engines of
    this process use."""
    llm_engine.engine_core._finalizer.detach()  # it would shut down the shared state too
    # Remove hooks of torch's compiler while the model exists: they would keep its weights in memory.
    getattr(llm_engine, "_finalizer", lambda: None)()
    core = llm_engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()


class CoreSteps:
    """The steps of one engine's core.

    Args:
        client: vLLM's client of the core.
        scheduler: the core's if it is genrt's; only that one can be switched to scheduling ahead.
        runner: the model runner, if it is in this process.
    """

    def __init__(
        self, client: EngineCoreClient, scheduler: OpenScheduler | None, runner: Any = None
    ) -> None:
        self._client: Any = client
        self._runner = runner
        self._scheduler = scheduler
        self._core: Any = self._client.engine_core if scheduler is not None else None
        self._can_be_ahead = getattr(self._core, "batch_queue", None) is not None
        self._without_rows = 0

    def run(self, *, only_texts: bool) -> Sequence[EngineCoreOutput]:
        """Return the outputs of the step under way, or, if there is no such step, of the next one."""
        if self._scheduler is None:
            outputs: Sequence[EngineCoreOutput] = self._client.get_output().outputs
            return outputs
        self._without_rows = self._without_rows + 1 if only_texts else 0
        if self._can_be_ahead and only_texts and self._without_rows > PATIENCE:
            return self._ahead(self._scheduler)
        if self.is_ahead:
            return self._finished(self._scheduler)
        stepped, _ = self._core.step()
        return _first(stepped)

    @property
    def is_ahead(self) -> bool:
        """True while a step is under way with unread outputs."""
        return self._can_be_ahead and bool(self._core.batch_queue)

    def settle(self) -> None:
        """Wait for the steps under way and drop their outputs."""
        while self._scheduler is not None and self.is_ahead:
            self._finished(self._scheduler)

    def forget(self) -> None:
        """Forget the steps under way, after a step that failed."""
        if self._can_be_ahead:
            self._core.batch_queue.clear()
        if self._runner is not None:
            # The state of a forward with undrawn tokens, for example because a mask failed. With it,
            # runner V1 refuses every later step.
            self._runner.execute_model_state = None

    def _ahead(self, scheduler: OpenScheduler) -> Sequence[EngineCoreOutput]:
        """Schedule a step and return the outputs of the previous one. The first of many such steps has
        no outputs yet."""
        scheduler.ahead = True
        try:
            outputs, _ = self._core.step_with_batch_queue()
            if outputs is None and self.is_ahead:
                outputs, _ = self._core.step_with_batch_queue()
        finally:
            scheduler.ahead = False
        return _first(outputs)

    def _finished(self, scheduler: OpenScheduler) -> Sequence[EngineCoreOutput]:
        """Wait for the step under way and return its outputs. This is ``step_with_batch_queue`` without
        the scheduling of another step."""
        future, output, _ = self._core.batch_queue.pop()
        return _first(scheduler.update_from_output(output, future.result()))


def _first(outputs: Any) -> Sequence[EngineCoreOutput]:
    """Return the outputs for the only client."""
    found: Sequence[EngineCoreOutput] = outputs[0].outputs if outputs and 0 in outputs else ()
    return found
