"""A row's way from the question to its answer is few calls in few files."""

from __future__ import annotations

from tests.house.way import calls_on_a_rows_way


def test_a_rows_way_is_few_calls_in_few_files() -> None:
    found = calls_on_a_rows_way()
    assert {"lm.py", "runtime/batcher.py", "engines/exact.py"} <= {*found}
    assert len(found) <= 10
    assert found.total() <= 80
