"""A server: a runtime's HTTP front end, on a thread and its own event loop."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self

import uvicorn
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from genrt.errors import EngineFailed, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, named
from genrt.runtime.concurrency import run_in_thread
from genrt.server.bodies import Bodies, longest_text
from genrt.server.gate import Gate, HTTPError, ServerLimits, check_key
from genrt.server.routes import OwnRoutes, TrainerRoutes
from genrt.server.status import status_routes

HEAD_BYTES = 2**16
"""The longest head of a request, and the longest line between the chunks of a body."""


class Server:
    """A runtime that is served over HTTP once it is entered: ``async with serving(lm) as server: …``.

    It has vLLM's OpenAI routes, if the runtime's engine is vLLM, and genrt's own; the guide's page on
    serving describes them. The runtime answers its other users as before: closing a server leaves it
    open. If it is closed, the server stays up and answers 503.

    Args:
        host: the address to listen on. By default only this machine can ask.
        port: 0 is any free one.
        api_key: the key that clients must show, at least 8 characters; needed for any other address.
        model: the name that clients call the model by.
        limits: how much clients may ask at once.
        options: for vLLM's front end, by their names in ``vllm serve``: ``enable_auto_tool_choice``,
            ``tool_call_parser``, ``chat_template`` and others.
        shutdown_seconds: how long requests under way may take when the server is closed.
        trainers: whether vLLM's trainers may replace the weights, by its ``HTTPVLLMWeightSyncClient``;
            the engine has to be opened for it.

    Attributes:
        url: its address, such as ``http://127.0.0.1:8000``; ``None`` until it has started.
        gate: admits requests; ``None`` until it has started.

    Raises:
        InvalidRequest: an argument is out of range, or a key is missing.
        ExtraNotInstalled: a package of the extra ``serve`` is missing.
    """

    url: str | None = None
    gate: Gate | None = None

    def __init__(
        self,
        lm: AsyncLM,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        model: str = "genrt",
        limits: ServerLimits | None = None,
        options: Mapping[str, Any] | None = None,
        shutdown_seconds: float = 10.0,
        trainers: bool = False,
    ) -> None:
        for name, value, kind, noun in (
            ("lm", lm, AsyncLM, "a runtime"),
            ("host", host, str, "an address"),
            ("model", model, str, "a name"),
            ("limits", ServerLimits() if limits is None else limits, ServerLimits, "ServerLimits"),
            ("options", {} if options is None else options, Mapping, "a dict"),
        ):
            if not isinstance(value, kind) or value == "":
                raise InvalidRequest(f"{name} must be {noun}, got {named(value)}")
        self._lm = lm
        self._host, self._port = host, check_int("port", port, 0, 65535)
        self._api_key = check_key(api_key, host)
        self._model = model
        self._limits = limits or ServerLimits()
        self._options = dict(options or {})
        self._shutdown_seconds = check_float("shutdown_seconds", shutdown_seconds, 0.0, 1e6)
        self._takes_weights = check_bool("trainers", trainers)
        self._thread: threading.Thread | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._is_closing = False

    def start(self) -> Self:
        """Start to listen, and return once questions are answered.

        Raises:
            InvalidRequest: the address cannot be listened on, or vLLM's front end refuses the options.
            EngineFailed: vLLM's front end cannot be set up.
        """
        if self._thread is not None:
            raise InvalidRequest("a server starts once: make another with serving")
        listening = listening_socket(self._host, self._port)
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(listening, started), name="genrt-server", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)
        try:
            started.result()
        except BaseException:
            self.close()
            raise
        address, port = listening.getsockname()[:2]
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        return self

    def close(self) -> None:
        """Take no more requests, wait for the ones in progress, and free the address. Idempotent."""
        self._is_closing = True
        atexit.unregister(self.close)
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._shutdown_seconds + 5.0)

    def _run(self, listening: socket.socket, started: concurrent.futures.Future[None]) -> None:
        """Serve, in the thread."""
        make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
        with contextlib.suppress(ImportError):
            import uvloop

            make_loop = uvloop.new_event_loop
        try:
            with listening, asyncio.Runner(loop_factory=make_loop) as runner:
                runner.run(self._serve(listening, started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(
        self, listening: socket.socket, started: concurrent.futures.Future[None]
    ) -> None:
        lm, limits = self._lm, self._limits
        openai, client, arguments, trainers = None, None, None, None
        ids = max(lm.vocab_size, lm.max_model_len)
        bodies = Bodies(limits.values, text=longest_text(lm), ids=ids)
        routes = OwnRoutes(lm, self._model, limits, bodies)
        own = routes.routes() + status_routes(
            lm, self._model, routes.running, lambda: 0 if self.gate is None else self.gate.serving
        )
        if self._takes_weights:
            trainers = TrainerRoutes(lm, limits.update_seconds, bodies)
            await trainers.check()
            own += trainers.routes()
        if getattr(lm._thread.engine, "vllm_config", None) is not None:
            from genrt.server import openai as front_end

            arguments = front_end.front_end_options(self._options)
            openai, client = await front_end.openai_application(lm, self._model, arguments, bodies)
        elif self._options:
            raise InvalidRequest(
                "options are for vLLM's front end: this runtime has another engine"
            )
        self.gate = Gate(
            Router(own, redirect_slashes=False, default=openai or _missing),
            api_key=self._api_key,
            limits=limits,
            is_healthy=lambda: lm._thread.alive,
        )
        config = uvicorn.Config(
            self.gate,
            http="h11",
            limit_concurrency=limits.connections + 1,  # it is how many are too many
            h11_max_incomplete_event_size=HEAD_BYTES,
            ws="none",
            lifespan="off",  # vLLM's would freeze the process's garbage collector
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
        )
        cancel_all = self.gate.cancel_all

        async def end() -> None:
            await asyncio.sleep(self._shutdown_seconds)
            for each in (cancel_all, server.abort_all):  # of which each ends remaining requests
                each()
                await asyncio.sleep(1.0)

        self._uvicorn = server = _Uvicorn(config, lambda: started.set_result(None), end)
        server.should_exit = self._is_closing
        try:
            await server.serve(sockets=[listening])
        finally:
            if trainers is not None:
                await trainers.close()
            if client is not None:
                client.shutdown()
            if not started.done():
                raise EngineFailed("the server did not start")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await run_in_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await run_in_thread(self.close)

    def __repr__(self) -> str:
        is_up = self.url is not None and not self._is_closing
        return f"Server({self.url if is_up else 'closed'}, model={self._model!r})"


serving = Server
"""Makes a server: ``async with genrt.serving(lm) as server: …``."""


class _Uvicorn(uvicorn.Server):
    """uvicorn's server. ``end`` ends requests during its shutdown: uvicorn would log errors for them."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        end: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        super().__init__(config)
        self._on_started, self._end = on_started, end

    def abort_all(self) -> None:
        """Close all connections at once."""
        for each in [*self.server_state.connections]:
            each.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


async def _missing(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPError(404, "no such route: the guide's page on serving lists them")


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Raises InvalidRequest if it cannot."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {host}:{port}: {error}") from error
