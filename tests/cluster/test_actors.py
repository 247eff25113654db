"""Replicas as Ray's actors: a real cluster of this host, in a process of its own, and what needs none."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import genrt
from genrt.cluster import actors, connection
from genrt.cluster.actors import ActorLink, Actors, ReplicaActor
from genrt.cluster.messages import AskedNumbers, dump_message, load_message, split_questions
from genrt.cluster.worker import Facts, Renewal, with_rows
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import EngineNotInstalled, EngineUnsupported, InvalidRequest
from genrt.questions.rows import LogprobsRequest

ROOT = Path(__file__).resolve().parents[2]
MODEL = NGram.random(5000, order=0, seed=5)


@pytest.mark.proof
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (extra ray)")
@pytest.mark.promise(number=39)
@pytest.mark.promise(number=40)
def test_two_runtimes_over_a_local_cluster() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cluster.ray_program"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [name for name, found in seen if found is not True] == []
    assert len(seen) == 18


def test_the_end_of_a_process_is_waited_for_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        end = actors._end_of(child.pid)
        assert end is not None
        assert child.stdin is not None
        monkeypatch.setattr(actors, "EXIT_SECONDS", 0.0)
        actors._wait_for([os.dup(end)])
        assert child.poll() is None
        monkeypatch.setattr(actors, "EXIT_SECONDS", 60.0)
        child.stdin.close()
        actors._wait_for([end])
        assert child.poll() is not None
    assert actors._end_of(child.pid) is None


def test_ray_is_imported_by_nobody_who_does_not_ask_for_it() -> None:
    program = (
        "import sys, genrt\n"
        "from genrt.engines.exact import NGram\n"
        "with genrt.load(NGram.random(5, order=1, seed=1), engine='exact', replicas=1) as lm:\n"
        "    lm.draw_sync([1])\n"
        "assert 'ray' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_without_ray_a_cluster_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineNotInstalled, match=r"pip install 'genrt\[ray\]'"):
        genrt.load(MODEL, engine="exact", replicas=1, cluster="auto")


def test_what_is_no_cluster_is_refused() -> None:
    for wrong in ("", 3, b"auto", ["auto"]):
        with pytest.raises(InvalidRequest, match="cluster must be"):
            genrt.load(MODEL, engine="exact", replicas=1, cluster=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="say how many"):
        genrt.load(MODEL, engine="exact", cluster="auto")


class FakeRay(SimpleNamespace):
    """Ray's connection alone. ``fails`` is how many local clusters do not come up."""

    def __init__(self, *, running: bool = False, connected: bool = False, fails: int = 0) -> None:
        super().__init__(running=running, connected=connected, calls=[], fails=fails, on_hosts=[])
        self.gpus = 1
        self.get_runtime_context = lambda: SimpleNamespace(gcs_address="10.0.0.1:6379")
        self._private = SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True))

    def is_initialized(self) -> bool:
        return bool(self.connected)

    def init(self, address: str, **options: Any) -> None:
        self.calls.append((address, options.get("include_dashboard")))
        self.gpus = options.get("num_gpus", self.gpus)
        self.on_hosts.append(self._private.ray_constants.ENABLE_RAY_CLUSTER)
        os.environ.update(RAY_AUTH_MODE="token", PYTHONBREAKPOINT="ray's")
        if address == "local":
            self.fails -= 1
            if self.fails >= 0:
                raise RuntimeError("the raylet did not come up")
        elif not self.running:
            raise ConnectionError("nobody is there")
        self.connected = True

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.connected = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **given: self.calls.append(given["num_gpus"]))


def joined(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> Any:
    monkeypatch.setitem(sys.modules, "ray", ray)
    return connection.RayConnection()


def test_the_last_runtime_ends_what_the_first_began(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, ray := FakeRay())
    for cluster in ("auto", "local"):
        assert found.join(cluster) is ray
    assert ray.calls == [("auto", None), ("local", False)]
    found.leave()
    assert ray.is_initialized()
    found.leave()
    assert not ray.is_initialized()
    found.join("local")
    assert ray.is_initialized()


def test_a_local_cluster_is_begun_again_and_listens_on_loopback_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = joined(monkeypatch, ray := FakeRay(fails=2))
    found.join("auto")
    begun = [("local", False), "shutdown"]
    assert ray.calls == [("auto", None), *begun, *begun, ("local", False)]
    assert ray.on_hosts == [True, False, False, False]
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER is True
    found.leave()
    other = joined(monkeypatch, ray := FakeRay(fails=3))
    with pytest.raises(EngineUnsupported, match="did not come up"):
        other.join("local")
    assert len([each for each in ray.calls if each == ("local", False)]) == 3
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER is True
    assert not ray.is_initialized()


@pytest.mark.parametrize("fails", [0, 3])
def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "mine")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    before = dict(os.environ)
    found = joined(monkeypatch, FakeRay(fails=fails))
    if fails:
        with pytest.raises(EngineUnsupported):
            found.join("auto")
    else:
        found.join("auto")
        assert dict(os.environ) == before
        found.leave()
    assert dict(os.environ) == before


def test_a_connection_of_the_users_is_taken_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, ray := FakeRay(connected=True))
    for cluster in ("auto", "10.0.0.1:6379"):
        found.join(cluster)
    with pytest.raises(EngineUnsupported, match="cannot be to"):
        found.join("10.0.0.2:6379")
    found.leave()
    found.leave()
    assert ray.is_initialized()
    assert ray.calls == []


def test_a_cluster_that_is_not_there_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, ray := FakeRay())
    with pytest.raises(EngineUnsupported, match="no Ray cluster at '10"):
        found.join("10.0.0.9:6379")
    assert ray.calls == [("10.0.0.9:6379", None), "shutdown"]
    ray.running = True
    found.join("10.0.0.1:6379")
    found.leave()
    assert ray.calls[-1] == "shutdown"


@pytest.mark.parametrize(("here", "replicas", "each"), [(0, 2, 0), (2, 2, 1), (5, 2, 2)])
def test_replicas_take_the_gpus_of_this_host(
    monkeypatch: pytest.MonkeyPatch, here: int, replicas: int, each: int
) -> None:
    monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray := FakeRay()))
    sizes = {"replicas": replicas, "gpus": max(1, each), "here": here}
    Actors(partial(int), AskedNumbers(), "auto", **sizes)  # type: ignore[arg-type]
    assert (ray.gpus, ray.calls[-1]) == (here, each)


def test_replicas_that_no_gpu_is_left_for_are_refused_or_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other hosts may join a cluster; the one that genrt began has only this."""
    monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray := FakeRay()))
    make, few = partial(int), "2 replicas need 4 GPUs, and the cluster has 3"
    with pytest.raises(EngineUnsupported, match=few):
        Actors(make, AskedNumbers(), "auto", replicas=2, gpus=2, here=3)  # type: ignore[arg-type]
    assert ray.calls[-1] == "shutdown"
    for ray in (FakeRay(connected=True), FakeRay(running=True)):
        monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray))
        few = "2 replicas need 2 GPUs, and the cluster has 1: they wait"
        with pytest.warns(RuntimeWarning, match=few):
            Actors(make, AskedNumbers(), "auto", replicas=2, gpus=1, here=3)  # type: ignore[arg-type]
        assert ray.calls[-1] == 1


def test_a_warning_that_is_raised_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """As warnings are in tests: the next runtime that ends closes what it opened."""
    monkeypatch.setattr(actors, "connection", joined(monkeypatch, ray := FakeRay(running=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="they wait for more"):
            Actors(partial(int), AskedNumbers(), "auto", replicas=2, gpus=1, here=3)  # type: ignore[arg-type]
    assert ray.calls[-1] == "shutdown"


def test_messages_are_taken_in_their_order_whatever_order_calls_come_in() -> None:
    link = ActorLink()
    for number in (2, 1, 3):
        link.take(number, [b"%d" % number, b"-"])
        link.wake()
        assert link.receive(wait=True) == []
    link.take(0, [b"0"])
    found = [each.data for each in link.receive(wait=True) or ()]
    assert found == [b"0", b"1", b"-", b"2", b"-", b"3", b"-"]
    link.leave()
    assert link.receive(wait=True) is None


def test_an_actor_answers_a_flush_with_one_array() -> None:
    actor = ReplicaActor()
    running = threading.Thread(target=actor.run)
    running.start()
    actor.take(0, [dump_message(("open", _engine))])
    [(opened, none)] = actor.answers()
    kind, facts = load_message(opened)
    assert (kind, none) == ("opened", None)
    assert isinstance(facts, Facts)
    asked = [(ticket, LogprobsRequest([ticket])) for ticket in (1, 2, 3)]
    renewal = Renewal(0, 0, (), (), ())
    actor.take(
        1, [dump_message(("renew", renewal)), dump_message(("ask", *split_questions(asked)))]
    )
    came: list[Any] = []
    while len(came) < 2:
        came += actor.answers()
    assert load_message(came[0][0]) == ("renewed", 0, None)
    message, rows = came[1]
    assert isinstance(rows, np.ndarray)
    assert rows.shape == (3, 5000)
    _, answers = with_rows(load_message(message), torch.from_numpy(rows))
    for ticket, row, error in answers.ends:
        assert error is None
        assert torch.allclose(row, MODEL.row([ticket]).float(), atol=1e-5)
    assert actor.probed() > 0
    actor.leave()
    running.join(60)
    assert not running.is_alive()


def _engine() -> ExactEngine:
    return ExactEngine(MODEL)


def test_rows_are_stacked_apart_from_the_engines() -> None:
    row = torch.ones(4)
    link = ActorLink()
    link.send("answers", rows=[row, row])
    row.zero_()
    [(_, rows)] = link.answers()
    assert rows is not None
    assert rows.tolist() == [[1.0] * 4] * 2
