"""A job is killed at random moments, twenty times, then finished: each row is there once, whole, with the
text that its seed decides, and what was written is never asked again. The table comes at the end.

Each run is a child, forked from a process that has imported genrt, so that most of its time is the job's.
``GENRT_JOB_KILLS`` says how often it is killed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

import genrt
from genrt.generation.journal import FORMAT
from tests.children import ROOT, environment
from tests.generation.job_cases import MODEL, lines_of, rows, write_rows

KILLS = int(os.environ.get("GENRT_JOB_KILLS", "20"))
ROWS = 400
CONCURRENCY = 8

PROGRAM = """
import json, os, random, select, signal, sys
from pathlib import Path
import genrt
from genrt.lm import AsyncLM
from tests.generation.job_cases import MODEL, job

folder, kills, concurrency = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
output, asked = folder / "out.parquet.jsonl", folder / "asked"
choose = random.Random(int(sys.argv[4]))
original = AsyncLM.generate

async def generate(lm, prompt, **options):
    # What is asked, heard from below the job: a line in one call, which a kill cannot tear.
    os.write(log, f"{options['seed']}\\n".encode())
    return await original(lm, prompt, **options)

def size():
    return output.stat().st_size if output.exists() else 0

def child():
    with genrt.load(MODEL, engine="exact") as lm:
        report = job(folder, output="out.parquet", concurrency=concurrency).run_sync(lm)
    print(report.done, report.skipped, report.complete, flush=True)

AsyncLM.generate = generate
log = os.open(asked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for kill in range(kills + 1):
    before = size()
    os.write(log, b"run\\n")
    process = os.fork()
    if process == 0:
        child()
        os._exit(0)
    if kill < kills:
        # At a moment somewhere in the next lines, or in what comes before the first.
        until = before + choose.randrange(0, 4000)
        handle = os.pidfd_open(process)
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        while size() < until and not ended.poll(1):
            pass
        ended.poll(choose.randrange(3))
        os.kill(process, signal.SIGKILL)
        os.close(handle)
    _, status = os.waitpid(process, 0)
    print("end", kill, os.waitstatus_to_exitcode(status), size(), flush=True)
"""


@pytest.mark.proof
def test_a_job_that_is_killed_again_and_again_is_finished(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", rows(ROWS))
    seed = random.randrange(10**6)
    arguments = [str(tmp_path), str(KILLS), str(CONCURRENCY), str(seed)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    ends = [int(line.split()[2]) for line in told if line.startswith("end")]
    killed = ends.count(-9)
    assert ends[-1] == 0
    assert killed >= KILLS // 2, f"seed {seed}: the job was done too early, {told}"

    table = pandas.read_parquet(tmp_path / "out.parquet")
    for suffix in ("", ".job.json"):
        (tmp_path / f"out.parquet.jsonl{suffix}").rename(tmp_path / f"out.jsonl{suffix}")
    lines = lines_of(tmp_path)  # all whole, each of a row of its own
    assert [line["index"] for line in lines] == list(range(ROWS))
    assert [line["input"] for line in lines] == rows(ROWS)
    prompts = [f"say {row['text']}" for row in rows(ROWS)]
    with genrt.load(MODEL, engine="exact") as lm:
        texts = lm.batch_generate_sync(prompts, max_tokens=6, seed=0)
    assert [line["text"] for line in lines] == [each.text for each in texts]
    assert all(line["error"] is None for line in lines)
    assert [*table["index"]] == list(range(ROWS))
    assert [*table["text"]] == [each.text for each in texts]

    asked = [int(line) for line in (tmp_path / "asked").read_text().split() if line != "run"]
    assert {*asked} == {*range(ROWS)}
    # Twice only what was under way when the job was killed, or ended and not yet written.
    again = len(asked) - ROWS
    assert again <= killed * 2 * CONCURRENCY, f"seed {seed}: {again} rows were asked again"
    assert sorted(tmp_path.glob(".*")) in ([], [tmp_path / ".out.parquet.jsonl.lock"])
    assert json.loads((tmp_path / "out.jsonl.job.json").read_bytes())["format"] == FORMAT
