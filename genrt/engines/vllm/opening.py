"""Opens vLLM: builds its configuration, starts its engine in this process and tests it."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.media import audio
from vllm.reasoning import ReasoningParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from genrt.engines.vllm.block_graphs import capturing_blocks
from genrt.engines.vllm.capture import CaptureV1, CaptureV2, WorkerRows
from genrt.engines.vllm.engine import VLLMEngine, changes_with_length
from genrt.engines.vllm.invariance import check_same_bits, check_variables
from genrt.engines.vllm.process import Globals, gloo_on_loopback, undisturbed
from genrt.engines.vllm.rank import LAUNCHED, Rank
from genrt.engines.vllm.reasoning import NO_TOKENIZER, ReasoningParsers
from genrt.engines.vllm.requests import NOT_COMPUTED, as_genrt_error
from genrt.engines.vllm.scheduler import OpenScheduler, pad_no_drafts
from genrt.engines.vllm.self_check import run_self_check
from genrt.engines.vllm.steps import shut_down
from genrt.engines.vllm.structures import check_structures_config
from genrt.errors import EngineUnsupported, InvalidRequest, ModelNotFound

SUPPORTED = ((0, 32), (0, 34))
"""The supported versions of vLLM: from the first version up to, but without, the second."""

CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2 * 2**30,
    "block_size": 32,
}
"""On a CPU, compiling costs more time than it saves, and vLLM would take most of the memory. Its blocks
of 128 tokens make steps no faster, share shorter prefixes, and lengthen the self-check."""

if (missing := getattr(audio, "_torchcodec_import_exc", None)) is not None:
    # Its traceback keeps the frames that imported vLLM, and so the engine that they open.
    missing.__traceback__ = None


def open_vllm(
    checkpoint: str,
    *,
    options: dict[str, Any],
    reserve_bytes: int = 0,
    residency: bool = True,
    deterministic: bool = False,
    rank: Rank | None = None,
) -> VLLMEngine:
    """Open a checkpoint directory, or a model by name, with options for vLLM's ``EngineArgs``.

    On a GPU, vLLM leaves ``reserve_bytes`` of memory free. Without ``residency``, or if vLLM's workers
    are other processes, or if ``options`` names a scheduler or asynchronous scheduling, every question
    opens its own request. With ``deterministic``, rows have the same bits whatever the batch. With a
    ``rank`` the engine is that rank's.

    Raises:
        InvalidRequest: vLLM does not have an option, or does not accept its value.
        ModelNotFound: vLLM finds no such model, or the model has no weights in safetensors.
        EngineUnsupported: genrt does not work with this version of vLLM, or with an option.
        EngineFailed: vLLM raised any other error; the message contains it.
    """
    check_version(vllm.__version__)
    if options.get("speculative_config") and (deterministic or rank is not None):
        where = "deterministic=True" if deterministic else "a model over several ranks"
        raise InvalidRequest(
            f"engine_options has a speculative_config, which {where} does not support: leave it out"
        )
    own = Globals()
    preload = os.environ.get("LD_PRELOAD")
    with own, gloo_on_loopback(), undisturbed():
        envs.disable_envs_cache()  # the process's first engine froze it: read the variables again
        check_variables(deterministic=deterministic)
        config = configure(checkpoint, options, reserve_bytes, residency=residency)
        if config.model_config.dtype is torch.float32:
            own.multiply_in_float32()
        executor = Executor.get_class(config) if rank is None else rank.executor(config)
        if issubclass(executor, UniProcExecutor):
            # vLLM has set LD_PRELOAD for worker processes. In any other child process the loader
            # complains if the path contains a space.
            os.environ.pop("LD_PRELOAD", None)
            if preload is not None:
                os.environ["LD_PRELOAD"] = preload
        try:
            has_residents = config.scheduler_config.scheduler_cls is OpenScheduler
            with capturing_blocks() if has_residents else nullcontext():
                llm_engine = LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)
            pad_no_drafts(llm_engine.engine_core.engine_core.scheduler)
        except Exception as error:
            _forget(config, error)
            raise as_genrt_error(error, f"vLLM could not open {checkpoint}") from error
        finally:
            envs.enable_envs_cache()  # the engines' steps read it
    try:
        engine = VLLMEngine(llm_engine, own, own_processors=bool(options.get("logits_processors")))
    except BaseException as error:
        with own:
            shut_down(llm_engine)
        del llm_engine  # the error's traceback would keep it in memory
        _forget(config, error)
        raise
    try:
        run_self_check(
            engine, rounding=rounding_error(config), block_size=config.cache_config.block_size
        )
        if deterministic:
            check_same_bits(engine, block_size=config.cache_config.block_size)
        engine.start_counting()
    except BaseException:
        engine.close()
        raise
    return engine


def _forget(config: VllmConfig, error: BaseException) -> None:
    """Free the memory of a partly made engine, which the error's frames and hooks of torch's compiler
    hold."""
    errors = [error]
    for each in errors:  # and the errors that caused them
        traceback.clear_frames(each.__traceback__)
        causes = each.__cause__, each.__context__
        errors += [cause for cause in causes if cause is not None and cause not in errors]
    for model in gc.get_objects():
        # Not isinstance: some objects warn when their ``__class__`` is read.
        is_model = issubclass(type(model), TorchCompileWithNoGuardsWrapper)
        if is_model and getattr(model, "vllm_config", None) is config:
            model.cleanup()
    gc.collect()
    torch.cuda.empty_cache()


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
    # A front end draws from the same distribution as other questions, unless the user names another.
    defaults = {"disable_log_stats": True, "generation_config": "vllm"}
    options = {**defaults, **options, "model": checkpoint}
    options["load_format"] = _load_format(checkpoint, options.get("load_format", "auto"))
    level = os.environ.get("VLLM_LOGGING_LEVEL")
    options.setdefault("use_tqdm_on_load", level in ("DEBUG", "INFO"))
    if level is None:
        options.setdefault("log_level", "ERROR")
    if drafts := options.get("speculative_config"):
        _check_drafts(dict(drafts))
        _start_numba()
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
        if options.get(
            "enable_lora"
        ):  # the zero adapter takes a slot, and stays loaded: see lora.py
            slots = options["max_loras"] = options.get("max_loras", EngineArgs.max_loras) + 1
            options["max_cpu_loras"] = (options.get("max_cpu_loras") or slots) + 1
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
            raise as_genrt_error(error, f"vLLM could not open {checkpoint}") from error
        raise InvalidRequest(f"vLLM does not take these engine_options: {error}") from error
    except Exception as error:
        raise as_genrt_error(error, f"vLLM could not open {checkpoint}") from error
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
        # For a full step's rows as computed, as cached and as returned to callers.
        rows = 3 * 4 * config.scheduler_config.max_num_seqs * config.model_config.get_vocab_size()
        config.cache_config.gpu_memory_utilization -= (reserve_bytes + rows) / total
    config.model_config.seed = None  # the workers read it: None leaves all random generators alone
    if config.scheduler_config.scheduler_cls is OpenScheduler:
        config.scheduler_config.async_scheduling = can_be_ahead(config)
    if config.use_v2_model_runner or config.speculative_config is None:
        config.model_config.logits_processors = [
            *(config.model_config.logits_processors or ()),
            CaptureV2 if config.use_v2_model_runner else CaptureV1,
        ]
    return config


def _check_drafts(speculative_config: dict[str, Any]) -> None:
    """Raise InvalidRequest for a way of verifying drafts that changes the distribution of texts."""
    method = speculative_config.get("rejection_sample_method", "standard")
    if method not in ("standard", "block"):
        raise InvalidRequest(
            f"speculative_config has the rejection_sample_method {method!r}, which changes the "
            "distribution of texts: give 'standard' or 'block'"
        )


def _start_numba() -> None:
    """Have numba, with which vLLM looks for n-grams, start its threads from a thread of its own: it sets
    the number of OpenMP threads of the one that does."""
    import numba

    thread = threading.Thread(target=numba.set_num_threads, args=(1,))
    thread.start()
    thread.join()


def can_be_ahead(config: VllmConfig) -> bool:
    """Return whether steps of texts may be scheduled ahead: whether the runner reads every next token
    from the device, so that it can receive a caller's token then."""
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


def rounding_error(config: VllmConfig) -> float:
    """Return the relative rounding error of the model's dtype, or at least bfloat16's where weights or
    the KV cache are quantized."""
    plain = ("auto", "float32", "float16", "bfloat16")
    quantized = config.model_config.quantization or config.cache_config.cache_dtype not in plain
    return float(torch.finfo(torch.bfloat16 if quantized else config.model_config.dtype).eps)
