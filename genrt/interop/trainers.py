"""A runtime for vLLM's trainers: new weights go from their GPUs to the engine's, by NCCL or CUDA IPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import shown
from genrt.runtime.batcher import Pending
from genrt.runtime.concurrency import blocking
from genrt.runtime.lifecycle import check_pending
from genrt.runtime.weights import Transfers

__all__ = ["WeightSyncClient"]


class WeightSyncClient:
    """A ``VLLMWeightSyncClient``, which a ``TrainerWeightTransferEngine`` of vLLM's calls.

    The engine is opened for it with ``engine_options={"weight_transfer_config": {"backend": …}}``, the
    trainer's backend. An update is one as ``AsyncLM.update_weights`` makes: questions wait, nothing is
    answered by a mixture, ``AsyncLM.weights_version`` rises. But nothing can be checked before, and no
    copy is kept: an error in the middle is the engine's death, and after an update it cannot be restarted
    with these weights.

    All methods block, and one thread at a time calls them. A trainer that dies in the middle leaves
    questions waiting: ``close``, or leaving a ``with`` block, gives the update up.

    Args:
        lm: the runtime.
        pending: what becomes of questions asked before an update, as for ``AsyncLM.update_weights``.
    """

    def __init__(self, lm: AsyncLM, *, pending: Pending = "finish") -> None:
        if not isinstance(lm, AsyncLM):
            raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
        check_pending(pending)
        self._transfers = Transfers(lm._weights)
        self._pending = pending

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Have the engine's workers meet the trainer.

        Raises:
            InvalidRequest: ``init_info`` is no mapping.
            EngineUnsupported: the engine was not opened for it, or is not vLLM. EngineFailed: they do not
                meet.
        """
        if not isinstance(init_info, Mapping):
            raise InvalidRequest(f"init_info must be a mapping, got {shown(init_info)}")
        blocking(self._transfers.connect(init_info))

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the workers leave the trainer. Raises InvalidRequest during an update."""
        blocking(self._transfers.disconnect())

    def start_weight_update(self) -> None:
        """Begin an update; return once nothing runs, and what was computed is forgotten.

        Raises:
            InvalidRequest: one is under way, or the engine sleeps. EngineFailed: it cannot forget, or was
                restarted since its workers met the trainer.
        """
        blocking(self._transfers.start(self._pending), undo=lambda _: self.close())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Have the workers receive what the trainer sends; return when they have it.

        Raises:
            InvalidRequest: no update is under way. EngineDied: the workers failed. EngineFailed: the
                engine was restarted meanwhile.
        """
        if not isinstance(update_info, dict | list):
            raise InvalidRequest(f"update_info must be a dict or a list, got {shown(update_info)}")
        blocking(self._transfers.take(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update: questions go on, by the new weights. The trainer's own name for these,
        ``weight_version``, is not used.

        Raises:
            InvalidRequest: no update is under way, or nothing was sent. EngineDied: the engine failed.
        """
        blocking(self._transfers.finish())

    def close(self) -> None:
        """Give up the update that is under way, if one is. Idempotent."""
        blocking(self._transfers.give_up())

    def __enter__(self) -> WeightSyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
