"""Replicas as processes of this host: two pairs of sockets each, for messages and for probes.

A replica is started by ``sys.executable`` with this process's path and environment, in a session of its
own, so that a terminal's signals do not reach it. It ends when this process does, or the thread that
started it, however these end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from genrt.cluster.frames import Frame, Frames, Outgoing, received
from genrt.cluster.memory import Memory
from genrt.cluster.messages import (
    AskedNumbers,
    RemotePopulations,
    dump_message,
    load_message,
    outgoing,
)
from genrt.cluster.serving import PULSE
from genrt.cluster.transport import Came, Gone, Pulsed
from genrt.cluster.worker import with_rows
from genrt.engines.protocol import Engine

__all__ = ["Processes"]

END_SECONDS = 3.0
"""How long a replica may take to end by itself before it is killed."""

MOST_SECONDS = 3600.0
"""How long a wait takes at most: the system counts milliseconds, up to 2**31."""

PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from genrt.cluster.serving import main; main({port}, {pulse}, {parent})"
)


@dataclass(slots=True)
class _Process:
    number: int
    life: int
    child: subprocess.Popen[bytes]
    port: socket.socket
    pulse: socket.socket
    frames: Frames = field(default_factory=Frames)
    memory: Memory = field(default_factory=Memory)
    held: RemotePopulations = field(default_factory=RemotePopulations)
    unsent: deque[Outgoing] = field(default_factory=deque)

    def flush(self) -> None:
        """Send as much as goes without waiting."""
        with contextlib.suppress(
            BlockingIOError, OSError
        ):  # who is gone is seen to be when read from
            while self.unsent and self.unsent[0].flush(self.port):
                self.unsent.popleft()

    def drop(self) -> None:
        """Let go of what nobody receives any more."""
        while self.unsent:
            self.unsent.popleft().close()


class Processes:
    """The processes of one runtime's replicas.

    Args:
        open_engine: makes an engine there; it travels to each.
        numbers: of the questions of populations.
        environments: what each replica has in its environment beside this process's.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        numbers: AskedNumbers,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self._opening = dump_message(("open", open_engine))
        self._numbers = numbers
        self._environments = environments
        self._processes: dict[int, _Process] = {}
        self._ended: list[Gone] = []
        self._selector = selectors.DefaultSelector()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_woken = self._is_closed = False
        self._selector.register(self._wakes, selectors.EVENT_READ)

    def start(self, number: int, life: int) -> None:
        """Start a process, and have it open an engine."""
        port, their_port = socket.socketpair()
        pulse, their_pulse = socket.socketpair()
        ends = their_port.fileno(), their_pulse.fileno()
        program = PROGRAM.format(
            path=[*map(os.path.abspath, sys.path)], port=ends[0], pulse=ends[1], parent=os.getpid()
        )
        own = self._environments[number] if self._environments else {}
        # One by one: other threads set and remove variables.
        found = ((name, os.environ.get(name)) for name in [*os.environ])
        environment = {name: value for name, value in found if value is not None}
        with their_port, their_pulse:
            try:
                child = subprocess.Popen(
                    [sys.executable, "-c", program],
                    pass_fds=ends,
                    stdin=subprocess.DEVNULL,
                    env={**environment, **own},
                    start_new_session=True,
                )
            except OSError as error:
                port.close()
                pulse.close()
                self._ended.append(Gone(number, life, f"it could not be started: {error}"))
                return
        port.setblocking(False)
        pulse.setblocking(False)
        process = self._processes[number] = _Process(number, life, child, port, pulse)
        self._selector.register(port, selectors.EVENT_READ, process)
        self._selector.register(pulse, selectors.EVENT_READ, process)
        self._put(process, Outgoing(self._opening))

    def send(self, number: int, message: Sequence[Any]) -> None:
        """Send a message."""
        process = self._processes.get(number)
        if process is not None:
            own = process.memory, self._numbers.of, process.held
            self._put(process, outgoing(message, *own))

    def probe(self, number: int) -> None:
        """Send a byte to the thread that answers probes."""
        process = self._processes.get(number)
        if process is not None:
            with contextlib.suppress(OSError):
                process.pulse.send(b"?")

    def kill(self, number: int) -> None:
        """Kill the process, and take it off the system's list."""
        process = self._processes.pop(number, None)
        if process is not None:
            process.child.kill()
            self._put_away(process)

    def wait(self, seconds: float) -> list[Came | Pulsed | Gone]:
        """Return what has come from any process."""
        came: list[Came | Pulsed | Gone] = [*self._ended]
        self._ended.clear()
        seconds = 0.0 if came else min(max(seconds, 0.0), MOST_SECONDS)
        for key, events in self._selector.select(seconds):
            process: _Process = key.data
            if key.fileobj == self._wakes:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakes)
                self._is_woken = False  # last: or nobody would write again who did just before
                continue
            if self._processes.get(process.number) is not process:
                continue
            if events & selectors.EVENT_WRITE:
                process.flush()
                self._watch(process)
            if events & selectors.EVENT_READ:
                read = self._read if key.fileobj is process.port else self._read_pulse
                came += read(process)
        return came

    def interrupt(self) -> None:
        """End the wait."""
        if not self._is_woken and not self._is_closed:
            self._is_woken = True
            os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Close the sockets, upon which the processes end; kill those that do not soon."""
        if self._is_closed:
            return
        self._is_closed = True
        for process in self._processes.values():
            with contextlib.suppress(OSError):  # it is gone
                process.port.shutdown(
                    socket.SHUT_RDWR
                )  # also where a fork of this process holds it
            process.port.close()
        until = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.child.wait(max(0.0, until - time.monotonic()))
            process.child.kill()
            process.child.wait()
            process.pulse.close()
            process.drop()
        self._processes.clear()
        self._selector.close()
        os.close(self._wakes)

    def _put(self, process: _Process, message: Outgoing) -> None:
        process.unsent.append(message)
        process.flush()
        self._watch(process)

    def _watch(self, process: _Process) -> None:
        """Watch for when more can be sent, while there is more."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        if self._selector.get_key(process.port).events != events:
            self._selector.modify(process.port, events, process)

    def _read(self, process: _Process) -> list[Came | Pulsed | Gone]:
        """Return the messages of a process, and that it is gone if it is."""
        came: list[Came | Pulsed | Gone] = []
        number, life = process.number, process.life
        try:
            while True:
                frames = received(process.port, process.frames)
                if frames is None:
                    break
                came += [Came(number, life, _decode_frame(each)) for each in frames]
        except BlockingIOError:
            return came
        except OSError:
            pass
        self._processes.pop(number)
        process.child.kill()
        self._put_away(process)
        code = process.child.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        came.append(Gone(number, life, f"its process {how}"))
        return came

    def _read_pulse(self, process: _Process) -> list[Came | Pulsed | Gone]:
        try:
            data = process.pulse.recv(2**16)
        except OSError:
            return []
        if not data:
            self._selector.unregister(process.pulse)
            return []
        [rounds] = PULSE.unpack(data[-PULSE.size :])
        return [Pulsed(process.number, process.life, rounds)]

    def _put_away(self, process: _Process) -> None:
        process.child.wait()
        process.drop()
        for end in (process.port, process.pulse):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()


def _decode_frame(frame: Frame) -> Sequence[Any]:
    """Return the message of a frame, with its rows."""
    message: Sequence[Any] = load_message(frame.data, None, frame.arrays)
    if message[0] != "answers" or not (count := message[1].rows):
        return message
    rows = torch.frombuffer(frame.arrays[-1], dtype=torch.float32)
    return with_rows(message, rows.view(count, -1))
