"""New weights for a model: the protocols of engines that take them, checks, files and copies.

Rules:
    Weights are tensors or safetensors files, which cannot run code.
    Names, shapes, types and completeness are checked before the engine changes anything.
    A runtime saves the last complete weights, for the engine after a restart.
"""

from __future__ import annotations

import difflib
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from genrt.engines.folders import Folder
from genrt.errors import EngineDied, EngineFailed, EngineUnsupported, InvalidWeights
from genrt.numbers import named, shown

INDEX_NAME = "model.safetensors.index.json"

SHARD_BYTES = 2**30
"""The size of one file of a copy, which is also the host memory that copying takes."""

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Tensors with their names in the model's checkpoint."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The shape and types of a tensor in the model's checkpoint.

    Attributes:
        dtypes: the accepted types, the checkpoint's first.
        tied_to: another tensor with the same content; this one is optional.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    tied_to: str | None = None

    def __str__(self) -> str:
        return f"{list(self.shape)} of {' or '.join(str(each)[6:] for each in self.dtypes)}"


Layout: TypeAlias = Mapping[str, TensorForm]
"""The tensors of a model's checkpoint, by name."""

SleepingPart: TypeAlias = Literal["weights", "kv_cache"]
"""A part of an engine's memory that it can free while it sleeps."""

SLEEPING_PARTS: frozenset[SleepingPart] = frozenset(("weights", "kv_cache"))


class Weights(Protocol):
    """The weights of an open engine, which has them as ``weights``."""

    def layout(self) -> Layout:
        """Return the tensors that new weights must have.

        Raises:
            EngineUnsupported: this engine's weights cannot be replaced; the message has the reason.
        """

    def checkpoint(self) -> list[Path]:
        """Return the safetensors files that the engine was opened with."""

    def begin(self) -> None:
        """Drop everything that the old weights computed; no request is in progress.

        If this raises, the engine continues with the old weights. After any later error it is unusable.
        """

    def load(self, tensors: NamedTensors) -> None:
        """Load some of the tensors, which were checked. The caller may change them afterwards."""

    def finish(self) -> None:
        """Use the new weights from now on; all have been loaded."""


@runtime_checkable
class Sleeping(Weights, Protocol):
    """Weights of an engine that can free its device memory while no request is in progress."""

    @property
    def asleep(self) -> frozenset[SleepingPart]:
        """The parts of the memory that are free."""

    def check_sleep(self) -> None:
        """Raise EngineUnsupported, with the reason, unless it can sleep. Safe from any thread."""

    def sleep(self, level: int) -> int:
        """Free the KV cache and the weights; return the number of bytes that became free.

        Level 1 moves the weights to the host, level 2 drops them.
        """

    def wake_up(self, parts: frozenset[SleepingPart]) -> None:
        """Allocate these parts again. Dropped weights must be loaded afterwards."""


@runtime_checkable
class Continuing(Weights, Protocol):
    """Weights of an engine whose texts in progress can go on with other weights."""

    def begin_beside_texts(self, keeps_kv: bool) -> None:
        """Begin as ``begin``, but keep the texts in progress, with their KV cache if ``keeps_kv``.
        Otherwise the new weights compute it again."""

    def set_version(self, version: int) -> None:
        """Label the tokens that are drawn from now on."""


@runtime_checkable
class Receiving(Weights, Protocol):
    """Weights of an engine with workers that receive tensors directly from vLLM's trainers."""

    def check_receives(self) -> None:
        """Raise EngineUnsupported, with the reason, unless the engine was opened for it."""

    def connect(self, init_info: Mapping[str, Any]) -> None:
        """Connect the workers to a trainer. Raises EngineFailed if that fails."""

    def disconnect(self) -> None:
        """Disconnect the workers from the trainer."""

    def receive(self, update_info: Any) -> None:
        """Receive tensors from the trainer, in place of ``load``."""


def weights_of(engine: object) -> Weights:
    """Return the weights of an engine. Raises EngineUnsupported if they cannot be replaced."""
    weights: Weights | None = getattr(engine, "weights", None)
    if weights is None:
        raise EngineUnsupported(
            f"{type(engine).__name__} cannot replace its weights: load a runtime with the new ones"
        )
    return weights


def check_tensors(
    layout: Layout, tensors: NamedTensors, given: Collection[str] = (), *, finite: bool = False
) -> dict[str, Tensor]:
    """Return tensors by name, without tied ones.

    Args:
        given: the names of earlier tensors of the same weights.
        finite: whether NaN and infinity are refused too; this reads every number.

    Raises:
        InvalidWeights: a tensor does not fit; the message has its name and the expected form.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in found or name in given:
            raise InvalidWeights(f"tensor {named(name)} is given twice: give each once")
        _check_tensor(layout, name, tensor, finite=finite)
        found[name] = tensor
    for name in [name for name in found if layout[name].tied_to is not None]:
        twin = found.get(str(layout[name].tied_to))
        if twin is None or not (twin.is_meta or torch.equal(found[name], twin)):
            raise InvalidWeights(
                f"tensor {name!r} is tied to {layout[name].tied_to!r} in this model, but is not given "
                "beside an equal one: leave it out"
            )
        del found[name]
    return found


def _check_tensor(layout: Layout, name: object, tensor: object, *, finite: bool) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise InvalidWeights(
            f"weights must be tensors with their names, got {named(name)} with {shown(tensor)}"
        )
    form = layout.get(name)
    if form is None:
        close = difflib.get_close_matches(name, layout, 1)
        raise InvalidWeights(
            f"the model has no tensor {name!r}: give those of its checkpoint, such as "
            f"{(close or sorted(layout) or ['none'])[0]!r}"
        )
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or tuple(tensor.shape) != form.shape or tensor.dtype not in form.dtypes:
        got = f"{list(tensor.shape)} of {str(tensor.dtype)[6:]}"
        raise InvalidWeights(
            f"tensor {name!r} is {got if is_plain else str(tensor.layout)}, the model's is {form}"
        )
    if finite and not tensor.is_meta and not bool(tensor.isfinite().all()):
        raise InvalidWeights(f"tensor {name!r} has NaN or infinity in it: give finite weights")


def check_complete(layout: Layout, given: Collection[str]) -> None:
    """Raise InvalidWeights if a tensor of the layout, other than a tied one, is missing."""
    missing = [name for name, form in layout.items() if name not in given and not form.tied_to]
    if missing:
        count = f"{len(missing):,} tensors are" if len(missing) > 1 else "a tensor is"
        raise InvalidWeights(f"{count} missing, {missing[0]!r} first: give all of the model's")


# -- safetensors ------------------------------------------------------------------------------


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files at a path, which is a file or a checkpoint's directory.

    Raises:
        InvalidWeights: there are no such files.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.is_dir():
        raise InvalidWeights(f"{path} is no safetensors file, and no directory of them")
    index = path / INDEX_NAME
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except FileNotFoundError:
        names = {each.name for each in path.glob("*.safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidWeights(f"{index} is no index of safetensors files: {error}") from error
    files = [path / str(name) for name in sorted(map(str, names))]
    lost = [each for each in files if not each.is_file() or each.parent != path]
    if lost or not files:
        what = f"{lost[0].name} is not in it" if lost else "no *.safetensors is in it"
        raise InvalidWeights(f"{path} has no whole checkpoint: {what}")
    return files


def forms_in(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor on the meta device for each tensor in the files, from their headers.

    Raises:
        InvalidWeights: a file is not a complete safetensors file.
    """

    def form(file: Any, name: str) -> Tensor:
        lazy = file.get_slice(name)
        shape = lazy.get_shape()
        some = lazy[:0] if shape else file.get_tensor(name)
        return torch.empty(shape, dtype=some.dtype, device="meta")

    return _read_tensors(files, form)


class TensorsIn:
    """The tensors of files, read one at a time; raises the errors of ``forms_in``.

    Each process of an engine reads ``files``.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return _read_tensors(self.files, lambda file, name: file.get_tensor(name))


def _read_tensors(
    files: Sequence[Path], read: Callable[[Any, str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 — not a mapping
                    yield name, read(file, name)
        except (OSError, SafetensorError) as error:
            raise InvalidWeights(f"{path} cannot be read as safetensors: {error}") from error


def layout_of(
    files: Sequence[Path], dtypes: Sequence[torch.dtype] = (), *, tied: bool = False
) -> Layout:
    """Return the layout of a checkpoint in safetensors.

    Args:
        dtypes: more accepted types for floating-point tensors.
        tied: whether the head shares the weights of the embeddings.

    Raises:
        InvalidWeights: a file is not a complete safetensors file.
    """
    layout: dict[str, TensorForm] = {}
    for name, tensor in forms_in(files):
        own = tensor.dtype
        more = [each for each in dtypes if own.is_floating_point and own.itemsize > 1]
        layout[name] = TensorForm(tuple(tensor.shape), tuple(dict.fromkeys([own, *more])))
    if tied and (embeddings := [each for each in layout if each.endswith("embed_tokens.weight")]):
        form = layout[embeddings[0]]
        layout["lm_head.weight"] = TensorForm(form.shape, form.dtypes, embeddings[0])
    return layout


# -- saved weights ----------------------------------------------------------------------------


class SavedWeights:
    """Weights in files: the caller's own files, or a copy in a directory of the runtime."""

    def __init__(self, files: Sequence[Path] = (), *, directory: Path | None = None) -> None:
        self.directory = directory
        self._stamps = {file: _stamp(file) for file in files}
        self._count = 0

    def files(self) -> list[Path]:
        """Return the files."""
        return [*self._stamps] if self.directory is None else sorted(self.directory.iterdir())

    def changed(self) -> Path | None:
        """Return a file of the caller's that was changed or removed, if there is one."""
        stamps = self._stamps.items()
        return next((file for file, stamp in stamps if stamp != _stamp(file)), None)

    def add(self, tensors: NamedTensors) -> None:
        """Add tensors to the copy. Raises InvalidWeights if there is no room."""
        shard: dict[str, Tensor] = {}
        size = 0
        for name, tensor in tensors:
            # Neither views nor tensors that share memory can be saved.
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
            if size >= SHARD_BYTES:
                self._save(shard)
                shard, size = {}, 0
        if shard:
            self._save(shard)

    def _save(self, shard: dict[str, Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._count += 1
        try:
            save_file(shard, f"{self.directory}/{self._count:05}.safetensors")
        except (OSError, SafetensorError) as error:
            raise InvalidWeights(f"the weights cannot be copied: {error}") from error

    def drop(self) -> None:
        """Remove the copy. The caller's own files stay."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return metadata that changes with a file's content; ``None`` without the file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class KeptWeights:
    """The last complete weights of a runtime, saved for the next engine. Copies are removed with this
    object or with the process.

    Attributes:
        version: the version of these weights; 0 stands for the model's own, which need no copy.
    """

    def __init__(self) -> None:
        self.version = 0
        self._root: Path | None = None
        self._saved: SavedWeights | None = None

    def begin(self) -> SavedWeights:
        """Return an empty copy for new weights. Raises InvalidWeights if there is no room."""
        try:
            if self._root is None:
                self._root = Folder("weights", self).path
            return SavedWeights(directory=Path(tempfile.mkdtemp(dir=self._root)))
        except OSError as error:
            raise InvalidWeights(f"the weights cannot be copied: {error}") from error

    def replace(self, version: int, saved: SavedWeights | None) -> None:
        """Replace the saved weights; with ``None`` only the version is known."""
        before, self._saved = self._saved, saved
        self.version = version
        if before is not None:
            before.drop()

    def reload(self, engine: object) -> None:
        """Load the saved weights into a new engine, unless they are the model's own.

        Raises:
            EngineFailed: they were not saved, or their files have changed. EngineDied: the engine has
                loaded only a part.
        """
        if not self.version:
            return
        saved, why = self._saved, "were in the engine, which is gone"
        changed = None if saved is None else saved.changed()
        if changed is not None:
            why = f"were read from {changed}, which has changed since"
        if saved is None or changed is not None:
            raise EngineFailed(
                f"weights of version {self.version} {why}, and no copy was kept: load the model "
                "again, or replace weights with keep=True"
            )
        set_version(engine, self.version)
        _load_files(engine, saved.files())

    def restore(self, engine: object) -> None:
        """Load the saved weights, or the checkpoint's, into an engine that has dropped its weights.
        Raises the errors of ``reload``."""
        if self.version:
            self.reload(engine)
        else:
            _load_files(engine, weights_of(engine).checkpoint())


KVCache: TypeAlias = Literal["recompute", "keep"]
"""Whether the new weights compute the keys and values of texts in progress again."""

NO_TEXT_CONTINUES = (
    "texts of this engine cannot go on with other weights: replace them with "
    'pending="finish", or with "restart"'
)


def continuing_weights(engine: object) -> Continuing:
    """Return the weights of an engine. Raises EngineUnsupported unless texts can go on with others."""
    weights = weights_of(engine)
    if not isinstance(weights, Continuing):
        raise EngineUnsupported(NO_TEXT_CONTINUES)
    return weights


def set_version(engine: object, version: int) -> None:
    """Label the tokens that an engine draws from its next step on, if it labels them. Call this before
    ``Weights.finish``: replicas get the label with the weights."""
    weights = getattr(engine, "weights", None)
    if isinstance(weights, Continuing):
        weights.set_version(version)


def _load_files(engine: object, files: Sequence[Path]) -> None:
    """Load complete weights. Raises EngineDied if that stops midway."""
    weights = weights_of(engine)
    weights.begin()
    try:
        weights.load(TensorsIn(files))
        weights.finish()
    except Exception as error:
        raise EngineDied(f"its weights could not be read again: {error}") from error
