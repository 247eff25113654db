"""An engine over scripted replicas, on long random walks: nothing is lost, asked thrice, or stale."""

from __future__ import annotations

import pickle
import random
from collections import deque
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrt.cluster.actors import Gone
from genrt.cluster.engine import MOST_ASKED, ReplicaEngine
from genrt.cluster.replica import Facts, Settings
from genrt.engines.adapters import CONFIG_NAME
from genrt.engines.protocol import EngineStatistics
from genrt.engines.remote.flushes import NearEnd, packed_ends
from genrt.engines.remote.wire import Unpacking, packed_tokenizer
from genrt.engines.weights import SLEEPING_PARTS, SleepingPart
from genrt.errors import EngineDied, EngineFailed, InvalidAdapter, InvalidRequest
from genrt.questions.arguments import Adapter
from genrt.questions.completions import CompletionRequest, Decoding, Delta
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest

FACTS = Facts(9, 100, 64, False, False, None, packed_tokenizer(None), True)


STEPS = 1_500


@dataclass(slots=True)
class Scripted:
    """One life of a replica: its settings, what it was asked, and its unanswered calls."""

    settings: Settings | None = None
    adapters: set[Adapter] = field(default_factory=set)
    asked: list[tuple[int, Request]] = field(default_factory=list)
    ends: list[tuple[int, Any]] = field(default_factory=list)
    listeners: deque[tuple[Future[Any], float]] = field(default_factory=deque)
    opening: Future[Any] | None = None
    settings_to_come: Any = None
    opens_at: float = 0.0
    is_hung: bool = False
    asleep: frozenset[SleepingPart] = frozenset()
    wakes: bool = True
    given: int = 0

    def send(self) -> None:
        """Return the answers that there are, if they are waited for."""
        if self.listeners:
            listener, _ = self.listeners.popleft()
            ends, self.ends = self.ends, []
            counters = astuple(EngineStatistics(steps=1))
            listener.set_result(packed_ends(self.given, ends, [], counters))
            self.given += 1


class ScriptedReplicas:
    """Replicas that do what a test says. The row of a question has the version of the weights in it."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.lives = [Scripted() for _ in range(count)]
        self.times: dict[bytes, int] = {}
        self.wrong: list[str] = []
        self.dies = 0.0
        self.opens = True
        self.opened: list[int] = []
        self.now = 0.0

    def clock(self) -> float:
        """Some time passes, after which replicas say that they live."""
        self.now += 0.02
        for number, life in enumerate(self.lives):
            while not life.is_hung and life.listeners and life.listeners[0][1] < self.now:
                life.send()
            if self.opens and life.opening is not None and life.opens_at < self.now:
                opening, life.opening = life.opening, None
                opening.set_result(self._prepare(number, life, life.settings_to_come))
        return self.now

    def put(self, value: object) -> Any:
        return value

    def call(self, number: int, name: str, *arguments: Any) -> Future[Any]:
        found: Future[Any] = Future()
        life = self.lives[number]
        message: Any = None
        if name == "exchange":
            flush = Unpacking(arguments[0])
            requests = NearEnd().requests(flush, arguments[1:])
            asked = [*zip(flush.header["tickets"], requests, strict=True)]
            message = flush.header | {"asked": asked}
        is_news = message is None or bool(message["asked"] or message["withdrawn"])
        is_news &= name != "do"
        if is_news and self.random.random() < self.dies:
            found.set_exception(Gone("of a call", is_final=False))
            self.die(number)
        elif message is not None and life.settings is None:
            found.set_exception(EngineDied("it was started again"))
        elif message is not None:
            self._take(number, life, message)
            if len(life.listeners) == 2:
                found.set_result(None)
            else:
                life.listeners.append((found, self.now + message["seconds"]))
        elif name == "prepare" and not (self.opens and self.random.random() < 0.5):
            life.opening, life.settings_to_come = found, arguments[0]
            life.opens_at = self.now + 0.5 * self.random.random()
        else:
            given = pickle.loads(pickle.dumps(arguments))  # noqa: S301
            try:
                found.set_result(getattr(self, f"_{name}")(number, life, *given))
            except Exception as error:
                found.set_exception(error)
        return found

    def kill(self, number: int) -> None:
        self.die(number)

    def close(self) -> None:
        self.lives.clear()

    def die(self, number: int) -> None:
        life, self.lives[number] = self.lives[number], Scripted()
        for each in (life.opening, *(listener for listener, _ in life.listeners)):
            if each is not None:
                each.set_exception(Gone("killed", is_final=False))

    def answer(self, number: int) -> None:
        """Have a replica answer some questions, or fail at them."""
        life = self.lives[number]
        if life.is_hung:
            return
        for _ in range(self.random.randrange(len(life.asked) + 1)):
            ticket, _ = life.asked.pop(self.random.randrange(len(life.asked)))
            version = 0 if life.settings is None else life.settings.version
            result: Any = torch.full((9,), float(version))
            if self.random.random() < 0.05:
                result = self.random.choice([EngineFailed("a step"), InvalidRequest("it alone")])
            life.ends.append((ticket, result))
        if life.ends:
            life.send()

    def _prepare(self, number: int, life: Scripted, wanted: Settings) -> Facts:
        if life.settings is None:
            self.opened.append(number)
        life.settings, life.adapters = wanted, {each for each, _ in wanted.adapters}
        return FACTS

    def _take(self, number: int, life: Scripted, message: dict[str, Any]) -> None:
        for ticket, request in message["asked"]:
            assert isinstance(request, LogprobsRequest | CompletionRequest)
            context = np.array(request.token_ids, np.uint32).tobytes()
            self.times[context] = self.times.get(context, 0) + 1
            if life.asleep:
                self.wrong.append(f"replica {number} was asked in its sleep")
            if request.adapter not in {None, *life.adapters}:
                self.wrong.append(f"replica {number} has no {request.adapter}")
            life.asked.append((ticket, request))
        life.asked = [each for each in life.asked if each[0] not in message["withdrawn"]]

    def _do(self, number: int, life: Scripted, name: str, *arguments: Any) -> Any:
        if life.settings is None:
            raise EngineDied("it was started again")
        if name == "engine.weights.sleep":
            if life.asked:
                self.wrong.append(f"replica {number} was put to sleep with questions")
            life.asleep = SLEEPING_PARTS
            return 10
        if name == "engine.weights.wake_up":
            if not life.wakes:
                return EngineFailed("no memory any more")
            life.asleep -= arguments[0]
        return None

    def _add_adapter(self, number: int, life: Scripted, adapter: Adapter, files: Any) -> Any:
        if CONFIG_NAME not in files or self.random.random() < 0.1:
            return InvalidAdapter("it does not fit")
        life.adapters.add(adapter)
        return None

    def _remove_adapter(self, number: int, life: Scripted, adapter: Adapter) -> None:
        life.adapters.discard(adapter)


@pytest.mark.promise(number=39)
@pytest.mark.promise(number=40)
@pytest.mark.parametrize("seed", range(6))
def test_a_walk_loses_nothing_and_asks_no_stale_replica(seed: int, tmp_path: Path) -> None:
    counts = walk(seed, tmp_path)
    assert counts["right"] > 100
    assert counts["given up"] > 0
    assert counts["updates"] + counts["refused"] > 0
    assert counts["slept"] > 0


def walk(seed: int, tmp_path: Path) -> dict[str, int]:
    """Walk ``STEPS`` steps; return what was counted."""
    (tmp_path / CONFIG_NAME).write_text("{}")
    replicas, chosen = ScriptedReplicas(4, seed), random.Random(seed)
    engine = ReplicaEngine(replicas, 4, stall_seconds=0.4, seed=seed, clock=replicas.clock)
    replicas.dies = 0.02
    asked: dict[Request, int] = {}
    adapters: list[Adapter] = []
    counts = {"right": 0, "given up": 0, "alone": 0, "refused": 0, "updates": 0, "slept": 0}
    opened = 0

    def take() -> None:
        engine.tend()
        while engine._ends:
            for end in engine.step():
                version = asked.pop(end.request)
                if end.error is None:
                    assert end.result is not None
                    assert end.result.tolist() == [version] * 9
                    counts["right"] += 1
                elif isinstance(end.error, InvalidRequest):
                    counts["alone"] += 1
                else:
                    assert "replicas died" in str(end.error) or "a step" in str(end.error)
                    counts["given up"] += 1

    def drain() -> None:
        for _ in range(2_000):
            for number in range(4):
                replicas.answer(number)
            take()
            if not asked:
                return
        raise AssertionError(f"{len(asked)} questions are lost")

    for number in range(STEPS):
        kind = chosen.random()
        if asleep := engine.weights.asleep:
            assert len(replicas.opened) == opened, "a replica was opened in the runtime's sleep"
            assert all(
                life.settings is None or life.asleep == asleep
                for life, each in zip(replicas.lives, engine.replicas(), strict=True)
                if each.state == "healthy"
            )
            if kind < 0.1:
                weights: frozenset[SleepingPart] = frozenset({"weights"})
                parts = weights if kind < 0.05 else SLEEPING_PARTS
                try:
                    engine.weights.wake_up(parts)
                except EngineFailed:
                    assert not any(life.wakes for life in replicas.lives if life.asleep)
            elif kind < 0.2:
                replicas.die(chosen.randrange(4))
            elif kind < 0.25 and (life := chosen.choice(replicas.lives)).asleep:
                life.wakes = False
        elif kind < 0.4:
            context = [number % 9, number // 9 % 9, number // 81 % 9, *[1] * (number // 729)]
            adapter = chosen.choice([None, *adapters])
            request = LogprobsRequest(context, adapter, weights_version=engine.weights.version)
            if request not in asked:
                replicas.times.pop(request.packed, None)
                engine.submit([request])
                asked[request] = engine.weights.version
        elif kind < 0.8:
            replicas.answer(chosen.randrange(4))
        elif kind < 0.83:
            replicas.die(chosen.randrange(4))
        elif kind < 0.85:
            replicas.lives[chosen.randrange(4)].is_hung = True
        elif kind < 0.9 and asked:
            gone = chosen.sample([*asked], chosen.randrange(1, len(asked) + 1))
            engine.cancel(gone)
            for each in gone:
                del asked[each]
        elif kind < 0.92:
            try:
                engine.add_adapter(Adapter("a", number), tmp_path)
            except InvalidAdapter:
                counts["refused"] += 1
            else:
                adapters.append(Adapter("a", number))
        elif kind < 0.93 and adapters:
            adapter = adapters.pop()
            if not any(each.adapter == adapter for each in asked):
                engine.remove_adapter(adapter)
            else:
                adapters.append(adapter)
        elif kind < 0.94:
            drain()
            engine.weights.begin()
            engine.weights.load([("w", torch.zeros(1))])
            engine.weights.finish()
            counts["updates"] += 1
            for life, seen in zip(replicas.lives, engine.replicas(), strict=True):
                if life.settings is not None and seen.state == "healthy":
                    assert life.settings.version == engine.weights.version
        elif kind < 0.95:
            drain()
            engine.weights.sleep(1)
            opened = len(replicas.opened)
            counts["slept"] += 1
        take()
        assert max(replicas.times.values(), default=0) <= MOST_ASKED
    while engine.weights.asleep:
        for life in replicas.lives:
            life.wakes = True
        engine.weights.wake_up(SLEEPING_PARTS)
    drain()
    assert not engine.is_busy
    assert replicas.wrong == []
    engine.close()
    return counts


def sleeping(count: int) -> tuple[ScriptedReplicas, ReplicaEngine]:
    """Replicas that sleep."""
    replicas = ScriptedReplicas(count, 0)
    engine = ReplicaEngine(replicas, count, stall_seconds=0.4, clock=replicas.clock)
    assert engine.weights.sleep(1) == 10 * count
    return replicas, engine


def settled(replicas: ScriptedReplicas, engine: ReplicaEngine) -> list[str]:
    """Ask a question, see its answer, and return the states of the replicas."""
    engine.submit([LogprobsRequest([1], weights_version=engine.weights.version)])
    for _ in range(500):
        for number in range(len(replicas.lives)):
            replicas.answer(number)
        engine.tend()
    assert len(engine.step()) == 1
    assert replicas.wrong == []
    return [each.state for each in engine.replicas()]


def test_answers_that_overtake_others_wait_for_these() -> None:
    """The parts of a text come in two answers, the later one first."""
    replicas = ScriptedReplicas(1, 0)
    engine = ReplicaEngine(replicas, 1, stall_seconds=0.4, clock=replicas.clock)
    while not replicas.lives[0].listeners:
        engine.tend()
    text = CompletionRequest((1,), Decoding(max_tokens=2), streamed=True)
    engine.submit([text])
    while not replicas.lives[0].asked:
        engine.tend()
    [(ticket, _)], life = replicas.lives[0].asked, replicas.lives[0]
    deltas = [Delta("a", (1,)), Delta("b", (2,), start=1, text_start=1)]
    listeners = [life.listeners.popleft()[0] for _ in deltas]
    counters = astuple(EngineStatistics())
    parts = [
        packed_ends(life.given + n, [], [(ticket, each)], counters) for n, each in enumerate(deltas)
    ]
    listeners[1].set_result(parts[1])
    engine.tend()
    assert engine.progress([text]) == [None]
    listeners[0].set_result(parts[0])
    engine.tend()
    [told] = engine.progress([text])
    assert isinstance(told, Delta)
    assert (told.text, told.token_ids, told.start) == ("ab", (1, 2), 0)
    engine.close()


def test_a_sleep_does_not_wait_for_a_replica_that_is_being_opened() -> None:
    replicas = ScriptedReplicas(2, 0)
    engine = ReplicaEngine(replicas, 2, stall_seconds=0.4, clock=replicas.clock)
    replicas.opens = False
    replicas.die(0)
    for _ in range(50):
        engine.tend()
    assert replicas.lives[0].opening is not None
    assert engine.weights.sleep(1) == 10
    assert [each.state for each in engine.replicas()] == ["dead", "healthy"]
    replicas.opens = True
    for _ in range(200):
        engine.tend()
    assert replicas.opened == [0, 1], "none is opened in the runtime's sleep"
    engine.weights.wake_up(SLEEPING_PARTS)
    assert settled(replicas, engine) == ["healthy"] * 2
    assert replicas.opened == [0, 1, 0]
    engine.close()


def test_replicas_that_all_died_in_their_sleep_start_with_the_new_weights() -> None:
    replicas, engine = sleeping(2)
    for number in range(2):
        replicas.die(number)
    engine.tend()
    with pytest.raises(EngineFailed, match="wake the runtime up"):
        engine.weights.layout()
    engine.weights.wake_up(frozenset({"weights"}))
    engine.weights.begin()
    engine.weights.load([("w", torch.zeros(1))])
    engine.weights.finish()
    assert replicas.opened == [0, 1]
    engine.weights.wake_up(SLEEPING_PARTS)
    assert settled(replicas, engine) == ["healthy"] * 2
    assert [life.settings and life.settings.version for life in replicas.lives] == [1, 1]
    engine.close()
