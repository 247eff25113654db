"""Runs coroutines concurrently, one after the other, or from a blocking thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import inspect
import queue
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

from genrt.errors import GenrtError

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

AT_ONCE_BYTES = 2**20
"""The maximum bytes that are read or copied on the event loop; more is done in another thread."""

SIGNAL_SECONDS = 0.05
"""The interval of checks whether the calling task was cancelled."""

INTERRUPT_SECONDS = 0.5
"""The interval of the main thread's checks for an interrupt, which may come after Python has checked and
before the thread waits."""

MOST_HANDED = 64
"""The maximum values of an asynchronous generator that wait for the thread that takes them."""


# -- at once ---------------------------------------------------------------------------------------


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines concurrently and return their results in order. After the first error, which is
    raised, or a cancellation, all have ended."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    except GeneratorExit:  # collected with its loop, which runs no more
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


_Calls: TypeAlias = Iterator[tuple[int, Callable[[], Any]]]


class ConcurrentCalls:
    """Calls a user's function for many arguments.

    A plain function is called in a thread, argument by argument; a coroutine function, or a function that
    returns an awaitable, on the running loop. Each loop runs at most ``max_concurrent`` calls or threads.
    """

    def __init__(self, function: Callable[[Any], Any], max_concurrent: int) -> None:
        self._function = function
        # An object with an ``async def __call__`` is a coroutine function in all but name.
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self._max_concurrent = max_concurrent
        self._limits: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    async def about(self, arguments: dict[int, Any], keep: Callable[[int, Any], None]) -> None:
        """Call the function for each argument, and pass ``keep`` its number and result at once. Raises
        the first error of the function or of ``keep``. After an error or a cancellation no call goes on,
        except the present one of a plain function."""
        loop = asyncio.get_running_loop()
        with self._lock:
            limit = self._limits.get(loop)
            if limit is None:
                limit = self._limits[loop] = asyncio.Semaphore(self._max_concurrent)
        calls: _Calls = ((i, partial(self._function, each)) for i, each in arguments.items())
        if not self._is_async:
            stop = threading.Event()
            async with limit:
                try:
                    left = await asyncio.to_thread(self._call, calls, keep, stop)
                finally:
                    stop.set()
            if isinstance(left, BaseException):
                raise left
            if left is None:
                return
            number, answer = left
            calls = chain([(number, lambda: answer)], calls)
        workers = min(self._max_concurrent, len(arguments))
        await gather_all([self._await(calls, keep, limit) for _ in range(workers)])

    def _call(
        self, calls: _Calls, keep: Callable[[int, Any], None], stop: threading.Event
    ) -> BaseException | tuple[int, Any] | None:
        """Make the calls one by one; return the first result that has to be awaited."""
        for number, call in calls:
            if stop.is_set():
                break
            # An exception is returned as a value: a future cannot hold StopIteration.
            try:
                answer = call()
                if inspect.isawaitable(answer):
                    self._is_async = True
                    return number, answer
                keep(number, answer)
            except BaseException as error:
                return _noted(error, call)
        return None

    async def _await(
        self, calls: _Calls, keep: Callable[[int, Any], None], limit: asyncio.Semaphore
    ) -> None:
        """Take calls from the shared iterator and await their results."""
        for number, call in calls:
            async with limit:
                try:
                    answer = call()
                    keep(number, await answer if inspect.isawaitable(answer) else answer)
                except Exception as error:
                    _noted(error, call)
                    raise


def _noted(error: BaseException, call: Callable[[], Any]) -> BaseException:
    """Return an error of the function with its argument in a note."""
    if isinstance(call, partial):
        error.add_note(f"the function was asked about {call.args[-1]!r:.300}")
    return error


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in its own thread, because every thread of a loop's executor may wait for this
    runtime."""
    pool = ThreadPoolExecutor(1, "genrt-aside")
    try:
        return pool.submit(function)
    except RuntimeError:  # the interpreter is ending, and starts no thread any more
        done: Future[T] = Future()
        done.set_result(function())
        return done
    finally:
        pool.shutdown(wait=False)


async def run_in_thread(function: Callable[[], T]) -> T:
    """Return the result of a function called ``in_background``."""
    return await asyncio.wrap_future(in_background(function))


# -- one after the other --------------------------------------------------------------------------


class FairLock:
    """A lock that coroutines of any event loop acquire in the order of their calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Future[None] = Future()
        self._last.set_result(None)

    async def acquire(self) -> Callable[..., None]:
        """Wait for every earlier holder; return a function that releases the lock. It is idempotent, safe
        from any thread, and ignores its arguments."""
        released: Future[None] = Future()
        with self._lock:
            before, self._last = self._last, released
        try:
            if not before.done():
                await asyncio.wrap_future(follow(before))
        except BaseException:
            before.add_done_callback(lambda _: resolve(released, None))
            raise
        return lambda *_: resolve(released, None)


def follow(future: Future[Any]) -> Future[None]:
    """Return a future that ends as this one. Cancelling it does not cancel this one."""
    own: Future[None] = Future()

    def end(_: object) -> None:
        error = None if future.cancelled() else future.exception()
        resolve(own, error.fresh() if isinstance(error, GenrtError) else error)

    future.add_done_callback(end)
    return own


def resolve(future: Future[None], error: BaseException | None) -> None:
    """Resolve a future, unless it is done."""
    with contextlib.suppress(InvalidStateError):  # cancelled, or resolved before
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


# -- from a thread that blocks ---------------------------------------------------------------------


def twin_of(method: Callable[..., Any], *, interrupted: str) -> Callable[[F], F]:
    """Return a decorator that gives a function the name and the docstring of the ``_sync`` twin of this
    method."""

    def named(twin: F) -> F:
        functools.update_wrapper(twin, method)
        twin.__name__, twin.__qualname__ = f"{method.__name__}_sync", f"{method.__qualname__}_sync"
        twin.__doc__ = f"``{method.__name__}``, blocking. {interrupted}\n\n{method.__doc__}"
        return twin

    return named


def blocking(coroutine: Coroutine[Any, Any, T], *, undo: Callable[[T], object] | None = None) -> T:
    """Return the result of a coroutine.

    It runs on its own event loop and thread, in a copy of the caller's context. So this works in a
    script, in any thread, and inside a running event loop, which is blocked meanwhile. An interrupt
    cancels the coroutine and is raised once it has ended; inside a running loop, so does a cancellation
    of the calling task, as ``asyncio.run`` makes of an interrupt. If the coroutine has returned by then,
    ``undo`` is called with its result.
    """
    run = _Run(coroutine)
    try:
        run.thread.start()
        _wait(run.ended.wait)
        return run.outcome.result()
    except BaseException:
        run.cancel()
        if undo is not None and run.has_returned:
            undo(run.outcome.result())
        raise


def blocking_generator(asynchronous: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the values of an asynchronous generator, which runs as in ``blocking`` and up to
    ``MOST_HANDED`` values ahead. An interrupt, closing or dropping this generator closes it and waits for
    its end."""
    handing = _Handing(asynchronous)
    run = _Run(handing.hand(), daemon=True)
    unregister = atexit.unregister  # this frame may outlive the module
    try:
        atexit.register(run.cancel)  # an exiting interpreter stops daemon threads anywhere
        run.thread.start()
        while (value := handing.take()) is not _END:
            yield value[0]
        run.join()
    except BaseException:
        run.cancel()
        raise
    finally:
        unregister(run.cancel)
    run.outcome.result()


def blocking_twin(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the twin of a method or a function that blocks as ``blocking``."""

    @twin_of(method, interrupted="It runs in another thread; an interrupt cancels it.")
    def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return blocking(method(*args, **kwargs))

    return twin


_END: tuple[Any, ...] = ("the end",)
"""Comes after the last value."""


class _Handing(Generic[T]):
    """The values of an asynchronous generator on their way between threads."""

    def __init__(self, asynchronous: AsyncGenerator[T, None]) -> None:
        self._asynchronous = asynchronous
        self._handed: queue.SimpleQueue[tuple[T]] = queue.SimpleQueue()
        self._make_room: Callable[[], object] = lambda: None

    async def hand(self) -> None:
        """Hand over every value as there is room, and then the end."""
        loop, room = asyncio.get_running_loop(), asyncio.Event()
        self._make_room = lambda: loop.call_soon_threadsafe(room.set)
        try:
            async with contextlib.aclosing(self._asynchronous) as values:
                async for value in values:
                    self._handed.put((value,))
                    while self._handed.qsize() >= MOST_HANDED:
                        room.clear()
                        await room.wait()
        finally:
            self._handed.put(_END)

    def take(self) -> tuple[T]:
        """Wait for the next value and return it in a tuple, or ``_END``."""
        value = _wait(self._get)
        if self._handed.qsize() == MOST_HANDED // 2:  # the other thread wakes once for many values
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._make_room()
        return value

    def _get(self, seconds: float | None) -> tuple[T] | None:
        with contextlib.suppress(queue.Empty):
            return self._handed.get(timeout=seconds)
        return None


class _Run(Generic[T]):
    """A coroutine that one thread runs and another may cancel, in any order.

    The first of the two takes ``claimed``. The running thread sets ``stop`` before it reads
    ``cancelled``; the other thread sets ``cancelled`` before it reads ``stop``. So at least one sees the
    other.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], daemon: bool = False) -> None:
        self.coroutine = coroutine
        self.thread = threading.Thread(target=self._run, name="genrt", daemon=daemon)
        self.context = contextvars.copy_context()
        self.outcome: Future[T] = Future()
        self.ended = threading.Event()
        self.claimed = threading.Lock()
        self.cancelled = False
        self.stop: Callable[[], object] = lambda: None

    def _run(self) -> None:
        if not self.claimed.acquire(blocking=False):
            return
        try:
            with asyncio.Runner() as runner:
                result = runner.run(self._main(), context=self.context)
            self.outcome.set_result(result)
        except BaseException as error:
            self.outcome.set_exception(error)
        finally:
            self.ended.set()

    @property
    def has_returned(self) -> bool:
        """True once the coroutine has returned a result."""
        return self.outcome.done() and self.outcome.exception() is None

    async def _main(self) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self.stop = lambda: loop.call_soon_threadsafe(task.cancel) if task else None
        if self.cancelled:
            self.coroutine.close()
            raise asyncio.CancelledError
        return await self.coroutine

    def cancel(self) -> None:
        """Cancel the run, and wait until it has ended. Idempotent."""
        if self.ended.is_set() and not self.thread.is_alive():
            return  # also where the interpreter has cleared this module
        self.cancelled = True
        if self.claimed.acquire(blocking=False):
            self.coroutine.close()
            self.ended.set()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            self.stop()
        self.join()

    def join(self) -> None:
        """Wait until the run has ended and its thread is gone."""
        if threading.current_thread() is self.thread:
            return  # this run has collected its caller as garbage
        self.ended.wait()
        with contextlib.suppress(RuntimeError):  # it was never started
            self.thread.join()


def _wait(waited: Callable[[float | None], T | None]) -> T:
    """Call a function that waits so many seconds until it returns a value; return it. Raises
    CancelledError if the calling task is cancelled meanwhile."""
    try:
        waiting = asyncio.current_task()
    except RuntimeError:
        waiting = None
    before = waiting.cancelling() if waiting else 0
    is_main = threading.current_thread() is threading.main_thread()
    seconds = SIGNAL_SECONDS if waiting else INTERRUPT_SECONDS if is_main else None
    # A signal handler may cancel the task, which wakes no thread while its loop is blocked.
    while not (found := waited(seconds)):
        if waiting and waiting.cancelling() > before:
            raise asyncio.CancelledError
    return found
