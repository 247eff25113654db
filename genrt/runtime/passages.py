"""The way of one stream's parts from the engine thread to its reader, and of native outputs on it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from genrt.errors import GenrtError, InvalidRequest

__all__ = ["NativeFlow", "Passage"]

T = TypeVar("T")

Outputs: TypeAlias = tuple[Any, ...]


class Passage(ABC, Generic[T]):
    """One stream on its way from the engine thread to its reader, part by part.

    Args:
        loop: the reader's event loop; ``None`` for one that blocks a thread.
        seconds: how long the text may take, if there is an end to that.

    Attributes:
        error: why the text was not read to its end, unless its reader left.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, seconds: float | None = None
    ) -> None:
        self.loop = loop
        self.seconds = seconds
        self.error: GenrtError | None = None
        self.weights_version = 0  # of the text, since it was asked for
        self.is_told = False  # written by the engine thread, once it gives the reader anything
        self.is_left = self.is_late = False
        self._came: deque[T] = deque()  # put by one thread, taken by another
        self._woken: asyncio.Future[None] | None = None
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """True once something of the text has been read."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """True once all of it has."""

    @abstractmethod
    def take(self) -> T | None:
        """Return all that has come since the last call, if anything has.

        Raises:
            StreamCut: the text was begun anew, and differs from what was read.
        """

    @abstractmethod
    def end(self, result: Any) -> T:
        """Return what of the result has not been read; raises as ``take``."""

    def put(self, part: T) -> None:
        """Have the reader take this; called on its loop, or by the engine thread for one without."""
        self._came.append(part)
        self.wake()

    def wake(self, _: object = None) -> None:
        """End the reader's present wait, or its next."""
        if self.loop is None:
            self._signals.put(None)
        elif self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def leave(self) -> None:
        """Have the reader's present wait be its last."""
        self.is_left = True
        if self.loop is None or not self.loop.is_closed():
            self.wake()

    def time_out(self) -> None:
        """Tell the reader that its time is over. Called on its loop, which need not agree: uvloop's
        timers are early by up to a millisecond."""
        self.is_late = True
        self.wake()

    async def wait(self) -> None:
        """Wait until something has come, or the question has ended."""
        if not self._came and self.loop is not None:
            self._woken = self.loop.create_future()
            await self._woken

    def wait_sync(self, seconds: float | None) -> None:
        """Block as ``wait`` does, at most so long."""
        longest = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
        with contextlib.suppress(queue.Empty):
            self._signals.get(timeout=longest)

    @contextlib.contextmanager
    def under_way(self, loop: asyncio.AbstractEventLoop | None = None) -> Iterator[None]:
        """Read on this loop, or blocking, in the time there is; note an error that ends the reading."""
        self.loop = loop
        timer = None
        if loop is not None and self.seconds is not None:
            timer = loop.call_later(self.seconds, self.time_out)
        try:
            yield
        except GeneratorExit:  # closed, or collected
            raise
        except BaseException as error:
            self.error = error.fresh() if isinstance(error, GenrtError) else _withdrawn(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def check(self) -> None:
        """Raise the error that ended the reading, if one did."""
        if self.error is not None:
            raise self.error.fresh() from None

    def begin_anew(self) -> None:
        """Forget what has come and was not read: it is of another text, by other weights."""
        self._came.clear()


class NativeFlow(Passage[Outputs]):
    """The outputs of a native text, on their way to its reader. The engine leaves out what it has told
    before."""

    def __init__(self) -> None:
        super().__init__()
        self._is_begun = self._is_over = False

    @property
    def is_begun(self) -> bool:
        return self._is_begun

    @property
    def is_over(self) -> bool:
        return self._is_over

    def take(self) -> Outputs | None:
        outputs: list[Any] = []
        while self._came:
            outputs += self._came.popleft()
        self._is_begun = self._is_begun or bool(outputs)
        return tuple(outputs) or None

    def end(self, result: Outputs) -> Outputs:
        self._is_over = True
        return (*(self.take() or ()), *result)


def _withdrawn(error: BaseException) -> InvalidRequest:
    return InvalidRequest(
        f"this stream was withdrawn by the {type(error).__name__} that ended an earlier read of it: ask "
        "again. asyncio.wait_for and asyncio.timeout cancel a read that takes too long; "
        "asyncio.wait({task}, timeout=…) does not"
    )
