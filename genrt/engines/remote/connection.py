"""A persistent HTTP connection to a genrt server: one call at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import urllib.parse
from typing import Any

from genrt.errors import EngineDied, EngineFailed, EngineUnsupported, GenrtError, InvalidRequest
from genrt.numbers import check_float

CONNECT_SECONDS = 10.0
"""The longest time to connect, which no thread can cut short."""


class ServerBusy(Exception):
    """The server refuses more requests for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the server is busy for {seconds:g} s")
        self.seconds = seconds


class ServerConnection:
    """Calls one server, from one thread.

    Args:
        url: the server's, ``http://`` or ``https://``.
        api_key: the server's key, if it has one.
        timeout: seconds without a byte from the server after which a call fails.

    Raises:
        InvalidRequest: an argument is malformed.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts, port = _split(url)
        if api_key is not None and not (
            isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()
        ):
            raise InvalidRequest("api_key must be printable ASCII characters")
        self.url = url.rstrip("/")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = check_float("timeout", timeout, 0.001, 1e6)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._is_hung_up = False
        self._http: http.client.HTTPConnection
        host, seconds = str(parts.hostname), min(self._timeout, CONNECT_SECONDS)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._http = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=seconds)

    def get(self, path: str) -> bytes:
        """Return the content of a path; raises as ``post``."""
        return self._call("GET", path, None)

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path; raises as ``post``."""
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(self.get(path)), dict):
                return found
        raise EngineUnsupported(
            f"{self.url} is not a genrt server: its {path} is not a JSON object"
        )

    def post(self, path: str, body: bytes) -> bytes:
        """Return the answer to a body. A call is repeated on a new connection if the server has closed an
        idle one.

        Raises:
            ServerBusy: the server is busy.
            EngineDied: the server cannot be reached, or refuses the key.
            EngineFailed: the server failed.
            InvalidRequest: the server refuses the body.
        """
        return self._call("POST", path, body)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._http.close()

    def hang_up(self) -> None:
        """End the call in progress, and all later ones. Callable from any thread; takes no lock."""
        self._is_hung_up = True
        if (line := self._http.sock) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)

    def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/octet-stream"
        # Servers close idle connections, and may have been replaced.
        may_repeat = self._http.sock is not None
        while True:
            try:
                status, data, wait = self._once(method, path, body, headers)
                break
            except (http.client.HTTPException, OSError) as error:
                self._http.close()
                if not may_repeat or isinstance(error, TimeoutError):
                    raise EngineDied(
                        f"{self.url} cannot be reached: {type(error).__name__}: {error}"
                    ) from error
                may_repeat = False
        if status == 200:
            return data
        if status == 429:
            raise ServerBusy(wait)
        raise self._refused(status, data)

    def _once(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes, float]:
        is_open = self._http.sock is not None
        if not is_open and not self._is_hung_up:
            self._http.connect()
            self._http.sock.settimeout(self._timeout)
        if self._is_hung_up:
            raise ConnectionAbortedError("this end has hung up")
        self._http.request(method, self._path + path, body, headers)
        with self._http.getresponse() as answer:
            data = answer.read()
        wait = answer.headers.get("retry-after", "")
        return answer.status, data, float(wait) if wait.isdigit() else 1.0

    def _refused(self, status: int, data: bytes) -> GenrtError:
        """Return the error for an answer other than 200."""
        try:
            message = str(json.loads(data)["error"]["message"])[:1000]
        except (ValueError, KeyError, TypeError, RecursionError):
            message = f"it answers {status}"
        kind: type[GenrtError] = EngineFailed
        if status in (401, 403, 409, 503):
            kind = EngineDied
        elif status == 404:
            kind = EngineUnsupported
        elif 400 <= status < 500:
            kind = InvalidRequest
        return kind(f"{self.url}: {message}")


def _split(url: str) -> tuple[urllib.parse.SplitResult, int | None]:
    """Return the parts of a server's URL, and its port. Raises InvalidRequest for another text."""
    message = "url must be that of a server, such as http://127.0.0.1:8000"
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        raise InvalidRequest(message)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
        parts.path.encode("ascii")
    except ValueError as error:
        raise InvalidRequest(f"{message}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(message)
    if parts.username is not None:
        raise InvalidRequest("url has a name or a password in it: give the server's key as api_key")
    return parts, port
