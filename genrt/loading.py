"""A model's name and options -> a runtime: opens the engine on its thread, and gives up cleanly."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from genrt import models
from genrt.cluster.health import ReplicaLimits
from genrt.cluster.opening import check_replicas, gpus_of, open_replicas
from genrt.cluster.ranks import RANKED, are_launched, open_ranked, with_ranks
from genrt.engines import check_choice, open_engine
from genrt.engines.folders import sweep
from genrt.engines.protocol import Engine
from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.lm import AsyncLM
from genrt.numbers import check_bool, check_float, check_int, named, shown
from genrt.runtime.cache import RowCache
from genrt.runtime.concurrency import aside
from genrt.runtime.thread import EngineThread

if TYPE_CHECKING:
    from genrt.engines.exact import NGram

__all__ = ["aload", "load"]

log = logging.getLogger("genrt.loading")

TOLD_SECONDS = 15.0
"""So often the log says that a model is still being loaded."""


def load(
    model: str | os.PathLike[str] | NGram | None = None,
    *,
    engine: str | Callable[[], Engine] = "vllm",
    engine_options: Mapping[str, Any] | None = None,
    cache_bytes: int = 256 * 2**20,
    max_batch_size: int | None = None,
    max_wait_seconds: float = 0.0,
    max_queued_requests: int = 2**16,
    max_queued_bytes: int = 2**30,
    residency: bool = True,
    restart: Literal["auto"] | None = None,
    seed: int | None = None,
    replicas: int | None = None,
    replica_limits: ReplicaLimits | None = None,
    cluster: str | None = None,
) -> AsyncLM:
    """Open a model and return the runtime over it, ready to be asked.

    Args:
        model: a checkpoint directory, a model's name, or ``None`` for the embedded
            SmolLM2-135M-Instruct; for the exact engine, an ``NGram`` or the directory of a saved one.
        engine: ``"vllm"``, ``"transformers"``, ``"exact"``, or a function that makes an Engine of your
            own; it is called on the thread that will own it, and takes no model or options here.
        engine_options: to vLLM's ``EngineArgs``, or transformers' ``from_pretrained``, as they are.
        cache_bytes: the bound of the row cache, on the engine's device; 0 is no cache.
        max_batch_size: the most requests in one flush, however many the engine takes to a step;
            ``None`` is no bound. A population's draw counts as one for each sequence, here and in
            the queue.
        max_wait_seconds: how long a question waits for company once its loop has gone quiet.
        max_queued_requests: how many requests may wait for the engine. Questions beyond that wait for
            room, and event loops and threads take turns; none is refused.
        max_queued_bytes: how many bytes their contexts and masks may take. A question that is larger
            waits for an empty queue.
        residency: whether vLLM keeps the sequences it has answered, so that a context that grew by a
            token, shares a prefix or was cut back costs only its new tokens. Rows are the same, up to
            the engine's numerics, and every step is scheduled when the one before has ended.
        restart: ``"auto"`` opens another engine in place of one that died, and asks it the unanswered
            questions; if nothing is answered between two deaths, the second is final. Without it
            every later call raises the reason, until ``AsyncLM.restart``.
        seed: for draws and samples without a seed of their own, in the order of the calls, however they
            are batched. Two runtimes of one seed give equal answers to equal questions. ``None`` takes a
            seed from the system. The process's own generators, of ``random``, numpy and torch, are
            neither set nor used.
        replicas: how many engines there are, each in a process of its own on this host; ``None`` is one
            in this process, or one of ranks with vLLM's ``tensor_parallel_size`` alone. A population,
            and texts that begin alike, stay with one of them. One that dies, hangs or fails is started
            again, and no question notices but in time; with none left, the engine is dead. GPUs are
            dealt out evenly; replicas of several each must have them for themselves. The row cache is in
            the host's memory. An engine that is a function must be one that can be pickled.
        replica_limits: when a replica is given up, and how often it is started again.
        cluster: has the replicas be actors of a Ray cluster (extra ``ray``): its address as ``ray.init``
            takes it; ``"auto"`` for the one that runs, or else one of this host alone, which
            ends with the runtime; ``"local"`` always for that. New weights and adapters are read by
            the actors as files: over several hosts, keep them, and ``TMPDIR``, where all hosts read them.

    Blocks until the engine is open; every 15 seconds the logger ``genrt.loading`` says that it still
    loads, at level INFO. An interrupt abandons the loading.

    Raises:
        EngineNotInstalled, EngineUnsupported, ModelNotFound: each says what to do about it.
        InvalidRequest: an argument is out of range, or an engine of that name is not known.
    """
    thread, cache = _start(
        model,
        engine,
        engine_options,
        cache_bytes,
        residency,
        restart,
        seed,
        replicas,
        replica_limits,
        cluster,
        max_batch_size=max_batch_size,
        max_wait_seconds=max_wait_seconds,
        max_queued_requests=max_queued_requests,
        max_queued_bytes=max_queued_bytes,
    )
    began = time.monotonic()
    try:
        while not concurrent.futures.wait([thread.opened], TOLD_SECONDS).done:
            _tell(model, engine, began)
        return _compared(AsyncLM(thread, cache, thread.opened.result(), seed=seed))
    except BaseException:
        thread.close(wait=False)
        raise


async def aload(
    model: str | os.PathLike[str] | NGram | None = None,
    *,
    engine: str | Callable[[], Engine] = "vllm",
    engine_options: Mapping[str, Any] | None = None,
    cache_bytes: int = 256 * 2**20,
    max_batch_size: int | None = None,
    max_wait_seconds: float = 0.0,
    max_queued_requests: int = 2**16,
    max_queued_bytes: int = 2**30,
    residency: bool = True,
    restart: Literal["auto"] | None = None,
    seed: int | None = None,
    replicas: int | None = None,
    replica_limits: ReplicaLimits | None = None,
    cluster: str | None = None,
) -> AsyncLM:
    """Open a model as ``load`` does, while the running event loop goes on. Cancelling abandons the
    loading."""
    thread, cache = _start(
        model,
        engine,
        engine_options,
        cache_bytes,
        residency,
        restart,
        seed,
        replicas,
        replica_limits,
        cluster,
        max_batch_size=max_batch_size,
        max_wait_seconds=max_wait_seconds,
        max_queued_requests=max_queued_requests,
        max_queued_bytes=max_queued_bytes,
    )
    began, opened = time.monotonic(), asyncio.wrap_future(thread.opened)
    try:
        while not (await asyncio.wait([opened], timeout=TOLD_SECONDS))[0]:
            _tell(model, engine, began)
        lm = AsyncLM(thread, cache, await opened, seed=seed)
        return await aside(partial(_compared, lm))
    except BaseException:
        opened.cancel()
        thread.close(wait=False)
        raise


def _tell(model: object, engine: object, began: float) -> None:
    what = "the embedded model" if model is None else model
    log.info("loading %s on engine %s: %.0f s", what, engine, time.monotonic() - began)


class _Flow(TypedDict):
    """The options of how questions flow to the engine; see ``Batcher``."""

    max_batch_size: int | None
    max_wait_seconds: float
    max_queued_requests: int
    max_queued_bytes: int


def _start(
    model: str | os.PathLike[str] | NGram | None,
    engine: str | Callable[[], Engine],
    engine_options: Mapping[str, Any] | None,
    cache_bytes: int,
    residency: bool,
    restart: str | None,
    seed: int | None,
    replicas: int | None,
    replica_limits: ReplicaLimits | None,
    cluster: str | None,
    **flow: Unpack[_Flow],
) -> tuple[EngineThread, RowCache]:
    check_int("cache_bytes", cache_bytes, 0)
    if flow["max_batch_size"] is not None:
        check_int("max_batch_size", flow["max_batch_size"], 1)
    check_float("max_wait_seconds", flow["max_wait_seconds"], 0.0, math.inf)
    check_int("max_queued_requests", flow["max_queued_requests"], 1)
    check_int("max_queued_bytes", flow["max_queued_bytes"], 1)
    if seed is not None:
        check_int("seed", seed, 0)
    check_bool("residency", residency)
    check_replicas(replicas, replica_limits, cluster)
    if restart not in (None, "auto"):
        raise InvalidRequest(f'restart must be "auto" or None, got {named(restart)}')
    if not isinstance(engine_options, Mapping | None):
        raise InvalidRequest(
            f"engine_options must be a mapping of option names to values, got {engine_options!r}"
        )
    if callable(engine) and (model is not None or engine_options):
        raise InvalidRequest(
            "model and engine_options are for engines opened by name: a function that makes an engine "
            "must bring its own"
        )
    options = dict(engine_options or {})
    if not callable(engine):
        check_choice(engine, model, options)
    if engine == "vllm" and residency and cluster is None:
        options = with_ranks(options)
    if is_ranked := engine == "vllm" and are_launched(options):
        if cluster is not None:
            raise EngineUnsupported(
                "ranks are processes of one host: leave the cluster out, or distributed_executor_backend"
            )
        replicas = replicas or 1  # ranks die together, with their process

    def opened() -> Engine:
        sweep()
        if callable(engine):
            make: Callable[[], Engine] = partial(_made, engine)
        else:
            found = model if engine == "exact" else models.resolve(cast("Any", model))
            # The cache is on the engine's device, unless that is another process's.
            reserved = cache_bytes if replicas is None else 0
            make = partial(
                open_engine, engine, found, options, reserve_bytes=reserved, residency=residency
            )
            if is_ranked:
                make = partial(open_ranked, str(found), options, residency=residency)
        if replicas is None:
            return make()
        each = 1 if callable(engine) else gpus_of(options)
        each = 0 if engine == "exact" else each
        environment = RANKED if is_ranked else {}
        limits = replica_limits
        return open_replicas(make, replicas, limits, cluster, gpus=each, environment=environment)

    cache = RowCache(cache_bytes)
    return EngineThread(opened, cache, restarts=restart == "auto", **flow), cache


def _made(function: Callable[[], object]) -> Engine:
    """Return the engine that a user's function makes. Raises InvalidRequest if it is no Engine."""
    engine = function()
    missing = [name for name in dir(Engine) if name[0] != "_" and not hasattr(engine, name)]
    if missing:
        raise InvalidRequest(
            f"the function gave {shown(engine)}, which is no Engine: it has no {', '.join(missing)}"
        )
    return cast("Engine", engine)


def _compared(lm: AsyncLM) -> AsyncLM:
    """Return the runtime after comparing its ``byte_vocab`` with the tokenizer, which warns of what
    disagrees. A tokenizer whose bytes are not known is no obstacle to asking with token ids."""
    with contextlib.suppress(InvalidRequest, EngineUnsupported, AttributeError):
        lm.byte_vocab  # noqa: B018
    return lm
