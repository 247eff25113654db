"""Which test proves which promise of PROMISES.md, by the markers ``promise(number=…)``.

``python -m tests.promises`` prints the list, which the documentation shows below the promises.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "PROMISES.md"
ENTRY = re.compile(r"^(\d+)\. (.*(?:\n +\S.*)*)", re.MULTILINE)

Proofs = dict[str, list[str]]
"""The names of tests by file, in the order of the file."""


def numbers_of(item: pytest.Item) -> Iterator[int]:
    """Yield the promises that a test says it proves."""
    for mark in item.iter_markers("promise"):
        yield mark.kwargs["number"]


def promised(text: str) -> dict[int, str]:
    """Return the promises of the document by number."""
    return {int(number): " ".join(promise.split()) for number, promise in ENTRY.findall(text)}


def _numbers_in(node: ast.AST) -> Iterator[int]:
    """Yield the numbers of the markers in a piece of source."""
    for call in ast.walk(node):
        match call:
            case ast.Call(func=ast.Attribute(attr="promise"), keywords=[ast.keyword(value=number)]):
                yield ast.literal_eval(number)


def collected() -> dict[int, Proofs]:
    """Return the tests of each promise, by the markers at them and at the top of their files. The source
    is parsed, since importing all of it takes half a minute."""
    found: dict[int, Proofs] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        of_file = [
            number
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for number in _numbers_in(node)
        ]
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    marked: Sequence[ast.AST] = node.decorator_list
                case ast.ClassDef(name=name):
                    marked = [node]
                case _:
                    continue
            if name.startswith(("test", "Test")):
                numbers = [number for part in marked for number in _numbers_in(part)]
                for number in {*of_file, *numbers}:
                    file = path.relative_to(ROOT).as_posix()
                    found.setdefault(number, {}).setdefault(file, []).append(name)
    return found


def listed(proofs: Mapping[int, Proofs]) -> str:
    """Return the tests of each promise as Markdown."""
    lines = ["## The tests", ""]
    for number, files in sorted(proofs.items()):
        cells = [f"`{file}`: {', '.join(f'`{n}`' for n in files[file])}" for file in sorted(files)]
        lines += [f"**{number}** — " + "; ".join(cells), ""]
    return "\n".join(lines)


def summary(outcomes: Iterable[tuple[int, str]], promises: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each promise: how the tests that prove it ended."""
    by_number: dict[int, list[str]] = {}
    for number, outcome in outcomes:
        by_number.setdefault(number, []).append(outcome)
    for number, each in sorted(by_number.items()):
        kept = all(outcome == "passed" for outcome in each)
        counts = ", ".join(f"{each.count(outcome)} {outcome}" for outcome in sorted(set(each)))
        yield f"{number:2}  {'kept  ' if kept else 'BROKEN'}  {promises.get(number, '?')}  ({counts})"


if __name__ == "__main__":
    sys.stdout.write(listed(collected()))
