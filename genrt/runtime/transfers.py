"""New weights that a trainer sends to the engine's workers by itself, as vLLM's trainers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from genrt.engines.weights import Receiving, Weights, weights_of
from genrt.errors import EngineFailed, EngineUnsupported, InvalidRequest
from genrt.runtime.answers import AnsweringEngine
from genrt.runtime.lifecycle import Pending, check_pending
from genrt.runtime.weights import Taking, Update, WeightUpdates

__all__ = ["Transfers"]


class Transfers:
    """The updates that one trainer sends to one runtime, one after the other.

    Each runs exclusively from its start to its end, and questions wait as in ``WeightUpdates``; no copy
    of what is sent is kept. An error in one is the engine's death. The workers that a trainer has met are
    gone with their engine: it must connect again after a restart.
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
        own = self._updates.thread, self._updates.cache
        update = Update(*own, pending, Taking({}, finite=False))
        update.hold.dropped.add_done_callback(self._end_turn)
        self._update, self._is_given = update, False
        try:
            await self._updates.called(update.hold_questions)
            await update.hold.wait()
            await self._updates.called(partial(self._begin, update), owner=update)
        except BaseException:
            await self.give_up()
            raise

    def _begin(self, update: Update, answering: AnsweringEngine) -> None:
        if self._met is not None and self._met is not answering:
            raise EngineFailed(
                "the engine was restarted since its workers met the trainer: call "
                "init_weight_transfer_engine again"
            )
        update.begin(answering)

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
    if answering.replicated is not None:
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
