"""Temporary folders of this process, and the end of those that dead processes have left.

A folder's name has its owner: the host, the process and when that began. Its owner holds its lock.

Rules:
    A folder goes with its object, or with the process. A forked child removes none of its parent's.
    A folder is swept if its owner is dead, of this host, and its lock is free. Other hosts, and other
    containers of this host, may share the folder of temporary files; their processes are not seen here.
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
from types import TracebackType

__all__ = ["Folder", "sweep"]

MOST_SWEPT = 64
"""How many folders are removed at once, so that whoever opens an engine does not wait for long."""

SHARED_MEMORY = Path("/dev/shm")


class Folder:
    """A temporary folder.

    Args:
        kind: the word in its name for what is in it.
        holder: the object with which it goes, instead of this one.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, kind: str, holder: object = None) -> None:
        sweep()
        new = Path(tempfile.mkdtemp(prefix="genrt-"))
        self.path = new.with_name(
            f"genrt-{kind}-{_owner(os.getpid())}-{new.name.removeprefix('genrt-')}"
        )
        lock = _locked(new)
        new.rename(self.path)  # once it is locked: it may be swept under this name
        holder = self if holder is None else holder
        self._finalizer = weakref.finalize(holder, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove it, with all that is in it. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def sweep() -> None:
    """Remove the folders of this user that dead processes of this host have left; never raise."""
    own = re.escape(_host())
    name = re.compile(rf"genrt-[a-z]+-({own}-(\d+)-\d+)-\w+")
    swept = 0
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for each in entries:
            found = name.fullmatch(each.name)
            if found and found[1] != _owner(int(found[2])) and _is_ours(each):
                swept += _swept(Path(each.path))
            if swept == MOST_SWEPT:
                return


def _is_ours(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        is_folder = entry.is_dir(follow_symlinks=False)
        return is_folder and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return False


def _locked(path: Path) -> int | None:
    """Return the lock of a folder; ``None`` if another has it, or the file system has no locks."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _swept(path: Path) -> bool:
    """Remove a folder unless its lock is held; return whether it was removed."""
    with contextlib.suppress(OSError):
        if (lock := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            for each in SHARED_MEMORY.glob(
                f"{path.name}*"
            ):  # vLLM names it by a file of the ranks'
                each.unlink(missing_ok=True)
            return True
    return False


def _host() -> str:
    return re.sub(r"\W", "_", os.uname().nodename)


def _owner(process: int) -> str:
    """Return the name of a process of this host while it lives: no other one has it, before or after."""
    began = ""
    with contextlib.suppress(OSError):
        # Behind the program's name, which may have anything in it.
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        began = "" if state in "ZX" else fields[18]
    return f"{_host()}-{process}-{began}"


def _remove(path: Path, lock: int | None, process: int) -> None:
    """Remove the folder, but not in a forked child: it is the parent's."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)
