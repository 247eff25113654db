"""Updates of a runtime's weights: checked, copied for later engines, and loaded while questions wait.

Rules:
    There is no change before the first tensor is loaded. Then the whole update succeeds or the engine
    dies, and the next engine has the last whole weights. Other calls that load something, such as
    adapters, wait: no step runs with mixed weights. Updates run one after the other. An update ends with
    EngineFailed if its engine is restarted or replaced.
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
from typing import Any, TypeAlias, TypedDict, TypeVar, get_args

from torch import Tensor

from genrt.engines.weights import (
    KVCache,
    Layout,
    NamedTensors,
    Receiving,
    SavedWeights,
    TensorsIn,
    Weights,
    check_complete,
    check_tensors,
    continuing_weights,
    forms_in,
    set_version,
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
from genrt.numbers import check_bool, check_one_of, shown
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.batcher import BROKEN, Barrier, Pending
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import AT_ONCE_BYTES, FairLock, follow, run_in_thread
from genrt.runtime.thread import EngineThread

T = TypeVar("T")

Chunk: TypeAlias = Mapping[str, Tensor] | NamedTensors
"""Some tensors by name."""

WeightsSource: TypeAlias = Chunk | str | os.PathLike[str] | Iterable[Chunk] | AsyncIterable[Chunk]
"""Tensors by name; the path of a safetensors file or of a directory of them; or chunks of tensors."""


class UpdateOptions(TypedDict, total=False):
    """The options of ``AsyncLM.update_weights``.

    Attributes:
        pending: with ``"finish"``, the default, the old weights answer earlier questions; with
            ``"restart"`` the new weights do. A partly delivered stream then raises StreamCut. With
            ``"continue"``, texts in progress go on with the new weights: ``Completion.weights_spans``
            says which weights drew each token. The old weights answer other earlier questions.
        kv_cache: with ``pending="continue"``, whether the new weights compute the keys and values of
            these texts again (``"recompute"``, the default), or continue after the old ones
            (``"keep"``): that is faster, but no weights give a token its log-probability.
        check_finite: refuse NaN and infinity, which reads every number; by default false.
        keep: whether to copy the weights to the temporary folder, for ``wake_up`` after ``sleep(2)`` and
            for the next engine. ``None``, the default, copies tensors; files are copied only with
            ``load(restart="auto")``, and otherwise read again where they are unless they have changed.
            Without a copy (``False``) the runtime cannot be restarted.
    """

    pending: Pending
    kv_cache: KVCache | None
    check_finite: bool
    keep: bool | None


def check_earlier(pending: object, kv_cache: object) -> None:
    """Raise InvalidRequest unless earlier questions can end so; see ``UpdateOptions``."""
    check_one_of("pending", pending, get_args(Pending))
    check_one_of("kv_cache", kv_cache, (*get_args(KVCache), None))
    if kv_cache is not None and pending != "continue":
        raise InvalidRequest('kv_cache is for texts that go on: give pending="continue" too')


class WeightUpdates:
    """Replaces the weights of one runtime, also across restarts. Safe from any thread."""

    def __init__(self, thread: EngineThread, cache: RowCache) -> None:
        self.thread = thread
        self.cache = cache
        self.lock = FairLock()

    async def update(
        self,
        source: WeightsSource,
        *,
        pending: Pending = "finish",
        kv_cache: KVCache | None = None,
        check_finite: bool = False,
        keep: bool | None = None,
    ) -> int:
        """Replace the weights as ``AsyncLM.update_weights``; return the new version."""
        check_earlier(pending, kv_cache)
        check_bool("check_finite", check_finite)
        if keep is not None:
            check_bool("keep", keep)
        self.check_awake()
        given = _weights_source(source)
        chunks = _chunks(given)
        weights = continuing_weights if pending == "continue" else weights_of
        layout = await self.called(lambda answering: weights(answering.engine).layout())
        update = Update(self, pending, layout, kv_cache=kv_cache, finite=check_finite)
        known, are_all = [], True  # the chunks that can be checked before anything changes
        async for chunk, is_last in chunks:
            known.append(chunk)
            if not isinstance(given, list | tuple):
                are_all = is_last
                break
        for chunk in known:
            await _run(update.check, chunk)
        if are_all:
            check_complete(layout, update.names)
        try:
            if keep is None and isinstance(given, TensorsIn) and not self.thread.restarts:
                update.saved = SavedWeights(given.files)
            elif keep is not False:
                update.saved, update.is_copied = self.thread.weights.begin(), True
                for chunk in known:
                    await _run(update.copy, chunk)
            release = await self.lock.acquire()
        except BaseException:
            update.release()
            raise
        update.barrier.broken.add_done_callback(release)
        try:
            return await self._replace(update, known, chunks)
        finally:
            release()

    async def _replace(self, update: Update, known: Sequence[NamedTensors], chunks: _Chunks) -> int:
        try:
            await self.begin(update)
            for chunk in known:
                await self.called(partial(update.load, give=update.giving(chunk)), owner=update)
            while more := await update.barrier.unless_broken(anext(chunks, None)):
                await _run(update.check, more[0])
                await _run(update.copy, more[0])
                await self.called(partial(update.load, give=update.giving(more[0])), owner=update)
            check_complete(update.layout, update.names)
            return await self.called(update.finish, owner=update)
        except GeneratorExit:  # collected with its loop, whatever is locked
            self.thread.call_soon(update.end, update)
            raise
        except BaseException as error:
            with contextlib.suppress(GenrtError):  # Closed in a forked child
                ending = self.thread.call(update.end, update)
                ending.add_done_callback(lambda _: update.release())
                if isinstance(error, Exception):  # the caller then finds the runtime's last state
                    await asyncio.wrap_future(follow(ending))
            raise

    async def begin(self, update: Update) -> None:
        """Begin an update: return once questions wait, and results are forgotten."""
        await self.called(lambda _: self.thread.batcher.raise_barrier(update.barrier))
        await update.barrier.wait()
        await self.called(update.begin, owner=update)

    def check_awake(self) -> None:
        """Raise InvalidRequest if the weights sleep."""
        self.thread.lifecycle.check_awake("weights")

    async def called(self, function: Callable[[AnsweringEngine], T], *, owner: object = None) -> T:
        """Return the result of a call on the engine's thread, exclusively if it is the owner's."""
        return await asyncio.wrap_future(self.thread.call(function, owner))


class Update:
    """One update. The engine's thread calls ``begin``, ``load``, ``finish`` and ``end``, which raise
    EngineFailed if the engine was restarted or replaced.

    Attributes:
        barrier: makes questions wait until the end.
        names: the tensors that have been checked.
        saved: the copy (``is_copied``) or the files for the next engine.
    """

    def __init__(
        self,
        updates: WeightUpdates,
        pending: Pending,
        layout: Layout,
        *,
        kv_cache: KVCache | None = None,
        finite: bool = False,
    ) -> None:
        self.barrier = Barrier(pending)
        self._texts = (kv_cache or "recompute") if pending == "continue" else None
        self.layout = layout
        self.names: set[str] = set()
        self.saved: SavedWeights | None = None
        self.is_copied = False
        self._finite = finite
        self._cache = updates.cache
        self._thread = updates.thread
        self._engine: AnsweringEngine | None = None  # on which it began
        self._has_loaded = self._is_over = self._is_finished = False

    def check(self, tensors: NamedTensors) -> None:
        """Note tensors that fit; raises as ``check_tensors``."""
        if isinstance(tensors, TensorsIn):
            found = check_tensors(self.layout, forms_in(tensors.files), self.names)
            if self._finite:
                check_tensors(self.layout, tensors, self.names, finite=True)
        else:
            found = check_tensors(self.layout, tensors, self.names, finite=self._finite)
            for name, tensor in found.items():
                if tensor.is_meta:  # only the forms of files are
                    raise InvalidWeights(f"tensor {name!r} is on the device 'meta': give numbers")
        self.names |= {*found}

    def copy(self, tensors: NamedTensors) -> None:
        """Copy tensors for the next engine, if wanted. Raises InvalidWeights if there is no room."""
        if self.saved is not None and self.is_copied:
            self.saved.add(self._untied(tensors))

    def giving(self, tensors: NamedTensors) -> Callable[[Weights], None]:
        """Return the function that gives tensors to an engine."""
        return lambda weights: weights.load(self._untied(tensors))

    def _untied(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        return ((name, each) for name, each in tensors if self.layout[name].tied_to is None)

    def begin(self, answering: AnsweringEngine) -> None:
        """Forget all results of the old weights, except of texts that continue."""
        self._engine = answering
        self._check(answering)
        self._thread.run_exclusively(self, self.barrier)
        answering.begin_update(texts=self._texts)

    def load(self, answering: AnsweringEngine, *, give: Callable[[Weights], None]) -> None:
        """Give the engine some tensors. Raises EngineDied if that fails."""
        self._check(answering)
        self._has_loaded = True
        try:
            give(weights_of(answering.engine))
        except BaseException as error:
            self._die(error)

    def finish(self, answering: AnsweringEngine) -> int:
        """Let questions go on with the new weights; return their version. Raises EngineDied on
        failure."""
        self._check(answering)
        version = self._thread.batcher.weights_version + 1
        try:
            set_version(answering.engine, version)
            weights_of(answering.engine).finish()
        except BaseException as error:
            self._die(error)
        self._is_over = True
        self._cache.clear()
        self._thread.weights.replace(version, self.saved)
        self._is_finished = True
        self._thread.run_exclusively(None)
        self._thread.lifecycle.are_weights_lost = False
        self._thread.batcher.lift_barrier(self.barrier, version)
        return version

    def end(self, answering: AnsweringEngine) -> None:
        """Let questions go on with the old weights, unless the update is over. Raises EngineDied if the
        engine has some of the new weights."""
        if not self._is_over:
            is_mixed = self._has_loaded and self._engine is answering
            self._give_up()
            if is_mixed:
                raise EngineDied(
                    "its weights were being replaced, and that was given up in the middle"
                )

    def release(self) -> None:
        """Remove the copy, unless the update is finished."""
        if self.saved is not None and not self._is_finished:
            self.saved.drop()

    def _die(self, error: BaseException) -> Any:
        self._give_up()
        if isinstance(error, EngineDied):  # of replicas, which say this themselves
            raise error
        raise EngineDied(f"its weights could not be replaced: {error}") from error

    def _give_up(self) -> None:
        self._is_over = True
        self.release()
        if self._thread.lifecycle.owner is self:
            self._thread.run_exclusively(None)
        self._thread.batcher.lift_barrier(self.barrier)

    def _check(self, answering: AnsweringEngine) -> None:
        if self._is_over or self.barrier.is_lifted or self._engine is not answering:
            raise EngineFailed(BROKEN)


async def _run(function: Callable[[NamedTensors], None], tensors: NamedTensors) -> None:
    """Call a function with tensors, in another thread if that takes long."""
    is_slow = (
        isinstance(tensors, TensorsIn)
        or sum(each.numel() * each.itemsize for _, each in tensors if isinstance(each, Tensor))
        > AT_ONCE_BYTES
    )
    if is_slow:
        await run_in_thread(partial(function, tensors))
    else:
        function(tensors)


_Chunks: TypeAlias = AsyncIterator[tuple[NamedTensors, bool]]

_END: Any = object()
"""Comes after the last item."""


def _weights_source(source: Any) -> Any:
    """Return an iterable source, or the files of a path. Raises InvalidRequest for anything else."""
    if isinstance(source, str | os.PathLike):
        return TensorsIn(weight_files(Path(source).expanduser()))
    is_table = isinstance(source, bytes) or hasattr(source, "ndim")
    if isinstance(source, AsyncIterable | Iterable) and not is_table:
        return source
    raise InvalidRequest(
        "weights must be tensors by name, a path to safetensors, or chunks of named tensors, got "
        f"{shown(source)}"
    )


async def _chunks(given: Any) -> _Chunks:
    """Yield the chunks of a source, each with whether it is known as the last one. Raises InvalidWeights
    and the source's errors."""
    if isinstance(given, TensorsIn | Mapping):
        yield given if isinstance(given, TensorsIn) else _tensor_pairs(given), True
        return
    pairs: list[Any] = []
    async for found in _items(given):
        if pairs or (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str)):
            pairs.append(found)  # no chunks: the first one tells
        else:
            yield _tensor_pairs(found), False
    if pairs:
        yield _tensor_pairs(pairs), True


async def _items(given: Any) -> AsyncIterator[Any]:
    if isinstance(given, AsyncIterable):
        async for each in given:
            yield each
    elif isinstance(given, list | tuple):
        for each in given:
            yield each
    else:
        take: Callable[[], Any] = partial(next, iter(given), _END)
        while (each := await run_in_thread(take)) is not _END:
            yield each


def _tensor_pairs(given: Any) -> list[tuple[str, Tensor]]:
    """Return a chunk as pairs. Raises InvalidWeights if it has other items than named tensors."""
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
    """The updates that a trainer sends directly to the engine's workers, as vLLM's trainers do.

    Questions wait from the start of an update to its end, as in ``WeightUpdates``. No copy is made. An
    error kills the engine. After a restart the trainer must connect again, to the new engine's workers.
    """

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates = updates
        self._update: Update | None = None
        self._is_given = False
        self._met: AnsweringEngine | None = None
        self._release: Callable[..., None] = lambda: None

    @property
    def is_under_way(self) -> bool:
        """True between the start of an update and its end."""
        return self._update is not None

    async def check(self) -> None:
        """Raise EngineUnsupported unless the engine takes updates from trainers."""
        await self._updates.called(_receiving)

    async def connect(self, init_info: Mapping[str, Any]) -> None:
        """Connect the engine's workers to the trainer."""

        def connect(answering: AnsweringEngine) -> None:
            _receiving(answering).connect(init_info)
            self._met = answering

        await self._updates.called(connect)

    async def disconnect(self) -> None:
        """Disconnect them, unless their engine is gone."""
        if self._update is not None:
            raise InvalidRequest("an update is under way: finish it first")

        def disconnect(answering: AnsweringEngine) -> None:
            receiving, met = _receiving(answering), self._met
            self._met = None
            if met is None or met is answering:
                receiving.disconnect()

        await self._updates.called(disconnect)

    async def start(self, pending: Pending, kv_cache: KVCache | None = None) -> None:
        """Begin an update: return once questions wait, and results are forgotten."""
        check_earlier(pending, kv_cache)
        if self._update is not None:
            raise InvalidRequest("an update is under way already: finish it first")
        await self.check()
        self._updates.check_awake()
        self._release = await self._updates.lock.acquire()
        update = Update(self._updates, pending, {}, kv_cache=kv_cache)
        update.barrier.broken.add_done_callback(self._release)
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
        """Have the engine receive a part of the update."""

        def receive(weights: Weights) -> None:
            _receiver(weights).receive(update_info)

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
        self._release()
        return version

    async def give_up(self) -> None:
        """Abort the update, if there is one; this kills an engine with a part of it."""
        update, self._update = self._update, None
        if update is not None:
            self._updates.thread.call_soon(update.end, update)
            self._release()

    async def _through(self, function: Callable[[AnsweringEngine], Any], update: Update) -> Any:
        try:
            return await self._updates.called(function, owner=update)
        except BaseException:  # also cancelled: without this part, the weights would be mixed
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
    weights = _receiver(weights_of(answering.engine))
    weights.check_receives()
    return weights


def _receiver(weights: Weights) -> Receiving:
    if not isinstance(weights, Receiving):
        raise EngineUnsupported(
            "this engine receives nothing from trainers, as vLLM does: use lm.update_weights"
        )
    return weights
