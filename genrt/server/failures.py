"""Texts that fail, as the clients of vLLM's front ends are told: the status, and what to do.

vLLM tells a stream's error as one of its own, with status 500; where the stream is one of responses or of
messages it breaks off, and logs a traceback.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import GenerationError

from genrt.errors import GenrtError
from genrt.server.asgi import HTTPError, http_error
from genrt.server.routes import JSON

__all__ = ["TextFailed", "telling_failures"]

OF_CHATS = (
    "openai_serving_chat",
    "openai_serving_completion",
    "serving_tokens",
    "anthropic_serving_messages",
)
"""The parts of vLLM's application whose streams have an event for errors, which it makes in one place."""

ERROR_EVENT = 'data: {"error"'
"""How that event begins."""


class TextFailed(GenerationError):  # type: ignore[misc]
    """An error of genrt's on its way through vLLM's front ends, which log no traceback of this kind.

    Args:
        error: why the text failed.

    Attributes:
        told: the answer that tells of it.
    """

    def __init__(self, error: GenrtError) -> None:
        super().__init__(str(error))
        self.told = http_error(error)
        self.status_code = HTTPStatus(self.told.status)


def telling_failures(application: Any) -> None:
    """Have vLLM's application tell of texts that fail, whatever kind of client asked for them."""
    application.add_exception_handler(TextFailed, _answer)
    application.middleware_stack = None  # vLLM has built one, of its own handlers alone
    state = application.state
    for name in OF_CHATS:
        if (serving := getattr(state, name, None)) is not None:
            serving._convert_generation_error_to_streaming_response = _event_of
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        responses._convert_generation_error_to_streaming_response = _raise
        responses.responses_stream_generator = _responses(responses.responses_stream_generator)
    if (messages := getattr(state, "anthropic_serving_messages", None)) is not None:
        messages.create_messages = _message(messages.create_messages)
        messages.message_stream_converter = _messages(messages.message_stream_converter)


async def _answer(_: Request, error: Exception) -> Response:
    told = _told(error)
    return Response(told.body, status_code=told.status, media_type=JSON)


def _told(error: Exception) -> HTTPError:
    return error.told if isinstance(error, TextFailed) else HTTPError(500, str(error))


def _event_of(error: GenerationError) -> str:
    return _told(error).body.decode()


def _raise(error: GenerationError) -> str:
    raise error  # vLLM would look for an event of responses that has this form, and there is none


def _responses(
    stream: Callable[..., AsyncGenerator[Any, None]],
) -> Callable[..., AsyncGenerator[Any, None]]:
    """Return what yields the events of a response, and one for an error."""

    async def events(*given: Any, **options: Any) -> AsyncGenerator[Any, None]:
        count = 0
        try:
            async for event in stream(*given, **options):
                yield event
                count += 1
        except GenerationError as error:
            yield _ResponseError(_told(error), count)

    return events


class _ResponseError:
    """An event of a response's stream: its members are those of OpenAI's event for errors, and the error
    as clients of the other streams read it."""

    type = "error"

    def __init__(self, error: HTTPError, number: int) -> None:
        self.sequence_number = number
        self._error = error

    def model_dump_json(self, **_: Any) -> str:
        """Return it as JSON; vLLM calls this of its own events."""
        whole = json.loads(self._error.body)
        of_error = {"code": str(self._error.status), "message": str(self._error), "param": None}
        own = {"type": self.type, "sequence_number": self.sequence_number}
        return json.dumps(own | of_error | whole)


def _message(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return what makes a message, or its stream, or says why there is none."""

    async def created(*given: Any, **options: Any) -> Any:
        try:
            return await create(*given, **options)
        except TextFailed as error:
            told = error.told
            return ErrorResponse(
                error=ErrorInfo(message=str(told), type=_kind_of(told.status), code=told.status)
            )

    return created


def _messages(
    convert: Callable[[AsyncIterator[str]], AsyncGenerator[str, None]],
) -> Callable[[AsyncIterator[str]], AsyncGenerator[str, None]]:
    """Return what turns a chat's stream into one of messages, and an error of the one into one of the
    other."""

    async def converted(parts: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        failed: list[dict[str, Any]] = []

        async def until_failed() -> AsyncGenerator[str, None]:
            async for part in parts:
                if part.startswith(ERROR_EVENT):
                    failed.append(json.loads(part.removeprefix("data: "))["error"])
                    return
                yield part

        async for event in convert(until_failed()):
            yield event
        for error in failed:
            told = {"type": _kind_of(error["code"]), "message": error["message"]}
            yield f"event: error\ndata: {json.dumps({'type': 'error', 'error': told})}\n\n"

    return converted


def _kind_of(status: int) -> str:
    """Return what Anthropic's API calls errors of a status."""
    if status < 500:
        return "invalid_request_error"
    return "overloaded_error" if status == 503 else "api_error"
