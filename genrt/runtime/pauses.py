"""A runtime that stands still: paused, or with its engine asleep.

Rules:
    Nothing runs in a pause: what was asked before has ended, or waits with what comes later.
    An engine sleeps in a pause alone, and its prefixes and sequences are forgotten before.
    Its weights may wake first, and be replaced before the rest does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Literal, TypeAlias, TypedDict, TypeVar, Unpack

from genrt.engines.protocol import Engine
from genrt.engines.weights import SLEEPING_PARTS, Sleeping, SleepingPart, weights_of
from genrt.errors import EngineUnsupported, InvalidRequest, Paused
from genrt.numbers import check_int, named, shown
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.fences import Fence, Pending, check_pending
from genrt.runtime.thread import EngineThread

__all__ = ["Asked", "PauseOptions", "Pauses"]

T = TypeVar("T")

Asked: TypeAlias = Literal["wait", "raise"]
"""Says what becomes of questions asked in a pause."""


class PauseOptions(TypedDict, total=False):
    """The options of ``AsyncLM.pause`` and ``AsyncLM.sleep``.

    Attributes:
        pending: ``"finish"``, the default, has questions asked before answered first; with ``"restart"``
            they wait too, and are asked anew: streams go on from where they were, or raise StreamCut if
            the weights were replaced meanwhile.
        asked: questions asked from now on wait (``"wait"``, the default), or raise Paused (``"raise"``).
    """

    pending: Pending
    asked: Asked


PAUSED = "the runtime is paused: it answers again after AsyncLM.resume, or wake_up if it sleeps"
"""The message for who asks in a pause that refuses questions."""


class Pauses:
    """Pauses one runtime, and has its engine sleep. Safe from any thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._fence: Fence | None = None
        self._level = 0  # of the sleep; 0 is none
        self._falls_asleep = False
        self._slept_with = 0  # these weights

    @property
    def is_paused(self) -> bool:
        """True from the call of ``pause`` to that of ``resume``, or to a restart."""
        fence = self._fence
        if fence is None:
            return False
        return not fence.passed.done() or fence in self._thread.batcher.fences.up

    def check_awake(self, part: SleepingPart | None = None) -> None:
        """Raise InvalidRequest if the engine sleeps, or this part of it."""
        asleep = _sleeping(self._thread.engine).asleep if self._level else frozenset()
        if self._falls_asleep or (asleep if part is None else part in asleep):
            raise InvalidRequest("the engine sleeps: wake it up first")

    async def pause(self, *, pending: Pending = "finish", asked: Asked = "wait") -> None:
        """Pause; ``AsyncLM.pause`` says the rest."""
        check_pending(pending)
        if asked not in ("wait", "raise"):
            raise InvalidRequest(f'asked must be "wait" or "raise", got {named(asked)}')
        fence = Fence(pending, Paused(PAUSED) if asked == "raise" else None)
        with self._lock:
            if self.is_paused:
                raise InvalidRequest("the runtime is paused already: resume it first")
            self._fence = fence
        try:
            await self._called(lambda _: self._thread.batcher.fences.put_up(fence))
            await asyncio.wrap_future(fence.passed)
        except BaseException:
            self._go_on(fence)
            raise

    def resume(self) -> None:
        """Resume; nothing happens if the runtime is not paused. Raises InvalidRequest in a sleep."""
        with self._lock:
            self.check_awake()
            fence = self._fence
        self._go_on(fence)

    def _go_on(self, fence: Fence | None) -> None:
        """End this pause, unless it has ended and another one may be."""
        with self._lock:
            if fence is None or fence is not self._fence:
                return
            self._fence = None
        self._thread.batcher.fences.take_down(fence)

    async def sleep(self, level: int, **options: Unpack[PauseOptions]) -> int:
        """Pause, and free the engine's memory; ``AsyncLM.sleep`` says the rest."""
        check_int("level", level, 1, 2)
        self.check_awake()
        _sleeping(self._thread.engine).check_sleep()
        is_own = not self.is_paused
        if is_own:
            await self.pause(**options)
        fence = self._fence
        try:
            return await self._called(lambda answering: self._fall_asleep(answering, level))
        except BaseException:
            if is_own and not self._level:
                self._go_on(fence)
            raise

    def _fall_asleep(self, answering: AnsweringEngine, level: int) -> int:
        with self._lock:
            if not self.is_paused:
                raise InvalidRequest("the runtime was resumed before its engine slept")
            self._falls_asleep = True
        try:
            answering.begin_update()  # what is computed is lost
            freed = _sleeping(answering.engine).sleep(level)
            self._level, self._slept_with = level, self._thread.batcher.fences.weights_version
        finally:
            self._falls_asleep = False
        self._thread.be_alone(self)  # who would use the memory waits
        return freed

    async def wake_up(self, tags: Collection[SleepingPart] | None = None) -> bool:
        """Have the engine's memory back, or these parts of it, and go on once all is there;
        ``AsyncLM.wake_up`` says the rest."""
        parts = _checked_parts(tags)
        if not self._level:
            return True
        fence = self._fence
        wake = self._thread.call_alone(lambda answering: self._wake(answering, parts), self)
        if is_awake := await asyncio.wrap_future(wake):
            self._go_on(fence)
        return is_awake

    def _wake(self, answering: AnsweringEngine, parts: frozenset[SleepingPart]) -> bool:
        """Return whether all is awake then."""
        sleeping = _sleeping(answering.engine)
        level, rest = self._level, sleeping.asleep - parts
        if not rest:
            self._level = 0
        if not sleeping.asleep:  # it was restarted meanwhile, or woken by another call
            return True
        if "weights" not in rest:
            self._thread.be_alone(None)
        sleeping.wake_up(sleeping.asleep & parts)
        is_same = self._slept_with == self._thread.batcher.fences.weights_version
        if not rest and level == 2 and is_same:
            self._thread.weights.restore(answering.engine)
        return not rest

    async def _called(self, function: Callable[[AnsweringEngine], T]) -> T:
        return await asyncio.wrap_future(self._thread.call_alone(function))


def _checked_parts(tags: Collection[SleepingPart] | None) -> frozenset[SleepingPart]:
    if tags is None:
        return SLEEPING_PARTS
    parts = sorted(SLEEPING_PARTS)
    is_several = isinstance(tags, Collection) and not isinstance(tags, str)
    if not is_several or any(each not in parts for each in tags):
        raise InvalidRequest(f"tags must be some of {parts}, or None, got {shown(tags)}")
    return frozenset(tags)


def _sleeping(engine: Engine) -> Sleeping:
    """Return the weights of an engine that can sleep. Raises EngineUnsupported if it cannot."""
    weights = weights_of(engine)
    if isinstance(weights, Sleeping):
        return weights
    raise EngineUnsupported(
        f"{type(engine).__name__} has no memory of a device to give back: close it, or pause it"
    )
