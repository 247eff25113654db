"""Routes by which vLLM's trainers refit the runtime that is served: those that its
``HTTPVLLMWeightSyncClient`` calls.

Rules:
    They are served only where the owner of the server says so: whoever may call them has the model's
    weights in hand.
    A page in a browser may not call them: requests that say where a page is from are refused.
    A trainer that is silent for too long in the middle of an update is given up, and so is one whose
    server is closed: questions would wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from genrt.errors import EngineFailed
from genrt.lm import AsyncLM
from genrt.runtime.weights import Transfers
from genrt.server.asgi import HTTPError
from genrt.server.bodies import Body, json_bytes
from genrt.server.routes import JSON, answering, body_of

__all__ = ["TrainerRoutes"]

Call = Callable[[Request], Awaitable[object]]


class TrainerRoutes:
    """The routes of one server, which are one trainer's at a time.

    Args:
        silent_seconds: how long a trainer may leave an update that it has begun.
    """

    def __init__(self, lm: AsyncLM, silent_seconds: float) -> None:
        self._transfers = Transfers(lm._weights)
        self._silent_seconds = silent_seconds
        self._turns = asyncio.Lock()
        self._silence: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Raise EngineUnsupported unless the engine was opened to receive weights."""
        await self._transfers.check()

    def routes(self) -> list[Route]:
        """Return the routes, by vLLM's names."""
        calls = {
            "/init_weight_transfer_engine": self._connect,
            "/shutdown_weight_transfer_engine": self._disconnect,
            "/start_weight_update": self._start,
            "/update_weights": self._take,
            "/finish_weight_update": self._finish,
        }
        return [
            Route(path, answering(self._alone(call)), methods=["POST"])
            for path, call in calls.items()
        ]

    async def close(self) -> None:
        """Give up the update that is under way, if one is."""
        self._be_heard()
        await self._transfers.give_up()

    def _alone(self, call: Call) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            if "origin" in request.headers:
                raise HTTPError(403, "pages in browsers may not replace weights")
            async with self._turns:
                self._be_heard()
                try:
                    found = await call(request)
                finally:
                    if self._transfers.is_under_way:
                        self._silence = asyncio.create_task(self._give_up())
            return Response(json_bytes(found), media_type=JSON)

        return answered

    def _be_heard(self) -> None:
        silence, self._silence = self._silence, None
        if silence is not None:
            silence.cancel()

    async def _give_up(self) -> None:
        await asyncio.sleep(self._silent_seconds)
        async with self._turns:
            await self._transfers.give_up()

    async def _connect(self, request: Request) -> object:
        body = Body(await body_of(request))
        given: dict[str, Any] = body.members("init_info")
        body.end()
        try:
            await self._transfers.connect(given)
        except EngineFailed as error:  # by what the trainer says of itself
            raise HTTPError(400, str(error)) from error
        return {}

    async def _disconnect(self, _: Request) -> object:
        await self._transfers.disconnect()
        return {}

    async def _start(self, _: Request) -> object:
        await self._transfers.start("finish")
        return {}

    async def _take(self, request: Request) -> object:
        body = Body(await body_of(request))
        given = body.take("update_info")
        body.end()
        if not isinstance(given, dict) and not (
            isinstance(given, list) and all(isinstance(each, dict) for each in given)
        ):
            raise HTTPError(400, "update_info must be an object, or a list of objects")
        await self._transfers.take(given)
        return {}

    async def _finish(self, _: Request) -> object:
        return {"weights_version": await self._transfers.finish()}
