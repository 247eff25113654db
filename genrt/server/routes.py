"""genrt's own routes: rows, draws and scores of many contexts at once.

A prompt is a text or a list of token ids. In JSON, null stands for a log-probability of -inf.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from genrt.errors import GenrtError, InvalidRequest
from genrt.lm import AsyncLM
from genrt.runtime.concurrency import together
from genrt.server.asgi import HTTPError, http_error
from genrt.server.bodies import Bodies, Body, contexts_of, finite, json_bytes
from genrt.server.gate import ClientLeft, ServerLimits

__all__ = ["BYTES", "JSON", "answering", "body_of", "question_routes", "while_connected"]

T = TypeVar("T")

JSON, BYTES = "application/json", "application/octet-stream"

SHORT = 2**13
"""So many characters are tokenized in a few milliseconds."""

Handler = Callable[[Request], Awaitable[Response]]


def answering(handler: Handler) -> Handler:
    """Return a handler whose errors of genrt's are answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except GenrtError as error:
            raise http_error(error) from error

    return answered


async def body_of(request: Request, kind: str = JSON) -> bytes:
    """Return the body. Raises HTTPError if it is said to be of another kind: what a page of another site
    may send without asking is of none of ours."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPError(415, f"content-type must be {kind}")
    return await request.body()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns, and cancel it when the client disconnects. The body must have been
    read.

    Raises:
        ClientLeft: it did.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def question_routes(lm: AsyncLM, limits: ServerLimits, bodies: Bodies) -> list[Route]:
    """Return the routes for rows, draws and scores."""

    async def rows(request: Request) -> Response:
        body = await bodies.read(await body_of(request), Body)
        contexts = await _tokenized(lm, bodies, body.listed("prompts", limits.contexts), "prompts")
        k = body.integer("top", 1, lm.vocab_size, None)
        adapter = body.text("adapter", None)
        body.end()
        size = 24 * k if k is not None else 4 * lm.vocab_size
        is_much = k is not None and k * len(contexts) > limits.values
        if is_much or size * len(contexts) > limits.answer_bytes:
            raise InvalidRequest(
                f"the answer would be over {limits.answer_bytes} bytes, or {limits.values} tokens: ask "
                "for fewer prompts, or for fewer tokens with top"
            )
        if k is None:
            asked = lm.batch_next_token_logprobs(contexts, device="cpu", adapter=adapter)
            table = await while_connected(request, asked)
            shape = {"genrt-shape": f"{len(table)},{lm.vocab_size}"}
            return Response(table.numpy().data.cast("B"), media_type=BYTES, headers=shape)
        tops = [lm.top_logprobs(each, k, adapter=adapter) for each in contexts]
        found = await while_connected(request, together(tops))

        def written() -> Response:
            data = [  # one by one, so that other threads run in between
                json_bytes(
                    {"token_ids": ids.tolist(), "logprobs": [*map(finite, logprobs.tolist())]}
                )
                for ids, logprobs in found
            ]
            return Response(b'{"data":[' + b",".join(data) + b"]}", media_type=JSON)

        return await bodies.aside(written)

    async def draws(request: Request) -> Response:
        body = await bodies.read(await body_of(request), Body)
        contexts = await _tokenized(lm, bodies, body.listed("prompts", limits.contexts), "prompts")
        masks = body.listed("masks", limits.contexts) if "masks" in body else None
        for mask in masks or ():
            if mask is not None and not (
                isinstance(mask, list) and all(type(token) is int for token in mask)
            ):
                raise InvalidRequest("masks must be lists of token ids, or null")
        asked = {name: body.take(name, None) for name in ("temperature", "seed")}
        given = {name: value for name, value in asked.items() if value is not None}
        adapter = body.text("adapter", None)
        body.end()
        drawn = await while_connected(
            request, lm.batch_draw(contexts, masks=masks, adapter=adapter, **given)
        )
        data = [
            {"token_id": token_id, "logprob": finite(logprob), "log_mass": finite(log_mass)}
            for token_id, logprob, log_mass in zip(*(each.tolist() for each in drawn), strict=True)
        ]
        return _answer({"data": data})

    async def scores(request: Request) -> Response:
        body = await bodies.read(await body_of(request), Body)
        prompts = await _tokenized(lm, bodies, body.listed("prompts", limits.contexts), "prompts")
        given = body.listed("continuations", limits.contexts)
        adapter = body.text("adapter", None)
        body.end()
        if len(given) != len(prompts):
            raise InvalidRequest(
                f"{len(given)} continuations for {len(prompts)} prompts: give one for each"
            )
        continuations = await _tokenized(lm, bodies, given, "continuations", begins=False)
        if (count := sum(map(len, continuations))) > limits.contexts:
            raise InvalidRequest(
                f"continuations have {count} tokens together: {limits.contexts} at most, or ask again"
            )
        asked = lm.batch_score(prompts, continuations, adapter=adapter)
        data = [
            {"logprobs": list(map(finite, each.tolist())), "total": finite(float(each.sum()))}
            for each in await while_connected(request, asked)
        ]
        return _answer({"data": data})

    own = {"/v1/next_token_logprobs": rows, "/v1/draw": draws, "/v1/score": scores}
    return [Route(path, answering(each), methods=["POST"]) for path, each in own.items()]


async def _tokenized(
    lm: AsyncLM, bodies: Bodies, given: Sequence[Any], name: str, *, begins: bool = True
) -> list[list[int]]:
    """Return contexts as ``contexts_of`` does: off the event loop if that takes long."""
    if sum(len(each) for each in given if isinstance(each, str | list)) <= SHORT:
        return contexts_of(lm, given, name, begins=begins)
    return await bodies.tokenize(lambda: contexts_of(lm, given, name, begins=begins))


def _answer(value: object) -> Response:
    return Response(json_bytes(value), media_type=JSON)
