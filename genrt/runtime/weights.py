"""New weights for a runtime: checked, copied for later engines, loaded while questions wait.

Rules:
    Until the first tensor is loaded nothing has changed. After that all of it succeeds, or the engine is
    dead, and the one that replaces it has the last whole weights.
    Other calls that load something, as adapters, wait meanwhile: no step runs by half of the weights.
    Updates take turns. Each belongs to the engine that it began on: if that is restarted or replaced, the
    update ends with EngineFailed, and loads nothing into another.
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
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar

from torch import Tensor

from genrt.engines.weights import (
    Layout,
    NamedTensors,
    Receiving,
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
    EngineUnsupported,
    GenrtError,
    InvalidRequest,
    InvalidWeights,
)
from genrt.numbers import check_bool, shown
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import DROPPED, Hold, Pending
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import AT_ONCE_BYTES, Turns, aside, follow
from genrt.runtime.lifecycle import check_pending
from genrt.runtime.thread import EngineThread

__all__ = ["Transfers", "Update", "UpdateOptions", "WeightUpdates", "WeightsSource"]

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
            ``"restart"`` asks them again, by the new ones. A partly delivered stream then raises
            StreamCut.
        check_finite: refuse NaN and infinity too, which reads every number; by default not.
        keep: whether a copy is written to the temporary folder, for an engine after this one and for
            ``wake_up`` after ``sleep(2)``. ``None``, the default, copies tensors;
            files at a path are copied only with ``load(restart="auto")``, and otherwise read again where
            they are, unless they have changed. ``False`` copies nothing: the runtime cannot be restarted.
    """

    pending: Pending
    check_finite: bool
    keep: bool | None


class WeightUpdates:
    """Replaces the weights of one runtime, whatever engine it has. Safe from any thread."""

    def __init__(self, thread: EngineThread, cache: RowCache) -> None:
        self.thread = thread
        self.cache = cache
        self.turns = Turns()

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
        update = Update(self, pending, layout, finite=check_finite)
        known = [each async for each in chunks.known()]
        for chunk in known:
            await _looked_at(chunk, update.check)
        if chunks.are_known:
            check_complete(layout, update.names)
        elif not known:
            raise InvalidWeights("there are no weights: give all tensors of the model's checkpoint")
        try:
            if original is not None and not self.thread.restarts:
                update.kept = original
            elif keep is not False:
                update.kept, update.is_copied = self.thread.weights.begin(), True
                for chunk in known:
                    await _looked_at(chunk, update.keep)
            end_turn = await self.turns.take()
            update.hold.dropped.add_done_callback(end_turn)
            try:
                return await self._replace(update, known, chunks)
            finally:
                end_turn()
        except BaseException:
            if not update.is_under_way:
                update.release()
            raise

    async def _replace(self, update: Update, known: Sequence[NamedTensors], chunks: _Chunks) -> int:
        try:
            update.is_under_way = True
            await self.begin(update)
            for chunk in known:
                await self.called(partial(update.load, give=update.giving(chunk)), owner=update)
            while (more := await update.hold.unless_dropped(chunks.take())) is not None:
                await _looked_at(more, update.check)
                await _looked_at(more, update.keep)
                await self.called(partial(update.load, give=update.giving(more)), owner=update)
            check_complete(update.layout, update.names)
            return await self.called(update.finish, owner=update)
        except GeneratorExit:  # collected with its loop, whatever is locked
            self.thread.call_soon(update.end, update)
            raise
        except BaseException as error:
            with contextlib.suppress(GenrtError):  # Closed in a forked child
                ending = self.thread.call(update.end, update)
                ending.add_done_callback(lambda _: update.release())
                if isinstance(error, Exception):  # the caller then finds the runtime as it stays
                    await asyncio.wrap_future(follow(ending))
            raise

    async def begin(self, update: Update) -> None:
        """Begin an update: return once questions wait, and everything computed is forgotten."""
        await self.called(lambda _: self.thread.batcher.put_up(update.hold))
        await update.hold.wait()
        await self.called(update.begin, owner=update)

    def check_awake(self) -> None:
        """Raise InvalidRequest if the weights sleep."""
        self.thread.lifecycle.check_awake("weights")

    async def called(self, function: Callable[[AnsweringEngine], T], *, owner: object = None) -> T:
        """Return the result of a call on the engine's thread, exclusively if it is the owner's."""
        return await asyncio.wrap_future(self.thread.call(function, owner))


class Update:
    """One update. The engine's thread calls ``begin``, ``load``, ``finish`` and ``end``.

    It begins on one engine, and ends with EngineFailed once that has been restarted or replaced.

    Attributes:
        hold: makes questions wait until the end.
        names: the tensors that have been checked.
        kept: the copy (``is_copied``), or the files to be read again, for another engine.
        is_under_way: whether the engine's thread may use this.
    """

    def __init__(
        self, updates: WeightUpdates, pending: Pending, layout: Layout, *, finite: bool = False
    ) -> None:
        self.hold = Hold(pending)
        self.layout = layout
        self.names: set[str] = set()
        self.kept: SavedWeights | None = None
        self.is_copied = False
        self.is_under_way = False
        self._finite = finite
        self._cache = updates.cache
        self._thread = updates.thread
        self._engine: AnsweringEngine | None = None  # on which it began
        self._has_loaded = False
        self._is_over = False
        self._is_kept = False

    def check(self, tensors: NamedTensors) -> None:
        """Note tensors that fit; raises as ``check_tensors``."""
        is_files = isinstance(tensors, TensorsIn)
        forms = forms_in(tensors.files) if isinstance(tensors, TensorsIn) else tensors
        found = check_tensors(self.layout, forms, self.names, finite=self._finite)
        if self._finite and is_files:
            check_tensors(self.layout, tensors, self.names, finite=True)
        self.names |= {*found}

    def keep(self, tensors: NamedTensors) -> None:
        """Copy tensors, if copies are kept. Raises InvalidWeights if there is no room."""
        if self.kept is not None and self.is_copied:
            self.kept.add(self._untied(tensors))

    def giving(self, tensors: NamedTensors) -> Callable[[Weights], None]:
        """Return the function that gives tensors to an engine."""
        return lambda weights: weights.load(self._untied(tensors))

    def _untied(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        return ((name, each) for name, each in tensors if self.layout[name].tied_to is None)

    def begin(self, answering: AnsweringEngine) -> None:
        """Forget everything that the old weights have computed."""
        self._engine = answering
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
        """Let questions go on, by the new weights; return their version. Raises EngineDied if the engine
        cannot."""
        self._check(answering)
        version = self._thread.batcher.weights_version + 1
        try:
            weights_of(answering.engine).finish()
        except BaseException as error:
            self._die(error)
        self._is_over = True
        self._cache.clear()
        self._thread.weights.replace(version, self.kept)
        self._is_kept = True
        self._thread.run_exclusively(None)
        self._thread.lifecycle.are_weights_lost = False
        self._thread.batcher.take_down(self.hold, version)
        return version

    def end(self, answering: AnsweringEngine) -> None:
        """Let questions go on by the old weights, unless this is over. Raises EngineDied if the engine
        has some of the new ones."""
        if not self._is_over:
            is_mixed = self._has_loaded and self._engine is answering
            self._give_up()
            if is_mixed:
                raise EngineDied(
                    "its weights were being replaced, and that was given up in the middle"
                )

    def release(self) -> None:
        """Remove the copy, unless the runtime keeps it. Nothing of this runs on the engine's thread
        afterwards."""
        if self.kept is not None and not self._is_kept:
            self.kept.drop()

    def _die(self, error: BaseException) -> Any:
        self._give_up()
        raise EngineDied(f"its weights could not be replaced: {error}") from error

    def _give_up(self) -> None:
        self._is_over = True
        self.release()
        if self._thread.lifecycle.owner is self:
            self._thread.run_exclusively(None)
        self._thread.batcher.take_down(self.hold)

    def _check(self, answering: AnsweringEngine) -> None:
        if self._is_over or self.hold.is_down or self._engine is not answering:
            raise EngineFailed(DROPPED)


async def _looked_at(tensors: NamedTensors, function: Callable[[NamedTensors], T]) -> T:
    """Return the function's result for tensors, in a thread of its own where that takes long."""
    is_slow = (
        isinstance(tensors, TensorsIn)
        or sum(each.numel() * each.itemsize for _, each in tensors if isinstance(each, Tensor))
        > AT_ONCE_BYTES
    )
    return await aside(partial(function, tensors)) if is_slow else function(tensors)


class _Chunks:
    """The chunks that a caller gives, each as tensors with their names.

    Attributes:
        files: the safetensors files of a path.
        are_known: whether ``known`` has yielded all of them.
    """

    def __init__(self, source: WeightsSource) -> None:
        given: Any = source
        self.are_known = False
        self.files: Sequence[Path] = ()
        self._chunks: Any = None
        self._first: list[NamedTensors] = []
        self._is_at_hand = isinstance(given, list | tuple)
        if isinstance(given, str | os.PathLike):
            self.files = weight_files(Path(given).expanduser())
            self._first = [TensorsIn(self.files)]
        elif isinstance(given, Mapping):
            self._first = [_named(given)]
        elif isinstance(given, AsyncIterable | Iterable) and not isinstance(given, Tensor | bytes):
            self._chunks = aiter(given) if isinstance(given, AsyncIterable) else iter(given)
        else:
            raise InvalidRequest(
                "weights must be tensors by name, a path to safetensors, or chunks of named tensors, "
                f"got {shown(given)}"
            )

    async def known(self) -> AsyncIterator[NamedTensors]:
        """Yield the chunks that can be checked before anything changes: all in a path or a list, or the
        first; raises as the caller's iterator does."""
        for chunk in self._first:
            yield chunk
        while (found := await self.take()) is not None:
            yield found
            if not self._is_at_hand:
                break
        self.are_known = self._chunks is None

    async def take(self) -> NamedTensors | None:
        """Return the next chunk, if there is another; raises as the caller's iterator does."""
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
        take: Callable[[], Any] = partial(next, self._chunks, _END)
        return take() if self._is_at_hand else await aside(take)


_END: Any = object()
"""Comes after the last chunk."""


def _named(given: Any) -> list[tuple[str, Tensor]]:
    """Return a chunk as pairs. Raises InvalidWeights if it is not tensors with their names."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, Iterator):
        pairs = list(pairs)
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(each, tuple | list) and len(each) == 2 for each in pairs
    ):
        raise InvalidWeights(f"a chunk must be tensors with their names, got {shown(given)}")
    return list(map(tuple, pairs))


# -- trainers -------------------------------------------------------------------------------------


class Transfers:
    """The updates that one trainer sends to the engine's workers by itself, as vLLM's trainers do.

    Each runs exclusively from its start to its end, and questions wait as in ``WeightUpdates``. No copy
    is kept. An error in one is the engine's death. The workers that a trainer has met end with their
    engine: it must connect again after a restart.
    """

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates = updates
        self._update: Update | None = None
        self._is_given = False
        self._met: AnsweringEngine | None = None
        self._end_turn: Callable[..., None] = lambda: None

    @property
    def is_under_way(self) -> bool:
        """True between the start of an update and its end."""
        return self._update is not None

    async def check(self) -> None:
        """Raise EngineUnsupported unless the engine receives what trainers send."""
        await self._updates.called(_receiving)

    async def connect(self, init_info: Mapping[str, Any]) -> None:
        """Have the engine's workers meet the trainer."""

        def connect(answering: AnsweringEngine) -> None:
            _receiving(answering).connect(init_info)
            self._met = answering

        await self._updates.called(connect)

    async def disconnect(self) -> None:
        """Have them leave it. Does nothing if their engine is gone."""
        if self._update is not None:
            raise InvalidRequest("an update is under way: finish it first")

        def disconnect(answering: AnsweringEngine) -> None:
            receiving, met = _receiving(answering), self._met
            self._met = None
            if met is None or met is answering:
                receiving.disconnect()

        await self._updates.called(disconnect)

    async def start(self, pending: Pending) -> None:
        """Begin an update: return once questions wait, and what was computed is forgotten."""
        check_pending(pending)
        if self._update is not None:
            raise InvalidRequest("an update is under way already: finish it first")
        await self.check()
        self._updates.check_awake()
        self._end_turn = await self._updates.turns.take()
        update = Update(self._updates, pending, {})
        update.hold.dropped.add_done_callback(self._end_turn)
        self._update, self._is_given = update, False
        try:
            await self._updates.begin(update)
            await self._updates.called(self._check_met, owner=update)
        except BaseException:
            await self.give_up()
            raise

    def _check_met(self, answering: AnsweringEngine) -> None:
        if self._met is not None and self._met is not answering:
            raise EngineFailed(
                "the engine was restarted since its workers met the trainer: call "
                "init_weight_transfer_engine again"
            )

    async def take(self, update_info: Any) -> None:
        """Have the engine take some of what the trainer sends."""

        def receive(weights: Weights) -> None:
            _checked(weights).receive(update_info)

        update = self._under_way()
        self._is_given = True
        await self._through(lambda answering: update.load(answering, give=receive), update)

    async def finish(self) -> int:
        """End the update; return the version of the weights."""
        update = self._under_way()
        if not self._is_given:
            raise InvalidRequest("nothing was sent in this update: call update_weights first")
        version: int = await self._through(update.finish, update)
        self._update = None
        self._end_turn()
        return version

    async def give_up(self) -> None:
        """End the update without its end, if one is under way: the engine is dead if it has a part of
        it."""
        update, self._update = self._update, None
        if update is not None:
            self._updates.thread.call_soon(update.end, update)
            self._end_turn()

    async def _through(self, function: Callable[[AnsweringEngine], Any], update: Update) -> Any:
        try:
            return await self._updates.called(function, owner=update)
        except BaseException:  # cancelled too: without this part, the weights would be a mixture
            await self.give_up()
            raise

    def _under_way(self) -> Update:
        if self._update is None:
            raise InvalidRequest("no update is under way: call start_weight_update first")
        return self._update


def _receiving(answering: AnsweringEngine) -> Receiving:
    if answering.capabilities.has_replicas:
        raise EngineUnsupported(
            "replicas receive nothing from vLLM's trainers: what these send is put into the memory of "
            "one engine's workers, and no copy is kept for a replica that is started later. Give all of "
            "them the new weights with lm.update_weights, as tensors or safetensors"
        )
    weights = _checked(weights_of(answering.engine))
    weights.check_receives()
    return weights


def _checked(weights: Weights) -> Receiving:
    if not isinstance(weights, Receiving):
        raise EngineUnsupported(
            "this engine receives nothing from trainers, as vLLM does: use lm.update_weights"
        )
    return weights
