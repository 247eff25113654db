"""Fences between questions: what was asked before one ends, or is asked anew; what comes after it waits.

Rules:
    All of it happens under the batcher's lock. The engine thread alone puts fences up.
    A fence is passed once nothing that was asked before it is queued, in flight or waiting for room.
    Questions behind a fence are asked when the last one is down, by the weights that there are then.
    A text of which a stream has told some is asked anew too, and told on from there. It fails if the
    weights are replaced meanwhile: the rest would be by other ones.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from genrt.errors import GenrtError, InvalidRequest, StreamCut
from genrt.numbers import named
from genrt.runtime.queue import Admission, Entries
from genrt.runtime.waiters import Gatherings, Outcome, Waiter, deliver, hand_out

__all__ = ["Fence", "Fences", "Pending", "check_pending"]

Pending: TypeAlias = Literal["finish", "restart"]
"""What becomes of the questions asked before: they are answered, or asked anew."""


def check_pending(pending: object) -> None:
    """Raise InvalidRequest unless it says what becomes of the questions asked before."""
    if pending not in ("finish", "restart"):
        raise InvalidRequest(f'pending must be "finish" or "restart", got {named(pending)}')


class Fence:
    """One fence.

    Args:
        pending: what becomes of the questions asked before.
        refusal: the error for questions that come after it; ``None`` has them wait.

    ``passed`` resolves once nothing asked before it is left; or to why that will never be. One that
    ``is_down`` is never put up again; that is set under the batcher's lock.
    """

    def __init__(self, pending: Pending, refusal: GenrtError | None = None) -> None:
        self.pending = pending
        self.refusal = refusal
        self.passed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.is_down = False


class Fences:
    """The fences of one batcher, and the version of the weights that questions are bound to.

    Args:
        lock: the batcher's.
        wake: has the engine thread look.
        entries, gatherings, admission: where questions are, but for those that the cache answers.
        drop: forgets a waiter's question, under the lock.
        wait: has a waiter wait, under the lock.
        admit: asks what waits while there is room, under the lock; returns whom the cache answers.
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
        # Read by the batcher: those that are up, and whether one is not known to be passed.
        self.up: dict[Fence, None] = {}
        self.is_watched = False

    def stop(self, waiter: Waiter) -> bool:
        """Have a new question wait if a fence is up, under the lock; return whether it does.

        Raises:
            GenrtError: a fence refuses questions.
        """
        if not waiter.requests:
            return False
        for fence in self.up:
            if fence.refusal is not None:
                raise fence.refusal.fresh()
        self._wait(waiter)
        return True

    def put_up(self, fence: Fence) -> None:
        """Have every later question wait until the fence is down; do nothing if it is."""
        with self._lock:
            if fence.is_down:
                return
            self.up[fence] = None
            self.is_watched = True
            self._gatherings.end()  # a loop may stand still
            for waiter in self._waiters() if fence.pending == "restart" else ():
                self._drop(waiter)
                waiter.found.clear()
                self._wait(waiter)
        self._wake()

    def _waiters(self) -> list[Waiter]:
        """Return those whose questions are queued, in flight or waiting for room."""
        asked = {waiter: None for entry in self._entries.values() for waiter in entry.waiters}
        return [*(asked | dict.fromkeys(self._admission.waiters()))]

    def take_down(self, fence: Fence, weights_version: int | None = None) -> None:
        """Have questions go on, unless another fence is up; idempotent. With a version, all are bound to
        that one from now on, and texts that were told in part by another fail."""
        answered: list[Waiter] = []
        cut: list[tuple[Waiter, Outcome]] = []
        with self._lock:
            if weights_version is not None:
                self.weights_version = weights_version
                cut = [(waiter, _cut()) for waiter in self._admission.told_in_part()]
                for waiter, _ in cut:
                    self._drop(waiter)
            fence.is_down = True
            self.up.pop(fence, None)
            if not self.up:
                self._admission.go_on()
                answered = self._admit()
        _resolve(fence, InvalidRequest("the runtime was resumed before it stood still"))
        deliver(cut)
        hand_out(answered)
        self._wake()

    @property
    def is_passed(self) -> bool:
        """True if nothing is left of what was asked before the fences."""
        return not (self._entries or self._admission.is_waited_for)

    def tell(self) -> None:
        """Tell who waits for the fences that they are passed."""
        self.is_watched = False
        with self._lock:
            passed = [*self.up]
        for fence in passed:
            _resolve(fence, None)

    def clear(self) -> list[Fence]:
        """Take all down, under the lock, with nothing going on; return those that are not passed."""
        up, self.up, self.is_watched = self.up, {}, False
        return [fence for fence in up if not fence.passed.done()]

    @staticmethod
    def fail(fences: Sequence[Fence], reason: GenrtError) -> None:
        """Tell who waits for these why they will never be passed; without the lock."""
        for fence in fences:
            _resolve(fence, reason.fresh())


def _resolve(fence: Fence, error: GenrtError | None) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # whoever waited has left
        if error is None:
            fence.passed.set_result(None)
        else:
            fence.passed.set_exception(error)


def _cut() -> StreamCut:
    return StreamCut(
        "the weights were replaced while this text was drawn, and a part of it had been told: ask again, "
        'or replace them with pending="finish"'
    )
