"""runtime/thread.py and what callers see of it: threads, loops, interrupts, and every way to end.

A gate holds a step where a test needs one held; nothing sleeps, and whoever waits in vain fails.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genrt
from genrt.engines.protocol import Engine, Finished
from genrt.errors import Closed, EngineDied, EngineFailed, EngineUnsupported
from genrt.lm import AsyncLM
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.runtime import thread as engine_thread
from genrt.runtime.ask import Asker
from genrt.runtime.batcher import Batcher
from genrt.runtime.cache import RowCache
from genrt.runtime.thread import EngineThread
from tests.inside import is_held, system_thread, thread_of
from tests.scripted import (
    PATIENCE_SECONDS,
    Gate,
    ScriptedEngine,
    logprobs,
    passes,
    right,
    sample,
)

A, B, C = logprobs(1), logprobs(2), logprobs(3)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start() -> Iterator[Callable[..., EngineThread]]:
    threads: list[EngineThread] = []

    def make(open_engine: Callable[[], Engine], **options: Any) -> EngineThread:
        threads.append(EngineThread(open_engine, RowCache(2**20), **options))
        return threads[-1]

    yield make
    for thread in threads:
        thread.close()
        assert not system_thread(thread).is_alive()


Start = Callable[..., EngineThread]


def opened(thread: EngineThread) -> Engine:
    return thread.opened.result(PATIENCE_SECONDS)


def asking(batcher: Batcher) -> Asker:
    return Asker(SimpleNamespace(batcher=batcher))


def joined(thread: EngineThread) -> None:
    system_thread(thread).join(PATIENCE_SECONDS)
    assert not system_thread(thread).is_alive()


# -- opening ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [EngineUnsupported("not this one"), OSError("disk"), SystemExit()]
)
def test_what_opening_raises_reaches_who_waits_for_it(start: Start, error: BaseException) -> None:
    def fail() -> Engine:
        raise error

    thread = start(fail)
    with pytest.raises(type(error)) as caught:
        opened(thread)
    assert caught.value is error
    joined(thread)
    with pytest.raises(Closed, match="not open"):
        _ = thread.engine
    later = EngineUnsupported if isinstance(error, EngineUnsupported) else EngineDied
    with pytest.raises(later):
        thread.call(lambda engine: None).result(PATIENCE_SECONDS)
    with pytest.raises(later):
        asking(thread.batcher).ask_sync([A], timeout=PATIENCE_SECONDS)


@pytest.mark.promise(number=20)
def test_close_during_opening_closes_the_engine_once_it_is_open(start: Start) -> None:
    gate, engine = Gate(), ScriptedEngine()

    def slow() -> Engine:
        gate.go_through()
        return engine

    thread = start(slow)
    gate.wait_until_held()
    thread.close(wait=False)
    assert engine.closed == 0
    gate.open()
    joined(thread)
    assert engine.closed == 1


@pytest.mark.promise(number=10)
def test_an_interrupt_while_loading_abandons_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, engine, closed = Gate(), ScriptedEngine(), threading.Event()

    def slow() -> Engine:
        gate.go_through()
        return engine

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "close", closed.set)
    with monkeypatch.context() as patched:
        patched.setattr(concurrent.futures, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            genrt.load(engine=slow)
    gate.open()
    assert closed.wait(PATIENCE_SECONDS)


# -- one thread owns the engine ---------------------------------------------------------------


def test_the_engine_is_used_on_its_own_thread_alone(start: Start, tmp_path: Path) -> None:
    engine, used = ScriptedEngine(), []

    def make() -> Engine:
        used.append(threading.get_ident())
        return engine

    thread = start(make)
    opened(thread)
    assert right([A, B], asking(thread.batcher).ask_sync([A, B]))
    used.append(thread.call(lambda _: threading.get_ident()).result(PATIENCE_SECONDS))
    assert engine.threads == set(used) != {threading.get_ident()}
    assert len(engine.threads) == 1


def test_calls_run_between_turns_and_give_back_what_they_raise(start: Start) -> None:
    gate = Gate()
    engine = ScriptedEngine(gate=gate)
    thread = start(lambda: engine)
    opened(thread)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asking(thread.batcher).ask_sync, [A])
        gate.wait_until_held()
        during = thread.call(lambda _: len(engine.stepped))
        failing = thread.call(lambda _: 1 / 0)
        unwanted = thread.call(lambda _: pytest.fail("it was cancelled"))
        assert unwanted.cancel()
        assert not during.done()
        gate.open()
        assert during.result(PATIENCE_SECONDS) == 1
        with pytest.raises(ZeroDivisionError):
            failing.result(PATIENCE_SECONDS)
        assert right([A], asked.result(PATIENCE_SECONDS))
    assert right([B], asking(thread.batcher).ask_sync([B])), "a call's error harms nobody"


def test_a_very_long_wait_for_company_is_no_error(start: Start) -> None:
    thread = start(ScriptedEngine, max_batch_size=2, max_wait_seconds=1e300)
    opened(thread)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(asking(thread.batcher).ask_sync, [request]) for request in (A, B)]
        results = [each.result(PATIENCE_SECONDS)[0] for each in asked]
    assert right([A, B], results)


# -- an engine that dies ----------------------------------------------------------------------


class Fatal(BaseException):
    """What no ``except Exception`` stops."""


@pytest.mark.promise(number=6)
@pytest.mark.parametrize("how", ["step", "cancel", "call"])
def test_an_engine_that_dies_ends_every_waiter_and_every_later_one(start: Start, how: str) -> None:
    gate = Gate()
    engine = ScriptedEngine(
        gate=gate,
        steps=lambda r: 1 if r == A else 100,
        fail_at={1: Fatal("dead")} if how == "step" else {1: RuntimeError("mends")},
        fail_cancel=Fatal("dead") if how == "cancel" else None,
    )
    thread = start(lambda: engine)
    opened(thread)

    def die(_: object) -> None:
        raise Fatal("dead")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(asking(thread.batcher).ask_sync, [A])]
        gate.wait_until_held()
        waiting += [pool.submit(asking(thread.batcher).ask_sync, [request]) for request in (A, B)]
        call = thread.call(die if how == "call" else lambda _: None)
        gate.open()
        errors = [each.exception(PATIENCE_SECONDS) for each in waiting]
        call_error = call.exception(PATIENCE_SECONDS)
    joined(thread)
    assert all(isinstance(error, EngineFailed) for error in errors)
    if how == "call":
        assert isinstance(call_error, Fatal)
        assert any("mends" in str(error) for error in errors)
    else:
        assert isinstance(call_error, EngineFailed)
        assert all("can't go on" in str(error) and "dead" in str(error) for error in errors)
        assert isinstance(errors[0].__cause__, Fatal)  # type: ignore[union-attr]
    assert len({id(error) for error in errors}) == 3
    with pytest.raises(EngineFailed, match="can't go on"):
        asking(thread.batcher).ask_sync([C])
    with pytest.raises(EngineFailed, match="can't go on"):
        thread.call(lambda _: None).result(PATIENCE_SECONDS)
    assert engine.closed == 1
    assert not thread.alive


# -- closing ----------------------------------------------------------------------------------


@pytest.mark.promise(number=20)
async def test_close_ends_waiters_at_once_while_a_step_is_held(start: Start) -> None:
    gate = Gate()
    engine = ScriptedEngine(gate=gate)
    thread = start(lambda: engine)
    opened(thread)
    in_flight = asyncio.create_task(asking(thread.batcher).ask([A]))
    await asyncio.to_thread(gate.wait_until_held)
    queued = asyncio.create_task(asking(thread.batcher).ask([B]))
    await passes()
    call = thread.call(lambda _: None)
    thread.close(wait=False)
    for task in (in_flight, queued):
        with pytest.raises(Closed):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
    with pytest.raises(Closed):
        await asking(thread.batcher).ask([C])
    assert engine.closed == 0, "not under a step in progress"
    gate.open()
    joined(thread)
    assert engine.closed == 1
    assert isinstance(call.exception(PATIENCE_SECONDS), Closed)
    assert engine.submitted == [[A]]


@pytest.mark.promise(number=20)
def test_close_waits_only_so_long_for_a_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "CLOSE_SECONDS", 0.01)
    gate = Gate()
    thread = start(lambda: ScriptedEngine(gate=gate))
    opened(thread)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asking(thread.batcher).ask_sync, [A])
        gate.wait_until_held()
        thread.close()
        assert isinstance(asked.exception(PATIENCE_SECONDS), Closed)
        assert system_thread(thread).is_alive()
    gate.open()
    joined(thread)


def test_close_from_the_engines_own_thread_ends_it(start: Start) -> None:
    engine = ScriptedEngine()
    thread = start(lambda: engine)
    opened(thread)
    thread.call(lambda _: thread.close()).result(PATIENCE_SECONDS)
    joined(thread)
    assert engine.closed == 1
    with pytest.raises(Closed):
        asking(thread.batcher).ask_sync([A])


@pytest.mark.promise(number=20)
@pytest.mark.parametrize("where", ["in a step", "in the batcher's lock"])
def test_a_runtime_collected_on_the_engines_own_thread_closes_without_deadlock(where: str) -> None:
    """The last reference goes, and is collected, inside a step, or where the batcher reads its clock,
    which is under its lock."""
    holder: list[AsyncLM] = []
    collected: list[bool] = []

    def collect() -> float:
        if holder and threading.current_thread() is thread:
            reference = weakref.ref(holder[0])
            holder.clear()
            gc.collect()
            collected.append(reference() is None)
        return 0.0

    class Collecting(ScriptedEngine):
        def step(self) -> list[Finished]:
            if where == "in a step":
                collect()
            return super().step()

    engine = Collecting()
    lm = genrt.load(engine=lambda: engine)
    thread, batcher = system_thread(lm), thread_of(lm).batcher
    lm.__dict__["itself"] = lm  # so that only the garbage collector finds it
    holder.append(lm)
    del lm
    if where == "in the batcher's lock":
        batcher._clock = collect
    asker = threading.Thread(target=answered_or_closed, args=[batcher], daemon=True)
    asker.start()
    asker.join(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
    assert not asker.is_alive(), "deadlock"
    assert not thread.is_alive(), "deadlock"
    assert collected == [True]
    assert engine.closed == 1


def answered_or_closed(batcher: Batcher) -> None:
    with contextlib.suppress(Closed):
        asking(batcher).ask_sync([A])


class Hooked(LogprobsRequest):
    """A request in whose hash something happens: dictionaries ask for it under the batcher's lock."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def __hash__(self) -> int:
        self.hook()
        return super().__hash__()


class HookedLoop(asyncio.SelectorEventLoop):
    """A loop in which something happens where a callback is scheduled, as ``gathering.py`` does under the
    batcher's lock."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def call_soon(self, *arguments: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        self.hook()
        return super().call_soon(*arguments, **options)


WHERE = ["a thread asks", "a loop asks", "a loop goes quiet"]


@pytest.mark.promise(number=20)
@pytest.mark.parametrize("how", ["collected", "closed by a finalizer"])
@pytest.mark.parametrize("where", WHERE)
def test_a_runtime_that_ends_in_the_middle_of_a_question_does_not_deadlock(
    where: str, how: str
) -> None:
    """A garbage collection, wherever the lock is held, finds the runtime, or something in whose end the
    runtime is closed."""
    engine = ScriptedEngine(steps=lambda request: 3)
    lm = genrt.load(engine=lambda: engine)
    thread, batcher = system_thread(lm), thread_of(lm).batcher
    happened: list[bool] = []

    class Closing:
        def __init__(self, lm: AsyncLM) -> None:
            self.itself, self.lm = self, lm

        def __del__(self) -> None:
            self.lm.close()

    garbage: list[Any] = [lm if how == "collected" else Closing(lm)]
    lm.__dict__["itself"] = lm  # so that only the garbage collector finds it
    del lm

    def hook() -> None:
        if garbage and is_held(batcher.lock) and threading.current_thread() is asker:
            reference = weakref.ref(garbage.pop())
            gc.collect()
            happened.append(reference() is None)

    def asks() -> None:
        request, loop = Hooked([1]), HookedLoop()
        if where == "a loop goes quiet":
            loop.call_soon(lambda: loop.call_soon(setattr, loop, "hook", hook))
        else:
            Hooked.hook = staticmethod(hook)
        with contextlib.suppress(Closed), contextlib.closing(loop):
            if where == "a thread asks":
                asking(batcher).ask_sync([request])
            else:
                loop.run_until_complete(asking(batcher).ask([request]))

    asker = threading.Thread(target=asks, daemon=True)
    try:
        asker.start()
        asker.join(PATIENCE_SECONDS)
        thread.join(PATIENCE_SECONDS)
    finally:
        Hooked.hook = staticmethod(lambda: None)
    assert happened == [True]
    assert not asker.is_alive(), "deadlock"
    assert not thread.is_alive(), "deadlock"
    assert engine.closed == 1
    with pytest.raises(Closed):
        asking(batcher).ask_sync([A])


@pytest.mark.promise(number=20)
async def test_aclose_ends_who_holds_every_thread_of_the_loops_executor() -> None:
    """It must not queue behind them: they wait for what it ends."""
    gate = Gate()
    lm = await genrt.aload(engine=lambda: ScriptedEngine(gate=gate))
    loop = asyncio.get_running_loop()
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        loop.set_default_executor(pool)
        waiting = asyncio.create_task(asyncio.to_thread(lm.next_token_logprobs_sync, [1]))
        await loop.run_in_executor(other, gate.wait_until_held)
        closing = asyncio.create_task(lm.aclose())
        with pytest.raises(Closed):
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        gate.open()
        await asyncio.wait_for(closing, PATIENCE_SECONDS)


def test_a_close_that_overlaps_with_a_restart_leaves_no_thread_behind(start: Start) -> None:
    """The restart takes back what the close said first, before it has said the rest."""
    engines: list[ScriptedEngine] = []

    def open_engine() -> Engine:
        engines.append(ScriptedEngine())
        return engines[-1]

    thread = start(open_engine)
    opened(thread)
    thread.restart().result(PATIENCE_SECONDS)
    assert thread.batcher.close(), "what a close does when the restart has reset its flag"
    thread._wake()
    joined(thread)
    assert [engine.closed for engine in engines] == [1, 1]
    thread.restart().result(PATIENCE_SECONDS)
    assert right([A], asking(thread.batcher).ask_sync([A]))


def test_a_close_before_the_thread_of_a_restart_has_started_ends_that(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[ScriptedEngine] = []

    def open_engine() -> Engine:
        engines.append(ScriptedEngine())
        return engines[-1]

    thread = start(open_engine)
    opened(thread)
    begin = engine_thread.LoopThread.start

    def start_closed(rounds: engine_thread.LoopThread) -> None:
        thread.close()
        begin(rounds)

    with monkeypatch.context() as patched:
        patched.setattr(engine_thread.LoopThread, "start", start_closed)
        thread.restart().result(PATIENCE_SECONDS)
    joined(thread)
    assert [engine.closed for engine in engines] == [1, 1]
    thread.restart().result(PATIENCE_SECONDS)
    assert right([A], asking(thread.batcher).ask_sync([A]))


def test_calls_that_keep_coming_hold_up_no_turn(start: Start) -> None:
    engine = ScriptedEngine()
    thread = start(lambda: engine)
    opened(thread)
    calls = 0

    def again(_: object) -> None:
        nonlocal calls
        calls += 1
        if not engine.stepped and calls < 10_000:
            thread.call(again)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        thread.call(again)
        assert right(
            [A], pool.submit(asking(thread.batcher).ask_sync, [A]).result(PATIENCE_SECONDS)
        )
    assert calls < 10_000


# -- loops and threads ------------------------------------------------------------------------


@pytest.mark.promise(number=5)
async def test_the_loop_goes_on_while_a_step_is_held() -> None:
    """The loop itself opens the gate, after a hundred heartbeats: were it blocked, nobody would."""
    gate = Gate()
    lm = await genrt.aload(engine=lambda: ScriptedEngine(gate=gate))
    async with lm:
        task = asyncio.create_task(lm.next_token_logprobs([1]))
        await asyncio.to_thread(gate.wait_until_held)
        more = [asyncio.create_task(lm.next_token_logprobs([number])) for number in range(8)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        gate.open()
        assert right([A], [await task])
        for number, other in enumerate(more):
            assert right([logprobs(number)], [await other])


@pytest.mark.promise(number=22)
def test_eight_threads_of_sync_calls_get_their_own_answers() -> None:
    engine, start = ScriptedEngine(), threading.Barrier(8)

    def thread(lm: AsyncLM, own: int) -> None:
        start.wait(PATIENCE_SECONDS)
        for number in range(40):
            shared = logprobs(number // 8, number % 8)
            asked: list[Request] = [shared, logprobs(own, *shared.token_ids), shared]
            rows = lm.batch_next_token_logprobs_sync([r.token_ids for r in asked])
            assert right(asked, list(rows))

    with genrt.load(engine=lambda: engine) as lm, concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(thread, lm, own) for own in range(8)]:
            done.result(PATIENCE_SECONDS)
    sent = [request for flush in engine.submitted for request in flush]
    assert len(sent) == len(set(sent)) == 40 + 8 * 40


async def test_a_sync_call_works_inside_a_running_loop() -> None:
    async with await genrt.aload(engine=ScriptedEngine) as lm:
        waiting = asyncio.create_task(lm.next_token_logprobs([1]))
        await passes(1)
        assert right([A], [lm.next_token_logprobs_sync([1])]), "though its equal waits for the loop"
        assert right([sample(2, seed=5)], [tuple(lm.sample_sync([2], max_tokens=3, seed=5))])
        assert right([A], [await waiting])


# -- the end of the process -------------------------------------------------------------------

PROGRAMS = {
    "open": "lm.next_token_logprobs_sync([1])",
    "closed": "lm.next_token_logprobs_sync([1]); lm.close()",
    "mid-call": """
        asker = threading.Thread(target=ask, args=[lm], daemon=True)
        asker.start()
        started.acquire()
    """,
    "mid-step": """
        engine_thread.EXIT_SECONDS = 0.1
        held.acquire()
        asker = threading.Thread(target=ask, args=[lm], daemon=True)
        asker.start()
        started.acquire()
    """,
    "mid-call on a loop": """
        async def main():
            asyncio.get_running_loop().create_task(lm.next_token_logprobs([1] * 3))
            await asyncio.to_thread(started.acquire)
        asyncio.run(main())
    """,
    "collected": "lm.next_token_logprobs_sync([1]); del lm; gc.collect()",
    "collected in a cycle": "cycle = [lm]; cycle.append(cycle); del cycle, lm",
    "abandoned while opening": """
        engine_thread.EXIT_SECONDS = 0.1
        opening = lambda: started.release() or threading.Event().wait()
        threading.Thread(target=lambda: genrt.load(engine=opening), daemon=True).start()
        started.acquire()
    """,
}

SERVER = """
import asyncio, gc, json, os, signal, sys, tempfile, threading
import genrt
from genrt.runtime import thread as engine_thread
from tests.scripted import ScriptedEngine

started, held = threading.Semaphore(0), threading.Semaphore(1)

class Engine(ScriptedEngine):
    def step(self):
        started.release()
        with held:
            return super().step()

def ask(lm):
    try:
        lm.next_token_logprobs_sync([1] * 3)
    except genrt.Closed:
        pass

genrt.load(engine=Engine).close()
ends = {}
for name, program in json.load(sys.stdin).items():
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if process == 0:
            signal.alarm(30)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            lm = genrt.load(engine=lambda: Engine(steps=lambda r: 10**9 if r.token_ids[2:] else 1))
            exec(program)
            break
        _, status = os.waitpid(process, 0)
        output.seek(0)
        ends[name] = (os.waitstatus_to_exitcode(status), output.read().decode())
else:
    print(json.dumps(ends))
"""
"""Runs each program in a fork of its own, which ends as any interpreter does; imports torch once."""


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int, str]]:
    """The exit status of each program (that of a signal is negative), and all it wrote."""
    programs = {name: textwrap.dedent(program) for name, program in PROGRAMS.items()}
    served = subprocess.run(
        [sys.executable, "-c", SERVER],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_SECONDS,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert served.returncode == 0, served.stderr
    return {name: tuple(end) for name, end in json.loads(served.stdout).items()}


@pytest.mark.promise(number=21)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_interpreter_exits_cleanly(ends: dict[str, tuple[int, str]], name: str) -> None:
    assert ends[name] == (0, "")
