"""An interrupt at any moment leaves no ghost requests: SIGINT at every eighth line of genrt on the exact
engine, and at forty-eight moments on vLLM. Then rows are right, nothing is queued or in flight, the
engine works on nothing, and no waiter is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import children

pytestmark = [pytest.mark.proof, pytest.mark.vllm, pytest.mark.promise(number=10)]

PROGRAMS = {
    "every eighth line, on the exact engine": """
        from genrt.engines.exact import NGram
        for room, stride in ((100_000, 8), (4, 24)):  # of four places: questions wait for room
            lm = genrt.load(
                NGram.random(80, order=2), engine="exact", cache_bytes=0, max_queued_requests=room
            )
            examination = interrupts.Examination(lm)
            for name, program in interrupts.PROGRAMS.items():
                for number in itertools.count(room % 7, stride):
                    wrong = examination.interrupt(program, interrupts.at_line(number))
                    if wrong is None:
                        break
                    told(name, wrong)
            lm.close()
    """,
    "forty-eight moments, on vLLM": """
        options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
        with genrt.load(model, engine_options=options, cache_bytes=0) as lm:
            examination = interrupts.Examination(lm)
            choose = random.Random(0)
            lines = interrupts.at_line
            steps = functools.partial(interrupts.at_step, engine_of(lm))
            for name, program in interrupts.PROGRAMS.items():
                for kind, count in ((lines, 9), (steps, 3)):
                    last = examination.moments(program, kind(0))
                    for number in choose.choices(range(1, last // 2), k=count):
                        told(name, examination.interrupt(program, kind(number)))
    """,
}
"""Every other run of a program may have fewer steps or lines than the one that was counted."""

BEFORE = """
import atexit, collections, functools, itertools, json, random
import genrt
from tests import interrupts
from tests.inside import engine_of

counts, wrongs = collections.Counter(), []
atexit.register(lambda: print(json.dumps([counts, wrongs])))

def told(name, wrong):
    counts[name] += 1
    if wrong != "":
        wrongs.append(f"{name}: {wrong}")
"""


@pytest.fixture(scope="module")
def ends(llama: Path) -> dict[str, children.End]:
    return children.run(PROGRAMS, before=BEFORE, model=str(llama))


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_at_any_moment_leaves_no_ghosts(
    ends: dict[str, children.End], name: str
) -> None:
    assert ends[name].status == 0, ends[name].err
    counts, wrongs = json.loads(ends[name].out)
    assert wrongs == []
    assert len(counts) == 4
    least = 12 if "vLLM" in name else 60
    assert min(counts.values()) >= least, counts
