"""Opens vLLM: builds its configuration, starts its engine in this process and tests it."""

from __future__ import annotations

import gc
import os
import traceback
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig
from vllm.multimodal.media import audio
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from genrt.engines.vllm.config import check_version, configure, on_loopback, rounding, translated
from genrt.engines.vllm.core_steps import shut_down
from genrt.engines.vllm.engine import VLLMEngine
from genrt.engines.vllm.globals import Globals
from genrt.engines.vllm.process import undisturbed
from genrt.engines.vllm.rank import Rank
from genrt.engines.vllm.self_check import self_test
from genrt.engines.vllm.signatures import check_signatures

__all__ = ["open_vllm"]

if (missing := getattr(audio, "_torchcodec_import_exc", None)) is not None:
    # Its traceback keeps the frames that imported vLLM, and so the engine that they open.
    missing.__traceback__ = None


def open_vllm(
    checkpoint: str,
    *,
    options: dict[str, Any],
    reserve_bytes: int = 0,
    residency: bool = True,
    rank: Rank | None = None,
) -> VLLMEngine:
    """Open a checkpoint directory, or a model by name, with options for vLLM's ``EngineArgs``.

    On a GPU, vLLM leaves ``reserve_bytes`` of memory free. Without ``residency`` every question opens its
    own request. The same holds where vLLM's workers are other processes, or where ``options`` names a
    scheduler or asynchronous scheduling. With a ``rank`` the engine is that rank's.
    Raises:
        InvalidRequest: vLLM does not have an option, or does not accept its value.
        ModelNotFound: vLLM finds no such model, or the model has no weights in safetensors.
        EngineUnsupported: genrt does not work with this version of vLLM, or with an option.
        EngineFailed: vLLM raised any other error; the message contains it.
    """
    check_version(vllm.__version__)
    check_signatures(vllm.__version__)
    own = Globals()
    preload = os.environ.get("LD_PRELOAD")
    with own, on_loopback(), undisturbed():
        envs.disable_envs_cache()  # the process's first engine froze it: read the variables again
        config = configure(checkpoint, options, reserve_bytes, residency=residency)
        if config.model_config.dtype is torch.float32:
            own.multiply_in_float32()
        executor = Executor.get_class(config) if rank is None else rank.executor(config)
        if issubclass(executor, UniProcExecutor):
            # vLLM has set LD_PRELOAD for worker processes alone. In every other child process the loader
            # complains if the path contains a space.
            os.environ.pop("LD_PRELOAD", None)
            if preload is not None:
                os.environ["LD_PRELOAD"] = preload
        try:
            llm_engine = LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)
        except Exception as error:
            _forget(config, error)
            raise translated(error, f"vLLM could not open {checkpoint}") from error
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
        self_test(engine, rounding=rounding(config), block_size=config.cache_config.block_size)
        engine.start_counting()
    except BaseException:
        engine.close()
        raise
    return engine


def _forget(config: VllmConfig, error: BaseException) -> None:
    """Free the memory of a partly made engine. The error's frames hold it, and so do hooks of torch's
    compiler, which vLLM would remove together with its engine."""
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
