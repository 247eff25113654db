"""The simulator: the runtime stands up to it, a seed is a run, and every fault reaches whom it concerns.

The fixed seeds are the same every time; a few fresh ones are tried in addition, and named in the output.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields

import pytest
import torch

from tests.simulation import soak
from tests.simulation.engine import Faults
from tests.simulation.simulation import Report, simulate

SEEDS = 120
"""The fixed seeds of one of two parts; each part comes to every corner by itself."""
OPERATIONS = 100
FRESH_SEEDS = 10

DIED = r"closed (the engine can't go on|the simulated engine died)"


@pytest.mark.promise(number=1)
@pytest.mark.promise(number=2)
@pytest.mark.promise(number=9)
@pytest.mark.promise(number=14)
@pytest.mark.promise(number=19)
@pytest.mark.promise(number=20)
@pytest.mark.promise(number=28)
@pytest.mark.parametrize("part", range(2))
def test_nothing_is_found_in_fixed_seeds_and_they_come_to_every_corner(part: int) -> None:
    """Everything that can happen to a question and in an engine has happened in some run."""
    reports = [
        simulate(seed, operations=OPERATIONS) for seed in range(part * SEEDS, (part + 1) * SEEDS)
    ]
    assert sum(report.operations for report in reports) >= OPERATIONS * SEEDS
    events: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for report in reports:
        for line in report.trace:
            events.update(re.findall(r"^[A-Za-z ]+?(?= |$)", line))
            events.update(
                re.findall(
                    r"step failed|submit failed|(?:Sample|Completion|Score)Request|[A-Z]\w+(?=, \[)",
                    line,
                )
            )
        for counts in (
            report.statistics.batcher,
            report.statistics.cache,
            report.statistics.engine,
        ):
            counted.update({field.name: getattr(counts, field.name) for field in fields(counts)})
    ends = {"answered", "CancelledError", "TimedOut", "Closed"}
    ends |= {"EngineFailed", "EngineDied", "OutOfMemory", "NotFinite"}
    asked = {
        "DrawToken",
        "TopTokens",
        "Candidates",
        "HostRow",
        "SampleRequest",
        "CompletionRequest",
        "ScoreRequest",
    }
    others = {"withdrawn", "closed", "restarted", "reopened", "step failed", "submit failed"}
    others |= {"streamed", "whole", "left", "dropped"}
    assert ends | asked | others <= set(events)
    of_other_engines = {"sampled_tokens", "computed_tokens", "bytes_to_host", "seconds"}
    of_other_engines |= {"prepared", "speculated", "kept_tokens", "extended", "forked", "evicted"}
    of_this_moment = {"queued", "in_flight", "waiting", "resident"}
    never = {name for name, count in counted.items() if not count}
    assert never <= of_other_engines | of_this_moment


def test_nothing_is_found_in_fresh_seeds() -> None:
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(FRESH_SEEDS)]
    print("fresh seeds:", *seeds)
    for seed in seeds:
        assert simulate(seed, operations=OPERATIONS).operations >= OPERATIONS


@pytest.mark.promise(number=36)
def test_populations_among_all_else() -> None:
    for seed in range(20):
        assert simulate(seed, populations=True).operations >= 100


@pytest.mark.promise(number=36)
@pytest.mark.parametrize("updates", [False, True])
def test_contexts_among_all_else(updates: bool) -> None:
    """They are answered as by content, disturb no other, and leave nothing."""
    reports = [
        simulate(n, operations=60, contexts=True, populations=n % 2 == 0, updates=updates)
        for n in range(20)
    ]
    assert sum(told(each, r"asked \d+ PopulationDraw") for each in reports) > 500


@pytest.mark.promise(number=34)
def test_updates_under_load_are_never_seen_in_part() -> None:
    """The weights are replaced while others ask, cancel and time out, engines fail and die: every answer
    is of one version, and of none from before it was asked."""
    reports = [simulate(seed, populations=seed % 2 == 0, updates=True) for seed in range(24)]
    assert sum(report.updates for report in reports) > 30
    assert simulate(3, updates=True) == simulate(3, updates=True)


@pytest.mark.proof
@pytest.mark.promise(number=34)
def test_a_thousand_updates_under_load_leave_no_stale_answer() -> None:
    done, seed = 0, 1000
    while done < 1000:
        done += simulate(seed, updates=True).updates
        seed += 1
    assert done >= 1000


def test_a_request_that_is_withdrawn_and_asked_anew_goes_behind_the_others() -> None:
    """In this run one loses its last waiter, and gets another, between two looks at what is ready."""
    assert simulate(1018367613380, operations=300, texts=False).operations >= 300


def test_a_seed_is_a_run() -> None:
    assert simulate(3) == simulate(3)
    assert simulate(3).trace != simulate(4).trace


def test_a_seed_is_the_same_run_in_another_process() -> None:
    code = "from tests.simulation.simulation import simulate; print(*simulate(5).trace, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert tuple(done.stdout.splitlines()) == simulate(5).trace


def test_a_run_leaves_no_trace_on_torch() -> None:
    before = torch.get_rng_state()
    simulate(0)
    assert torch.equal(torch.get_rng_state(), before)


# -- faults, one by one -------------------------------------------------------------------------------


def told(report: Report, event: str) -> int:
    return sum(re.match(event, line) is not None for line in report.trace)


@pytest.mark.promise(number=6)
@pytest.mark.promise(number=8)
@pytest.mark.parametrize(
    ("call", "calls", "event"),
    [
        ("submit", 10, "submit failed"),
        ("step", 10, "step failed"),
        ("cancel", 4, "cancel failed"),
    ],
)
def test_a_fault_at_any_call_reaches_those_it_concerns(call: str, calls: int, event: str) -> None:
    """The k-th call fails, for every k: the ledger knows whom that concerns, and that the next works."""
    for number in range(1, calls + 1):
        runs = (simulate(seed, faults=Faults(at_call={call: number})) for seed in range(100))
        assert next(told(report, event) for report in runs if told(report, event)) > 0


@pytest.mark.parametrize("fitting", range(5))
def test_a_step_above_any_size_runs_out_of_memory(fitting: int) -> None:
    reports = [
        simulate(seed, operations=60, faults=Faults(out_of_memory_above=fitting))
        for seed in range(10)
    ]
    assert sum(told(report, "step failed") for report in reports) > 0
    assert sum(told(report, "answered") for report in reports) > 0 or fitting == 0


def test_an_engine_that_dies_ends_everyone() -> None:
    reports = [simulate(seed, operations=60, faults=Faults(death=0.1)) for seed in range(20)]
    died = [told(report, DIED) for report in reports]
    restarted = [told(report, "restarted") for report in reports]
    assert sum(died) > 2
    assert max(restarted) > 1
    assert all(
        told(report, "EngineDied") for report, ended in zip(reports, died, strict=True) if ended
    )


def test_poisoned_contexts_fail_alone() -> None:
    reports = [simulate(seed, operations=60, faults=Faults(not_finite=0.5)) for seed in range(20)]
    assert sum(told(report, "NotFinite") for report in reports) > 0
    assert sum(told(report, "answered") for report in reports) > 0
    assert sum(report.statistics.batcher.failed for report in reports) > 0


# -- soaking --------------------------------------------------------------------------------------------


def test_soaking_goes_on_until_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seconds", "0", "--operations", "20", "--seed", "5"]) == 0
    assert re.search(r"1 seeds from 5 on, \d+ operations", capsys.readouterr().out)
