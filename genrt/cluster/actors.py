"""Replicas as actors of a Ray cluster, which starts them again when they die.

The extra ``ray`` brings it; replicas import it.

Rules:
    A local Ray that genrt starts ends with its last runtime, or with the process, and leaves no files.
    It listens on 127.0.0.1 alone. Ray sets environment variables; they are restored.
    An actor opens its engine only in ``prepare``. It ends with the raylet that started it, and with the
    process that it serves, even if a fork of that process lives on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar, cast

from genrt.cluster.ranks import die_with, preload_vllm
from genrt.cluster.replica import Replica
from genrt.engines.folders import Folder, sweep
from genrt.errors import EngineNotInstalled, EngineUnsupported, InvalidRequest

T = TypeVar("T")

OWN_RAY = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_max_direct_call_object_size": str(2**19),
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "300",
}
"""The settings of a local Ray: time limits for a busy host, replicas with the priority of others, and
rows of up to 512 KiB within the answer of a call, which is faster."""

AGENT_PORTS = "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"
"""Ports of Ray's dashboard agent, which a local Ray does without."""

MOST_RESTARTS = 20

THREADS = 16
"""The threads of a replica. Two calls wait for answers; all others are short, or open the engine."""

END_SECONDS, EXIT_SECONDS = 3.0, 10.0
"""How long actors may take to close their engines, and to give their memory back once killed."""


class Gone(Exception):
    """An actor died before it answered a call; ``is_final`` if Ray does not start it again."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


class RayConnection:
    """Ray's connection of this process, which its runtimes share. If ``is_local``, genrt started this
    Ray, which no other host joins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._opened = contextlib.ExitStack()  # empty where the user has connected Ray
        self._gpus_taken = 0.0  # by this process's runtimes
        self.is_local = False

    def join(self, cluster: str, replicas: int) -> Any:
        """Return Ray, connected to a cluster; a new one has workers ready for so many replicas. Raises
        EngineNotInstalled, or EngineUnsupported if there is no such cluster or Ray is connected to
        another one."""
        with self._lock, _own_environment():
            try:
                import ray
            except ImportError as error:
                raise EngineNotInstalled(
                    "replicas, and tensor parallelism by ranks, need Ray: pip install 'genrt[ray]'"
                ) from error
            if not ray.is_initialized():
                try:
                    self.is_local = _on_own_thread(partial(self._connect, ray, cluster, replicas))
                except Exception as error:
                    self._opened.close()
                    raise EngineUnsupported(f"no Ray cluster at {cluster!r}: {error}") from error
            elif cluster not in ("auto", "local", ray.get_runtime_context().gcs_address):
                raise EngineUnsupported(
                    f"Ray is connected to {ray.get_runtime_context().gcs_address} in this process, "
                    f'and cannot be to {cluster!r} too: give cluster="auto", or another process'
                )
            self._users += 1
        return ray

    def take_gpus(self, ray: Any, replicas: int, gpus: int) -> float:
        """Return the GPUs of each replica: 0 without GPUs, and a share of one if a local Ray has fewer
        GPUs than replicas of one GPU. Raises EngineUnsupported if its GPUs are too few."""
        if not (there := int(ray.cluster_resources().get("GPU", 0))):
            return 0.0
        share = 1 / -(-replicas // there) if self.is_local and gpus == 1 else float(gpus)
        needed = share * replicas
        with self._lock:
            free = there - self._gpus_taken
            if not self.is_local:  # others take GPUs too; Ray's own count lags behind a close
                free = ray.available_resources().get("GPU", 0.0)
            many = "1 replica needs" if replicas == 1 else f"{replicas} replicas need"
            few = f"{many} {needed:g} GPU{'s' * (needed != 1)}, with {free:g} of {there} free"
            if round(needed - free, 6) > 0:
                if self.is_local:
                    hint = ": close other runtimes, or use another process"
                    raise EngineUnsupported(few + (hint if self._gpus_taken else ""))
                warnings.warn(f"{few}: they wait for more", RuntimeWarning, stacklevel=3)
            self._gpus_taken += needed
        return share

    def leave(self, gpus: float = 0.0) -> None:
        """Give GPUs back, and close the connection with its last runtime, if genrt opened it."""
        with self._lock, _own_environment():
            self._gpus_taken -= gpus
            self._users -= 1
            if not self._users:
                self.is_local = False
                self._opened.close()

    def _connect(self, ray: Any, cluster: str, replicas: int) -> bool:
        """Connect to a cluster; return whether it was started here. No usage is reported unless the
        cluster's owner allows it."""
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if cluster != "local":
            self._opened.callback(ray.shutdown)
            try:
                ray.init(cluster, **quiet)
            except ConnectionError:
                if cluster != "auto":
                    raise
                self._opened.pop_all()
            else:
                return False
        for name, value in OWN_RAY.items():
            os.environ.setdefault(name, value)
        # The paths of Ray's sockets have to be short. A sweep removes the target of a link as well.
        folder = Folder("ray")
        self._opened.callback(folder.close)
        target = tempfile.mkdtemp(prefix="genrt-")
        (folder.path / "link").symlink_to(target)
        with _on_loopback(ray):
            # Bound and not listening, it keeps the port for the agent, which may bind it as well.
            reserved = self._opened.enter_context(socket.socket())
            node = _local_node(target, replicas, reserved)
            self._opened.callback(node.kill_all_processes, check_alive=False, allow_graceful=True)
            self._opened.callback(ray.shutdown)
            ray.init(node.address, _node_ip_address="127.0.0.1", **quiet)
        return True


connection = RayConnection()


def _leave_to_parent() -> None:
    """In a forked child, close the connection to Ray's scheduler, which sees its parent's end by it."""
    for each in os.listdir("/proc/self/fd") if connection._users else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(each))) as copy:
            if copy.family == socket.AF_UNIX and copy.getpeername().endswith("/sockets/raylet"):
                os.close(int(each))


os.register_at_fork(after_in_child=_leave_to_parent)


def _on_own_thread(start: Callable[[], T]) -> T:
    """Call a function on a thread that lives as long as this process, unless the function fails: Ray's
    processes die with the thread that started them."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(start())
        except Exception as error:
            found.set_exception(error)
        else:
            threading.Event().wait()

    threading.Thread(target=run, name="genrt-ray", daemon=True).start()
    return found.result()


def node_kind() -> Any:
    """Return Ray's class of a node, without a dashboard, whose agent a busy host may not start in Ray's
    time limit."""
    from ray._private.node import Node

    class BareNode(Node):  # type: ignore[misc]
        def start_api_server(self, **_: Any) -> None:
            pass

        def start_raylet(self, *arguments: Any, **options: Any) -> None:
            for name in AGENT_PORTS:  # -1 is Ray's value for a service that is not in use
                Path(self.get_session_dir_path(), f"{name}_{self.node_id}").write_text("-1")
            super().start_raylet(*arguments, **options)

    return BareNode


def _local_node(folder: str, workers: int, reserved: socket.socket) -> Any:
    """Start a Ray on this host with so many workers, without the dashboard, autoscaler and log monitor of
    ``ray.init``. ``reserved`` keeps a port."""
    from ray._private.parameter import RayParams

    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    parameters = RayParams(
        node_ip_address="127.0.0.1",
        temp_dir=folder,
        num_cpus=workers,  # Ray would start a worker per core
        runtime_env_agent_port=reserved.getsockname()[1],
        dashboard_agent_listen_port=0,
        no_monitor=True,
        include_log_monitor=False,
    )
    return node_kind()(parameters, head=True, shutdown_at_exit=False)


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Restore the environment variables that Ray sets meanwhile."""

    def rays() -> dict[str, str]:
        own = {name: each for name, each in os.environ.items() if name.startswith("RAY_")}
        return own | {k: v for k, v in os.environ.items() if k == "PYTHONBREAKPOINT"}

    before = rays()
    try:
        yield
    finally:
        for name in rays():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Make a cluster that starts meanwhile listen on 127.0.0.1 alone."""
    # Given 127.0.0.1, Ray takes the host's address instead, unless this constant says that it has no
    # clusters of several hosts here. Its variable is read when Ray is imported, maybe long ago.
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


class ReplicaActor(Replica):
    """A replica that ends with the process that started it."""

    def __init__(self, is_vllm: bool) -> None:
        import ray

        super().__init__(ray.get)
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        die_with(os.getppid())
        if is_vllm:
            preload_vllm()

    def process(self) -> tuple[str, int]:
        """Return Ray's name of this host, and the number of this process."""
        return ray_host(), os.getpid()


class Actors:
    """The actors of one runtime's replicas.

    Args:
        make: opens a replica's runtime.
        cluster: as ``LoadOptions`` has it.
        gpus: how many GPUs each replica takes.
        environment: the environment variables of actors, beside Ray's own.
        is_vllm: whether their engines are vLLM's.

    Raises:
        EngineNotInstalled, EngineUnsupported: as ``RayConnection.join``, or too few GPUs.
        InvalidRequest: ``make`` cannot be pickled.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        cluster: str,
        *,
        replicas: int,
        gpus: int,
        environment: Mapping[str, str],
        is_vllm: bool,
    ) -> None:
        self._ray = ray = connection.join(cluster, replicas)
        self._is_closed, self._gpus = False, 0.0
        try:
            share = connection.take_gpus(ray, replicas, gpus)
            self._gpus = share * replicas
            kind = ray.remote(ReplicaActor).options(
                num_cpus=0,
                num_gpus=share,
                max_concurrency=THREADS,
                max_restarts=MOST_RESTARTS,
                scheduling_strategy="SPREAD",
                **({"runtime_env": {"env_vars": dict(environment)}} if environment else {}),
            )
            # Kept, and no argument of the actor's: Ray does not keep that for the actor's next start.
            self._make = self.put(make)
            self._handles = [kind.remote(is_vllm) for _ in range(replicas)]
        except BaseException as error:
            connection.leave(self._gpus)
            if isinstance(error, TypeError | AttributeError | ValueError | RecursionError):
                raise InvalidRequest(
                    f"the engine cannot be sent to other processes ({error}): give a function that can "
                    "be pickled, with its arguments"
                ) from error
            raise

    def put(self, value: object) -> Any:
        """Return a reference to a value in the object store, from where each host takes it once."""
        return self._ray.put(value)

    def call(self, number: int, name: str, *arguments: Any) -> Future[Any]:
        """Call a method of a replica. The future gets its result or its error; ``Gone`` if it dies."""
        found: Future[Any] = Future()
        if name == "prepare":
            arguments = (self._make, *arguments)

        def ended(calling: Future[Any]) -> None:
            try:
                found.set_result(calling.result())
            except Exception as error:
                found.set_exception(self._translated(error))

        try:
            reference = getattr(self._handles[number], name).remote(*arguments)
            reference.future().add_done_callback(ended)
        except Exception as error:
            found.set_exception(self._translated(error))
        return found

    def kill(self, number: int) -> None:
        """Kill a replica, which Ray starts again."""
        with contextlib.suppress(Exception):  # it is dead
            self._ray.kill(self._handles[number], no_restart=False)

    def close(self) -> None:
        """Close the engines of the actors, kill them, and wait for the processes of this host to end.
        Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as files:
            # A file for each process of this host, ready once that has ended.
            ends = set[Any]()
            with contextlib.suppress(Exception):  # Ray is gone, and so are they
                places = [each.process.remote() for each in self._handles]
                stops = [each.stop.remote() for each in self._handles]
                self._ray.wait(stops, num_returns=len(stops), timeout=END_SECONDS)
                known, _ = self._ray.wait(places, num_returns=len(places), timeout=0)
                here = [pid for host, pid in self._ray.get(known) if host == ray_host()]
                for each in here:
                    with contextlib.suppress(ProcessLookupError):
                        ends.add(end := os.pidfd_open(each))
                        files.callback(os.close, end)
            for each in self._handles:
                with contextlib.suppress(Exception):
                    self._ray.kill(each)
            self._handles = []
            connection.leave(self._gpus)
            until = time.monotonic() + EXIT_SECONDS
            while ends and (ended := wait(ends, max(0.0, until - time.monotonic()))):
                ends -= {*ended}
        sweep()  # the folders of killed replicas

    def _translated(self, error: Exception) -> Exception:
        """Return the error that a call raised in its replica, or Ray's own as ``Gone``."""
        errors = self._ray.exceptions
        if isinstance(error, errors.RayTaskError):
            return cast("Exception", error.cause)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Gone(reason, is_final=isinstance(error, errors.ActorDiedError))


def ray_host() -> str:
    """Return Ray's name of this process's host."""
    import ray

    found: str = ray.get_runtime_context().get_node_id()
    return found
