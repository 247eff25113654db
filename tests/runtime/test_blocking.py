"""``run_sync`` of every algorithm: what ``run`` gives, from anywhere; interrupted, it leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import genrt
from genrt.constraints import regex
from genrt.engines.exact import NGram
from genrt.errors import InvalidRequest
from genrt.inference import (
    SMC,
    BestOfN,
    Execution,
    MetropolisHastings,
    Program,
    Rejection,
    Result,
    TextModel,
    importance_sampling,
)
from genrt.interop.trainers import WeightSyncClient
from genrt.lm import AsyncLM
from genrt.runtime.concurrency import INTERRUPT_SECONDS, _wait, blocking
from genrt.tokens.texts import Text
from tests import interrupts
from tests.inside import thread_of
from tests.runtime.test_pauses import MODEL as PAUSED_MODEL
from tests.runtime.test_pauses import OTHER, SleepyEngine
from tests.scripted import PATIENCE_SECONDS

MODEL = NGram.random([b"a", b"b", b"ab", b""], seed=3, eos_token_id=3)


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", cache_bytes=0) as lm:
        yield lm


async def pair(p: Execution) -> tuple[int, int]:
    first = await p.sample([0])
    return first, await p.sample([0, first], mask=[0, 1])


def text_model(lm: AsyncLM, **options: Any) -> TextModel:
    return TextModel(lm, [0], max_tokens=4, constraint=regex("(a|b)+", lm), **options)


ALGORITHMS: dict[str, Callable[[AsyncLM], Any]] = {
    "SMC": lambda lm: SMC(text_model(lm), num_particles=8),
    "importance sampling": lambda lm: importance_sampling(text_model(lm), num_particles=8),
    "a program": lambda lm: SMC(Program(lm, pair), num_particles=8),
    "Metropolis-Hastings": lambda lm: MetropolisHastings(text_model(lm), num_chains=3, num_steps=4),
    "rejection": lambda lm: Rejection(text_model(lm), num_samples=3, max_texts=200, batch_size=8),
    "best of N": lambda lm: BestOfN(text_model(lm), n=5),
}


def same(one: Result, other: Result) -> bool:
    return (
        one.values == other.values
        and one.log_weights.tolist() == other.log_weights.tolist()
        and repr(one.log_evidence) == repr(other.log_evidence)
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_gives_what_run_gives_from_a_script_from_threads_and_where_a_loop_runs(
    lm: AsyncLM, name: str
) -> None:
    algorithm = ALGORITHMS[name](lm)
    expected = asyncio.run(algorithm.run(7))

    async def where_a_loop_runs() -> Result:
        result: Result = algorithm.run_sync(7)
        return result

    assert same(algorithm.run_sync(7), expected)
    assert same(asyncio.run(where_a_loop_runs()), expected)
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(algorithm.run_sync, 7) for _ in range(4)]
    assert all(same(each.result(), expected) for each in found)


def test_what_it_raises_is_raised(lm: AsyncLM) -> None:
    def breaks(text: Text) -> float:
        raise LookupError(str(text))

    with pytest.raises(LookupError):
        SMC(text_model(lm, potential=breaks), num_particles=8).run_sync(0)
    with pytest.raises(InvalidRequest, match="seed"):
        SMC(text_model(lm), num_particles=8).run_sync(-1)
    assert threads_left() == []


def test_it_runs_in_a_copy_of_the_callers_context() -> None:
    name = contextvars.ContextVar("name", default="nobody's")
    name.set("mine")

    async def tells() -> str:
        before = name.get()
        name.set("its own")
        return before

    assert blocking(tells()) == "mine"
    assert name.get() == "mine"


# -- interrupts -------------------------------------------------------------------------------


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "genrt"]


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_the_main_thread_looks_for_interrupts_now_and_then() -> None:
    """One that comes just before it waits would not wake it."""
    waits: list[float | None] = []

    def waited(seconds: float | None) -> bool:
        waits.append(seconds)
        return len(waits) > 1

    _wait(waited)
    assert waits == [INTERRUPT_SECONDS] * 2
    other = threading.Thread(target=_wait, args=(waited,))
    other.start()
    other.join()
    assert waits[2:] == [None], "only the main thread is interrupted"


def test_an_interrupt_at_any_line_leaves_nothing_behind(lm: AsyncLM) -> None:
    async def asks() -> int:
        await lm.next_token_logprobs([0, 1])
        return 5

    interrupted = 0
    for number in itertools.count(1):
        coroutine = asks()
        try:
            with interrupts.at_line(number) as moment:
                result = blocking(coroutine)
        except KeyboardInterrupt:
            interrupted += 1
        else:
            assert result == 5
        coroutine.close()  # of one that came before there was a task
        gc.collect()
        assert threads_left() == [], moment.fired
        assert asyncio.run(asks()) == 5
        if not moment.fired:
            break
    assert interrupted > 6


class Trained(SleepyEngine):
    """An engine that sleeps, and receives what trainers send."""

    def __init__(self) -> None:
        super().__init__()
        own = self.weights
        own.check_receives = own.connect = own.disconnect = own.receive = lambda *_: None


TWINS: dict[str, tuple[Callable[[AsyncLM, Path], object], Callable[[AsyncLM], object]]] = {
    "pause": (lambda lm, _: lm.pause_sync(), lambda lm: lm.resume()),
    "sleep": (lambda lm, _: lm.sleep_sync(pending="restart"), lambda lm: lm.wake_up_sync()),
    "sleep deeply": (lambda lm, _: lm.sleep_sync(2), lambda lm: lm.wake_up_sync()),
    "add_adapter": (lambda lm, path: lm.add_adapter_sync("a", path), lambda lm: None),
    "a trainer's update": (
        lambda lm, _: WeightSyncClient(lm).start_weight_update(),
        lambda lm: lm.restart(),
    ),
    "update_weights": (
        lambda lm, path: lm.update_weights_sync(path / "adapter_model.safetensors"),
        lambda lm: None,
    ),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("name", TWINS)
def test_an_interrupt_out_of_a_twin_with_a_lasting_effect_leaves_none(
    name: str, tmp_path: Path
) -> None:
    """Wherever it comes, also when the work has ended and its caller is not told yet."""
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    save_file({"table": OTHER.table}, tmp_path / "adapter_model.safetensors")
    twin, go_on = TWINS[name]
    interrupted: list[str] = []
    with genrt.load(engine=Trained, restart="auto", cache_bytes=0) as lm:
        for number in itertools.count(1):
            with contextlib.suppress(KeyboardInterrupt):
                with interrupts.at_line(number) as moment:
                    twin(lm, tmp_path)
                gc.collect()
            if not moment.fired:
                break
            interrupted.append(moment.fired)
            # Each is held by a pause.
            asked = lm.next_token_logprobs_sync([1], timeout=PATIENCE_SECONDS)
            models = [PAUSED_MODEL, OTHER][: 1 + bool(lm.weights_version)]
            assert any(torch.allclose(asked, model.row([1]), atol=1e-6) for model in models)
            assert lm.adapters == (), moment.fired
            assert thread_of(lm).lifecycle.state == "running", moment.fired
        go_on(lm)
        lm.next_token_logprobs_sync([1], timeout=PATIENCE_SECONDS)
    assert any("outcome.result()" in line for line in interrupted)


async def test_an_interrupt_in_a_pause_of_anothers_leaves_that_pause() -> None:
    async with genrt.load(engine=Trained) as lm:
        await lm.pause()
        _, undo = await thread_of(lm).lifecycle.sleep(1, {})  # as the twin calls it
        undo()
        assert await lm.wake_up()
        assert thread_of(lm).lifecycle.state == "drained"
        lm.resume()
        await lm.next_token_logprobs([1])


def test_a_second_interrupt_does_not_wait(lm: AsyncLM) -> None:
    released = threading.Event()

    async def stubborn(text: Text) -> float:
        interrupt()
        try:
            await asyncio.Event().wait()
        finally:
            interrupt()
            await asyncio.to_thread(released.wait)
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        BestOfN(text_model(lm, potential=stubborn), n=1).run_sync(1)  # whose text ends
    assert threads_left() == ["genrt"]
    [thread] = [each for each in threading.enumerate() if each.name == "genrt"]
    released.set()
    thread.join()
