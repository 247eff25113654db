"""A server: a runtime's HTTP front end, on a thread and an event loop of its own.

Rules:
    The runtime stays its owner's: closing a server leaves it open, and closing it leaves the server up,
    which answers 503 then.
    The thread ends with ``close``, with the context, or with the interpreter. Requests under way get
    ``shutdown_seconds`` to end; then they are withdrawn.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import ipaddress
import resource
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from genrt.errors import EngineFailed, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, named
from genrt.runtime.concurrency import aside
from genrt.server.asgi import Application, Receive, Scope, Send
from genrt.server.bodies import Bodies
from genrt.server.connections import Connections, connection_kind
from genrt.server.gate import Gate, ServerLimits, check_key
from genrt.server.inferences import Inferences
from genrt.server.remote_questions import remote_routes
from genrt.server.routes import question_routes
from genrt.server.status import status_routes
from genrt.server.trainers import TrainerRoutes

__all__ = ["Server", "bound_socket", "serving"]

KEEP_ALIVE_SECONDS = 75
"""How long a connection without a request stays open."""

DRAIN_SECONDS = 5.0
"""How much longer than ``shutdown_seconds`` ``close`` waits for the thread."""

TELL_SECONDS = 1.0
"""How long clients have to take the end of what is withdrawn, before more is done."""


class Server:
    """A runtime that is served over HTTP; made by ``serving``. A context manager both ways.

    Attributes:
        url: where it is, such as ``http://127.0.0.1:8000``; ``None`` until it has started.
        gate: who is being served.
        bound: a socket that has the address already, to be listened on and closed.
    """

    url: str | None = None
    bound: socket.socket | None = None
    gate: Gate | None = None

    def __init__(
        self,
        lm: AsyncLM,
        *,
        host: str,
        port: int,
        api_key: str | None,
        model: str,
        limits: ServerLimits,
        options: Mapping[str, Any],
        shutdown_seconds: float,
        trainers: bool,
    ) -> None:
        self._lm = lm
        self._host, self._port, self._api_key = host, port, api_key
        self._model, self._limits, self._options = model, limits, options
        self._shutdown_seconds = shutdown_seconds
        self._takes_weights = trainers
        self._thread: threading.Thread | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._is_closing = False
        self._connections: Connections | None = None

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return 0 if self._connections is None else len(self._connections)

    def start(self) -> Self:
        """Start to listen, and return once questions are answered.

        Raises:
            InvalidRequest: the address cannot be listened on, or vLLM's front end refuses the options.
            EngineFailed: vLLM's front end cannot be set up.
        """
        if self._thread is not None:
            raise InvalidRequest("a server starts once: make another with serving")
        listening = self.bound or bound_socket(
            self._host, self._port, needs_loopback=self._api_key is None
        )
        try:
            # What a connection that has ended leaves unread, the kernel would keep for ever.
            milliseconds = int(1000 * min(self._limits.send_seconds, 2e6))
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, milliseconds))
            listening.listen(2048)
        except OSError as error:
            listening.close()
            raise InvalidRequest(f"cannot listen on {self._host}:{self._port}: {error}") from error
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
        """Take no more requests, wait for those under way, and free the address. Idempotent."""
        self._is_closing = True
        atexit.unregister(self.close)
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._shutdown_seconds + DRAIN_SECONDS)
        elif self._thread is None and self.bound is not None:
            self.bound.close()

    def _run(self, listening: socket.socket, started: concurrent.futures.Future[None]) -> None:
        """Serve, in the thread."""
        try:
            with listening, asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve(listening, started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(
        self, listening: socket.socket, started: concurrent.futures.Future[None]
    ) -> None:
        openai, client, arguments = None, None, None
        bodies = Bodies(self._limits.values)
        own, trainers = self._own_routes(bodies), None
        if self._takes_weights:
            trainers = TrainerRoutes(self._lm, self._limits.update_seconds)
            await trainers.check()
            own += trainers.routes()
        if _is_vllm(self._lm):
            from genrt.server import openai as front_end

            arguments = front_end.front_end_options(self._options)
            openai, client = await front_end.openai_application(
                self._lm, self._model, arguments, bodies
            )
        elif self._options:
            raise InvalidRequest(
                "options are for vLLM's front end: this runtime has another engine"
            )
        self._connections = connections = Connections(
            min(self._limits.connections, _descriptors() * 3 // 4)
        )
        self.gate = Gate(
            _Routes(own, openai),
            api_key=self._api_key,
            limits=self._limits,
            is_healthy=lambda: self._lm._thread.alive,
            on_key=connections.know,
        )
        application: Application = self.gate
        if arguments is not None and arguments.allowed_origins:
            # In front of the gate: a browser asks without the key whether it may ask with it.
            application = CORSMiddleware(
                application,
                allow_origins=arguments.allowed_origins,
                allow_methods=arguments.allowed_methods,
                allow_headers=arguments.allowed_headers,
                allow_credentials=arguments.allow_credentials,
            )
        config = uvicorn.Config(
            application,
            http=connection_kind(self._limits.head_seconds, connections),
            ws="none",
            lifespan="off",  # vLLM's would freeze the process's garbage collector
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        ends = [self.gate.withdraw] if client is None else [client.withdraw, self.gate.withdraw]
        self._uvicorn = server = _Uvicorn(
            config, lambda: started.set_result(None), self._shutdown_seconds, ends
        )
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

    def _own_routes(self, bodies: Bodies) -> list[Route]:
        inferences = Inferences(self._lm, self._limits, bodies)
        return [
            *question_routes(self._lm, self._limits, bodies),
            *remote_routes(self._lm, self._model, self._limits),
            inferences.route(),
            *status_routes(self._lm, self._model, inferences.running.values, self._serving),
        ]

    def _serving(self) -> int:
        return 0 if self.gate is None else self.gate.serving

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await aside(self.start)

    async def __aexit__(self, *_: object) -> None:
        await aside(self.close)

    def __repr__(self) -> str:
        is_up = self.url is not None and not self._is_closing
        return f"Server({self.url if is_up else 'closed'}, model={self._model!r})"


def serving(
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
) -> Server:
    """Return a server of a runtime, to be entered: ``async with serving(lm) as server: …``.

    It has vLLM's OpenAI routes, if the runtime's engine is vLLM, and genrt's own; the guide's page on
    serving describes them. The runtime answers its other users as before.

    Args:
        host: the address to listen on. By default only this machine can ask.
        port: 0 is any free one; ``Server.url`` has it.
        api_key: what clients have to show, at least 8 characters; needed for any other address.
        model: the name that clients call the model by.
        limits: how much clients may ask at once.
        options: for vLLM's front end, by their names in ``vllm serve``: ``enable_auto_tool_choice``,
            ``tool_call_parser``, ``chat_template`` and others.
        shutdown_seconds: how long requests under way may take when the server is closed.
        trainers: whether vLLM's trainers may replace the weights, by its ``HTTPVLLMWeightSyncClient``;
            the engine has to be opened for it.

    Raises:
        InvalidRequest: an argument is out of range, or a key is missing.
        ExtraNotInstalled: a package of the extra ``serve`` is missing.
    """
    if not isinstance(lm, AsyncLM):
        raise InvalidRequest(f"serving takes a runtime, got {type(lm).__name__}")
    if not isinstance(host, str) or not host:
        raise InvalidRequest(f"host must be an address, got {named(host)}")
    if not isinstance(model, str) or not model:
        raise InvalidRequest(f"model must be a name, got {named(model)}")
    if limits is not None and not isinstance(limits, ServerLimits):
        raise InvalidRequest(f"limits must be ServerLimits, got {type(limits).__name__}")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidRequest(f"options must be a dict, got {type(options).__name__}")
    return Server(
        lm,
        host=host,
        port=check_int("port", port, 0, 65535),
        api_key=check_key(api_key, host),
        model=model,
        limits=limits or ServerLimits(),
        options=dict(options or {}),
        shutdown_seconds=check_float("shutdown_seconds", shutdown_seconds, 0.0, 1e6),
        trainers=check_bool("trainers", trainers),
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which says when it listens, and ends requests in its own way: uvicorn would
    cancel them, and log that as their errors.

    Args:
        on_started: called when it listens.
        shutdown_seconds: how long requests under way may go on.
        ends: withdraw them then, one after the other for those that are left; at last they are cut.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        shutdown_seconds: float,
        ends: Sequence[Callable[[], None]],
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._shutdown_seconds = shutdown_seconds
        self._ends = ends

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end(self) -> None:
        await asyncio.sleep(self._shutdown_seconds)
        for end in self._ends:
            end()
            await asyncio.sleep(TELL_SECONDS)
        for connection in [*self.server_state.connections]:
            cast("Any", connection).transport.abort()


class _Routes:
    """genrt's own routes, and behind them vLLM's application, if there is one."""

    def __init__(self, own: list[Route], openai: Application | None) -> None:
        self._own = Router(own, redirect_slashes=False)
        self._paths = {route.path for route in own}
        self._openai = openai

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = self._openai is None or scope["path"] in self._paths
        await (self._own if is_own or self._openai is None else self._openai)(scope, receive, send)


def _is_vllm(lm: AsyncLM) -> bool:
    return getattr(lm._thread.engine, "vllm_config", None) is not None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the faster event loops, where they are installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _descriptors() -> int:
    """Return how many descriptors the process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if most == resource.RLIM_INFINITY else most


def bound_socket(host: str, port: int, *, needs_loopback: bool) -> socket.socket:
    """Return a socket that has an address, and does not listen yet.

    Raises:
        InvalidRequest: it cannot, or others than this machine could reach it though they must not.
    """
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        if needs_loopback and not ipaddress.ip_address(address[0]).is_loopback:
            raise InvalidRequest(f"{host!r} is {address[0]}, which needs an api_key")
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address[:2])
        except BaseException:
            bound.close()
            raise
        return bound
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {host}:{port}: {error}") from error
