"""Replicas as actors of a Ray cluster: one call for all messages that wait, and one for all answers.

The extra ``ray`` brings it; nothing of it is imported before a cluster is asked for.

Rules:
    An actor has four threads: the engine's, and one each that takes messages, hands on answers, and
    tells how many rounds the engine has gone. Messages have numbers, as calls may overtake each other.
    Rows of a flush are one array, which travels beside the message, through Ray's shared memory.
    Actors end with this process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genrt.cluster.connection import connection
from genrt.cluster.frames import Frame
from genrt.cluster.messages import AskedNumbers, RemotePopulations, dump_message, load_message
from genrt.cluster.serving import RoundCounter, serve
from genrt.cluster.transport import Came, Gone, Pulsed
from genrt.cluster.worker import with_rows
from genrt.engines.protocol import Engine
from genrt.errors import EngineUnsupported
from genrt.questions.rows import moved_rows

__all__ = ["Actors", "ReplicaActor"]

END_SECONDS = 3.0
"""How long a replica may take to end by itself before it is killed."""

EXIT_SECONDS = 10.0
"""How long a killed process may take to give its memory back."""


class ActorLink:
    """The messages of a runtime, as an actor's engine thread sees them."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None wakes
        self._outbox: queue.SimpleQueue[tuple[bytes, np.ndarray | None]] = queue.SimpleQueue()
        self._early: dict[int, list[bytes]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._is_left = False

    def take(self, number: int, messages: list[bytes]) -> None:
        """Take the messages of one call, and of those that came before their turn."""
        with self._lock:
            self._early[number] = messages
            while self._next in self._early:
                for each in self._early.pop(self._next):
                    self._inbox.put(each)
                self._next += 1

    def leave(self) -> None:
        """Note that the runtime is gone."""
        self._is_left = True
        self.wake()

    def wake(self) -> None:
        """End the present wait, or the next; from any thread."""
        self._inbox.put(None)

    def send(self, *message: Any, rows: Sequence[Tensor] = ()) -> None:
        """Have the runtime get a message, and rows of one length beside it."""
        self._outbox.put((dump_message(message), moved_rows(rows).numpy() if rows else None))

    def receive(self, *, wait: bool) -> list[Frame] | None:
        """Return the messages that have come; with ``wait``, once there are any or ``wake`` was called.
        Return ``None`` once the runtime is gone."""
        came = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                came.append(self._inbox.get_nowait())
        return None if self._is_left else [Frame(each) for each in came if each is not None]

    def answers(self) -> list[tuple[bytes, np.ndarray | None]]:
        """Wait for messages to the runtime, and return all that there are."""
        came = [self._outbox.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                came.append(self._outbox.get_nowait())
        return came


class ReplicaActor:
    """A replica; Ray makes an actor of it, and calls each method on a thread of its own."""

    def __init__(self) -> None:
        self._link = ActorLink()
        self._rounds = RoundCounter(self._link)

    def run(self) -> None:
        """Open the engine, and answer until the runtime is gone."""
        serve(self._link, self._rounds)

    def take(self, number: int, messages: list[bytes]) -> None:
        """Take messages, the calls in the order of their numbers."""
        self._link.take(number, messages)

    def leave(self) -> tuple[str, int]:
        """Have ``run`` end; return where this process is, and its number there."""
        self._link.leave()
        return _processes_here(), os.getpid()

    def answers(self) -> list[tuple[bytes, np.ndarray | None]]:
        """Wait for messages to the runtime, and return all that there are."""
        return self._link.answers()

    def probed(self) -> int:
        """Return how many rounds the engine has gone."""
        return self._rounds.probed()


@dataclass(slots=True)
class _Actor:
    number: int
    life: int
    handle: Any
    run: Any
    held: RemotePopulations = field(default_factory=RemotePopulations)
    unsent: list[bytes] = field(default_factory=list)
    calls: int = 0


def _gpus_of_each(ray: Any, replicas: int, gpus: int) -> int:
    """Return how many GPUs each replica takes: none where the cluster has none."""
    there = int(ray.cluster_resources().get("GPU", 0))
    if there and gpus * replicas > there:
        lacking = f"{replicas} replicas need {gpus * replicas} GPUs, and the cluster has {there}"
        if connection.is_local:
            raise EngineUnsupported(lacking)
        warnings.warn(f"{lacking}: they wait for more", RuntimeWarning, stacklevel=3)
    return gpus if there else 0


class Actors:
    """The actors of one runtime's replicas.

    Args:
        open_engine: makes an engine there; it travels to each.
        numbers: of the questions of populations.
        cluster: ``"auto"`` is the running cluster that Ray finds, or else one of this host alone,
            without dashboard; ``"local"`` always that; otherwise an address as ``ray.init`` takes it.
        replicas: how many there will be.
        gpus: how many GPUs each takes.
        here: how many this process may use, which a Ray that begins here is told.

    Raises:
        EngineNotInstalled: Ray is missing.
        EngineUnsupported: there is no such cluster, it has too few GPUs and will have no more, or Ray is
            connected to another one.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        numbers: AskedNumbers,
        cluster: str,
        *,
        replicas: int,
        gpus: int,
        here: int,
    ) -> None:
        self._opening = dump_message(("open", open_engine))
        self._numbers = numbers
        self._ray = connection.join(cluster, here)
        try:
            gpus = _gpus_of_each(self._ray, replicas, gpus)
        except BaseException:
            connection.leave()
            raise
        self._kind = self._ray.remote(ReplicaActor).options(
            num_cpus=0,
            num_gpus=gpus,
            max_concurrency=5,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        self._actors: dict[int, _Actor] = {}
        # What Ray's threads bring; None interrupts.
        self._came: queue.SimpleQueue[Callable[[], list[Came | Pulsed | Gone]] | None] = (
            queue.SimpleQueue()
        )
        self._is_closed = False

    def start(self, number: int, life: int) -> None:
        """Start an actor, and have it open an engine."""
        try:
            handle = self._kind.remote()
            actor = self._actors[number] = _Actor(number, life, handle, handle.run.remote())
        except Exception as error:
            reason = f"it could not be started: {error}"
            self._came.put(lambda: [Gone(number, life, reason)])
            return
        actor.unsent.append(self._opening)
        self._hear(actor)

    def send(self, number: int, message: Sequence[Any]) -> None:
        """Have a message be sent with the next call, which ``wait`` makes."""
        if (actor := self._actors.get(number)) is not None:
            actor.unsent.append(dump_message(message, self._numbers.of, held=actor.held))

    def probe(self, number: int) -> None:
        """Ask for the rounds, by a thread that does nothing else."""
        if (actor := self._actors.get(number)) is not None:
            self._call(actor, "probed", self._pulsed)

    def kill(self, number: int) -> None:
        """Kill the actor."""
        if (actor := self._actors.pop(number, None)) is not None:
            with contextlib.suppress(Exception):  # it is dead
                self._ray.kill(actor.handle)

    def wait(self, seconds: float) -> list[Came | Pulsed | Gone]:
        """Send what waits, and return what has come from any actor."""
        for actor in self._actors.values():
            if actor.unsent:
                messages, actor.unsent = actor.unsent, []
                self._call(actor, "take", None, actor.calls, messages)
                actor.calls += 1
        came: list[Came | Pulsed | Gone] = []
        with contextlib.suppress(queue.Empty):
            bring = self._came.get(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
            while True:
                if bring is not None:
                    came += bring()
                bring = self._came.get_nowait()
        return came

    def interrupt(self) -> None:
        """End the wait."""
        self._came.put(None)

    def close(self) -> None:
        """Have the actors end; kill those that do not soon. Those of this host are gone then, and what
        they had of its GPUs is free."""
        if self._is_closed:
            return
        self._is_closed = True
        actors = [*self._actors.values()]
        ends: list[int | None] = []
        with contextlib.suppress(Exception):  # Ray is gone, and so are they
            left = [each.handle.leave.remote() for each in actors]
            self._ray.wait([e.run for e in actors], num_returns=len(actors), timeout=END_SECONDS)
            told, _ = self._ray.wait(left, num_returns=len(left), timeout=0)
            here = _processes_here()
            ends = [_end_of(pid) for there, pid in self._ray.get(told) if there == here]
        for each in actors:
            self.kill(each.number)
        connection.leave()
        _wait_for(each for each in ends if each is not None)

    def _hear(self, actor: _Actor) -> None:
        self._call(actor, "answers", self._answered)

    def _call(
        self,
        actor: _Actor,
        name: str,
        then: Callable[[_Actor, Any], list[Came | Pulsed | Gone]] | None,
        *arguments: Any,
    ) -> None:
        """Call a method of an actor, and have its result brought to ``wait``; lose it if that is dead."""
        with contextlib.suppress(Exception):
            reference = getattr(actor.handle, name).remote(*arguments)
            if then is not None:
                brought = partial(self._brought, actor, then)
                reference.future().add_done_callback(
                    lambda found: self._came.put(partial(brought, found))
                )

    def _brought(
        self,
        actor: _Actor,
        then: Callable[[_Actor, Any], list[Came | Pulsed | Gone]],
        found: Future[Any],
    ) -> list[Came | Pulsed | Gone]:
        if self._actors.get(actor.number) is not actor:
            return []
        try:
            result = found.result()
        except Exception as error:
            self.kill(actor.number)
            reason = str(error).strip().splitlines()[0]
            return [Gone(actor.number, actor.life, f"its actor ended: {reason}")]
        return then(actor, result)

    def _answered(
        self, actor: _Actor, came: list[tuple[bytes, np.ndarray | None]]
    ) -> list[Came | Pulsed | Gone]:
        self._hear(actor)
        events: list[Came | Pulsed | Gone] = []
        for data, rows in came:
            message = load_message(data)
            if rows is not None:
                # Ray's memory is not for writing, and is kept as long as any part of it is.
                message = with_rows(message, torch.from_numpy(rows.copy()))
            events.append(Came(actor.number, actor.life, message))
        return events

    def _pulsed(self, actor: _Actor, rounds: int) -> list[Came | Pulsed | Gone]:
        return [Pulsed(actor.number, actor.life, rounds)]


def _processes_here() -> str:
    """Return what tells this host's processes, as this one sees them, from others."""
    return (
        f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{os.readlink('/proc/self/ns/pid')}"
    )


def _end_of(pid: int) -> int | None:
    """Return a file that is ready once a process has ended; ``None`` if it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _wait_for(ends: Iterable[int]) -> None:
    """Wait until processes have ended, but not for ever; close their files."""
    until = time.monotonic() + EXIT_SECONDS
    for each in ends:
        end = select.poll()  # select takes no file above 1,023
        end.register(each, select.POLLIN)
        end.poll(1000 * max(0.0, until - time.monotonic()))
        os.close(each)
