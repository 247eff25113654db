"""Servers asked byte by byte, over plain sockets."""

from __future__ import annotations

import socket

from genrt.server import Server


def connected(server: Server) -> socket.socket:
    host, port = str(server.url).removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def post(path: str, body: bytes, *, length: int | None = None, end: str = "") -> bytes:
    """A request with a JSON body, which may be said to be longer; ``end`` are more lines of its head."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{end}"
    return f"{head}content-length: {length or len(body)}\r\n\r\n".encode() + body


def rest_of(connection: socket.socket) -> bytes:
    """Everything that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def answer_to(server: Server, data: bytes) -> bytes:
    """What a server answers to these bytes, until it closes the connection."""
    with connected(server) as connection:
        connection.sendall(data)
        return rest_of(connection)
