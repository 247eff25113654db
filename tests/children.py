"""Programs in child processes of their own, where a test may end the process it is about.

The children are forks of one server that has imported vLLM, so each costs what it does and no import. A
child ends as any interpreter does, by running out of program or by an exception.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPLAINT = re.compile(
    r"Traceback|Exception ignored|Fatal Python error|terminate called|:\d+: \w*Warning: "
    r"|(?<![\w/.-])genrt\b"
)
"""What an interpreter writes when something went wrong on the way out; its warnings, whoever they are
about; and our name, but not as a part of a path."""
ALARM_SECONDS = 300
"""After which a child that hangs is killed by a signal, and so found out."""

SERVER = """
import atexit, gc, json, os, signal, sys, tempfile
gc.disable()
import vllm
import genrt, genrt.engines.vllm.opening
from tests.children import in_session

# vLLM collects garbage seven times while it opens and closes. A child ends as any process: thawed.
gc.collect()
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)

ends, alive = {}, {}

def wait():
    name, (process, *files) = next(iter(alive.items()))
    del alive[name]
    _, status = os.waitpid(process, 0)
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read().decode())
    ends[name] = (os.waitstatus_to_exitcode(status), *texts, in_session(process))

def requested():
    for line in sys.stdin:
        given = json.loads(line)
        for name, program in given["programs"].items():
            if len(alive) == given["at_once"]:
                wait()
            yield given, name, program
        while alive:
            wait()
        print(json.dumps(ends), flush=True)
        ends.clear()

for given, name, program in requested():
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    process = os.fork()
    if process == 0:
        os.setsid()
        signal.alarm(given["alarm"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        del alive, ends, output, errors, process, wait, requested
        exec(compile(given["before"] + program, f"<{name}>", "exec"))
        break
    alive[name] = (process, output, errors)
"""


@dataclass(frozen=True)
class End:
    """How a child ended: its exit status (that of a signal is negative), what it wrote, and the processes
    that it left behind."""

    status: int
    out: str
    err: str
    left: list[str]

    @property
    def complaints(self) -> list[str]:
        """Return the lines that say that something went wrong, or that speak of the project."""
        return complaints(self.err)


def complaints(text: str, *, root: Path = ROOT) -> list[str]:
    """Return the complaints among these lines. The project may lie in a folder of any name: in its path
    nothing is looked for, and a file of the package counts wherever it lies."""
    own, folder = f"{root / 'genrt'}{os.sep}", f"{root}{os.sep}"
    lines = ((line, line.replace(own, "genrt: ").replace(folder, "")) for line in text.splitlines())
    return [line for line, said in lines if COMPLAINT.search(said)]


def in_session(session: int) -> list[str]:
    """The command lines of the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def environment() -> dict[str, str]:
    """Of a process that imports the project: few threads, since there are many processes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@functools.cache
def _server(environment: frozenset[tuple[str, str]]) -> tuple[subprocess.Popen[str], int]:
    """The server of this process's children in an environment, which ends with this process, and the file
    of its errors."""
    errors = os.memfd_create("errors")
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env=dict(environment),
    )
    atexit.register(server.communicate)
    return server, errors


def run(programs: Mapping[str, str], *, before: str = "", **values: Any) -> dict[str, End]:
    """Run each program after ``before``, two at once; ``values`` are known to all by name."""
    assignments = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    given = {
        "programs": {name: textwrap.dedent(program) for name, program in programs.items()},
        "before": assignments + textwrap.dedent(before),
        "alarm": ALARM_SECONDS,
        "at_once": 2,
    }
    settings = environment()
    settings.pop("PYTEST_CURRENT_TEST", None)
    server, errors = _server(frozenset(settings.items()))
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(given), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    while answer and not answer.startswith("{"):  # what the imports of the server printed
        answer = server.stdout.readline()
    if not answer:
        server.wait()
        told = os.pread(errors, 2**20, 0).decode()
        raise AssertionError(f"the server of children ended:\n{told}")
    return {name: End(*end) for name, end in json.loads(answer).items()}
