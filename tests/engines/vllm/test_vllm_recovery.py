"""Recovery on the real engine: steps that run out of memory, and a vLLM that can't go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.core_client import InprocClient

from genrt.errors import EngineDied, OutOfMemory
from genrt.lm import AsyncLM
from tests.engines.vllm.small import TOLERANCE, Oracle, expect_rows, failing, runner_of
from tests.inside import engine_of

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def shortages_are_forgotten(shared_adaptable: AsyncLM) -> Iterator[None]:
    """After as many steps that go well."""
    yield
    for n in range(64):
        shared_adaptable.next_token_logprobs_sync([n, n])


async def ask(lm: AsyncLM, contexts: Sequence[Sequence[int]], oracle: Oracle) -> None:
    """Their rows, which must be the model's."""
    expect_rows(oracle, contexts, await asyncio.gather(*map(lm.next_token_logprobs, contexts)))


@pytest.mark.promise(number=7)
async def test_a_step_that_runs_out_of_memory_is_tried_in_halves(
    adaptable: AsyncLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New contexts, contexts that grow, and forks; every forward of more sequences than fit raises what
    torch raises."""
    runner = runner_of(adaptable)
    forward = type(runner).execute_model

    def scarce(self: Any, output: Any, *more: Any) -> Any:
        if len(output.num_scheduled_tokens) > 5:
            raise torch.OutOfMemoryError("no room")
        return forward(self, output, *more)

    before = adaptable.statistics().batcher
    contexts = [[5, n, *range(40)] for n in range(11)]
    await ask(adaptable, contexts, oracle)
    monkeypatch.setattr(type(runner), "execute_model", scarce)
    for last in range(3):
        contexts = [[*context, last] for context in contexts]
        await ask(adaptable, contexts, oracle)
    contexts = [[*contexts[n // 2], 9, n] for n in range(11)]
    await ask(adaptable, contexts, oracle)
    after = adaptable.statistics().batcher
    assert after.failed == before.failed
    assert after.retried > before.retried
    assert (after.queued, after.in_flight) == (0, 0)


@pytest.mark.promise(number=7)
async def test_one_sequence_that_fits_nowhere_fails_alone(
    adaptable: AsyncLM, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(adaptable)
    forward = type(runner).execute_model

    def scarce(self: Any, output: Any, *more: Any) -> Any:
        if output.total_num_scheduled_tokens > 200:
            raise torch.OutOfMemoryError("no room")
        return forward(self, output, *more)

    monkeypatch.setattr(type(runner), "execute_model", scarce)
    long = asyncio.create_task(adaptable.next_token_logprobs([7, *range(230)]))
    await ask(adaptable, [[7, n, *range(20)] for n in range(6)], oracle)
    with pytest.raises(OutOfMemory, match="no room"):
        await long
    await ask(adaptable, [[7, n, *range(20), 1] for n in range(6)], oracle)


async def test_a_vllm_that_cannot_go_on_is_dead_and_is_replaced_by_a_restart(
    adaptable: AsyncLM, loras: tuple[Path, Path], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed step after which vLLM's blocks can't be freed."""
    lm = adaptable
    await lm.add_adapter("a", loras[0])
    tuned = await lm.next_token_logprobs([1, 2, 3], adapter="a")
    await ask(lm, [[1, 2], [3, 4]], oracle)
    engine = engine_of(lm)
    monkeypatch.setattr(InprocClient, "reset_prefix_cache", lambda *_: False)
    with failing(lm, "execute_model"):
        for _ in range(2):
            with pytest.raises(EngineDied, match="still holds blocks"):
                await lm.next_token_logprobs([5, 6])
    monkeypatch.undo()
    await lm.arestart()
    await ask(lm, [[5, 6], [1, 2, 3]], oracle)
    assert engine_of(lm) is not engine
    again = await lm.next_token_logprobs([1, 2, 3], adapter="a")
    assert float((again - tuned).abs().max()) < TOLERANCE
