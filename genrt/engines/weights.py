"""Weights that replace a model's own: what fits, checked before anything changes; a runtime's copies.

Rules:
    Weights come as tensors or as safetensors, nothing that can run code.
    What can be checked is checked before the engine is told: names, shapes, types, completeness.
    A runtime keeps the last weights that were whole, for the engine after a restart.
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

__all__ = [
    "KeptWeights",
    "Layout",
    "NamedTensors",
    "Original",
    "Receiving",
    "Sleeping",
    "TensorForm",
    "TensorsIn",
    "Updating",
    "Weights",
    "check_complete",
    "check_tensors",
    "forms_in",
    "layout_of",
    "weight_files",
    "weights_of",
]

INDEX_NAME = "model.safetensors.index.json"

SHARD_BYTES = 2**30
"""How much of the weights is copied to a file at once, on its way through the host's memory."""

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Tensors with their names in the model's checkpoint."""


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The form that a tensor of the model's checkpoint has.

    Attributes:
        dtypes: the types that it may have, the checkpoint's first.
        tied_to: the tensor that it is another name of; it need not be given then.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    tied_to: str | None = None

    def __str__(self) -> str:
        return f"{list(self.shape)} of {' or '.join(str(each)[6:] for each in self.dtypes)}"


Layout: TypeAlias = Mapping[str, TensorForm]
"""The tensors of a model's checkpoint, by name."""

SleepingPart: TypeAlias = Literal["weights", "kv_cache"]
"""A part of an engine's memory that can be given back."""

SLEEPING_PARTS: frozenset[SleepingPart] = frozenset(("weights", "kv_cache"))


class Weights(Protocol):
    """The weights of an engine that is open."""

    def layout(self) -> Layout:
        """Return what has to be given.

        Raises:
            EngineUnsupported: the weights of this one cannot be replaced; it says why.
        """

    def checkpoint(self) -> list[Path]:
        """Return the safetensors files of the weights that the engine was opened with."""

    def begin(self) -> None:
        """Forget all that was computed by the weights; nothing is in progress. An engine that cannot, or
        does not see it done, raises and goes on with the old weights; any later error is its end."""

    def load(self, tensors: NamedTensors) -> None:
        """Take some of the tensors, all of which fit. They may change once this has returned."""

    def finish(self) -> None:
        """Compute by the new weights from now on, all of which have been given."""


@runtime_checkable
class Updating(Protocol):
    """An Engine whose weights can be replaced while it is open."""

    @property
    def weights(self) -> Weights:
        """The weights."""


@runtime_checkable
class Sleeping(Weights, Protocol):
    """Weights of an engine that can give back its device's memory for a while. Nothing is in progress
    then."""

    @property
    def asleep(self) -> frozenset[SleepingPart]:
        """The parts of the memory that are given back."""

    def check_sleep(self) -> None:
        """Raise EngineUnsupported, with the reason, unless it can sleep; any thread may ask."""

    def sleep(self, level: int) -> int:
        """Free the KV cache, and the weights: level 1 moves these to the host, level 2 drops them. Return
        how many bytes are free now that were not."""

    def wake_up(self, parts: frozenset[SleepingPart]) -> None:
        """Have these parts back. Weights that were dropped have to be loaded then."""


@runtime_checkable
class Receiving(Weights, Protocol):
    """Weights of an engine whose workers a trainer sends tensors to by itself, as vLLM's trainers do."""

    def check_receives(self) -> None:
        """Raise EngineUnsupported, with the reason, unless the engine was opened for it."""

    def connect(self, init_info: Mapping[str, Any]) -> None:
        """Have the workers meet a trainer. Raises EngineFailed if they do not meet."""

    def disconnect(self) -> None:
        """Have the workers leave the trainer."""

    def receive(self, update_info: Any) -> None:
        """Take what the trainer sends, in place of ``load``."""


def weights_of(engine: object) -> Weights:
    """Return the weights of an engine. Raises EngineUnsupported if they cannot be replaced."""
    if isinstance(engine, Updating):
        return engine.weights
    raise EngineUnsupported(
        f"{type(engine).__name__} cannot replace its weights: load a runtime with the new ones"
    )


def check_tensors(
    layout: Layout, tensors: NamedTensors, given: Collection[str] = (), *, finite: bool = False
) -> dict[str, Tensor]:
    """Return tensors by their names, those left out that are only other names of one beside them.

    Args:
        given: the names that were given before these.
        finite: whether NaN and infinity are refused too; this reads every number.

    Raises:
        InvalidWeights: one does not fit; the message names it and what was expected.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in found or name in given:
            raise InvalidWeights(f"tensor {named(name)} is given twice: give each once")
        _check_tensor(layout, name, tensor, finite=finite)
        found[name] = tensor
    for name in [name for name in found if layout[name].tied_to is not None]:
        twin = found.get(str(layout[name].tied_to))
        if twin is None or not (_is_same(found[name], twin) or torch.equal(found[name], twin)):
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


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def check_complete(layout: Layout, given: Collection[str]) -> None:
    """Raise InvalidWeights if a tensor of the layout, not only another name of one, was not given."""
    missing = [name for name, form in layout.items() if name not in given and not form.tied_to]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise InvalidWeights(f"tensor {missing[0]!r}{more} is missing: give all of the model's")


# -- safetensors ------------------------------------------------------------------------------


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files at a path: it, or those of a checkpoint's directory.

    Raises:
        InvalidWeights: there are none.
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
    """Yield what the files say of their tensors, without reading these: tensors of no device.

    Raises:
        InvalidWeights: a file is no whole safetensors file.
    """

    def form(file: Any, name: str) -> Tensor:
        lazy = file.get_slice(name)
        shape = lazy.get_shape()
        some = lazy[:0] if shape else file.get_tensor(name)
        return torch.empty(shape, dtype=some.dtype, device="meta")

    return _read(files, form)


class TensorsIn:
    """The tensors of files, each read when it is asked for; raises as ``forms_in``.

    ``files`` are there for an engine whose other processes read them too.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return _read(self.files, lambda file, name: file.get_tensor(name))


def _read(
    files: Sequence[Path], read: Callable[[Any, str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 — it is no mapping
                    yield name, read(file, name)
        except (OSError, SafetensorError) as error:
            raise InvalidWeights(f"{path} cannot be read as safetensors: {error}") from error


def layout_of(
    files: Sequence[Path], dtypes: Sequence[torch.dtype] = (), *, tied: bool = False
) -> Layout:
    """Return the layout of a checkpoint in safetensors.

    Args:
        dtypes: types that floating-point tensors may have beside their own.
        tied: whether the head's weights are the embeddings'.

    Raises:
        InvalidWeights: a file is no whole safetensors file.
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


# -- copies -----------------------------------------------------------------------------------


class KeptWeights:
    """The last whole weights that an engine was given, as files, for the engine after it.

    Copies go with this object or the process. Files of the caller's are read again where they are.

    Attributes:
        version: whose these are; 0 is the model as it was opened, which needs no copy.
    """

    def __init__(self) -> None:
        self.version = 0
        self._root: Path | None = None
        self._kept: Copying | Original | None = None

    def begin(self) -> Copying:
        """Return the copy of new weights, with nothing in it yet. Raises InvalidWeights if there is no
        room."""
        try:
            if self._root is None:
                self._root = Folder("weights", self).path
            return Copying(Path(tempfile.mkdtemp(dir=self._root)))
        except OSError as error:
            raise InvalidWeights(f"the weights cannot be copied: {error}") from error

    def replace(self, version: int, kept: Copying | Original | None) -> None:
        """Keep these in place of those before; with ``None``, only their version."""
        before, self._kept = self._kept, kept
        self.version = version
        if before is not None:
            before.drop()

    def reload(self, engine: object) -> None:
        """Give a new engine the weights, if it needs them.

        Raises:
            EngineFailed: they were not kept, or their files have changed. EngineDied: the engine has a
                part of them.
        """
        if not self.version:
            return
        advice = "load the model again, or replace weights with keep=True"
        if self._kept is None:
            raise EngineFailed(
                f"weights of version {self.version} were in the engine, which is gone, and no copy was "
                f"kept: {advice}"
            )
        if (changed := self._kept.changed()) is not None:
            raise EngineFailed(
                f"weights of version {self.version} were read from {changed}, which has changed since, "
                f"and no copy was kept: {advice}"
            )
        _load(engine, self._kept.files())

    def restore(self, engine: object) -> None:
        """Give an engine that has dropped them the weights again: the copy, or those of its checkpoint.
        Raises as ``reload``."""
        if self.version:
            self.reload(engine)
            return
        _load(engine, weights_of(engine).checkpoint())


def _load(engine: object, files: Sequence[Path]) -> None:
    """Load whole weights. Raises EngineDied if that ends in the middle."""
    weights = weights_of(engine)
    weights.begin()
    try:
        weights.load(TensorsIn(files))
        weights.finish()
    except Exception as error:
        raise EngineDied(f"its weights could not be read again: {error}") from error


class Original:
    """Weights in files of the caller's, which stay where they are."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._stamps = {file: _stamp(file) for file in files}

    def files(self) -> list[Path]:
        """Return the files."""
        return [*self._stamps]

    def changed(self) -> Path | None:
        """Return a file that is gone, or another one than it was."""
        stamps = self._stamps.items()
        return next((file for file, stamp in stamps if stamp != _stamp(file)), None)

    def drop(self) -> None:
        """Do nothing: the files are the caller's."""


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file's content, as far as its directory knows."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class Copying:
    """Weights on their way to the files of a runtime's copy."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0

    def add(self, tensors: NamedTensors) -> None:
        """Copy some. Raises InvalidWeights if there is no room."""
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
            save_file(shard, self.directory / f"{self._count:05}.safetensors")
        except (OSError, SafetensorError) as error:
            raise InvalidWeights(f"the weights cannot be copied: {error}") from error

    def files(self) -> list[Path]:
        """Return the files of the copy."""
        return sorted(self.directory.iterdir())

    def changed(self) -> None:
        """Return ``None``: the files are this runtime's."""

    def drop(self) -> None:
        """Remove what was copied."""
        shutil.rmtree(self.directory, ignore_errors=True)
