"""Programs that run where their rows are: on the way to a replica, and what they return on the way back.

A program is an inference, or an async function of a runtime. Over replicas it is a question like others,
as bytes: routed, moved to another replica if its own dies, withdrawn. Otherwise it runs here.

Rules:
    The runtime is not in the bytes: a mark stands for it, for which either end puts its own.
    These bytes are code. They go from a process to replicas that it has started itself, by the same way
    as all messages, and back. Nothing from a file or a network is read.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import pickle
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, ClassVar

from genrt.errors import InvalidRequest
from genrt.numbers import check_timeout, shown
from genrt.questions.request import Request
from genrt.runtime.ask import within

__all__ = [
    "Outcome",
    "ProgramRequest",
    "packed_outcome",
    "pickle_program",
    "program_outcome",
    "run_program",
    "unpickle_program",
]

RUNTIME = "the runtime"
"""What stands for the runtime in bytes."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ProgramRequest(Request):
    """A program for a replica to run. The answer is its outcome, packed too. No two requests are equal.

    Attributes:
        packed: the program.
        runtime: makes the runtime that the program asks: ``AsyncLM``.
        seed: of an inference, or of a function's questions without a seed.
    """

    packed: bytes
    runtime: Any
    seed: int
    weights_version: int = 0
    token_ids: ClassVar[tuple[int, ...]] = ()
    adapter: ClassVar[None] = None

    @property
    def nbytes(self) -> int:
        return len(self.packed)

    def bound_to(self, adapter: object) -> ProgramRequest:
        """Return the same program, which binds each of its questions itself."""
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
    """Run a program for a runtime, and return what it returns; see ``AsyncLM.run``."""
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
        request = ProgramRequest(pickle_program(work, lm), type(lm), seed)
    except Exception as error:
        raise InvalidRequest(
            f"the program cannot be sent to a replica: {type(error).__name__}: {error}. "
            f"{_pickling_advice()}"
        ) from error
    [data] = await lm._ask((request,), timeout=timeout)
    try:
        outcome: Outcome = unpickle_program(data, lm)
    except Exception as error:
        raise InvalidRequest(
            f"what the program returned cannot be read here: {type(error).__name__}: {error}"
        ) from error
    return outcome.result()


async def program_outcome(work: Any, lm: Any, seed: int) -> Outcome:
    """Run a program over this runtime. Cancelling it, or what ends a process, is raised."""
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
    """Return a value as bytes, with a mark for this runtime. Raises whatever pickling it raises."""

    class Packing(_pickler()):  # type: ignore[misc]
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


def _pickler() -> Any:
    """Return what packs functions of any place, where that is installed, as it is with vLLM."""
    if importlib.util.find_spec("cloudpickle") is None:
        return pickle.Pickler
    import cloudpickle

    return cloudpickle.Pickler


def _pickling_advice() -> str:
    if _pickler() is pickle.Pickler:
        return "Install cloudpickle, or give a function of a module, with arguments that can be pickled"
    return "Give a function, with what it uses, that can be pickled"
