"""A waiter for each awaiting caller, an entry for each request; what each event loop asks, and is told.

Rules:
    A loop is quiet, and what it asks is complete, once a pass of it brought no new question; one that
    asks in every pass is waited for ``PATIENCE`` passes. All of that but a loop's own callback happens
    under the batcher's lock.
    What was gathered is handed on once, also if an interrupt comes in between.
    Every waiter gets storage (or an exception object) of its own.
    Each event loop is called into once, whatever the number of waiters there, and goes round while it
    tells them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from torch import Tensor

from genrt.engines.protocol import failure
from genrt.errors import GenrtError
from genrt.questions.request import Request, Result
from genrt.runtime.passages import Passage
from genrt.tokens.rows import separate_copies, stacked

__all__ = [
    "PATIENCE",
    "TOLD_AT_ONCE",
    "Entry",
    "Gatherings",
    "Observer",
    "OnLoops",
    "Outcome",
    "Waiter",
    "deliver",
    "hand_out",
    "outcome_of",
    "outcomes",
]

T = TypeVar("T")

PATIENCE = 100
"""How many passes a loop that asks something new in each of them is waited for."""

TOLD_AT_ONCE = 256
"""How many waiters of a loop are told before it goes round: what they do then takes its time."""

Outcome: TypeAlias = list[Result] | GenrtError
"""What a waiter's future gets."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One awaiting caller of one or more requests, on an event loop or (``loop is None``) a thread.

    ``found`` has the result of each distinct request; ``missing`` counts those that are still None.
    ``flow`` gets the deltas of a stream, whose only request is streamed.
    """

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop | None
    future: asyncio.Future[list[Result]] | concurrent.futures.Future[list[Result]]
    stacked: bool
    found: dict[Request, Result | None]
    missing: int = 0
    flow: Passage[Any] | None = None

    def bind(self, weights_version: int) -> None:
        """Have the question be one to this version of the weights; nothing of it is asked yet."""
        if self.requests and self.requests[0].weights_version != weights_version:
            self.requests = [each.of_weights(weights_version) for each in self.requests]
        if self.flow is not None:
            self.flow.weights_version = weights_version

    def results(self) -> list[Result]:
        """Return what was found for each request, in their order; others may hold it too."""
        found = cast("dict[Request, Result]", self.found)
        if len(found) == len(self.requests):
            return [*found.values()]
        return [found[request] for request in self.requests]


@dataclass(slots=True, eq=False)
class Entry:
    """One request on its way, and who waits for it. With no waiter it is withdrawn, or was never sent."""

    request: Request
    waiters: dict[Waiter, None]
    flow: Passage[Any] | None = None
    in_flight: bool = False


class Observer(Protocol):
    """Is told what a batcher does at moments of its own choosing; its methods must not block."""

    def registering(self, waiter: Waiter) -> None:
        """Note, under the lock, that the requests of a question are found, joined or queued next: as it
        comes, or when there is room for it."""
        ...

    def leaving(self, waiter: Waiter) -> None:
        """Note that a waiter that leaves by itself is taken off next."""
        ...

    def taken(self, flush: Sequence[Request], withdrawn: Sequence[Request]) -> None:
        """Note what a turn is about to send to the engine, and to have it forget."""
        ...


class OnLoops:
    """The waiters that wait for something on each event loop, as any loop may be closed under them."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.AbstractEventLoop, dict[Waiter, None]] = {}

    def add(self, waiter: Waiter) -> None:
        """Keep this one until it is discarded, if it waits for something on a loop."""
        if waiter.loop is not None and waiter.missing:
            self._waiters.setdefault(waiter.loop, {})[waiter] = None

    def discard(self, waiter: Waiter) -> None:
        """Forget this one, if it is kept."""
        loop = waiter.loop
        if loop is not None and (waiters := self._waiters.get(loop)) is not None:
            waiters.pop(waiter, None)
            if not waiters:
                del self._waiters[loop]

    def closed(self) -> list[Waiter]:
        """Return those whose loop is closed: nobody will hear what they get."""
        closed = [loop for loop in self._waiters if loop.is_closed()]
        return [waiter for loop in closed for waiter in self._waiters[loop]]

    def clear(self) -> None:
        """Forget all."""
        self._waiters.clear()


@dataclass(slots=True, eq=False)
class _Gathering:
    """The entries that one event loop has asked for since it was last quiet."""

    entries: dict[Entry, None] = field(default_factory=dict)
    weight: int = 0
    questions: int = 0
    passes: int = 0


class Gatherings:
    """The entries that each event loop has asked for since it was last quiet.

    Args:
        lock: the batcher's.
        hand_on: the batcher's ``_make_ready``: takes what was gathered, under the lock, and returns
            whether the engine thread must look.
        wake: has the engine thread look; called without the lock.
        most: entries of one loop that weigh so much are handed on at once.
        asked: called under the lock once a loop that asked is quiet.
    """

    def __init__(
        self,
        lock: threading.RLock,
        hand_on: Callable[[Iterable[Entry]], bool],
        wake: Callable[[], None],
        most: int,
        asked: Callable[[asyncio.AbstractEventLoop], None],
    ) -> None:
        self._lock = lock
        self._asked = asked
        self._hand_on = hand_on
        self._wake = wake
        self._most = most
        self._by_loop: dict[asyncio.AbstractEventLoop, _Gathering] = {}

    def __len__(self) -> int:
        """Return how many loops are being waited for."""
        return len(self._by_loop)

    def __contains__(self, loop: asyncio.AbstractEventLoop) -> bool:
        return loop in self._by_loop

    def add(self, loop: asyncio.AbstractEventLoop | None, entries: Sequence[Entry]) -> bool:
        """Gather what a question queued, on the loop that is running; hand on a thread's. Returns whether
        the engine thread must look."""
        if loop is None or not entries:
            return self._hand_on(entries)
        gathering = self._by_loop.get(loop)
        if gathering is None:
            gathering = _Gathering()
            loop.call_soon(self._quiet, loop, gathering, 0)
            self._by_loop[loop] = gathering
        gathering.questions += 1
        for entry in entries:
            if entry not in gathering.entries:
                gathering.entries[entry] = None
                gathering.weight += entry.request.weight
        return gathering.weight >= self._most and self._end(gathering)

    def of_closed_loops(self) -> list[object]:
        """Forget the loops that were closed before they went quiet, and what they asked; returns that."""
        closed = [loop for loop in self._by_loop if loop.is_closed()]
        return [(loop, self._by_loop.pop(loop)) for loop in closed]

    def end(self) -> None:
        """Pass on what was gathered so far, without waiting for quiet."""
        for gathering in [*self._by_loop.values()]:
            self._end(gathering)

    def clear(self) -> object:
        """Forget everything; returns that."""
        forgotten, self._by_loop = self._by_loop, {}
        return forgotten

    def _end(self, gathering: _Gathering) -> bool:
        wake = self._hand_on(gathering.entries)
        gathering.entries, gathering.weight = {}, 0
        return wake

    def _quiet(self, loop: asyncio.AbstractEventLoop, gathering: _Gathering, seen: int) -> None:
        """Look for new questions once a pass of the loop. The pass that brought the first counts as one
        that brought some, so tasks that others started in it are waited for too."""
        try:
            with self._lock:
                gathering.passes += 1
                if gathering.questions != seen and gathering.passes < PATIENCE:
                    loop.call_soon(self._quiet, loop, gathering, gathering.questions)
                    return
                wake = self._end_for_good(loop, gathering)
            if wake:
                self._wake()
        except BaseException:  # an interrupt, after which nothing else would end what was gathered
            with self._lock:
                self._end_for_good(loop, gathering)
            self._wake()
            raise

    def _end_for_good(self, loop: asyncio.AbstractEventLoop, gathering: _Gathering) -> bool:
        if self._by_loop.get(loop) is gathering:  # and not one begun since, after a restart
            del self._by_loop[loop]
            self._asked(loop)
        return self._end(gathering)


def outcomes(waiters: Sequence[Waiter]) -> list[Outcome]:
    """Return what each waiter gets: results in storage of its own, or an error if there is no memory
    for that. All are copied at once; or, if that fails, one by one, to see whose copies do."""
    try:
        return list(_own(waiters))
    except Exception as error:
        if len(waiters) == 1:
            return [failure(error)]
    return [outcome for waiter in waiters for outcome in outcomes([waiter])]


def outcome_of(waiter: Waiter) -> list[Result]:
    """Return what a waiter gets, or raise the error that it gets."""
    [outcome] = outcomes([waiter])
    if isinstance(outcome, GenrtError):
        raise outcome
    return outcome


def _own(waiters: Sequence[Waiter]) -> Iterator[list[Result]]:
    """Yield what each found, in storage of its own: one stack of the rows where that is wanted. All
    tensors are copied at once; the kind of a request knows what to copy of any other result."""
    found = [waiter.results() for waiter in waiters]
    apiece = [
        result
        for waiter, results in zip(waiters, found, strict=True)
        if not waiter.stacked
        for result in results
    ]
    copies = iter(separate_copies([result for result in apiece if isinstance(result, Tensor)]))
    for waiter, results in zip(waiters, found, strict=True):
        if waiter.stacked:
            yield [stacked(results)]
        else:
            yield [
                next(copies) if isinstance(result, Tensor) else request.owned(result)
                for request, result in zip(waiter.requests, results, strict=True)
            ]


def hand_out(answered: Sequence[Waiter]) -> None:
    """Give these what they found."""
    if answered:
        deliver(zip(answered, outcomes(answered), strict=True))


def deliver(done: Iterable[tuple[Waiter, Outcome]]) -> None:
    """Resolve the waiters still waiting: threads here, each event loop by one call into it."""
    by_loop: dict[asyncio.AbstractEventLoop | None, deque[tuple[Any, Outcome]]] = {}
    for waiter, outcome in done:
        loop = waiter.loop
        if loop not in by_loop:
            by_loop[loop] = deque()
        by_loop[loop].append((waiter.future, outcome))
    _resolve(None, by_loop.pop(None, deque()))
    for loop, resolved in by_loop.items():
        with contextlib.suppress(RuntimeError):  # closed, and with it all who waited there
            cast("asyncio.AbstractEventLoop", loop).call_soon_threadsafe(_resolve, loop, resolved)


def _resolve(loop: asyncio.AbstractEventLoop | None, done: deque[tuple[Any, Outcome]]) -> None:
    """Resolve futures of threads; or of one loop, which goes round before the next of them, and resolves
    the rest when it goes on if it is interrupted."""
    try:
        for _ in range(len(done) if loop is None else min(len(done), TOLD_AT_ONCE)):
            future, outcome = done[0]
            failed = isinstance(outcome, GenrtError)
            with _DONE:  # cancelled, at any moment by a signal handler; or told by another thread
                (future.set_exception if failed else future.set_result)(outcome)
            done.popleft()
    except Exception:  # of one that raised by itself, and would do so for ever
        done.popleft()
        raise
    finally:
        if loop is not None and done:
            loop.call_soon(_resolve, loop, done)


_DONE = contextlib.suppress(asyncio.InvalidStateError, concurrent.futures.InvalidStateError)
