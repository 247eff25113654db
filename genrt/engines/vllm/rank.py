"""One rank of a tensor-parallel model: a vLLM engine in its own process, with a share of each layer.

Each rank schedules the same requests in the same order, runs the same forwards, and has every row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from genrt.errors import EngineUnsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor import Executor

LAUNCHED = "external_launcher"  # vLLM's name of its executor for ranks that it does not launch


@dataclass(frozen=True, slots=True)
class Rank:
    """The identity of a rank when it is opened."""

    number: int  # from 0 on; rank 0 answers
    store: str  # the file by which the ranks find each other
    # Called after vLLM has accepted the options and before it looks for other ranks.
    configured: Callable[[], object] = lambda: None

    def executor(self, config: VllmConfig) -> type[Executor]:
        """Return the executor class that runs this rank's share of the model.

        Raises:
            EngineUnsupported: the options ask for pipeline parallelism or several hosts.
        """
        parallel = config.parallel_config
        if parallel.world_size != parallel.tensor_parallel_size:
            raise EngineUnsupported(
                f"{LAUNCHED} is for tensor parallelism alone: leave the other parallel sizes out"
            )
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as vLLM's executor asserts
        self.configured()
        number, method = self.number, f"file://{self.store}"

        class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
            def _distributed_args(self) -> tuple[str, int, int]:
                return method, number, number

        return RankExecutor


Share: TypeAlias = Callable[[Tensor], object]
"""Makes the numbers in a tensor the same in all ranks."""


def keep_local(numbers: Tensor) -> None:
    """Leave the tensor as it is, because this process is the only rank."""


def broadcast_from_rank0(numbers: Tensor) -> None:
    """Replace every rank's numbers, on its device, by rank 0's. It waits until all ranks call it."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    torch.distributed.broadcast(numbers, src=group.ranks[0], group=group.device_group)


def leave_ranks() -> None:
    """Leave the group of ranks after closing the engine; vLLM would keep the groups and their memory."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
