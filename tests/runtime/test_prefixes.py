"""Prefixes that are warmed up: computed once, kept by every engine of the runtime until they are given
up. What vLLM does is in test_vllm_prefixes.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.engines.exact import NGram
from genrt.engines.protocol import Finished, Prefixes, capabilities_of
from genrt.errors import (
    ContextTooLong,
    InvalidRequest,
    UnknownAdapter,
)
from genrt.lm import AsyncLM
from genrt.questions.arguments import Adapter
from genrt.questions.rows import LogprobsRequest
from genrt.runtime.answers import MAX_PREFIXES
from tests.inside import thread_of
from tests.scripted import PATIENCE_SECONDS, Gate, ScriptedEngine, logprobs, passes


class Kept:
    """What an engine is told to keep; it has what was computed since the last ``lose``."""

    def __init__(self) -> None:
        self.asked: dict[LogprobsRequest, None] = {}
        self.computed: set[LogprobsRequest] = set()

    def __contains__(self, prefix: LogprobsRequest) -> bool:
        return prefix in self.asked and prefix in self.computed

    def keep(self, prefix: LogprobsRequest) -> None:
        self.asked[prefix] = None

    def release(self, prefix: LogprobsRequest) -> None:
        self.asked.pop(prefix, None)

    def lose(self) -> None:
        self.computed.clear()


class KeepingEngine(ScriptedEngine):
    """A ScriptedEngine that keeps contexts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept = Kept()

    @property
    def prefixes(self) -> Prefixes:
        return self.kept

    def step(self) -> list[Finished]:
        finished = super().step()
        self.kept.computed |= {
            end.request for end in finished if isinstance(end.request, LogprobsRequest)
        }
        return finished

    def held(self) -> list[LogprobsRequest]:
        return list(self.kept.asked)


class Engines:
    """Opens engines, and has them all."""

    def __init__(self, *first: ScriptedEngine) -> None:
        self.made: list[Any] = []
        self._first = list(first)

    def __call__(self) -> Any:
        self.made.append(self._first.pop(0) if self._first else KeepingEngine())
        return self.made[-1]


def load(engines: Engines, **options: Any) -> AsyncLM:
    return genrt.load(engine=engines, **options)


def settled(lm: AsyncLM) -> None:
    """Let the engine's thread do what it was told."""
    thread_of(lm).call(lambda _: None).result(PATIENCE_SECONDS)


def an_adapter(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"")
    return directory


# -- computed once, kept, given up ----------------------------------------------------------------


async def test_a_prefix_is_computed_once_for_all_who_warm_it_up() -> None:
    engines = Engines()
    async with load(engines) as lm:
        [engine] = engines.made
        assert capabilities_of(engine).keeps_prefixes
        assert await asyncio.gather(*[lm.warm_up([1, 2, 3]) for _ in range(5)]) == [3] * 5
        assert await lm.warm_up([1, 2, 3]) == 3
        assert lm.warm_up_sync((1, 2, 3)) == 3
        assert engine.submitted == [[logprobs(1, 2, 3)]]
        assert engine.held() == [logprobs(1, 2, 3)]
        await lm.next_token_logprobs([1, 2, 3])  # its row was kept too
        assert len(engine.submitted) == 1


def test_a_row_in_the_cache_does_not_stand_for_its_context() -> None:
    engines = Engines()
    with load(engines) as lm:
        [engine] = engines.made
        lm.next_token_logprobs_sync([1, 2])
        for computed in (2, 3):
            assert lm.warm_up_sync([1, 2]) == 2
            assert lm.warm_up_sync([1, 2]) == 2
            assert len(engine.submitted) == computed
            engine.kept.lose()


def test_one_is_given_up_or_all_and_others_are_ignored() -> None:
    engines = Engines()
    with load(engines) as lm:
        [engine] = engines.made
        for ids in ([1], [2], [3, 4]):
            lm.warm_up_sync(ids)
        lm.cool_down([1])
        lm.cool_down([5])
        settled(lm)
        assert engine.held() == [logprobs(2), logprobs(3, 4)]
        lm.cool_down()
        lm.cool_down()
        settled(lm)
        assert engine.held() == []


def test_the_oldest_of_too_many_goes() -> None:
    engines = Engines()
    with load(engines) as lm:
        for n in range(MAX_PREFIXES):
            lm.warm_up_sync([n % 8, n // 8])
        lm.warm_up_sync([0, 0])  # the newest now
        lm.warm_up_sync([7, 7, 7])
        held = engines.made[0].held()
        assert len(held) == MAX_PREFIXES
        assert logprobs(0, 0) in held
        assert logprobs(1, 0) not in held


# -- who leaves, what fails -----------------------------------------------------------------------


async def test_who_leaves_has_nothing_kept_and_disturbs_nobody() -> None:
    gate = Gate()
    engine = KeepingEngine(gate=gate, steps=lambda _: 2)
    async with load(Engines(engine)) as lm:
        left = asyncio.create_task(lm.warm_up([1]))
        shared = [asyncio.create_task(lm.warm_up([2])) for _ in range(2)]
        await asyncio.to_thread(gate.wait_until_held)
        left.cancel()
        shared[0].cancel()
        await passes()
        gate.open()
        assert await shared[1] == 1
        assert left.cancelled()
        assert shared[0].cancelled()
        await lm.next_token_logprobs([3])
        assert engine.held() == [logprobs(2)]
        assert lm.statistics().batcher.in_flight == 0


# -- engines and adapters that come and go ---------------------------------------------------------


def test_another_engine_is_told_to_keep_the_same() -> None:
    engines = Engines()
    with load(engines) as lm:
        lm.warm_up_sync([1])
        lm.warm_up_sync([2])
        lm.restart()
        assert engines.made[1].held() == [logprobs(1), logprobs(2)]
        assert engines.made[1].submitted == []
        assert lm.warm_up_sync([1]) == 1  # whose row is in the cache
        assert engines.made[1].submitted == [[logprobs(1)]]
        lm.close()
        lm.cool_down([1])
        lm.restart()
        assert engines.made[2].held() == [logprobs(2)]


def test_an_adapters_prefix_is_kept_for_what_its_name_stands_for(tmp_path: Path) -> None:
    paths = [an_adapter(tmp_path / name) for name in "xy"]
    engines = Engines()
    with load(engines) as lm:
        [engine] = engines.made
        lm.add_adapter_sync("a", paths[0])
        lm.warm_up_sync([1])
        lm.warm_up_sync([1], adapter="a")
        first = Adapter("a", 1)
        assert engine.held() == [logprobs(1), logprobs(1, adapter=first)]
        lm.add_adapter_sync("a", paths[1])
        lm.next_token_logprobs_sync([2])
        lm.next_token_logprobs_sync([3])
        second = engine.adapters[-1]
        assert second != first
        assert engine.held() == [logprobs(1), logprobs(1, adapter=second)]
        lm.add_adapter_sync("b", paths[1])
        assert engine.held() == [logprobs(1), logprobs(1, adapter=second)]
        lm.restart()
        assert engines.made[1].held() == [logprobs(1), logprobs(1, adapter=second)]
        lm.remove_adapter("a")
        lm.next_token_logprobs_sync([2, 4])
        lm.next_token_logprobs_sync([3, 4])
        assert engines.made[1].held() == [logprobs(1)]
        with pytest.raises(UnknownAdapter):
            lm.warm_up_sync([1], adapter="a")
        with pytest.raises(UnknownAdapter):
            lm.cool_down([1], adapter="a")


# -- other engines, threads, arguments --------------------------------------------------------------


def test_an_engine_that_keeps_nothing_computes_the_row_and_the_cache_has_it() -> None:
    with genrt.load(NGram.random(7), engine="exact") as lm:
        assert lm.warm_up_sync([1, 2]) == 2
        before = lm.statistics().engine.rows
        assert lm.warm_up_sync([1, 2]) == 2
        lm.next_token_logprobs_sync([1, 2])
        assert lm.statistics().engine.rows == before == 1
        lm.cool_down()
        lm.restart()
        assert lm.statistics().engine.kept_tokens == 0


def test_a_text_or_a_conversation_is_what_all_that_begin_with_it_share() -> None:
    with genrt.load(NGram.random(256), engine="exact") as lm:
        assert lm.warm_up_sync([5, 6]) == 2
        of_chats: list[Any] = [{"tools": []}, {"chat_template_kwargs": {}}]
        for options in of_chats:
            for prefix in ("Once", [1, 2]):
                with pytest.raises(InvalidRequest, match="belong to a conversation"):
                    lm.warm_up_sync(prefix, **options)
        with pytest.raises(InvalidRequest, match="belong to a prefix"):
            lm.cool_down(adapter=None)
        wrong: list[Any] = [[], "", None, {"role": "user"}, [[1]], [{"content": "no role"}]]
        for given in wrong:
            with pytest.raises(InvalidRequest):
                lm.warm_up_sync(given)
        with pytest.raises(ContextTooLong):
            lm.warm_up_sync([1] * (lm.max_model_len + 1))
