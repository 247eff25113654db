"""The process of a replica: opens the engine, and has a ``Worker`` answer its runtime until that is gone.

Rules:
    The thread that opens the engine receives, steps and answers; another one answers probes, so that
    these tell whether the process goes on, and ``rounds`` whether the engine does.
    Whatever goes wrong beyond one step is the end of this process, and says why if it can.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from genrt.cluster.follower import die_with
from genrt.cluster.frames import Frame, Frames, received
from genrt.cluster.memory import Memory
from genrt.cluster.messages import load_message, outgoing
from genrt.cluster.worker import Worker
from genrt.engines.protocol import survived
from genrt.errors import GenrtError

__all__ = ["PULSE", "Link", "RoundCounter", "main", "serve"]

PULSE = struct.Struct("<Q")
"""A probe is one byte; the answer is how many rounds the engine's thread has gone."""


class _Socket:
    """The messages of a runtime, on a socket; ``wake`` ends a wait for them."""

    def __init__(self, port: socket.socket) -> None:
        self._port = port
        self._frames, self._memory = Frames(), Memory()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(port, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the present wait, or the next; from any thread."""
        os.eventfd_write(self._wakes, 1)

    def send(self, *message: Any, rows: Sequence[Tensor] = ()) -> None:
        """Have the runtime get a message, and rows of one length beside it."""
        outgoing(message, self._memory, rows=rows).send_to([self._port])

    def receive(self, *, wait: bool) -> list[Frame] | None:
        """Return the messages that have come; with ``wait``, once there are any or ``wake`` was called.
        Return ``None`` once the runtime is gone."""
        for key, _ in self._selector.select(None if wait else 0.0):
            if key.fileobj == self._wakes:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
            else:
                return received(self._port, self._frames)
        return []


class Link(Protocol):
    """The way of messages between a replica and its runtime, as the replica's engine thread sees it."""

    def wake(self) -> None:
        """End the present wait, or the next; from any thread."""

    def send(self, *message: Any, rows: Sequence[Tensor] = ()) -> None:
        """Have the runtime get a message, and rows of one length beside it."""

    def receive(self, *, wait: bool) -> list[Frame] | None:
        """Return the messages that have come; with ``wait``, once there are any or ``wake`` was called.
        Return ``None`` once the runtime is gone."""


class RoundCounter:
    """How many rounds a replica's engine has gone, for whoever answers probes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.worker: Worker | None = None

    def probed(self) -> int:
        """Return how many; if nothing but programs go on, have there be one more by the next probe."""
        worker = self.worker
        if worker is None:
            return 0
        if worker.has_programs:
            self._link.wake()
        return worker.rounds


def main(port: int, pulses: int, parent: int) -> None:
    """Serve as a replica, over these two sockets, until the other ends are closed or the parent is gone:
    a fork of that may hold the other ends open."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is the runtime's
    link = _Socket(socket.socket(fileno=port))
    pulse, rounds = socket.socket(fileno=pulses), RoundCounter(link)
    threading.Thread(target=_answer_probes, args=(pulse, rounds), daemon=True).start()
    if not serve(link, rounds):
        sys.exit(1)


def serve(link: Link, rounds: RoundCounter) -> bool:
    """Open the engine that the first message says how to, and answer until the runtime is gone; return
    whether that is why it ended."""
    try:
        _serve(link, rounds)
    except BrokenPipeError:
        pass  # the runtime is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            link.send("died", f"{type(error).__name__}: {error}")
        return False
    return True


def _serve(link: Link, rounds: RoundCounter) -> None:
    waiting: list[Frame] | None = []
    while not waiting:
        waiting = link.receive(wait=True)
        if waiting is None:
            return
    [_, open_engine] = load_message(waiting.pop(0).data)
    try:
        worker = Worker(open_engine(), link.send, link.wake)
    except Exception as error:
        link.send("refused", error if isinstance(error, GenrtError) else survived(error))
        return
    rounds.worker = worker
    link.send("opened", worker.facts())
    with contextlib.closing(worker):
        while waiting is not None:
            for each in waiting:
                worker.take(*load_message(each.data, worker.asked, each.arrays))
            worker.turn()
            waiting = link.receive(wait=not worker.is_busy)


def _answer_probes(pulse: socket.socket, rounds: RoundCounter) -> None:
    """Answer probes until the runtime is gone; then so is this process, whatever it is at."""
    while pulse.recv(1):
        with contextlib.suppress(BrokenPipeError):
            pulse.sendall(PULSE.pack(rounds.probed()))
    os._exit(1)
