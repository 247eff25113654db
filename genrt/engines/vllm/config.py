"""Builds vLLM's configuration, requests and parameters, and translates its errors to genrt's."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from genrt.engines.protocol import failure
from genrt.engines.vllm.capture import TICKET, CaptureV1, CaptureV2, WorkerRows
from genrt.engines.vllm.open_scheduler import OPEN, OpenScheduler
from genrt.engines.vllm.positions import FIRST
from genrt.engines.vllm.rank import LAUNCHED
from genrt.engines.vllm.reasoning import NO_TOKENIZER, ReasoningParsers
from genrt.engines.vllm.structures import check_structures_config
from genrt.errors import EngineDied, EngineUnsupported, GenrtError, InvalidRequest, ModelNotFound
from genrt.models import offline_advice

__all__ = [
    "check_version",
    "configure",
    "core_request",
    "on_loopback",
    "reserved_share",
    "rounding",
    "row_params",
    "translated",
    "without_layers",
]

SUPPORTED = ((0, 32), (0, 34))
"""The supported versions of vLLM: from the first version up to, but without, the second."""

GLOO = "GLOO_SOCKET_IFNAME"

CPU_DEFAULTS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 2 * 2**30}
"""On a CPU, compiling costs more time than it saves, and vLLM would take most of the memory."""


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make torch's gloo listen on the loopback interface; vLLM uses gloo for groups of one process.
    gloo reads the interface from the environment. A value that the user has set stays."""
    if GLOO in os.environ:
        yield
        return
    os.environ[GLOO] = "lo"
    try:
        yield
    finally:
        del os.environ[GLOO]


NOT_COMPUTED = re.compile(r"head.?size|attention backend|architectures .* not supported", re.I)
"""The errors by which vLLM refuses a model whose layers it has no kernels for."""


def check_version(version: str) -> None:
    """Raise EngineUnsupported for a version of vLLM that genrt has not been tested with."""
    low, high = SUPPORTED
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not low <= found < high:
        raise EngineUnsupported(
            f"vLLM {version} is not supported: install one from {low[0]}.{low[1]} on and below "
            f"{high[0]}.{high[1]}, which the extras genrt[cpu] and genrt[cuda] bring"
        )


def configure(
    checkpoint: str, options: dict[str, Any], reserve_bytes: int, *, residency: bool = True
) -> VllmConfig:
    """Return vLLM's configuration with genrt's processor in it; raise the errors of ``open_vllm``."""
    # A front end draws by the same law as every other question, unless the user names another one.
    defaults = {"disable_log_stats": True, "generation_config": "vllm"}
    options = {**defaults, **options, "model": checkpoint}
    options["load_format"] = _load_format(checkpoint, options.get("load_format", "auto"))
    level = os.environ.get("VLLM_LOGGING_LEVEL")
    options.setdefault("use_tqdm_on_load", level in ("DEBUG", "INFO"))
    if level is None:
        options.setdefault("log_level", "ERROR")
    if options.get("speculative_config"):
        raise EngineUnsupported("speculative decoding gives no next-token rows: leave it out")
    if "seed" in options:
        raise InvalidRequest(
            "engine_options has a seed, with which vLLM would set the generators of the whole process: "
            "give it to load(seed=…), or to the questions"
        )
    if options.get("logprobs_mode", "raw_logprobs") != "raw_logprobs":
        raise InvalidRequest(
            "engine_options has a logprobs_mode, which every question has of its own: give it to "
            "generate(logprobs_mode=…)"
        )
    if options.get("data_parallel_size", 1) != 1:
        raise EngineUnsupported("genrt has replicas of its own: genrt.load(model, replicas=N)")
    if options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) == 1:
        options.setdefault("distributed_executor_backend", UniProcExecutor)
    taken = options.get("scheduler_cls") or options.get("async_scheduling")
    is_here = options.get("distributed_executor_backend") in (UniProcExecutor, LAUNCHED)
    if residency and not taken and is_here:
        # The callers choose a step's tokens after the previous step has ended.
        options |= {"scheduler_cls": OpenScheduler, "async_scheduling": False}
    options["worker_extension_cls"] = f"{WorkerRows.__module__}.{WorkerRows.__qualname__}"
    if not torch.cuda.is_available():
        options = CPU_DEFAULTS | options
        if options.get("enable_lora"):  # the zero adapter takes a slot: see lora.py
            options["max_loras"] = options.get("max_loras", EngineArgs.max_loras) + 1
    mistakes: tuple[type[Exception], ...] = (TypeError, ValueError)
    if options.get("reasoning_parser"):  # unknown parser, or its marks are not tokens of the model
        mistakes += (KeyError, RuntimeError)
        if options.get("skip_tokenizer_init"):
            raise InvalidRequest(NO_TOKENIZER)
    try:
        # vLLM looks up the parser's name before it loads the plugin.
        if plugin := options.get("reasoning_parser_plugin"):
            ReasoningParserManager.import_reasoning_parser(plugin)
        config = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    except mistakes as error:
        if NOT_COMPUTED.search(str(error)):
            raise translated(error, f"vLLM could not open {checkpoint}") from error
        raise InvalidRequest(f"vLLM does not take these engine_options: {error}") from error
    except Exception as error:
        raise translated(error, f"vLLM could not open {checkpoint}") from error
    ReasoningParsers(config)  # raises before weights are loaded
    check_structures_config(config)
    if not changes_with_length(config):
        # vLLM reserves a place for the following token, which is drawn and never computed. With one more,
        # the longest context is as long as the model takes.
        config.model_config.max_model_len += 1
    # Add an eighth for rows, which would otherwise wait for a text to end.
    texts = config.scheduler_config.max_num_seqs
    config.scheduler_config.max_num_seqs = texts + max(1, texts // 8)
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        config.cache_config.gpu_memory_utilization -= reserved_share(
            total,
            cache_bytes=reserve_bytes,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            vocab_size=config.model_config.get_vocab_size(),
        )
    config.model_config.seed = None  # the workers read it: None leaves all random generators alone
    if config.scheduler_config.scheduler_cls is OpenScheduler:
        config.scheduler_config.async_scheduling = can_be_ahead(config)
    config.model_config.logits_processors = [
        *(config.model_config.logits_processors or ()),
        CaptureV2 if config.use_v2_model_runner else CaptureV1,
    ]
    return config


def changes_with_length(config: VllmConfig) -> bool:
    """Return whether vLLM computes the model otherwise from some ``max_model_len`` on, so that one more
    could give another law: Phi 3's long factors of RoPE, Llama 4's temperatures of attention."""
    text = config.model_config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    return "longrope" in str(rope) or str(getattr(text, "model_type", "")).startswith("llama4")


def can_be_ahead(config: VllmConfig) -> bool:
    """Return whether steps of texts may be scheduled ahead. Runner V2 reads every next token from the
    device, so callers can choose tokens too; V1 cannot receive a caller's token then."""
    return bool(config.use_v2_model_runner)


def _load_format(checkpoint: str, given: str) -> str:
    """Return the requested load format; refuse formats with which vLLM may unpickle weights."""
    if given in ("pt", "npcache"):
        raise InvalidRequest(
            f"load_format={given!r} unpickles weights, which can run code: convert them to safetensors"
        )
    if given not in ("auto", "hf"):
        return given
    directory = Path(checkpoint)
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        raise ModelNotFound(
            f"{checkpoint} has no weights in safetensors; pickled ones are not loaded: convert them"
        )
    return "safetensors"


def reserved_share(total: int, *, cache_bytes: int, max_num_seqs: int, vocab_size: int) -> float:
    """Return the share of a device's ``total`` bytes that vLLM must leave free: for the row cache, and
    for three copies of a full step's rows (as computed, as cached, as returned to callers)."""
    return (cache_bytes + 3 * 4 * max_num_seqs * vocab_size) / total


def rounding(config: VllmConfig) -> float:
    """Return the relative rounding error of the model's dtype, or at least bfloat16's where weights or
    the KV cache are quantized."""
    plain = ("auto", "float32", "float16", "bfloat16")
    quantized = config.model_config.quantization or config.cache_config.cache_dtype not in plain
    return float(torch.finfo(torch.bfloat16 if quantized else config.model_config.dtype).eps)


LOGPROBS = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    seed=0,  # without a seed the V2 runner would draw one from numpy's global generator
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
"""The parameters of a request for a row: one greedy token, which is not read."""


def without_layers(config: VllmConfig) -> VllmConfig:
    """Return a copy of the configuration without the model's layers. vLLM stores the layers of an open
    model in it, with weights and KV cache, and front ends may send it to another process. Its
    ``max_model_len`` is the model's."""
    found = copy(config)
    if not changes_with_length(config):
        found.model_config = copy(config.model_config)
        found.model_config.max_model_len -= 1
    found.compilation_config = copy(config.compilation_config)
    found.compilation_config.static_forward_context = {}
    return found


def row_params(ticket: int, *, open_for: int | None, first: int | None = None) -> SamplingParams:
    """Return the sampling parameters of a request for the row with this ticket.

    Args:
        open_for: the most tokens for which the request stays open; ``None`` if it ends with the row.
        first: the first wanted position of a score.
    """
    params = copy(LOGPROBS)
    params.extra_args = {TICKET: ticket}
    if first is not None:
        params.extra_args[FIRST] = first
    if open_for is not None:
        params.extra_args[OPEN] = True
        params.max_tokens = open_for
    return params


def translated(error: Exception, what: str) -> GenrtError:
    """Return an error of vLLM or torch as one of genrt's, with the original as its cause."""
    if isinstance(error, GenrtError):
        return error
    kind: type[GenrtError]
    if isinstance(error, VLLMValidationError):
        kind = InvalidRequest
    elif isinstance(error, EngineDeadError):
        kind = EngineDied
    elif isinstance(error, OSError) and not isinstance(error, ConnectionError):
        kind = ModelNotFound
    elif NOT_COMPUTED.search(str(error)):
        kind = EngineUnsupported
    else:
        return failure(error, what)
    advice = offline_advice() if kind is ModelNotFound else ""
    if kind is EngineUnsupported:
        advice = '. genrt.load(…, engine="transformers") computes such models, more slowly'
    translated = kind(f"{what}: {type(error).__name__}: {error}{advice}")
    translated.__cause__ = error
    return translated


def core_request(
    request_id: str, token_ids: Sequence[int], params: SamplingParams, lora: LoRARequest | None
) -> EngineCoreRequest:
    """Return a request in the form that vLLM's core takes."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )
