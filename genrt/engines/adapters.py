"""Which directories may be loaded as LoRA adapters, and a runtime's own copies of those that are.

Rules:
    Safetensors and JSON are copied and loaded, nothing that can run code.
    An adapter is what its files were when it was added. Every engine of the runtime loads the copies, the
    one after a restart too, whatever has become of the directory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from genrt.engines.folders import Folder
from genrt.errors import GenrtError, InvalidAdapter, UnknownAdapter
from genrt.questions.contexts import Adapter

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})


class Adapters:
    """The adapters that a runtime has loaded, and those that it lost at a restart.

    The copies go when an adapter is forgotten, and all that is left with this object or the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[Adapter, Path] = {}
        self._root: Path | None = None
        self.lost: dict[Adapter, GenrtError] = {}

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._copies

    def __iter__(self) -> Iterator[tuple[Adapter, Path]]:
        """Yield each with the directory of its copy, in the order in which they were added."""
        return iter(list(self._copies.items()))

    def copied(self, path: Path) -> Path:
        """Copy an adapter's files; return the directory of the copies. One that this has returned is
        returned again. For any thread: it takes a while.

        Raises:
            InvalidAdapter: they cannot be copied.
        """
        if path.parent == self._root:
            return path
        try:
            with self._lock:
                if self._root is None:
                    self._root = Folder("adapters", self).path
            copy = Path(tempfile.mkdtemp(dir=self._root))
            try:
                for file in _files(path):
                    shutil.copyfile(file, copy / file.name)
            except BaseException:
                drop_copy(copy)
                raise
        except OSError as error:
            raise InvalidAdapter(f"{path} cannot be copied: {error}") from error
        return copy

    def keep(self, adapter: Adapter, copy: Path) -> None:
        """Keep an adapter's copy until it is forgotten."""
        self._copies[adapter] = copy

    def forget(self, adapter: Adapter) -> None:
        """Remove the adapter's copies."""
        copy = self._copies.pop(adapter, None)
        if copy is not None:
            drop_copy(copy)

    def lose(self, adapter: Adapter, reason: Exception) -> GenrtError:
        """Forget an adapter that another engine does not take; return the error for requests that
        name it."""
        self.forget(adapter)
        lost = UnknownAdapter(
            f"adapter {adapter.name!r} was lost when the engine was restarted: load it again with "
            f"add_adapter ({reason})"
        )
        lost.__cause__ = reason
        self.lost[adapter] = lost
        return lost


def adapter_bytes(path: Path) -> int:
    """Return how many bytes an adapter's files have. Raises InvalidAdapter if they cannot be read."""
    try:
        return sum(file.stat().st_size for file in _files(path))
    except OSError as error:
        raise InvalidAdapter(f"{path} cannot be read: {error}") from error


def drop_copy(copy: Path) -> None:
    """Remove a directory that ``Adapters.copied`` has made."""
    shutil.rmtree(copy, ignore_errors=True)


def _files(path: Path) -> list[Path]:
    """Return the files of an adapter in a directory: its weights, and the JSON beside them. Weights of
    other things that lie there are not the adapter's."""
    return [
        file
        for file in path.iterdir()
        if file.is_file() and (file.name == WEIGHTS_NAME or file.suffix == ".json")
    ]


def check_adapter_directory(path: Path) -> None:
    """Refuse a directory that no engine should open as an adapter. A runtime checks a directory once,
    before it copies the files for its engines.

    Pickled files beside the safetensors are neither read nor copied.

    Raises:
        InvalidAdapter: there is no such directory; its configuration is missing or is no JSON object;
            its weights are missing or only there as a pickle.
    """
    if not path.is_dir():
        raise InvalidAdapter(
            f"{path} is not a directory: give the one that holds {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    files = {file.name: file.suffix for file in path.iterdir() if file.is_file()}
    pickled = sorted(name for name, suffix in files.items() if suffix in _PICKLED)
    if WEIGHTS_NAME not in files and pickled:
        raise InvalidAdapter(
            f"{path} holds its weights as {pickled[0]}, which can run code when it is loaded: "
            f"convert them to {WEIGHTS_NAME} (peft's save_pretrained writes it)"
        )
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        if name not in files:
            raise InvalidAdapter(
                f"{path} has no {name}: save the adapter with peft's save_pretrained"
            )
    try:
        config = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{path / CONFIG_NAME} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidAdapter(f"{path / CONFIG_NAME} is not a JSON object: save the adapter again")
