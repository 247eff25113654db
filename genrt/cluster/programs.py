"""Programs that run where their rows are: inferences, or async functions of a runtime.

Over replicas a program is a question, as bytes; otherwise it runs here.

Rules:
    The bytes have a mark in place of the runtime, and each end puts its own there.
    The bytes are code. They travel between a process and its own replicas, as all messages do.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import pickle
import threading
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from genrt.errors import EngineFailed, EngineUnsupported, InvalidRequest, NotFinite, OutOfMemory
from genrt.numbers import check_timeout, shown
from genrt.questions.request import Request
from genrt.runtime.ask import within
from genrt.runtime.concurrency import aside

RUNTIME = "the runtime"
"""The mark in place of the runtime."""

REFUSED = (
    *("add_adapter", "remove_adapter", "update_weights", "pause", "sleep", "wake_up", "close"),
    *("aclose", "restart", "arestart"),
)
"""The methods of a runtime that a program in a replica may not call."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProgramRequest(Request):
    """A program for a replica to run. The answer is its outcome, packed too. No two requests are equal.

    Attributes:
        packed: the program.
        seed: of an inference, or of a function's questions without a seed.
    """

    packed: bytes
    seed: int
    weights_version: int = 0
    token_ids: ClassVar[tuple[int, ...]] = ()
    adapter: ClassVar[None] = None

    @property
    def nbytes(self) -> int:
        return len(self.packed)

    def bound_to(self, adapter: object) -> ProgramRequest:
        """Return the same program, which binds its own questions."""
        return self

    def __repr__(self) -> str:
        return f"ProgramRequest({len(self.packed)} bytes, seed={self.seed})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The value that a program returned, or its error; ``traceback`` says where in a replica."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            if self.traceback:
                self.error.add_note(f"In the replica:\n{self.traceback}")
            raise self.error
        return self.value


async def run_program(lm: Any, work: object, seed: int, timeout: float | None) -> Any:
    """Run a program for a runtime, and return its result; see ``AsyncLM.run``."""
    if not callable(work) and not callable(getattr(work, "run", None)):
        raise InvalidRequest(
            f"work is {shown(work)}: give an inference, which has run(seed), or an async function of a "
            "runtime"
        )
    seconds = check_timeout(timeout)
    await lm._ask(())  # which a closed runtime refuses
    if not getattr(lm._thread.engine, "runs_programs", False):
        own = program_outcome(work, lm._of_seed(seed), seed)
        return (await (own if seconds is None else within(seconds, own))).result()
    try:
        request = ProgramRequest(pickle_program(work, lm), seed)
    except Exception as error:
        raise InvalidRequest(
            f"the program cannot be sent to a replica: {type(error).__name__}: {error}. Give a function, "
            "with what it uses, that can be pickled"
        ) from error
    [data] = await lm._ask((request,), timeout=timeout)
    try:
        outcome: Outcome = unpickle_program(data, lm)
    except Exception as error:
        raise InvalidRequest(
            f"what the program returned cannot be read here: {type(error).__name__}: {error}"
        ) from error
    return outcome.result()


class ProgramLoop:
    """The event loop of a replica's programs, on a thread that starts with the first one."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, request: ProgramRequest, lm: Any) -> asyncio.Future[list[bytes]]:
        """Run a program over a runtime; return the future of its packed outcome, which can be cancelled
        and raises EngineFailed if the engine failed."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            run = self._loop.run_forever
            threading.Thread(target=run, name="genrt-programs", daemon=True).start()
        running = _packed_run(request, lm._of_seed(request.seed))
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self._loop))

    def close(self) -> None:
        """Cancel all programs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()


async def _packed_run(request: ProgramRequest, lm: Any) -> list[bytes]:
    vars(lm).update({name: partial(_refuse, name) for name in REFUSED})
    try:
        work = await aside(partial(unpickle_program, request.packed, lm))
        outcome = await program_outcome(work, lm, request.seed)
    except BaseException as error:  # the program's own, and not the end of this process
        outcome = Outcome(error=error)
    failed = outcome.error
    if isinstance(failed, EngineFailed) and not isinstance(failed, OutOfMemory | NotFinite):
        raise failed
    return [await aside(partial(packed_outcome, outcome, lm))]


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise EngineUnsupported(
        f"a program in a replica cannot call {name}: call it before the program is run"
    )


async def program_outcome(work: Any, lm: Any, seed: int) -> Outcome:
    """Run a program over this runtime. Cancellation and exits are raised."""
    try:
        run = getattr(work, "run", None)
        running = run(seed) if callable(run) else work(lm)
        if not inspect.isawaitable(running):
            raise InvalidRequest(
                f"the program returned {shown(running)}, which cannot be awaited: make it an async def"
            )
        return Outcome(await _awaited(running))
    except Exception as error:
        return Outcome(error=error)


async def _awaited(running: Awaitable[Any]) -> Any:
    return await running


def pickle_program(value: object, lm: Any) -> bytes:
    """Return a value as bytes, with a mark for this runtime. Raises any error of pickling."""
    from ray.cloudpickle import CloudPickler

    class Packing(CloudPickler):  # type: ignore[misc]
        def persistent_id(self, each: object) -> str | None:
            return RUNTIME if isinstance(each, type(lm)) and each == lm else None

    out = io.BytesIO()
    Packing(out, protocol=5).dump(value)
    return out.getvalue()


def unpickle_program(data: bytes, lm: Any) -> Any:
    """Return the value that ``pickle_program`` has made of, with this runtime in it."""

    class Unpacking(pickle.Unpickler):
        def persistent_load(self, mark: object) -> Any:
            return lm

    return Unpacking(io.BytesIO(data)).load()


def packed_outcome(outcome: Outcome, lm: Any) -> bytes:
    """Return an outcome as bytes; one that cannot be sent as the error that says so."""
    error = outcome.error
    where = "" if error is None else "".join(traceback.format_exception(error))
    try:
        data = pickle_program(Outcome(outcome.value, error, where), lm)
        if error is not None:
            unpickle_program(data, lm)  # which some errors cannot be
    except Exception as failed:
        what = "returned" if error is None else "raised"
        refused = InvalidRequest(
            f"the program {what} {shown(outcome.value if error is None else error)}, which cannot be "
            f"sent back from its replica: {type(failed).__name__}: {failed}"
        )
        data = pickle_program(Outcome(None, refused, where), lm)
    return data
