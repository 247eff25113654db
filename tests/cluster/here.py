"""Replicas in this process, each an ``AsyncLM``, behind the bytes of a channel. They die and hang.

``monkeypatch.setattr(loading, "Actors", ReplicasHere)`` puts them in the place of Ray's actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray import cloudpickle

from genrt.cluster.actors import Gone
from genrt.cluster.replica import Replica
from genrt.lm import AsyncLM
from tests.inside import engine_of

__all__ = ["ReplicasHere", "replicas_of"]


@dataclass(slots=True, eq=False)
class Life:
    """One life of a replica, with the calls that it has not answered."""

    replica: Replica
    calls: dict[Future[Any], asyncio.Task[None]] = field(default_factory=dict)
    is_hung: bool = False


class ReplicasHere:
    """As ``Actors``.

    Attributes:
        lives: how many lives each replica has had.
        restarts: how often each is started again.
    """

    restarts = 1000

    def __init__(
        self,
        make: Callable[[], Any],
        cluster: str,
        *,
        replicas: int,
        **_: Any,
    ) -> None:
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._threads = ThreadPoolExecutor(16 * replicas)
        self._lives = [Life(Replica()) for _ in range(replicas)]
        self.lives = [1] * replicas
        self.is_closed = False

    def put(self, value: object) -> Any:
        return _travelled(value)

    def call(self, number: int, name: str, *arguments: Any) -> Future[Any]:
        found: Future[Any] = Future()
        given = _travelled(arguments)
        if name == "prepare":
            given = (self._make, *given)
        self._loop.call_soon_threadsafe(self._begin, number, name, given, found)
        return found

    def kill(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self._end, number, "killed")

    def die(self, number: int) -> None:
        """Have a replica be gone, with what it has not answered."""
        self.kill(number)

    def hang(self, number: int) -> None:
        """Have a replica that serves answer nothing from now on, until it is killed. One that opens dies
        instead, because the time for that is not bounded."""
        if self.opened[number]:
            self._loop.call_soon_threadsafe(setattr, self._lives[number], "is_hung", True)
        else:
            self.die(number)

    @property
    def opened(self) -> list[bool]:
        """Whether each replica has an engine."""
        return [each.replica._lm is not None for each in self._lives]

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            with contextlib.suppress(RuntimeError):  # the interpreter exits
                closing.result(60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)
            self._threads.shutdown()
            self._loop.close()

    def _begin(self, number: int, name: str, given: tuple[Any, ...], found: Future[Any]) -> None:
        life = self._lives[number]
        if self.lives[number] > self.restarts + 1:
            found.set_exception(Gone("it died", is_final=True))
            return
        life.calls[found] = self._loop.create_task(self._run(life, name, given, found))

    async def _run(self, life: Life, name: str, given: tuple[Any, ...], found: Future[Any]) -> None:
        try:
            call = partial(getattr(life.replica, name), *given)
            result = await self._loop.run_in_executor(self._threads, call)
            while life.is_hung:
                await asyncio.Event().wait()
            result = _travelled(result)
        except Exception as error:
            if life.calls.pop(found, None) is not None:
                found.set_exception(error)
        else:
            if life.calls.pop(found, None) is not None:
                found.set_result(result)

    def _end(self, number: int, reason: str) -> None:
        life = self._lives[number]
        self._lives[number] = Life(Replica())
        self.lives[number] += 1
        is_final = self.lives[number] > self.restarts + 1
        calls, life.calls = life.calls, {}
        for found, task in calls.items():
            task.cancel()
            found.set_exception(Gone(reason, is_final=is_final))
        self._loop.run_in_executor(self._threads, life.replica.stop)

    async def _close(self) -> None:
        for number in range(len(self._lives)):
            life = self._lives[number]
            await self._loop.run_in_executor(self._threads, life.replica.stop)
            for found, task in [*life.calls.items()]:
                task.cancel()
                del life.calls[found]
        await asyncio.sleep(0)


def _travelled(value: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(value))  # noqa: S301


def replicas_of(lm: AsyncLM) -> ReplicasHere:
    """Return the replicas of a runtime."""
    found: ReplicasHere = engine_of(lm)._set
    return found
