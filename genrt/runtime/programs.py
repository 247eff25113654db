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
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

from genrt.errors import EngineFailed, EngineUnsupported, InvalidRequest, NotFinite, OutOfMemory
from genrt.numbers import check_timeout, shown
from genrt.questions.request import Request
from genrt.runtime.ask import within
from genrt.runtime.concurrency import run_in_thread

Outcome: TypeAlias = tuple[Any, BaseException | None]
"""The value that a program returned, and its error."""

REFUSED = (
    *("add_adapter", "remove_adapter", "update_weights", "pause", "sleep", "wake_up", "close"),
    *("aclose", "restart", "arestart"),
)
"""The methods of a runtime that a program in a replica may not call."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProgramRequest(Request):
    """A program for a replica to run. The answer is its outcome, packed too. No two requests are equal.
    The seed is of an inference, or of a function's questions without a seed."""

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


class Unsent(InvalidRequest):
    """A program that cannot be pickled, such as one with a second runtime."""


def runs_elsewhere(lm: Any) -> bool:
    """Return whether programs of this runtime run in its replicas."""
    return bool(getattr(lm._thread.engine, "runs_programs", False))


async def run_program(lm: Any, work: object, seed: int, timeout: float | None) -> Any:
    """Run a program for a runtime, and return its result; see ``AsyncLM.run``."""
    if not callable(work) and not callable(getattr(work, "run", None)):
        raise InvalidRequest(
            f"work is {shown(work)}: give an inference, which has run(seed), or an async function of a "
            "runtime"
        )
    seconds = check_timeout(timeout)
    await lm._ask(())  # which a closed runtime refuses
    if not runs_elsewhere(lm):
        own = program_result(work, lm._of_seed(seed), seed)
        return await (own if seconds is None else within(seconds, own))
    try:
        request = ProgramRequest(pickle_program(work, lm), seed)
    except Exception as error:
        raise Unsent(
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
    value, failed = outcome
    if failed is not None:
        raise failed
    return value


def program_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop for a replica's programs, on its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="genrt-programs", daemon=True).start()
    return loop


async def packed_run(request: ProgramRequest, lm: Any) -> list[bytes]:
    """Run a program over a runtime of its own; return its packed outcome. Raises EngineFailed if the
    engine failed."""
    vars(lm).update({name: partial(_refuse, name) for name in REFUSED})
    value, error = None, cast("BaseException | None", None)
    try:
        work = await run_in_thread(partial(unpickle_program, request.packed, lm))
        value = await program_result(work, lm, request.seed)
    except BaseException as raised:  # the program's own, and not the end of this process
        if isinstance(raised, EngineFailed) and not isinstance(raised, OutOfMemory | NotFinite):
            raise
        error = raised
    return [await run_in_thread(partial(packed_outcome, value, error, lm))]


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise EngineUnsupported(
        f"a program in a replica cannot call {name}: call it before the program is run"
    )


async def program_result(work: Any, lm: Any, seed: int) -> Any:
    """Run a program over this runtime; return its result, or raise its error."""
    run = getattr(work, "run", None)
    running = run(seed) if callable(run) else work(lm)
    if not inspect.isawaitable(running):
        raise InvalidRequest(
            f"the program returned {shown(running)}, which cannot be awaited: make it an async def"
        )
    return await running


def its_runtime() -> Any:
    """Stand in a program's bytes for the runtime of the end that reads them, which replaces the call."""
    raise TypeError("a program is read by unpickle_program")


def pickle_program(value: object, lm: Any) -> bytes:
    """Return a value as bytes, with a mark for this runtime. Raises any error of pickling."""
    from ray.cloudpickle import CloudPickler

    class Packing(CloudPickler):  # type: ignore[misc]
        def reducer_override(self, each: Any) -> Any:
            if isinstance(each, type(lm)) and each == lm:
                return its_runtime, ()
            return super().reducer_override(each)

    out = io.BytesIO()
    Packing(out, protocol=5).dump(value)
    return out.getvalue()


def unpickle_program(data: bytes, lm: Any) -> Any:
    """Return the value that ``pickle_program`` has made of, with this runtime in it."""

    class Unpacking(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            return (lambda: lm) if found is its_runtime else found

    return Unpacking(io.BytesIO(data)).load()


def packed_outcome(value: object, error: BaseException | None, lm: Any) -> bytes:
    """Return an outcome as bytes; one that cannot be sent as the error that says so."""
    try:
        if error is not None:
            error.add_note(f"In the replica:\n{''.join(traceback.format_exception(error))}")
        data = pickle_program((value, error), lm)
        if error is not None:
            unpickle_program(data, lm)  # which some errors cannot be
    except Exception as failed:
        what = "returned" if error is None else "raised"
        refused = InvalidRequest(
            f"the program {what} {shown(value if error is None else error)}, which cannot be sent back "
            f"from its replica: {type(failed).__name__}: {failed}"
        )
        data = pickle_program((None, refused), lm)
    return data
