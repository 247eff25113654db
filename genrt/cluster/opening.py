"""Replicas of an engine, opened: where they are, who gets which GPU, and what is checked before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch

from genrt.cluster.engine import ReplicaEngine
from genrt.cluster.health import ReplicaLimits
from genrt.cluster.messages import AskedNumbers
from genrt.cluster.processes import Processes
from genrt.cluster.transport import Transport
from genrt.engines.protocol import Engine
from genrt.errors import EngineUnsupported, GenrtError, InvalidRequest
from genrt.numbers import check_int, shown

__all__ = ["check_replicas", "environments", "gpus_of", "open_replicas"]

MOST_REPLICAS = 1024


def check_replicas(replicas: object, replica_limits: object = None, cluster: object = None) -> None:
    """Raise InvalidRequest unless these are a number of replicas, or none, their limits, and a cluster's
    address, or none."""
    if replicas is not None:
        check_int("replicas", replicas, 1, MOST_REPLICAS)
    if not isinstance(replica_limits, ReplicaLimits | None):
        raise InvalidRequest(f"replica_limits must be ReplicaLimits, got {shown(replica_limits)}")
    if cluster is not None and (not isinstance(cluster, str) or not cluster):
        raise InvalidRequest(
            f'cluster must be "auto", "local" or the address of a Ray cluster, got {shown(cluster)}'
        )
    if cluster is not None and replicas is None:
        raise InvalidRequest("a cluster is for replicas: say how many with replicas=…")
    if replica_limits is not None and replicas is None:
        raise InvalidRequest("replica_limits are for replicas: say how many with replicas=…")


def gpus_of(options: Mapping[str, Any]) -> int:
    """Return how many GPUs one engine with these options takes."""
    sizes = [options.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline")]
    return max(1, int(sizes[0]) * int(sizes[1]))


def environments(replicas: int, visible: list[str], gpus: int) -> list[dict[str, str]]:
    """Return what each replica has in its environment: so many of the visible GPUs, others than its
    neighbours have while there are others. Without any, nothing.

    Raises:
        EngineUnsupported: replicas of several GPUs each would share them.
    """
    if not visible:
        return [{} for _ in range(replicas)]
    if gpus > 1 and replicas * gpus > len(visible):
        raise EngineUnsupported(
            f"{replicas} x {gpus} GPUs are needed, by replicas=… and the parallel sizes, and "
            f"{len(visible)} are visible ({', '.join(visible)}): give fewer replicas or smaller sizes"
        )
    dealt = [
        [visible[(number * gpus + place) % len(visible)] for place in range(gpus)]
        for number in range(replicas)
    ]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(each)} for each in dealt]


def open_replicas(
    open_engine: Callable[[], Engine],
    replicas: int,
    limits: ReplicaLimits | None,
    cluster: str | None = None,
    *,
    gpus: int,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ReplicaEngine:
    """Return an engine made of so many, each with so many GPUs: processes of this host, with this beside
    its environment, or with a ``cluster`` actors of that.

    Raises:
        InvalidRequest: the function that makes an engine cannot be pickled; else as ``ReplicaEngine``,
            and ``Actors`` for a cluster.
        EngineUnsupported: there are too few GPUs for replicas of several each.
    """
    numbers = AskedNumbers()
    transport: Transport
    try:
        if cluster is None:
            own = [{**each, **environment} for each in environments(replicas, _visible(), gpus)]
            transport = Processes(open_engine, numbers, own)
        else:
            from genrt.cluster.actors import Actors

            sizes = {"replicas": replicas, "gpus": gpus, "here": len(_visible())}
            transport = Actors(open_engine, numbers, cluster, **sizes)
    except GenrtError:
        raise
    except (TypeError, AttributeError, ValueError, RecursionError, ImportError) as error:
        raise InvalidRequest(
            f"the engine cannot be sent to other processes ({error}): give a function of a module, or "
            "functools.partial of one, with arguments that can be pickled"
        ) from error
    return ReplicaEngine(transport, replicas, limits=limits, numbers=numbers)


def _visible() -> list[str]:
    """Return the names of the GPUs that this process may use, without using one."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        # As CUDA reads it: what is behind a name of none is not seen. Slurm gives "NoDevFiles".
        return [*takewhile(lambda each: each not in ("", "-1", "NoDevFiles"), chosen.split(","))]
    return [str(number) for number in range(torch.cuda.device_count())]
