"""The lifecycle of a runtime: one state machine for pause, sleep, update, restart and close.

A *barrier* makes later questions wait. A pause is a barrier, and so is an update. A sleep needs a pause
and makes one if necessary. States, of one batcher and its engine:

    running    questions are sent and answered.
    draining   a barrier is raised. Earlier questions are answered, or restarted after it.
    drained    no question from before the barriers is queued or in flight.
    updating   only the calls of one update run on the engine's thread. Its weights may be mixed.
    moving     a sleep or a wake_up moves the engine's memory.
    asleep     a part of the memory is freed, or the weights are dropped and not read again yet.

Only ``running`` answers new questions. Only ``running`` and ``draining`` step the engine. Events:

    ================  ===========  ===========  ===========  ===========  ===========  ===========
    event             running      draining     drained      updating     moving       asleep
    ================  ===========  ===========  ===========  ===========  ===========  ===========
    question          sent         waits        waits        waits        waits        waits
    pause             draining     refused [1]  refused [1]  waits [1]    refused      refused
    its cancellation  -            running [2]  running [2]  -            by the sleep  by the sleep
    resume            -            running [2]  running [2]  -            refused      refused
    sleep             draining     waits        moving       waits        waits        refused
    its cancellation  -            running [2]  running [2]  -            wakes [3]    -
    wake_up           -            waits        -            -            waits        moving [4]
    update            draining     draining     updating     waits        waits        refused [5]
    its end           -            running [2]  running [2]  running [2]  -            asleep
    its error         -            running [2]  running [2]  dies [6]     -            asleep
    add_adapter       done         done         done         waits        waits        waits
    remove_adapter    done         done         done         waits        waits        waits [5]
    restart           running      running      running      running      running      running
    engine replaced   running      draining     drained      drained [7]  asleep       asleep
    close             closed       closed       closed       closed       closed       closed
    ================  ===========  ===========  ===========  ===========  ===========  ===========

    1. If the runtime is paused. An update alone is no pause: then a pause is one more barrier.
    2. Once no other barrier is raised.
    3. The memory is moved back, and then the sleep's own pause ends.
    4. ``asleep`` again if only a part wakes, or if it fails; otherwise ``running``.
    5. While the weights sleep. With only the KV cache asleep, as in ``drained``.
    6. Once a tensor was loaded; before that, as at its end. The next engine has the last whole weights.
    7. The update's barrier ends. Its next call raises EngineFailed.

Rules:
    State changes under the batcher's lock. Only the engine's thread raises barriers and moves memory.
    A restart and a close break every barrier, and end each pause, sleep and update in progress.
    An engine's prefixes and sequences are forgotten before it sleeps. Sleeps and wake_ups run one after
    the other; a cancelled one has no effect. An engine that replaces a sleeping one sleeps first.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial
from typing import Literal, Protocol, TypeAlias, TypedDict, TypeVar, get_args

from genrt.engines.protocol import Engine
from genrt.engines.weights import (
    SLEEPING_PARTS,
    KeptWeights,
    Sleeping,
    SleepingPart,
    weights_of,
)
from genrt.errors import EngineFailed, EngineUnsupported, GenrtError, InvalidRequest, Paused
from genrt.numbers import check_int, check_one_of, check_options, shown
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import BROKEN, Barrier, Batcher, Pending
from genrt.runtime.concurrency import FairLock

T = TypeVar("T")

State: TypeAlias = Literal["running", "draining", "drained", "updating", "moving", "asleep"]

Asked: TypeAlias = Literal["wait", "raise"]
"""Whether questions asked in a pause wait or raise."""

ASLEEP = "the engine sleeps: wake it up first"

PAUSED = "the runtime is paused: it answers again after AsyncLM.resume, or wake_up if it sleeps"


class PauseOptions(TypedDict, total=False):
    """The options of ``AsyncLM.pause`` and ``AsyncLM.sleep``.

    Attributes:
        pending: with ``"finish"``, the default, earlier questions are answered first. With ``"restart"``
            they wait too and start again later: streams continue at their position, or raise StreamCut if
            the weights were replaced meanwhile.
        asked: later questions wait (``"wait"``, the default), or raise Paused (``"raise"``).
    """

    pending: Pending
    asked: Asked


class Calls(Protocol):
    """The part of an ``EngineThread`` that its lifecycle uses."""

    weights: KeptWeights

    @property
    def engine(self) -> Engine: ...

    def call(
        self, function: Callable[[AnsweringEngine], T], owner: object = None
    ) -> concurrent.futures.Future[T]: ...

    def call_soon(
        self, function: Callable[[AnsweringEngine], object], owner: object = None
    ) -> None: ...

    def run_exclusively(self, owner: object | None) -> None: ...


class Lifecycle:
    """The state of one runtime, and the events that change it. Safe from any thread.

    Attributes:
        owner: the object whose calls alone run on the engine's thread; ``None`` is no such object.
        pause_barrier: the barrier of the present pause, also one that a sleep has made.
        memory: the engine's memory on its device.
        asleep: the parts of the memory that are freed, or are being moved.
        level: the level of the last sleep.
        are_weights_lost: whether a sleep dropped the weights, and no weights were loaded since.
    """

    def __init__(self, batcher: Batcher, thread: Calls) -> None:
        self._batcher = batcher
        self._lock = batcher.lock
        self._thread = thread
        self._move_lock = FairLock()
        self.owner: object | None = None
        self._owners_barrier: Barrier | None = None
        self.pause_barrier: Barrier | None = None
        self._is_sleeps_own = False  # the pause ends with a cancelled sleep
        self.memory: Literal["awake", "moving", "asleep"] = "awake"
        self.asleep: frozenset[SleepingPart] = frozenset()
        self.level = 1
        self.are_weights_lost = False

    @property
    def state(self) -> State:
        """The present state."""
        with self._lock:
            if self.memory != "awake":
                return self.memory
            if self.owner is not None:
                return "updating"
            if not self._batcher.barriers:
                return "running"
            return "drained" if self._batcher.is_drained else "draining"

    # -- pauses -------------------------------------------------------------------------------

    async def pause(self, options: PauseOptions) -> Callable[[], None]:
        """Pause as ``AsyncLM.pause``; return a function that ends this pause."""
        barrier = _barrier_for("pause", options)
        if self._begin_pause(barrier) is not barrier:
            raise InvalidRequest("the runtime is paused already: resume it first")
        await self._drain(barrier, is_own=True)
        return partial(self._end_pause, barrier)

    def _begin_pause(self, barrier: Barrier) -> Barrier:
        """Begin a pause with this barrier, unless there is a pause; return the barrier of the pause."""
        with self._lock:
            if self.pause_barrier is None:
                self.pause_barrier, self._is_sleeps_own = barrier, False
            return self.pause_barrier

    def _end_pause(self, barrier: Barrier | None) -> None:
        """End this pause if it is the present one; during a sleep, at the end of the sleep."""
        with self._lock:
            if barrier is None or barrier is not self.pause_barrier:
                return
            if self.memory != "awake":
                self._is_sleeps_own = True
                return
            self.pause_barrier = None
        self._batcher.lift_barrier(barrier)

    async def _drain(self, barrier: Barrier, *, is_own: bool) -> None:
        """Return once the engine is idle; end a pause of this call if that fails."""
        try:
            if is_own:
                await self._called(lambda _: self._batcher.raise_barrier(barrier))
            await barrier.wait()
        except GeneratorExit:  # collected with its loop, whatever is locked
            if is_own:
                self._thread.call_soon(lambda _: self._end_pause(barrier))
            raise
        except BaseException:
            if is_own:
                self._end_pause(barrier)
            raise

    def resume(self) -> None:
        """End the pause, if there is one. Raises InvalidRequest in a sleep."""
        with self._lock:
            self.check_awake()
            barrier = self.pause_barrier
        self._end_pause(barrier)

    # -- sleep --------------------------------------------------------------------------------

    def check_awake(self, part: SleepingPart | None = None) -> None:
        """Raise InvalidRequest if this part of the engine sleeps; by default, if anything sleeps or
        moves."""
        if part is None:
            is_asleep = self.memory != "awake"
        else:
            is_asleep = self.memory == "asleep" and part in _sleeping(self._thread.engine).asleep
        if is_asleep:
            raise InvalidRequest(ASLEEP)

    async def sleep(self, level: int, options: PauseOptions) -> tuple[int, Callable[[], object]]:
        """Sleep as ``AsyncLM.sleep``; return the freed bytes, and a function that undoes the sleep."""
        check_int("level", level, 1, 2)
        own = _barrier_for("sleep", options)
        _sleeping(self._thread.engine).check_sleep()
        self._check_not_asleep()
        release = await self._move_lock.acquire()
        try:
            self._check_not_asleep()
            barrier = self._begin_pause(own)
            is_own = barrier is own
            await self._drain(barrier, is_own=is_own)
            fall = partial(self._fall_asleep, barrier=barrier, is_own=is_own, level=level)
            falling = self._thread.call(fall)
            undo = partial(self._thread.call, partial(self._undo_sleep, barrier, is_own), self)
            try:
                freed = await asyncio.wrap_future(falling)
            except GeneratorExit:  # as above: the engine wakes whether it slept or not
                self._thread.call_soon(partial(self._undo_sleep, barrier, is_own), self)
                raise
            except BaseException:
                if falling.cancel():  # it has not begun
                    if is_own:
                        self._end_pause(barrier)
                else:  # the lock is released after that
                    undo().add_done_callback(release)
                    release = _nothing
                raise
            return freed, undo
        finally:
            release()

    def _check_not_asleep(self) -> None:
        if self.memory == "asleep":
            raise InvalidRequest(ASLEEP)

    def _fall_asleep(
        self, answering: AnsweringEngine, *, barrier: Barrier, is_own: bool, level: int
    ) -> int:
        sleeping = _sleeping(answering.engine)
        with self._lock:
            self.check_awake()
            is_up = barrier is self.pause_barrier and barrier in self._batcher.barriers
            if not is_up or not self._batcher.is_drained:
                raise InvalidRequest("the runtime was resumed before its engine slept")
            self.memory, self._is_sleeps_own, self.level = "moving", is_own, level
            self.asleep, self.are_weights_lost = SLEEPING_PARTS, level == 2
        self._thread.run_exclusively(self)  # calls that would use the memory wait
        try:
            answering.begin_update()  # forgets all results
            return sleeping.sleep(level)
        finally:
            self._moved(sleeping)

    def _undo_sleep(self, barrier: Barrier, is_own: bool, answering: AnsweringEngine) -> None:
        """Wake the engine after a failed or cancelled sleep, and end the pause of that sleep."""
        if barrier is not self.pause_barrier:  # it has ended, by a restart
            return
        if self.memory == "asleep":
            self._move_back(answering, SLEEPING_PARTS)
        if is_own or self._is_sleeps_own:
            self._end_pause(barrier)

    async def wake_up(self, tags: Collection[SleepingPart] | None = None) -> bool:
        """Wake up as ``AsyncLM.wake_up``."""
        parts = _checked_parts(tags)
        release = await self._move_lock.acquire()
        try:
            if self.memory == "awake":
                return True
            return await self._called(partial(self._wake, parts=parts), self)
        finally:
            release()

    def _wake(self, answering: AnsweringEngine, *, parts: frozenset[SleepingPart]) -> bool:
        if self.memory == "awake":  # it was restarted meanwhile
            return True
        if is_awake := self._move_back(answering, parts):
            self._end_pause(self.pause_barrier)
        return is_awake

    def _move_back(self, answering: AnsweringEngine, parts: frozenset[SleepingPart]) -> bool:
        """Move parts of the memory back, and read dropped weights again with the last part."""
        sleeping = _sleeping(answering.engine)
        self.memory = "moving"
        try:
            sleeping.wake_up(sleeping.asleep & parts)
            if not sleeping.asleep and self.are_weights_lost:
                self._thread.weights.restore(answering.engine)
                self.are_weights_lost = False
        finally:
            is_awake = self._moved(sleeping)
        return is_awake

    def _moved(self, sleeping: Sleeping) -> bool:
        """Note which parts are freed; return whether everything is there, with its weights."""
        asleep = sleeping.asleep
        self._thread.run_exclusively(self if "weights" in asleep else None)
        with self._lock:
            self.asleep = asleep
            is_whole = not asleep and not self.are_weights_lost
            self.memory = "awake" if is_whole else "asleep"
            return is_whole

    async def _called(self, function: Callable[[AnsweringEngine], T], owner: object = None) -> T:
        return await asyncio.wrap_future(self._thread.call(function, owner))

    # -- engines ------------------------------------------------------------------------------

    def run_exclusively(self, owner: object | None, barrier: Barrier | None = None) -> None:
        """Note the owner for ``EngineThread.run_exclusively``. Its barrier ends with the engine."""
        with self._lock:
            self.owner, self._owners_barrier = owner, barrier
            self._batcher.keeps_adapters = owner is not None

    def replaced(self) -> None:
        """Note that another engine is open, with whole weights and all memory."""
        with self._lock:
            barrier, self.are_weights_lost = self._owners_barrier, False
            self.owner = self._owners_barrier = None
            self._batcher.keeps_adapters = False
            if self.memory == "moving":
                self.memory = "asleep"  # until ``wake_up`` is called
        if barrier is not None:
            self._batcher.lift_barrier(barrier)
            barrier.break_with(EngineFailed(BROKEN))

    def sleep_again(self, answering: AnsweringEngine) -> None:
        """Put an engine to sleep that replaces a sleeping one: others use its device's memory."""
        if not self.asleep:
            return
        weights = _sleeping(answering.engine)
        is_whole = "weights" in self.asleep
        answering.begin_update()
        weights.sleep(self.level if is_whole else 1)
        if is_whole:
            self.are_weights_lost = self.level == 2
            self.run_exclusively(self)
        else:
            weights.wake_up(frozenset({"weights"}))

    def closed(self, reason: GenrtError) -> None:
        """Note that the batcher was closed, which broke every raised barrier."""
        with self._lock:
            barrier, self.pause_barrier = self.pause_barrier, None
            if barrier is not None:
                barrier.is_lifted = True
        if barrier is not None:
            barrier.break_with(reason)

    def reopen(self) -> None:
        """Begin again, for another engine; the one before is closed."""
        with self._lock:
            self.memory, self.asleep, self.are_weights_lost = "awake", frozenset(), False


def _nothing() -> None:
    """Have no effect."""


def _barrier_for(method: str, options: PauseOptions) -> Barrier:
    check_options(method, options, PauseOptions.__annotations__)
    pending, asked = options.get("pending", "finish"), options.get("asked", "wait")
    check_one_of("pending", pending, ("finish", "restart"))
    check_one_of("asked", asked, get_args(Asked))
    return Barrier(pending, Paused(PAUSED) if asked == "raise" else None)


def _checked_parts(tags: Collection[SleepingPart] | None) -> frozenset[SleepingPart]:
    if tags is None:
        return SLEEPING_PARTS
    parts = sorted(SLEEPING_PARTS)
    is_several = isinstance(tags, Sequence | Set) and not isinstance(tags, str)
    if not is_several or not all(isinstance(each, str) and each in parts for each in tags):
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
