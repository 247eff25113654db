"""The process of a rank other than 0: opens the engine of its rank, and repeats what rank 0's is told.

Rules:
    It lives no longer than the process that has started it, whatever either is at.
    What it is told it does in order; what an engine refuses, it refuses alike. Anything else that goes
    wrong is the end of this process, and so of all ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from genrt.cluster.frames import Frames, Outgoing, received
from genrt.cluster.messages import Flat, dump_message, load_message, unflattened
from genrt.engines import open_engine
from genrt.engines.protocol import EngineStatistics
from genrt.engines.vllm.rank import Rank, broadcast_from_rank0, leave_ranks
from genrt.engines.weights import TensorsIn
from genrt.errors import GenrtError
from genrt.questions.draws import PopulationDraw
from genrt.questions.sequences import SequenceHandle

__all__ = ["Follower", "Progress", "die_with", "main", "progress_of"]

PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux."""

Progress = tuple[int, ...]
"""How far a rank has come: counters that all ranks share."""


def progress_of(counted: EngineStatistics) -> Progress:
    """Return how far an engine has come."""
    return (
        counted.steps,
        counted.requests,
        counted.rows,
        counted.computed_tokens,
        counted.sampled_tokens,
        counted.resident,
        counted.failed,
    )


class Follower:
    """Repeats with one engine what another is told.

    Args:
        engine: of the same model and options.
        answer: tells the other end how something went.
    """

    def __init__(self, engine: Any, answer: Callable[..., None]) -> None:
        self._engine, self._answer = engine, answer
        self._draws: dict[int, PopulationDraw] = {}  # in progress, by the numbers of what they ask
        self._numbers: dict[PopulationDraw, int] = {}
        self.asked: dict[int, SequenceHandle] = {}

    def take(self, kind: str, *arguments: Any) -> None:
        """Do what a message says. Raises RuntimeError if the ranks have parted."""
        getattr(self, f"_take_{kind}")(*arguments)

    def _take_submit(self, rows: Flat, draws: Flat, others: list[Any]) -> None:
        self._engine.submit([request for _, request in unflattened(rows, draws, others)])

    def _take_step(self, progress: Progress) -> None:
        own = progress_of(self._engine.statistics())
        if own != progress:
            raise RuntimeError(f"the ranks have parted: {own} here, {progress} in rank 0")
        for end in self._engine.step():
            self._forget(end.request)

    def _take_cancel(self, requests: list[Any], draws: list[int]) -> None:
        populations = [self._draws[each] for each in draws if each in self._draws]
        self._engine.cancel([*requests, *populations])
        for each in populations:
            self._forget(each)

    def _take_go_on(self, number: int, population: PopulationDraw) -> None:
        if self._engine.go_on(population):
            self._draws[number] = population
            self._numbers[population] = number

    def _take_speculate(self, request_ids: list[str]) -> None:
        """Run a step with the tokens that rank 0 has drawn, on its device."""
        tokens = torch.empty(len(request_ids), dtype=torch.float64, device=self._engine.device)
        self._engine.speculate(request_ids, tokens, share=broadcast_from_rank0)

    def _take_settle(self, population: PopulationDraw) -> None:
        self._engine.settle(population)

    def _take_release(self, numbers: list[int]) -> None:
        self._engine.release([self.asked[each] for each in numbers if each in self.asked])

    def _take_forget(self, numbers: list[int]) -> None:
        for each in numbers:
            self.asked.pop(each, None)

    def _take_load(self, paths: list[str]) -> None:
        """Load weights from files."""
        tensors = TensorsIn([Path(each) for each in paths])
        self._agree(lambda: self._engine.weights.load(tensors))

    def _take_do(self, name: str, *arguments: Any) -> None:
        """Do what all ranks have to agree on: it succeeds in all, or fails in all."""
        self._agree(lambda: attrgetter(name)(self._engine)(*arguments))

    def _take_tell(self, name: str, *arguments: Any) -> None:
        attrgetter(name)(self._engine)(*arguments)

    def _agree(self, do: Callable[[], object]) -> None:
        try:
            do()
        except GenrtError as error:
            self._answer("refused", str(error))
        else:
            self._answer("done")

    def _forget(self, request: Any) -> None:
        if isinstance(request, PopulationDraw):
            self._draws.pop(self._numbers.pop(request, 0), None)


def main(port: int, parent: int, receiver: int) -> None:
    """Do what rank 0 says, over this socket, until the other end is closed. ``receiver`` is which of
    those it tells this is."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is the runtime's
    link, frames = socket.socket(fileno=port), Frames(receiver)
    follower: Follower | None = None

    def answer(*message: Any) -> None:
        Outgoing(dump_message(message)).send_to([link])

    try:
        while (came := received(link, frames)) is not None:
            for each in came:
                if follower is None:
                    number, store, model, options, residency = load_message(each.data)
                    rank = Rank(number, store)
                    engine = open_engine("vllm", model, options, residency=residency, rank=rank)
                    follower = Follower(engine, answer)
                    answer("done")
                    continue
                kind, *arguments = load_message(each.data, follower.asked, each.arrays)
                if kind == "close":
                    engine.close()
                    leave_ranks()
                    return
                follower.take(kind, *arguments)
    except BrokenPipeError:
        pass  # rank 0 is gone
    except BaseException as error:
        answer("failed", f"{type(error).__name__}: {error}")
        sys.exit(1)


def die_with(parent: int) -> None:
    """Have this process be killed as soon as that one is gone, also in the middle of a forward."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
