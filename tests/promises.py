"""Which test proves which promise: the markers ``promise(number=…)``, and their table in PROMISES.md.

``python -m tests.promises`` writes the table's last column anew, from the markers of the tests there are.
The promises themselves, and their order, are what the table says.
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
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \|$", re.MULTILINE)

Proofs = dict[str, list[str]]
"""By file: the names of its tests, in the order of the file."""


def numbers_of(item: pytest.Item) -> Iterator[int]:
    """The promises that a test says it proves."""
    for mark in item.iter_markers("promise"):
        yield mark.kwargs["number"]


def promised(text: str) -> dict[int, str]:
    """The promises of the table, by number."""
    return {int(number): promise for number, promise, _ in ROW.findall(text)}


def _numbers_in(node: ast.AST) -> Iterator[int]:
    """Yield the numbers of the markers that are written in a piece of source."""
    for call in ast.walk(node):
        match call:
            case ast.Call(func=ast.Attribute(attr="promise"), keywords=[ast.keyword(value=number)]):
                yield ast.literal_eval(number)


def collected() -> dict[int, Proofs]:
    """Return the tests of each promise, by the markers at them and at the top of their files. The source
    is read and not imported: to import all of it takes half a minute."""
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


def written(text: str, proofs: Mapping[int, Proofs]) -> str:
    """The document with these proofs in its table."""

    def row(found: re.Match[str]) -> str:
        number, promise, _ = found.groups()
        cells = [
            f"[{file}]({file}): {', '.join(f'`{name}`' for name in names)}"
            for file, names in sorted(proofs.get(int(number), {}).items())
        ]
        return f"| {number} | {promise} | {'<br>'.join(cells)} |"

    return ROW.sub(row, text)


def summary(outcomes: Iterable[tuple[int, str]], promises: Mapping[int, str]) -> Iterator[str]:
    """A line for each promise: what became of the tests that prove it."""
    by_number: dict[int, list[str]] = {}
    for number, outcome in outcomes:
        by_number.setdefault(number, []).append(outcome)
    for number, each in sorted(by_number.items()):
        kept = all(outcome == "passed" for outcome in each)
        counts = ", ".join(f"{each.count(outcome)} {outcome}" for outcome in sorted(set(each)))
        yield f"{number:2}  {'kept  ' if kept else 'BROKEN'}  {promises.get(number, '?')}  ({counts})"


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(written(text, collected()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
