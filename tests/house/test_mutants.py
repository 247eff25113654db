"""The mutation list still applies to the source, and what replays it tells the outcomes apart."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import Mutant
from tests.mutate import MUTANTS, ROOT, judge, main, mutate


def named(mutant: Mutant) -> str:
    return mutant.name.replace(" ", "_")


@pytest.mark.parametrize("mutant", MUTANTS, ids=named)
def test_a_mutant_applies_and_compiles(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    broken = mutant.applied(source)
    assert broken != source
    compile(broken, mutant.file, "exec")
    assert mutant.tests
    assert [tests for tests in mutant.tests if not (ROOT / tests).is_file()] == []


def test_there_are_many_of_many_kinds() -> None:
    assert len(MUTANTS) >= 30
    names = Counter(f"{mutant.file}: {mutant.name}" for mutant in MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []
    files = {mutant.file for mutant in MUTANTS}
    most = (
        "runtime/batcher",
        "runtime/cache",
        "inference/smc",
        "questions/values",
        "engines/residency",
        "engines/vllm/capture",
    )
    assert {f"genrt/{name}.py" for name in most} <= files


def test_old_text_that_is_not_there_once_is_an_error() -> None:
    mutant = Mutant("adds twice", "sums.py", "a + b", "a + 2 * b", ())
    assert mutant.applied("return a + b") == "return a + 2 * b"
    for source in ("return a - b", "return a + b + (a + b)"):
        with pytest.raises(ValueError, match=r"sums\.py: adds twice: found \d times: 'a \+ b'"):
            mutant.applied(source)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one function, and its test."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_two_and_two():\n    assert add(2, 2) == 4\n"
    )
    return tmp_path


def of_sums(name: str, new: str) -> Mutant:
    return Mutant(name, "sums.py", "return a + b", new, ("tests/test_sums.py",))


def test_killed_survived_and_broken_are_told_apart(small: Path) -> None:
    mutants = [
        of_sums("subtracts", "return a - b"),
        of_sums("multiplies", "return a * b"),
        of_sums("has another name", "return a + b\n\nadd_, add = add, None\ndel add"),
    ]
    lines: list[str] = []
    assert mutate(small, mutants, report=lines.append) == 1
    assert lines[0] == "selections of tests that pass on unbroken source: 1"
    assert lines[-1] == "1 killed, 1 survived, 1 broken"
    [killed] = [line for line in lines if line.startswith("killed ")]
    assert killed.endswith("sums.py: subtracts: test_sums.py::test_two_and_two")
    [survived] = [line for line in lines if line.startswith("SURVIVED ")]
    assert survived.endswith("sums.py: multiplies: every test passed")
    [broken] = [line for line in lines if line.startswith("BROKEN ")]
    assert "sums.py: has another name: pytest exited with 2: " in broken
    assert "a + b" in (small / "sums.py").read_text(), "the checkout itself is left alone"


def test_all_killed_is_success(small: Path) -> None:
    lines: list[str] = []
    assert mutate(small, [of_sums("subtracts", "return a - b")], report=lines.append) == 0
    assert lines[-1] == "1 killed, 0 survived, 0 broken"


def test_tests_that_fail_as_it_is_show_nothing(small: Path) -> None:
    (small / "sums.py").write_text("def add(a, b):\n    return a + b + 1\n")
    lines: list[str] = []
    assert mutate(small, [of_sums("subtracts", "return a - b")], report=lines.append) == 2
    [line] = lines
    assert line.startswith("tests/test_sums.py  does not pass on unbroken source:\n")


def test_tests_that_do_not_end_kill_and_the_source_is_put_back(small: Path) -> None:
    endless = of_sums("never ends", "while True:\n        pass")
    verdict = judge(endless, small, 0.5, threading.Event())
    assert (verdict.kind, verdict.why) == ("killed", "the tests did not end")
    assert (small / "sums.py").read_text() == "def add(a, b):\n    return a + b\n"


def test_mutants_are_chosen_by_the_words_in_their_files_and_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--list", "itself, a view", "inference/resampling.py: a weight of 0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "genrt/runtime/cache.py: the cache keeps the step's row itself, a view",
        "genrt/inference/resampling.py: a weight of 0 has children",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["--list", "no such mutant"])
    assert ended.value.code == 2
