"""generate_many: which items there are, what becomes of their errors, and what leaving early leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import Closed, EngineDied, InvalidRequest, TimedOut
from genrt.generation import Failed, Item, generate_many, generate_many_sync
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion
from tests import interrupts
from tests.inside import thread_of
from tests.scripted import Gate, passes

EOS = 4
MODEL = NGram.random([b"a", b"b", b" c", b"d", b"<end>"], order=1, seed=3, eos_token_id=EOS)
ROOM = 64


class Engine(ExactEngine):
    """An exact engine that can be held in a step, and die in one."""

    def __init__(self, *, max_batch_size: int = 4) -> None:
        super().__init__(MODEL, max_model_len=ROOM, max_batch_size=max_batch_size)
        self.gate: Gate | None = None
        self.hold_at = 0
        self.dies = False
        self.flushes: list[int] = []

    def submit(self, requests: Any) -> None:
        self.flushes.append(len(requests))
        super().submit(requests)

    def step(self) -> Any:
        if self.gate is not None and self.statistics().steps >= self.hold_at:
            self.gate.go_through()
        if self.dies:
            raise EngineDied("gone")
        return super().step()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def lm(engine: Engine) -> Iterator[AsyncLM]:
    with genrt.load(engine=lambda: engine) as opened:
        yield opened


def untimed(completion: Completion) -> Completion:
    assert isinstance(completion, Completion)
    return dataclasses.replace(completion, seconds=0.0, seconds_to_first_token=0.0)


async def nothing_left(lm: AsyncLM, engine: Engine) -> None:
    """See that no task, request or slot is left."""
    await passes(10)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    lm.clear_cache()
    await lm.next_token_logprobs([0])  # a turn, in which what was withdrawn is forgotten
    counters = lm.statistics().batcher
    assert (counters.queued, counters.in_flight, counters.waiting) == (0, 0, 0)
    assert "0 in progress" in repr(engine)
    await lm.next_token_logprobs([1])


# -- items and options ----------------------------------------------------------------------------

KINDS: list[Any] = [
    "ab",
    [0, 1],
    (0, 1),
    np.array([0, 1]),
    torch.tensor([0, 1]),
    Item("ab"),
    Item([0, 1], options={"max_tokens": 5, "seed": 11}),
]


async def test_every_item_is_answered_as_generate_answers_it(lm: AsyncLM) -> None:
    options: dict[str, Any] = {"seed": np.uint8(7), "concurrency": np.int64(2), "max_tokens": 3}
    found = {i: c async for i, c in generate_many(lm, KINDS, **options)}
    expected = [await lm.generate([0, 1], seed=7 + i, max_tokens=3) for i in range(6)]
    expected.append(await lm.generate([0, 1], seed=11, max_tokens=5))
    assert [untimed(found[i]) for i in range(7)] == [*map(untimed, expected)]


@pytest.mark.parametrize("concurrency", [1, 3, None])
async def test_seeds_decide_texts_whatever_the_concurrency_and_the_order(
    lm: AsyncLM, concurrency: int | None
) -> None:
    batch = await lm.batch_generate([[0]] * 20, seed=2**63 - 5, max_tokens=4)
    options: dict[str, Any] = {"seed": 2**63 - 5, "max_tokens": 4, "concurrency": concurrency}
    found = {i: c async for i, c in generate_many(lm, [[0]] * 20, **options)}
    assert [untimed(found[i]) for i in range(20)] == [*map(untimed, batch)]
    ordered = [(i, c) async for i, c in generate_many(lm, [[0]] * 20, in_order=True, **options)]
    assert [(i, untimed(c)) for i, c in ordered] == [*enumerate(map(untimed, batch))]


class Chatty:
    """A runtime's ``chat`` and ``generate``, which say what they were asked."""

    def __init__(self, lm: AsyncLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._lm = lm
        monkeypatch.setattr(AsyncLM, "chat", self.chat)
        monkeypatch.setattr(AsyncLM, "generate", self.generate)

    async def chat(self, messages: Any, **options: Any) -> Any:
        self.asked.append(("chat", messages, options))

    async def generate(self, prompt: Any, **options: Any) -> Any:
        self.asked.append(("generate", prompt, options))


async def test_conversations_are_asked_as_chats_with_options_of_their_own(
    lm: AsyncLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chatty = Chatty(lm, monkeypatch)
    talk, tools = [{"role": "user", "content": "a"}], [{"name": "search"}]
    items: list[Any] = [
        talk,
        Item(messages=talk, options={"regex": "a+", "temperature": 0.5}),
        Item("ab", options={"seed": 3}),
    ]
    options: dict[str, Any] = {"choice": ["a"], "tools": tools, "max_tokens": 2}
    assert len([0 async for _ in generate_many(lm, items, **options)]) == 3
    plain = {"choice": ["a"], "max_tokens": 2}
    of_call: dict[str, Any] = {"tools": tools, "chat_template_kwargs": None}
    assert chatty.asked == [
        ("chat", talk, {**plain, **of_call}),
        ("chat", talk, {"regex": "a+", "temperature": 0.5, "max_tokens": 2, **of_call}),
        ("generate", "ab", {**plain, "seed": 3}),
    ]


BAD: list[tuple[Any, str]] = [
    (5, "must be a sequence of int"),
    (None, "must be a sequence of int"),
    ([], "must not be empty|at least one"),
    ([99], "vocabulary"),
    ("z", "cannot spell"),
    ({"role": "user", "content": "a"}, r"give \[message\]"),
    ([{"role": "user", "content": "a"}], "no chat templates"),
    (Item(), "either a prompt or messages"),
    (Item("a", messages=[{"role": "user", "content": "a"}]), "either a prompt or messages"),
    (Item("a", options=5), "must be a mapping"),  # type: ignore[arg-type]
    (Item("a", options={"prompt": "b"}), "no option 'prompt'"),  # type: ignore[typeddict-unknown-key]
    (Item("a", options={"temperature": -1.0}), "temperature must be"),
    (Item("a", options={"max_tokens": 1000}), "over max_model_len"),
    (Item("a", options={"adapter": "none"}), "none"),
    (Item("a", options={"regex": "("}), "regex|expression|pattern"),
    ([0] * ROOM, "max_model_len"),
]


async def test_a_bad_item_fails_alone(lm: AsyncLM) -> None:
    items = [each for bad, _ in BAD for each in (bad, "ab")]
    walk = generate_many(lm, items, on_error="return", in_order=True, max_tokens=2)
    found = [result async for _, result in walk]
    for place, (_, message) in enumerate(BAD):
        failed, good = found[2 * place], found[2 * place + 1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, InvalidRequest)
        with pytest.raises(InvalidRequest, match=message):
            raise failed.error
        assert isinstance(good, Completion)


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"max_tokens": 0}, {"timeout": -1}, {"adapter": "none"}, {"what": 1}],
    ids=str,
)
async def test_wrong_options_of_texts_raise_for_no_items_too(
    lm: AsyncLM, options: dict[str, Any]
) -> None:
    every: list[Any] = [[], ["ab"], iter([])]
    for items in every:
        with pytest.raises(InvalidRequest):
            await anext(generate_many(lm, items, on_error="return", **options))


# -- how much at once -----------------------------------------------------------------------------


async def test_twice_what_a_step_takes_is_asked_in_one_flush(lm: AsyncLM, engine: Engine) -> None:
    walk = generate_many(lm, itertools.repeat([0]), max_tokens=2, ignore_eos=True)
    await anext(walk)
    assert engine.flushes[0] == 8
    await walk.aclose()
    await nothing_left(lm, engine)
    engine.flushes.clear()
    walk = generate_many(lm, itertools.repeat([0]), max_tokens=2, timeout=1000.0)
    await anext(walk)  # what waits for a step would lose its time
    assert engine.flushes[0] == 4
    await walk.aclose()
    await nothing_left(lm, engine)


@pytest.mark.parametrize(("in_order", "most"), [(False, 6), (True, 12)])
async def test_an_endless_source_is_read_as_far_as_there_is_room(
    lm: AsyncLM, in_order: bool, most: int
) -> None:
    """A caller that takes no results holds up the source, and not the other way round."""
    source = itertools.count()
    walk = generate_many(
        lm, ([0] for _ in source), in_order=in_order, concurrency=3, max_tokens=2, ignore_eos=True
    )
    for taken in range(1, 4):
        await anext(walk)
        for _ in range(60):  # turns of the engine, in which all texts end that may run
            await asyncio.to_thread(thread_of(lm).call(lambda _: None).result)
        read = next(source) - (taken - 1)  # of which this loop took some
        assert read == taken + most
    await walk.aclose()


# -- errors -----------------------------------------------------------------------------------------


async def test_an_items_error_is_raised_with_its_number(lm: AsyncLM, engine: Engine) -> None:
    items: list[Any] = ["ab", "ba", [99], "ab"]
    walk = generate_many(lm, items, in_order=True, max_tokens=2)
    assert [(await anext(walk))[0] for _ in range(2)] == [0, 1]
    with pytest.raises(InvalidRequest, match="vocabulary") as raised:
        await anext(walk)
    assert raised.value.__notes__ == ["item 2 of generate_many"]
    await nothing_left(lm, engine)
    engine.dies = True
    with pytest.raises(EngineDied):
        await anext(generate_many(lm, itertools.repeat([0]), on_error="return"))


async def test_what_was_drawn_before_a_timeout_is_kept(
    lm: AsyncLM, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await lm.generate([0], seed=3, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "seed": 3}
    walk = generate_many(lm, [[0]], on_error="return", timeout=30.0, **options)
    assert [untimed(c) async for _, c in walk if isinstance(c, Completion)] == [untimed(whole)]

    engine.hold_at = engine.statistics().steps + 20
    engine.gate = Gate()
    walk = generate_many(lm, [[0]], on_error="return", timeout=1000.0, **options)
    first = asyncio.ensure_future(anext(walk))
    await asyncio.to_thread(engine.gate.wait_until_held)
    await passes(10)
    loop = asyncio.get_running_loop()
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + 1000.0)
    _, failed = await first
    monkeypatch.undo()
    engine.gate.open()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TimedOut)
    assert failed.partial is not None
    assert failed.partial.prompt_token_ids == (0,)
    drawn = len(failed.partial.token_ids)
    assert 0 < drawn <= 20
    assert failed.partial.token_ids == whole.token_ids[:drawn]
    assert whole.text.startswith(failed.partial.text)
    await walk.aclose()
    await nothing_left(lm, engine)


@pytest.mark.parametrize("on_error", ["raise", "return"])
async def test_a_closed_runtime_ends_everything(on_error: Any) -> None:
    engine = Engine()
    lm = await genrt.aload(engine=lambda: engine)
    read = 0

    def items() -> Iterator[list[int]]:
        nonlocal read
        while True:
            read += 1
            yield [0]

    engine.gate = Gate()
    walk = generate_many(lm, items(), on_error=on_error, max_tokens=2)
    first = asyncio.create_task(anext(walk))
    await asyncio.to_thread(engine.gate.wait_until_held)
    thread_of(lm).close(wait=False)
    with pytest.raises(Closed):
        await first
    engine.gate.open()
    assert read <= 16
    with pytest.raises(Closed):
        await anext(generate_many(lm, ["ab"], on_error=on_error))
    await passes()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await lm.aclose()


# -- leaving --------------------------------------------------------------------------------------


async def break_off(lm: AsyncLM, items: Any, after: int, **options: Any) -> None:
    async for _ in generate_many(lm, items, **options):
        if not after:
            break
        after -= 1


async def close_it(lm: AsyncLM, items: Any, after: int, **options: Any) -> None:
    walk = generate_many(lm, items, **options)
    for _ in range(after):
        await anext(walk)
    await walk.aclose()


async def cancel_it(lm: AsyncLM, items: Any, after: int, **options: Any) -> None:
    async def walk() -> None:
        async for _ in generate_many(lm, items, **options):
            pass

    task = asyncio.create_task(walk())
    await passes(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


LEAVING = [break_off, close_it, cancel_it]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("in_order", [False, True])
async def test_leaving_early_leaves_nothing(
    lm: AsyncLM, engine: Engine, leave: Callable[..., Any], in_order: bool
) -> None:
    opened = closed = 0

    async def items() -> AsyncIterator[list[int]]:
        nonlocal opened, closed
        opened += 1
        try:
            for i in itertools.count():
                yield [i % 4]
        finally:
            await asyncio.sleep(0)
            closed += 1

    for after in range(0, 25, 3):
        await leave(lm, items(), after, in_order=in_order, max_tokens=5, ignore_eos=True)
        await passes(10)
        assert closed == opened
    assert opened >= 8
    await nothing_left(lm, engine)


async def test_a_walk_that_nobody_began_has_read_nothing(lm: AsyncLM, engine: Engine) -> None:
    source = iter([[0]])
    generate_many(lm, source)
    assert next(source) == [0]
    await nothing_left(lm, engine)


# -- the synchronous twin -----------------------------------------------------------------------------


def test_the_twin_yields_the_same(lm: AsyncLM) -> None:
    items = [[i % 4] for i in range(300)]
    options: dict[str, Any] = {"seed": 5, "max_tokens": 3, "in_order": True}
    expected = [*map(untimed, lm.batch_generate_sync(items, seed=5, max_tokens=3))]

    def texts(_: int) -> list[Completion]:
        return [untimed(c) for _, c in generate_many_sync(lm, items, **options)]

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(texts, range(3))] == [expected] * 3


def test_the_twin_raises_what_an_item_or_the_source_raises(lm: AsyncLM) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        list(generate_many_sync(lm, [[0], [99]]))
    found: list[int] = []
    with pytest.raises(ZeroDivisionError):
        found.extend(n for n, _ in generate_many_sync(lm, ([1 // i] for i in (1, 1, 0))))
    assert sorted(found) == [0, 1]  # the results before it


def threads_of_ours() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "genrt"]


def test_leaving_the_twin_early_leaves_nothing(lm: AsyncLM, engine: Engine) -> None:
    for after in range(0, 200, 20):
        for number, _ in enumerate(generate_many_sync(lm, itertools.repeat([0]), max_tokens=2)):
            if number == after:
                break
        assert threads_of_ours() == []
    asyncio.run(nothing_left(lm, engine))


def test_a_twin_may_be_collected_in_its_own_thread(lm: AsyncLM, engine: Engine) -> None:
    dropped, collected = threading.Event(), threading.Event()

    def items() -> Iterator[list[int]]:
        for number in itertools.count():
            if number == 20:
                dropped.wait()
                gc.collect()
                collected.set()
            yield [0]

    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [generate_many_sync(lm, items(), max_tokens=1, concurrency=2)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        dropped.set()
        assert collected.wait(30)
    finally:
        gc.enable()
    for thread in threads_of_ours():
        thread.join(30)
    assert threads_of_ours() == []
    asyncio.run(nothing_left(lm, engine))


@pytest.mark.proof
# An interrupt before a coroutine has a task leaves it so, as anywhere in Python.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_interrupt_of_the_twin_at_any_line_leaves_nothing(lm: AsyncLM, engine: Engine) -> None:
    interrupted = 0
    for number in itertools.count(1):
        found = list[tuple[int, Any]]()
        try:
            with interrupts.at_line(number) as moment:
                walk = generate_many_sync(lm, [[0]] * 3, max_tokens=1, seed=1, in_order=True)
                found.extend(walk)
        except KeyboardInterrupt:
            interrupted += 1
        walk = None  # type: ignore[assignment]
        gc.collect()
        assert threads_of_ours() == [], moment.fired
        assert [place for place, _ in found] == [*range(len(found))]
        if not moment.fired:
            break
    assert len(found) == 3
    assert interrupted > 20
    asyncio.run(nothing_left(lm, engine))


EXITING = """
import itertools
import genrt
from genrt.engines.exact import NGram
from genrt.generation import generate_many_sync

lm = genrt.load(NGram.random(5), engine="exact")
walk = generate_many_sync(lm, itertools.repeat([0]), max_tokens=2)
print(next(walk)[0] >= 0)
"""


@pytest.mark.proof
def test_a_process_exits_with_a_twin_that_was_not_left() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# -- progress -----------------------------------------------------------------------------------------


def test_a_bar_shows_how_far_it_is(lm: AsyncLM, capfd: pytest.CaptureFixture[str]) -> None:
    items = [[0], [99], [1]]
    list(generate_many_sync(lm, items, on_error="return", progress=True, max_tokens=2))
    err = capfd.readouterr().err
    last = err.rstrip().rsplit("\r", 1)[-1]
    assert "texts: 100%" in last
    assert "3/3" in last
    assert "failed=1" in last
    list(generate_many_sync(lm, iter(items[:1]), max_tokens=2))
    assert capfd.readouterr().err == ""
