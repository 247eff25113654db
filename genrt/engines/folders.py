"""Makes temporary folders of this process and removes the folders of dead processes.

A folder's name contains its owner: the host, the process id and the start time of the process. The owner
holds the folder's lock. A folder is swept if its owner was a process of this host and is dead, and the
lock is free: containers may share the directory and the host's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


class Folder:
    """A temporary folder. It is removed with its object or with the process; a forked child does not
    remove it. Raises OSError without room.

    Args:
        kind: a word for its content, which becomes part of the name.
        holder: the object with which it is removed, in place of this one.
    """

    def __init__(self, kind: str, holder: object = None) -> None:
        sweep()
        new = Path(tempfile.mkdtemp(prefix="genrt-"))
        self.path = new.with_name(
            f"genrt-{kind}-{_owner(os.getpid())}-{new.name.removeprefix('genrt-')}"
        )
        lock = _locked(new)
        new.rename(self.path)  # after locking, because a sweep finds this name
        holder = self if holder is None else holder
        self._finalizer = weakref.finalize(holder, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder and its content. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep() -> None:
    """Remove this user's folders of dead processes of this host; never raise."""
    own = re.escape(_host())
    name = re.compile(rf"genrt-[a-z]+-({own}-(\d+)-\d+)-\w+")
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for each in entries:
            found = name.fullmatch(each.name)
            if found and found[1] != _owner(int(found[2])) and _is_ours(each):
                _swept(Path(each.path))


def _is_ours(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        is_folder = entry.is_dir(follow_symlinks=False)
        return is_folder and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return False


def _locked(path: Path) -> int | None:
    """Lock a folder; return ``None`` if it is locked already or the file system has no locks."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _swept(path: Path) -> None:
    """Remove a folder unless its lock is held."""
    with contextlib.suppress(OSError):
        if (lock := _locked(path)) is not None:
            _deleted(path)
            os.close(lock)
            # vLLM names shared memory after a file of the ranks.
            for each in SHARED_MEMORY.glob(f"{path.name}*"):
                each.unlink(missing_ok=True)


def _deleted(path: Path) -> None:
    """Delete a folder, after the target of its ``link``, a folder of Ray's, which needs a short path.
    While Ray's processes still write to the target, both stay."""
    if (link := path / "link").is_symlink():
        shutil.rmtree(target := link.readlink(), ignore_errors=True)
        if target.exists():
            return
    shutil.rmtree(path, ignore_errors=True)


def _host() -> str:
    return re.sub(r"\W", "_", os.uname().nodename)


def _owner(process: int) -> str:
    """Return a name that only this process of this host ever has; a dead process has another one."""
    began = ""
    with contextlib.suppress(OSError):
        # The fields follow the program's name, which may contain spaces and parentheses.
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        began = "" if state in "ZX" else fields[18]
    return f"{_host()}-{process}-{began}"


def _remove(path: Path, lock: int | None, process: int) -> None:
    """Remove the folder, unless this is a forked child of its owner."""
    if os.getpid() == process:
        _deleted(path)
        if lock is not None:
            os.close(lock)
