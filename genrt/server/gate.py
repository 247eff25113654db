"""Admission of requests: the key, bounds on bodies and answers, and the errors that clients get."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from genrt.errors import (
    Closed,
    EngineDied,
    GenrtError,
    InvalidAdapter,
    InvalidConstraint,
    InvalidRequest,
    Paused,
    StreamCut,
    TimedOut,
    UnknownAdapter,
)
from genrt.numbers import check_float, check_int

logger = logging.getLogger("genrt.server")

EVENTS = b"text/event-stream"

CLOSING = "the server is closing: ask again later"
"""The message for requests that outlast a server's shutdown."""

BUSY = "the server is busy: ask again a second later"

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


STATUSES = (
    (UnknownAdapter, 404),
    ((InvalidRequest, InvalidConstraint, InvalidAdapter), 400),
    (TimedOut, 408),
    ((Closed, EngineDied, Paused, StreamCut), 503),
)
"""The statuses of errors; the first that fits. Others are 500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a server. Requests beyond them get a 4xx.

    Attributes:
        body_bytes: the largest body of a request.
        body_seconds: how long a client may take to send a body.
        connections: how many connections are open at once; requests of more get a 503.
        requests: how many requests are served at once; more get a 429.
        values: how many values the JSON of a body may have; lists and members of objects, a 64th.
        contexts: the most contexts, continuations and particles of one request to genrt's own routes.
        answer_bytes: the largest answer of genrt's own routes.
        update_seconds: how long a trainer may pause in the middle of an update of the weights.
    """

    body_bytes: int = 2**25
    body_seconds: float = 30.0
    connections: int = 4096
    requests: int = 1024
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


class HTTPError(Exception):
    """Ends a request with an error.

    Args:
        status: of the answer, 400 to 599.
        message: says the problem and its solution.
        headers: of the answer.
    """

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> bytes:
        """The answer's body: JSON, in the form of OpenAI's errors."""
        kind = KINDS.get(self.status, "APIError")
        error = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()

    @property
    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body, self.status, self.headers, "application/json")


def http_error(error: GenrtError) -> HTTPError:
    """Return a GenrtError as an answer."""
    found = (status for kinds, status in STATUSES if isinstance(error, kinds))
    return HTTPError(next(found, 500), str(error))


def error_event(error: HTTPError) -> bytes:
    """Return an error as the last event of a stream."""
    return b"event: error\ndata: " + error.body + b"\n\n"


class ClientLeft(Exception):
    """The client has disconnected."""


def is_loopback(host: str) -> bool:
    """Return whether an IP address or ``localhost`` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_key(api_key: str | None, host: str) -> str | None:
    """Return the key of a server that listens on ``host``.

    Raises:
        InvalidRequest: the key is malformed, or missing although other machines can connect.
    """
    if api_key is None:
        if not is_loopback(host):
            raise InvalidRequest(
                f"{host!r} can be reached from other machines: give an api_key, or stay on 127.0.0.1"
            )
        return None
    if not isinstance(api_key, str) or not api_key.isascii() or not api_key.isprintable():
        raise InvalidRequest("api_key must be printable ASCII characters")
    if len(api_key) < 8 or " " in api_key:
        raise InvalidRequest("api_key must have 8 characters or more, and no space")
    return api_key


class Gate:
    """ASGI middleware in front of all routes.

    Only a GET of ``/health`` needs no key. A body is read whole, within bounds, before a route sees the
    request. Without a key, a request must name a loopback host: otherwise a page in the user's browser
    could reach the server under a host name of its own.

    Args:
        application: serves the requests that are admitted.
        api_key: the key that requests must show, if any.
        limits: of requests and answers.
        is_healthy: decides whether ``/health`` is answered with 200 or 503.
    """

    def __init__(
        self,
        application: ASGIApp,
        *,
        api_key: str | None,
        limits: ServerLimits,
        is_healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._application = application
        self._api_key = None if api_key is None else api_key.encode()
        self._limits = limits
        self._is_healthy = is_healthy
        self._answers: set[_AnswerStream] = set()

    @property
    def serving(self) -> int:
        """How many requests are being served."""
        return len(self._answers)

    def cancel_all(self) -> None:
        """End all requests under way with a 503, and streams with a last event, but for plain answers
        that are being sent."""
        for answer in self._answers:
            if not answer.is_begun or answer.has_events:
                answer.time.reschedule(0.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the server speaks HTTP only, not {scope['type']}")
        answer = _AnswerStream(send)
        error: HTTPError
        try:
            if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
                await Response(b"", 200 if self._is_healthy() else 503)(scope, receive, send)
                return
            self._check(scope)
            if self.serving >= self._limits.requests:
                raise HTTPError(429, BUSY, retry_after="1")
            self._answers.add(answer)
            try:
                async with answer.time:
                    await self._serve(scope, receive, answer.send)
                return
            except TimeoutError:
                if not answer.time.expired():
                    raise
                error = HTTPError(503, CLOSING, connection="close")
            finally:
                self._answers.discard(answer)
        except ClientLeft:
            return  # uvicorn closes a connection whose answer has no end
        except Exception as failed:
            found = _error_in(failed)
            if found is None:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                found = HTTPError(500, "the server failed; its log says why")
            error = found
        if not answer.is_begun:
            await error.response(scope, receive, send)
        elif answer.has_events:
            await send({"type": "http.response.body", "body": error_event(error)})

    def _check(self, scope: Scope) -> None:
        """Raise HTTPError unless the request shows the key, or names a loopback host without one."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if self._api_key is None:
            if not _names_loopback(headers):
                message = "without a key, the server answers to localhost and 127.0.0.1 alone"
                raise HTTPError(403, message)
        elif not self._has_key(headers, reads=scope["method"] in ("GET", "HEAD")):
            raise HTTPError(
                401,
                "the key is missing or wrong: send `Authorization: Bearer KEY`",
                www_authenticate='Basic realm="genrt", charset="UTF-8"',
            )

    def _has_key(self, headers: list[tuple[bytes, bytes]], *, reads: bool) -> bool:
        """Return whether headers show the key: as a bearer token, or to read as a browser's password."""
        shown = [value for name, value in headers if name == b"authorization"]
        if len(shown) != 1:
            return False
        scheme, _, value = shown[0].partition(b" ")
        key = value.strip()
        if scheme.lower() == b"basic" and reads:
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(key, self._api_key or b"")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body, within the limits, and have the application serve the request."""
        limits, body = self._limits, bytearray()
        too_large = HTTPError(413, f"the body is over {limits.body_bytes} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length" and (len(value) > 18 or int(value) > limits.body_bytes):
                raise too_large
        try:
            async with asyncio.timeout(limits.body_seconds) as reading:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part, more = message.get("body", b""), message.get("more_body", False)
                    body += part
                    if len(body) > limits.body_bytes:
                        raise too_large
            parts = [bytes(body)]
            body.clear()

            async def again() -> Message:
                if parts:
                    return {"type": "http.request", "body": parts.pop(), "more_body": False}
                return await receive()

            await self._application(scope, again, send)
        except TimeoutError:
            if not reading.expired():
                raise
            late = f"the body took over {limits.body_seconds:g} s"
            raise HTTPError(408, late, connection="close") from None


class _AnswerStream:
    """The answer to one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_begun = self.has_events = False
        self.time = asyncio.timeout(None)  # it ends the request when the server closes

    async def send(self, message: Message) -> None:
        """Send a part."""
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self.has_events = any(each.startswith(EVENTS) for each in kinds)
            self.is_begun = True
        await self._send(message)


def _error_in(failed: BaseException) -> HTTPError | None:
    """Return the error that an exception, or one that caused it, means for the client."""
    cause: BaseException | None = failed
    while cause is not None:
        if isinstance(cause, HTTPError | GenrtError):
            return cause if isinstance(cause, HTTPError) else http_error(cause)
        cause = cause.__cause__
    return None


def _names_loopback(headers: list[tuple[bytes, bytes]]) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].rpartition(":")
    if not name or not port.isdigit():
        name = hosts[0]
    return is_loopback(name)
