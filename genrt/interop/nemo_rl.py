"""NeMo-RL's generation interface over a runtime: its dictionaries, its configuration, its refits."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from genrt.engines.weights import KVCache, SleepingPart
from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.generation import rollouts
from genrt.generation.rollouts import Rollout, RolloutOptions, is_per_sample
from genrt.interop.trainers import WeightSyncClient
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_int, named, shown
from genrt.questions.arguments import check_seed, seed_at
from genrt.runtime.batcher import Pending
from genrt.runtime.weights import UpdateOptions, WeightsSource

__all__ = ["NemoGeneration"]

COPIED = ("max_new_tokens", "temperature", "top_p")
OPTIONAL = ("stop_strings", "stop_token_ids", "bad_words", "ignore_eos")
HINT = "has none: use update_weights_from_collective, …_from_ipc_handles or …_from_tensors"


class CollectiveSenderSpec(NamedTuple):
    """How a trainer sends tensors by NCCL, so that vLLM receives them."""

    nccl_peer: str = "vllm"
    buffer_size_bytes: int = 2**30
    num_buffers: int = 2


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise EngineUnsupported(f"{name} needs a transfer of NeMo-RL's own, and genrt {HINT}")

    return refuse


class NemoGeneration:
    """A ``GenerationInterface`` of NeMo-RL, by its methods and its dictionaries.

    A batch has ``input_ids`` and ``input_lengths``. It may have ``stop_strings``, in addition to those of
    ``config``: a list (or ``None``) for each sample, or a list for all. Other fields are ignored. With a
    ``seed``, sample ``i`` of all calls so far has seed ``seed + i``: two calls never share one.

    The engine is in this process: calls block. Methods that return Ray's references in NeMo-RL return an
    empty list, which ``ray.get`` accepts. Errors are raised, and no method returns ``False``.

    Args:
        lm: the runtime.
        config: NeMo-RL's ``policy.generation``, after ``configure_generation_config``. Entries that open
            an engine are ignored, but ``vllm_cfg.max_model_len`` must be the runtime's.
        server_url: the address of a server of this runtime, as of ``genrt.serving(lm)``.
        pending, kv_cache: how texts in progress end at a refit, as for ``AsyncLM.update_weights``: with
            ``pending="continue"``, for NeMo-RL's ``in_flight_weight_updates``, they go on.
        options: ``seed``, ``timeout``, ``sampling_mask`` and others of ``rollout``, which override
            ``config``.

    Attributes:
        cfg: the configuration.
        weight_synchronizer: an object with ``sync_weights``, which NeMo-RL calls for a refit.
        dp_openai_server_base_urls: a list with the server's address, ending in ``/v1``, or ``None``.
        device_uuids: a list with the result of ``report_device_id``.

    Raises:
        InvalidRequest: an entry of ``config`` is missing, wrong or not supported, or an option is wrong.
    """

    update_weights_via_ipc_zmq = _refused("update_weights_via_ipc_zmq")
    prepare_nccl_reshard_refit_info = _refused("prepare_nccl_reshard_refit_info")
    nccl_reshard_refit = _refused("nccl_reshard_refit")

    def __init__(
        self,
        lm: AsyncLM,
        config: Mapping[str, Any],
        *,
        server_url: str | None = None,
        pending: Pending = "finish",
        kv_cache: KVCache | None = None,
        **options: Any,
    ) -> None:
        self._lm = lm
        self._client = WeightSyncClient(lm, pending=pending, kv_cache=kv_cache)
        self._earlier: UpdateOptions = {"pending": pending, "kv_cache": kv_cache}
        self._options = given = _rollout_options(config, lm.max_model_len) | options
        stops = given.pop("stop_strings", None)
        if is_per_sample(stops):
            raise InvalidRequest(
                "stop_strings here are for all samples: give those of each with the batch"
            )
        self._stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
        self._seed = check_seed(given.pop("seed", None))
        self._is_colocated = bool(_section(config, "colocated").get("enabled"))
        self._is_asleep = False
        self._refit_info: dict[str, tuple[list[int], str]] = {}
        self.cfg = config
        self.weight_synchronizer: Any = None
        self.dp_openai_server_base_urls = [_base_url(server_url, config)]
        self.device_uuids = [self.report_device_id()]
        self.generate_text({"prompts": []})  # checks the options

    # -- texts --------------------------------------------------------------------------------

    def generate(self, data: Mapping[str, Any], *, greedy: bool = False) -> dict[str, Tensor]:
        """Return a ``GenerationOutputSpec`` for a ``GenerationDatumSpec``, blocking. ``Rollout`` has its
        tensors; ``greedy`` draws the likeliest tokens. Raises as ``rollout``, and InvalidRequest for
        missing or wrong fields."""
        return _output_of(self._rollout(data, greedy))

    async def generate_async(
        self, data: Mapping[str, Any], *, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, dict[str, Tensor]], None]:
        """Yield the number of each sample and its output, as they finish. Batches have any size. Raises
        as ``generate``; leaving early cancels the rest, as for ``rollout_samples``."""
        async with self._samples(data, greedy) as samples:
            async for number, sample in samples:
                yield number, _output_of(sample)

    def generate_text(self, data: Mapping[str, Any], *, greedy: bool = False) -> dict[str, Any]:
        """Return ``{"texts": […]}`` for the texts in ``data["prompts"]``, blocking. They include stop
        strings. Raises as ``generate``."""
        found = self._rollout(self._tokenize(data), greedy)
        return {"texts": [each.text for each in found.completions]}

    async def generate_text_async(
        self, data: Mapping[str, Any], *, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Yield the number of each prompt and ``{"texts": [text]}``, as ``generate_async``."""
        async with self._samples(self._tokenize(data), greedy) as samples:
            async for number, sample in samples:
                yield number, {"texts": [sample.completions[0].text]}

    def _rollout(self, data: Any, greedy: bool) -> Rollout:
        ids, lengths, options = self._unpack(data, greedy)
        return rollouts.rollout_sync(self._lm, ids, lengths, **options)

    def _samples(self, data: Any, greedy: bool) -> Any:
        ids, lengths, options = self._unpack(data, greedy)
        return contextlib.aclosing(rollouts.rollout_samples(self._lm, ids, lengths, **options))

    def _unpack(self, data: Any, greedy: bool) -> tuple[Tensor, Tensor, RolloutOptions]:
        """Return a batch and its options. Its samples take their seeds."""
        check_bool("greedy", greedy)
        if not isinstance(data, Mapping):
            raise InvalidRequest(f"data must be a mapping of fields, got {shown(data)}")
        if missing := [each for each in ("input_ids", "input_lengths") if each not in data]:
            raise InvalidRequest(f"data has no {missing[0]!r}")
        for name in ("vllm_images", "vllm_audios", "vllm_videos"):
            if any(map(len, data.get(name) or ())):
                raise InvalidRequest(f"rollouts take no {name}: prompts are token ids")
        ids, lengths = data["input_ids"], data["input_lengths"]
        options = {**self._options, "stop_strings": self._join_stops(data.get("stop_strings"))}
        if greedy:
            options["temperature"] = 0.0
        if self._seed is not None:
            options["seed"] = self._seed
            count = len(ids) if isinstance(ids, Tensor) and ids.dim() else 0
            self._seed = seed_at(self._seed, count)
        return ids, lengths, cast("RolloutOptions", options)

    def _join_stops(self, stops: Any) -> Any:
        if stops is None:
            return self._stops
        if is_per_sample(stops):
            return [self._join_stops(each) for each in stops]
        more = [stops] if isinstance(stops, str) else stops
        return [*self._stops, *more] if isinstance(more, list | tuple) else more

    def _tokenize(self, data: Any) -> dict[str, Any]:
        prompts = data.get("prompts") if isinstance(data, Mapping) else None
        if not isinstance(prompts, list) or not all(isinstance(each, str) for each in prompts):
            raise InvalidRequest(f"data must have 'prompts', a list of texts, got {shown(data)}")
        rows = [torch.tensor(self._lm.encode(each), dtype=torch.int64) for each in prompts]
        ids = (
            pad_sequence(rows, True, self._options["pad_value"])
            if rows
            else torch.empty((0, 0)).long()
        )
        return {**data, "input_ids": ids, "input_lengths": torch.tensor([*map(len, rows)]).long()}

    # -- the engine ---------------------------------------------------------------------------

    def prepare_for_generation(self, *, tags: Collection[SleepingPart] | None = None) -> bool:
        """Wake a colocated engine, as ``wake_up``. Idempotent."""
        if self._is_colocated:
            self.wake_up(tags=tags)
        return True

    def finish_generation(self, *, release_gpu: bool = True) -> bool:
        """Put a colocated engine to sleep. Without ``release_gpu``, and for any other engine, drop the
        prefix cache. Idempotent."""
        if not check_bool("release_gpu", release_gpu) or not self._is_colocated:
            return self.reset_prefix_cache()
        self.sleep()
        return True

    def sleep(self) -> None:
        """Free the GPU's memory: ``generate`` raises EngineFailed until ``wake_up``. Idempotent; raises
        as ``AsyncLM.sleep``."""
        if not self._is_asleep:
            self._lm.sleep_sync(asked="raise")
            self._is_asleep = True

    def wake_up(self, *, tags: Collection[SleepingPart] | None = None) -> None:
        """End a sleep; ``tags=["weights"]`` wakes the weights alone. Raises as ``AsyncLM.wake_up``."""
        if self._is_asleep:
            self._is_asleep = not self._lm.wake_up_sync(tags)

    def reset_prefix_cache(self) -> bool:
        """Drop all prefixes that no text in progress needs. Refits drop them too."""
        self._lm.reset_prefix_cache()
        return True

    invalidate_kv_cache = reset_prefix_cache

    def shutdown(self) -> bool:
        """Abandon a refit in progress and close the runtime. Idempotent."""
        self._client.close()
        self._lm.close()
        return True

    def blocks_training(self) -> bool:
        """Return whether trainer and engine share a GPU."""
        return self._is_colocated

    def report_device_id(self) -> list[str]:
        """Return the UUID of this process's GPU, or "cpu"."""
        if self._lm.device.type != "cuda":
            return [str(self._lm.device)]
        return [f"GPU-{torch.cuda.get_device_properties(self._lm.device).uuid}"]

    # -- refits -------------------------------------------------------------------------------

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Note the tensors of later refits: by name, their shape and dtype."""
        try:
            self._refit_info = {
                name: ([*map(int, shape)], str(dtype).removeprefix("torch."))
                for name, (shape, dtype) in state_dict_info.items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            what = f"must have (shape, dtype) by name, got {shown(state_dict_info)}"
            raise InvalidRequest(f"state_dict_info {what}") from error

    def get_collective_sender_spec(self) -> CollectiveSenderSpec:
        """Return how the trainer must send tensors."""
        return CollectiveSenderSpec()

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> list[Any]:
        """Connect the engine's workers to the trainer, which connects at the same time; return an empty
        list. Raises as ``WeightSyncClient.init_weight_transfer_engine``."""
        _, size, count = CollectiveSenderSpec()
        if not isinstance(ip, str):
            raise InvalidRequest(f"ip must be an address, got {shown(ip)}")
        check_int("port", port, 1, 65535)
        check_int(
            "train_world_size", train_world_size, 1, check_int("world_size", world_size, 2) - 1
        )
        address = {"master_address": ip, "master_port": port, "rank_offset": train_world_size}
        buffers = {"packed": True, "packed_buffer_size_bytes": size, "packed_num_buffers": count}
        self._client.init_weight_transfer_engine({**address, "world_size": world_size, **buffers})
        return []

    def update_weights_from_collective(self) -> list[Any]:
        """Receive all tensors by NCCL; return an empty list. Raises as ``WeightSyncClient``, and
        InvalidRequest before ``prepare_refit_info``."""
        return self._receive({})

    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> list[Any]:
        """Receive all tensors by CUDA IPC; return an empty list. For each name, ``ipc_handles`` has the
        arguments of torch's ``rebuild_cuda_tensor`` by the GPU's UUID. The trainer keeps its tensors
        until this returns. Raises as ``update_weights_from_collective``."""
        if not isinstance(ipc_handles, Mapping) or ipc_handles.keys() != self._refit_info.keys():
            raise InvalidRequest("ipc_handles must have the names of prepare_refit_info")
        if not all(isinstance(each, Mapping) for each in ipc_handles.values()):
            raise InvalidRequest("each of ipc_handles must be a mapping of GPU UUIDs")
        handles = [  # vLLM's UUIDs have no prefix
            {str(uuid).removeprefix("GPU-"): args for uuid, args in ipc_handles[name].items()}
            for name in self._refit_info
        ]
        return self._receive({"ipc_handles": handles})

    def _receive(self, more: dict[str, Any]) -> list[Any]:
        if not self._refit_info:
            raise InvalidRequest("call prepare_refit_info first: it has the names of the tensors")
        shapes, dtypes = map(list, zip(*self._refit_info.values(), strict=True))
        info = {"names": [*self._refit_info], "shapes": shapes, "dtype_names": dtypes}
        with self._client as client:  # abandons the update if a step fails
            client.start_weight_update()
            client.update_weights(info | more)
            client.finish_weight_update()
        return []

    def update_weights_from_tensors(self, source: WeightsSource) -> int:
        """Load tensors of this process, blocking; return the weights' version. ``source`` and errors are
        as for ``AsyncLM.update_weights``."""
        return self._lm.update_weights_sync(source, **self._earlier)


def _rollout_options(config: Any, max_model_len: int) -> dict[str, Any]:
    """Return the options of ``rollout`` for a configuration. Raises InvalidRequest."""
    if not isinstance(config, Mapping):
        raise InvalidRequest(f"config must be a mapping, got {shown(config)}")
    if missing := [each for each in (*COPIED, "top_k", "_pad_token_id") if each not in config]:
        raise InvalidRequest(
            f"config has no {missing[0]!r}: pass policy.generation after configure_generation_config"
        )
    own = _section(config, "vllm_cfg")
    if (length := own.get("max_model_len", max_model_len)) != max_model_len:
        raise InvalidRequest(f"max_model_len is {shown(length)}; the runtime has {max_model_len}")
    if _section(config, "vllm_kwargs").get("enable_return_routed_experts"):
        raise InvalidRequest("enable_return_routed_experts must be off: genrt returns none")
    if (transport := config.get("refit_transport")) is not None:
        raise InvalidRequest(f"refit_transport {named(transport)} must be None: genrt {HINT}")
    top_k = -1 if config["top_k"] is None else check_int("top_k", config["top_k"], -1)
    if top_k == 0:
        raise InvalidRequest("top_k must be None or -1, for no bound, or at least 1")
    options = {"pad_value": config["_pad_token_id"], "top_k": max(top_k, 0)}
    options |= {"include_stop_str_in_output": True}
    given = {name: config.get(name) for name in (*COPIED, *OPTIONAL)}
    given |= {"logprobs_mode": own.get("logprobs_mode")}
    return options | {name: value for name, value in given.items() if value is not None}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name) or {}
    if not isinstance(section, Mapping):
        raise InvalidRequest(f"{name} in config must be a mapping, got {shown(section)}")
    return section


def _base_url(url: object, config: Mapping[str, Any]) -> str | None:
    if url is None:
        if _section(config, "vllm_cfg").get("expose_http_server"):
            raise InvalidRequest(
                "expose_http_server needs server_url: the url of genrt.serving(lm)"
            )
        return None
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"server_url must be an address, http://…, got {shown(url)}")
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def _output_of(found: Rollout) -> dict[str, Tensor]:
    """Return NeMo-RL's fields. A prompt that fills the context is not ``truncated`` there."""
    return found.as_dict() | {"truncated": found.truncated & (found.generation_lengths > 0)}
