"""The options of replicas, in Python and on the command line.

Heavy modules are imported once the arguments are understood, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from genrt.errors import InvalidRequest

MOST_REPLICAS = 1024


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The bounds of one replica.

    Attributes:
        stall_seconds: a replica that is at one step, or one change, for longer is killed. How long one
            may take to open is not bounded.
        most_restarts: how often it is started again at most.

    Raises:
        InvalidRequest: one is out of range.
    """

    stall_seconds: float = 600.0
    most_restarts: int = 20

    def __post_init__(self) -> None:
        from genrt.numbers import check_float, check_int

        check_float("stall_seconds", self.stall_seconds, 0.001, math.inf)
        check_int("most_restarts", self.most_restarts, 0)


class ReplicaOptions(TypedDict):
    """The options of ``genrt.load`` for replicas."""

    replicas: int | None
    replica_limits: ReplicaLimits | None
    cluster: str | None


def check_replicas(replicas: object, replica_limits: object = None, cluster: object = None) -> None:
    """Raise InvalidRequest unless these are the options of ``ReplicaOptions``."""
    from genrt.numbers import check_int, shown

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


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--replicas``, ``--replica-limits`` and ``--cluster`` to a command's arguments."""
    group = parser.add_argument_group(
        "replicas", "One model over several engines, by genrt.load's names."
    )
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        default=None,
        help="the number of engines, each an actor of Ray; GPUs are distributed evenly (default: one, "
        "in this process)",
    )
    group.add_argument(
        "--replica-limits",
        metavar="JSON",
        default=None,
        help="when a replica is killed and started again, by the names of genrt.ReplicaLimits, such as "
        '{"stall_seconds": 60, "most_restarts": 20}',
    )
    group.add_argument(
        "--cluster",
        metavar="ADDRESS",
        default=None,
        help='the address of a Ray cluster; "auto" for the running one, or else a new one on this host '
        '(default: "local", a new one)',
    )


def replica_options(given: Mapping[str, Any]) -> ReplicaOptions:
    """Return these arguments as ``genrt.load`` takes them.

    Raises:
        InvalidRequest: the limits are not a JSON object of known names and valid values; limits or a
            cluster without a number of replicas.
    """
    replicas, limits, cluster = (given[name] for name in ReplicaOptions.__annotations__)
    if replicas is None:
        for name, value in (("--replica-limits", limits), ("--cluster", cluster)):
            if value is not None:
                raise InvalidRequest(f"{name} is for replicas: say how many with --replicas N")
    found = None if limits is None else _limits(limits)
    return ReplicaOptions(replicas=replicas, replica_limits=found, cluster=cluster)


def _limits(text: str) -> ReplicaLimits:
    from genrt.numbers import named

    names = [each.name for each in fields(ReplicaLimits)]
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"--replica-limits is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"--replica-limits must be a JSON object, got {named(text)}")
    if unknown := [name for name in found if name not in names]:
        raise InvalidRequest(
            f"--replica-limits has no {named(unknown[0])}: there are {', '.join(names)}"
        )
    return ReplicaLimits(**found)
