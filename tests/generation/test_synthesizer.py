"""NeMo Safe Synthesizer's loop: the cases of its public unit tests as data, on ``generate_valid``."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from genrt.errors import InvalidRequest
from genrt.generation import Records, generate_valid, generate_valid_sync, valid
from genrt.lm import AsyncLM
from tests.generation.test_valid import opened

BATCH = 100
"""The attempts of a batch of the reference, and of a run with a target from 100."""

GOOD = [False] * 25 + [True] * 75
"""The records of a batch of which a quarter is invalid, as of the reference's stub."""

BAD = [False] * BATCH


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with opened(0.5, more=0.0) as runtime:
        yield runtime


def run(lm: AsyncLM, batches: Iterable[list[bool]], **options: Any) -> Records:
    """Run until the batches end; each attempt has the next record."""
    answers = [*itertools.chain(*batches)]
    given: dict[str, Any] = {"target": 10 * BATCH, "max_attempts": len(answers)}
    judged = iter(answers)
    return generate_valid_sync(lm, "?", lambda _: next(judged), **(given | options))


RULES: dict[str, dict[str, Any]] = {
    "none": {"max_dry_attempts": BATCH},
    "strict": {"invalid_threshold": 0.2, "patience": 3},
    "strictest": {"invalid_threshold": 0.01, "patience": 1},
    "lenient": {"invalid_threshold": 0.9, "patience": 3, "max_dry_attempts": BATCH},
}
"""``max_dry_attempts=100`` ends a run after a batch without a valid record, as the reference ends."""

ENDINGS: list[tuple[list[list[bool]], str, str, int]] = [
    ([GOOD, GOOD], "none", "out_of_attempts", 2 * BATCH),  # in progress
    ([GOOD, BAD], "none", "no_valid", 2 * BATCH),
    ([BAD, GOOD], "none", "no_valid", BATCH),
    ([GOOD, GOOD], "strictest", "threshold", BATCH),
    ([BAD, GOOD], "lenient", "no_valid", BATCH),
    ([GOOD, BAD, GOOD, GOOD], "strict", "threshold", 3 * BATCH),
    ([GOOD, [*GOOD[::-1]], GOOD], "lenient", "out_of_attempts", 3 * BATCH),
    # The reference compares the mean over all batches, genrt each batch: a late fall ends a run sooner.
    ([GOOD] * 5 + [BAD] * 3, "lenient", "no_valid", 6 * BATCH),
    ([BAD, GOOD, GOOD, GOOD], "strict", "threshold", 3 * BATCH),
]


@pytest.mark.parametrize(("batches", "rules", "reason", "attempts"), ENDINGS)
def test_a_run_ends_for_the_references_reasons(
    lm: AsyncLM, batches: list[list[bool]], rules: str, reason: str, attempts: int
) -> None:
    found = run(lm, batches, **RULES[rules])
    assert (found.reason, found.statistics.attempts) == (reason, attempts)
    records = [*itertools.chain(*batches)][:attempts]
    assert found.statistics.valid == records.count(True)  # a run that ends early keeps its records
    assert len(found.records) == records.count(True)
    assert found.statistics.invalid_fraction == records.count(False) / attempts


def test_threshold_and_patience_go_together(lm: AsyncLM) -> None:
    wrong: list[Any] = [{"patience": 3}, {"invalid_threshold": 0.5}]
    for rule in wrong:
        with pytest.raises(InvalidRequest, match="give both invalid_threshold and patience"):
            run(lm, [GOOD], **rule)


def three_of_four(text: str) -> list[bool]:
    return [True, True, False, True]


@pytest.mark.parametrize(
    ("target", "attempts", "reason", "kept", "surplus"),
    [(2, 1, "complete", 2, 1), (20, 7, "complete", 20, 1), (9, 3, "complete", 9, 0)],
)
def test_prompts_follow_the_yield_and_further_records_are_apart(
    target: int, attempts: int, reason: str, kept: int, surplus: int
) -> None:
    """A text has three valid records and an invalid one. The reference starts 100 texts."""
    with opened(0.5, more=0.0) as lm:
        found = generate_valid_sync(
            lm, "?", lambda record: record, target=target, parse=three_of_four
        )
        started = lm.statistics().batcher.questions
    assert (found.reason, found.statistics.attempts) == (reason, attempts)
    assert (len(found.records), len(found.surplus)) == (kept, surplus)
    assert attempts <= started <= min(10, target)
    assert found.statistics.errors == {"refused": attempts}


def test_an_incomplete_run_has_its_records(lm: AsyncLM) -> None:
    texts = {"parse": three_of_four}
    options: dict[str, Any] = {"target": 20, "max_attempts": 2, **texts}
    found = generate_valid_sync(lm, "?", lambda record: record, **options)
    assert (found.reason, len(found.records), found.statistics.valid) == ("out_of_attempts", 6, 6)
    nothing = generate_valid_sync(lm, "?", lambda record: False, **options)
    assert (nothing.records, nothing.statistics.invalid) == ((), 8)


def test_rules_between_columns_are_faults_by_their_names(lm: AsyncLM) -> None:
    """Five records by two texts: two break an order of dates, one has an unknown role."""
    people = [
        {"id": 1, "start": "2024-01-01", "end": "2023-01-01", "role": "intern"},
        {"id": 2, "start": "2024-01-02", "end": "2023-01-01", "role": "fulltime"},
        {"id": 3, "start": "2024-01-03", "end": "2024-05-03", "role": "intern"},
        {"id": 4, "start": "2024-01-04", "end": "2024-05-04", "role": "contractor"},
        {"id": 5, "start": "2024-01-05", "end": "2024-05-05", "role": "fulltime"},
    ]

    class DateConstraint(ValueError):
        pass

    class CategoricalColumn(ValueError):
        pass

    def validate(person: dict[str, Any]) -> dict[str, Any]:
        if person["start"] >= person["end"]:
            raise DateConstraint(f"it ends at {person['end']}")
        if person["role"] not in ("intern", "fulltime"):
            raise CategoricalColumn(person["role"])
        return person | {"days": 121}  # a rule may change a record too

    texts = iter([people[:3], people[3:]])
    found = generate_valid_sync(
        lm, ["?"], validate, target=9, max_attempts=2, parse=lambda _: next(texts)
    )
    assert [(person["id"], person["days"]) for person in found.records] == [(3, 121), (5, 121)]
    assert found.statistics.errors == {"DateConstraint": 2, "CategoricalColumn": 1}
    assert (found.statistics.valid, found.statistics.invalid) == (2, 3)


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
async def test_a_run_logs_its_progress_while_no_bar_shows_it(
    lm: AsyncLM, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judged = itertools.count()

    async def validate(text: str) -> bool:
        for _ in range(100):  # passes of the loop: the beat comes with one of the first
            await asyncio.sleep(0)
        if next(judged) > 2:
            raise NameError("the validator is faulty")
        return True

    monkeypatch.setattr(valid, "BEAT_SECONDS", 1e-9)
    bar = level == "DEBUG"
    with caplog.at_level(level, "genrt.generation"), pytest.raises(NameError):
        await generate_valid(lm, "?", validate, target=20, progress=bar)
    said = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert {name for name, _ in said} == {level}
    assert said[0][1] == "0 of 20 records are valid, after 0 attempts and 0 seconds"
    assert said[-1][1].startswith("3 of 20 records are valid, after 3 attempts")
    assert not any("?" in message for _, message in said)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_without_a_heartbeat_due_a_run_logs_nothing(
    lm: AsyncLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "genrt.generation"):
        await generate_valid(lm, "?", bool, target=2)
    assert caplog.records == []
