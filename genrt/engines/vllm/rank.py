"""One rank of a tensor-parallel model: vLLM's engine in a process of its own, which computes its share of
every layer.

Each rank schedules by itself, what it is asked in the same order as the others: so all run the same
forwards, in which they exchange what they computed, and each has every row at the end. It is what vLLM's
``external_launcher`` is for; here genrt launches.
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

__all__ = ["LAUNCHED", "Rank", "Share", "leave", "no_share", "of_first"]

LAUNCHED = "external_launcher"
"""The name of vLLM's executor whose ranks others launch."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank as it is opened.

    Attributes:
        number: from 0 on; rank 0 answers.
        store: the file by which the ranks find each other.
        configured: is called once vLLM has taken the options, and before it looks for other ranks.
    """

    number: int
    store: str
    configured: Callable[[], object] = lambda: None

    def executor(self, config: VllmConfig) -> type[Executor]:
        """Return what runs this rank's share of the model.

        Raises:
            EngineUnsupported: pipeline parallelism, or several hosts.
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
"""Has the numbers in a tensor be the same in all ranks."""


def no_share(numbers: Tensor) -> None:
    """Leave the numbers to this rank, which is alone."""


def of_first(numbers: Tensor) -> None:
    """Have all ranks' numbers, on their devices, be rank 0's, once all ranks ask for that."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    torch.distributed.broadcast(numbers, src=group.ranks[0], group=group.device_group)


def leave() -> None:
    """Leave the other ranks, once this process's engine is closed. vLLM keeps its groups for another one,
    with what they share."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
