"""Replicas as Ray's actors: over a real local Ray, in a process of its own, and what needs no Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genrt
from genrt.cluster import actors
from genrt.cluster.actors import Actors, Gone, RayConnection
from genrt.engines.exact import NGram
from genrt.engines.folders import sweep
from genrt.errors import EngineFailed, EngineNotInstalled, EngineUnsupported, InvalidRequest
from tests.cluster.ray_program import lives
from tests.cluster.two_nodes import have_ended

ROOT = Path(__file__).resolve().parents[2]
MODEL = NGram.random(5000, order=0, seed=5)
PROGRAM = [sys.executable, "-W", "ignore", "-m", "tests.cluster.ray_program"]


@pytest.mark.proof
@pytest.mark.promise(number=39)
@pytest.mark.promise(number=40)
def test_a_runtime_over_a_local_ray_and_the_end_of_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process outlives an owner that is killed, though a fork of it lives on: not a replica that is
    stopped, and none of Ray's but its agents. Its files are swept."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
    with tempfile.TemporaryDirectory(dir="/tmp") as own:  # Ray's sockets need a short path
        environment = os.environ | {"TMPDIR": own}
        with subprocess.Popen(PROGRAM, env=environment, **pipes) as parent:
            assert parent.stdout is not None
            seen: list[Any] = [("", True)]
            while seen[-1][0] != "processes" and (line := parent.stdout.readline()):
                seen += [json.loads(line)] if line.startswith(b"[") else []
            parent.kill()
            name, found, fork = seen.pop()
            ended = have_ended(found)
            assert lives(fork)
        assert have_ended([fork])
        monkeypatch.setattr(tempfile, "tempdir", own)
        sweep()
        left = [each for each in os.listdir(own) if each.startswith(("genrt", "ray"))]
    assert [name for name, found in seen if found is not True] == []
    assert len(seen) == 18
    assert name == "processes"
    assert len(found) >= 4, "two replicas and Ray's two processes"
    assert ended, "it outlives its owner"
    assert left == []


@pytest.mark.proof
@pytest.mark.promise(number=39)
@pytest.mark.promise(number=40)
def test_two_nodes_lose_nothing_though_one_of_them_dies() -> None:
    """Replicas die and stop under load, one gets new weights meanwhile, and drivers are killed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as own:
        folder = Path(own, "asked")
        folder.mkdir()
        done = subprocess.run(
            [*PROGRAM[:-1], "tests.cluster.two_nodes", str(folder), "3", "4"],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": own},
            capture_output=True,
            text=True,
            timeout=600,
        )
        left = [each for each in os.listdir(own) if each.startswith("genrt")]
    assert done.returncode == 0, done.stderr[-4000:]
    seen = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    counts = seen.pop("storm")
    assert counts["right"] >= 4 * 20
    assert {*counts} <= {"right", "why not", "restarts", "seconds"}
    assert counts["restarts"] >= 4
    assert seen.pop("asked at most") <= 2
    assert seen.pop("nodes") == 1
    assert seen.pop("opened") > 0
    assert len(seen) == 4
    assert {*seen.values()} == {True}
    assert left == []
    assert not [each for each in os.listdir("/dev/shm") if each.startswith("genrt")]


def test_without_ray_replicas_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineNotInstalled, match=r"pip install 'genrt\[ray\]'"):
        genrt.load(MODEL, engine="exact", replicas=1)


class FakeNode:
    """The processes of a local Ray."""

    address = "127.0.0.1:6379"

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def kill_all_processes(self, *, check_alive: bool, allow_graceful: bool) -> None:
        assert allow_graceful
        assert not check_alive
        self.calls.append("killed")


class FakeRay(SimpleNamespace):
    """Ray's connection, and a local cluster, which does not come up if it ``fails``."""

    def __init__(
        self,
        *,
        running: bool = False,
        connected: bool = False,
        fails: bool = False,
        gpus: int = 1,
    ) -> None:
        super().__init__(running=running, connected=connected, calls=[], fails=fails, on_hosts=[])
        self.gpus = gpus
        self.get_runtime_context = lambda: SimpleNamespace(gcs_address="10.0.0.1:6379")
        self._private = SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True))

    def is_initialized(self) -> bool:
        return bool(self.connected)

    def start_node(self, folder: str, workers: int, reserved: Any) -> FakeNode:
        self.calls.append("started")
        self.on_hosts.append(self._private.ray_constants.ENABLE_RAY_CLUSTER)
        os.environ.update(RAY_AUTH_MODE="token", PYTHONBREAKPOINT="ray's")
        if self.fails:
            raise RuntimeError("the raylet did not come up")
        return FakeNode(self.calls)

    def init(self, address: str, **options: Any) -> None:
        self.calls.append(address)
        self.on_hosts.append(self._private.ray_constants.ENABLE_RAY_CLUSTER)
        os.environ.update(RAY_AUTH_MODE="token", PYTHONBREAKPOINT="ray's")
        if not self.running and address != FakeNode.address:
            raise ConnectionError("nobody is there")
        self.connected = True

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.connected = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def available_resources(self) -> dict[str, float]:
        """Of these one GPU is another job's."""
        return {"GPU": self.gpus - 1.0}

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self.options)

    def options(self, **given: Any) -> Any:
        self.calls.append(given["num_gpus"])
        return SimpleNamespace(remote=lambda is_vllm: None)

    def put(self, value: object) -> Any:
        if value is FakeRay:
            raise TypeError("it holds a lock")
        return value


def joined(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> RayConnection:
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(actors, "_local_node", ray.start_node)
    return RayConnection()


def test_the_last_runtime_ends_what_the_first_began(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, ray := FakeRay())
    for cluster in ("auto", "local"):
        assert found.join(cluster, 1) is ray
    assert ray.calls == ["auto", "started", FakeNode.address]
    found.leave()
    assert ray.is_initialized()
    found.leave()
    assert not ray.is_initialized()
    assert ray.calls[3:] == ["shutdown", "killed"]
    found.join("local", 1)
    assert ray.is_initialized()


def test_a_connection_of_the_users_is_taken_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, ray := FakeRay(connected=True))
    for cluster in ("auto", "10.0.0.1:6379"):
        found.join(cluster, 1)
    with pytest.raises(EngineUnsupported, match="cannot be to"):
        found.join("10.0.0.2:6379", 1)
    found.leave()
    found.leave()
    assert ray.is_initialized()
    assert ray.calls == []


def test_a_cluster_that_is_not_there_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, ray := FakeRay())
    with pytest.raises(EngineUnsupported, match="no Ray cluster at '10"):
        found.join("10.0.0.9:6379", 1)
    assert ray.calls == ["10.0.0.9:6379", "shutdown"]
    ray.running = True
    found.join("10.0.0.1:6379", 1)
    found.leave()
    assert ray.calls[-1] == "shutdown"


def opened(make: Any, replicas: int, gpus: int) -> Actors:
    return Actors(make, "auto", environment={}, replicas=replicas, gpus=gpus, is_vllm=False)


@pytest.mark.parametrize(
    ("here", "replicas", "gpus", "each"), [(0, 2, 1, 0), (2, 2, 1, 1), (5, 2, 2, 2), (2, 3, 1, 0.5)]
)
def test_replicas_take_the_gpus_of_this_host(
    monkeypatch: pytest.MonkeyPatch, here: int, replicas: int, gpus: int, each: float
) -> None:
    monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray := FakeRay(gpus=here)))
    opened(partial(int), replicas, gpus)
    assert ray.calls[-1] == each


def test_replicas_without_gpus_are_refused_or_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts may join a cluster; the one that genrt started has only this."""
    monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray := FakeRay(gpus=3)))
    few = "2 replicas need 4 GPUs, with 3 of 3 free$"
    with pytest.raises(EngineUnsupported, match=few):
        opened(partial(int), 2, 2)
    assert ray.calls[-2:] == ["shutdown", "killed"]
    for ray in (FakeRay(connected=True, gpus=2), FakeRay(running=True, gpus=2)):
        monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray))
        few = "2 replicas need 2 GPUs, with 1 of 2 free: they wait"
        with pytest.warns(RuntimeWarning, match=few):
            opened(partial(int), 2, 1)
        assert ray.calls[-1] == 1


def test_runtimes_of_one_process_divide_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their actors would wait for each other without end."""
    monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray := FakeRay(gpus=2)))
    monkeypatch.setattr(actors, "ray_host", lambda: "here")
    one = opened(partial(int), 1, 1)
    with pytest.raises(EngineUnsupported, match="2 replicas need 2 GPUs, with 1 of 2 free: close"):
        opened(partial(int), 2, 1)
    two = opened(partial(int), 1, 1)
    for each in (one, two):
        each.close()
        each.close()
    several = opened(partial(int), 3, 1)
    assert ray.calls[-1] == 0.5
    with pytest.raises(EngineUnsupported, match=r"^1 replica needs 1 GPU, with 0\.5 of 2 free"):
        opened(partial(int), 1, 1)
    several.close()
    assert ray.calls[-2:] == ["shutdown", "killed"]


def test_an_error_in_a_replica_is_no_death_of_it() -> None:
    """What a call raises there is its own error, so that the replica is killed and starts again; only
    Ray's errors are ``Gone``."""
    from ray import exceptions

    actors: Any = object.__new__(Actors)
    actors._ray = SimpleNamespace(exceptions=exceptions)
    own = [ImportError("half a module"), EngineFailed("the step failed")]
    raised = [exceptions.RayTaskError("prepare", "", each) for each in own]
    assert [actors._translated(each) for each in raised] == own
    assert [actors._translated(each.as_instanceof_cause()) for each in raised] == own
    died = [exceptions.ActorUnavailableError("it restarts", None), exceptions.ActorDiedError()]
    gone = [actors._translated(each) for each in died]
    assert [(type(each), each.is_final) for each in gone] == [(Gone, False), (Gone, True)]


def test_a_failure_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that is raised, as in tests, or a function that cannot be sent."""
    ray = FakeRay(running=True, gpus=2)
    monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="they wait for more"):
            opened(partial(int), 2, 1)
    assert ray.calls[-1] == "shutdown"
    with pytest.raises(InvalidRequest, match="cannot be sent to other processes"):
        opened(FakeRay, 1, 1)
    assert ray.calls[-1] == "shutdown"


def test_a_local_cluster_that_does_not_come_up_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "mine")
    before = dict(os.environ)
    found = joined(monkeypatch, ray := FakeRay(fails=True))
    with pytest.raises(EngineUnsupported, match="did not come up"):
        found.join("local", 1)
    assert ray.calls == ["started"]
    assert ray.on_hosts == [False]  # it listens on 127.0.0.1 alone
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER is True
    assert dict(os.environ) == before
