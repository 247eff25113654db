"""A server: a runtime's HTTP front end, on a thread and its own event loop."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import resource
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from genrt.errors import EngineFailed, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, named
from genrt.runtime.concurrency import aside
from genrt.server.bodies import Bodies, longest_text
from genrt.server.gate import Gate, HTTPError, ServerLimits, check_key
from genrt.server.routes import OwnRoutes, TrainerRoutes
from genrt.server.status import status_routes

HEAD_BYTES = 2**16
"""The longest head of a request, and the longest line between the chunks of a body."""

READ_BYTES = 2**13
"""How many bytes of a connection are parsed before others have their turn."""

OVERHEAD_BYTES = 2**17
"""How many bytes the framing of a body may take, beside an eighth of the body."""

REFUSED_BYTES = 2**28
"""How many bytes of a refused body are read, so that the client reads the refusal."""


class Connections:
    """The open connections, at most ``most``. The longest idle one makes room for another; if all have a
    request, a new one is closed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[ClientConnection] = set()
        self._idle: dict[ClientConnection, None] = {}  # without a request, oldest first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: ClientConnection) -> bool:
        """Take in a connection; return whether there is room for it."""
        if len(self._open) >= self._most:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.abort()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def mark_idle(self, connection: ClientConnection) -> None:
        """Note that a connection has no request."""
        if connection in self._open:
            self._idle[connection] = None

    def mark_busy(self, connection: ClientConnection) -> None:
        """Note that a connection has a request."""
        self._idle.pop(connection, None)

    def remove(self, connection: ClientConnection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def abort_all(self) -> None:
        """Close all connections at once."""
        for each in [*self._open]:
            each.abort()


class ClientConnection(asyncio.BufferedProtocol):
    """One client's connection: bounds in front of ``http``, uvicorn's protocol.

    uvicorn waits for ever for the head of a request, and parses all that it has of a body at once.
    """

    http: H11Protocol

    def __init__(self, connections: Connections, head_seconds: float) -> None:
        self._connections = connections
        self._head_seconds = head_seconds
        self._buffer = bytearray(READ_BYTES)
        self._transport: Any = None
        self._late: asyncio.TimerHandle | None = None
        self._is_idle = True
        self._most_received = OVERHEAD_BYTES  # of the request in progress
        self._received = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if not self._connections.add(self):
            transport.abort()
        self.http.connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._connections.remove(self)
        self.http.connection_lost(exc)

    def pause_writing(self) -> None:
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.http.resume_writing()

    def eof_received(self) -> None:
        self.http.eof_received()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._received > self._most_received:
            self.abort()
            return
        if self._is_idle and self._late is None:
            self._expect_head()
        self.http.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    async def serve(self, application: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of this connection."""
        self._is_idle = False
        self._stop_timer()
        self._connections.mark_busy(self)
        self._received, self._most_received = 0, OVERHEAD_BYTES
        has_more = True

        async def counted() -> Message:
            nonlocal has_more
            message = await receive()
            if message["type"] == "http.request":
                has_more = message.get("more_body", False)
                size = len(message.get("body", b""))
                self._most_received += size + size // 8
            return message

        try:
            await application(scope, counted, send)
        finally:
            is_whole = any(name == b"content-length" for name, _ in scope["headers"])
            if has_more and is_whole:  # a body in chunks would be parsed chunk by chunk
                self._most_received = REFUSED_BYTES
            self._is_idle = True
            self._connections.mark_idle(self)

    def _expect_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(self._head_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n"
            self._transport.write(head + b"connection: close\r\n\r\n")
            self._transport.close()


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
        listening = listening_socket(self._host, self._port)
        # Otherwise the kernel keeps the unread data of ended connections for ever.
        milliseconds = int(1000 * min(self._limits.send_seconds, 2e6))
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, milliseconds))
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
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = 2**20 if descriptors == resource.RLIM_INFINITY else descriptors * 3 // 4
        self._connections = connections = Connections(min(limits.connections, most))
        self.gate = Gate(
            Router(own, redirect_slashes=False, default=openai or _missing),
            api_key=self._api_key,
            limits=limits,
            is_healthy=lambda: lm._thread.alive,
        )
        application: ASGIApp = self.gate
        if arguments is not None and arguments.allowed_origins:
            # In front of the gate: a browser's preflight request has no key.
            application = CORSMiddleware(
                application,
                allow_origins=arguments.allowed_origins,
                allow_methods=arguments.allowed_methods,
                allow_headers=arguments.allowed_headers,
                allow_credentials=arguments.allow_credentials,
            )

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            connection: ClientConnection = scope["state"]["connection"]
            await connection.serve(application, scope, receive, send)

        def connect(
            config: Any, server_state: Any, app_state: Any, _loop: Any = None
        ) -> ClientConnection:
            connection = ClientConnection(connections, limits.head_seconds)
            state = {**app_state, "connection": connection}
            connection.http = H11Protocol(config, server_state, state, _loop)
            return connection

        config = uvicorn.Config(
            serve,
            http=cast("Any", connect),
            h11_max_incomplete_event_size=HEAD_BYTES,
            ws="none",
            lifespan="off",  # vLLM's would freeze the process's garbage collector
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
        )
        ends = [self.gate.cancel_all, connections.abort_all]
        if client is not None:
            ends.insert(0, client.cancel_all)

        async def end() -> None:
            await asyncio.sleep(self._shutdown_seconds)
            for each in ends:  # of which each ends remaining requests
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
        return await aside(self.start)

    async def __aexit__(self, *_: object) -> None:
        await aside(self.close)

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
