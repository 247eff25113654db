"""A row's way from the question to its answer goes through few files."""

from __future__ import annotations

from tests.house.way import files_on_a_rows_way


def test_a_rows_way_goes_through_few_files() -> None:
    found = files_on_a_rows_way()
    assert {"lm.py", "runtime/batcher.py", "engines/exact.py"} <= {*found}
    assert len(found) <= 12
