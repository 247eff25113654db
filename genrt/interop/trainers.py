"""A runtime for vLLM's trainers: new weights go from their GPUs to the engine's, by NCCL or CUDA IPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genrt.engines.weights import KVCache
from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import shown
from genrt.runtime.batcher import Pending
from genrt.runtime.concurrency import blocking
from genrt.runtime.weights import Transfers, check_earlier

__all__ = ["WeightSyncClient"]


class WeightSyncClient:
    """A ``VLLMWeightSyncClient``, for a ``TrainerWeightTransferEngine`` of vLLM.

    The engine must have been opened with ``engine_options={"weight_transfer_config": {"backend": …}}``,
    the trainer's backend. An update is like ``AsyncLM.update_weights``: questions wait, no answer mixes
    weights, ``AsyncLM.weights_version`` rises. But weights are neither checked nor copied before, so an
    error in the middle ends the engine, and a restart cannot restore them.

    All methods block, and one thread at a time calls them. A trainer that dies in the middle leaves
    questions waiting: call ``close``, or leave a ``with`` block.

    Args:
        lm: the runtime.
        pending, kv_cache: how earlier questions end, as for ``AsyncLM.update_weights``. With
            ``pending="continue"`` an update waits for no text.
    """

    def __init__(
        self, lm: AsyncLM, *, pending: Pending = "finish", kv_cache: KVCache | None = None
    ) -> None:
        if not isinstance(lm, AsyncLM):
            raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
        check_earlier(pending, kv_cache)
        self._transfers = Transfers(lm._weights)
        self._earlier = pending, kv_cache

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Connect the engine's workers to the trainer.

        Raises:
            InvalidRequest: ``init_info`` is not a mapping.
            EngineUnsupported: the engine is not vLLM, or was not opened for it.
            EngineFailed: the connection failed.
        """
        if not isinstance(init_info, Mapping):
            raise InvalidRequest(f"init_info must be a mapping, got {shown(init_info)}")
        blocking(self._transfers.connect(init_info))

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect the workers. Raises InvalidRequest during an update."""
        blocking(self._transfers.disconnect())

    def start_weight_update(self) -> None:
        """Begin an update; return once no question runs and all computed state is dropped.

        Raises:
            InvalidRequest: an update is under way, or the engine sleeps.
            EngineFailed: state cannot be dropped, or the engine was restarted since the connection.
        """
        blocking(self._transfers.start(*self._earlier), undo=lambda _: self.close())

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive the trainer's next tensors; return when they are loaded.

        Raises:
            InvalidRequest: no update is under way.
            EngineDied: the workers failed. EngineFailed: the engine was restarted meanwhile.
        """
        if not isinstance(update_info, dict | list):
            raise InvalidRequest(f"update_info must be a dict or a list, got {shown(update_info)}")
        blocking(self._transfers.take(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update: questions continue with the new weights. ``weight_version`` is not used.

        Raises:
            InvalidRequest: no update is under way, or no tensors were sent.
            EngineDied: the engine failed.
        """
        blocking(self._transfers.finish())

    def close(self) -> None:
        """Abandon an update that is under way. Idempotent."""
        blocking(self._transfers.give_up())

    def __enter__(self) -> WeightSyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
