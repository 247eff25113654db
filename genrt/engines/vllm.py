"""One vLLM engine in this process: submit/step/cancel, errors, self-test, shutdown.

Rules:
    Every vLLM call happens on the thread that opened the engine, and on vLLM's own CUDA stream; rows
    leave on the default stream, where every other thread reads them.
    A request gets a new id each time it is submitted: a late output of a cancelled one matches nothing.
    Samples leave an eighth of the running slots free, so that a logprobs
    request never waits for a long sample to end.
    After a failed step the prefix cache is emptied: its blocks may never have been written.

Private to vLLM and touched here: ``LLMEngine.engine_core`` (``add_request``, ``get_output``,
``abort_requests`` with ``EngineCoreRequest``, which spares the detokenizer), and what its shutdown is
made of. ``_self_test`` runs at start and refuses a vLLM that does not work this way.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from genrt.engine import (
    Adapter,
    EngineStatistics,
    Finished,
    LogprobsRequest,
    Request,
    SampleRequest,
)
from genrt.engines.capture import (
    TICKET,
    RemoteStore,
    RowStore,
)
from genrt.engines.vllm_adapters import VLLMAdapters
from genrt.engines.vllm_config import check_version, configure, translated
from genrt.errors import (
    EngineFailed,
    EngineUnsupported,
    InvalidAdapter,
    NotFinite,
)

__all__ = ["VLLMEngine", "open_vllm"]


def open_vllm(checkpoint: str, *, options: dict[str, Any], reserve_bytes: int = 0) -> VLLMEngine:
    """Open a checkpoint directory, or a model's name, with options for vLLM's ``EngineArgs``.

    On a GPU, ``reserve_bytes`` are left out of the memory that vLLM takes.

    Raises:
        InvalidRequest: an option that vLLM does not have, or has no such value for.
        ModelNotFound: vLLM finds no such model.
        EngineUnsupported: a version of vLLM, or an option, that genrt does not work with.
        EngineFailed: anything else that vLLM raised, with its message.
    """
    check_version(vllm.__version__)
    config = configure(checkpoint, options, reserve_bytes)
    try:
        llm_engine = LLMEngine(
            config, Executor.get_class(config), log_stats=False, multiprocess_mode=False
        )
    except Exception as error:
        raise translated(error, f"vLLM could not open {checkpoint}") from error
    engine = VLLMEngine(llm_engine, own_processors=bool(options.get("logits_processors")))
    try:
        engine.self_test()
    except BaseException:
        engine.close()
        raise
    return engine


@dataclass(slots=True)
class _Progress:
    """One submitted request: its id in vLLM, its ticket, and the tokens it has drawn."""

    request: Request
    core_id: str
    ticket: int
    token_ids: list[int] = field(default_factory=list)


class VLLMEngine:
    """The Engine protocol over an ``LLMEngine`` whose scheduler runs in this process."""

    def __init__(self, llm_engine: LLMEngine, *, own_processors: bool = False) -> None:
        config = llm_engine.vllm_config
        self._llm_engine: LLMEngine | None = llm_engine
        self._core = llm_engine.engine_core
        self._config = config
        self.runner = "V2" if config.use_v2_model_runner else "V1"
        self._vocab_size = int(config.model_config.get_vocab_size())
        self._max_num_seqs = int(config.scheduler_config.max_num_seqs)
        self._max_samples = max(1, self._max_num_seqs - max(1, self._max_num_seqs // 8))
        self._device = torch.device(config.device_config.device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
            self._stream = torch.cuda.current_stream()
            torch.cuda.set_stream(torch.cuda.default_stream())
        with self._on_stream():
            self._core.collective_rpc("genrt_prepare", args=(own_processors,))
        self._store: RowStore | RemoteStore
        if isinstance(llm_engine.model_executor, UniProcExecutor):
            [self._store] = self._core.collective_rpc("genrt_store")
        else:
            self._store = RemoteStore(self._core.collective_rpc, self._device)
        self._adapters: VLLMAdapters | None = None
        if config.lora_config is not None:
            self._adapters = VLLMAdapters(self._core, base_needs_twin=self._device.type == "cpu")
        self._numbers = itertools.count(1)
        self._by_request: dict[Request, _Progress] = {}
        self._by_core_id: dict[str, _Progress] = {}
        self._waiting_samples: dict[SampleRequest, None] = {}
        self._samples = 0
        self._ended: list[Finished] = []
        self._statistics = EngineStatistics()

    # -- what it is ---------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """One less than vLLM's: its scheduler keeps a place for the token that follows."""
        return int(self._config.model_config.max_model_len) - 1

    @property
    def max_batch_size(self) -> int:
        return self._max_num_seqs

    @property
    def device(self) -> torch.device:
        return self._device

    @cached_property
    def tokenizer(self) -> Any:
        if self._llm_engine is None or self._config.model_config.skip_tokenizer_init:
            return None
        return self._llm_engine.get_tokenizer()

    def statistics(self) -> EngineStatistics:
        return self._statistics

    # -- submit, step, cancel -----------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if isinstance(request, SampleRequest):
                self._waiting_samples[request] = None
            else:
                self._add(request)
        self._count(requests=len(requests))
        self._admit_samples()

    def _admit_samples(self) -> None:
        while self._waiting_samples and self._samples < self._max_samples:
            request = next(iter(self._waiting_samples))
            del self._waiting_samples[request]
            self._samples += self._add(request)

    def _add(self, request: Request) -> bool:
        """Hand one request to vLLM; an error of its own ends it at the next step. True if vLLM has it."""
        number = next(self._numbers)
        progress = _Progress(request, str(number), number)
        try:
            params = _sampling_params(request, number)
            lora = self._adapters.request(request.adapter) if self._adapters is not None else None
            with self._on_stream():
                self._core.add_request(_core_request(progress, params, lora))
        except Exception as error:
            refused = translated(error, "vLLM does not take this request")
            self._ended.append(Finished(request, error=refused))
            self._count(failed=1)
            return False
        if self._adapters is not None:
            self._adapters.hold(request.adapter)
        self._by_request[request] = self._by_core_id[progress.core_id] = progress
        return True

    def step(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        if not self._by_core_id:
            return ended
        started = time.perf_counter()
        try:
            with self._on_stream():
                outputs = self._core.get_output().outputs
            finished = self._collect(outputs)
        except Exception as error:
            failed = len(self._by_request) + len(self._waiting_samples)
            self._recover()
            self._count(failed=failed, steps=1, seconds=time.perf_counter() - started)
            raise translated(error, "the forward failed") from error
        self._count(steps=1, seconds=time.perf_counter() - started)
        self._admit_samples()
        return ended + finished

    def _collect(self, outputs: Sequence[Any]) -> list[Finished]:
        """What a step's outputs end, with rows on the default stream."""
        finished: list[Finished] = []
        with_rows: list[_Progress] = []
        computed = sampled = 0
        for output in outputs:
            progress = self._by_core_id.get(output.request_id)
            if progress is None:
                continue
            prefill = output.prefill_stats
            computed += (
                len(output.new_token_ids) if prefill is None else prefill.num_computed_tokens
            )
            if isinstance(progress.request, SampleRequest):
                progress.token_ids += output.new_token_ids
                sampled += len(output.new_token_ids)
            if output.finish_reason is None:
                continue
            self._release(progress)
            if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                reason = f"vLLM ended the request with {output.finish_reason}"
                finished.append(Finished(progress.request, error=EngineFailed(reason)))
            elif isinstance(progress.request, LogprobsRequest):
                with_rows.append(progress)
            else:
                stopped = output.finish_reason == FinishReason.STOP
                token_ids = progress.token_ids[:-1] if stopped else progress.token_ids
                finished.append(Finished(progress.request, tuple(token_ids)))
        rows = self._store.take([p.ticket for p in with_rows]) if with_rows else []
        for progress, row in zip(with_rows, rows, strict=True):
            finished.append(
                Finished(progress.request, error=_not_finite())
                if row is None
                else Finished(progress.request, row)
            )
        self._count(
            rows=sum(row is not None for row in rows),
            failed=sum(end.error is not None for end in finished),
            sampled_tokens=sampled,
            computed_tokens=computed,
            bytes_to_host=0 if isinstance(self._store, RowStore) else sum(map(_bytes, rows)),
        )
        return finished

    def cancel(self, requests: Sequence[Request]) -> None:
        wanted = set(requests)
        before = len(self._ended) + len(self._waiting_samples)
        self._ended = [end for end in self._ended if end.request not in wanted]
        for request in [r for r in self._waiting_samples if r in wanted]:
            del self._waiting_samples[request]
        here = [self._by_request[r] for r in wanted if r in self._by_request]
        gone = before - len(self._ended) - len(self._waiting_samples) + len(here)
        if here:
            with self._on_stream():
                self._core.abort_requests([progress.core_id for progress in here])
            for progress in here:
                self._release(progress)
            self._store.forget([progress.ticket for progress in here])
        self._count(cancelled=gone)

    def _release(self, progress: _Progress) -> None:
        del self._by_request[progress.request]
        del self._by_core_id[progress.core_id]
        self._samples -= isinstance(progress.request, SampleRequest)
        if self._adapters is not None:
            self._adapters.release(progress.request.adapter)

    def _recover(self) -> None:
        """Forget everything after a failed step, so that the next one finds vLLM clean.

        Raises:
            EngineFailed: vLLM's blocks can't be freed: this engine can't go on.
        """
        progresses = list(self._by_request.values())
        self._waiting_samples.clear()
        with self._on_stream():
            self._core.abort_requests([progress.core_id for progress in progresses])
        for progress in progresses:
            self._release(progress)
        self._store.forget([progress.ticket for progress in progresses])
        if not self._core.reset_prefix_cache():
            raise EngineFailed(
                "vLLM still holds blocks of requests that were aborted; load it again"
            )

    # -- adapters -----------------------------------------------------------------------------

    def add_adapter(self, adapter: Adapter, path: Path) -> None:
        if self._adapters is None:
            raise InvalidAdapter(
                'vLLM was opened without adapters: load with engine_options={"enable_lora": True, '
                '"max_loras": …, "max_lora_rank": …}'
            )
        try:
            with self._on_stream():
                self._adapters.add(adapter, path)
            self._adapters.check_base(adapter, self._probe, self._unused_context())
        except BaseException:
            self.remove_adapter(adapter)
            raise

    def remove_adapter(self, adapter: Adapter) -> None:
        if self._adapters is not None:
            with self._on_stream():
                self._adapters.remove(adapter)

    # -- self-test, close ---------------------------------------------------------------------

    def self_test(self) -> None:
        """Ask for a few rows, alone and in company, and compare.

        Raises:
            EngineUnsupported: they are not rows, or a row depends on its place in the batch.
        """
        contexts = [(0,), (1 % self._vocab_size,), (1 % self._vocab_size, 0)]
        try:
            alone = [self._probe([LogprobsRequest(c)])[0] for c in contexts]
            company = self._probe([LogprobsRequest(c) for c in reversed(contexts)])[::-1]
        except NotFinite:  # a model with broken weights is the caller's to find
            return
        total = torch.stack(alone).double().logsumexp(dim=-1)
        if alone[0].shape != (self._vocab_size,) or not torch.allclose(
            total, torch.zeros_like(total), atol=1e-3
        ):
            raise EngineUnsupported(
                "vLLM's logits are no log-probabilities over the vocabulary: rows of shape "
                f"{tuple(alone[0].shape)} for vocab_size={self._vocab_size}"
            )
        self._statistics = EngineStatistics()
        for mine, other in ((0, 1), (1, 2), (2, 0)):
            apart = float((alone[mine] - alone[other]).abs().nan_to_num().max())
            moved = float((alone[mine] - company[mine]).abs().nan_to_num().max())
            if moved > 0.5 * apart and moved > 0.5:
                raise EngineUnsupported(
                    "vLLM's rows did not come back to the requests that asked for them: a row in "
                    f"company differs by {moved:.3g} from the same row alone"
                )

    def _probe(self, requests: Sequence[LogprobsRequest]) -> list[torch.Tensor]:
        """Rows the engine asks for itself; what else finishes meanwhile comes with the next step."""
        self.submit(requests)
        rows: dict[Request, torch.Tensor] = {}
        others: list[Finished] = []
        while len(rows) < len(requests):
            for end in self.step():
                if end.request not in requests:
                    others.append(end)
                elif isinstance(end.result, torch.Tensor):
                    rows[end.request] = end.result
                elif end.error is not None:
                    raise end.error
        self._ended += others
        return [rows[request] for request in requests]

    def _unused_context(self) -> tuple[int, ...]:
        """A context that no request in progress asks about."""
        asked = {request.token_ids for request in self._by_request}
        return next((token,) for token in range(self._vocab_size) if (token,) not in asked)

    def close(self) -> None:
        """What ``EngineCore.shutdown`` does, less the process-wide state that other engines use."""
        if self._llm_engine is None:
            return
        core = self._core.engine_core
        self._core._finalizer.detach()
        with self._on_stream():
            core.structured_output_manager.clear_backend()
            core.model_executor.shutdown()
            core.scheduler.shutdown()
        if self._adapters is not None:
            self._adapters.close()
        self._by_request.clear()
        self._by_core_id.clear()
        self._waiting_samples.clear()
        self._store = RowStore()
        self._llm_engine = self._core = None
        gc.unfreeze()
        gc.collect()
        if self._stream is not None:
            torch.cuda.empty_cache()

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _count(self, **more: float) -> None:
        old = self._statistics
        self._statistics = replace(old, **{k: getattr(old, k) + n for k, n in more.items()})


LOGPROBS = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
"""How vLLM is asked for a row: one greedy token, which nobody reads."""


def _sampling_params(request: Request, ticket: int) -> SamplingParams:
    if isinstance(request, LogprobsRequest):
        params = copy(LOGPROBS)
        params.extra_args = {TICKET: ticket}
        return params
    return SamplingParams(
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        ignore_eos=True,
        detokenize=False,
    )


def _core_request(progress: _Progress, params: SamplingParams, lora: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=progress.core_id,
        prompt_token_ids=list(progress.request.token_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _not_finite() -> NotFinite:
    return NotFinite(
        "the model's logits for this context are NaN, +inf or all -inf: check the weights and dtype"
    )


def _bytes(row: torch.Tensor | None) -> int:
    return 0 if row is None else row.numel() * row.element_size()
