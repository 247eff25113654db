"""Replicas without processes: real workers over exact engines, on a clock of their own, with every fault.

``SimulatedReplicas`` is a Transport whose replicas die, hang, wedge, fail and start slowly, as a test
says. ``Simulation`` asks an engine over them, and keeps account: what was asked ends once, right by the
weights and adapters that there are, or with the error that tells of too many deaths.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from genrt.cluster.engine import ReplicaEngine
from genrt.cluster.health import ReplicaLimits
from genrt.cluster.messages import AskedNumbers, RemotePopulations, dump_message, load_message
from genrt.cluster.transport import Came, Gone, Pulsed
from genrt.cluster.worker import Worker
from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME
from genrt.engines.exact import NGram
from genrt.engines.protocol import Finished
from genrt.engines.weights import SLEEPING_PARTS, SleepingPart
from genrt.errors import EngineDied, EngineFailed
from genrt.questions.contexts import Adapter
from genrt.questions.draws import PopulationDraw
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from tests.answers import is_row
from tests.cluster.simulated_populations import KeepingEngine, Seen, SimulatedPopulations
from tests.runtime.test_pauses import SleepyWeights

LIMITS = ReplicaLimits(
    probe_seconds=1.0,
    most_silent=3,
    stall_seconds=20.0,
    most_failures=2,
    open_seconds=30.0,
    most_restarts=1000,
    refill_seconds=1.0,
)


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Simulated:
    """One life of a replica. ``state`` is running, hung or wedged; it is open from ``opens`` on."""

    life: int
    opens: float
    worker: Worker | None = None
    state: str = "running"
    fails: bool = False
    held: RemotePopulations = field(default_factory=RemotePopulations)
    inbox: deque[bytes] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    pulses: int = 0


class SleepyEngine(KeepingEngine):
    """Gives back its memory; nothing may be computed meanwhile."""

    def __init__(self, model: NGram, seen: Seen) -> None:
        super().__init__(model, seen)
        self.weights: Any = SleepyWeights(self.weights)

    def step(self) -> list[Finished]:
        if self.weights.asleep:
            self._seen.wrong.append("it computes in its sleep")
        return super().step()


class FailingWorker(Worker):
    """A worker whose engine's steps fail while ``is_failing``."""

    is_failing = False

    def _stepped(self) -> Any:
        if self.is_failing:
            self.answering.engine.step = _fail  # type: ignore[method-assign]
        else:
            vars(self.answering.engine).pop("step", None)
        return super()._stepped()


def _fail() -> Any:
    raise RuntimeError("the device fell off")


class SimulatedReplicas:
    """A Transport to replicas in this process."""

    def __init__(self, make: Callable[[], Any], clock: Clock, *, seed: int = 0) -> None:
        self.numbers = AskedNumbers()
        self.alive: dict[int, Simulated] = {}
        self.opening_seconds = 0.5
        self.started: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self._make = make
        self._clock = clock
        self._random = random.Random(seed)
        self._came: list[Any] = []

    def start(self, number: int, life: int) -> None:
        self.started.append((number, life))
        self.alive[number] = Simulated(life, self._clock() + self.opening_seconds)

    def send(self, number: int, message: Sequence[Any]) -> None:
        if number in self.alive:
            replica = self.alive[number]
            replica.inbox.append(dump_message(message, self.numbers.of, held=replica.held))
            if message[0] == "ask":
                self.asked.append(number)

    def probe(self, number: int) -> None:
        if number in self.alive:
            self.alive[number].pulses += 1

    def kill(self, number: int) -> None:
        self.alive.pop(number, None)

    def die(self, number: int) -> None:
        """Have a replica be gone, with what it has not told."""
        if (dead := self.alive.pop(number, None)) is not None:
            self._came.append(Gone(number, dead.life, "killed"))

    def wait(self, seconds: float) -> list[Any]:
        came, self._came = self._came, []
        for number in self._random.sample([*self.alive], len(self.alive)):
            replica = self.alive[number]
            try:
                came += self._turn(number, replica)
            except EngineDied as error:  # as of weights whose files are gone: there are newer ones
                del self.alive[number]
                came.append(Gone(number, replica.life, str(error)))
        self._clock.now += 0.001 if came else min(max(seconds, 0.001), 60.0)
        return came

    def _turn(self, number: int, replica: Simulated) -> list[Any]:
        came: list[Any] = []
        life = replica.life
        if replica.state == "hung":
            return came
        if replica.pulses:
            replica.pulses = 0
            rounds = 0 if replica.worker is None else replica.worker.rounds
            came.append(Pulsed(number, life, rounds))
        if replica.state == "wedged" or self._clock() < replica.opens:
            return came
        if replica.worker is None:
            replica.worker = FailingWorker(
                self._make(), lambda *m, rows=(): replica.outbox.append(dump_message(m))
            )
            came.append(Came(number, life, ("opened", replica.worker.facts())))
        replica.worker.is_failing = replica.fails  # type: ignore[attr-defined]
        while replica.inbox:
            replica.worker.take(*load_message(replica.inbox.popleft(), replica.worker.asked))
        replica.worker.turn()
        is_late = self._random.random() < 0.3  # it crosses what is sent meanwhile
        while replica.outbox and not is_late:
            came.append(Came(number, life, load_message(replica.outbox.popleft())))
        return came

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self.alive.clear()


class Simulation:
    """An engine over simulated replicas, with an account of what it was asked.

    Attributes:
        waiting: what is asked and has not ended, in order.
        given_up: how many questions ended with too many deaths.
        seen: what the engines of replicas saw.
        refits: how often all replicas were given new weights.
    """

    def __init__(self, folder: Path, count: int = 4, *, seed: int = 0, **options: Any) -> None:
        self.folder = folder
        self.clock = Clock()
        self.model = NGram.random(5, order=1, seed=seed)
        opened = self.model  # as every replica finds it, whatever has been loaded since
        self.seen = Seen()
        self.transport = SimulatedReplicas(
            lambda: SleepyEngine(opened, self.seen), self.clock, seed=seed
        )
        self.engine = ReplicaEngine(
            self.transport,
            count,
            limits=LIMITS,
            numbers=self.transport.numbers,
            seed=seed,
            clock=self.clock,
            **options,
        )
        self.adapters: dict[Adapter, NGram] = {}
        self.populations = SimulatedPopulations(self.engine.fleet, self.adapters, seed)
        self.waiting: dict[Request, None] = {}
        self.given_up = self.ended = self.refits = 0
        self._version = self._adapter = 0
        self._gone: set[Request] = set()
        self._random = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)

    def ask(self, count: int) -> None:
        """Ask for rows that are not asked for yet."""
        chosen: dict[Request, None] = {}
        for _ in range(0 if self.is_paused else count):
            ids = [self._random.randrange(5) for _ in range(self._random.randrange(1, 20))]
            adapter = self._random.choice([None, *self.adapters])
            request = LogprobsRequest(ids, adapter, weights_version=self._version)
            if request not in self.waiting:
                chosen[request] = None
        self._submit([*chosen])

    def draw(self) -> None:
        """Have a population draw."""
        if not self.is_paused:
            self._submit(self.populations.ask(self._version))

    def _submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)
        self.waiting |= dict.fromkeys(requests)

    def cancel(self) -> None:
        """Withdraw some of what is asked."""
        for each in [*self.waiting]:
            if each not in self.waiting or self._random.random() > 0.3:
                continue
            is_draw = isinstance(each, PopulationDraw)
            self._withdraw(self.populations.withdraw(each) if is_draw else [each])

    def _withdraw(self, requests: Sequence[Request]) -> None:
        gone = [each for each in requests if each in self.waiting]
        self.engine.cancel(gone)
        for each in gone:
            del self.waiting[each]

    def step(self) -> None:
        """Step, and check what has ended."""
        if not self.waiting:
            self.engine.tend()
            return
        for end in self.engine.step():
            if (
                end.request in self._gone
            ):  # withdrawn with another of its draw, that has just failed
                continue
            assert end.request in self.waiting, (
                "it ended twice, or was never asked, or was withdrawn"
            )
            del self.waiting[end.request]
            self.ended += 1
            if end.error is not None:
                assert type(end.error) is EngineFailed, end.error
                self.given_up += 1
            else:
                self._check(end.request, end.result)
            if isinstance(end.request, PopulationDraw):
                unwanted = self.populations.take(end)
                self._gone |= {*unwanted}
                self._withdraw(unwanted)
        self._gone.clear()
        assert not self.seen.wrong, self.seen.wrong

    def _check(self, request: Request, result: Any) -> None:
        """See that an answer is by the weights and adapters that there are."""
        model = self.model
        if request.adapter is not None:
            model = self.adapters[request.adapter]
        if not isinstance(request, PopulationDraw):
            assert is_row(model.row(request.token_ids), result, tolerance=1e-5), "stale"
            return
        rows = [model.row(each.token_ids).float() for each in request.rows]
        token_ids, logprobs, log_mass = request.draw(rows).T
        assert result.token_ids.tolist() == token_ids.int().tolist(), "stale"
        assert torch.allclose(result.logprobs, logprobs.float(), atol=1e-5), "stale"
        assert torch.allclose(result.log_mass, log_mass.float(), atol=1e-5), "stale"

    def settle(self) -> None:
        """Step until all is answered, with no fault that lasts."""
        self.transport.opening_seconds = 0.5
        for replica in self.transport.alive.values():
            replica.state, replica.fails = "running", False
        for _ in range(10_000):
            if not self.waiting:
                return
            self.step()
        raise AssertionError(f"{len(self.waiting)} questions are lost")

    def refit(self) -> None:
        """Give all replicas new weights, once nothing is asked; some may die meanwhile."""
        if "weights" in self.engine.weights.asleep:
            return
        self.settle()
        self._version += 1
        self.refits += 1
        table = 2 * torch.randn(5, 5, dtype=torch.float64, generator=self._numbers)
        weights = self.engine.weights
        try:
            weights.layout()
        except EngineFailed:  # none of them lives while the rest sleeps
            assert self.is_paused
            assert not self.transport.alive
            return
        weights.begin()
        weights.load([("table", table)])
        if self._random.random() < 0.5:
            self.disturb()
        weights.finish()
        self.model = self.model.with_table(table)

    def add_adapter(self) -> None:
        """Load another adapter, and remove the oldest of three."""
        from safetensors.torch import save_file

        if self.is_paused:
            return
        self.settle()
        self._adapter += 1
        adapter = Adapter("a", self._adapter)
        path = self.folder / str(self._adapter)
        path.mkdir()
        table = torch.randn(5, 5, generator=self._numbers)
        save_file({"table": table}, path / WEIGHTS_NAME)
        (path / CONFIG_NAME).write_text("{}")
        self.engine.add_adapter(adapter, path)
        self.adapters[adapter] = NGram(self.model.vocabulary, table)
        if len(self.adapters) > 2:
            oldest = next(iter(self.adapters))
            self.populations.without(oldest)
            del self.adapters[oldest]
            self.engine.remove_adapter(oldest)

    @property
    def is_paused(self) -> bool:
        """True while the runtime above asks nothing, since the replicas sleep."""
        return bool(self.engine.weights.asleep)

    def sleep(self) -> None:
        """Have all replicas sleep, once nothing is asked; some may die meanwhile."""
        self.settle()
        if not self.is_paused:
            if self._random.random() < 0.5:
                self.disturb()
            self.engine.weights.sleep(1)
            self.check_sleep()

    def wake_up(self, parts: frozenset[SleepingPart] = SLEEPING_PARTS) -> None:
        """Have parts of their memory back."""
        if self.is_paused:
            self.engine.weights.wake_up(parts)
            self.check_sleep()

    def check_sleep(self) -> None:
        """See that no replica has memory that the runtime has given back, or lacks some that it has."""
        asleep = self.engine.weights.asleep
        for number, replica in self.transport.alive.items():
            if self.engine.fleet.replicas[number].life == replica.life and replica.worker:
                found = replica.worker.answering.engine.weights.asleep  # type: ignore[attr-defined]
                assert found == asleep, f"replica {number} has {found} asleep, not {asleep}"
            assert replica.worker or not asleep, f"replica {number} is opened in the sleep"

    def disturb(self) -> None:
        """Have something happen to a replica: its death, hang, wedge, failures, or their end."""
        if not self.transport.alive:
            return
        number = self._random.choice([*self.transport.alive])
        replica = self.transport.alive[number]
        what = self._random.choice(["die", "hung", "wedged", "running", "fails", "slow", "time"])
        if what == "die":
            self.transport.die(number)
        elif what == "fails":
            replica.fails = True
        elif what == "slow":
            self.transport.opening_seconds = self._random.choice([0.1, 5.0, 40.0])
        elif what == "time":
            self.clock.now += self._random.choice([0.1, 1.0, 10.0])
        else:
            replica.state, replica.fails = what, False

    def remembered(self) -> int:
        """Close all populations, and return how many of their questions replicas remember."""
        self.populations.close()
        gc.collect()
        self.engine.tend()  # which tells them
        self.engine.tend()
        workers = [each.worker for each in self.transport.alive.values() if each.worker]
        assert not any(each.inbox for each in self.transport.alive.values() if each.worker)
        return sum(len(each.asked) for each in workers)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
