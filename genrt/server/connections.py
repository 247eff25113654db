"""Connections: HTTP as uvicorn speaks it, with bounds on their number and on the heads of requests.

Rules:
    Connections without a request make room for new ones: the oldest first, and before them the oldest
    that has shown no key. Where all have a request, a new one is closed.
    A connection has one request at a time. What a client sends before it has its answer is not read as
    another request: the connection ends with that answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HEAD_BYTES", "Connections", "connection_kind"]

HEAD_BYTES = 2**16
"""The longest head of a request, and the most that is taken of its parts before a line of it ends."""


MOST_DROPPED = 1000
"""How many parts of a body are read after it was refused, so that the client sees that. A part is a
piece of 256 KiB, or a chunk of any size."""


class Connections:
    """The connections that are open, at most so many.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: OrderedDict[object, Any] = (
            OrderedDict()
        )  # by the client's address, oldest first
        self._known: set[object] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, client: object, connection: Any) -> bool:
        """Take in a connection; return whether there is room for it. Another one may be closed."""
        if len(self._open) >= self._most:
            idle = [each for each, its in self._open.items() if its.is_idle]
            if not idle:
                return False
            oldest = next((each for each in idle if each not in self._known), idle[0])
            evicted = self._open[oldest]
            evicted.transport.abort()
            self.remove(oldest, evicted)
        self._open[client] = connection
        return True

    def know(self, client: object) -> None:
        """Note that a client has shown the key."""
        if client in self._open:
            self._known.add(client)

    def remove(self, client: object, connection: Any) -> None:
        """Forget a connection that is closed; its address may be another's by now."""
        if self._open.get(client) is connection:
            del self._open[client]
            self._known.discard(client)


def connection_kind(head_seconds: float, connections: Connections) -> type[asyncio.Protocol]:
    """Return a protocol that gives up on clients who take longer than this to send a request's head.

    uvicorn waits for ever, both for the first byte and for the rest of a head, of any length. And while
    a request waits behind another it does not read, and so does not see that the client has left.
    """

    class Connection(HttpToolsProtocol):
        """One client's connection."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if not connections.add(self.client or self, self):
                transport.abort()
            self._head_bytes = 0
            self._late: asyncio.TimerHandle | None = None
            self._is_ending = False  # with the answer that is being written
            self._dropped = 0
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            connections.remove(self.client or self, self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_ending:
                return
            self._head_bytes += len(data)
            super().data_received(data)
            if self._head_bytes > HEAD_BYTES:
                self._give_up(b"431 Request Header Fields Too Large")
            elif self._late is None and self.is_idle and self.timeout_keep_alive_task is None:
                self._expect_head()

        def on_message_begin(self) -> None:
            if not self.is_idle:
                self._is_ending = True
                self.cycle.keep_alive = False
                return
            super().on_message_begin()
            self._dropped = 0
            if self._late is None:
                self._expect_head()

        # Of one piece of data the parser goes on telling, of requests that are not read too.

        def on_url(self, url: bytes) -> None:
            if not self._is_ending:
                super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._is_ending:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if not self._is_ending:
                self._head_came()
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if self._is_ending:
                return
            self._head_bytes = 0
            super().on_body(body)
            if self.is_idle:  # the answer is there: it is a refusal, and this is read to be dropped
                self._dropped += 1
                if self._dropped > MOST_DROPPED:
                    self._is_ending = True
                    self.transport.abort()

        def on_message_complete(self) -> None:
            if not self._is_ending:
                self._head_bytes = 0
                super().on_message_complete()

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _expect_head(self) -> None:
            self._late = self.loop.call_later(head_seconds, self._give_up, b"408 Request Timeout")

        def _head_came(self) -> None:
            self._head_bytes = 0
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _give_up(self, status: bytes) -> None:
            if self.transport.is_closing():
                return
            if (
                self.is_idle
            ):  # else an answer is being written, and this would be in the middle of it
                self.transport.write(
                    b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                )
            self.transport.close()

    return Connection
