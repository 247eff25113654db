"""The gate: who comes in, how many at once, and how large and how slow their requests may be.

Rules:
    Nothing but a GET of ``/health`` passes without the key, if there is one, however its path is spelt.
    The key is compared in constant time, and before anything of the body is read.
    A body is read whole, within bounds of size and time, before any route sees the request.
    On the loopback interface, without a key, the request must name a loopback host: a page in the user's
    browser cannot reach the server under a name of its own.
    A client that does not read what it asked for is dropped, and its work is withdrawn. Answers leave
    piece by piece, and all bodies and answers together are within ``held_bytes``.
    A server that closes tells those whose requests it withdraws: by a 503, or by a last event.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from genrt.errors import InvalidRequest
from genrt.numbers import check_float, check_int
from genrt.server.asgi import Application, HTTPError, Message, Receive, Scope, Send, send_error

__all__ = ["Gate", "ServerLimits", "check_key", "is_loopback"]

logger = logging.getLogger("genrt.server")

HEALTH = "/health"

EVENTS = b"text/event-stream"

CLOSING = "the server is closing: ask again later"
"""The message for those whose requests take longer than a server has that is closed."""

PIECE = 2**16
"""How many bytes of an answer are on their way to a client at once."""

LEAST_KEY = 8
"""How many characters a key has at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """How much a server takes. What is over is answered with a 4xx.

    Attributes:
        body_bytes: the largest body of a request.
        body_seconds: how long a client may take to send one.
        head_seconds: how long it may take to send the head of a request.
        send_seconds: how long a client may leave what is sent to it unread; a long answer has a second
            more for each MiB.
        connections: how many connections are open at once, at most three quarters of the descriptors of
            the process. One more closes the oldest idle one, first of those that have shown no key.
        requests: how many requests are served at once; more get a 429.
        held_bytes: how many bytes the bodies and the answers of all of them may take together.
        values: how many values the JSON of a body may have; lists and objects are a 64th of them at most.
        contexts: the most contexts, continuations and particles of one request to genrt's own routes.
        answer_bytes: the largest answer of genrt's own routes.
        update_seconds: how long a trainer may be silent in the middle of an update of the weights.
    """

    body_bytes: int = 2**25
    body_seconds: float = 30.0
    head_seconds: float = 10.0
    send_seconds: float = 60.0
    connections: int = 4096
    requests: int = 1024
    held_bytes: int = 2**30
    values: int = 2**20
    contexts: int = 4096
    answer_bytes: int = 2**28
    update_seconds: float = 600.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_seconds"):
                check_float(each.name, value, 0.001, 1e9)
            else:
                check_int(each.name, value, 1)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address: an IP address, or ``localhost``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_key(api_key: str | None, host: str) -> str | None:
    """Return the key of a server that listens on ``host``.

    Raises:
        InvalidRequest: it is none, or it is missing where other machines can ask.
    """
    if api_key is None:
        if not is_loopback(host):
            raise InvalidRequest(
                f"{host!r} can be reached from other machines: give an api_key, or stay on 127.0.0.1"
            )
        return None
    if not isinstance(api_key, str) or not api_key.isascii() or not api_key.isprintable():
        raise InvalidRequest("api_key must be printable ASCII characters")
    if len(api_key) < LEAST_KEY or " " in api_key:
        raise InvalidRequest(f"api_key must have {LEAST_KEY} characters or more, and no space")
    return api_key


class Gate:
    """An ASGI application in front of another.

    Args:
        application: serves who passes.
        api_key: what they have to show; ``None`` is nothing.
        limits: how much they may ask.
        is_healthy: says whether a GET of ``/health`` is answered with 200, or 503.
        on_key: told the address of a client that has shown the key.
    """

    def __init__(
        self,
        application: Application,
        *,
        api_key: str | None,
        limits: ServerLimits,
        is_healthy: Callable[[], bool] = lambda: True,
        on_key: Callable[[object], None] = lambda client: None,
    ) -> None:
        self._application = application
        self._api_key = None if api_key is None else api_key.encode()
        self._limits = limits
        self._is_healthy = is_healthy
        self._on_key = on_key
        self._answers: set[_Answer] = set()
        self.held_bytes = 0

    @property
    def serving(self) -> int:
        """How many requests are being served."""
        return len(self._answers)

    def withdraw(self) -> None:
        """End all requests under way, but for answers that are on their way as they are."""
        for answer in self._answers:
            if not answer.is_begun or answer.has_events:
                answer.time.reschedule(0.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the server speaks HTTP alone, not {scope['type']}")
        answer = _Answer(send, self._limits.send_seconds, self._hold)
        try:
            if scope["path"] == HEALTH and scope["method"] in ("GET", "HEAD"):
                await self._tell_health(send)
                return
            self._check(scope)
            if self.serving >= self._limits.requests:
                raise HTTPError(
                    429, "the server is busy: too many requests at once", retry_after="1"
                )
            self._on_key(scope.get("client"))
            self._answers.add(answer)
            try:
                async with answer.time:
                    await self._serve(scope, receive, answer.send)
            except TimeoutError:
                if not answer.time.expired():
                    raise
                raise HTTPError(503, CLOSING, connection="close") from None
            finally:
                self._answers.discard(answer)
        except HTTPError as error:
            if not answer.is_begun:
                await send_error(error, send)
            elif answer.has_events:
                event = b"event: error\ndata: " + error.body + b"\n\n"
                await send({"type": "http.response.body", "body": event})
        except ClientLeft:
            pass  # uvicorn closes a connection whose answer has no end
        except Exception:
            if answer.is_left:
                return  # an error of the application's, of which that was the cause
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not answer.is_begun:
                await send_error(HTTPError(500, "the server failed; its log says why"), send)

    def _hold(self, count: int) -> None:
        """Count bytes that are held, or with less than 0 are no more. Raises HTTPError for too many."""
        if count > 0 and self.held_bytes + count > self._limits.held_bytes:
            raise HTTPError(429, "the server is busy: too many bytes at once", retry_after="1")
        self.held_bytes += count

    async def _tell_health(self, send: Send) -> None:
        status = 200 if self._is_healthy() else 503
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _check(self, scope: Scope) -> None:
        """Raise HTTPError unless this client may ask for this path."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if self._api_key is not None:
            if not self._has_key(headers, safe=scope["method"] in ("GET", "HEAD")):
                raise HTTPError(
                    401,
                    "the key is missing or wrong: send `Authorization: Bearer KEY`",
                    www_authenticate='Basic realm="genrt", charset="UTF-8"',
                )
        elif not _names_loopback(headers):
            raise HTTPError(
                403, "without a key, the server answers to localhost and 127.0.0.1 alone"
            )

    def _has_key(self, headers: list[tuple[bytes, bytes]], *, safe: bool) -> bool:
        """Return whether the key is shown: as a bearer, or as the password of a browser that reads."""
        shown = [value for name, value in headers if name == b"authorization"]
        if len(shown) != 1:
            return False
        scheme, _, value = shown[0].partition(b" ")
        given = value.strip()
        if scheme.lower() == b"basic" and safe:
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given, self._api_key or b"")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds) as time:
                self._check_length(scope)
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if len(body) + len(part) > self._limits.body_bytes:
                        raise HTTPError(413, f"the body is over {self._limits.body_bytes} bytes")
                    self._hold(len(part))
                    body += part
                time.reschedule(None)
        except TimeoutError:
            self._hold(-len(body))
            raise HTTPError(
                408, f"the body took over {self._limits.body_seconds:g} s", connection="close"
            ) from None
        except BaseException:
            self._hold(-len(body))
            raise
        parts, taken = [bytes(body)], len(body)
        del body

        async def again() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            return await receive()

        try:
            await self._application(scope, again, send)
        finally:
            self._hold(-taken)

    def _check_length(self, scope: Scope) -> None:
        """Raise HTTPError if the body is said to be too long."""
        for name, value in scope["headers"]:
            if name == b"content-length" and (
                not value.isdigit() or len(value) > 18 or int(value) > self._limits.body_bytes
            ):
                raise HTTPError(413, f"the body is over {self._limits.body_bytes} bytes")


class _Answer:
    """The answer to one request.

    Attributes:
        is_begun: whether something of it was sent.
        has_events: whether it is a stream of events, which has begun.
        is_left: whether the client does not read it.
        time: when it is withdrawn, if it is.
    """

    def __init__(self, send: Send, send_seconds: float, hold: Callable[[int], None]) -> None:
        self._send = send
        self._send_seconds = send_seconds
        self._hold = hold
        self._start: Message | None = None
        self.is_begun = self.has_events = self.is_left = False
        self.time = asyncio.timeout(None)

    async def send(self, message: Message) -> None:
        """Send a part of it.

        Raises:
            ClientLeft: the client does not read. HTTPError: too much is held for all clients already.
        """
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self.has_events = any(each.startswith(EVENTS) for each in kinds)
            if not self.has_events:
                self._start = message  # with the body, which may be too much
                return
            self.is_begun = True
            await self._sent(message, math.inf)
            return
        body = memoryview(message.get("body", b""))
        size = len(body)
        # Of what fits in a piece there is no more than requests; and a stream has begun.
        held = size if size > PIECE and not self.has_events else 0
        self._hold(held)
        try:
            late = asyncio.get_running_loop().time() + self._send_seconds + size / 2**20
            if self._start is not None:
                start, self._start, self.is_begun = self._start, None, True
                await self._sent(start, late)
            while len(body) > PIECE:
                await self._sent({**message, "body": body[:PIECE], "more_body": True}, late)
                body = body[PIECE:]
            await self._sent({**message, "body": body}, late)
        finally:
            self._hold(-held)

    async def _sent(self, message: Message, late: float) -> None:
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(late, now + self._send_seconds)):
                await self._send(message)
        except TimeoutError:
            self.is_left = True
            raise ClientLeft from None


class ClientLeft(Exception):
    """The client is gone with its request half sent, or does not read its answer."""


def _names_loopback(headers: list[tuple[bytes, bytes]]) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].rpartition(":")
    if not name or not port.isdigit():
        name = hosts[0]
    return is_loopback(name)
