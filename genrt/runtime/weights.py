"""New weights for the engine of a runtime: brought in chunks, checked, loaded between two fences.

Rules:
    Until the first tensor is loaded nothing has changed. After that all of it succeeds, or the engine is
    dead, and the one in its place has the last weights that were whole.
    What is loaded in between by other calls, as adapters are, waits: no step runs by half of the weights.
    One update follows the other; each is alone from its fence to its end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from genrt.engines.weights import (
    Copying,
    Layout,
    NamedTensors,
    check_complete,
    check_tensors,
    forms_in,
    tensors_in,
    weight_files,
    weights_of,
)
from genrt.errors import Closed, EngineDied, EngineFailed, InvalidRequest, InvalidWeights
from genrt.numbers import check_bool, shown
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache
from genrt.runtime.fences import Fence, Pending, check_pending
from genrt.runtime.pauses import Pauses
from genrt.runtime.thread import EngineThread, aside

__all__ = ["WeightUpdates", "WeightsSource"]

T = TypeVar("T")

AT_ONCE_BYTES = 2**20
"""How much is looked at, or copied, on the event loop."""

Chunk: TypeAlias = Mapping[str, Tensor] | NamedTensors
"""Some tensors with their names."""

WeightsSource: TypeAlias = Chunk | str | os.PathLike[str] | Iterable[Chunk] | AsyncIterable[Chunk]
"""Named tensors; the path of a safetensors file, or of a directory of them; or chunks of named
tensors."""


class WeightUpdates:
    """Replaces the weights of one runtime, whatever engine it has. Safe from any thread."""

    def __init__(self, thread: EngineThread, cache: RowCache, pauses: Pauses) -> None:
        self._thread = thread
        self._cache = cache
        self._pauses = pauses
        self._lock = threading.Lock()
        self._last: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._last.set_result(None)

    async def update(
        self, source: WeightsSource, pending: Pending, finite: bool, keep: bool
    ) -> int:
        """Replace the weights; return the new version. ``AsyncLM.update_weights`` says the rest."""
        check_pending(pending)
        check_bool("check_finite", finite)
        check_bool("keep", keep)
        self._pauses.check_awake()
        chunks = _Chunks(source)
        layout = await self._called(lambda answering: weights_of(answering.engine).layout())
        first = await chunks.take()
        if first is None:
            raise InvalidWeights("there are no weights: give all tensors of the model's checkpoint")
        check = partial(_checked, layout, first, (), finite)
        given = await _aside_if(first.is_slow, check)
        if chunks.are_whole:
            check_complete(layout, given)
        copy: Copying | None = None
        try:
            if keep:
                copy = self._thread.weights.begin()
                await _aside_if(first.is_slow, partial(copy.add, first.of(layout)))
            async with self._alone():
                return await self._replace(layout, chunks, first, given, pending, finite, copy)
        except BaseException:
            if copy is not None:
                copy.drop()
            raise

    async def _replace(
        self,
        layout: Layout,
        chunks: _Chunks,
        first: _Chunk,
        given: set[str],
        pending: Pending,
        finite: bool,
        copy: Copying | None,
    ) -> int:
        update = _Update(self._thread, self._cache, Fence(pending))
        chunk: _Chunk | None = first
        try:
            await self._called(update.fence_off)
            await asyncio.wrap_future(update.fence.passed)
            await self._called(update.begin, alone=update)
            while chunk is not None:
                await self._called(partial(update.load, tensors=chunk.of(layout)), alone=update)
                chunk = await chunks.take()
                if chunk is None:
                    break
                check = partial(_checked, layout, chunk, frozenset(given), finite)
                given |= await _aside_if(chunk.is_slow, check)
                if copy is not None:
                    await _aside_if(chunk.is_slow, partial(copy.add, chunk.of(layout)))
            check_complete(layout, given)
            return await self._called(partial(update.finish, copy=copy), alone=update)
        finally:
            with contextlib.suppress(Closed):  # which a forked child is told
                self._thread.call_alone(update.end, update)

    async def _called(self, function: Callable[[AnsweringEngine], T], *, alone: object = None) -> T:
        return await asyncio.wrap_future(self._thread.call_alone(function, alone))

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Wait until every update that began before is over."""
        over: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            before, self._last = self._last, over
        try:
            if not before.done():
                # A future of one's own, so that a cancellation cancels nobody else's.
                own: concurrent.futures.Future[None] = concurrent.futures.Future()
                before.add_done_callback(partial(_follow, own))
                await asyncio.wrap_future(own)
            yield
        finally:
            before.add_done_callback(partial(_follow, over))


class _Update:
    """One update, as the engine's thread does it; ``call_alone`` has each method called there."""

    def __init__(self, thread: EngineThread, cache: RowCache, fence: Fence) -> None:
        self.fence = fence
        self._cache = cache
        self._thread = thread
        self._answering: AnsweringEngine | None = None  # once its weights are being replaced
        self._is_over = False

    def fence_off(self, answering: AnsweringEngine) -> None:
        """Have questions wait from now on."""
        self._thread.batcher.fences.put_up(self.fence)

    def begin(self, answering: AnsweringEngine) -> None:
        """Forget what the old weights have computed."""
        self._thread.be_alone(self)
        answering.begin_update()

    def load(self, answering: AnsweringEngine, *, tensors: NamedTensors) -> None:
        """Load some tensors. Raises EngineDied if that fails."""
        if self._answering is None:
            self._answering = answering
        self._check(answering)
        try:
            weights_of(answering.engine).load(tensors)
        except BaseException as error:
            self._die(error)

    def finish(self, answering: AnsweringEngine, *, copy: Copying | None) -> int:
        """Have questions go on, by the new weights; return their version. Raises EngineDied if the engine
        cannot."""
        self._check(answering)
        fences = self._thread.batcher.fences
        version = fences.weights_version + 1
        try:
            weights_of(answering.engine).finish()
        except BaseException as error:
            self._die(error)
        self._is_over = True
        self._cache.clear()
        self._thread.weights.replace(version, copy)
        fences.take_down(self.fence, version)
        self._thread.be_alone(None)
        return version

    def end(self, answering: AnsweringEngine) -> None:
        """Have questions go on by the old weights, unless this is over. Raises EngineDied if the engine
        has some of the new ones."""
        if not self._is_over:
            began = self._answering is answering
            self._give_up()
            if began:
                raise EngineDied(
                    "its weights were being replaced, and that was given up in the middle"
                )

    def _die(self, error: BaseException) -> Any:
        self._give_up()
        raise EngineDied(f"its weights could not be replaced: {error}") from error

    def _give_up(self) -> None:
        self._is_over = True
        self._thread.batcher.fences.take_down(self.fence)
        self._thread.be_alone(None)

    def _check(self, answering: AnsweringEngine) -> None:
        if self._answering is not answering or self._is_over:
            raise EngineFailed("the engine was replaced while it got new weights: give them again")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some tensors: what is known of them, and where to read them.

    Attributes:
        is_slow: whether to look at all of it, or to copy it, takes too long for an event loop.
        is_file: whether what is known of them is not them.
    """

    forms: Callable[[], NamedTensors]
    tensors: Callable[[], NamedTensors]
    is_slow: bool = True
    is_file: bool = False

    def of(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, but for those that are only other names of one."""
        return ((n, each) for n, each in self.tensors() if layout[n].tied_to is None)


class _Chunks:
    """What a caller gives, chunk by chunk. ``are_whole`` if the first is all, once it was taken."""

    def __init__(self, source: WeightsSource) -> None:
        given: Any = source
        self.are_whole = False
        self._chunks: Any = None
        self._first: list[_Chunk] = []
        self._is_at_hand = isinstance(given, list | tuple)
        if isinstance(given, str | os.PathLike):
            files = weight_files(Path(given).expanduser())
            self._whole(_Chunk(partial(forms_in, files), partial(tensors_in, files), is_file=True))
        elif isinstance(given, Mapping):
            self._whole(_named(given))
        elif isinstance(given, AsyncIterable | Iterable) and not isinstance(given, Tensor | bytes):
            self._chunks = aiter(given) if isinstance(given, AsyncIterable) else iter(given)
        else:
            raise InvalidRequest(
                "weights must be tensors by name, a path to safetensors, or chunks of named tensors, "
                f"got {shown(given)}"
            )

    def _whole(self, chunk: _Chunk) -> None:
        self.are_whole = True
        self._first = [chunk]

    async def take(self) -> _Chunk | None:
        """Return the next chunk, if there is another; raises what the caller's iterator does."""
        if self._first:
            return self._first.pop()
        if self._chunks is None:
            return None
        if isinstance(self._chunks, AsyncIterator):
            found = await anext(self._chunks, _END)
        else:
            found = await _aside_if(not self._is_at_hand, lambda: next(self._chunks, _END))
        if found is _END:
            self._chunks = None
            return None
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str):
            # Pairs, not chunks: the first one tells.
            chunks, self._chunks, self.are_whole = self._chunks, None, True
            if isinstance(chunks, AsyncIterator):
                return _named([found, *[each async for each in chunks]])
            rest = await _aside_if(not self._is_at_hand, lambda: list(chunks))
            return _named([found, *rest])
        return _named(found)


_END: Any = object()
"""What comes after the last chunk."""


def _named(given: Any) -> _Chunk:
    """Return a chunk of tensors that are there. Raises InvalidWeights if these are none."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, Iterator):
        pairs = list(pairs)
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(each, tuple | list) and len(each) == 2 for each in pairs
    ):
        raise InvalidWeights(f"a chunk must be tensors with their names, got {shown(given)}")
    size = sum(each.nbytes for _, each in pairs if isinstance(each, Tensor))
    return _Chunk(lambda: pairs, lambda: pairs, is_slow=size > AT_ONCE_BYTES)


def _checked(layout: Layout, chunk: _Chunk, given: Any, finite: bool) -> set[str]:
    """Return the names of a chunk that fits; raises as ``check_tensors``."""
    names = {*check_tensors(layout, chunk.forms(), given, finite=finite)}
    if finite and chunk.is_file:
        check_tensors(layout, chunk.tensors(), given, finite=True)
    return names


def _follow(after: concurrent.futures.Future[None], _: object) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # whoever waited has left
        after.set_result(None)


async def _aside_if(slow: bool, function: Callable[[], T]) -> T:
    return await aside(function) if slow else function()
