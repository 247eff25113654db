"""Loading: a model's name and options become a runtime, with the engine open on its thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import operator
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from genrt import models
from genrt.cluster.actors import Actors
from genrt.cluster.engine import ReplicaEngine
from genrt.cluster.options import check_replicas, gpus_of
from genrt.cluster.ranks import RANKED, are_launched, open_ranked, with_ranks
from genrt.engines import check_choice, open_engine
from genrt.engines.folders import sweep
from genrt.engines.protocol import Engine
from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, check_one_of, check_options, shown
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import run_in_thread
from genrt.runtime.thread import EngineThread

if TYPE_CHECKING:
    from genrt.engines.exact import NGram

__all__ = ["LoadOptions", "aload", "load"]

log = logging.getLogger("genrt.loading")

PROGRESS_SECONDS = 15.0
"""The interval of log messages while a model is loading."""


class LoadOptions(TypedDict, total=False):
    """The options of ``load`` and ``aload``.

    Attributes:
        engine: ``"vllm"`` (the default), ``"transformers"``, ``"exact"``, or a function that makes your
            own Engine. The function runs on the engine's thread; do not give a model or options with it.
        engine_options: for vLLM's ``EngineArgs``, or transformers' ``from_pretrained``, unchanged.
        cache_bytes: the bound of the row cache, on the engine's device; by default 256 MiB. 0 disables
            it.
        max_batch_size: the maximum number of requests in one flush; by default no bound. A population's
            draw counts once for each sequence, here and in the queue.
        max_wait_seconds: how long a question waits for others after its loop has become idle; by default
            0.
        max_queued_requests: the maximum number of waiting requests; by default 2**16. Questions beyond
            wait for room, and event loops and threads take turns.
        max_queued_bytes: the maximum size of their contexts and masks; by default 1 GiB. A larger
            question waits for an empty queue.
        residency: whether vLLM keeps the sequences of earlier questions, which is the default. A context
            that grew by a token, shares a prefix or was cut then costs only its new tokens. Rows are the
            same up to the engine's numerics.
        restart: ``"auto"`` replaces a dead engine, and repeats the unanswered questions. A second death
            without an answer in between is final. By default later calls raise the reason, until
            ``AsyncLM.restart``.
        seed: for draws and samples without their own seed, in the order of the calls and for any
            batching. Two runtimes with one seed give equal answers to equal questions. By default the
            system gives a seed. The global generators of ``random``, numpy and torch are not used.
        deterministic: whether rows, draws and scores have the same bits whatever else is in the batch,
            with and without cached prefixes (batch-invariant); by default False. vLLM then needs
            ``VLLM_BATCH_INVARIANT=1`` in the process's environment on a GPU, and
            ``VLLM_CPU_ATTN_SPLIT_KV=0`` on a CPU. A self-test compares bits at opening. On a GPU, texts
            with top-k or top-p are refused. transformers computes one sequence a step; the exact engine
            is deterministic anyway.
        replicas: the number of engines, each in an actor of Ray (extra ``ray``). By default one engine in
            this process, or one of ranks with vLLM's ``tensor_parallel_size``. A population, and texts
            with a common beginning, stay on one replica. A replica that dies, hangs or fails is started
            again; without any replica the engine is dead. GPUs are distributed evenly; replicas with
            several GPUs do not share them. The row cache is in the host's memory. An engine function must
            be picklable.
        cluster: the Ray cluster: its address for ``ray.init``; ``"auto"`` for the running one, or else
            one on this host that ends with the runtime; ``"local"``, the default, always for the latter,
            or for the one that this process has.
    """

    engine: str | Callable[[], Engine]
    engine_options: Mapping[str, Any] | None
    cache_bytes: int
    max_batch_size: int | None
    max_wait_seconds: float
    max_queued_requests: int
    max_queued_bytes: int
    residency: bool
    restart: Literal["auto"] | None
    seed: int | None
    deterministic: bool
    replicas: int | None
    cluster: str | None


def load(
    model: str | os.PathLike[str] | NGram | None = None, **options: Unpack[LoadOptions]
) -> AsyncLM:
    """Open a model and return its runtime.

    It blocks until the engine is open. Every 15 seconds the logger ``genrt.loading`` reports that the
    model is loading, at level INFO. An interrupt abandons the loading.

    Args:
        model: a checkpoint directory, a model's name, or ``None`` for the embedded
            SmolLM2-135M-Instruct; for the exact engine, an ``NGram`` or its saved directory.
        options: see ``LoadOptions``.

    Raises:
        EngineNotInstalled, EngineUnsupported, ModelNotFound: with advice.
        InvalidRequest: an option or an engine is unknown, or an option is out of range.
    """
    check_options("load", options, LoadOptions.__annotations__)
    thread, cache = _start(model, **options)
    began = time.monotonic()
    try:
        while not concurrent.futures.wait([thread.opened], PROGRESS_SECONDS).done:
            _log_progress(model, options, began)
        return _compare_vocabulary(
            AsyncLM(thread, cache, thread.opened.result(), seed=_option_seed(options))
        )
    except BaseException:
        thread.close(wait=False)
        raise


async def aload(
    model: str | os.PathLike[str] | NGram | None = None, **options: Unpack[LoadOptions]
) -> AsyncLM:
    """Open a model as ``load`` does, without blocking the event loop. Cancelling abandons the loading."""
    check_options("load", options, LoadOptions.__annotations__)
    thread, cache = _start(model, **options)
    began, opened = time.monotonic(), asyncio.wrap_future(thread.opened)
    try:
        while not (await asyncio.wait([opened], timeout=PROGRESS_SECONDS))[0]:
            _log_progress(model, options, began)
        lm = AsyncLM(thread, cache, await opened, seed=_option_seed(options))
        return await run_in_thread(partial(_compare_vocabulary, lm))
    except BaseException:
        opened.cancel()
        thread.close(wait=False)
        raise


def _option_seed(options: LoadOptions) -> int | None:
    seed = options.get("seed")
    return None if seed is None else operator.index(seed)


def _log_progress(model: object, options: LoadOptions, began: float) -> None:
    name, engine = model or "the embedded model", options.get("engine", "vllm")
    log.info("loading %s on engine %s: %.0f s", name, engine, time.monotonic() - began)


def _start(
    model: str | os.PathLike[str] | NGram | None,
    *,
    engine: str | Callable[[], Engine] = "vllm",
    engine_options: Mapping[str, Any] | None = None,
    cache_bytes: int = 256 * 2**20,
    max_batch_size: int | None = None,
    max_wait_seconds: float = 0.0,
    max_queued_requests: int = 2**16,
    max_queued_bytes: int = 2**30,
    residency: bool = True,
    restart: str | None = None,
    seed: int | None = None,
    deterministic: bool = False,
    replicas: int | None = None,
    cluster: str | None = None,
) -> tuple[EngineThread, RowCache]:
    cache_bytes = check_int("cache_bytes", cache_bytes, 0)
    if max_batch_size is not None:
        max_batch_size = check_int("max_batch_size", max_batch_size, 1)
    max_wait_seconds = check_float("max_wait_seconds", max_wait_seconds, 0.0, math.inf)
    max_queued_requests = check_int("max_queued_requests", max_queued_requests, 1)
    max_queued_bytes = check_int("max_queued_bytes", max_queued_bytes, 1)
    if seed is not None:
        seed = check_int("seed", seed, 0)
    check_bool("residency", residency)
    check_bool("deterministic", deterministic)
    check_replicas(replicas, cluster)
    replicas = None if replicas is None else operator.index(replicas)
    check_one_of("restart", restart, ("auto", None))
    if not isinstance(engine_options, Mapping | None):
        raise InvalidRequest(
            f"engine_options must be a mapping of option names to values, got {shown(engine_options)}"
        )
    if callable(engine) and (model is not None or engine_options):
        raise InvalidRequest(
            "model and engine_options are for engines opened by name: a function that makes an engine "
            "must bring its own"
        )
    with contextlib.suppress(TypeError):  # not a path
        try:
            os.fsencode(cast("Any", model))
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"model must be a path that a file can have: {error.reason}"
            ) from error
    options = dict(engine_options or {})
    if not callable(engine):
        check_choice(engine, model, options)
    if deterministic:
        _check_deterministic(engine, options)
    if engine == "vllm" and residency:
        options = with_ranks(options)
    if is_ranked := engine == "vllm" and are_launched(options):
        replicas = replicas or 1  # ranks die together, with their process

    def opened() -> Engine:
        sweep()
        if callable(engine):
            make: Callable[[], Engine] = partial(_make_engine, engine)
        else:
            found = model if engine == "exact" else models.resolve(cast("Any", model))
            # The cache is on the engine's device, or in host memory for engines of other processes.
            reserved = cache_bytes if replicas is None else 0
            make = partial(
                open_engine,
                engine,
                found,
                options,
                reserve_bytes=reserved,
                residency=residency,
                deterministic=deterministic,
            )
            if is_ranked:
                make = partial(open_ranked, str(found), options, residency=residency)
        if replicas is None:
            return make()
        actors = Actors(
            partial(load, engine=make, cache_bytes=0),
            cluster or "local",
            replicas=replicas,
            gpus=0 if engine == "exact" else gpus_of(options),
            environment=RANKED if is_ranked else {},
            is_vllm=engine == "vllm",
        )
        return ReplicaEngine(actors, replicas)

    cache = RowCache(cache_bytes)
    thread = EngineThread(
        opened,
        cache,
        restarts=restart == "auto",
        max_batch_size=max_batch_size,
        max_wait_seconds=max_wait_seconds,
        max_queued_requests=max_queued_requests,
        max_queued_bytes=max_queued_bytes,
    )
    return thread, cache


def _check_deterministic(engine: str | Callable[[], Engine], options: Mapping[str, Any]) -> None:
    """Raise unless ``deterministic`` may be True for this engine and these options."""
    if callable(engine):
        raise InvalidRequest("deterministic is for engines opened by name: leave it out")
    if engine == "transformers" and options.get("max_batch_size", 1) != 1:
        raise InvalidRequest(
            "deterministic=True computes one sequence a step: leave max_batch_size out"
        )
    if engine == "vllm" and gpus_of(options) > 1:
        raise EngineUnsupported(
            "deterministic=True: sums over several GPUs have no self-test: leave tensor_parallel_size "
            "and pipeline_parallel_size out"
        )
    if engine == "vllm" and options.get("enable_lora"):
        raise EngineUnsupported(
            "deterministic=True: the kernels of adapters have no self-test: leave enable_lora out, and "
            "load merged weights"
        )


def _make_engine(function: Callable[[], object]) -> Engine:
    """Return the engine of a user's function. Raises InvalidRequest if it is not an Engine."""
    engine = function()
    missing = [name for name in dir(Engine) if name[0] != "_" and not hasattr(engine, name)]
    if missing:
        raise InvalidRequest(
            f"the function gave {shown(engine)}, which is no Engine: it has no {', '.join(missing)}"
        )
    return cast("Engine", engine)


def _compare_vocabulary(lm: AsyncLM) -> AsyncLM:
    """Return the runtime after building its ``byte_vocab``, which warns if the tokenizer disagrees.
    Without known bytes the runtime still answers questions about token ids."""
    with contextlib.suppress(InvalidRequest, EngineUnsupported, AttributeError):
        lm.byte_vocab  # noqa: B018
    return lm
