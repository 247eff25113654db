"""The routes behind ``AsyncLM.connect``: what the runtime is, its tokenizer, and whole flushes."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from genrt.engines.remote.tokenizers import packed_tokenizer
from genrt.engines.remote.wire import AnotherModel, Asked, answers_of, flush_to
from genrt.errors import Closed, EngineDied, EngineUnsupported, GenrtError, UnknownAdapter
from genrt.lm import AsyncLM
from genrt.questions.contexts import Adapter
from genrt.questions.reads import host_row
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.server.asgi import HTTPError
from genrt.server.bodies import json_bytes
from genrt.server.gate import ServerLimits
from genrt.server.routes import BYTES, JSON, answering, body_of, while_connected

__all__ = ["remote_routes"]


def remote_routes(lm: AsyncLM, model: str, limits: ServerLimits) -> list[Route]:
    """Return the routes."""
    # No counter tells weights of two processes apart: the runtime's nonce does.
    named = f"{model}/{lm.vocab_size}/{lm.max_model_len}/{lm._thread.nonce}"
    most = max(1, min(limits.contexts, limits.answer_bytes // (4 * lm.vocab_size)))
    packed: list[bytes] = []

    def fingerprint() -> str:
        """Return what rows depend on beside their questions; it is another one once weights are new."""
        return hashlib.sha256(f"{named}/{lm.weights_version}".encode()).hexdigest()[:16]

    async def runtime(_: Request) -> Response:
        adapters = [(each, lm._adapters.by_name.get(each)) for each in lm.adapters]
        found = {
            "model": model,
            "fingerprint": fingerprint(),
            "vocab_size": lm.vocab_size,
            "max_model_len": lm.max_model_len,
            "most_questions": most,
            "scores": lm._thread.capabilities.scores,
            "adapters": {name: each.version for name, each in adapters if each is not None},
        }
        return Response(json_bytes(found), media_type=JSON)

    async def tokenizer(_: Request) -> Response:
        if not packed:
            packed.append(await asyncio.to_thread(packed_tokenizer, lm._thread.engine.tokenizer))
        return Response(packed[0], media_type="application/zip")

    async def flush(request: Request) -> Response:
        data, now = await body_of(request, BYTES), fingerprint()
        try:
            given = await asyncio.to_thread(
                flush_to, data, lm._limits, lm._adapters.bound, model=now, most=most
            )
        except AnotherModel as error:
            raise HTTPError(409, str(error)) from error
        asked = [each if _is_taken(lm, each) else _no_scores() for each in given]
        bound = {each.adapter for each in asked if not isinstance(each, GenrtError)}
        versions = {each.name: each.version for each in bound if each is not None}
        results = await while_connected(request, _answers(lm, asked))
        if fingerprint() != now:  # some may be of the weights before, and some of those after
            raise HTTPError(409, str(AnotherModel()))
        for place, each in enumerate(asked):  # the same of adapters
            if not isinstance(each, GenrtError) and _is_swapped(lm, each.adapter):
                results[place] = UnknownAdapter(f"{each.adapter} was replaced meanwhile: ask again")
        told = await asyncio.to_thread(answers_of, results, versions)
        return Response(told, media_type=BYTES)

    return [
        Route("/v1/runtime", answering(runtime), methods=["GET"]),
        Route("/v1/tokenizer", answering(tokenizer), methods=["GET"]),
        Route("/v1/flush", answering(flush), methods=["POST"]),
    ]


def _is_taken(lm: AsyncLM, asked: object) -> bool:
    return lm._thread.capabilities.scores or not isinstance(asked, ScoreRequest)


def _is_swapped(lm: AsyncLM, adapter: Adapter | None) -> bool:
    return adapter is not None and lm._adapters.by_name.get(adapter.name) != adapter


def _no_scores() -> EngineUnsupported:
    return EngineUnsupported("the engine that is served here takes rows, no scores: connect again")


async def _answers(lm: AsyncLM, asked: list[Asked | GenrtError]) -> list[Any]:
    """Return the results of a flush, with the errors of those that fail or cannot be asked.

    Raises:
        Closed, EngineDied: nothing is answered any more.
    """
    requests = [
        host_row(each) if isinstance(each, LogprobsRequest) and lm.device.type != "cpu" else each
        for each in asked
        if not isinstance(each, GenrtError)
    ]
    results = iter(await _results(lm, requests))
    return [each if isinstance(each, GenrtError) else next(results) for each in asked]


async def _results(lm: AsyncLM, requests: list[Asked]) -> list[Any]:
    try:
        return [*await lm._ask(requests)]
    except (Closed, EngineDied):
        raise
    except GenrtError as error:
        if len(requests) == 1:
            return [error]
    # Each by itself, to see whose error it was; rows that were computed are in the cache, or soon again.
    found = await asyncio.gather(*(lm._ask((each,)) for each in requests), return_exceptions=True)
    results: list[Any] = []
    for each in found:
        if isinstance(each, Closed | EngineDied) or (
            isinstance(each, BaseException) and not isinstance(each, GenrtError)
        ):
            raise each
        results.append(each if isinstance(each, GenrtError) else each[0])
    return results
