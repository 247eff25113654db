"""Signatures of vLLM's methods that genrt overrides, wraps or replaces, for each supported version.

``signatures.json`` has the parameters of each method by version of vLLM. Opening an engine compares the
methods of imported modules with it. ``python -m tests.engines.vllm.record_signatures`` adds a version.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from genrt.errors import EngineUnsupported

Signatures: TypeAlias = dict[str, str | None]
"""The parameters of methods by dotted name; ``None`` where a class does not define the method itself."""

FILE = Path(__file__).with_suffix(".json")

TABLE: dict[str, Signatures] = json.loads(FILE.read_text(encoding="utf-8"))
"""The recorded signatures by version, such as ``"0.32"``. Every version has the same names."""


class _Default:
    def __repr__(self) -> str:
        return ""


def check_signatures(version: str) -> None:
    """Compare the signatures in imported modules of vLLM with the recorded ones for its version.

    Raises:
        EngineUnsupported: a method has other parameters; the message names it.
    """
    recorded = TABLE[".".join(version.split("+")[0].split(".")[:2])]
    if found := differences(recorded, installed(recorded)):
        raise EngineUnsupported(
            f"vLLM {version} differs from the one that genrt was tested with: {'; '.join(found)}. "
            "Install a version that the extras genrt[cpu] and genrt[cuda] bring"
        )


def differences(recorded: Signatures, found: Signatures) -> list[str]:
    """Return a sentence for each method whose parameters differ from the recorded ones."""

    def said(parameters: str | None) -> str:
        return "no definition" if parameters is None else f"the parameters ({parameters})"

    return [
        f"{name} has {said(parameters)}, and {said(recorded[name])} was expected"
        for name, parameters in found.items()
        if parameters != recorded[name]
    ]


def installed(names: Iterable[str]) -> Signatures:
    """Return the signatures of these methods, without methods of modules that are not imported."""
    found: Signatures = {}
    for name in names:
        owner, _, method = name.rpartition(".")
        module, _, kind = owner.rpartition(".")
        if not kind[:1].isupper():  # the function of a module
            module, kind = owner, ""
        if (there := sys.modules.get(module)) is not None:
            found[name] = _signature(getattr(there, kind, None) if kind else there, method)
    return found


def _signature(owner: object, method: str) -> str | None:
    """Return a method's parameters as Python writes them, without annotations and default values."""
    found = None if owner is None else vars(owner).get(method)
    if isinstance(found, property):
        return "self"
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if not callable(found):
        return None
    plain = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else _Default()
        )
        for each in inspect.signature(found).parameters.values()
    ]
    return str(inspect.Signature(plain))[1:-1]
