"""PROMISES.md: tests prove every promise, and every marker names a promise."""

from __future__ import annotations

from tests import promises

NUMBERS = {*range(1, 32), *range(34, 41)} - {37}


def test_every_promise_has_a_number_and_is_proved_by_a_test() -> None:
    promised = promises.promised(promises.DOCUMENT.read_text(encoding="utf-8"))
    assert promised.keys() == NUMBERS
    assert promises.collected().keys() == NUMBERS


def test_promises_are_read_with_all_of_their_lines() -> None:
    text = "**A**\n\n1. One\n    and more.\n2. Two.\n\nEnd.\n"
    assert promises.promised(text) == {1: "One and more.", 2: "Two."}


def test_the_list_has_the_tests_of_each_promise() -> None:
    proofs: dict[int, promises.Proofs] = {
        2: {"c.py": ["w"]},
        1: {"b.py": ["x", "y"], "a.py": ["z"]},
    }
    assert promises.listed(proofs).splitlines()[2:5] == [
        "**1** — `a.py`: `z`; `b.py`: `x`, `y`",
        "",
        "**2** — `c.py`: `w`",
    ]


def test_the_summary_has_a_line_for_each_promise_and_sees_what_is_broken() -> None:
    outcomes = [(2, "passed"), (1, "passed"), (2, "failed"), (2, "passed")]
    lines = list(promises.summary(outcomes, {1: "One.", 2: "Two."}))
    assert lines == [" 1  kept    One.  (1 passed)", " 2  BROKEN  Two.  (1 failed, 2 passed)"]
