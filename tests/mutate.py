"""Break genrt on purpose, one way at a time, and show which test catches it: ``python -m tests.mutate``.

The breaks are in ``mutants.py``. Each worker has a copy of the checkout in a temporary folder, applies
one there, runs the tests that are named for it until one fails, and puts the source back.

A mutant is *killed* if a test fails, or if the tests do not end: then it says so. It has *survived* if
all pass: a test is missing. It is *broken* if pytest ends in any other way: it shows nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "notebooks")
"""What a copy of the checkout does without."""

CLEAN_SECONDS = 900.0
"""How long tests of unbroken source may take."""

FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of pytest ended: its exit status, ``None`` if it was ended for want of time, how many
    seconds it took, and what it printed."""

    status: int | None
    seconds: float
    output: str


class Verdict(NamedTuple):
    """What became of a mutant: ``why`` is the test that failed, or what else there is to say."""

    kind: Literal["killed", "survived", "broken"]
    seconds: float
    why: str


def run_tests(
    folder: Path, tests: Sequence[str], only: str, limit: float, stop: threading.Event
) -> Run:
    """Run these test files of a copy until one test fails. Hypothesis takes the same examples every time,
    and looks for no smaller ones. Bytecode is not kept: two breaks of one file may have its size and its
    time. What runs when ``stop`` is set is ended."""
    environment = os.environ | {
        "HYPOTHESIS_PROFILE": "mutants",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=no",
        "-rfE",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "no:randomly", *tests, *(["-k", only] if only else [])]
    started = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            while status is None and time.monotonic() - started < limit and not stop.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(1.0)
        finally:  # with whatever the tests started and left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    return Run(status, time.monotonic() - started, output)


def verdict(run: Run) -> Verdict:
    """What a run of the tests says of the mutant that they ran on."""
    if run.status is None:
        return Verdict("killed", run.seconds, "the tests did not end")
    if run.status == 0:
        return Verdict("survived", run.seconds, "every test passed")
    failed = FAILED.search(run.output)
    if run.status == 1 and failed:
        return Verdict("killed", run.seconds, failed[1])
    last = run.output.strip().rpartition("\n")[2]
    return Verdict("broken", run.seconds, f"pytest exited with {run.status}: {last}")


def judge(mutant: Mutant, folder: Path, limit: float, stop: threading.Event) -> Verdict:
    """Apply a mutant to a copy, run its tests, and put the source back."""
    path = folder / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(source), encoding="utf-8")
    try:
        return verdict(run_tests(folder, mutant.tests, mutant.only, limit, stop))
    finally:
        path.write_text(source, encoding="utf-8")


@contextlib.contextmanager
def stopping(pool: ThreadPoolExecutor, stop: threading.Event) -> Iterator[None]:
    """An exception, an interrupt included, also ends what the pool runs and what waits for it."""
    try:
        yield
    except BaseException:
        stop.set()
        pool.shutdown(cancel_futures=True)
        raise


def mutate(
    root: Path,
    mutants: Sequence[Mutant],
    *,
    jobs: int = 2,
    report: Callable[[str], None] = print,
) -> int:
    """Judge these, several at a time, and report a line for each. The exit status: 0 if all were killed,
    1 if one was not, 2 if the tests fail as it is."""
    with tempfile.TemporaryDirectory(prefix="genrt-mutants-") as parent:
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        stop = threading.Event()
        for number in range(jobs):
            folder = Path(parent, str(number))
            shutil.copytree(root, folder, ignore=LEFT_OUT)
            folders.put(folder)

        def clean(tests: str, only: str) -> Run:
            folder = folders.get()
            try:
                return run_tests(folder, [tests], only, CLEAN_SECONDS, stop)
            finally:
                folders.put(folder)

        def judged(mutant: Mutant) -> Verdict:
            usual = sum(seconds[tests, mutant.only] for tests in mutant.tests)
            folder = folders.get()
            try:
                return judge(mutant, folder, 60 + 5 * usual, stop)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(jobs) as pool, stopping(pool, stop):
            named = dict.fromkeys((tests, m.only) for m in mutants for tests in m.tests)
            runs = dict(zip(named, pool.map(lambda key: clean(*key), named), strict=True))
            wrong = {key: run for key, run in runs.items() if run.status != 0}
            for (tests, only), run in wrong.items():
                report(f"{tests} {only} does not pass on unbroken source:\n{run.output}")
            if wrong:
                return 2
            seconds = {key: run.seconds for key, run in runs.items()}
            report(f"selections of tests that pass on unbroken source: {len(runs)}")
            judging = {pool.submit(judged, mutant): mutant for mutant in mutants}
            kinds = []
            for future in as_completed(judging):
                mutant, (kind, took, why) = judging[future], future.result()
                kinds.append(kind)
                shown = kind if kind == "killed" else kind.upper()
                report(f"{shown:8} {took:5.1f} s  {mutant.file}: {mutant.name}: {why}")
    report(", ".join(f"{kinds.count(k)} {k}" for k in ("killed", "survived", "broken")))
    return 0 if kinds.count("killed") == len(mutants) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="only mutants whose file or name holds one of these words"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
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
    return mutate(ROOT, chosen, jobs=options.jobs)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
