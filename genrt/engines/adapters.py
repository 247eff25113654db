"""Checks directories of LoRA adapters and keeps a runtime's copies of loaded ones.

Rules:
    Only safetensors and JSON files are copied and loaded, because other formats can run code.
    Every engine of the runtime, also after a restart, loads the copies, so later changes of the directory
    have no effect.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genrt.engines.folders import Folder
from genrt.errors import GenrtError, InvalidAdapter, InvalidRequest, UnknownAdapter
from genrt.questions.arguments import Adapter

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})


class Adapters:
    """The adapters of a runtime, and the adapters that it lost at a restart. All copies are removed with
    this object or with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[Adapter, Path] = {}
        self._root: Path | None = None
        self.lost: dict[Adapter, GenrtError] = {}

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._copies

    def __iter__(self) -> Iterator[tuple[Adapter, Path]]:
        """Yield each adapter with the directory of its copy, in order of addition."""
        return iter(list(self._copies.items()))

    def copied(self, path: Path) -> Path:
        """Copy an adapter's files and return the directory of the copies; return such a directory as it
        is. Safe from any thread.

        Raises:
            InvalidAdapter: the files cannot be copied.
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
        """Record the copy of a loaded adapter."""
        self._copies[adapter] = copy

    def forget(self, adapter: Adapter) -> None:
        """Remove the adapter's copies."""
        copy = self._copies.pop(adapter, None)
        if copy is not None:
            drop_copy(copy)

    def lose(self, adapter: Adapter, reason: Exception) -> GenrtError:
        """Forget an adapter that a new engine refused; return the error for requests with it."""
        self.forget(adapter)
        lost = UnknownAdapter(
            f"adapter {adapter.name!r} was lost when the engine was restarted: load it again with "
            f"add_adapter ({reason})"
        )
        lost.__cause__ = reason
        self.lost[adapter] = lost
        return lost


def adapter_bytes(path: Path) -> int:
    """Return the size of an adapter's files. Raises InvalidAdapter if they cannot be read."""
    try:
        return sum(file.stat().st_size for file in _files(path))
    except OSError as error:
        raise InvalidAdapter(f"{path} cannot be read: {error}") from error


def drop_copy(copy: Path) -> None:
    """Remove a directory that ``Adapters.copied`` returned."""
    shutil.rmtree(copy, ignore_errors=True)


def _files(path: Path) -> list[Path]:
    """Return the adapter's weights and JSON files in a directory."""
    files = [each for each in path.iterdir() if each.is_file()]
    return [each for each in files if each.name == WEIGHTS_NAME or each.suffix == ".json"]


def check_adapter_directory(path: Path) -> dict[str, Any]:
    """Return an adapter's configuration. Pickled files beside the safetensors file are neither read nor
    copied.

    Raises:
        InvalidAdapter: there is no such directory; its configuration is missing or not a JSON object; its
            weights are missing or only pickled.
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
    return config


def least_lora_rank(*directories: Path) -> int:
    """Return the least ``max_lora_rank`` of vLLM that fits these adapters. Raises InvalidRequest if one
    has no rank."""
    ranks = [1]
    for each in directories:
        try:
            ranks.append(int(json.loads((each / CONFIG_NAME).read_bytes())["r"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidRequest(
                f"{each} is not a LoRA adapter: its {CONFIG_NAME} has no rank"
            ) from error
    most = max(ranks)
    return next((each for each in (8, 16, 32, 64, 128, 256, 320, 512) if each >= most), most)
