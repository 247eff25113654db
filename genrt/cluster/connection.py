"""Ray's connection of this process, which its runtimes share.

Rules:
    The extra ``ray`` brings it; nothing of it is imported before a cluster is asked for.
    A local Ray that genrt began ends with its last runtime, and listens on 127.0.0.1 alone.
    Ray sets environment variables; they are put back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from genrt.errors import EngineNotInstalled, EngineUnsupported

__all__ = ["RayConnection", "connection"]

MOST_ATTEMPTS = 3
"""How often a local Ray is begun, which on a busy machine may not be up within Ray's own bounds."""

PATIENCE = {"RAY_gcs_server_port_wait_time_s": "60", "RAY_raylet_start_wait_time_s": "60"}
"""Ray's bounds on how long its processes may take to begin, as far as it lets us choose, in seconds."""


class RayConnection:
    """Ray's connection of this process, and how many runtimes have it; ``is_local`` if it is to a Ray
    that genrt has begun, which no other host joins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_ours = self.is_local = False

    def join(self, cluster: str, gpus: int = 0) -> Any:
        """Return Ray, connected to the cluster; one that begins here has so many GPUs."""
        with self._lock, _own_environment():
            try:
                import ray
            except ImportError as error:
                raise EngineNotInstalled(
                    "replicas on a cluster need Ray: pip install 'genrt[ray]'"
                ) from error
            if not ray.is_initialized():
                self._is_ours = True
                try:
                    self.is_local = _connect(ray, cluster, gpus)
                except Exception as error:
                    self._is_ours = False
                    ray.shutdown()  # what of a local one has begun
                    raise EngineUnsupported(f"no Ray cluster at {cluster!r}: {error}") from error
            elif cluster not in ("auto", "local", ray.get_runtime_context().gcs_address):
                raise EngineUnsupported(
                    f"Ray is connected to {ray.get_runtime_context().gcs_address} in this process, "
                    f'and cannot be to {cluster!r} too: give cluster="auto", or another process'
                )
            self._users += 1
        return ray

    def leave(self) -> None:
        """Close the connection, if nobody is left and genrt has opened it."""
        import ray

        with self._lock, _own_environment():
            self._users -= 1
            if not self._users and self._is_ours:
                self._is_ours = self.is_local = False
                ray.shutdown()


connection = RayConnection()


def _connect(ray: Any, cluster: str, gpus: int) -> bool:
    """Have Ray connect to a cluster; return whether that has begun here. It tells nobody of its use
    unless the cluster's owner lets it."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if cluster != "local":
        try:
            ray.init(cluster, **quiet)
        except ConnectionError:
            if cluster != "auto":
                raise
        else:
            return False
    for name, seconds in PATIENCE.items():
        os.environ.setdefault(name, seconds)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        try:
            with _on_loopback(ray):
                # Where Ray finds none by itself, all replicas would be on the first.
                ray.init("local", num_gpus=gpus, include_dashboard=False, **quiet)
        except Exception:
            if attempt == MOST_ATTEMPTS:
                raise
            ray.shutdown()  # what has begun
        else:
            break
    return True


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Put back the environment variables that Ray, or whoever starts it, sets meanwhile."""

    def rays() -> dict[str, str]:
        names = [name for name in os.environ if name.startswith("RAY_")]
        return {
            name: os.environ[name] for name in [*names, "PYTHONBREAKPOINT"] if name in os.environ
        }

    before = rays()
    try:
        yield
    finally:
        for name in rays().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Have a cluster that begins meanwhile listen on 127.0.0.1 alone."""
    # Told to be on 127.0.0.1, Ray takes the host's address instead. Where it has no clusters of several
    # hosts it is there, and this constant says so. Its variable, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER,
    # is read when Ray is imported, which may have been long ago.
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
