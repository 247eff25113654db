"""Replicas on the command line: the same arguments for every command that loads a model.

What the values need is imported once the arguments are understood, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypedDict

from genrt.errors import InvalidRequest

if TYPE_CHECKING:
    from genrt.cluster.health import ReplicaLimits

__all__ = ["ReplicaOptions", "add_replica_arguments", "replica_options"]


class ReplicaOptions(TypedDict):
    """The arguments of ``genrt.load`` that are about replicas."""

    replicas: int | None
    replica_limits: ReplicaLimits | None
    cluster: str | None


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
        help="how many engines there are, each in a process of its own; GPUs are dealt out evenly "
        "(default: one, in this process)",
    )
    group.add_argument(
        "--replica-limits",
        metavar="JSON",
        default=None,
        help="when one is given up and started again, by the names of genrt.ReplicaLimits, such as "
        '{"stall_seconds": 60, "most_restarts": 20}',
    )
    group.add_argument(
        "--cluster",
        metavar="ADDRESS",
        default=None,
        help='have them be actors of a Ray cluster: its address; "auto" for the one that runs, or else '
        'one of this host alone; "local" always for that',
    )


def replica_options(given: Mapping[str, Any]) -> ReplicaOptions:
    """Return these arguments as ``genrt.load`` takes them.

    Raises:
        InvalidRequest: the limits are no JSON object of known names and right values; limits or a cluster
            without a number of replicas.
    """
    replicas, limits, cluster = (given[name] for name in ReplicaOptions.__annotations__)
    if replicas is None:
        for name, value in (("--replica-limits", limits), ("--cluster", cluster)):
            if value is not None:
                raise InvalidRequest(f"{name} is for replicas: say how many with --replicas N")
    found = None if limits is None else _limits(limits)
    return ReplicaOptions(replicas=replicas, replica_limits=found, cluster=cluster)


def _limits(text: str) -> ReplicaLimits:
    from genrt.cluster.health import ReplicaLimits
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
