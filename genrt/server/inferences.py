"""Inference as a route: texts after a prompt that have a form, by sequential Monte Carlo.

The answer is the posterior with its weights and evidence. A stream tells the effective sample size of
every step before it, as server-sent events.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from genrt.constraints import MaskedConstraint, grammar, json_schema, regex
from genrt.errors import GenrtError, InvalidRequest
from genrt.inference import SMC, Info, Result, State, TextModel
from genrt.lm import AsyncLM
from genrt.questions.contexts import LAST_SEED
from genrt.server.asgi import http_error
from genrt.server.bodies import Bodies, Body, contexts_of, finite, json_bytes
from genrt.server.gate import ServerLimits
from genrt.server.routes import JSON, answering, body_of, while_connected

__all__ = ["Inferences", "Running"]

MOST_RUNNING = 64
"""How many inferences run at once; others wait their turn."""


@dataclass(slots=True)
class Running:
    """One inference under way, as the status page shows it.

    Attributes:
        number: counts the inferences of a server.
        particles: how many it has.
        max_steps: how many steps it takes at most.
        step: how many it has taken.
        ess: the effective sample size after the last of them.
        unfinished: how many particles go on.
        log_evidence: the estimate so far.
    """

    number: int
    particles: int
    max_steps: int
    step: int = 0
    ess: float = 0.0
    unfinished: int = 0
    log_evidence: float = 0.0

    def note(self, info: Info) -> None:
        """Take over what a step has come to."""
        self.step, self.ess, self.unfinished = info.step + 1, info.ess, info.unfinished
        self.log_evidence = info.log_evidence


class Inferences:
    """The inferences of one server.

    Attributes:
        running: those under way, by their numbers.
    """

    def __init__(self, lm: AsyncLM, limits: ServerLimits, bodies: Bodies) -> None:
        self.running: dict[int, Running] = {}
        self._lm = lm
        self._limits = limits
        self._bodies = bodies
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(MOST_RUNNING)

    def route(self) -> Route:
        """Return the route."""
        return Route("/v1/infer", answering(self._infer), methods=["POST"])

    async def _infer(self, request: Request) -> Response:
        body = await self._bodies.read(await body_of(request), Body)
        is_streamed = body.flag("stream")
        seed = body.integer("seed", 0, LAST_SEED, None)
        # A form may take long to compile, and a prompt to tokenize.
        smc = await asyncio.to_thread(self._smc, body)
        seed = secrets.randbits(62) if seed is None else seed
        if is_streamed:
            events = self._events(smc, seed)
            return StreamingResponse(events, media_type="text/event-stream")
        result = await while_connected(request, self._run(smc, seed, lambda info: None))
        told = await self._bodies.aside(lambda: json_bytes(_told(result, seed)))
        return Response(told, media_type=JSON)

    def _smc(self, body: Body) -> SMC:
        lm, limits = self._lm, self._limits
        [prompt] = contexts_of(lm, [body.take("prompt")], "prompt")
        particles = body.integer("particles", 1, limits.contexts)
        max_tokens = body.integer("max_tokens", 1, lm.max_model_len)
        given: dict[str, Any] = {"constraint": _constraint(lm, body)}
        given["adapter"] = body.text("adapter", None)
        given |= {} if (heat := body.take("temperature", None)) is None else {"temperature": heat}
        when = body.take("resample_when", 0.5)
        body.end()
        if isinstance(when, bool) or not isinstance(when, int | float):
            raise InvalidRequest("resample_when must be a number from 0 to 1")
        model = TextModel(lm, prompt, max_tokens=max_tokens, **given)
        lm._adapters.bound(given["adapter"])  # or the first step would find out
        return SMC(model, num_particles=particles, resample_when=when)

    async def _run(self, smc: SMC, seed: int, on_step: Callable[[Info], None]) -> Result:
        """Run an inference, in its turn."""
        async with self._turns:
            number, count = next(self._numbers), len(smc.init(seed).particles)
            running = Running(number, count, smc.model.max_steps or 0, ess=count, unfinished=count)
            self.running[number] = running

            def noted(_: State, info: Info) -> None:
                running.note(info)
                on_step(info)

            try:
                return await smc.run(seed, on_step=noted)
            finally:
                del self.running[number]

    async def _events(self, smc: SMC, seed: int) -> AsyncIterator[bytes]:
        """Yield an event for each step, and the result, or the error that ended it."""
        told: asyncio.Queue[Info | None] = asyncio.Queue()
        run = asyncio.create_task(self._run(smc, seed, told.put_nowait))
        run.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (info := await told.get()) is not None:
                yield _event("step", _step(info))
            yield await self._bodies.aside(lambda: _event("result", _told(run.result(), seed)))
        except GenrtError as error:
            yield b"event: error\ndata: " + http_error(error).body + b"\n\n"
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


def _constraint(lm: AsyncLM, body: Body) -> MaskedConstraint | None:
    """Return the form that the texts are to have, if one is asked for."""
    forms = [name for name in ("regex", "json_schema", "grammar") if name in body]
    if len(forms) > 1:
        raise InvalidRequest(f"give one of {', '.join(forms)}: a text has one form")
    if not forms:
        return None
    if forms == ["json_schema"]:
        schema = body.take("json_schema")
        if not isinstance(schema, str | dict | bool):
            raise InvalidRequest("json_schema must be an object, a text, or true")
        return json_schema(schema, lm)
    text = body.text(forms[0])
    return regex(text, lm) if forms == ["regex"] else grammar(text, lm)


def _step(info: Info) -> dict[str, Any]:
    return {
        "step": info.step,
        "ess": info.ess,
        "log_evidence": finite(info.log_evidence),
        "resampled": info.resampled,
        "unfinished": info.unfinished,
    }


def _told(result: Result, seed: int) -> dict[str, Any]:
    """Return a result as JSON has it."""
    particles = zip(result.texts, result.token_ids, result.log_weights.tolist(), strict=True)
    return {
        "posterior": [{"text": text, "weight": weight} for text, weight in result.posterior()],
        "log_evidence": finite(result.log_evidence),
        "ess": result.ess,
        "steps": len(result.infos),
        "seed": seed,
        "particles": [
            {"text": text, "token_ids": list(ids), "log_weight": finite(weight)}
            for text, ids, weight in particles
        ],
    }


def _event(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(value) + b"\n\n"
