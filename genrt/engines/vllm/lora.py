"""Loads LoRA adapters into vLLM, and unloads them when no request needs them.

Rules:
    Every version of an adapter has its own name and number in vLLM, whose prefix cache uses the name.
    A removed adapter stays until the last request bound to it has ended.

In a step that mixes base and adapter requests, vLLM's CPU build (0.32) computes the base requests with
the adapter in its last slot. So base requests there run with vLLM's zero adapter.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.request import LoRARequest

from genrt.engines.adapters import CONFIG_NAME
from genrt.errors import InvalidAdapter, UnknownAdapter
from genrt.questions.arguments import Adapter

PARTIAL = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Options by which an adapter leaves out some layers of its ``target_modules``."""


class VLLMAdapters:
    """The adapters of one vLLM engine, by its ``engine_core`` client; ``enabled`` if it was opened with
    adapters."""

    def __init__(self, core: Any, *, enabled: bool, base_needs_zero: bool) -> None:
        self._core = core
        self._enabled = enabled
        self._numbers = itertools.count(1)
        self._loaded: dict[Adapter, LoRARequest] = {}
        self._users: collections.Counter[Adapter] = collections.Counter()
        self._removed: set[Adapter] = set()
        self._base: LoRARequest | None = None
        if enabled and base_needs_zero:
            self._base = self._request("zero")
            self.load_zero()

    def check_enabled(self) -> None:
        """Raise InvalidAdapter if vLLM was opened without adapters."""
        if not self._enabled:
            raise InvalidAdapter(
                'vLLM was opened without adapters: load with engine_options={"enable_lora": True, '
                '"max_loras": …, "max_lora_rank": …}'
            )

    def load_zero(self) -> None:
        """Load the zero adapter, if there is one: it has no files from which vLLM could load it again."""
        if self._base is not None:
            self._core.collective_rpc(_add_zero, None, (self._base,), None)

    def add(self, adapter: Adapter, path: Path) -> None:
        """Load an adapter from a directory that ``check_adapter_directory`` has accepted. Raises
        InvalidAdapter if vLLM does not take it, or if some of its weights do not fit the model."""
        config = json.loads((path / CONFIG_NAME).read_bytes())
        loaded = self._request(str(path))
        try:
            taken = self._core.add_lora(loaded)
        except Exception as error:
            raise InvalidAdapter(f"vLLM does not take adapter {adapter.name}: {error}") from error
        if not taken:
            raise InvalidAdapter(f"vLLM does not take adapter {adapter.name}")
        self._loaded[adapter] = loaded
        if (reason := self._misfit(loaded.lora_int_id, config)) is not None:
            raise InvalidAdapter(f"adapter {adapter.name} does not fit the model: {reason}")

    def _request(self, directory: str) -> LoRARequest:
        number = next(self._numbers)
        return LoRARequest(f"genrt-{number}", number, directory)

    def _misfit(self, number: int, config: Mapping[str, Any]) -> str | None:
        """Return why a loaded adapter does not fit the model; ``None`` if it fits."""
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

    def request(self, adapter: Adapter | None) -> LoRARequest | None:
        """Return vLLM's handle of an adapter; ``None`` for a base request without a zero adapter. Raises
        UnknownAdapter if it is not loaded, or has been removed."""
        if adapter is None:
            return self._base
        if adapter not in self._loaded or adapter in self._removed:
            raise UnknownAdapter(f"no adapter {adapter.name!r} is loaded; load it with add_adapter")
        return self._loaded[adapter]

    def hold(self, adapter: Adapter) -> None:
        """Keep an adapter loaded for a request in progress, until ``release``."""
        self._users[adapter] += 1

    def release(self, adapter: Adapter) -> None:
        """Undo one ``hold``; unload a removed adapter with its last request."""
        self._users[adapter] -= 1
        if self._users[adapter] == 0:
            del self._users[adapter]
            if adapter in self._removed:
                self._unload(adapter)

    def remove(self, adapter: Adapter) -> None:
        """Unload an adapter when its last request has ended; ignore an unknown one."""
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
        self._core = None


def _add_zero(worker: Any, lora: LoRARequest) -> None:
    """Load a zero adapter, which stays loaded. It takes no slot of a step without base requests: vLLM's
    scheduler gives all slots to other adapters then."""
    manager = worker.model_runner.lora_manager
    manager.add_dummy_lora(lora, rank=1)
    manager._adapter_manager._pin_lora_in_cpu_cache(lora.lora_int_id)


class _Fit(NamedTuple):
    """How an adapter's weights fit the layers of one worker."""

    taken: int  # the number of layers with weights
    strange: frozenset[str]  # weights without a layer
    missing: frozenset[str]  # layers without weights
    wrong: list[str]  # messages about wrong shapes


def _fit(worker: Any, number: int, rank: int | None) -> _Fit:
    """Return how a loaded adapter fits a worker's layers. ``rank`` is the rank of all its weights."""
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
        matrices = (weights.lora_a, weights.lora_b)
        of_parts = [each if isinstance(each, list) else [each] for each in matrices]
        pairs: list[tuple[Tensor | None, Tensor | None]] = [*zip(*of_parts, strict=True)]
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
