"""Pause, resume, sleep, wake_up, updates, adapters and restarts, in every pair and order, each cancelled
or not: nothing is computed asleep or by half of the weights, and everybody is answered in the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.weights import SLEEPING_PARTS, NamedTensors, SleepingPart, TensorForm
from genrt.errors import EngineDied, EngineFailed, GenrtError, InvalidRequest
from genrt.lm import AsyncLM
from genrt.runtime.cache import RowCache
from genrt.runtime.lifecycle import State
from genrt.runtime.thread import EngineThread, LoopThread
from genrt.runtime.weights import Transfers
from tests.inside import system_thread, unlogged, weight_copies_of
from tests.scripted import ProtocolViolation

SIZE = 3
MODELS = [NGram.random(SIZE, order=1, seed=seed) for seed in range(12)]
LORA = NGram.random(SIZE, order=1, seed=99)


VIOLATIONS: list[str] = []


def violated(message: str) -> ProtocolViolation:
    """Return what to raise; an engine after this one may hide it."""
    VIOLATIONS.append(message)
    return ProtocolViolation(message)


class Parts:
    """The weights of ``StrictEngine``, a tensor for each token; whatever must not be is a violation.

    ``sleep(2)`` drops them. ``in_move`` is called while memory is moved, ``wakes`` is whether it can be
    moved back.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self.asleep: frozenset[SleepingPart] = frozenset()
        self.parts: dict[str, torch.Tensor] = {}
        self.is_lost = False
        self.wakes = True
        self.in_move: Callable[[], object] = lambda: None

    def check_usable(self) -> None:
        if self.asleep or self.is_lost or self.parts:
            raise violated(f"computes with {self.asleep}, {self.is_lost}, {[*self.parts]}")

    def layout(self) -> dict[str, TensorForm]:
        form = TensorForm((SIZE,), (torch.float32,))
        return {f"table.{n}": form for n in range(SIZE)}

    def checkpoint(self) -> list[Path]:
        return [CHECKPOINT[0]]

    def begin(self) -> None:
        self._check_awake()
        self._own.begin()

    def load(self, tensors: NamedTensors) -> None:
        self._check_awake()
        for name, tensor in tensors:
            self.parts[name] = tensor

    def finish(self) -> None:
        self._check_awake()
        table = torch.stack([self.parts.pop(f"table.{n}") for n in range(SIZE)])
        self._own.load([("table", table)])
        self._own.finish()
        self.is_lost = False

    def _check_awake(self) -> None:
        if "weights" in self.asleep:
            raise violated("weights that sleep are written")

    def check_receives(self) -> None:
        pass

    def connect(self, init_info: Any) -> None:
        pass

    def disconnect(self) -> None:
        pass

    def receive(self, update_info: Any) -> None:
        self.load(update_info)

    def check_sleep(self) -> None:
        pass

    def sleep(self, level: int) -> int:
        if self.asleep or self.parts:
            raise violated(f"falls asleep with {self.asleep}, {[*self.parts]}")
        self.in_move()
        self.asleep, self.is_lost = SLEEPING_PARTS, level == 2
        return 1

    def wake_up(self, parts: frozenset[SleepingPart]) -> None:
        if not parts <= self.asleep:
            raise violated(f"{parts} wake, but {self.asleep} sleep")
        self.in_move()
        if not self.wakes:
            raise EngineFailed("there is no memory any more")
        self.asleep -= parts


class StrictEngine(ExactEngine):
    """An exact engine that computes with whole weights that are awake, or not at all."""

    def __init__(self) -> None:
        super().__init__(MODELS[0])
        self.weights: Any = Parts(self.weights)

    def submit(self, requests: Any) -> None:
        self.weights.check_usable()
        super().submit(requests)

    def step(self) -> Any:
        self.weights.check_usable()
        return super().step()

    def add_adapter(self, adapter: Any, path: Path) -> None:
        self.weights.check_usable()  # vLLM computes rows with it
        super().add_adapter(adapter, path)

    def remove_adapter(self, adapter: Any) -> None:
        self._check_adapters()
        super().remove_adapter(adapter)

    def _check_adapters(self) -> None:
        if "weights" in self.weights.asleep or self.weights.parts:
            raise violated("adapters change in an update or a sleep")


class ByHand(LoopThread):
    """The engine's thread, whose rounds the test takes."""

    def __init__(self, round: Callable[[], float | None], close: Callable[..., None]) -> None:
        super().__init__(round, close)
        self.is_over = False

    def go_round(self) -> None:
        if not self.is_over:
            self.is_over = self._round() is None

    def start(self) -> None:
        self.go_round()

    def wake(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        while not self.is_over:
            self.go_round()

    def is_alive(self) -> bool:
        return not self.is_over

    def open(self, open_engine: Callable[[], Any]) -> Any:
        return open_engine()


CHECKPOINT: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The directory of a checkpoint, and of an adapter."""
    directory = tmp_path_factory.mktemp("lora")
    (directory / "adapter_config.json").write_text("{}", encoding="utf-8")
    save_file({"table": LORA.table}, directory / "adapter_model.safetensors")
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file(tensors_of(MODELS[0]), checkpoint)
    CHECKPOINT[:] = [checkpoint, directory]
    yield
    CHECKPOINT.clear()


def tensors_of(model: NGram) -> dict[str, torch.Tensor]:
    return {f"table.{n}": model.table[n].clone() for n in range(SIZE)}


class World:
    """One runtime in the test's own thread, the work that was begun on it, and a client that asks."""

    def __init__(self, **options: Any) -> None:
        VIOLATIONS.clear()
        cache = RowCache(0)
        self.thread = EngineThread(StrictEngine, cache, make_thread=ByHand, **options)
        self.lm = AsyncLM(self.thread, cache, self.thread.engine)
        self.versions = itertools.count(1)
        self.begun: list[asyncio.Future[Any]] = []
        self.asked: list[asyncio.Task[Any]] = []
        self.whole = [MODELS[0]]

    @property
    def rounds(self) -> ByHand:
        found = system_thread(self.thread)
        assert isinstance(found, ByHand)
        return found

    def ask(self) -> None:
        self.asked.append(asyncio.ensure_future(self._ask()))

    async def _ask(self) -> None:
        rows = await self.lm.batch_next_token_logprobs([[token] for token in range(SIZE)])
        assert any(
            torch.allclose(rows, torch.stack([model.row([token]) for token in range(SIZE)]))
            for model in self.whole
        )

    def begin(self, name: str) -> asyncio.Future[Any]:
        work: Any = OPERATIONS[name](self)
        if isinstance(work, Coroutine):
            self.begun.append(asyncio.ensure_future(work))
        else:
            self.begun.append(done := asyncio.get_running_loop().create_future())
            done.set_result(None)
        return self.begun[-1]

    async def go(self, schedule: str) -> None:
        """Take a pass of the loop (``p``), or a round of the engine (``r``), for each letter."""
        for letter in schedule:
            if letter == "p":
                await asyncio.sleep(0)
            else:
                self.rounds.go_round()

    async def update(self, *, keep: bool = True) -> None:
        number = next(self.versions)
        model = MODELS[number]

        async def chunks() -> AsyncIterator[Any]:
            for name, tensor in tensors_of(model).items():
                yield {name: tensor}

        self.whole.append(model)
        await self.lm.update_weights(chunks(), keep=keep)

    async def done(self, work: asyncio.Future[Any]) -> None:
        """Go on until this is done."""
        for _ in range(100):
            if work.done():
                return
            await self.go("pr")
        raise AssertionError(f"{work} is never done: {self.lm}, {self.thread.lifecycle.state}")

    async def end(self) -> None:
        """See that everybody is answered once the runtime goes on, by whole weights."""
        for _ in range(100):
            await self.done(wake := asyncio.ensure_future(self.lm.wake_up()))
            wake.exception()
            resumed(self)
            await self.go("pr" * 8)
            if all(each.done() for each in (*self.begun, *self.asked)):
                break
        for each in self.begun:
            assert each.done(), each
            if not each.cancelled() and (error := each.exception()) is not None:
                assert isinstance(error, GenrtError), error
        for task in self.asked:
            assert task.done(), task
            with contextlib.suppress(GenrtError):
                task.result()
        assert VIOLATIONS == []
        assert self.thread.lifecycle.state == "running"
        if (
            not self.thread.alive
        ):  # only an update that was cancelled in the middle may end an engine
            with pytest.raises(EngineDied, match="given up in the middle"):
                self.lm.next_token_logprobs_sync([0])
            self.lm.restart()
        self.ask()
        await self.done(self.asked[-1])
        self.asked[-1].result()
        assert len(self.copies()) <= 1
        self.lm.close()

    def copies(self) -> list[Path]:
        """The directories of copied weights."""
        return weight_copies_of(self.thread)


def removed(world: World) -> None:
    with contextlib.suppress(InvalidRequest):
        world.lm.remove_adapter("a")


def resumed(world: World) -> None:
    with contextlib.suppress(InvalidRequest):
        world.lm.resume()


OPERATIONS: dict[str, Callable[[World], Any]] = {
    "pause": lambda world: world.lm.pause(),
    "pause and restart questions": lambda world: world.lm.pause(pending="restart"),
    "resume": resumed,
    "sleep": lambda world: world.lm.sleep(),
    "sleep deeply": lambda world: world.lm.sleep(2, pending="restart"),
    "wake_up": lambda world: world.lm.wake_up(),
    "wake the weights": lambda world: world.lm.wake_up(["weights"]),
    "wake the cache": lambda world: world.lm.wake_up(["kv_cache"]),
    "update": lambda world: world.update(),
    "restart": lambda world: world.lm.restart(),
    "add_adapter": lambda world: world.lm.add_adapter("a", CHECKPOINT[1]),
    "remove_adapter": removed,
}

SCHEDULES = ("", "p", "prprprp", "pr" * 12)
"""What happens between the beginning of one operation and that of the next, or a cancellation."""


async def walk(*events: tuple[str, str], asking: bool = True, **options: Any) -> None:
    """Begin operations, each followed by a schedule; one named ``cancel 0`` cancels the first begun."""
    world = World(**options)
    adding = world.begin("add_adapter")
    await world.go("pr" * 4)
    adding.result()
    world.begun.clear()
    world.ask()
    await world.go("p")
    for name, schedule in events:
        if name.startswith("cancel"):
            number = int(name.split()[1])
            if number < len(world.begun):
                world.begun[number].cancel()
        else:
            world.begin(name)
        if asking:
            world.ask()
        await world.go(schedule)
    await world.end()


@pytest.mark.parametrize("first", OPERATIONS)
async def test_every_pair_in_every_order(first: str) -> None:
    for second, schedule in itertools.product(OPERATIONS, SCHEDULES):
        await walk((first, schedule), (second, ""))


@pytest.mark.parametrize("first", OPERATIONS)
async def test_every_pair_of_which_one_is_cancelled(first: str) -> None:
    for second, schedule, number in itertools.product(OPERATIONS, SCHEDULES[2:3], (0, 1)):
        await walk((first, "prpr"), (second, schedule), (f"cancel {number}", ""))


@pytest.mark.parametrize("second", ["sleep", "wake_up", "update", "restart", "pause"])
@pytest.mark.parametrize("first", ["pause", "sleep", "sleep deeply"])
async def test_every_operation_once_an_engine_stands_still_or_sleeps(
    first: str, second: str
) -> None:
    for third in OPERATIONS:
        await walk((first, "pr" * 6), (second, "prp"), (third, ""))


names = st.sampled_from([*OPERATIONS, *(f"cancel {n}" for n in range(6))])


@settings(deadline=None)
@given(
    st.lists(st.tuples(names, st.text("pr", max_size=8)), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_any_walk(events: list[tuple[str, str]], asking: bool, restarts: bool) -> None:
    asyncio.run(walk(*events, asking=asking, restarts=restarts))


# -- by name ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_sleep_that_is_cancelled_while_memory_is_moved_wakes(ahead: bool) -> None:
    """In a pause of another's, the pause goes on."""
    world = World()
    if ahead:
        world.begin("pause")
        await world.go("pr" * 4)
    sleep = world.begin("sleep")
    world.thread.engine.weights.in_move = sleep.cancel  # type: ignore[attr-defined]
    await world.go("pr" * 6)
    world.thread.engine.weights.in_move = lambda: None  # type: ignore[attr-defined]
    await world.go("pr" * 6)
    assert sleep.cancelled()
    assert not world.thread.engine.weights.asleep  # type: ignore[attr-defined]
    assert world.thread.lifecycle.state == ("drained" if ahead else "running")
    await world.end()


async def test_weights_that_were_dropped_and_not_kept_never_answer() -> None:
    world = World()

    async def updated(*, keep: bool) -> None:
        world.begun.append(asyncio.ensure_future(world.update(keep=keep)))
        await world.done(world.begun[-1])
        world.begun[-1].result()

    await updated(keep=False)
    for keep in (False, True):
        await world.done(sleep := world.begin("sleep deeply"))
        assert sleep.result() == 1
        for _ in range(2):
            await world.done(wake := asyncio.ensure_future(world.lm.wake_up()))
            with pytest.raises(EngineFailed, match="no copy was kept"):
                wake.result()
            with pytest.raises(InvalidRequest, match="the engine sleeps"):
                world.lm.resume()
            assert world.thread.lifecycle.state == "asleep"
        await updated(keep=keep)  # the way out
        assert world.thread.lifecycle.state == "asleep"
        await world.done(wake := asyncio.ensure_future(world.lm.wake_up()))
        assert wake.result() is True
    await world.end()


async def test_a_wake_up_that_fails_leaves_the_engine_asleep() -> None:
    world = World()
    world.begin("sleep")
    await world.go("pr" * 8)
    world.thread.engine.weights.wakes = False  # type: ignore[attr-defined]
    wake = world.begin("wake_up")
    await world.go("pr" * 8)
    with pytest.raises(EngineFailed, match="no memory"):
        wake.result()
    with pytest.raises(InvalidRequest, match="the engine sleeps"):
        world.lm.resume()
    assert world.thread.lifecycle.state == "asleep"
    world.thread.engine.weights.wakes = True  # type: ignore[attr-defined]
    await world.end()


STATES: list[tuple[State, dict[str, Any], str]] = [
    ("running", {}, ""),
    ("draining", {"pause": None}, "prp"),
    ("drained", {"pause": None}, "pr" * 8),
    ("updating", {"update": None}, "pr" * 20),
    ("asleep", {"sleep": 1}, "pr" * 8),
    ("asleep", {"sleep": 1, "sleep deeply": InvalidRequest}, "pr" * 8),
    ("asleep", {"pause": None, "sleep": 1}, "pr" * 12),
    ("asleep", {"sleep": 1, "wake the weights": False}, "pr" * 8),
    ("running", {"sleep": 1, "wake_up": True}, "pr" * 8),
    ("running", {"pause": None, "resume": None}, "pr" * 8),
    ("running", {"pause": None, "restart": None}, "pr" * 8),
    ("running", {"sleep": 1, "restart": None}, "pr" * 8),
    ("running", {"update": EngineFailed, "restart": None}, "pr" * 10),
]
"""A state, the operations that lead to it with what each returns, and the schedule after each."""


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("state", "operations", "schedule"), STATES)
async def test_the_states_by_their_names(
    state: State, operations: dict[str, Any], schedule: str, at_once: bool
) -> None:
    """All operations return the same if they begin at once, and the engine then comes to the same state,
    but for those that do not wait for the ones before."""
    world = World()
    if state == "draining":
        world.asked.append(asyncio.ensure_future(world.lm.sample([0], max_tokens=20)))
    world.ask()
    at_once = at_once and not {"resume", "restart"} & {*operations}
    await world.go("p" if at_once else "pr" * 3)  # to the question's queue, or its answer
    seen = [world.thread.lifecycle.state]
    for number, name in enumerate(operations, 1):
        world.begin(name)
        for letter in "" if at_once and number < len(operations) else schedule * (1 + at_once):
            await world.go(letter)
            seen.append(world.thread.lifecycle.state)
    assert state in seen
    if state != "updating" and state != "draining":
        assert seen[-1] == state
        assert world.asked[0].done() or not operations
        for work, returned in zip(world.begun, operations.values(), strict=True):
            if isinstance(returned, type):
                assert isinstance(work.exception(), returned)
            else:
                assert work.result() == returned
    await world.end()


class Watched:
    """A lock that knows whether it is taken while something is collected."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_collecting = False
        self.was_taken = False

    def __enter__(self) -> None:
        self.was_taken |= self.is_collecting
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("rounds", range(0, 8, 2))
@pytest.mark.parametrize(
    "name", ["pause", "sleep", "sleep deeply", "wake_up", "update", "add_adapter", "transfer"]
)
def test_what_is_collected_with_its_loop_takes_no_lock_and_ends(name: str, rounds: int) -> None:
    """Whatever thread collects it may hold one of them."""
    loop = asyncio.new_event_loop()

    async def begin() -> World:
        world = World()
        if name == "transfer":
            work = Transfers(world.lm._weights).start("finish")
            world.begun.append(asyncio.ensure_future(work))
        else:
            world.begin(name)
        await world.go("pr" * rounds)
        return world

    world = loop.run_until_complete(begin())
    thread = world.thread
    lock, calls = Watched(thread.batcher.lock), Watched(thread._calls_lock)
    thread.batcher.lock = thread.lifecycle._lock = lock  # type: ignore[assignment]
    thread._calls_lock = calls  # type: ignore[assignment]
    [work] = world.begun
    world.begun.clear()
    is_over = work.done()
    unlogged(work)
    del work
    loop.close()
    for _ in range(6):
        lock.is_collecting = calls.is_collecting = True
        gc.collect()
        lock.is_collecting = calls.is_collecting = False
        assert [lock.was_taken, calls.was_taken] == [False, False]
        world.rounds.go_round()
    if not (is_over and name == "transfer"):  # which goes on, and is its owner's to end
        asyncio.run(world.end())


# -- restarts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restart", "death", "close"])
async def test_an_update_whose_trainer_hangs_ends_with_its_engine(how: str) -> None:
    """It leaves no copy, and holds up no other."""
    world = World(restarts=how == "death")
    never = asyncio.Event()

    async def chunks() -> AsyncIterator[Any]:
        yield {"table.0": MODELS[1].table[0].clone()}
        await never.wait()

    def die(_: object) -> None:
        raise EngineDied("its process has gone")

    hung = asyncio.ensure_future(world.lm.update_weights(chunks()))
    if how == "close":
        after = world.begin("update")
    await world.go("pr" * 20)
    assert world.thread.lifecycle.state == "updating"
    if how == "close":
        assert len(world.copies()) == 2
        world.lm.close()
        for update in (hung, after):
            await world.done(update)
            assert isinstance(update.exception(), GenrtError)
        assert world.copies() == []
        return
    if how == "restart":
        world.lm.restart()
    else:
        world.thread.call(die, world.thread.lifecycle.owner)
    world.ask()
    await world.done(hung)
    with pytest.raises(EngineFailed, match="restarted"):
        hung.result()
    assert world.lm.weights_version == 0
    await world.done(after := world.begin("update"))
    after.result()
    await world.end()


# -- with threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("is_in_part", [False, True])
async def test_an_engine_that_dies_asleep_is_opened_asleep(level: int, is_in_part: bool) -> None:
    """Others, such as a trainer, were given the memory of its device."""
    world = World(restarts=True)
    await world.done(asyncio.ensure_future(world.lm.sleep(level)))
    if is_in_part:
        await world.done(asyncio.ensure_future(world.lm.wake_up(["weights"])))
    dead: Any = world.thread.engine
    asleep = dead.weights.asleep
    assert asleep == ({"kv_cache"} if is_in_part else SLEEPING_PARTS)

    def die(_: object) -> None:
        raise EngineDied("its process has gone")

    world.thread.call(die, world.thread.lifecycle.owner)
    world.ask()
    await world.go("pr" * 6)
    opened: Any = world.thread.engine
    assert opened is not dead
    assert opened.weights.asleep == asleep
    assert world.thread.lifecycle.state == "asleep"
    assert not world.asked[0].done()
    await world.end()
