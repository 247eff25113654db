"""Which directories pass as adapters, before any engine sees them; and adapters across restarts."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import genrt
from genrt.engines.adapters import CONFIG_NAME, WEIGHTS_NAME, check_adapter_directory
from genrt.engines.exact import NGram
from genrt.errors import InvalidAdapter, UnknownAdapter
from genrt.lm import AsyncLM
from genrt.questions.arguments import Adapter
from genrt.runtime.concurrency import AT_ONCE_BYTES
from tests.scripted import PATIENCE_SECONDS, Gate, ScriptedEngine


def directory(root: Path, **files: str) -> Path:
    """A directory with these files; ``__`` in a name stands for the dot."""
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text, encoding="latin-1")
    return root


WHOLE = {"adapter_config__json": "{}", "adapter_model__safetensors": ""}


@pytest.mark.parametrize("more", [{}, {"optimizer__pt": ""}])
def test_configuration_and_safetensors_pass(tmp_path: Path, more: dict[str, str]) -> None:
    assert check_adapter_directory(directory(tmp_path, **WHOLE, **more)) == {}


@pytest.mark.promise(number=25)
@pytest.mark.parametrize(
    ("files", "message"),
    [
        *(
            ({"adapter_config__json": "{}", f"adapter_model__{each}": ""}, rf"\.{each}.*convert")
            for each in ("bin", "pt", "pth", "pkl", "pickle", "ckpt")
        ),
        ({}, r"no adapter_model\.safetensors"),
        ({"adapter_model__safetensors": ""}, r"no adapter_config\.json"),
        *(
            (WHOLE | {"adapter_config__json": text}, r"adapter_config\.json")
            for text in ("", "{", "[1, 2]", "\x80")
        ),
    ],
)
def test_what_is_no_adapter_is_refused_with_the_reason(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidAdapter, match=message):
        check_adapter_directory(directory(tmp_path, **files))
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(InvalidAdapter, match="is not a directory"):
            check_adapter_directory(path)


# -- across restarts --------------------------------------------------------------------------

MODEL = NGram.random(6, seed=1)
PROMPT = [1, 2]


def make_table(directory: Path, *, seed: int) -> Path:
    """An adapter of the exact engine."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"table": NGram.random(6, seed=seed).table}, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(
    scope="module",
    params=[
        "exact",
        pytest.param("transformers", marks=pytest.mark.vllm),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folders(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Directories of two adapters that fit the model, to be done with as one likes."""
    if kind == "exact":
        return make_table(tmp_path / "a", seed=2), make_table(tmp_path / "b", seed=3)
    loras: tuple[Path, Path] = request.getfixturevalue("loras")
    copies = (tmp_path / "a", tmp_path / "b")
    for path, copy in zip(loras, copies, strict=True):
        shutil.copytree(path, copy)
    return copies


@pytest.fixture(scope="module")
def shared(kind: str, request: pytest.FixtureRequest) -> Iterator[AsyncLM]:
    """A runtime without a cache."""
    vllm: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_lora_rank": 8}
    vllm |= {"enable_lora": True, "kv_cache_memory_bytes": 2**26, "max_loras": 4}
    model: Any = MODEL if kind == "exact" else request.getfixturevalue("llama")
    options = vllm if kind == "vllm" else {}
    with genrt.load(model, engine=kind, engine_options=options, cache_bytes=0) as opened:
        yield opened


@pytest.fixture
def lm(shared: AsyncLM) -> Iterator[AsyncLM]:
    """The runtime, which has no adapter yet."""
    yield shared
    for name in shared.adapters:
        shared.remove_adapter(name)


def rows(lm: AsyncLM, name: str | None) -> torch.Tensor:
    contexts = [PROMPT, [3], [2, 2, 2]]
    return lm.batch_next_token_logprobs_sync(contexts, adapter=name)


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=5e-4)


def spoil(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"no weights")


@pytest.mark.promise(number=14)
@pytest.mark.promise(number=30)
def test_adapters_survive_a_restart_whatever_becomes_of_their_folders(
    lm: AsyncLM, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of a name that was bound twice the later weights, and nothing of what was removed."""
    first, second = folders
    names = ("overwritten", "deleted", "spoiled", "twice", "removed")
    copies = {name: tmp_path / name for name in names}
    for name, copy in copies.items():
        shutil.copytree(first, copy)
        lm.add_adapter_sync(name, copy)
    lm.remove_adapter("removed")
    base, earlier = rows(lm, None), rows(lm, "twice")
    assert not near(earlier, base)
    for file in second.iterdir():
        shutil.copyfile(file, copies["overwritten"] / file.name)
    spoil(copies["spoiled"])
    shutil.rmtree(copies["deleted"])
    lm.add_adapter_sync("twice", second)
    later = rows(lm, "twice")
    assert not near(later, earlier)
    shutil.rmtree(copies["twice"])
    shutil.rmtree(second)
    lm.restart()
    assert near(rows(lm, None), base)
    for name in ("overwritten", "deleted", "spoiled"):
        assert near(rows(lm, name), earlier), name
    assert near(rows(lm, "twice"), later)
    assert lm.adapters == names[:-1]
    with pytest.raises(UnknownAdapter, match="removed"):
        rows(lm, "removed")


# -- weights that fit nothing -----------------------------------------------------------------

MISFITS: dict[str, Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]] = {
    "another prefix": lambda name, each: (name.replace(".model.layers", ".transformer.h"), each),
    "a layer too few": lambda name, each: None if ".layers.1." in name else (name, each),
    "a module too few": lambda name, each: (
        None if "layers.0.self_attn.k_" in name else (name, each)
    ),
    "a layer too many": lambda name, each: (name.replace(".layers.1.", ".layers.7."), each),
    "a narrow A": lambda name, each: (name, each[:, :64] if "_A" in name else each),
    "a narrow B": lambda name, each: (name, each if "_A" in name else each[:64]),
    "another rank": lambda name, each: (name, each[:4] if "_A" in name else each[:, :4]),
    "no layer": lambda name, each: (name.replace("lora_", "other_"), each),
}


def test_an_adapter_whose_weights_do_not_fit_is_refused_by_name_and_changes_nothing(
    lm: AsyncLM, folders: tuple[Path, Path], kind: str
) -> None:
    good, bad = folders
    file = bad / "adapter_model.safetensors"
    right = load_file(file)
    before = rows(lm, None)
    for name, misfit in MISFITS.items():
        changed = [misfit(*each) for each in right.items()]
        weights = {each[0]: each[1].contiguous() for each in changed if each is not None}
        if kind == "exact":  # whose adapters are one table
            weights = {"table": next(iter(weights.values()))[:4, :5].contiguous()}
        save_file(weights, file)
        with pytest.raises(InvalidAdapter, match=r"fit|take adapter bad"):
            lm.add_adapter_sync("bad", bad)
        assert lm.adapters == (), name
    lm.add_adapter_sync("good", good)
    assert near(rows(lm, None), before)
    assert not near(rows(lm, "good"), before)


# -- while a batch grows ----------------------------------------------------------------------


class Picky:
    """Opens engines, of which every one after the first refuses adapters of these names."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.opened: list[ScriptedEngine] = []

    def __call__(self) -> ScriptedEngine:
        refuses = self._names if self.opened else ()

        class Engine(ScriptedEngine):
            def add_adapter(self, adapter: Adapter, path: Path) -> None:
                if adapter.name in refuses:
                    raise InvalidAdapter(f"{path} is not to my liking")
                super().add_adapter(adapter, path)

        self.opened.append(Engine())
        return self.opened[-1]


@pytest.mark.promise(number=30)
def test_an_adapter_that_cannot_be_loaded_again_is_lost_alone(tmp_path: Path) -> None:
    folder = make_table(tmp_path / "a", seed=2)
    with genrt.load(engine=Picky("bad")) as lm:
        lm.add_adapter_sync("good", folder)
        lm.add_adapter_sync("bad", folder)
        good, _ = lm.next_token_logprobs_sync([1], adapter="good"), rows(lm, "bad")
        lm.restart()
        assert lm.adapters == ("good",)
        for ask in (rows, lambda lm, name: lm.draw_sync(PROMPT, adapter=name)):
            with pytest.raises(UnknownAdapter, match=r"'bad' was lost.*not to my liking"):
                ask(lm, "bad")
        with pytest.raises(UnknownAdapter, match="lost"):
            lm.remove_adapter("bad")
        assert torch.equal(lm.next_token_logprobs_sync([1], adapter="good"), good)
        rows(lm, None)
        assert lm.statistics().cache.rows == 1 + 3, "good's and the base model's"
        lm.restart()
        assert lm.adapters == ("good",)


def test_the_copies_go_with_their_adapter_and_with_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = make_table(tmp_path / "a", seed=2)
    (folder / "notes.txt").write_text("of no interest")
    save_file({"table": MODEL.table}, folder / "optimizer.safetensors")
    save_file({"table": MODEL.table}, folder / "model.safetensors")

    def copied() -> list[str]:
        return sorted(file.name for file in tmp_path.glob("genrt-adapters-*/*/*"))

    lm = genrt.load(MODEL, engine="exact")
    files = ["adapter_config.json", "adapter_model.safetensors"]
    lm.add_adapter_sync("a", folder)
    lm.add_adapter_sync("b", folder)
    assert copied() == sorted(files * 2)
    lm.remove_adapter("a")
    lm.next_token_logprobs_sync([1])
    assert copied() == files
    wrong = make_table(tmp_path / "wrong", seed=1)
    spoil(wrong)
    with pytest.raises(InvalidAdapter, match=str(wrong)):
        lm.add_adapter_sync("c", wrong)
    assert copied() == files
    lm.restart()
    assert copied() == files
    lm.close()
    del lm
    gc.collect()
    assert list(tmp_path.glob("genrt-adapters-*")) == []


# -- copies are made off the engine's thread ------------------------------------------------------


class Copies:
    """Has the copying of large adapters wait at a gate, one for each folder; and where it was done."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.gates: dict[str, Gate] = {}
        self.threads: set[str] = set()
        self._copyfile = shutil.copyfile
        monkeypatch.setattr(tempfile, "tempdir", str(root))
        monkeypatch.setattr(shutil, "copyfile", self._copied)

    def large(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        (folder / CONFIG_NAME).write_text("{}")
        (folder / WEIGHTS_NAME).write_bytes(bytes(AT_ONCE_BYTES))
        self.gates[name] = Gate()
        return folder

    def _copied(self, source: Path, target: Path) -> None:
        self.threads.add(threading.current_thread().name)
        self.gates[source.parent.name].go_through()
        self._copyfile(source, target)

    def left(self) -> int:
        return len([*self.root.glob("genrt-adapters-*/*")])


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(tmp_path, monkeypatch)


async def test_the_engine_answers_while_an_adapter_is_copied(copies: Copies) -> None:
    async with genrt.load(engine=ScriptedEngine) as lm:
        adding = asyncio.ensure_future(lm.add_adapter("a", copies.large("a")))
        await asyncio.to_thread(copies.gates["a"].wait_until_held)
        await lm.next_token_logprobs([1], timeout=PATIENCE_SECONDS)
        assert not adding.done()
        copies.gates["a"].open()
        await adding
        assert lm.adapters == ("a",)
    assert "genrt-engine" not in copies.threads


async def test_who_leaves_while_an_adapter_is_copied_or_loaded_loads_none(copies: Copies) -> None:
    gate = Gate()

    class Slow(ScriptedEngine):
        def add_adapter(self, adapter: Adapter, path: Path) -> None:
            gate.go_through()
            super().add_adapter(adapter, path)

    engine = Slow()
    async with genrt.load(engine=lambda: engine) as lm:
        adding = asyncio.ensure_future(lm.add_adapter("a", copies.large("a")))
        await asyncio.to_thread(copies.gates["a"].wait_until_held)
        adding.cancel()
        await asyncio.wait([adding])
        copies.gates["a"].open()
        folder = copies.large("b")
        copies.gates["b"].open()
        adding = asyncio.ensure_future(lm.add_adapter("b", folder))
        await asyncio.to_thread(gate.wait_until_held)
        adding.cancel()
        await asyncio.wait([adding])
        gate.open()
        await lm.next_token_logprobs([1])
        await lm.next_token_logprobs([2])
        assert engine.adapters == []
        assert lm.adapters == ()
    while copying := [each for each in threading.enumerate() if "genrt-aside" in each.name]:
        await asyncio.to_thread(copying[0].join)
    assert copies.left() == 0
