"""vLLM's OpenAI application over a runtime: completions, chat, responses, tools, tokenize, models.

vLLM makes the application and all that its routes need; it is given a ``RuntimeClient`` as its engine.
Routes that would change the engine for its other users, or the process, are closed.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
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

from genrt.errors import EngineFailed, GenrtError, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import named
from genrt.server.asgi import Application, Message, Receive, Scope, Send, http_error
from genrt.server.bodies import Bodies, check_front_end_body, json_bytes
from genrt.server.client import TASKS, RuntimeClient
from genrt.server.failures import telling_failures
from genrt.server.routes import JSON
from genrt.server.turns import keeping_turns

__all__ = ["HONOURED", "front_end_options", "openai_application", "options_of"]

CLOSED = frozenset(
    "/scale_elastic_ep /is_scaling_elastic_ep /start_profile /stop_profile /v1/systemone".split()  # noqa: SIM905
)
"""Paths of vLLM's that are for who owns the engine, or of which no runtime can do anything."""

GIVEN_ELSEWHERE = {
    **{name: name for name in ("host", "port", "api_key", "model", "seed")},
    "model_tag": "model",
    "served_model_name": "name",
    "lora_modules": "adapter",
}
"""Arguments of ``vllm serve`` for which genrt has its own, by these names."""

# fmt: off
HONOURED = frozenset((
    "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins",
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
"""The front end's options that have an effect here. All others of ``vllm serve`` are refused: they are
for its own server (TLS, processes, sockets, plug-ins), or for what a runtime does not do."""

TLS = ". It speaks plain HTTP: have a proxy in front of it speak TLS"


def _arguments() -> Namespace:
    """Return the arguments of ``vllm serve``, with vLLM's defaults."""
    namespace: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    return namespace


def front_end_options(options: Mapping[str, Any]) -> Namespace:
    """Return the arguments of ``vllm serve``, with these in place of vLLM's defaults.

    Raises:
        InvalidRequest: one is unknown, or is not the front end's to choose.
    """
    arguments = _arguments()
    for name, value in options.items():
        if name not in HONOURED or not hasattr(arguments, name):
            raise InvalidRequest(
                f"genrt's server has no option {named(name)}; it has {', '.join(sorted(HONOURED))}"
            )
        setattr(arguments, name, value)
    return arguments


def options_of(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of ``vllm serve`` as options of the engine, and of the front end: those that
    differ from vLLM's defaults.

    Raises:
        SystemExit: vLLM does not understand them.
        InvalidRequest: genrt has an argument of its own for that, or would not do what it says.
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
) -> tuple[Application, RuntimeClient]:
    """Return vLLM's application over a runtime, and the client to shut down after it.

    Args:
        lm: a runtime over vLLM.
        model: the name that clients call it by.
        arguments: of ``vllm serve``; what they say of the engine has no effect any more.
        bodies: reads those that the application gets, before it does.

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
        # Other origins are let in in front of all routes, these and genrt's own.
        own = Namespace(**vars(arguments) | {"allowed_origins": []})
        application = build_app(own, TASKS, config.model_config)
        await init_app_state(client, application.state, arguments, TASKS)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"vLLM's front end does not take these options: {error}") from error
    except Exception as error:
        raise EngineFailed(f"vLLM's front end cannot be set up: {error}") from error
    application.state.openai_serving_models.lora_requests = _Adapters(lm)
    renderer = application.state.online_renderer
    renderer.preprocess_chat = keeping_turns(lm, renderer.preprocess_chat)
    telling_failures(application)
    routes = application.router.routes
    routes[:] = [each for each in routes if getattr(each, "path", None) not in CLOSED]
    if application.openapi_url is not None:
        application.router.routes.insert(0, _schema_route(application))
    return _checked(application, bodies), client


def _checked(application: Application, bodies: Bodies) -> Application:
    """Return an application that gets no body which would keep it busy for seconds."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        parts = [await receive()]  # the whole body
        check = _check_response if scope["path"].endswith("/responses") else check_front_end_body
        try:
            await bodies.read(parts[0].get("body", b""), check)
        except GenrtError as error:
            raise http_error(error) from error

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await application(scope, again, send)

    return answered


def _check_response(data: bytes, values: int) -> None:
    """Raise InvalidRequest for what ``check_front_end_body`` refuses, or for the first wrong one of the
    items: vLLM says of each, in hundreds of errors, why it is no item of any kind."""
    found = check_front_end_body(data, values)
    items = found.get("input") if isinstance(found, dict) else None
    for place, item in enumerate(items if isinstance(items, list) else ()):
        written = json_bytes(item)
        if written.count(b"[") + written.count(b"{") > 1000:
            raise InvalidRequest(f"input[{place}] has over 1000 lists and objects: send fewer")
        try:
            ResponsesRequest.model_validate({"input": [item]})
        except Exception as error:
            raise InvalidRequest(
                f"input[{place}] is no item of a response: see OpenAI's API"
            ) from error


def _schema_route(application: Any) -> Route:
    """Return the route of the application's OpenAPI schema. It takes a second to make, once: what the
    application would do on the event loop, every stream waiting, this does in a thread."""
    made: list[bytes] = []

    async def schema(_: Request) -> Response:
        if not made:
            made.append(await asyncio.to_thread(lambda: json_bytes(application.openapi())))
        return Response(made[0], media_type=JSON)

    return Route(application.openapi_url, schema, include_in_schema=False)


def _named(name: str) -> LoRARequest:
    # The engine has a number and copies of its own; a front end only ever reads the name.
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=name)


class _Adapters(MutableMapping[str, LoRARequest]):
    """The adapters of a runtime, under the names that they have now, as vLLM's front end names them. It
    adds one once the client has loaded it."""

    def __init__(self, lm: AsyncLM) -> None:
        self._lm = lm

    def _now(self) -> dict[str, LoRARequest]:
        return {name: _named(name) for name in self._lm.adapters}

    def __getitem__(self, name: str) -> LoRARequest:
        if name not in self._lm.adapters:
            raise KeyError(name)
        return _named(name)

    def values(self) -> ValuesView[LoRARequest]:
        return self._now().values()  # also where one is removed before it is looked up

    def items(self) -> ItemsView[str, LoRARequest]:
        return self._now().items()

    def __setitem__(self, name: str, _: LoRARequest) -> None:
        if name not in self._lm.adapters:
            raise KeyError(name)

    def __delitem__(self, name: str) -> None:
        self._lm.remove_adapter(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lm.adapters)

    def __len__(self) -> int:
        return len(self._lm.adapters)
