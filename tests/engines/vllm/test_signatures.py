"""Methods of vLLM that genrt overrides, wraps or replaces: their signatures, version by version."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm

import genrt
from genrt.engines.vllm import opening
from genrt.engines.vllm.opening import SUPPORTED
from genrt.engines.vllm.signatures import (
    TABLE,
    check_signatures,
    differences,
    installed,
)
from genrt.errors import EngineUnsupported
from tests.engines.vllm.record_signatures import signatures_of_sources

pytestmark = pytest.mark.vllm

FOLDER = Path(genrt.__file__).parent / "engines" / "vllm"
MODULES = [f"genrt.engines.vllm.{path.stem}" for path in sorted(FOLDER.glob("[a-z]*.py"))]
CONSTRUCTED_HERE = {"GuidedStructures", "TextFailed"}
"""Classes whose constructor only genrt calls."""


@pytest.fixture(scope="module", autouse=True)
def all_imported() -> None:
    for name in TABLE["0.32"]:
        owner = name.rpartition(".")[0]
        module, _, last = owner.rpartition(".")
        importlib.import_module(module if last[0].isupper() else owner)


def test_the_installed_vllm_has_the_recorded_signatures() -> None:
    check_signatures(vllm.__version__)
    version = ".".join(vllm.__version__.split(".")[:2])
    assert installed(TABLE[version]) == TABLE[version]


def test_every_supported_version_is_recorded_with_the_same_methods() -> None:
    (_, low), (_, high) = SUPPORTED
    assert TABLE.keys() == {f"0.{minor}" for minor in range(low, high)}
    assert len({tuple(recorded) for recorded in TABLE.values()}) == 1


def test_a_method_with_another_argument_or_none_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, parameters in TABLE["0.32"].items():
        recorded = TABLE["0.32"] | {name: f"{parameters}, more="}
        monkeypatch.setitem(TABLE, "0.32", recorded)
        with pytest.raises(EngineUnsupported, match=rf"{name} has .* and .*, more=\) was expected"):
            check_signatures("0.32.0")
    [found] = differences({name: "self"}, {name: None})
    assert found == f"{name} has no definition, and the parameters (self) was expected"


@pytest.mark.parametrize("number", [1, 2])
def test_an_opening_compares_them_before_and_after_it_imports_more(
    monkeypatch: pytest.MonkeyPatch, llama: Path, number: int
) -> None:
    calls: list[str] = []
    opened, closed = list[object](), list[object]()

    def check(version: str) -> None:
        calls.append(version)
        if len(calls) == number:
            raise EngineUnsupported("a method differs")

    def open_engine(*_: object, **__: object) -> object:
        opened.append(object())
        return opened[-1]

    monkeypatch.setattr(opening, "check_signatures", check)
    monkeypatch.setattr(opening, "LLMEngine", open_engine)
    monkeypatch.setattr(opening, "shut_down", closed.append)
    with pytest.raises(EngineUnsupported, match="a method differs"):
        opening.open_vllm(str(llama), options={"kv_cache_memory_bytes": 2**26})
    assert calls == [vllm.__version__] * number
    assert len(opened) == number - 1
    assert closed == opened


def test_every_kind_of_parameter_is_told_apart_in_sources_and_objects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(vllm.__file__).parent.parent
    assert signatures_of_sources(root, TABLE["0.32"]) == installed(TABLE["0.32"])

    class A:
        def m(
            self, a: int, /, b: int, c: int = 1, *d: int, e: int, f: int = 2, **g: int
        ) -> None: ...

        @staticmethod
        async def s(*, y: object = None) -> None: ...

        p = property(lambda self: 1)
        x = 3

    monkeypatch.setitem(sys.modules, "mod", SimpleNamespace(A=A, f=A.m))
    found = {
        "mod.A.m": "self, a, /, b, c=, *d, e, f=, **g",
        "mod.A.s": "*, y=",
        "mod.A.x": None,
        "mod.B.m": None,
    }
    assert installed(found) == found
    assert installed(["mod.A.p", "mod.f"]) == {"mod.A.p": "self", "mod.f": found["mod.A.m"]}
    (tmp_path / "mod.py").write_text(textwrap.dedent(inspect.getsource(A)))
    assert signatures_of_sources(tmp_path, found) == found


def test_every_override_of_a_vllm_method_is_recorded() -> None:
    missing = set()
    for module in [
        *map(importlib.import_module, MODULES),
        importlib.import_module("genrt.server.client"),
    ]:
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            bases = [base for base in kind.__mro__ if base.__module__.startswith("vllm.")]
            for name, own in vars(kind).items():
                owners = [base for base in bases if inspect.isfunction(vars(base).get(name))]
                is_own = name == "__init__" and kind.__name__ in CONSTRUCTED_HERE
                if not callable(own) or not owners or is_own or takes_anything(own):
                    continue
                if not any(
                    f"{o.__module__}.{o.__qualname__}.{name}" in TABLE["0.32"] for o in owners
                ):
                    missing.add(f"{kind.__qualname__}.{name}")
    assert missing == set()


def takes_anything(function: object) -> bool:
    """Whether a method takes what any version of vLLM passes: no parameter but ``self``, or any."""
    parameters = [*inspect.signature(function).parameters.values()][1:]  # type: ignore[arg-type]
    return all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)
