"""How callers ask: awaiting or blocking, of an adapter that another thread may load anew meanwhile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from genrt.errors import UnknownAdapter
from genrt.numbers import check_timeout
from genrt.questions.request import Request, Result
from genrt.runtime.adapter_names import AdapterNames
from genrt.runtime.thread import EngineThread

__all__ = ["Asker", "blocking_question", "twin_of"]

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Asker:
    """Asks a runtime's batcher, which a restart keeps."""

    def __init__(self, thread: EngineThread, adapters: AdapterNames) -> None:
        self._thread = thread
        self._adapters = adapters

    def ask(
        self, timeout: float | None, requests: Sequence[Request], *, stacked: bool = False
    ) -> Coroutine[Any, Any, list[Result]]:
        """Return the results, to be awaited; see ``Batcher.ask``. Raises InvalidRequest for a timeout
        that is out of range."""
        seconds = check_timeout(timeout)
        if requests and requests[0].adapter is not None:
            return self._ask_adapter(seconds, requests, stacked)
        return self._thread.batcher.ask(requests, stacked=stacked, timeout=seconds)

    async def _ask_adapter(
        self, timeout: float | None, requests: Sequence[Request], stacked: bool
    ) -> list[Result]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return await self._thread.batcher.ask(requests, stacked=stacked, timeout=timeout)
            except UnknownAdapter as error:
                requests = self._adapters.rebound(requests, error)
                timeout = _left(until)

    def ask_sync(
        self, timeout: float | None, requests: Sequence[Request], *, stacked: bool = False
    ) -> list[Result]:
        """Return the results, blocking the thread."""
        seconds = check_timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                return self._thread.batcher.ask_sync(requests, stacked=stacked, timeout=seconds)
            except UnknownAdapter as error:
                requests = self._adapters.rebound(requests, error)
                seconds = _left(until)


def _left(until: float | None) -> float | None:
    """Return how many seconds are left, if there is an end to them."""
    return None if until is None else max(0.0, until - time.monotonic())


def twin_of(method: Callable[..., Any], *, interrupted: str) -> Callable[[F], F]:
    """Return a decorator that names a function as the ``_sync`` twin of this method; its docstring is the
    method's, after what an interrupt does."""

    def named(twin: F) -> F:
        functools.update_wrapper(twin, method)
        twin.__name__, twin.__qualname__ = f"{method.__name__}_sync", f"{method.__qualname__}_sync"
        twin.__doc__ = f"``{method.__name__}``, blocking. {interrupted}\n\n{method.__doc__}"
        return twin

    return named


def blocking_question(
    question: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return the twin of a question that blocks its thread. The question's method awaits ``self._ask(…)``
    and nothing else; its object has that, and ``_ask_sync``."""

    @twin_of(question, interrupted="An interrupt withdraws it.")
    def twin(lm: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        asked = question(cast("S", _Blocking(lm)), *args, **kwargs)
        try:
            asked.send(None)
        except StopIteration as end:
            return cast("T", end.value)
        raise RuntimeError(f"{question.__name__} awaits something besides its answer")

    return twin


class _Blocking:
    """An AsyncLM as its ``_sync`` twins see it: what they await is answered already, so no event loop is
    needed, and a running one is not entered."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    async def _ask(self, *args: Any, **kwargs: Any) -> list[Result]:
        answer: list[Result] = self._lm._ask_sync(*args, **kwargs)
        return answer
