"""Messages on a socket between two processes of this host: bytes in frames, large arrays beside them.

A frame's arrays are in memory that both processes share (``memory.py``). The file of a piece travels with
the first byte of the first frame that has arrays there.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from genrt.cluster.memory import Array, Memory, ReceivedPieces

__all__ = ["Frame", "Frames", "Outgoing", "received"]

RECEIVED_BYTES = 2**20

MOST_FILES = 8
"""How many files come at once at most: one, as each is the file of a frame of its own."""

_HEAD = struct.Struct("<QIH?")
"""How many bytes a frame's data has, and how many arrays there are, in which piece, and whether that is
new. Their sizes follow, then the data."""

_SIZE = struct.Struct("<Q")


class Frame(NamedTuple):
    """A message as bytes, and its arrays as they are in memory: nobody else writes there."""

    data: bytes
    arrays: Sequence[memoryview] = ()


class Outgoing:
    """A frame that is to be sent, once or several times, after those that were made before it.

    Args:
        data: the message.
        arrays: are copied into ``memory``, which the receivers of all frames have in common.
        rows: of one length, are copied there too: the last array.
    """

    def __init__(
        self,
        data: bytes,
        arrays: Sequence[Array] = (),
        memory: Memory | None = None,
        rows: Sequence[Tensor] = (),
    ) -> None:
        piece, sizes = 0, list[int]()
        self._file: int | None = None
        if memory is not None and (arrays or rows):
            piece, self._file, sizes = memory.put(arrays, rows)
        head = _HEAD.pack(len(data), len(sizes), piece, self._file is not None)
        self._left = memoryview(b"".join([head, *map(_SIZE.pack, sizes), data]))

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
        """Let go of the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Frames:
    """Puts together the frames of a stream of bytes, and the files that come with it.

    Args:
        receiver: which of the receivers of all frames this is.
    """

    def __init__(self, receiver: int = 0) -> None:
        self._data = bytearray()
        self._files: deque[int] = deque()
        self._kept = ReceivedPieces(receiver)

    def add(self, data: bytes, files: Sequence[int] = ()) -> list[Frame]:
        """Take what has come; return the frames that are whole."""
        self._data += data
        self._files += files
        frames: list[Frame] = []
        at = 0
        while len(self._data) - at >= _HEAD.size:
            length, count, piece, is_new = _HEAD.unpack_from(self._data, at)
            first = at + _HEAD.size
            start = first + count * _SIZE.size
            end = start + length
            if end > len(self._data):
                break
            sizes = [size for (size,) in _SIZE.iter_unpack(self._data[first:start])]
            if is_new:
                self._kept.add(piece, self._files.popleft())
            arrays = self._kept.arrays(piece, sizes) if sizes else ()
            frames.append(Frame(bytes(self._data[start:end]), arrays))
            at = end
        del self._data[:at]
        return frames


def received(port: socket.socket, frames: Frames) -> list[Frame] | None:
    """Return the frames that are whole by what is read from a socket; ``None`` if its other end is
    closed. Raises OSError, BlockingIOError among them."""
    data, files, _, _ = socket.recv_fds(port, RECEIVED_BYTES, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    return frames.add(data, files) if data else None
