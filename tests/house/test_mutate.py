"""mutate.py breaks a source in every way it knows, and tells the outcomes apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutate import broken, count_breaks, mutate

SOURCE = """
def add(a, b):
    checked(a, b)
    if a is None or b < 0:
        return 0
    return a + b


def checked(a, b):
    assert (a, b) != (3, 3)
"""

TESTS = """
import sums
def test_sums():
    assert (sums.add(2, 2), sums.add(2, 0), sums.add(2, -1), sums.add(None, 1)) == (4, 2, 0, 0)
"""


def test_each_break_changes_one_place() -> None:
    found = [broken(SOURCE, number) for number in range(count_breaks(SOURCE))]
    assert [what for _, what in found] == [
        "line 3: checked(a, b)",
        "line 4: a is None or b < 0",
        "line 4: a is None",
        "line 4: b < 0",
        "line 6: a + b",
        "line 10: (a, b) != (3, 3)",
    ]
    assert len({source for source, _ in found}) == len(found)
    assert "if a is None and b < 0" in found[1][0]


def test_killed_and_survived_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "sums.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(TESTS)
    lines: list[str] = []
    given = "sums.py", ["tests/test_sums.py"]
    assert mutate(tmp_path, *given, numbers=[0, 4], report=lines.append) == 1
    assert lines[0].startswith("SURVIVED ")
    assert lines[0].endswith("0: line 3: checked(a, b): every test passed")
    assert lines[1].endswith("4: line 6: a + b: test_sums.py::test_sums")
    assert lines[2] == "1 killed, 1 survived, 0 broken"
    (tmp_path / "sums.py").write_text(SOURCE.replace("a + b", "a + b + 1"))
    assert mutate(tmp_path, *given, numbers=[4], report=lines.append) == 2
    assert "do not pass on unbroken source" in lines[-1]
