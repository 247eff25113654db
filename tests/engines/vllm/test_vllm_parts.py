"""The list in ``docs/new_vllm.md`` of what genrt touches of vLLM: it is true and whole."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import itertools
import os
import re
import threading
import time
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import genrt

PACKAGE = Path(genrt.__file__).parent
FOLDER = PACKAGE / "engines" / "vllm"
FILES = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "block_kernels.py")

PYTHONS: list[Any] = [
    builtins, contextlib, contextlib.ExitStack, itertools, os, re, re.compile(''), threading,
    threading.Condition,
    time, warnings, weakref, Counter, OrderedDict, deque, Path, list, dict, set, str, bytes,
    Exception, __import__("gc"), __import__("json"), __import__("multiprocessing"),
    __import__("shutil"), __import__("tempfile"), __import__("traceback"), np, np.ndarray,
    np.random, torch, torch.Tensor, torch.cuda, torch.cuda.Stream, torch.ops, torch.finfo(torch.float32),
]  # fmt: skip
"""Whose attributes are not vLLM's."""
OTHERS = {"Counter", "__qualname__", "atexit", "total_memory"}
"""Attributes of modules, classes, finalizers and devices."""


def table_of(text: str) -> dict[str, list[tuple[str, str]]]:
    """The table's owners and names, by file."""
    found: dict[str, list[tuple[str, str]]] = {}
    file = ""
    for line in text.splitlines():
        if re.fullmatch(r"\w+\.py", line):
            file = line
        elif entry := re.fullmatch(r"    ([\w.]+): (.+)", line):
            found.setdefault(file, []).extend((entry[1], name) for name in entry[2].split())
    return found


TABLE = table_of((PACKAGE.parent / "docs" / "new_vllm.md").read_text(encoding="utf-8"))


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def names_of_genrt() -> set[str]:
    """What genrt's own files define: functions, classes, fields, what they set of themselves."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
    return found


def foreign(tree: ast.AST, *, known: set[str]) -> set[str]:
    """The attributes that a file touches and that are neither genrt's nor Python's, numpy's or torch's;
    and every private one that is not of ``self`` or ``cls``."""
    private = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and ast.unparse(node) != "torch.ops._C"
    }
    pythons = {name for owner in PYTHONS for name in dir(owner)}
    return (attributes(tree) - known - pythons - OTHERS) | private


@pytest.mark.promise(number=24)
def test_the_table_lists_what_files_touch_of_vllm_and_no_more() -> None:
    known = names_of_genrt()
    wrong: set[tuple[str, str, str]] = set()
    for file in FILES:
        source = (FOLDER / file).read_text(encoding="utf-8")
        listed = {name for _, name in TABLE.get(file, [])}
        touched = foreign(ast.parse(source), known=known)
        wrong |= {(file, name, "is not listed") for name in touched - listed}
        code = source.split('"""', 2)[2]
        unused = {name for name in listed if not re.search(rf"\b{name}\b", code)}
        wrong |= {(file, name, "is not touched") for name in unused}
    assert wrong == set()


def test_the_rule_sees_what_is_touched() -> None:
    source = "self._x.y = runner._model_forward\nrunner.req_states.np[0] = self._own(x.append(1))"
    assert foreign(ast.parse(source), known={"y"}) == {
        "_x",
        "_own",
        "_model_forward",
        "req_states",
        "np",
    }


@pytest.mark.promise(number=24)
@pytest.mark.vllm
def test_the_installed_vllm_has_what_the_table_lists() -> None:
    listed = {entry for entries in TABLE.values() for entry in entries}
    assert TABLE.keys() <= {*FILES}
    assert sorted(entry for entry in listed if not has(*entry)) == []
    request = "vllm.v1.request.Request"
    assert has(request, "_all_token_ids")
    assert has(request, "num_computed_tokens")
    assert not has(request, "_every_token_id")
    assert not has("vllm.v1.worker.workspace", "_managers")


source_of = functools.cache(inspect.getsource)


def has(owner: str, name: str) -> bool:
    """Whether an object, or instances of a class, have this attribute, or its code calls this builtin."""
    if owner.startswith("torch.ops"):
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    if owner.startswith("torch."):
        found: Any = torch
        for part in owner.split(".")[1:]:
            found = getattr(found, part)
        return hasattr(found, name)
    try:
        found = importlib.import_module(owner)
    except ImportError:
        module, _, kind = owner.rpartition(".")
        found = getattr(importlib.import_module(module), kind)
    if hasattr(found, name):
        return True
    if inspect.ismodule(found):
        return re.search(rf"\b{name}\(", inspect.getsource(found)) is not None
    sources = [source_of(base) for base in found.__mro__ if base.__module__[:4] == "vllm"]
    set_or_declared = re.compile(rf"\bself\.{name}\b|^\s+{name}\s*:", re.MULTILINE)
    return any(map(set_or_declared.search, sources))
