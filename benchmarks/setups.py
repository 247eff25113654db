"""The options that a benchmark's engines have in common, and what vLLM makes of them.

vLLM's own options are left alone, but for what keeps the engines alike and small.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

import genrt
from benchmarks.checkpoints import SHAPES


class Taken(TypedDict):
    """Where and when a result was taken, and with what; ``load`` is the host's of the last minute."""

    device: str
    load: float
    date: str
    versions: dict[str, str]


class Surroundings(Taken):
    """Also ``runner`` and ``async_scheduling``, vLLM's choice for ``options``."""

    runner: str
    async_scheduling: bool
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """``options`` are what all engines get; ``block_size`` is in tokens, ``block_bytes`` what the KV
    memory of one block takes over all layers."""

    options: dict[str, Any]
    vocab_size: int
    block_size: int
    block_bytes: int
    surroundings: Surroundings

    def sized(self, max_model_len: int, blocks: int) -> Setup:
        """With room for so many tokens a sequence and so many KV blocks; an option that was given
        keeps its value."""
        sizes = {
            "max_model_len": max_model_len,
            "kv_cache_memory_bytes": blocks * self.block_bytes,
        }
        missing = {name: size for name, size in sizes.items() if name not in self.options}
        surroundings = self.surroundings.copy()
        surroundings["options"] = surroundings["options"] | missing
        return replace(self, options=self.options | missing, surroundings=surroundings)


def append(line: str, path: Path | None) -> None:
    """Append a line to a file, if there is to be one."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            print(line, file=file)


def taken() -> Taken:
    """Here and now."""
    import vllm

    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{_cpu()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
        "versions": {
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "genrt": genrt.__version__,
        },
    }


def _cpu() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, "CPU")


def prepared(name: str, model: str, given: dict[str, Any], *, max_num_seqs: int) -> Setup:
    """The setup of a model in directory ``model``, which goes by ``name``; ``given`` options win."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "dtype": "float32" if name == "tiny" else "auto",
        "load_format": "dummy" if name in SHAPES else "auto",
        "skip_tokenizer_init": True,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": not on_gpu,
    }
    if on_gpu:
        # vLLM wants so much to be free when it opens; it takes kv_cache_memory_bytes beside the weights.
        options["gpu_memory_utilization"] = 0.3
    options |= given
    in_process = {"distributed_executor_backend": UniProcExecutor}
    config = EngineArgs(model=model, **options, **in_process).create_engine_config()
    shape, block_size = config.model_config, int(config.cache_config.block_size)
    heads = shape.get_num_kv_heads(config.parallel_config)
    width = shape.get_num_layers(config.parallel_config) * heads * shape.get_head_size()
    return Setup(
        options=options | in_process,
        vocab_size=int(shape.get_vocab_size()),
        block_size=block_size,
        block_bytes=block_size * 2 * width * shape.dtype.itemsize,
        surroundings={
            **taken(),
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "options": options,
        },
    )
