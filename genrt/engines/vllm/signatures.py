"""Signatures of vLLM's methods that genrt overrides, wraps or replaces, for each supported version.

``signatures.json`` has the parameters of each method by version of vLLM. Opening
compares the installed vLLM with it. To add a version, name its wheel, or a folder with the package::

    python -m genrt.engines.vllm.signatures 0.33 vllm-0.33.0-….whl
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from genrt.errors import EngineUnsupported

__all__ = ["TABLE", "Signatures", "check_signatures", "differences", "installed", "of_sources"]

Signatures: TypeAlias = dict[str, str | None]
"""The parameters of methods by dotted name; ``None`` where a class does not define the method itself."""


class _Default:
    """Stands for any default, of which only the presence is compared."""

    def __repr__(self) -> str:
        return ""


_DEFAULT = _Default()

FILE = Path(__file__).with_suffix(".json")

TABLE: dict[str, Signatures] = json.loads(FILE.read_text(encoding="utf-8"))
"""The recorded signatures by version, such as ``"0.32"``. Every version has the same names."""


def check_signatures(version: str) -> None:
    """Compare the installed vLLM's signatures with those recorded for its version.

    Raises:
        EngineUnsupported: a method has other parameters; the message names it.
    """
    recorded = TABLE[".".join(version.split("+")[0].split(".")[:2])]
    if found := differences(recorded, installed(recorded)):
        raise EngineUnsupported(
            f"vLLM {version} differs from the one that genrt was tested with: {'; '.join(found)}. "
            "Install a version that the extras genrt[cpu] and genrt[cuda] bring"
        )


def differences(recorded: Mapping[str, str | None], found: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each method whose parameters are not the recorded ones."""
    return [
        f"{name} has {_described(found[name])}, and {_described(parameters)} was expected"
        for name, parameters in recorded.items()
        if found[name] != parameters
    ]


def _described(parameters: str | None) -> str:
    return "no definition" if parameters is None else f"the parameters ({parameters})"


def installed(names: Mapping[str, object]) -> Signatures:
    """Return the signatures of these methods in the installed vLLM."""
    return {name: _installed(name) for name in names}


def _installed(name: str) -> str | None:
    owner, _, method = name.rpartition(".")
    try:
        holder: object = importlib.import_module(owner)
    except ModuleNotFoundError:
        module, _, kind = owner.rpartition(".")
        holder = getattr(importlib.import_module(module), kind, None)
    found = None if holder is None else vars(holder).get(method)
    if isinstance(found, property):
        return "self"
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if not callable(found):
        return None
    return _written(inspect.signature(found).parameters.values())


def _written(parameters: Iterable[inspect.Parameter]) -> str:
    """Return parameters as Python writes them, without annotations and the values of defaults."""
    plain = [
        each.replace(
            annotation=each.empty, default=each.default if each.default is each.empty else _DEFAULT
        )
        for each in parameters
    ]
    return str(inspect.Signature(plain))[1:-1]


def of_sources(root: zipfile.Path | Path, names: Mapping[str, object]) -> Signatures:
    """Return the signatures of these methods in vLLM's sources, which are not imported.

    Args:
        root: the folder, or the opened wheel, that has the folder ``vllm``.
    """
    trees: dict[str, ast.Module | None] = {}
    return {name: _in_sources(root, name, trees) for name in names}


def _in_sources(
    root: zipfile.Path | Path, name: str, trees: dict[str, ast.Module | None]
) -> str | None:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = "/".join(parts[:count])
        if module not in trees:
            paths = [root / f"{module}.py", root / module / "__init__.py"]
            found = next((path for path in paths if path.is_file()), None)
            source = None if found is None else found.read_text(encoding="utf-8")
            trees[module] = None if source is None else ast.parse(source)
        tree = trees[module]
        if tree is not None:
            return _defined(tree, parts[count:])
    return None


def _defined(tree: ast.AST, path: list[str]) -> str | None:
    """Return the parameters of the function at a path of names inside a tree."""
    left = [*ast.iter_child_nodes(tree)]
    while left:
        node = left.pop()
        match node:
            case ast.ClassDef(name=name) if name == path[0]:
                return _defined(node, path[1:])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name == path[0]:
                    return _written(_parameters(node.args))
            case ast.ClassDef():
                pass
            case _:
                left += ast.iter_child_nodes(node)
    return None


def _parameters(arguments: ast.arguments) -> list[inspect.Parameter]:
    """Return a definition's parameters; each default's value is ``None``."""
    kinds, none = inspect.Parameter, inspect.Parameter.empty
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [
        kinds(
            each.arg,
            kinds.POSITIONAL_ONLY if each in arguments.posonlyargs else kinds.POSITIONAL_OR_KEYWORD,
            default=none if place < required else None,
        )
        for place, each in enumerate(positional)
    ]
    if arguments.vararg is not None:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=none if default is None else None))
    if arguments.kwarg is not None:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return found


def main(version: str, source: str) -> None:
    """Record a version's signatures."""
    root = zipfile.Path(source, "") if source.endswith(".whl") else Path(source)
    names = dict.fromkeys(sorted(set().union(*TABLE.values())))
    TABLE[version] = of_sources(root, names)
    FILE.write_text(json.dumps(TABLE, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
