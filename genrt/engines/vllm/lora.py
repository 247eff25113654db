"""vLLM's LoRA adapters by version: who uses which, and the base model's stand-in.

Rules:
    Every version has a name and number of its own in vLLM, whose prefix cache is keyed by the name.
    An adapter that was removed stays until the last request bound to it has ended.

Where a step mixes base and adapter requests, vLLM's CPU build (0.32) computes the base ones with the
adapter in its last slot. There, as soon as there is an adapter, base requests run under its twin with
B = 0, which adds nothing. ``check_base`` asks for such a step whenever an adapter is added, on every
device, and refuses a vLLM whose base rows are not the base model's.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME, check_adapter_directory
from genrt.engines.folders import Folder
from genrt.errors import EngineUnsupported, InvalidAdapter, UnknownAdapter
from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest

__all__ = ["VLLMAdapters"]

Probe = Callable[[Sequence[LogprobsRequest]], list[torch.Tensor]]

SAME_ROW = 0.05
"""The largest difference, in log-probability where it is over -15, of one row in two batches."""


class VLLMAdapters:
    """The adapters that one vLLM engine knows; none unless it was opened with adapters ``enabled``.
    ``core`` is its ``engine_core`` client."""

    def __init__(self, core: Any, *, enabled: bool, base_needs_twin: bool) -> None:
        self._core = core
        self._enabled = enabled
        self._base_needs_twin = base_needs_twin
        self._numbers = itertools.count(1)
        self._twins = contextlib.ExitStack()  # of their directories
        self._loaded: dict[Adapter, LoRARequest] = {}
        self._users: collections.Counter[Adapter] = collections.Counter()
        self._removed: set[Adapter] = set()
        self._base: LoRARequest | None = None

    def check_enabled(self) -> None:
        """Raise InvalidAdapter if vLLM was opened without adapters."""
        if not self._enabled:
            raise InvalidAdapter(
                'vLLM was opened without adapters: load with engine_options={"enable_lora": True, '
                '"max_loras": …, "max_lora_rank": …}'
            )

    def add(self, adapter: Adapter, path: Path) -> None:
        """Load an adapter.

        Raises:
            InvalidAdapter: vLLM does not take it; its reason is the message.
        """
        check_adapter_directory(path)
        self._loaded[adapter] = self._load(path, adapter.name)
        if self._base_needs_twin and self._base is None:
            self._base = self._load(self._twin(path), "B = 0")

    def _load(self, directory: Path, what: str) -> LoRARequest:
        number = next(self._numbers)
        lora = LoRARequest(f"genrt-{number}", number, str(directory))
        try:
            loaded = self._core.add_lora(lora)
        except Exception as error:
            raise InvalidAdapter(f"vLLM does not take adapter {what}: {error}") from error
        if not loaded:
            raise InvalidAdapter(f"vLLM does not take adapter {what}")
        return lora

    def check_base(self, adapter: Adapter, probe: Probe, context: tuple[int, ...]) -> None:
        """Compare the base model's row after ``context`` alone and beside the adapter's.

        Raises:
            EngineUnsupported: they are not the same.
        """
        base, adapted = LogprobsRequest(context), LogprobsRequest(context, adapter)
        [alone] = probe([base])
        if not _same(probe([adapted, base])[1], alone):
            raise EngineUnsupported(
                "vLLM mixes up the base model and its adapters within a step; load one runtime for "
                "each instead"
            )

    def _twin(self, source: Path) -> Path:
        twin = self._twins.enter_context(Folder("twin"))
        shutil.copyfile(source / CONFIG_NAME, twin / CONFIG_NAME)
        weights = load_file(source / WEIGHTS_NAME)
        for name, weight in weights.items():
            if "lora_B" in name or "lora_embedding_B" in name:
                weight.zero_()
        save_file(weights, twin / WEIGHTS_NAME)
        return twin

    def request(self, adapter: Adapter | None) -> LoRARequest | None:
        """Return what a request for this adapter tells vLLM.

        Raises:
            UnknownAdapter: it is not loaded, or has been removed.
        """
        if adapter is None:
            return self._base
        if adapter not in self._loaded or adapter in self._removed:
            raise UnknownAdapter(f"no adapter {adapter.name!r} is loaded; load it with add_adapter")
        return self._loaded[adapter]

    def hold(self, adapter: Adapter) -> None:
        """Keep an adapter loaded for a request in progress, until ``release``."""
        self._users[adapter] += 1

    def release(self, adapter: Adapter) -> None:
        """Let go of an adapter for a request that has ended."""
        self._users[adapter] -= 1
        if self._users[adapter] == 0:
            del self._users[adapter]
            if adapter in self._removed:
                self._unload(adapter)

    def remove(self, adapter: Adapter) -> None:
        """Let an adapter go when its last request has ended; ignore an unknown one."""
        if adapter not in self._loaded:
            return
        self._removed.add(adapter)
        if not self._users[adapter]:
            self._unload(adapter)

    def _unload(self, adapter: Adapter) -> None:
        lora = self._loaded.pop(adapter)
        self._removed.discard(adapter)
        self._core.remove_lora(lora.lora_int_id)

    def close(self) -> None:
        self._twins.close()
        self._core = None


def _same(row: torch.Tensor, other: torch.Tensor) -> bool:
    likely = other > -15.0
    return bool((row - other)[likely].abs().max() < SAME_ROW)
