"""New weights for the engine of a runtime: brought in chunks, checked, loaded while questions wait.

Rules:
    Until the first tensor is loaded nothing has changed. After that all of it succeeds, or the engine is
    dead, and the one in its place has the last weights that were whole.
    Other calls that load something, as adapters, wait meanwhile: no step runs by half of the weights.
    One update follows the other. Each belongs to the engine that it began on: if that is restarted or
    replaced, the update ends with EngineFailed, and loads nothing into another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar

from torch import Tensor

from genrt.engines.weights import (
    Layout,
    NamedTensors,
    SavedWeights,
    TensorsIn,
    Weights,
    check_complete,
    check_tensors,
    forms_in,
    weight_files,
    weights_of,
)
from genrt.errors import (
    EngineDied,
    EngineFailed,
    GenrtError,
    InvalidRequest,
    InvalidWeights,
)
from genrt.numbers import check_bool, shown
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.cache import RowCache
from genrt.runtime.lifecycle import DROPPED, Hold, Pending, Turns, check_pending, follow
from genrt.runtime.pauses import Pauses
from genrt.runtime.thread import AT_ONCE_BYTES, EngineThread, aside

__all__ = ["Taking", "Update", "UpdateOptions", "WeightUpdates", "WeightsSource"]

T = TypeVar("T")

Chunk: TypeAlias = Mapping[str, Tensor] | NamedTensors
"""Some tensors with their names."""

WeightsSource: TypeAlias = Chunk | str | os.PathLike[str] | Iterable[Chunk] | AsyncIterable[Chunk]
"""Named tensors; the path of a safetensors file, or of a directory of them; or chunks of named
tensors."""


class UpdateOptions(TypedDict, total=False):
    """The options of ``AsyncLM.update_weights``.

    Attributes:
        pending: ``"finish"``, the default, has questions asked before answered first, by the old weights;
            ``"restart"`` asks them anew, by the new ones. A stream of which something has been told then
            raises StreamCut.
        check_finite: refuse NaN and infinity too, which takes a look at every number; by default not.
        keep: whether a copy is written to the temporary folder, for an engine after this one and for
            ``wake_up`` after ``sleep(2)``. ``None``, the default, copies tensors, which are nowhere else;
            files at a path are copied only with ``load(restart="auto")``, and otherwise read again where
            they are, unless they have changed. ``False`` copies nothing: the runtime cannot be restarted.
    """

    pending: Pending
    check_finite: bool
    keep: bool | None


class WeightUpdates:
    """Replaces the weights of one runtime, whatever engine it has. Safe from any thread.

    ``turns`` has one update follow the other.
    """

    def __init__(self, thread: EngineThread, cache: RowCache, pauses: Pauses) -> None:
        self.thread = thread
        self.cache = cache
        self.turns = Turns()
        self._pauses = pauses

    async def update(
        self,
        source: WeightsSource,
        *,
        pending: Pending = "finish",
        check_finite: bool = False,
        keep: bool | None = None,
    ) -> int:
        """Replace the weights; return the new version. ``AsyncLM.update_weights`` says the rest."""
        check_pending(pending)
        check_bool("check_finite", check_finite)
        if keep is not None:
            check_bool("keep", keep)
        self.check_awake()
        chunks = _Chunks(source)
        original = SavedWeights(chunks.files) if keep is None and chunks.files else None
        layout = await self.called(lambda answering: weights_of(answering.engine).layout())
        taking = Taking(layout, check_finite)
        known = [each async for each in chunks.known()]
        for chunk in known:
            await taking.check(chunk)
        if chunks.are_known:
            check_complete(layout, taking.names)
        elif not known:
            raise InvalidWeights("there are no weights: give all tensors of the model's checkpoint")
        try:
            if keep is None and original is not None and not self.thread.restarts:
                taking.original = original
            elif keep is not False:
                taking.copy = self.thread.weights.begin()
                for chunk in known:
                    await taking.keep(chunk)
            end_turn = await self.turns.take()
            update = Update(self.thread, self.cache, pending, taking)
            update.hold.dropped.add_done_callback(end_turn)
            try:
                return await self._replace(update, known, chunks)
            finally:
                end_turn()
        except BaseException:
            if taking.copy is not None and not taking.is_given:
                taking.copy.drop()
            raise

    async def _replace(self, update: Update, known: Sequence[_Chunk], chunks: _Chunks) -> int:
        taking, layout = update.taking, update.taking.layout
        try:
            taking.is_given = True
            await self.called(update.hold_questions)
            await update.hold.wait()
            await self.called(update.begin, owner=update)
            for chunk in known:
                await self.called(partial(update.load, give=chunk.to(layout)), owner=update)
            while (following := await update.hold.unless_dropped(chunks.take())) is not None:
                await taking.check(following)
                await taking.keep(following)
                await self.called(partial(update.load, give=following.to(layout)), owner=update)
            check_complete(layout, taking.names)
            return await self.called(update.finish, owner=update)
        except GeneratorExit:  # collected with its loop, whatever is locked
            self.thread.call_soon(update.end, update)
            raise
        except BaseException as error:
            with contextlib.suppress(GenrtError):  # Closed in a forked child
                ending = self.thread.call_alone(update.end, update)
                ending.add_done_callback(lambda _: update.release())
                if isinstance(error, Exception):  # the caller then finds the runtime as it stays
                    await asyncio.wrap_future(follow(ending))
            raise

    def check_awake(self) -> None:
        """Raise InvalidRequest if the weights sleep."""
        self._pauses.check_awake("weights")

    async def called(self, function: Callable[[AnsweringEngine], T], *, owner: object = None) -> T:
        """Return what the engine's thread returns for this, exclusively if it is the owner's."""
        return await asyncio.wrap_future(self.thread.call_alone(function, owner))


class Taking:
    """The new weights that were checked, and are kept for another engine.

    Attributes:
        names: the tensors that have been given.
        copy: where they are kept, if they are.
        original: the files that they are read from, if no copy is needed.
        is_given: whether the copy is the engine's thread's, to keep or to drop.
    """

    def __init__(self, layout: Layout, finite: bool) -> None:
        self.layout = layout
        self.names: set[str] = set()
        self.copy: SavedWeights | None = None
        self.original: SavedWeights | None = None
        self.is_given = False
        self._finite = finite

    async def check(self, chunk: _Chunk) -> None:
        """Take note of a chunk that fits; raises as ``check_tensors``."""
        self.names |= await chunk.by(self._names)

    def _names(self, chunk: _Chunk) -> set[str]:
        found = check_tensors(self.layout, chunk.forms(), self.names, finite=self._finite)
        if self._finite and chunk.is_file:
            check_tensors(self.layout, chunk.tensors(), self.names, finite=True)
        return {*found}

    async def keep(self, chunk: _Chunk) -> None:
        """Keep a copy of a chunk, if copies are kept. Raises InvalidWeights if there is no room."""
        if (copy := self.copy) is not None:
            await chunk.by(lambda chunk: copy.add(chunk.of(self.layout)))


class Update:
    """One update, as the engine's thread does it; ``call_alone`` has each method called there.

    It begins on one engine, and ends with EngineFailed once that has been restarted or replaced.

    Attributes:
        hold: has questions wait until the end.
    """

    def __init__(
        self, thread: EngineThread, cache: RowCache, pending: Pending, taking: Taking
    ) -> None:
        self.hold = Hold(pending)
        self.taking = taking
        self._cache = cache
        self._thread = thread
        self._began_on: AnsweringEngine | None = None
        self._has_loaded = False
        self._is_over = False
        self._is_kept = False

    def hold_questions(self, answering: AnsweringEngine) -> None:
        """Have questions wait from now on."""
        self._thread.lifecycle.put_up(self.hold)

    def begin(self, answering: AnsweringEngine) -> None:
        """Forget what the old weights have computed."""
        self._began_on = answering
        self._check(answering)
        self._thread.run_exclusively(self, self.hold)
        answering.begin_update()

    def load(self, answering: AnsweringEngine, *, give: Callable[[Weights], None]) -> None:
        """Give the engine some tensors. Raises EngineDied if that fails."""
        self._check(answering)
        self._has_loaded = True
        try:
            give(weights_of(answering.engine))
        except BaseException as error:
            self._die(error)

    def finish(self, answering: AnsweringEngine) -> int:
        """Have questions go on, by the new weights; return their version. Raises EngineDied if the engine
        cannot."""
        self._check(answering)
        lifecycle = self._thread.lifecycle
        version = lifecycle.weights_version + 1
        try:
            weights_of(answering.engine).finish()
        except BaseException as error:
            self._die(error)
        self._is_over = True
        self._cache.clear()
        self._thread.weights.replace(version, self.taking.copy or self.taking.original)
        self._is_kept = True
        self._thread.run_exclusively(None)
        lifecycle.take_down(self.hold, version)
        return version

    def end(self, answering: AnsweringEngine) -> None:
        """Have questions go on by the old weights, unless this is over. Raises EngineDied if the engine
        has some of the new ones."""
        if not self._is_over:
            is_mixed = self._has_loaded and self._began_on is answering
            self._give_up()
            if is_mixed:
                raise EngineDied(
                    "its weights were being replaced, and that was given up in the middle"
                )

    def release(self) -> None:
        """Remove the copy, unless the runtime keeps it. Nothing of this runs on the engine's thread
        afterwards."""
        if self.taking.copy is not None and not self._is_kept:
            self.taking.copy.drop()

    def _die(self, error: BaseException) -> Any:
        self._give_up()
        raise EngineDied(f"its weights could not be replaced: {error}") from error

    def _give_up(self) -> None:
        self._is_over = True
        self.release()
        if self._thread.lifecycle.owner is self:
            self._thread.run_exclusively(None)
        self._thread.lifecycle.take_down(self.hold)

    def _check(self, answering: AnsweringEngine) -> None:
        if self._is_over or self.hold.is_down or self._began_on is not answering:
            raise EngineFailed(DROPPED)


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

    async def by(self, function: Callable[[_Chunk], T]) -> T:
        """Return what the function returns for this chunk; in a thread of its own where it is slow."""
        return await _aside_if(self.is_slow, partial(function, self))

    def to(self, layout: Layout) -> Callable[[Weights], None]:
        """Return what gives the tensors to an engine."""
        return lambda weights: weights.load(self.of(layout))

    def of(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, but for those that are only other names of one."""
        return ((n, each) for n, each in self.tensors() if layout[n].tied_to is None)


class _Chunks:
    """The chunks that a caller gives. ``are_known`` if those that ``known`` has yielded are all;
    ``files`` are those at a path."""

    def __init__(self, source: WeightsSource) -> None:
        given: Any = source
        self.are_known = False
        self._chunks: Any = None
        self._first: list[_Chunk] = []
        self._is_at_hand = isinstance(given, list | tuple)
        self.files: Sequence[Path] = ()
        if isinstance(given, str | os.PathLike):
            self.files = files = weight_files(Path(given).expanduser())
            self._first = [
                _Chunk(partial(forms_in, files), partial(TensorsIn, files), is_file=True)
            ]
        elif isinstance(given, Mapping):
            self._first = [_named(given)]
        elif isinstance(given, AsyncIterable | Iterable) and not isinstance(given, Tensor | bytes):
            self._chunks = aiter(given) if isinstance(given, AsyncIterable) else iter(given)
        else:
            raise InvalidRequest(
                "weights must be tensors by name, a path to safetensors, or chunks of named tensors, "
                f"got {shown(given)}"
            )

    async def known(self) -> AsyncIterator[_Chunk]:
        """Yield what can be looked at before anything changes: all that is at hand, or the first chunk;
        raises what the caller's iterator does."""
        for chunk in self._first:
            yield chunk
        while (found := await self.take()) is not None:
            yield found
            if not self._is_at_hand:
                break
        self.are_known = self._chunks is None

    async def take(self) -> _Chunk | None:
        """Return the next chunk, if there is another; raises what the caller's iterator does."""
        if self._chunks is None or (found := await self._next()) is _END:
            self._chunks = None
            return None
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str)):
            return _named(found)
        pairs = [found]  # and not chunks: the first one tells
        while (found := await self._next()) is not _END:
            pairs.append(found)
        self._chunks = None
        return _named(pairs)

    async def _next(self) -> Any:
        if isinstance(self._chunks, AsyncIterator):
            return await anext(self._chunks, _END)
        return await _aside_if(not self._is_at_hand, lambda: next(self._chunks, _END))


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
    size = sum(each.numel() * each.itemsize for _, each in pairs if isinstance(each, Tensor))
    return _Chunk(lambda: pairs, lambda: pairs, is_slow=size > AT_ONCE_BYTES)


async def _aside_if(slow: bool, function: Callable[[], T]) -> T:
    return await aside(function) if slow else function()
