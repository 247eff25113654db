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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.request import LoRARequest

from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME, check_adapter_directory
from genrt.engines.folders import Folder
from genrt.errors import EngineUnsupported, InvalidAdapter, UnknownAdapter
from genrt.questions.contexts import Adapter
from genrt.questions.rows import LogprobsRequest

__all__ = ["VLLMAdapters"]

Probe = Callable[[Sequence[LogprobsRequest]], list[torch.Tensor]]

PARTIAL = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Options of an adapter by which ``target_modules`` are not those of all layers."""

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
            InvalidAdapter: vLLM does not take it, for the reason in the message; or weights have no place
                in the model, or too few, which vLLM passes over.
        """
        config = check_adapter_directory(path)
        loaded = self._load(path, adapter.name)
        self._loaded[adapter] = loaded
        if (reason := self._misfit(loaded.lora_int_id, config)) is not None:
            raise InvalidAdapter(f"adapter {adapter.name} does not fit the model: {reason}")
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

    def _misfit(self, number: int, config: Mapping[str, Any]) -> str | None:
        """Return in which way a loaded adapter does not fit the model, if any."""
        rank = None if config.get("rank_pattern") else config.get("r")
        fits: list[_Fit] = self._core.collective_rpc(_fit, None, (number, rank), None)
        strange = frozenset.intersection(*(each.strange for each in fits))
        if strange:
            return f"its weights of {min(strange)} belong to no layer"
        if wrong := [each for fit in fits for each in fit.wrong]:
            return wrong[0]
        targets = config.get("target_modules")
        partial = any(config.get(name) for name in PARTIAL)
        if not isinstance(targets, list) or partial:
            targets = []
        for name in sorted(frozenset.union(*(each.missing for each in fits))):
            if ".experts." not in name and any(f".{name}".endswith(f".{each}") for each in targets):
                return f"it has no weights of {name}, which is among its target_modules"
        if not any(each.taken for each in fits):
            return "it has no weights of any layer"
        return None

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


class _Fit(NamedTuple):
    """How an adapter's weights fit the layers of one worker, by the names of layers."""

    taken: int
    strange: frozenset[str]
    missing: frozenset[str]
    wrong: list[str]


def _fit(worker: Any, number: int, rank: int | None) -> _Fit:
    """Return how an adapter that a worker has loaded fits its layers; with ``rank``, of all of them."""
    manager = worker.model_runner.lora_manager._adapter_manager
    given, layers = manager.get_adapter(number).loras, manager.modules
    missing: set[str] = set()
    wrong: list[str] = []
    for name, layer in layers.items():
        parts = manager.packed_modules.get(name, [name])
        weights = given.get(name)
        if weights is None:
            missing.update(parts)
            continue
        pairs = [*_pairs(weights)]
        if len(pairs) != len(parts) or not isinstance(layer, BaseLinearLayerWithLoRA):
            continue
        missing.update(part for part, (a, _) in zip(parts, pairs, strict=True) if a is None)
        if layer.tp_size == 1 and len(pairs) == layer.n_slices:
            places = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            for part, (a, b), (to_a, to_b) in zip(parts, pairs, places, strict=True):
                if a is None or b is None:
                    continue
                inner = rank or a.shape[0]
                wide = (to_b.shape[2], inner, inner, to_a.shape[3])
                if (*b.shape, *a.shape) != wide:
                    needed = f"{[*wide[:2]]} and {[*wide[2:]]}"
                    found = f"{[*b.shape]} and {[*a.shape]}"
                    wrong.append(f"its weights B and A of {part} are {found}, not {needed}")
    return _Fit(len(given), frozenset(given.keys() - layers.keys()), frozenset(missing), wrong)


def _pairs(weights: Any) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield the matrices A and B of each part of a layer."""
    if isinstance(weights.lora_a, list):
        return zip(weights.lora_a, weights.lora_b, strict=True)
    return iter([(weights.lora_a, weights.lora_b)])


def _same(row: torch.Tensor, other: torch.Tensor) -> bool:
    likely = other > -15.0
    return bool((row - other)[likely].abs().max() < SAME_ROW)
