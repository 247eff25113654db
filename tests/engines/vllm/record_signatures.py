"""Records the signatures of a vLLM that is not installed, from its wheel or its sources::

    python -m tests.engines.vllm.record_signatures 0.34 vllm-0.34.0-….whl

The sources are parsed, not imported.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from genrt.engines.vllm.signatures import FILE, TABLE, Signatures


def signatures_of_sources(root: zipfile.Path | Path, names: Mapping[str, object]) -> Signatures:
    """Return the signatures of these methods in the folder, or opened wheel, that has ``vllm/``."""
    trees: dict[str, ast.Module | None] = {}
    return {name: _signature(root, name, trees) for name in names}


def _signature(
    root: zipfile.Path | Path, name: str, trees: dict[str, ast.Module | None]
) -> str | None:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = "/".join(parts[:count])
        if module not in trees:
            paths = [root / f"{module}.py", root / module / "__init__.py"]
            found = next((path for path in paths if path.is_file()), None)
            trees[module] = None if found is None else ast.parse(found.read_text(encoding="utf-8"))
        tree = trees[module]
        if tree is not None:
            return _parameters_at(tree, parts[count:])
    return None


def _parameters_at(tree: ast.AST, path: list[str]) -> str | None:
    """Return the parameters of the function at a path of names inside a tree."""
    nodes = [*ast.iter_child_nodes(tree)]
    while nodes:
        match nodes.pop():
            case ast.ClassDef(name=name) as node if name == path[0]:
                return _parameters_at(node, path[1:])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) as node:
                if name == path[0]:
                    return _parameters(node.args)
            case ast.ClassDef():
                pass
            case node:
                nodes += ast.iter_child_nodes(node)
    return None


def _parameters(arguments: ast.arguments) -> str:
    """Return parameters as ``genrt.engines.vllm.signatures`` writes them."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parts = [each.arg + "=" * (place >= required) for place, each in enumerate(positional)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(each.arg + "=" * (default is not None))
    if arguments.kwarg is not None:
        parts.append(f"**{arguments.kwarg.arg}")
    return ", ".join(parts)


def main(version: str, source: str) -> None:
    """Add the signatures of a version to the table."""
    root = zipfile.Path(source, "") if source.endswith(".whl") else Path(source)
    names = dict.fromkeys(sorted(set().union(*TABLE.values())))
    TABLE[version] = signatures_of_sources(root, names)
    FILE.write_text(json.dumps(TABLE, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
