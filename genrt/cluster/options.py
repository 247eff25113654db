"""The options of replicas, in Python and on the command line.

Heavy modules are imported once the arguments are understood, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from genrt.errors import InvalidRequest

MOST_REPLICAS = 1024


def check_replicas(replicas: object, cluster: object) -> None:
    """Raise InvalidRequest unless these are options for ``genrt.load``."""
    from genrt.numbers import check_int, named

    if replicas is not None:
        check_int("replicas", replicas, 1, MOST_REPLICAS)
    if cluster is not None and (not isinstance(cluster, str) or not cluster):
        raise InvalidRequest(
            f'cluster must be "auto", "local" or the address of a Ray cluster, got {named(cluster)}'
        )
    if cluster is not None and replicas is None:
        raise InvalidRequest("a cluster is for replicas: say how many with replicas=…")


def gpus_of(options: Mapping[str, Any]) -> int:
    """Return how many GPUs one engine with these options takes."""
    sizes = [options.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline")]
    return max(1, int(sizes[0]) * int(sizes[1]))


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--replicas`` and ``--cluster`` to a command's arguments."""
    add = parser.add_argument_group("replicas", "One model, several engines.").add_argument
    several = "the number of engines, actors of Ray with equal GPUs (default: one, here)"
    add("--replicas", type=int, metavar="N", default=None, help=several)
    where = 'a Ray cluster\'s address; "auto": the running one, or one here (default: "local")'
    add("--cluster", metavar="ADDRESS", default=None, help=where)


def replica_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return these arguments as ``genrt.load`` takes them; raises as ``check_replicas``."""
    found = {name: given[name] for name in ("replicas", "cluster")}
    check_replicas(**found)
    return found
