"""Break genrt on purpose, one way at a time, and show which test catches it: ``python -m tests.mutate``.

The breaks are in ``mutants.py``. Each is applied in a copy of the checkout, in which the tests that are
named for it run until one fails.

A mutant is *killed* if a test fails, or if the tests do not end. It has *survived* if all pass: a test is
missing. It is *broken* if pytest ends in any other way: it shows nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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
from typing import Literal, NamedTuple

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "notebooks")
"""What a copy of the checkout does without."""

CLEAN_SECONDS = 900.0
"""How long tests of unbroken source may take."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", re.MULTILINE)
PYTEST = "-m pytest -x -q --tb=no -rfE -p no:cacheprovider -p no:randomly"


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


def judge(mutant: Mutant, folder: Path, limit: float) -> Verdict:
    """Apply a mutant to a copy, run its tests, and put the source back."""
    path = folder / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(source), encoding="utf-8")
    try:
        status, seconds, output = run_tests(folder, mutant.tests, mutant.only, limit)
    finally:
        path.write_text(source, encoding="utf-8")
    if status is None:
        return Verdict("killed", seconds, "the tests did not end")
    if status == 0:
        return Verdict("survived", seconds, "every test passed")
    failed = FAILED.search(output)
    if status == 1 and failed:
        return Verdict("killed", seconds, failed[1])
    last = output.strip().rpartition("\n")[2]
    return Verdict("broken", seconds, f"pytest exited with {status}: {last}")


def mutate(root: Path, mutants: Sequence[Mutant], report: Callable[[str], None] = print) -> int:
    """Judge these one after the other, and report a line for each. The exit status: 0 if all were killed,
    1 if one was not, 2 if the tests fail as it is."""
    with tempfile.TemporaryDirectory(prefix="genrt-mutants-") as parent:
        folder = Path(shutil.copytree(root, Path(parent, "copy"), ignore=LEFT_OUT))
        usual: dict[tuple[str, str], float] = {}
        for tests, only in dict.fromkeys((tests, m.only) for m in mutants for tests in m.tests):
            status, usual[tests, only], output = run_tests(folder, [tests], only, CLEAN_SECONDS)
            if status != 0:
                report(f"{tests} {only} does not pass on unbroken source:\n{output}")
                return 2
        report(f"selections of tests that pass on unbroken source: {len(usual)}")
        kinds: Counter[str] = Counter()
        for mutant in mutants:
            limit = 60 + 5 * sum(usual[tests, mutant.only] for tests in mutant.tests)
            kind, took, why = judge(mutant, folder, limit)
            kinds[kind] += 1
            shown = kind if kind == "killed" else kind.upper()
            report(f"{shown:8} {took:5.1f} s  {mutant.file}: {mutant.name}: {why}")
    report(", ".join(f"{kinds[kind]} {kind}" for kind in ("killed", "survived", "broken")))
    return 0 if kinds["killed"] == len(mutants) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="only mutants whose file or name holds one of these words"
    )
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [m for m in MUTANTS if any(word in f"{m.file}: {m.name}" for word in words)]
    if not chosen:
        parser.error("no mutant's file or name holds one of these words")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.file}: {mutant.name}")
        return 0
    return mutate(ROOT, chosen)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
