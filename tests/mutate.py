"""Break a file of genrt in many ways, one at a time, and show which of its tests catches each:

``python -m tests.mutate genrt/runtime/cache.py tests/runtime/test_cache.py --count 30 --seed 1``

A break turns a comparison or an ``and`` around, exchanges plus and minus, or leaves out a call. Each is
applied in a copy of the checkout, in which the tests run until one fails.

A mutant is *killed* if a test fails, or if the tests do not end. It has *survived* if all pass: a test is
missing, or the break changes nothing that matters. It is *broken* if pytest ends in any other way: it
shows nothing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "notebooks")
"""What a copy of the checkout does without."""

CLEAN_SECONDS = 900.0
"""How long tests of unbroken source may take."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", re.MULTILINE)
PYTEST = "-m pytest -x -q --tb=no -rfE -p no:cacheprovider -p no:randomly"

OTHER: dict[type, type] = {
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.And: ast.Or,
    ast.Add: ast.Sub,
}
OTHER |= {new: old for old, new in OTHER.items()}
"""Operators, and what takes their place."""


class _Breaking(ast.NodeTransformer):
    """Applies the break with this number, of all in the order of the source."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.what = ""

    def _is_next(self, node: ast.AST) -> bool:
        self.count += 1
        if self.count - 1 != self.number:
            return False
        self.what = f"line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        return True

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if type(node.ops[0]) in OTHER and self._is_next(node):
            node.ops[0] = OTHER[type(node.ops[0])]()
        return self.generic_visit(node)

    def _visit_operator(self, node: Any) -> Any:
        if type(node.op) in OTHER and self._is_next(node):
            node.op = OTHER[type(node.op)]()
        return self.generic_visit(node)

    visit_BoolOp = visit_BinOp = visit_AugAssign = _visit_operator

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Call | ast.Await) and self._is_next(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def count_breaks(source: str) -> int:
    """Return how many breaks there are of a source."""
    counting = _Breaking(-1)
    counting.visit(ast.parse(source))
    return counting.count


def broken(source: str, number: int) -> tuple[str, str]:
    """Return the source with one break, and what is broken."""
    breaking = _Breaking(number)
    tree = breaking.visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n", breaking.what


class Verdict(NamedTuple):
    """What became of a mutant: ``why`` is the test that failed, or what else there is to say."""

    kind: Literal["killed", "survived", "broken"]
    seconds: float
    why: str


def run_tests(
    folder: Path, tests: Sequence[str], only: str, limit: float
) -> tuple[int | None, float, str]:
    """Run these test files of a copy until one fails; return pytest's exit status, ``None`` if it was
    ended after ``limit`` seconds, how long it took, and its output.

    Bytecode is not kept: two breaks of one file may have its size and its time.
    """
    own = {"HYPOTHESIS_PROFILE": "mutants", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *PYTEST.split(), *tests, *(["-k", only] if only else [])]
    started = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | own | {"PYTHONPATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:  # with whatever the tests started and left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    return status, time.monotonic() - started, output


def judge(path: Path, source: str, run: Callable[[], tuple[int | None, float, str]]) -> Verdict:
    """Write a broken source, run its tests, and put the old one back."""
    before = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    try:
        status, seconds, output = run()
    finally:
        path.write_text(before, encoding="utf-8")
    if status is None:
        return Verdict("killed", seconds, "the tests did not end")
    if status == 0:
        return Verdict("survived", seconds, "every test passed")
    failed = FAILED.search(output)
    if status == 1 and failed:
        return Verdict("killed", seconds, failed[1])
    last = output.strip().rpartition("\n")[2]
    return Verdict("broken", seconds, f"pytest exited with {status}: {last}")


def mutate(
    root: Path,
    file: str,
    tests: Sequence[str],
    *,
    numbers: Sequence[int],
    only: str = "",
    report: Callable[[str], None] = print,
) -> int:
    """Judge these breaks of a file one after the other, and report a line for each. The exit status: 0 if
    all were killed, 1 if one was not, 2 if the tests fail as it is."""
    with tempfile.TemporaryDirectory(prefix="genrt-mutants-") as parent:
        folder = Path(shutil.copytree(root, Path(parent, "copy"), ignore=LEFT_OUT))
        status, usual, output = run_tests(folder, tests, only, CLEAN_SECONDS)
        if status != 0:
            report(f"the tests do not pass on unbroken source:\n{output}")
            return 2
        source = (folder / file).read_text(encoding="utf-8")
        kinds: Counter[str] = Counter()
        for number in numbers:
            new, what = broken(source, number)
            run = lambda: run_tests(folder, tests, only, 60 + 5 * usual)
            kind, took, why = judge(folder / file, new, run)
            kinds[kind] += 1
            shown = kind if kind == "killed" else kind.upper()
            report(f"{shown:8} {took:5.1f} s  {number}: {what}: {why}")
    report(", ".join(f"{kinds[kind]} {kind}" for kind in ("killed", "survived", "broken")))
    return 0 if kinds["killed"] == len(numbers) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("file", help="the file to break, from the root of the checkout")
    parser.add_argument("tests", nargs="+", help="the files of its tests")
    parser.add_argument("-k", dest="only", default="", help="which of their tests, as for pytest")
    parser.add_argument("--count", type=int, default=20, help="how many breaks (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which of them (default: 0)")
    options = parser.parse_args(arguments)
    every = range(count_breaks((ROOT / options.file).read_text(encoding="utf-8")))
    numbers = random.Random(options.seed).sample(every, min(options.count, len(every)))
    return mutate(ROOT, options.file, options.tests, numbers=sorted(numbers), only=options.only)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
