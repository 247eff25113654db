"""Replaces the weights of vLLM's model at the same addresses, so that CUDA graphs stay valid.

vLLM's layerwise reloading collects the tensors of a layer, processes them as at opening, and copies them
over the old ones. A failure leaves layers without weights: the engine is then unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from genrt.engines.vllm.process import Globals
from genrt.engines.vllm.requests import as_genrt_error
from genrt.engines.weights import Layout, NamedTensors, SleepingPart, layout_of, weight_files
from genrt.errors import EngineFailed, EngineUnsupported, InvalidWeights

HELD = "vLLM holds results of its weights, and so keeps them"


class Residency(Protocol):
    """The parts of an engine that hold results of the weights."""

    def forget_residents(self) -> bool: ...

    def forget_beside_texts(self, keeps_kv: bool) -> bool: ...

    def label_texts(self, version: int) -> None: ...


class VLLMWeights:
    """The weights in the workers of one engine, whose results ``residency`` holds. ``renew`` is called
    after vLLM has dropped all adapters."""

    def __init__(
        self,
        llm_engine: LLMEngine,
        own: Globals,
        residency: Residency,
        renew: Callable[[], None],
    ) -> None:
        self._call: Callable[..., list[Any]] = llm_engine.collective_rpc
        self._config = llm_engine.vllm_config
        self._executor = llm_engine.model_executor
        self._is_here = isinstance(self._executor, UniProcExecutor)
        self._globals = own
        self._residency, self._renew = residency, renew
        self._places: list[Any] | None = None  # the parameters' addresses, while weights are loaded
        self._loaded: set[str] = set()
        self._is_sent = False  # a trainer sends the weights; vLLM starts and ends the loading

    def layout(self) -> Layout:
        """Return the tensors of the opened checkpoint. Raises EngineUnsupported without its
        safetensors."""
        model = self._config.model_config
        is_tied = bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
        try:
            return layout_of(self.checkpoint(), [model.dtype], tied=is_tied)
        except InvalidWeights as error:
            raise EngineUnsupported(
                f"the names of the model's weights are not known: {error}"
            ) from error

    def checkpoint(self) -> list[Path]:
        """Return the opened safetensors files, in the hub's cache if the model comes from the hub."""
        name, load = self._config.model_config.model, self._config.load_config
        if load.load_format == "dummy":
            raise InvalidWeights("load_format='dummy' reads no checkpoint")
        if Path(name).is_dir():
            return weight_files(Path(name))
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = snapshot_download(
                name,
                revision=self._config.model_config.revision,
                cache_dir=load.download_dir,
                local_files_only=True,
            )
        except LocalEntryNotFoundError as error:
            raise InvalidWeights(f"{name} is not in the hub's cache") from error
        return weight_files(Path(found))

    @property
    def asleep(self) -> frozenset[SleepingPart]:
        """The parts of the memory that are free."""
        return frozenset(self._executor.sleeping_tags)

    def check_sleep(self) -> None:
        """Raise EngineUnsupported on a CPU, and without ``enable_sleep_mode``."""
        if self._config.device_config.device_type != "cuda":
            raise EngineUnsupported(
                "vLLM frees no memory on a CPU, whatever it says: pause the runtime, or close it"
            )
        if not self._config.model_config.enable_sleep_mode:
            raise EngineUnsupported(
                "vLLM was opened without its memory for sleep: load with "
                'engine_options={"enable_sleep_mode": True}'
            )

    def sleep(self, level: int) -> int:
        """Free device memory; return the number of bytes that became free."""
        with self._globals:
            before, _ = torch.cuda.mem_get_info()
            self._executor.sleep(level)
            return torch.cuda.mem_get_info()[0] - before

    def wake_up(self, parts: frozenset[SleepingPart]) -> None:
        """Allocate these parts of the memory again."""
        if parts:
            with self._globals:
                self._executor.wake_up([*parts])

    def begin(self) -> None:
        """Make vLLM forget all sequences and blocks. Raises EngineFailed if it does not."""
        if not self._residency.forget_residents():
            raise EngineFailed(HELD)

    def begin_beside_texts(self, keeps_kv: bool) -> None:
        """Begin as ``begin``, but keep the texts in progress."""
        if not self._residency.forget_beside_texts(keeps_kv):
            raise EngineFailed(HELD)

    def set_version(self, version: int) -> None:
        """Label the tokens of texts that are drawn from now on."""
        self._residency.label_texts(version)

    def load(self, tensors: NamedTensors) -> None:
        """Load tensors from any device. The caller may change them afterwards."""
        with self._globals:
            _synchronize()  # another stream may have computed them
            if self._places is None:
                self._places = self._call(_begin_reload)
            if self._is_here:
                self._loaded.update(*self._call(_load_tensors, args=(tensors,)))
            else:  # send one tensor at a time to the other processes
                for name, tensor in tensors:
                    self._loaded.update(*self._call(_load_tensors, args=([(name, tensor.cpu())],)))
            _synchronize()

    def check_receives(self) -> None:
        """Raise EngineUnsupported without vLLM's ``weight_transfer_config``."""
        if self._config.weight_transfer_config is None:
            raise EngineUnsupported(
                "vLLM was opened without its weight transfer: load with "
                'engine_options={"weight_transfer_config": {"backend": "nccl"}}, or "ipc"'
            )

    def connect(self, init_info: Mapping[str, Any]) -> None:
        """Connect the workers to a trainer. ``init_info`` is for vLLM's ``WeightTransferEngine``."""
        given = {"init_info": dict(init_info)}
        try:
            with self._globals:
                self._call("init_weight_transfer_engine", kwargs=given)
        except Exception as error:
            raise as_genrt_error(error, "vLLM's workers do not meet the trainer") from error

    def disconnect(self) -> None:
        """Disconnect the workers from the trainer."""
        with self._globals:
            self._call("shutdown_weight_transfer_engine")

    def receive(self, update_info: Any) -> None:
        """Receive tensors from the trainer; return when they are on the device."""
        with self._globals:
            if self._places is None:
                self._places, self._is_sent = self._call(_places), True
                self._call("start_weight_update")
            self._call("update_weights", kwargs={"update_info": update_info})
            _synchronize()

    def finish(self) -> None:
        """Make the model compute with the new weights. Raises EngineFailed if vLLM did not load all of
        them, or moved some. A trainer may leave out whole layers, which keep their old weights."""
        places, self._places = self._places, None
        loaded, self._loaded = self._loaded, set()
        is_sent, self._is_sent = self._is_sent, False
        with self._globals:
            if is_sent:
                self._call("finish_weight_update")
            ends = self._call(_reset if is_sent else _finish_reload)
            self._renew()
        for before, (after, names) in zip(places or (), ends, strict=True):
            if before != after:
                raise EngineFailed("vLLM has put weights elsewhere, where no CUDA graph finds them")
            if is_sent or self._config.model_config.quantization is not None:
                continue
            if left := names - loaded:
                raise EngineFailed(f"vLLM did not take the weights of {sorted(left)[0]}")
        _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _begin_reload(worker: Any) -> dict[str, int]:
    """Start collecting weights in a worker; return the parameters' addresses."""
    places = _places(worker)
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.get_model())
    return places


@torch.no_grad()
def _load_tensors(worker: Any, tensors: NamedTensors) -> set[str]:
    """Load checkpoint tensors into a worker's model; return the names of the loaded parameters."""
    with set_current_vllm_config(worker.vllm_config):
        return set(worker.get_model().load_weights(iter(tensors)) or ())


def _finish_reload(worker: Any) -> tuple[dict[str, int], set[str]]:
    """Finish loading in a worker; return the parameters' addresses and checkpoint names."""
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.vllm_config.model_config)
    return _reset(worker)


def _reset(worker: Any) -> tuple[dict[str, int], set[str]]:
    """Drop a worker's caches of the old weights; return the same as ``_finish_reload``."""
    runner, model = worker.model_runner, worker.get_model()
    _repack_tied(model)
    runner.reset_lora_state()  # adapters are loaded again with the next request for each
    runner.reset_encoder_cache()
    runner.reset_mm_cache()
    names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    return _places(worker), names


def _repack_tied(model: torch.nn.Module) -> None:
    """Pack the weights of tied layers again. On CPUs a layer multiplies by a packed copy, and vLLM's
    reloading renews only that of the layer that is loaded, not that of an output head tied to it."""
    seen: set[int] = set()
    module: Any
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not hasattr(module, "cpu_linear") or not weight.numel():
            continue
        if id(weight) in seen:
            module.quant_method.process_weights_after_loading(module)
        seen.add(id(weight))


def _places(worker: Any) -> dict[str, int]:
    found: dict[str, Tensor] = dict(worker.get_model().named_parameters())
    return {name: each.data_ptr() for name, each in found.items()}
