"""Temporary folders: they go with their process, and those of dead processes go with the next opening."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import genrt
from genrt.engines import folders
from genrt.engines.exact import NGram
from genrt.engines.folders import Folder, sweep

MODEL = NGram.random(5, order=1, seed=1)

OWNER = """
import sys, genrt
from tests.cluster.test_replicas import adapter_in
from tests.engines.test_folders import MODEL, Path
import torch
lm = genrt.load(MODEL, engine="exact")
lm.update_weights_sync({"table": torch.zeros(5, 5)})
lm.add_adapter_sync("a", adapter_in(Path(sys.argv[1]), torch.zeros(5, 5)))
print("ready", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, of this process and its children."""
    found = tmp_path / "temporary"
    found.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    monkeypatch.setenv("TMPDIR", str(found))
    return found


def kinds(there: Path) -> list[str]:
    return sorted(each.name.split("-")[1] for each in there.glob("genrt-*"))


def test_copies_of_weights_and_adapters_of_a_killed_process_go_with_the_next_opening(
    there: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        with genrt.load(MODEL, engine="exact"):
            assert kinds(there) == ["adapters", "weights"], "its owner lives"
        owner.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # and is nobody's yet
        with genrt.load(MODEL, engine="exact"):
            assert kinds(there) == []


def dead(there: Path, name: str = "genrt-weights-{host}-{pid}-1-abc") -> Path:
    """Return a folder that a dead process has left: this one's number began later."""
    host = folders._host()
    path = there / name.format(host=host, pid=os.getpid())
    (path / "some").mkdir(parents=True)
    return path


def held(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)  # until this process ends
    fcntl.flock(file, fcntl.LOCK_EX)


def linked(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("genrt-weights-{host}-{pid}-1-abc", held),
        ("genrt-weights-{host}-{pid}-1-abc", linked),
        ("genrt-weights-another-{pid}-1-abc", lambda path: None),
        ("genrt-weights-abc", lambda path: None),
        ("somebody-weights-{host}-{pid}-1-abc", lambda path: None),
    ],
)
def test_what_may_be_somebodys_is_left_alone(
    there: Path, name: str, change: Callable[[Path], object]
) -> None:
    path = dead(there, name)
    change(path)
    sweep()
    assert (path / "some").is_dir()


def test_what_is_another_users_is_left_alone(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dead(there)
    user = os.getuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: user + 1)
        sweep()
    assert path.is_dir()
    sweep()
    assert not path.exists()


def test_the_memory_that_dead_ranks_shared_goes_too(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    path = dead(there, "genrt-ranks-{host}-{pid}-1-abc")
    (tmp_path / f"{path.name}-tp-0").touch()
    (tmp_path / "genrt-ranks").touch()
    sweep()
    assert sorted(each.name for each in tmp_path.glob("genrt-*")) == ["genrt-ranks"]


def test_the_folder_that_a_dead_owner_linked_to_goes_too(there: Path, tmp_path: Path) -> None:
    """As of a Ray whose owner was killed."""
    target = tmp_path / "ray"
    target.mkdir()
    (dead(there, "genrt-ray-{host}-{pid}-1-abc") / "link").symlink_to(target)
    sweep()
    assert not target.exists()
    assert kinds(there) == []


def test_a_folder_goes_with_its_object_but_not_with_a_forked_child(there: Path) -> None:
    folder = Folder("weights")
    if not os.fork():
        folder.close()
        os._exit(0)
    os.wait()
    assert kinds(there) == ["weights"]
    sweep()
    assert folder.path.is_dir()
    del folder
    assert kinds(there) == []
    holder = NGram.random(2, order=0, seed=1)
    path = Folder("weights", holder).path
    assert path.is_dir()
    del holder
    assert kinds(there) == []
    with Folder("twin") as path:
        (path / "a").touch()
    assert kinds(there) == []
