"""A runtime that stands still: paused, or with its engine asleep. ``lifecycle.py`` has the states.

Rules:
    Nothing runs in a pause: what was asked before has ended, or waits with what comes later.
    An engine sleeps in a pause alone, and its prefixes and sequences are forgotten before.
    Its weights may wake first, and be replaced before the rest does.
    One sleep or wake_up follows the other. One that is cancelled leaves the runtime as it was before.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal, TypeAlias, TypedDict, TypeVar

from genrt.engines.protocol import Engine
from genrt.engines.weights import SLEEPING_PARTS, Sleeping, SleepingPart, weights_of
from genrt.errors import EngineUnsupported, InvalidRequest, Paused
from genrt.numbers import check_int, named, shown
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import Hold, Pending
from genrt.runtime.concurrency import Turns
from genrt.runtime.lifecycle import ASLEEP, Lifecycle, check_pending
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
"""The message for questions in a pause that refuses them."""


class Pauses:
    """Pauses one runtime, and makes its engine sleep. Safe from any thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._turns = Turns()

    @property
    def _lifecycle(self) -> Lifecycle:
        return self._thread.lifecycle

    def check_awake(self, part: SleepingPart) -> None:
        """Raise InvalidRequest if this part of the engine sleeps."""
        is_asleep = self._lifecycle.memory == "asleep"
        if is_asleep and part in _sleeping(self._thread.engine).asleep:
            raise InvalidRequest(ASLEEP)

    async def pause(
        self, *, pending: Pending = "finish", asked: Asked = "wait"
    ) -> Callable[[], None]:
        """Pause; return a function that ends this pause. ``AsyncLM.pause`` says the rest."""
        hold = _hold(pending, asked)
        if self._lifecycle.begin_pause(hold) is not hold:
            raise InvalidRequest("the runtime is paused already: resume it first")
        await self._stand_still(hold, is_own=True)
        return partial(self._lifecycle.end_pause, hold)

    async def _stand_still(self, hold: Hold, *, is_own: bool) -> None:
        """Return once nothing runs; end a pause of one's own if that fails."""
        lifecycle = self._lifecycle
        try:
            if is_own:
                await self._called(lambda _: self._thread.batcher.put_up(hold))
            await hold.wait()
        except GeneratorExit:  # collected with its loop, whatever is locked
            if is_own:
                self._thread.call_soon(lambda _: lifecycle.end_pause(hold))
            raise
        except BaseException:
            if is_own:
                lifecycle.end_pause(hold)
            raise

    def resume(self) -> None:
        """Resume; nothing happens if the runtime is not paused. Raises InvalidRequest in a sleep."""
        self._lifecycle.resume()

    async def sleep(
        self, level: int, *, pending: Pending = "finish", asked: Asked = "wait"
    ) -> tuple[int, Callable[[], object]]:
        """Pause, and free the engine's memory; return how many bytes, and a function that takes all of
        that back. ``AsyncLM.sleep`` says the rest."""
        check_int("level", level, 1, 2)
        own, lifecycle = _hold(pending, asked), self._lifecycle
        _sleeping(self._thread.engine).check_sleep()
        self._check_not_asleep()
        end_turn = await self._turns.take()
        try:
            self._check_not_asleep()
            hold = lifecycle.begin_pause(own)
            is_own = hold is own
            await self._stand_still(hold, is_own=is_own)
            fall = partial(self._fall_asleep, hold=hold, is_own=is_own, level=level)
            falling = self._thread.call(fall)
            try:
                freed = await asyncio.wrap_future(falling)
            except GeneratorExit:  # as above: the engine wakes, whatever became of this call
                self._thread.call_soon(self._taking_back(hold, is_own), self._lifecycle)
                raise
            except BaseException:
                if falling.cancel():  # it has not begun
                    if is_own:
                        lifecycle.end_pause(hold)
                else:  # the next turn begins after that
                    self._take_back(hold, is_own).add_done_callback(end_turn)
                    end_turn = _nothing
                raise
            return freed, partial(self._take_back, hold, is_own)
        finally:
            end_turn()

    def _check_not_asleep(self) -> None:
        if self._lifecycle.memory == "asleep":
            raise InvalidRequest(ASLEEP)

    def _fall_asleep(
        self, answering: AnsweringEngine, *, hold: Hold, is_own: bool, level: int
    ) -> int:
        sleeping, lifecycle = _sleeping(answering.engine), self._lifecycle
        lifecycle.begin_sleep(hold, is_own=is_own, level=level)
        self._thread.run_exclusively(lifecycle)  # calls that would use the memory wait
        try:
            answering.begin_update()  # what is computed is lost
            return sleeping.sleep(level)
        finally:
            self._moved(sleeping)

    def _take_back(self, hold: Hold, is_own: bool) -> concurrent.futures.Future[None]:
        """Wake the engine of a sleep that failed or was cancelled, and end the pause if it is its own."""
        return self._thread.call(self._taking_back(hold, is_own), self._lifecycle)

    def _taking_back(self, hold: Hold, is_own: bool) -> Callable[[AnsweringEngine], None]:
        def take_back(answering: AnsweringEngine) -> None:
            lifecycle = self._lifecycle
            if hold is not lifecycle.pause:  # it has ended, by a restart
                return
            if lifecycle.memory == "asleep":
                self._move_back(answering, SLEEPING_PARTS)
            if is_own or lifecycle.is_sleeps_own:
                lifecycle.end_pause(hold)

        return take_back

    async def wake_up(self, tags: Collection[SleepingPart] | None = None) -> bool:
        """Have the engine's memory back, or these parts of it, and go on once all is there;
        ``AsyncLM.wake_up`` says the rest."""
        parts = _checked_parts(tags)
        end_turn = await self._turns.take()
        try:
            if self._lifecycle.memory == "awake":
                return True
            return await self._called(partial(self._wake, parts=parts), self._lifecycle)
        finally:
            end_turn()

    def _wake(self, answering: AnsweringEngine, *, parts: frozenset[SleepingPart]) -> bool:
        """Return whether all is awake then."""
        lifecycle = self._lifecycle
        if lifecycle.memory == "awake":  # it was restarted meanwhile
            return True
        if is_awake := self._move_back(answering, parts):
            lifecycle.end_pause(lifecycle.pause)
        return is_awake

    def _move_back(self, answering: AnsweringEngine, parts: frozenset[SleepingPart]) -> bool:
        """Move parts of the memory back, and read dropped weights again with the last of them."""
        sleeping, lifecycle = _sleeping(answering.engine), self._lifecycle
        lifecycle.memory = "moving"
        try:
            sleeping.wake_up(sleeping.asleep & parts)
            if not sleeping.asleep and lifecycle.are_weights_lost:
                self._thread.weights.restore(answering.engine)
                lifecycle.are_weights_lost = False
        finally:
            is_awake = self._moved(sleeping)
        return is_awake

    def _moved(self, sleeping: Sleeping) -> bool:
        asleep = sleeping.asleep
        self._thread.run_exclusively(self._lifecycle if "weights" in asleep else None)
        return self._lifecycle.moved(asleep)

    async def _called(self, function: Callable[[AnsweringEngine], T], owner: object = None) -> T:
        return await asyncio.wrap_future(self._thread.call(function, owner))


def _nothing() -> None:
    """Do nothing."""


def _hold(pending: Pending, asked: Asked) -> Hold:
    check_pending(pending)
    if asked not in ("wait", "raise"):
        raise InvalidRequest(f'asked must be "wait" or "raise", got {named(asked)}')
    return Hold(pending, Paused(PAUSED) if asked == "raise" else None)


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
