"""PROMISES.md: every promise is carried by tests, and the table names exactly these."""

from __future__ import annotations

import pytest

from tests import promises

NUMBERS = [*range(1, 32), 34, 35, 36, 38]


@pytest.fixture(scope="module")
def rewritten() -> str:
    """The document as ``python -m tests.promises`` would write it."""
    return promises.written(promises.DOCUMENT.read_text(encoding="utf-8"), promises.collected())


def test_every_promise_has_a_number_and_is_proved_by_a_test(rewritten: str) -> None:
    rows = promises.ROW.findall(rewritten)
    assert [int(number) for number, _, _ in rows] == NUMBERS
    assert [promise for _, promise, proofs in rows if not proofs] == []


def test_the_table_names_the_tests_that_prove_each_promise(rewritten: str) -> None:
    table = promises.DOCUMENT.read_text(encoding="utf-8")
    assert table == rewritten, "run python -m tests.promises"


def test_the_table_is_written_from_the_proofs() -> None:
    before = "| | promise |\n| 1 | One. | old |\n| 22 | Two. |  |\n"
    proofs: dict[int, promises.Proofs] = {1: {"b.py": ["x", "y"], "a.py": ["z"]}, 9: {"c.py": []}}
    after = promises.written(before, proofs)
    assert after.splitlines()[1:] == [
        "| 1 | One. | [a.py](a.py): `z`<br>[b.py](b.py): `x`, `y` |",
        "| 22 | Two. |  |",
    ]
    assert promises.promised(after) == {1: "One.", 22: "Two."}


def test_the_summary_has_a_line_for_each_promise_and_sees_what_is_broken() -> None:
    outcomes = [(2, "passed"), (1, "passed"), (2, "failed"), (2, "passed")]
    lines = list(promises.summary(outcomes, {1: "One.", 2: "Two."}))
    assert lines == [" 1  kept    One.  (1 passed)", " 2  BROKEN  Two.  (1 failed, 2 passed)"]
