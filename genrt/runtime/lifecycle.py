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
    State changes under the batcher's lock. The engine's thread alone puts holds up and moves memory.
    ``batcher.py`` makes questions wait. When the last hold is down, they are asked of the new weights.
    A partly delivered stream is asked again too; delivered tokens are skipped. It fails if the weights
    are replaced meanwhile: the rest of the text would come from other weights.
    An engine that replaces one that slept sleeps as that one did, before anything else.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from genrt.engines.weights import SLEEPING_PARTS, SleepingPart
from genrt.errors import EngineFailed, GenrtError, InvalidRequest
from genrt.numbers import named
from genrt.runtime.batcher import DROPPED, Batcher, Hold

__all__ = ["ASLEEP", "Lifecycle", "Memory", "State", "check_pending"]

Memory: TypeAlias = Literal["awake", "moving", "asleep"]
"""The engine's memory on its device."""

State: TypeAlias = Literal["running", "draining", "still", "updating", "moving", "asleep"]

ASLEEP = "the engine sleeps: wake it up first"


def check_pending(pending: object) -> None:
    """Raise InvalidRequest unless it is a ``Pending``."""
    if pending not in ("finish", "restart"):
        raise InvalidRequest(f'pending must be "finish" or "restart", got {named(pending)}')


class Lifecycle:
    """The state of one runtime.

    Attributes:
        owner: the object whose calls alone run on the engine's thread; ``None`` is all.
        pause: the hold of the present pause, also one that a sleep has made.
        is_sleeps_own: whether that pause ends with the sleep if the sleep is cancelled.
        asleep: the parts of the memory that are given back, or are on their way.
        level: the level of the last sleep.
        are_weights_lost: whether a sleep dropped the weights, and nothing has loaded them since.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._lock = batcher.lock
        self.owner: object | None = None
        self._owners_hold: Hold | None = None
        self.pause: Hold | None = None
        self.memory: Memory = "awake"
        self.asleep: frozenset[SleepingPart] = frozenset()
        self.level = 1
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
            if not self._batcher.holds:
                return "running"
            return "still" if self._batcher.is_passed else "draining"

    # -- pauses and sleep ---------------------------------------------------------------------

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
        self._batcher.take_down(hold)

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
            is_up = hold is self.pause and hold in self._batcher.holds
            if not is_up or not self._batcher.is_passed:
                raise InvalidRequest("the runtime was resumed before its engine slept")
            self.memory, self.is_sleeps_own, self.level = "moving", is_own, level
            self.asleep, self.are_weights_lost = SLEEPING_PARTS, level == 2

    def moved(self, asleep: frozenset[SleepingPart]) -> bool:
        """Note which parts of the memory are given back; return whether all is there, with its
        weights."""
        with self._lock:
            self.asleep = asleep
            is_whole = not asleep and not self.are_weights_lost
            self.memory = "awake" if is_whole else "asleep"
            return is_whole

    # -- engines ------------------------------------------------------------------------------

    def run_exclusively(self, owner: object | None, hold: Hold | None = None) -> None:
        """Have only this owner's calls run on the engine's thread; see ``EngineThread``. Its hold falls
        if the engine is replaced."""
        with self._lock:
            self.owner, self._owners_hold = owner, hold
            self._batcher.keeps_adapters = owner is not None

    def replaced(self) -> None:
        """Note that another engine is open, with whole weights and all of its memory."""
        with self._lock:
            hold, self.are_weights_lost = self._owners_hold, False
            self.owner = self._owners_hold = None
            self._batcher.keeps_adapters = False
            if self.memory == "moving":
                self.memory = "asleep"  # until ``wake_up`` is called
        if hold is not None:
            self._batcher.take_down(hold)
            hold.drop(EngineFailed(DROPPED))

    def slept_again(self) -> None:
        """Note that an engine that replaced one that slept sleeps, too."""
        if "weights" in self.asleep:
            self.are_weights_lost = self.level == 2
            self.run_exclusively(self)

    def closed(self, reason: GenrtError) -> None:
        """Note that the batcher was closed, which dropped every hold that was up."""
        with self._lock:
            hold, self.pause = self.pause, None
            if hold is not None:
                hold.is_down = True
        if hold is not None:
            hold.drop(reason)

    def reopen(self) -> None:
        """Begin again, for another engine; the one before is closed."""
        with self._lock:
            self.memory, self.asleep, self.are_weights_lost = "awake", frozenset(), False
