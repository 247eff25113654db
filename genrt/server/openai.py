"""vLLM's OpenAI application over a runtime: completions, chat, responses, tools, tokenize, models.

Routes that would change the engine for its other users, or the process, are removed. A chat may have
``required_prefix_token_ids``, the tokens up to the end of the model's last turn; by default the
``prompt_token_ids`` and ``generation_token_ids`` of the last message that has them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from argparse import Namespace
from collections import UserDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any, NoReturn, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call
from vllm.exceptions import GenerationError
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import (
        make_arg_parser,
        validate_api_server_args,
        validate_parsed_serve_args,
    )
except ImportError:  # 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import validate_api_server_args

from genrt.errors import EngineFailed, InvalidRequest
from genrt.generation.conversations import splice_turn
from genrt.lm import AsyncLM
from genrt.numbers import named, shown
from genrt.questions.rows import id_words
from genrt.server.bodies import Bodies, check_front_end_body, json_bytes
from genrt.server.client import TASKS, RuntimeClient, TextFailed
from genrt.server.gate import HTTPError

PREFIX, MARK = "required_prefix_token_ids", "prompt_token_ids"

TEXT_KEYS = {"prompt", "prompt_token_offsets"}
"""Keys of vLLM's prompts that describe their text."""

CLOSED = frozenset(
    "/scale_elastic_ep /is_scaling_elastic_ep /start_profile /stop_profile /v1/systemone".split()  # noqa: SIM905
)
"""Paths of vLLM's that belong to the engine's owner, or that no runtime can serve."""

STREAMING = (
    "openai_serving_chat",
    "openai_serving_completion",
    "openai_serving_responses",
    "serving_tokens",
    "anthropic_serving_messages",
)
"""The parts of vLLM's application that stream texts."""

GIVEN_ELSEWHERE = {
    **{name: name for name in ("host", "port", "api_key", "model", "seed")},
    "model_tag": "model",
    "served_model_name": "name",
    "lora_modules": "adapter",
}
"""Arguments of ``vllm serve``, and genrt's own arguments in their place."""

# fmt: off
HONOURED = frozenset((
    "anthropic_disabled_thinking_effort", "chat_template", "chat_template_content_format",
    "cohere_format", "cohere_is_reasoning_model", "default_chat_template_kwargs",
    "disable_fastapi_docs", "enable_auto_tool_choice", "enable_force_include_usage",
    "enable_log_deltas", "enable_log_outputs", "enable_log_requests", "enable_offline_docs",
    "enable_prompt_tokens_details", "enable_request_id_headers", "enable_scale_out",
    "enable_server_load_tracking", "enable_tokenizer_info_endpoint",
    "exclude_tools_when_tool_choice_none", "fingerprint_mode", "fingerprint_value",
    "log_error_stack", "max_log_len", "reasoning_effort_map", "response_role",
    "return_tokens_as_token_ids", "root_path",
    "sse_keep_alive_interval", "tokens_only", "tool_call_parser", "tool_server",
    "tool_strict_level", "trust_request_chat_template",
))
# fmt: on
"""The front end's options that have an effect here. All others of ``vllm serve`` are refused: they belong
to its own server (TLS, processes, sockets, plug-ins), or to features that a runtime lacks."""

TLS = ". It speaks plain HTTP: have a proxy in front of it speak TLS"


def front_end_options(options: Mapping[str, Any]) -> Namespace:
    """Return the arguments of ``vllm serve``, with these in place of vLLM's defaults.

    Raises:
        InvalidRequest: one is unknown, or is not the front end's to choose.
    """
    arguments: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in options.items():
        if name not in HONOURED or not hasattr(arguments, name):
            raise InvalidRequest(
                f"genrt's server has no option {named(name)}; it has {', '.join(sorted(HONOURED))}"
            )
        setattr(arguments, name, value)
    return arguments


def options_of(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of ``vllm serve`` as options of the engine, and of the front end, where they
    differ from vLLM's defaults.

    Raises:
        SystemExit: vLLM does not understand them.
        InvalidRequest: genrt has an argument of its own for that, or does not support it.
    """
    if any(each.partition("=")[0] == "--config" for each in arguments):  # it would be read at once
        raise InvalidRequest("genrt's server reads no --config: give its options one by one")
    parser = make_arg_parser(FlexibleArgumentParser(prog="genrt serve … --"))
    given, default = parser.parse_args(list(arguments)), parser.parse_args([])
    changed = {k: v for k, v in vars(given).items() if v != getattr(default, k)}
    names = {each.name for each in fields(EngineArgs)}
    for name in changed:
        if name in GIVEN_ELSEWHERE:
            raise InvalidRequest(f"give --{GIVEN_ELSEWHERE[name]} before --: `genrt serve --help`")
        if name not in names | HONOURED:
            raise InvalidRequest(
                f"genrt's server does nothing with --{name.replace('_', '-')}: leave it out"
                + (TLS if "ssl" in name else "")
            )
    try:
        validate_parsed_serve_args(given)
        validate_api_server_args(given)
    except Exception as error:
        raise InvalidRequest(f"vLLM's front end does not take these options: {error}") from error
    engine = {name: value for name, value in changed.items() if name in names}
    return engine, {name: value for name, value in changed.items() if name not in names}


async def openai_application(
    lm: AsyncLM, model: str, arguments: Namespace, bodies: Bodies
) -> tuple[ASGIApp, RuntimeClient]:
    """Return vLLM's application over a runtime, and the client to shut down after it.

    Args:
        lm: a runtime over vLLM.
        model: the name that clients call it by.
        arguments: of ``vllm serve``; those about the engine have no effect.
        bodies: checks the bodies of requests before the application.

    Raises:
        InvalidRequest: vLLM does not take them.
    """
    client = RuntimeClient(lm)
    config = client.vllm_config
    arguments.model, arguments.served_model_name = model, [model]  # and not the path of a directory
    arguments.structured_outputs_config = config.structured_outputs_config
    arguments.disable_log_stats = True  # the runtime counts
    try:
        validate_api_server_args(arguments)
        own = Namespace(**vars(arguments) | {"allowed_origins": []})  # no page of another site
        with _levels_kept():
            application = build_app(own, TASKS, config.model_config)
        await init_app_state(client, application.state, arguments, TASKS)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"vLLM's front end does not take these options: {error}") from error
    except Exception as error:
        raise EngineFailed(f"vLLM's front end cannot be set up: {error}") from error
    application.state.openai_serving_models.lora_requests = _ServedAdapters(lm)
    renderer = application.state.online_renderer
    renderer.preprocess_chat = _with_turns(lm, renderer.preprocess_chat)
    _keep_failures(application)
    routes = application.router.routes
    routes[:] = [each for each in routes if getattr(each, "path", None) not in CLOSED]
    return _with_checks(application, bodies), client


@contextlib.contextmanager
def _levels_kept() -> Iterator[None]:
    """Restore the levels of the root logger and its handlers, which a package that vLLM imports here
    raises to ERROR."""
    root = logging.getLogger()
    several: list[Any] = [root, *root.handlers]
    levels = [each.level for each in several]
    try:
        yield
    finally:
        for each, level in zip(several, levels, strict=True):
            each.setLevel(level)


def _keep_failures(application: Any) -> None:
    """Have texts that fail end with their own error: as an answer, or raised out of a stream."""

    async def answer(_: Request, error: Exception) -> Response:
        return (
            error.answer if isinstance(error, TextFailed) else HTTPError(500, str(error))
        ).response

    async def refuse(_: Request, error: Exception) -> Response:
        frames = traceback.walk_tb(error.__traceback__)
        if all(frame.f_globals.get("__name__") != "pydantic.type_adapter" for frame, _ in frames):
            return HTTPError(500, str(error)).response
        name = type(error).__name__
        return HTTPError(
            400, f"the body lacks a member, or has a wrong one: {name} {error}"
        ).response

    def fail(error: GenerationError) -> NoReturn:
        raise error

    application.add_exception_handler(TextFailed, answer)
    for kind in (AttributeError, LookupError):  # vLLM's validators raise these for some bodies
        application.add_exception_handler(kind, refuse)
    application.middleware_stack = None  # vLLM has built one, with its own handlers only
    for name in STREAMING:
        if (part := getattr(application.state, name, None)) is not None:
            part._convert_generation_error_to_streaming_response = fail


def _with_checks(application: ASGIApp, bodies: Bodies) -> ASGIApp:
    """Return the application behind a check of bodies."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        parts = [await receive()]  # the whole body
        check = _check_response if scope["path"].endswith("/responses") else check_front_end_body
        await bodies.read(parts[0].get("body", b""), lambda data: check(data, bodies))

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await application(scope, again, send)

    return serve


def _check_response(data: bytes, bodies: Bodies) -> None:
    """Check a body, and raise for its first wrong item: vLLM would write hundreds of errors for each."""
    found = check_front_end_body(data, bodies)
    if found is None:
        with contextlib.suppress(ValueError, RecursionError):  # the front end refuses these
            found = json.loads(data)
    items = found.get("input") if isinstance(found, dict) else None
    for place, item in enumerate(items if isinstance(items, list) else ()):
        written = json_bytes(item)
        if written.count(b"[") + written.count(b"{") > 1000:
            raise InvalidRequest(f"input[{place}] has over 1000 lists and objects: send fewer")
        try:
            parsed = ResponsesRequest.model_validate({"input": [item]})
            construct_chat_messages_with_tool_call(parsed.input)  # fails for refusals
        except Exception as error:
            message = f"input[{place}] is not an item of a response: see OpenAI's API"
            raise InvalidRequest(message) from error


class _ServedAdapters(UserDict[str, LoRARequest]):
    """A runtime's adapters, as vLLM's front end keeps them. It reads names; the client loads new ones."""

    def __init__(self, lm: AsyncLM) -> None:
        self._lm = lm

    @property
    def data(self) -> dict[str, LoRARequest]:  # type: ignore[override]
        names = self._lm.adapters
        return {each: LoRARequest(lora_name=each, lora_int_id=1, lora_path=each) for each in names}

    def __delitem__(self, name: str) -> None:
        self._lm.remove_adapter(name)


# -- turns of chats ----------------------------------------------------------------------------------

Written: TypeAlias = tuple[list[Any], list[Any]]
"""A conversation as vLLM reads it, and its prompt."""

Writes: TypeAlias = Callable[..., Awaitable[Written]]


def _with_turns(lm: AsyncLM, write: Writes) -> Writes:
    """Return vLLM's ``OnlineRenderer.preprocess_chat``, keeping the tokens that the model drew."""

    async def written(request: Any, messages: list[Any], *given: Any, **options: Any) -> Written:
        prefix = _prefix_of(request, messages)
        if not prefix:
            return await write(request, messages, *given, **options)
        if "add_generation_prompt" not in type(request).model_fields:
            raise InvalidRequest(f"{PREFIX} is for chat completions only")
        end = getattr(lm.tokenizer, "eos_token_id", None)
        if end is None:
            raise InvalidRequest(f"{PREFIX}: the tokenizer has no end token")
        kept = list(id_words(prefix, lm.vocab_size, name=PREFIX))
        # A copy: vLLM parses arguments of tools in place.
        said = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]
        earlier = deepcopy(messages[: said[-1] + 1] if said else messages)
        conversation, [prompt] = await write(request, messages, *given, **options)
        ended = {"add_generation_prompt": False, "continue_final_message": False}
        options = {**options, "parser": None}
        _, [begun] = await write(request.model_copy(update=ended), earlier, *given, **options)
        token_ids = splice_turn(kept, begun[MARK], prompt[MARK], end)
        own = {name: prompt[name] for name in prompt.keys() - TEXT_KEYS}
        return conversation, [own | {MARK: token_ids}]

    return written


def _prefix_of(request: Any, messages: Sequence[Any]) -> Sequence[Any] | None:
    """Return the tokens that a prompt must begin with. Raises InvalidRequest for another type."""
    found = (getattr(request, "model_extra", None) or {}).get(PREFIX)
    if found is None:
        marked = [each for each in messages if isinstance(each, Mapping) and MARK in each]
        if not marked:
            return None
        found, drawn = marked[-1][MARK], marked[-1].get("generation_token_ids")
        if not isinstance(found, list) or not isinstance(drawn, list):
            raise InvalidRequest(
                f"a message with {MARK} needs generation_token_ids too, both lists of token ids"
            )
        found = found + drawn
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise InvalidRequest(f"{PREFIX} must be a list of token ids, got {shown(found)}")
    return found
