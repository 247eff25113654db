"""ASGI applications: their types, and the errors that genrt's answer with."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

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

__all__ = [
    "Application",
    "HTTPError",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "http_error",
    "send_error",
]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


class HTTPError(Exception):
    """A request that is answered with an error.

    Args:
        status: the answer's status, 400 to 599.
        message: what is wrong, and what to do about it.
        headers: of the answer.
    """

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> bytes:
        """The answer: JSON, in the form of OpenAI's errors."""
        kind = _KINDS.get(self.status, "APIError")
        error = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()


def http_error(error: GenrtError) -> HTTPError:
    """Return the answer that tells of an error of genrt's."""
    status = 500
    if isinstance(error, UnknownAdapter):
        status = 404
    elif isinstance(error, InvalidRequest | InvalidConstraint | InvalidAdapter):
        status = 400
    elif isinstance(error, TimedOut):
        status = 408
    elif isinstance(error, Closed | EngineDied | Paused | StreamCut):
        status = 503
    return HTTPError(status, str(error))


async def send_error(error: HTTPError, send: Send) -> None:
    """Answer with an error."""
    body = error.body
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    encoded = [(k.encode(), v.encode()) for k, v in (headers | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
