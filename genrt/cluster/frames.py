"""Messages on a socket between two processes of this host: bytes in frames, large arrays beside them.

A frame's arrays are in memory that both processes share, a file without a name (``memfd_create``) that
travels with the first byte of the frame. The sender lets go of it then; it is gone with the last array
that was read from it, or with the processes, however they end.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Frame", "Frames", "Outgoing", "received"]

RECEIVED_BYTES = 2**20

MOST_FILES = 8
"""How many files come at once at most: one, as each is the file of a frame of its own."""

_HEAD = struct.Struct("<QI")
"""How many bytes a frame's data has, and how many arrays there are; their sizes follow, then the data."""

_SIZE = struct.Struct("<Q")
_ALIGNMENT = 64


class Frame(NamedTuple):
    """A message as bytes, and its arrays as they are in memory: nobody else writes there."""

    data: bytes
    arrays: Sequence[memoryview] = ()


class Outgoing:
    """A frame that is to be sent, once or several times.

    Args:
        data: the message.
        arrays: are copied.
    """

    def __init__(self, data: bytes, arrays: Sequence[memoryview] = ()) -> None:
        sizes = b"".join(_SIZE.pack(each.nbytes) for each in arrays)
        self._left = memoryview(_HEAD.pack(len(data), len(arrays)) + sizes + data)
        self._file = _shared(arrays) if arrays else None

    def flush(self, port: socket.socket) -> bool:
        """Send as much as a socket takes; return whether that was all. Raises OSError, BlockingIOError
        among them."""
        while self._left:
            if self._file is None:
                sent = port.send(self._left)
            else:
                sent = socket.send_fds(port, [self._left], [self._file])
                self.close()
            self._left = self._left[sent:]
        return True

    def send_to(self, ports: Sequence[socket.socket]) -> None:
        """Send all of it to each of these sockets. Raises OSError."""
        try:
            for port in ports:
                sent = 0
                if self._file is not None:
                    sent = socket.send_fds(port, [self._left], [self._file])
                port.sendall(self._left[sent:])
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the arrays. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Frames:
    """Puts together the frames of a stream of bytes, and the files that come with it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._files: deque[int] = deque()

    def add(self, data: bytes, files: Sequence[int] = ()) -> list[Frame]:
        """Take what has come; return the frames that are whole."""
        self._data += data
        self._files += files
        frames: list[Frame] = []
        at = 0
        while len(self._data) - at >= _HEAD.size:
            length, count = _HEAD.unpack_from(self._data, at)
            first = at + _HEAD.size
            start = first + count * _SIZE.size
            end = start + length
            if end > len(self._data):
                break
            sizes = [size for (size,) in _SIZE.iter_unpack(self._data[first:start])]
            arrays = _arrays(self._files.popleft(), sizes) if sizes else ()
            frames.append(Frame(bytes(self._data[start:end]), arrays))
            at = end
        del self._data[:at]
        return frames


def received(port: socket.socket, frames: Frames) -> list[Frame] | None:
    """Return the frames that are whole by what is read from a socket; ``None`` if its other end is
    closed. Raises OSError, BlockingIOError among them."""
    data, files, _, _ = socket.recv_fds(port, RECEIVED_BYTES, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    return frames.add(data, files) if data else None


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where arrays of these sizes begin in a file, and how large that is."""
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, max(at, 1)


def _shared(arrays: Sequence[memoryview]) -> int:
    """Return a file that holds these arrays."""
    places, size = _places([each.nbytes for each in arrays])
    file = os.memfd_create("genrt-arrays", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        for place, each in zip(places, arrays, strict=True):
            left = each.cast("B") if each.nbytes else each
            while left:
                written = os.pwrite(file, left, place)
                left, place = left[written:], place + written
    except BaseException:
        os.close(file)
        raise
    return file


def _arrays(file: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the arrays of a file, which is closed: they have its memory."""
    places, size = _places(sizes)
    try:
        memory = memoryview(mmap.mmap(file, size, mmap.MAP_SHARED | mmap.MAP_POPULATE))
    finally:
        os.close(file)
    return [memory[place : place + each] for place, each in zip(places, sizes, strict=True)]
