"""Out of memory: halved and retried. A dead engine: everyone is told why, and another takes its place."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt
from genrt.engines.protocol import Finished
from genrt.errors import (
    Closed,
    EngineDied,
    EngineFailed,
    EngineUnsupported,
    OutOfMemory,
)
from genrt.questions.request import Request
from tests.scripted import (
    PATIENCE_SECONDS,
    ByHand,
    Gate,
    ScriptedEngine,
    logprobs,
    right,
)

A, B, C = logprobs(1), logprobs(2), logprobs(3)

# -- out of memory ----------------------------------------------------------------------------


class Small(ScriptedEngine):
    """Runs out of memory over ``capacity`` requests in progress, and for ``hopeless`` ones always."""

    def __init__(
        self, capacity: int, *, hopeless: Sequence[Request] = (), when: str = "step", **options: Any
    ) -> None:
        super().__init__(**options)
        self.capacity = capacity
        self.hopeless = set(hopeless)
        self.when = when
        self.tried: list[int] = []

    def _check(self, requests: Sequence[Request]) -> None:
        self.tried.append(len(requests))
        if len(requests) > self.capacity or self.hopeless.intersection(requests):
            raise torch.OutOfMemoryError("no room")

    def submit(self, requests: Sequence[Request]) -> None:
        if self.when == "submit":
            self._check([*self.in_progress, *requests])
        super().submit(requests)

    def step(self) -> list[Finished]:
        try:
            if self.when == "step":
                self._check(list(self.in_progress))
        except torch.OutOfMemoryError:
            self.in_progress.clear()
            raise
        finished = super().step()
        if self.when == "answer" and len(finished) > self.capacity:
            self.tried.append(len(finished))
            return [Finished(end.request, error=OutOfMemory("no room")) for end in finished]
        return finished


WHEN = pytest.mark.parametrize("when", ["submit", "step", "answer"])


@pytest.mark.promise(number=7)
@WHEN
@pytest.mark.parametrize("capacity", range(1, 18))
async def test_a_flush_that_is_too_large_is_halved_until_it_fits(when: str, capacity: int) -> None:
    hand = ByHand(Small(capacity, when=when))
    requests = [logprobs(number, 1) for number in range(17)]
    tasks = [hand.ask(request) for request in requests]
    await hand.finish()
    for request, task in zip(requests, tasks, strict=True):
        assert right([request], await task)
    statistics = hand.batcher.statistics()
    assert (statistics.answered, statistics.failed, statistics.in_flight) == (17, 0, 0)
    assert (statistics.retried == 0) == (capacity >= 17)
    again = await hand.queued(*requests)
    await hand.finish()
    assert right(requests, await again)


# -- an engine that dies ----------------------------------------------------------------------


class Engines:
    """Opens one scripted engine after the other; the n-th has the n-th of these options."""

    def __init__(self, *options: dict[str, Any]) -> None:
        self.opened: list[ScriptedEngine] = []
        self._options = options

    def __call__(self) -> ScriptedEngine:
        number = len(self.opened)
        options = self._options[number] if number < len(self._options) else {}
        if "raises" in options:
            raise options["raises"]
        self.opened.append(ScriptedEngine(**options))
        return self.opened[-1]


def test_restart_opens_another_engine_with_the_same_adapters(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    engines = Engines({"fail_at": {2: EngineDied("dead")}})
    with genrt.load(engine=engines) as lm:
        lm.add_adapter_sync("gone", tmp_path)
        lm.add_adapter_sync("kept", tmp_path)
        lm.remove_adapter("gone")
        cached = lm.next_token_logprobs_sync([1])
        with pytest.raises(EngineDied):
            lm.next_token_logprobs_sync([2], adapter="kept")
        lm.restart()
        first, second = engines.opened
        assert [adapter.name for adapter in second.adapters] == ["kept"]
        assert lm.adapters == ("kept",)
        assert torch.equal(lm.next_token_logprobs_sync([1]), cached)
        assert second.submitted == [], "what was answered is not lost"
        lm.next_token_logprobs_sync([2], adapter="kept")
        assert [request.adapter for request in second.submitted[0]] == second.adapters
        assert first.closed == 1
        assert "open" in repr(lm)
    assert second.closed == 1


async def test_a_runtime_restarts_from_every_state() -> None:
    engines = Engines()
    lm = await genrt.aload(engine=engines)
    await lm.arestart()
    assert [engine.closed for engine in engines.opened] == [1, 0]
    assert right([A], [await lm.next_token_logprobs([1])])
    lm.close()
    with pytest.raises(Closed, match="restart"):
        await lm.next_token_logprobs([2])
    await lm.arestart()
    assert right([B], [await lm.next_token_logprobs([2])])
    await lm.aclose()
    assert [engine.closed for engine in engines.opened] == [1, 1, 1]


def test_a_restart_that_fails_says_why_and_can_be_tried_again() -> None:
    engines = Engines({"fail_at": {1: EngineDied("dead")}}, {"raises": EngineUnsupported("broken")})
    with genrt.load(engine=engines) as lm:
        with pytest.raises(EngineDied):
            lm.next_token_logprobs_sync([1])
        with pytest.raises(EngineUnsupported, match="broken"):
            lm.restart()
        with pytest.raises(EngineUnsupported, match="broken"):
            lm.next_token_logprobs_sync([1])
        engines.opened.append(ScriptedEngine())
        lm.restart()
        assert right([A], [lm.next_token_logprobs_sync([1])])


@pytest.fixture
def automatic() -> Iterator[Callable[..., tuple[genrt.AsyncLM, Engines]]]:
    opened: list[genrt.AsyncLM] = []

    def load(*options: dict[str, Any]) -> tuple[genrt.AsyncLM, Engines]:
        engines = Engines(*options)
        opened.append(genrt.load(engine=engines, restart="auto"))
        return opened[-1], engines

    yield load
    for lm in opened:
        lm.close()


Automatic = Callable[..., tuple[genrt.AsyncLM, Engines]]


async def test_an_engine_that_dies_of_a_question_is_not_opened_for_ever(
    automatic: Automatic,
) -> None:
    deadly = {"fail_at": {1: EngineDied("dead")}}
    lm, engines = automatic(deadly, deadly, deadly)
    with pytest.raises(EngineDied, match="dead"):
        await lm.next_token_logprobs([1])
    await lm.aclose()  # when the thread has ended
    assert len(engines.opened) == 2
    assert [engine.closed for engine in engines.opened] == [1, 1]


async def test_where_no_other_engine_opens_everyone_is_told(automatic: Automatic) -> None:
    lm, engines = automatic(
        {"fail_at": {1: EngineDied("dead")}}, {"raises": EngineUnsupported("broken")}
    )
    for _ in range(2):
        with pytest.raises(EngineDied, match="broken"):
            await lm.next_token_logprobs([1])
    assert len(engines.opened) == 1


def test_a_step_that_does_not_end_holds_up_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genrt.runtime.thread.RESTART_SECONDS", 0.0)
    gate = Gate()
    engines = Engines({"gate": gate})
    with (
        genrt.load(engine=engines) as lm,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(lm.next_token_logprobs_sync, [1])
        gate.wait_until_held()
        with pytest.raises(EngineFailed, match="still in a step"):
            lm.restart()
        gate.open()
        with pytest.raises(Closed):
            waiting.result(PATIENCE_SECONDS)
