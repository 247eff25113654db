"""genrt's own routes: rows, draws, scores, inference, whole flushes for ``AsyncLM.connect``, and weights.

A prompt is a text or a list of token ids. In JSON, null stands for a log-probability of -inf.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from genrt.constraints import MaskedConstraint, grammar, json_schema, regex
from genrt.engines.remote.wire import (
    AnotherModel,
    Question,
    answers_of,
    flush_to,
    packed_tokenizer,
    teacher_bytes,
)
from genrt.engines.weights import KVCache
from genrt.errors import (
    Closed,
    EngineDied,
    EngineFailed,
    EngineUnsupported,
    GenrtError,
    InvalidRequest,
    UnknownAdapter,
)
from genrt.inference import SMC, Info, Result, State, TextModel
from genrt.lm import AsyncLM
from genrt.numbers import json_number
from genrt.questions.arguments import LAST_SEED
from genrt.questions.reads import HostRow, ReadRequest
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.runtime.batcher import Pending
from genrt.runtime.concurrency import gather_all
from genrt.runtime.weights import Transfers
from genrt.server.bodies import Bodies, JSONBody, TokenList, contexts_of, json_bytes, parse_body
from genrt.server.gate import ClientLeft, HTTPError, ServerLimits, error_event, http_error

T = TypeVar("T")
B = TypeVar("B", bound=JSONBody)

JSON, BYTES = "application/json", "application/octet-stream"

SHORT = 2**13
"""So many characters are tokenized in a few milliseconds."""

Texts: TypeAlias = Annotated[list[str | TokenList], Field(min_length=1, fail_fast=True)]


class RowsBody(JSONBody):
    """Body of ``/v1/next_token_logprobs``: prompts, and how many of the likeliest tokens to return."""

    prompts: Texts
    top: int | None = None
    adapter: str | None = None


class DrawBody(JSONBody):
    """Body of ``/v1/draw``: prompts, and for each the token ids that may be drawn, or null."""

    prompts: Texts
    masks: Annotated[list[TokenList | None], Field(min_length=1, fail_fast=True)] | None = None
    temperature: float | None = None
    seed: int | None = None
    adapter: str | None = None


class ScoreBody(JSONBody):
    """Body of ``/v1/score``: prompts, and a continuation of each."""

    prompts: Texts
    continuations: Texts
    adapter: str | None = None


class TeacherBody(JSONBody):
    """Body of ``/v1/teacher``: texts, how many of the likeliest tokens after each of their tokens to
    return, and whether as bytes."""

    prompts: Texts
    top: int = 256
    start: int = 1
    temperature: float = 1.0
    adapter: str | None = None
    binary: bool = False


class InferBody(JSONBody):
    """Body of ``/v1/infer``: a prompt, a form, and settings of SMC."""

    prompt: str | TokenList
    particles: int
    max_tokens: int
    regex: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    grammar: str | None = None
    resample_when: float = Field(default=0.5, ge=0.0, le=1.0)
    temperature: float | None = None
    seed: int | None = Field(default=None, ge=0, le=LAST_SEED)
    adapter: str | None = None
    stream: bool = False


class InitBody(JSONBody):
    """Body of ``/init_weight_transfer_engine``."""

    init_info: dict[str, Any]


class StartBody(JSONBody):
    """Body of ``/start_weight_update``: how earlier questions end, as for ``AsyncLM.update_weights``."""

    pending: Pending = "finish"
    kv_cache: KVCache | None = None


class UpdateBody(JSONBody):
    """Body of ``/update_weights``."""

    update_info: dict[str, Any] | list[dict[str, Any]]


async def _body_data(request: Request, kind: str) -> bytes:
    """Return the body. Other content types are refused: pages of other sites may send some unasked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise HTTPError(415, f"content-type must be {kind}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPError(415, "compressed bodies are not read: leave out content-encoding")
    return await request.body()


async def _json_body(request: Request, bodies: Bodies, kind: type[B]) -> B:
    data = await _body_data(request, JSON)
    return await bodies.read(data, lambda data: parse_body(kind, data, bodies.values))


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; cancel it and raise ClientLeft when the client disconnects."""

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


def _answer(value: object) -> Response:
    return Response(json_bytes(value), media_type=JSON)


class OwnRoutes:
    """genrt's own routes, but for a trainer's.

    ``/v1/next_token_logprobs``, ``/v1/draw``, ``/v1/score`` and ``/v1/teacher`` are for many contexts at
    once.
    ``/v1/infer`` is sequential Monte Carlo over texts that have a form: it returns the posterior and the
    evidence, and a stream has an event for each step first. The rest are for ``AsyncLM.connect``.

    Attributes:
        running: the inferences in progress, by their numbers, as the status page shows them.
    """

    def __init__(self, lm: AsyncLM, model: str, limits: ServerLimits, bodies: Bodies) -> None:
        self.running: dict[int, dict[str, Any]] = {}
        self._lm, self._model, self._limits, self._bodies = lm, model, limits, bodies
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(64)
        self._tokenizer_data: bytes | None = None

    def routes(self) -> list[Route]:
        """Return the routes."""
        post = {
            "/v1/next_token_logprobs": self._rows,
            "/v1/draw": self._draws,
            "/v1/score": self._scores,
            "/v1/teacher": self._teacher,
            "/v1/infer": self._infer,
            "/v1/flush": self._flush,
        }
        get = {"/v1/runtime": self._runtime, "/v1/tokenizer": self._tokenizer}
        return [
            *(Route(path, each, methods=["POST"]) for path, each in post.items()),
            *(Route(path, each, methods=["GET"]) for path, each in get.items()),
        ]

    async def _rows(self, request: Request) -> Response:
        lm, limits = self._lm, self._limits
        body = await _json_body(request, self._bodies, RowsBody)
        contexts = await self._contexts(body.prompts, "prompts")
        k, adapter = body.top, body.adapter
        size = 24 * k if k is not None else 4 * lm.vocab_size
        is_much = k is not None and k * len(contexts) > limits.values
        self._check_size(size * len(contexts), is_much=is_much)
        if k is None:
            rows = lm.batch_next_token_logprobs(contexts, device="cpu", adapter=adapter)
            table = await _while_connected(request, rows)
            shape = {"genrt-shape": f"{len(table)},{lm.vocab_size}"}
            return Response(table.numpy().data.cast("B"), media_type=BYTES, headers=shape)
        tops = [lm.top_logprobs(each, k, adapter=adapter) for each in contexts]
        found = await _while_connected(request, gather_all(tops))

        def written() -> Response:
            data = [  # one by one, so that other threads run in between
                json_bytes(
                    {"token_ids": ids.tolist(), "logprobs": [*map(json_number, logprobs.tolist())]}
                )
                for ids, logprobs in found
            ]
            return Response(b'{"data":[' + b",".join(data) + b"]}", media_type=JSON)

        return await self._bodies.aside(written)

    async def _draws(self, request: Request) -> Response:
        body = await _json_body(request, self._bodies, DrawBody)
        contexts = await self._contexts(body.prompts, "prompts")
        options: dict[str, Any] = {"temperature": body.temperature, "seed": body.seed}
        options = {name: value for name, value in options.items() if value is not None}
        draws = self._lm.batch_draw(contexts, masks=body.masks, adapter=body.adapter, **options)
        drawn = await _while_connected(request, draws)
        data = [
            {
                "token_id": token_id,
                "logprob": json_number(logprob),
                "log_mass": json_number(log_mass),
            }
            for token_id, logprob, log_mass in zip(*(each.tolist() for each in drawn), strict=True)
        ]
        return _answer({"data": data})

    async def _scores(self, request: Request) -> Response:
        body, most = await _json_body(request, self._bodies, ScoreBody), self._limits.contexts
        prompts = await self._contexts(body.prompts, "prompts")
        if len(body.continuations) != len(prompts):
            raise InvalidRequest(
                f"continuations has length {len(body.continuations)}, not {len(prompts)}, as prompts has"
            )
        continuations = await self._contexts(body.continuations, "continuations", begins=False)
        if (count := sum(map(len, continuations))) > most:
            raise InvalidRequest(
                f"continuations have {count} tokens together, and {most} is the most: split the request"
            )
        scores = self._lm.batch_score(prompts, continuations, adapter=body.adapter)
        data = [
            {
                "logprobs": list(map(json_number, each.tolist())),
                "total": json_number(float(each.sum())),
            }
            for each in await _while_connected(request, scores)
        ]
        return _answer({"data": data})

    def _check_size(self, size: int, *, is_much: bool) -> None:
        """Raise InvalidRequest if an answer would be too large."""
        limits = self._limits
        if is_much or size > limits.answer_bytes:
            raise InvalidRequest(
                f"the answer would be over {limits.answer_bytes} bytes, or {limits.values} tokens: ask "
                "for fewer prompts, or for fewer tokens with top"
            )

    async def _teacher(self, request: Request) -> Response:
        body, limits = await _json_body(request, self._bodies, TeacherBody), self._limits
        texts = await self._contexts(body.prompts, "prompts")
        tokens = sum(map(len, texts)) * max(body.top, 1)
        size = (8 if body.binary else 24) * tokens
        self._check_size(size, is_much=tokens > limits.values and not body.binary)
        options: dict[str, Any] = {"top": body.top, "start": body.start, "adapter": body.adapter}
        asked = self._lm.batch_teacher(texts, temperature=body.temperature, **options)
        found = await _while_connected(request, asked)
        if body.binary:
            data = await self._bodies.aside(lambda: teacher_bytes(found))
            return Response(data, media_type=BYTES)

        def written() -> Response:
            data = [
                json_bytes(
                    {
                        "token_ids": each.token_ids.tolist(),
                        "logprobs": [[*map(json_number, row)] for row in each.logprobs.tolist()],
                        "tail": [*map(json_number, each.tail.tolist())],
                    }
                )
                for each in found
            ]
            return Response(b'{"data":[' + b",".join(data) + b"]}", media_type=JSON)

        return await self._bodies.aside(written)

    async def _contexts(
        self, given: Sequence[Any], name: str, *, begins: bool = True
    ) -> list[list[int]]:
        """Return contexts as ``contexts_of`` does: in a thread if they are long."""
        if len(given) > self._limits.contexts:
            raise InvalidRequest(
                f"{name} must have 1 to {self._limits.contexts} members, got {len(given)}"
            )
        if sum(map(len, given)) <= SHORT:
            return contexts_of(self._lm, given, name, begins=begins)
        return await self._bodies.tokenize(
            lambda: contexts_of(self._lm, given, name, begins=begins)
        )

    # -- inference

    async def _infer(self, request: Request) -> Response:
        body = await _json_body(request, self._bodies, InferBody)
        # A form may take long to compile, and a prompt to tokenize.
        smc = await self._bodies.tokenize(lambda: self._smc(body))
        seed = secrets.randbits(62) if body.seed is None else body.seed
        if body.stream:
            return StreamingResponse(self._events(smc, seed), media_type="text/event-stream")
        result = await _while_connected(request, self._run(smc, seed, lambda info: None))
        data = await self._bodies.aside(lambda: json_bytes(_result_json(result, seed)))
        return Response(data, media_type=JSON)

    def _smc(self, body: InferBody) -> SMC:
        lm, most = self._lm, self._limits.contexts
        if not 1 <= body.particles <= most:
            raise InvalidRequest(f"particles must be from 1 to {most}, got {body.particles}")
        if not 1 <= body.max_tokens <= lm.max_model_len:
            raise InvalidRequest(
                f"max_tokens must be from 1 to {lm.max_model_len}, got {body.max_tokens}"
            )
        [prompt] = contexts_of(lm, [body.prompt], "prompt")
        options: dict[str, Any] = {"constraint": _constraint(lm, body), "adapter": body.adapter}
        if body.temperature is not None:
            options["temperature"] = body.temperature
        model = TextModel(lm, prompt, max_tokens=body.max_tokens, **options)
        lm._bound(body.adapter)  # an unknown adapter is refused before the first step
        return SMC(model, num_particles=body.particles, resample_when=body.resample_when)

    async def _run(self, smc: SMC, seed: int, on_step: Callable[[Info], None]) -> Result:
        """Run an inference when its turn comes."""
        async with self._turns:
            number, count = next(self._numbers), len(smc.init(seed).particles)
            running: dict[str, Any] = {
                "number": number,
                "particles": count,
                "max_steps": smc.model.max_steps or 0,
            }
            running |= {"step": 0, "ess": count, "unfinished": count, "log_evidence": 0.0}
            self.running[number] = running

            def noted(_: State, info: Info) -> None:
                running.update(_step(info) | {"step": info.step + 1})
                on_step(info)

            try:
                return await smc.run(seed, on_step=noted)
            finally:
                del self.running[number]

    async def _events(self, smc: SMC, seed: int) -> AsyncIterator[bytes]:
        """Yield an event for each step, and the result, or the error that ended it."""
        steps: asyncio.Queue[Info | None] = asyncio.Queue()
        run = asyncio.create_task(self._run(smc, seed, steps.put_nowait))
        run.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (info := await steps.get()) is not None:
                yield _event("step", _step(info))
            yield await self._bodies.aside(
                lambda: _event("result", _result_json(run.result(), seed))
            )
        except GenrtError as error:
            yield error_event(http_error(error))
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    # -- AsyncLM.connect

    @property
    def _most(self) -> int:
        """The most questions of a flush."""
        limits = self._limits
        return max(1, min(limits.contexts, limits.answer_bytes // (4 * self._lm.vocab_size)))

    def _fingerprint(self) -> str:
        """Return a digest of the model, its weights and the process."""
        lm = self._lm
        named = f"{self._model}/{lm.vocab_size}/{lm.max_model_len}/{lm._thread.nonce}"
        return hashlib.sha256(f"{named}/{lm.weights_version}".encode()).hexdigest()[:16]

    async def _runtime(self, _: Request) -> Response:
        lm = self._lm
        adapters = [(each, lm._adapters.by_name.get(each)) for each in lm.adapters]
        return _answer(
            {
                "model": self._model,
                "fingerprint": self._fingerprint(),
                "vocab_size": lm.vocab_size,
                "max_model_len": lm.max_model_len,
                "most_questions": self._most,
                "scores": lm._thread.capabilities.scores,
                "adapters": {name: each.version for name, each in adapters if each is not None},
            }
        )

    async def _tokenizer(self, _: Request) -> Response:
        if self._tokenizer_data is None:
            tokenizer = self._lm._thread.engine.tokenizer
            self._tokenizer_data = await asyncio.to_thread(packed_tokenizer, tokenizer)
        return Response(self._tokenizer_data, media_type="application/zip")

    async def _flush(self, request: Request) -> Response:
        lm, data, now = self._lm, await _body_data(request, BYTES), self._fingerprint()
        bound, most = lm._bound, self._most
        try:
            questions = await asyncio.to_thread(
                flush_to, data, lm._limits, bound, model=now, most=most
            )
        except AnotherModel as error:
            raise HTTPError(409, str(error)) from error
        if not lm._thread.capabilities.scores:
            refusal = EngineUnsupported("this server's engine computes no scores: connect again")
            questions = [refusal if isinstance(each, ScoreRequest) else each for each in questions]
        size = sum(each.answer_bytes for each in questions if isinstance(each, ScoreRequest))
        if size > self._limits.answer_bytes:
            raise InvalidRequest(f"the scores would be over {self._limits.answer_bytes} bytes")
        adapters = [None if isinstance(each, GenrtError) else each.adapter for each in questions]
        results = await _while_connected(request, self._answers(questions))
        if self._fingerprint() != now:  # the rows may be of the old and the new weights
            raise HTTPError(409, str(AnotherModel()))
        for place, each in enumerate(adapters):
            if each is not None and lm._adapters.by_name.get(each.name) != each:
                results[place] = UnknownAdapter(f"{each} was replaced meanwhile: ask again")
        answer = await asyncio.to_thread(answers_of, results)
        return Response(answer, media_type=BYTES)

    async def _answers(self, questions: Sequence[Question | GenrtError]) -> list[Any]:
        """Return the results of a flush, with an error in the place of each question that fails."""
        lm = self._lm
        is_far = lm.device.type != "cpu"
        requests = [
            ReadRequest(each, HostRow()) if is_far and isinstance(each, LogprobsRequest) else each
            for each in questions
            if not isinstance(each, GenrtError)
        ]

        async def alone(request: Question) -> Any:
            try:
                return (await lm._ask((request,)))[0]
            except (Closed, EngineDied):
                raise
            except GenrtError as error:
                return error

        try:
            found: Sequence[Any] = await lm._ask(requests)
        except (Closed, EngineDied):
            raise
        except GenrtError:  # rows that were computed are mostly in the cache
            found = await gather_all([alone(each) for each in requests])
        results = iter(found)
        return [each if isinstance(each, GenrtError) else next(results) for each in questions]


def _constraint(lm: AsyncLM, body: InferBody) -> MaskedConstraint | None:
    """Return the form that the texts are to have, if any."""
    makers: dict[str, Any] = {"regex": regex, "json_schema": json_schema, "grammar": grammar}
    given = {name: form for name in makers if (form := getattr(body, name)) is not None}
    if len(given) > 1:
        raise InvalidRequest(f"give one of {', '.join(makers)}: a text has one form")
    made: MaskedConstraint | None = None
    for name, form in given.items():
        if isinstance(form, str) and len(form) > 2**18:
            raise InvalidRequest("the form has over 262,144 characters: make it smaller")
        made = makers[name](form, lm)
    return made


def _step(info: Info) -> dict[str, Any]:
    return {
        "step": info.step,
        "ess": info.ess,
        "log_evidence": json_number(info.log_evidence),
        "resampled": info.resampled,
        "unfinished": info.unfinished,
    }


def _result_json(result: Result, seed: int) -> dict[str, Any]:
    particles = zip(result.texts, result.token_ids, result.log_weights.tolist(), strict=True)
    return {
        "posterior": [{"text": text, "weight": weight} for text, weight in result.posterior()],
        "log_evidence": json_number(result.log_evidence),
        "ess": result.ess,
        "steps": len(result.infos),
        "seed": seed,
        "particles": [
            {"text": text, "token_ids": list(ids), "log_weight": json_number(weight)}
            for text, ids, weight in particles
        ],
    }


def _event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(value) + b"\n\n"


# -- trainers ----------------------------------------------------------------------------------------


class TrainerRoutes:
    """The routes that vLLM's ``HTTPVLLMWeightSyncClient`` calls to update the weights.

    Only the server's owner enables them. Requests of pages in browsers are refused. An update is
    dropped if the trainer pauses for too long, and so is one when the server closes.

    Args:
        silent_seconds: how long a trainer may pause in the middle of an update.
    """

    def __init__(self, lm: AsyncLM, silent_seconds: float, bodies: Bodies) -> None:
        self._transfers = Transfers(lm._weights)
        self._silent_seconds = silent_seconds
        self._bodies = bodies
        self._turns = asyncio.Lock()
        self._silence: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Raise EngineUnsupported unless the engine was opened to receive weights."""
        await self._transfers.check()

    def routes(self) -> list[Route]:
        """Return the routes, by vLLM's names."""
        transfers = self._transfers
        calls: dict[str, Callable[[Request], Awaitable[object]]] = {
            "/init_weight_transfer_engine": self._connect,
            "/shutdown_weight_transfer_engine": lambda _: transfers.disconnect(),
            "/start_weight_update": self._start,
            "/update_weights": self._take,
            "/finish_weight_update": self._finish,
        }
        return [Route(path, self._alone(call), methods=["POST"]) for path, call in calls.items()]

    async def close(self) -> None:
        """Drop the update in progress, if any."""
        self._stop_waiting()
        await self._transfers.give_up()

    def _alone(
        self, call: Callable[[Request], Awaitable[object]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that makes one call at a time, and then waits for the trainer's next one."""

        async def answered(request: Request) -> Response:
            if "origin" in request.headers:
                raise HTTPError(403, "pages in browsers may not replace weights")
            async with self._turns:
                self._stop_waiting()
                try:
                    return _answer(await call(request) or {})
                finally:
                    if self._transfers.is_under_way:
                        self._silence = asyncio.create_task(self._give_up())

        return answered

    def _stop_waiting(self) -> None:
        silence, self._silence = self._silence, None
        if silence is not None:
            silence.cancel()

    async def _give_up(self) -> None:
        await asyncio.sleep(self._silent_seconds)
        async with self._turns:
            await self._transfers.give_up()

    async def _connect(self, request: Request) -> None:
        body = await _json_body(request, self._bodies, InitBody)
        try:
            await self._transfers.connect(body.init_info)
        except EngineFailed as error:  # the trainer's own description is wrong
            raise HTTPError(400, str(error)) from error

    async def _start(self, request: Request) -> None:
        body = StartBody()
        if await request.body():  # vLLM's client sends none
            body = await _json_body(request, self._bodies, StartBody)
        await self._transfers.start(body.pending, body.kv_cache)

    async def _take(self, request: Request) -> None:
        body = await _json_body(request, self._bodies, UpdateBody)
        await self._transfers.take(body.update_info)

    async def _finish(self, _: Request) -> object:
        return {"weights_version": await self._transfers.finish()}
