"""The states of a runtime: one state machine for pause, sleep, update, restart and close.

A *hold* makes later questions wait. A pause is a hold, and so is an update. A sleep needs a pause and
makes one if there is none.

States, of one batcher and the engine that it feeds:
    running    questions are sent and answered.
    draining   a hold is up. Questions asked before it are answered, or asked again after it.
    still      every hold is passed: nothing asked before is queued or in flight.
    updating   the calls of one update alone run on the engine's thread. Its weights may be mixed.
    moving     a sleep or a wake_up moves the engine's memory.
    asleep     a part of the memory is given back, or the weights are dropped and not read again yet.

Only ``running`` answers new questions. Only ``running`` and ``draining`` step the engine. Events:

    ================  ===========  ===========  ===========  ===========  ===========  ===========
    event             running      draining     still        updating     moving       asleep
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
    engine replaced   running      draining     still        still [7]    asleep       asleep
    close             closed       closed       closed       closed       closed       closed
    ================  ===========  ===========  ===========  ===========  ===========  ===========

    1. If the runtime is paused. An update alone is no pause: then a pause is one more hold.
    2. Once no other hold is up.
    3. The memory is moved back, and then the sleep's own pause ends.
    4. ``asleep`` again if only a part wakes, or if it fails; otherwise ``running``.
    5. While the weights sleep. With the KV cache asleep alone, as in ``still``.
    6. Once a tensor was loaded; before that, as at its end. Another engine has the last whole weights.
    7. The update's hold falls. Its next call raises EngineFailed.
    A restart and a close drop every hold, and tell each pause, sleep and update that is under way.

Rules:
    All of it happens under the batcher's lock. The engine's thread alone puts holds up and moves memory.
    Questions behind a hold are asked when the last hold is down, of the weights that there are then.
    A partly delivered stream is asked again too; delivered tokens are skipped. It fails if the weights
    are replaced meanwhile: the rest of the text would be by others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from genrt.errors import EngineFailed, GenrtError, InvalidRequest, StreamCut
from genrt.numbers import named
from genrt.runtime.queue import Admission, Entries
from genrt.runtime.waiters import Gatherings, Outcome, Waiter, deliver, hand_out

__all__ = [
    "DROPPED",
    "Hold",
    "Lifecycle",
    "Memory",
    "Pending",
    "State",
    "Turns",
    "check_pending",
    "follow",
]

T = TypeVar("T")

Pending: TypeAlias = Literal["finish", "restart"]
"""What becomes of the questions asked before: they are answered, or asked again later."""

Memory: TypeAlias = Literal["awake", "moving", "asleep"]
"""The engine's memory on its device."""

State: TypeAlias = Literal["running", "draining", "still", "updating", "moving", "asleep"]

ASLEEP = "the engine sleeps: wake it up first"
DROPPED = "the engine was restarted, replaced or closed in the middle of this: begin again"


def check_pending(pending: object) -> None:
    """Raise InvalidRequest unless it says what becomes of the questions asked before."""
    if pending not in ("finish", "restart"):
        raise InvalidRequest(f'pending must be "finish" or "restart", got {named(pending)}')


class Hold:
    """Makes questions asked after it wait, until it is down.

    Args:
        pending: what becomes of the questions asked before.
        refusal: the error for questions that come after it; ``None`` makes them wait.

    Attributes:
        passed: resolves once nothing asked before it is left, or to the reason why that never happens.
        dropped: resolves to an error if a restart or a close drops the hold.
        is_down: true once it has ended; it is never put up again. Set under the batcher's lock.
    """

    def __init__(self, pending: Pending, refusal: GenrtError | None = None) -> None:
        self.pending = pending
        self.refusal = refusal
        self.passed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.dropped: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.is_down = False

    async def wait(self) -> None:
        """Wait until it is passed. Cancelling concerns this caller alone."""
        await asyncio.wrap_future(follow(self.passed))

    async def unless_dropped(self, work: Awaitable[T]) -> T:
        """Return what the work returns. Raises EngineFailed once the hold is dropped, and cancels it."""
        task = asyncio.ensure_future(work)
        dropped = asyncio.wrap_future(follow(self.dropped))
        try:
            either: set[asyncio.Future[Any]] = {task, dropped}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if dropped.done():
                dropped.result()
            return await task
        finally:
            dropped.cancel()
            task.cancel()
            if task.done():  # maybe with an error, while the hold was dropped
                _ = task.cancelled() or task.exception()
            else:
                task.add_done_callback(lambda task: task.cancelled() or task.exception())


class Turns:
    """A lock that coroutines of any event loop take in the order of their calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._last.set_result(None)

    async def take(self) -> Callable[..., None]:
        """Wait for every earlier turn to end; return a function that ends this one. It is idempotent,
        safe from any thread, and ignores its arguments."""
        turn: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            before, self._last = self._last, turn
        try:
            if not before.done():
                await asyncio.wrap_future(follow(before))
        except BaseException:
            before.add_done_callback(lambda _: _resolve(turn, None))
            raise
        return lambda *_: _resolve(turn, None)


class Lifecycle:
    """The state of one runtime, and the version of the weights that questions are bound to.

    Args:
        lock: the batcher's.
        wake: makes the engine's thread look.
        entries, gatherings, admission: where questions are, but for those that the cache answers.
        drop: forgets a waiter's question, under the lock.
        wait: makes a waiter wait, under the lock.
        admit: asks waiting questions while there is room, under the lock; returns the waiters that the
            cache answers.

    Attributes:
        up: the holds.
        is_watched: whether a hold is up that is not known to be passed.
        owner: the object whose calls alone run on the engine's thread; ``None`` is all.
        pause: the hold of the present pause, also one that a sleep has made.
        is_sleeps_own: whether that pause ends with the sleep if the sleep is cancelled.
        are_weights_lost: whether a sleep dropped the weights, and nothing has loaded them since.
    """

    def __init__(
        self,
        lock: threading.RLock,
        wake: Callable[[], None],
        entries: Entries,
        gatherings: Gatherings,
        admission: Admission,
        drop: Callable[[Waiter], None],
        wait: Callable[[Waiter], None],
        admit: Callable[[], list[Waiter]],
    ) -> None:
        self.weights_version = 0
        self._lock = lock
        self._wake = wake
        self._entries = entries
        self._gatherings = gatherings
        self._admission = admission
        self._drop = drop
        self._wait = wait
        self._admit = admit
        # Read by the batcher and the engine's loop.
        self.up: dict[Hold, None] = {}
        self.is_watched = False
        self.owner: object | None = None
        self._owners_hold: Hold | None = None
        self.pause: Hold | None = None
        self.memory: Memory = "awake"
        self.is_sleeps_own = False
        self.are_weights_lost = False

    @property
    def state(self) -> State:
        """The present state."""
        with self._lock:
            if self.memory != "awake":
                return self.memory
            if self.owner is not None:
                return "updating"
            if not self.up:
                return "running"
            return "still" if self.is_passed else "draining"

    # -- questions ----------------------------------------------------------------------------

    def stop(self, waiter: Waiter) -> bool:
        """Make a new question wait if a hold is up, under the lock; return whether it does.

        Raises:
            GenrtError: a hold refuses questions.
        """
        if not waiter.requests:
            return False
        for hold in self.up:
            if hold.refusal is not None:
                raise hold.refusal.fresh()
        self._wait(waiter)
        return True

    def put_up(self, hold: Hold) -> None:
        """Make every later question wait until the hold is down; do nothing if it is. For the engine's
        thread."""
        with self._lock:
            if hold.is_down:
                return
            self.up[hold] = None
            self.is_watched = True
            self._gatherings.end()  # a loop may stand still
            for waiter in self._waiters() if hold.pending == "restart" else ():
                self._drop(waiter)
                waiter.found.clear()
                self._wait(waiter)
        self._wake()

    def _waiters(self) -> list[Waiter]:
        """Return those whose questions are queued, in flight or waiting for room."""
        asked = {waiter: None for entry in self._entries.values() for waiter in entry.waiters}
        return [*(asked | dict.fromkeys(self._admission.waiters()))]

    def take_down(self, hold: Hold, weights_version: int | None = None) -> None:
        """Let questions go on, unless another hold is up; idempotent. With a version, all are bound to
        that one from now on, and partly delivered texts of another one fail."""
        answered: list[Waiter] = []
        cut: list[tuple[Waiter, Outcome]] = []
        with self._lock:
            if weights_version is not None:
                self.weights_version, self.are_weights_lost = weights_version, False
                cut = [(waiter, _cut()) for waiter in self._admission.told_in_part()]
                for waiter, _ in cut:
                    self._drop(waiter)
            hold.is_down = True
            self.up.pop(hold, None)
            if not self.up:
                self._admission.go_on()
                answered = self._admit()
        _resolve(hold.passed, InvalidRequest("the runtime was resumed before it stood still"))
        deliver(cut)
        hand_out(answered)
        self._wake()

    @property
    def is_passed(self) -> bool:
        """True if nothing is left of what was asked before the holds."""
        return not (self._entries or self._admission.is_waited_for)

    def tell(self) -> None:
        """Resolve the holds that are up: they are passed."""
        self.is_watched = False
        with self._lock:
            passed = [*self.up]
        for hold in passed:
            _resolve(hold.passed, None)

    # -- pauses and sleep ---------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """True from the call of ``pause`` or ``sleep`` to the end of the pause."""
        return self.pause is not None

    def begin_pause(self, hold: Hold) -> Hold:
        """Have a pause with this hold, unless there is one; return the hold of the pause."""
        with self._lock:
            if self.pause is None:
                self.pause, self.is_sleeps_own = hold, False
            return self.pause

    def end_pause(self, hold: Hold | None) -> None:
        """End this pause, if it is the present one. In a sleep, it ends with that."""
        with self._lock:
            if hold is None or hold is not self.pause:
                return
            if self.memory != "awake":
                self.is_sleeps_own = True
                return
            self.pause = None
        self.take_down(hold)

    def resume(self) -> None:
        """End the pause, if there is one. Raises InvalidRequest in a sleep."""
        with self._lock:
            if self.memory != "awake":
                raise InvalidRequest(ASLEEP)
            hold = self.pause
        self.end_pause(hold)

    def begin_sleep(self, hold: Hold, *, is_own: bool, level: int) -> None:
        """Begin to move the memory, in a pause that nothing runs in. For the engine's thread.

        Raises:
            InvalidRequest: the pause has ended, or the engine sleeps.
        """
        with self._lock:
            if self.memory != "awake":
                raise InvalidRequest(ASLEEP)
            if hold is not self.pause or hold not in self.up or not self.is_passed:
                raise InvalidRequest("the runtime was resumed before its engine slept")
            self.memory, self.is_sleeps_own = "moving", is_own
            self.are_weights_lost = level == 2

    def moved(self, *, is_awake: bool) -> bool:
        """Note where the memory is after it was moved; return whether all is there, with its weights."""
        with self._lock:
            is_whole = is_awake and not self.are_weights_lost
            self.memory = "awake" if is_whole else "asleep"
            return is_whole

    # -- engines ------------------------------------------------------------------------------

    def run_exclusively(self, owner: object | None, hold: Hold | None = None) -> None:
        """Have only this owner's calls run on the engine's thread; see ``EngineLoop``. Its hold falls if
        the engine is replaced."""
        with self._lock:
            self.owner, self._owners_hold = owner, hold

    def replaced(self) -> None:
        """Note that another engine is open, with whole weights and all of its memory."""
        with self._lock:
            hold, self.are_weights_lost = self._owners_hold, False
            self.owner = self._owners_hold = None
            if self.memory == "moving":
                self.memory = "asleep"  # until ``wake_up`` is called
        if hold is not None:
            self.take_down(hold)
            _resolve(hold.dropped, EngineFailed(DROPPED))

    def clear(self) -> list[Hold]:
        """Drop every hold, under the lock, with nothing going on; return them."""
        holds = {**self.up, **({self.pause: None} if self.pause is not None else {})}
        self.up, self.is_watched, self.pause = {}, False, None
        for hold in holds:
            hold.is_down = True
        return [*holds]

    def reopen(self) -> None:
        """Begin again, for another engine; the one before is closed. Under the lock."""
        self.memory, self.are_weights_lost = "awake", False

    @staticmethod
    def fail(holds: Sequence[Hold], reason: GenrtError) -> None:
        """Tell whatever waits for these holds, or works behind them; without the lock."""
        for hold in holds:
            _resolve(hold.passed, reason.fresh())
            _resolve(hold.dropped, EngineFailed(DROPPED))


def follow(future: concurrent.futures.Future[Any]) -> concurrent.futures.Future[None]:
    """Return a future that ends as this one does. Cancelling it cancels nothing else."""
    own: concurrent.futures.Future[None] = concurrent.futures.Future()

    def end(_: object) -> None:
        error = None if future.cancelled() else future.exception()
        _resolve(own, error.fresh() if isinstance(error, GenrtError) else error)

    future.add_done_callback(end)
    return own


def _resolve(future: concurrent.futures.Future[None], error: BaseException | None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled, or resolved before
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _cut() -> StreamCut:
    return StreamCut(
        "the weights were replaced while this text was drawn, and a part of it had been told: ask again, "
        'or replace them with pending="finish"'
    )
